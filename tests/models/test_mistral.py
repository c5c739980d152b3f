"""Mistral: logits are those of transformers, and drafts change no token, by position in windows.

The golden checkpoint has a window of 5, and prompts of 12 and 9 tokens.
"""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.programs import change_dense
from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.drafts.mtp import init_head_params

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "engine"))
from test_parity import GOLDEN, run_all  # noqa: E402
from tiny import apt, prompts_of, tiny_config, tiny_model  # noqa: E402

WINDOW, EOS, MAX_LEN = 5, 7, 48


def windows(cfg) -> list[int | None]:
    return [layer.mixer.window for layer in cfg.layers]


@pytest.mark.parametrize("layout", ["scanned", "unrolled"])
def test_logits_equal_those_of_transformers_beyond_the_window(layout):
    golden = np.load(GOLDEN / "mistral" / "golden.npz")
    cfg, params, _ = hf.load_checkpoint(GOLDEN / "mistral", param_dtype="float32")
    arrays = golden["tokens"], golden["lengths"], golden["tree_tokens"]
    trained, prefilled, decoded = run_all(cfg, params, *arrays, layout)
    for b, length in enumerate(golden["lengths"]):
        expected = golden["logits"][b, :length]
        np.testing.assert_allclose(trained[b, :length], expected, atol=1e-4, rtol=0)
        np.testing.assert_allclose(prefilled[b, :length], expected, atol=1e-4, rtol=0)
    np.testing.assert_allclose(decoded, golden["tree_logits"], atol=1e-4, rtol=0)
    if layout == "unrolled":
        return
    for window in (WINDOW + 1, None):
        found = run_all(change_dense(cfg, window=window), params, *arrays, layout)
        for logits, expected in zip(found, ("logits", "logits", "tree_logits"), strict=True):
            assert np.abs(logits[0] - golden[expected][0]).max() > 0.01, window


def test_a_config_says_whether_there_is_a_window(folder, edit_json, tmp_path):
    path = folder("mistral")
    cfg = hf.read_config(path)
    assert cfg.model_type == "mistral" and windows(cfg) == [WINDOW] * 2
    mixer = cfg.layers[0].mixer
    assert (mixer.head_dim, mixer.qkv_bias, mixer.qk_norm) == (16, False, False)
    edit_json(path / "config.json", sliding_window=...)
    assert windows(hf.read_config(path)) == [4096] * 2
    edit_json(path / "config.json", sliding_window=None, head_dim=None)
    assert windows(hf.read_config(path)) == [None] * 2
    assert hf.read_config(path).layers[0].mixer.head_dim == 8
    edit_json(path / "config.json", num_key_value_heads=...)
    with pytest.raises(hf.CheckpointError, match="num_key_value_heads"):
        hf.read_config(path)  # 8, and there are 4 query heads
    edit_json(
        path / "config.json", num_key_value_heads=2,
        layer_types=["full_attention", "sliding_attention"],
    )  # fmt: skip
    with pytest.raises(hf.UnsupportedModelError, match="layer_types sliding_attention"):
        hf.read_config(path)


@pytest.mark.parametrize("window", [WINDOW, None])
def test_what_is_written_is_read_again(window, tmp_path):
    cfg, params, _ = hf.load_checkpoint(GOLDEN / "mistral")
    cfg = change_dense(cfg, window=window)
    hf.save_checkpoint(tmp_path / "out", cfg, params)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == window
    again, loaded, head = hf.load_checkpoint(tmp_path / "out")
    assert again == cfg and head is None
    np.testing.assert_array_equal(loaded["layers"]["q"], params["layers"]["q"])
    full = dataclasses.replace(cfg.layers[0].mixer, window=9)
    mixed = cfg.replace(layers=(cfg.layers[0], dataclasses.replace(cfg.layers[0], mixer=full)))
    with pytest.raises(hf.UnsupportedModelError, match="the same window in all layers"):
        hf.save_checkpoint(tmp_path / "mixed", mixed, params)


@pytest.fixture(scope="module")
def model():
    """A model whose window is much shorter than its sequences, and a head that guesses well."""
    cfg = tiny_config(64, eos_token_ids=(EOS,), model_type="mistral", qk_norm=False, window=WINDOW)
    cfg, params, _ = tiny_model(cfg, seed=1)
    return cfg, params, apt(init_head_params(cfg, 2), cfg)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [SpecConfig("5_3_12"), SpecConfig("2x2", invariant=True)],
    ids=["dynamic tree", "invariant"],
)
def test_tokens_are_those_of_plain_decoding(spec, model):
    prompts = prompts_of(6, 64, seed=3, shortest=1, longest=14)
    params = [SamplingParams(max_tokens=30, seed=i, ignore_eos=True) for i in range(6)]
    llm = LLM(model, spec, max_batch=3, max_len=MAX_LEN)
    drafted = llm.generate(prompts, params)
    assert llm.totals.accepted > 20, "too little was accepted to prove anything"
    plain = llm.generate(prompts, [dataclasses.replace(p, speculative=False) for p in params])
    for one, other in zip(drafted, plain, strict=True):
        assert one.samples[0].token_ids == other.samples[0].token_ids
        if spec.invariant:
            assert one.samples[0].logprobs == other.samples[0].logprobs
