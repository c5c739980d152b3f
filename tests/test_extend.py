"""Every example of docs/extend.md runs, from outside of the package and by its dotted path.

To add the section of a kind: write `## Kind` into the page, with its files as blocks of Python that
begin with `# name_of_file.py`, and add a test here whose name begins with `test_kind_` (in lower
case), which names the example by its path `name_of_file:NAME` where a user would, in a keyword, a
flag or a key. The fixture `examples` makes the files importable, and gives the directory that they
are in.
"""

import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import logging
import re
import sys
from pathlib import Path
from typing import Protocol

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from safetensors.numpy import load_file

from serve.cli.arguments import GenerateConfig
from serve.cli.main import main
from specjax import LLM, EngineConfig, SamplingParams, SpecConfig, interfaces
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.huggingface import config_json
from specjax.checkpoint.weights import load_model
from specjax.command_line import parse_config
from specjax.config import ModelConfig
from specjax.config.model import Layer, LogitForm
from specjax.drafts.mtp import MTPSource
from specjax.engine.sources import settle_draft, source_of
from specjax.interfaces import Param
from specjax.kernels.backend import choose
from specjax.models.families import add_family
from specjax.models.families.dense import dense_config
from specjax.models.mixers.attention import Attention
from specjax.models.mlps.dense import Dense
from specjax.models.rows import layer_rows
from specjax.models.transformer import init_params
from specjax.registry import FAMILIES, Registry
from specjax.weights import matrix
from train import rl
from train.data import __main__ as data_report
from train.data import rows as data
from train.rewards.scoring import Scorer
from train.run.files import read_metrics
from train.schema import DataConfig

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/extend.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
FILES = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.M | re.S))


