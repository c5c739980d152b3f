"""config.json: both dialects read the same, and what is not implemented is refused by name."""

import json

import pytest

from specjax.config import RopeScaling
from specjax.models import hf

FAMILIES = ("llama", "qwen2", "qwen3", "mimo")


@pytest.mark.parametrize("family", FAMILIES)
def test_both_config_dialects_read_the_same(family, folder, edit_json):
    path = folder(family)
    new = hf.read_config(path)
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    scaling = None if rope["rope_type"] == "default" else rope
    edit_json(
        path / "config.json",
        rope_parameters=...,
        dtype=...,
        layer_types=...,
        rope_theta=theta,
        rope_scaling=scaling,
        torch_dtype="bfloat16",
    )
    assert hf.read_config(path) == new
    assert new.param_dtype == "bfloat16"
    assert new.rope_scaling == (RopeScaling(8.0, 1.0, 4.0, 16) if family == "llama" else None)
    assert (new.qkv_bias, new.qk_norm) == (family in ("qwen2", "mimo"), family == "qwen3")
    assert new.tie_embeddings == (family in ("qwen2", "qwen3"))
    assert new.head_dim == (16 if family == "qwen3" else 8)


def test_mimo_config_says_hidden_first_and_counts_its_mtp_layers(folder):
    cfg = hf.read_config(folder("mimo"))
    assert (cfg.mtp_num_layers, cfg.mtp_concat) == (1, "hidden_first")


def test_end_of_sequence_ids_of_both_files_are_merged(folder, edit_json):
    path = folder("qwen3")
    edit_json(path / "config.json", eos_token_id=7)
    edit_json(path / "generation_config.json", eos_token_id=[9, 7], pad_token_id=4)
    cfg = hf.read_config(path)
    assert cfg.eos_token_ids == (7, 9)
    assert (cfg.bos_token_id, cfg.pad_token_id) == (1, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt_oss"}, "'gpt_oss'.*llama, qwen2, qwen3, mimo"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 4.0}}, "yarn"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding"),
        (
            {
                "layer_types": ...,
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
            },
            "sliding window of 8",
        ),
        ({"num_experts": 8}, "mixture of experts"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, words, folder, edit_json):
    path = folder("qwen2")
    edit_json(path / "config.json", **changes)
    with pytest.raises(hf.UnsupportedModelError, match=words):
        hf.read_config(path)


def test_a_sliding_window_that_no_layer_uses_is_accepted(folder, edit_json):
    path = folder("qwen2")
    window = {"layer_types": ..., "sliding_window": 8, "max_window_layers": 28}
    edit_json(path / "config.json", **window, use_sliding_window=True)
    assert hf.read_config(path).num_layers == 2


def test_config_problems_are_clear_errors(folder, tmp_path, edit_json):
    with pytest.raises(hf.CheckpointError, match="config.json does not exist"):
        hf.load_checkpoint(tmp_path)
    path = folder("llama")
    edit_json(path / "config.json", hidden_size=...)
    with pytest.raises(hf.CheckpointError, match="lacks the key 'hidden_size'"):
        hf.read_config(path)
    (path / "config.json").write_text("{ not json")
    with pytest.raises(hf.CheckpointError, match="cannot be read as JSON"):
        hf.read_config(path)