def kinds() -> set[str]:
    """The protocols of what can be added, backends, and rewards, which are plain functions."""
    classes = inspect.getmembers(interfaces, inspect.isclass)
    protocols = {name for name, cls in classes if Protocol in cls.__bases__}
    return {"Reward", "Backend"} | protocols


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """The directory with the page's files, which can be imported."""
    directory = tmp_path_factory.mktemp("outside")
    assert ROOT not in directory.resolve().parents
    for name, text in FILES.items():
        (directory / name).write_text(f"# {name}\n{text}", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        importlib.invalidate_caches()
        yield directory
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_every_protocol_has_a_section_with_a_file_and_a_test():
    assert SECTIONS.keys() == kinds()
    tests = [name for name in globals() if name.startswith("test_")]
    for kind, text in SECTIONS.items():
        assert re.search(r"^```python\n# \w+\.py\n", text, re.M), f"{kind} has no example"
        assert any(t.startswith(f"test_{kind.lower()}_") for t in tests), f"{kind} has no test"


def test_every_file_of_the_page_is_a_block_of_its_own_and_is_run():
    blocks = re.findall(r"^```python$", PAGE, re.M)
    assert len(blocks) == len(FILES)  # each begins with its name, and no name is there twice
    source = Path(__file__).read_text(encoding="utf-8")
    for name in FILES:
        assert f"{name.removesuffix('.py')}:" in source, f"no test names what is in {name}"


# --- drafts ---------------------------------------------------------------------------------------


def test_draft_of_ones_own_changes_no_token_and_is_accepted(examples, thin_policy):
    words = ["--model=d", "--draft", "my_draft:Repeat", "--strategy", "2_1_3"]
    spec = parse_config(GenerateConfig, words)[0].spec()
    llm, plain = (LLM(thin_policy, s, max_batch=2, max_len=64) for s in (spec, None))
    assert "draft: my_draft:Repeat; always 2_1_3" in llm.drafting.described()
    often = SamplingParams(temperature=0.8, max_tokens=24, seed=5, logit_bias={7: 6.0})
    found = []
    for each in (llm, plain):
        outputs = each.generate([[3, 3, 3], [5, 1]], [often, SamplingParams(0.0, max_tokens=24)])
        found.append([output.samples[0].token_ids for output in outputs])
    assert found[0] == found[1]
    assert llm.totals.accept_length > 1.2


def test_draft_that_cannot_be_had_is_refused_by_name(examples):
    with pytest.raises(ValueError, match="cannot load draft source 'my_draft:Nothing'"):
        source_of(None, SpecConfig(draft="my_draft:Nothing"))
    with pytest.raises(ValueError, match="expected auto, checkpoint, random, ngram, the directory"):
        settle_draft(SpecConfig(draft="repeat"), None, MTPSource)


# --- objectives, tasks and rewards ----------------------------------------------------------------

SETTINGS = {
    "data.task": "my_task:TASK",
    "reward": "my_reward:reward",
    "algo.objective": "my_objective:Reinforce",
    "algo.floor": -2.0,
    "algo.dynamic_sampling": "false",
    "steps": 1,
    "checkpoint.export": "false",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A file of riddles."""
    riddles = [{"riddle": f"{n}+4=", "word": f"({n + 4})", "hint": "s"} for n in range(10)]
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in riddles))
    return path


@pytest.fixture(scope="module")
def run(examples, rows, thin_policy, tmp_path_factory):
    """What one step of `train.rl` with all three of them said, and its metrics."""
    out, said = tmp_path_factory.mktemp("rl") / "run", io.StringIO()
    with contextlib.redirect_stdout(said):
        rl.main(tiny_run.arguments(thin_policy, out, **SETTINGS, **{"data.path": rows}))
    [metrics] = read_metrics(out)
    return said.getvalue(), metrics


def test_objective_of_ones_own_trains_with_its_own_options(run):
    _, metrics = run
    assert 0 < metrics["train/floored"] < 1  # with the default of `floor` it would be 0
    assert metrics["train/loss"] == metrics["train/policy_loss"] != 0
    assert metrics["train/grad_norm"] > 0 and "train/clip_fraction" not in metrics


def test_task_of_ones_own_reads_the_rows_of_a_run(run, examples, rows, thin_policy, capsys):
    said, _ = run
    assert "10 rows read as riddles (riddle, word)" in said
    data_report.main([str(rows), "--model", str(thin_policy), "task=my_task:TASK"])
    shown = capsys.readouterr().out
    assert "gold answer '(5)'" in shown and "1+4=\nWord:" in shown and "reward exact" in shown


def test_reward_of_ones_own_sees_the_columns_of_the_row(run, rows):
    _, metrics = run
    assert 0 < metrics["rollout/reward"] < 1 and metrics["reward/failed"] == 0
    problem = data.problems(DataConfig(path=str(rows), task="my_task:TASK"), "train")[0]
    scorer, hint = Scorer("my_reward:reward"), problem.columns["hint"]
    earned = [scorer(text, problem).value for text in (f" {problem.answer} ", f"an {hint}", "no")]
    assert earned == [1, 0.5, 0]


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_mixer_of_ones_own_generates_with_drafts_what_it_generates_without(examples, tmp_path):
    mixers = Registry("mixer", {}, "a specjax.interfaces.Mixer")
    mixer = mixers.find("my_mixer:LeakySum")(16)
    layers = Layer(mixer, Dense(48)), Layer(Attention(4, 2, 8), Dense(48))
    cfg = ModelConfig(vocab_size=64, hidden_size=16, layers=layers)
    params = SamplingParams(max_tokens=24, temperature=0)
    found = []
    for spec in (None, SpecConfig("2_1_3", draft="ngram")):
        llm = LLM((cfg, init_params(cfg, 1), None), spec, max_batch=1, max_len=64)
        found.append(llm.generate([[3, 5, 8, 3, 5]], params)[0].samples[0].token_ids)
    assert found[0] == found[1] and len(found[0]) == 24
    with pytest.raises(hf.UnsupportedModelError, match="'qwen3' has Attention .* got LeakySum"):
        hf.save_checkpoint(tmp_path / "saved", cfg, init_params(cfg))
    assert not (tmp_path / "saved").exists()


def test_mlp_of_ones_own_says_which_expert_decided_each_token(examples):
    mlps = Registry("mlp", {}, "a specjax.interfaces.Mlp")
    layers = Layer(Attention(4, 2, 8), mlps.find("my_mlp:OneOfTwo")())
    cfg = ModelConfig(vocab_size=64, hidden_size=16, layers=(layers, layers))
    llm = LLM((cfg, init_params(cfg, 1), None), None, max_batch=1, max_len=32)
    [sample] = llm.generate([[3, 5]], SamplingParams(seed=0, max_tokens=8))[0].samples
    assert sample.records.shape == (2 - 1 + 8, 2) and set(np.unique(sample.records)) <= {0, 1}


# --- checkpoints ----------------------------------------------------------------------------------


def test_reader_of_ones_own_is_converted_and_refused_like_any_checkpoint(
    examples, thin_policy, tmp_path, capsys
):
    config = json.dumps(config_json(hf.read_config(thin_policy), False, "float32"))
    arrays = load_file(thin_policy / "model.safetensors")
    source, out = tmp_path / "model.npz", tmp_path / "out"
    np.savez(source, config=config, **arrays)
    convert = ["convert", "--to", "hf", "--load-format", "my_reader:Reader", str(source), str(out)]
    assert main(convert) == 0
    written = load_file(out / "model.safetensors")
    assert written.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(written[name], array)
    assert load_model(source, load_format="my_reader:Reader").cfg == hf.read_config(out)

    del arrays["model.norm.weight"]
    np.savez(source, config=config, **arrays)
    assert main([*convert[:-1], str(tmp_path / "other")]) == 1
    assert "missing: model.norm.weight" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*convert[:4], "no_such", *convert[5:]])
    assert "load_format: expected one of auto, gguf" in capsys.readouterr().err


def test_family_of_ones_own_is_read_written_and_refused_without_its_path(
    examples, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(FAMILIES, "rows", dict(FAMILIES.rows))
    cfg = dense_config(
        64, 16, 24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, model_type="pebble",
        qk_norm=False, max_position=64, eos_token_ids=(2,),
    )  # fmt: skip
    cfg = cfg.replace(norm_offset=True, logits=LogitForm(soft_cap=20.0))
    full = dataclasses.replace(cfg.layers[0], norms="both", norm_offset=True)
    slides = dataclasses.replace(full, mixer=dataclasses.replace(full.mixer, window=4))
    cfg = cfg.replace(layers=(slides, full))
    params = init_params(cfg, 1)
    add_family("my_family:FAMILY")
    hf.save_checkpoint(tmp_path / "pebble", cfg, params)
    tensors = load_file(tmp_path / "pebble" / "model.safetensors")
    assert {"pebbles.1.mlp.up_proj.weight", "last_norm.weight"} < tensors.keys()
    assert "pebbles.1.post_feedforward_layernorm.weight" in tensors
    assert tensors["pebbles.1.attention.qkv.weight"].shape == ((2 + 2) * 8, 16)
    assert json.loads((tmp_path / "pebble/config.json").read_text())["even_window"] == 4
    FAMILIES.rows.pop("pebble")

    asked = SamplingParams(max_tokens=12, temperature=0)
    with pytest.raises(hf.UnsupportedModelError, match="model_type 'pebble' is not supported"):
        LLM(tmp_path / "pebble", max_batch=1)
    llm = LLM(tmp_path / "pebble", SpecConfig(draft="ngram"), 1, family="my_family:FAMILY")
    assert llm.cfg.layers == cfg.layers
    found = llm.generate([[3, 5, 8]], asked)[0].samples[0].token_ids
    plain = LLM((cfg, params, None), None, max_batch=1, max_len=32)
    assert found == plain.generate([[3, 5, 8]], asked)[0].samples[0].token_ids

    convert = ["convert", "--to", "hf", str(tmp_path / "pebble"), str(tmp_path / "out")]
    FAMILIES.rows.pop("pebble")
    assert main([*convert, "--family", "nowhere:FAMILY"]) == 2
    assert "family: cannot load model family 'nowhere:FAMILY'" in capsys.readouterr().err
    assert main([*convert, "--family", "my_family:Pebble"]) == 2
    assert "expected a specjax.interfaces.Family of your own" in capsys.readouterr().err
    assert main([*convert, "--family", "my_family:FAMILY"]) == 0
    assert (
        load_file(tmp_path / "out" / "model.safetensors").keys()
        == load_file(tmp_path / "pebble" / "model.safetensors").keys()
    )


# --- kernels --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_backend_of_ones_own_attends_and_the_reference_does_the_rest(
    examples, thin_policy, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    path, rows = "my_kernels:BACKEND", set()
    operations = importlib.import_module("my_kernels").BACKEND.operations
    attend = operations["tree_attention"]

    def counted(q, *args, **kwargs):
        rows.add(q.shape[2])
        return attend(q, *args, **kwargs)

    monkeypatch.setitem(operations, "tree_attention", counted)

    def generated(attention):
        config = EngineConfig(attention=attention, prefill_chunk=16)
        llm = LLM(thin_policy, SpecConfig("1_1_2"), max_batch=1, max_len=64, engine=config)
        return llm.generate(["12+34="], SamplingParams(max_tokens=8, seed=1))[0].samples[0]

    own = generated(path)
    assert own.token_ids == generated("reference").token_ids
    assert rows >= {2, 16}, "trees and prompts"
    assert "attention: tree attention of my own, as asked for" in caplog.text
    with pytest.raises(ValueError, match="cannot load kernel backend 'my_kernels:NO_SUCH'"):
        generated("my_kernels:NO_SUCH")
    with pytest.raises(ValueError, match="it computes in float32, got bfloat16"):
        choose("cpu", "cpu", hf.read_config(thin_policy).running(compute_dtype="bfloat16"), path)


# --- number formats -------------------------------------------------------------------------------


@pytest.mark.slow
def test_weight_of_ones_own_decodes_as_its_rounded_weights_do(examples, thin_policy, caplog):
    from my_weight import Int8

    def rounded(array):
        if array.ndim > 2:  # stacked
            return jnp.stack([rounded(a) for a in array])
        return Int8.pack(array, table=False).unpack()

    cfg, params, _ = hf.load_checkpoint(thin_policy, "float32")
    rows = layer_rows(cfg.layers[0], cfg.hidden_size)
    layers = {n: rounded(a) if rows[n].matrix else a for n, a in params["layers"].items()}
    head = rounded(params["embed"].T if cfg.tie_embeddings else params["lm_head"])
    untied = dataclasses.replace(cfg, tie_embeddings=False)
    arrays = {**params, "layers": layers, "lm_head": head}

    def decoded(model, products):
        engine = EngineConfig(products=products)
        llm = LLM(model, None, max_batch=1, max_len=32, engine=engine)
        asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        [output] = llm.generate([[5, 9, 12]], asked)
        return output.samples[0]

    with caplog.at_level("INFO"):
        found = decoded((cfg, params, None), "my_weight:Int8")
    assert "products: 8 bits, a scale per column" in caplog.text
    expected, exact = decoded((untied, arrays, None), "xla"), decoded((cfg, params, None), "xla")
    assert found.token_ids == expected.token_ids
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)
    assert np.abs(np.subtract(found.logprobs, exact.logprobs)).max() > 1e-3, "nothing was rounded"


def test_weight_of_ones_own_multiplies_rows_with_their_experts(examples):
    from my_weight import Int8

    rng = np.random.default_rng(0)
    arrays, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((5, 24, 48), (2, 3, 24)))
    x, chosen = x.reshape(-1, 24), rng.integers(0, 5, (6, 2))
    pairs = matrix.Choices.of(jnp.asarray(chosen), 5)
    cfg = dense_config(8, 8, 8, 1, 1, 1, 8).running(products="my_weight:Int8")
    stack = matrix.pack({"e": arrays}, {"e": Param(arrays.shape, (None,) * 3, matrix=True)}, cfg)[
        "e"
    ]
    assert isinstance(stack, Int8) and stack.shape == (5, 24, 48)
    rounded = jnp.stack([Int8.pack(a, table=False).unpack() for a in arrays])
    wanted = jnp.einsum("ti,teio->teo", x, rounded[chosen])
    out = pairs.restore(matrix.experts(pairs.sort(x), stack, pairs.sizes))
    np.testing.assert_allclose(out, wanted, atol=1e-4)
