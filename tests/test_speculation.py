"""The section about speculation: the same keys, defaults and checks in every program."""

import dataclasses

import jax
import numpy as np
import pytest

from serve.__main__ import main as serve
from serve.cli import UsageError, generate
from serve.cli.arguments import GenerateConfig
from serve.settings import ServeConfig, load_llm
from specjax import LLM, SpecConfig, verify
from specjax.checked_json import CheckpointError
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.store import Checkpointer
from specjax.checkpoint.weights import Head, describe, describe_head
from specjax.command_line import parse_config
from specjax.control import ControlConfig
from specjax.control.config import Speculation
from specjax.drafts.mtp import MTPSource, init_head_params
from specjax.kernels.names import ATTENTION
from specjax.settings import keys_of
from specjax.verify.__main__ import VerifyConfig
from train import rl, sft
from train.schema import RLConfig, SFTConfig

ENTRIES = {
    "train.rl": (RLConfig, "rollout"),
    "serve": (ServeConfig, "speculation"),
    "generate": (GenerateConfig, ""),
    "verify": (VerifyConfig, ""),
}


def read(entry: str, *settings: str) -> Speculation:
    """The speculation of a program that is told these settings, by their names below it."""
    program, section = ENTRIES[entry]
    argv = [] if entry == "train.rl" else ["model=d"]
    argv += [f"{section}.{setting}".removeprefix(".") for setting in settings]
    config, _ = parse_config(program, argv)
    return getattr(config, section) if section else config


DEFAULT = ControlConfig().strategies
# Settings, and what they are for the engine.
CHANGED = [
    (["strategy=6_4_16"], SpecConfig("6_4_16"), None),
    (["acceptance=block"], SpecConfig(acceptance="block"), None),
    (["draft=random", "draft_kind=eagle3"], SpecConfig(draft="random", draft_kind="eagle3"), None),
    (
        ["draft=d", "draft_vocab=16", "token_map=m"],
        SpecConfig(draft="d", draft_vocab=16, token_map="m"),
        None,
    ),
    (
        ["draft=ngram", "ngram_max=6", "ngram_min=2", "--no-ngram_siblings"],
        SpecConfig(draft="ngram", ngram_max=6, ngram_min=2, ngram_siblings=False),
        None,
    ),
    (
        ["strategy=6_4_16", "tau=0.3", "adaptive_width=true", "spec_verify_tokens=12"],
        SpecConfig("6_4_16", tau=0.3, adaptive_width=True, spec_verify_tokens=12),
        None,
    ),
    (["invariant=true"], SpecConfig(invariant=True), None),
    (["control.bs_threshold=4"], SpecConfig(), ControlConfig(bs_threshold=4)),
    (
        ["control.controller=bandit", "control.strategies=off,4_1_5", "control.bandit.window=9"],
        SpecConfig(),
        ControlConfig("bandit", ("off", "4_1_5"), bandit={"window": 9}),
    ),
    (
        ["control.goodput={hysteresis: 0.5}"],
        SpecConfig(),
        ControlConfig(goodput={"hysteresis": 0.5}),
    ),
    (  # it starts where the strategy says
        ["strategy=7_1_8", "control.controller=ema", "control.ema={candidate_steps: [2, 6]}"],
        SpecConfig("7_1_8"),
        ControlConfig("ema", initial="7_1_8", ema={"candidate_steps": [2, 6]}),
    ),
    (  # one of the strategies is a dynamic tree
        ["strategy=4_4_16", "adaptive_width=true", "control={}"],
        SpecConfig("4_4_16", adaptive_width=True),
        ControlConfig(strategies=(*DEFAULT, "4_4_16")),
    ),
    (  # the strategy was not set, and the default is none of these
        ["adaptive_width=true", "tau=0.5", "control.strategies=[off,8_4_32]"],
        SpecConfig("8_4_32", adaptive_width=True, tau=0.5),
        ControlConfig(strategies=("off", "8_4_32")),
    ),
    (
        ["control.controller=static", "control.initial=2_1_3"],
        SpecConfig("2_1_3"),
        ControlConfig("static", initial="2_1_3"),
    ),
]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("settings", "spec", "control"), CHANGED)
def test_every_program_makes_the_same_of_a_setting(entry, settings, spec, control):
    if "--no-ngram_siblings" in settings:
        prefix = {"train.rl": "rollout.", "serve": "speculation."}.get(entry, "")
        assert parse_config(ENTRIES[entry][0], ["--model=d", f"--no-{prefix}ngram-siblings"])
        settings = [*settings[:-1], "ngram_siblings=false"]
    made = read(entry, *settings)
    assert made.spec() == dataclasses.replace(spec, telemetry=entry == "serve")
    assert made.control_config() == control


def test_the_sections_have_the_same_keys_and_defaults():
    for entry, (program, section) in ENTRIES.items():
        there = {key.name: key for key in keys_of(program)}
        for key in keys_of(Speculation):
            own = there.get(f"{section}.{key.name}".removeprefix("."))
            if (entry, key.name) not in {
                ("serve", "telemetry"), ("serve", "exact_mode"), ("verify", "telemetry"),
                ("verify", "exact_mode"),
            }:  # fmt: skip
                same = (own.default or None, own.doc) == (key.default or None, key.doc)
                assert same, (entry, key.name)


@pytest.mark.parametrize("name", ATTENTION)
def test_a_kernel_may_be_named_in_every_program(name):
    for program in (RLConfig, SFTConfig, GenerateConfig, VerifyConfig):
        argv = ["model=d", f"attention={name}"]
        assert parse_config(program, argv)[0].attention == name
    served = parse_config(ServeConfig, ["model=d", f"engine.attention={name}"])[0]
    assert served.engine.attention == name


# --- a head at another path ---------------------------------------------------------------------


def loaded(entry: str, model: str, head: str):
    """The LLM of a program that drafts with the head at a path; nothing is compiled."""
    if entry == "LLM":
        return LLM(model, SpecConfig(draft=head), max_batch=1, max_len=32)
    if entry == "serve":
        argv = [f"model={model}", f"speculation.draft={head}", "engine.max_batch=1"]
        return load_llm(parse_config(ServeConfig, argv)[0])
    if entry == "verify":
        return verify.load(
            model, parse_config(VerifyConfig, [f"model={model}", f"draft={head}"])[0].spec()
        )
    return generate._load(parse_config(GenerateConfig, ["--model", model, "--draft", head])[0], 1)


@pytest.fixture(scope="module")
def heads(thin_policy, tmp_path_factory):
    """Paths of one head that is not the policy's own, by layout, with its parameters."""
    directory = tmp_path_factory.mktemp("heads")
    model, policy, _ = hf.load_checkpoint(thin_policy)
    head = init_head_params(model, 11)
    hf.save_head(directory / "head.safetensors", model, head)
    with Checkpointer(directory / "run" / "checkpoints") as checkpoints:
        meta = describe(model, None, describe_head(Head(MTPSource(model), head)))
        checkpoints.save(7, {"policy": policy, "draft": head}, meta, block=True)
    paths = {"file": "head.safetensors", "run": "run", "newest": "run/checkpoints"}
    return {name: str(directory / path) for name, path in paths.items()}, head


@pytest.mark.parametrize(
    ("entry", "layout"),
    [("LLM", "file"), ("LLM", "run"), ("LLM", "newest"), ("serve", "file"), ("generate", "run"),
     ("verify", "file")],
)  # fmt: skip
def test_a_head_at_a_path_drafts(entry, layout, heads, thin_policy):
    paths, head = heads
    llm = loaded(entry, str(thin_policy), paths[layout])
    assert llm.drafting.with_head
    for found, there in zip(jax.tree.leaves(llm.head), jax.tree.leaves(head), strict=True):
        np.testing.assert_array_equal(found, there)
    how = "always 4_1_5" if entry == "verify" else "the controller goodput chooses among off, 4_1_5"
    assert f"draft: the head {paths[layout]}; {how}" in llm.drafting.described()


@pytest.mark.parametrize("entry", ["LLM", "serve", "generate"])
def test_a_head_that_is_not_there_is_named(entry, thin_policy):
    with pytest.raises((ValueError, UsageError)) as ended:
        loaded(entry, str(thin_policy), "/no/such")
    said = str(ended.value)
    name = {"serve": "speculation.draft"}.get(entry, "draft")
    assert f"{name}: expected auto, checkpoint, random, ngram, the directory or" in said
    assert "got '/no/such'" in said


def test_a_head_of_another_policy_is_refused(heads, thin_policy, tmp_path):
    model, _, _ = hf.load_checkpoint(thin_policy)
    wide = model.replace(hidden_size=32)
    hf.save_head(tmp_path / "wide.safetensors", wide, init_head_params(wide, 0))
    with pytest.raises(CheckpointError, match="does not fit the model config; wrong weights"):
        loaded("LLM", str(thin_policy), str(tmp_path / "wide.safetensors"))


@pytest.mark.parametrize("control", ["ema", {"controller": "ema"}, ControlConfig("ema")])
def test_python_takes_a_controller_by_name_by_map_or_by_configuration(control, thin_policy):
    llm = LLM(str(thin_policy), max_batch=1, max_len=32, control=control)
    assert llm.engine.control == ControlConfig("ema")
    assert "the controller ema chooses among 1_1_2, 3_1_4, 7_1_8" in llm.drafting.described()


# --- --print-config ------------------------------------------------------------------------------

PRINTS = [
    (rl.main, [], "steps: 100"),
    (sft.main, [], "draft_steps: 300"),
    (serve, ["model=d"], "model: d"),
]
REFUSES = [
    (rl.main, ["data.task=gsm8k"], "task gsm8k reads a file"),
    (rl.main, ["packing.row_length=8"], "must fit a row"),
    (sft.main, ["steps=0", "optim.lr=0.1"], "it needs steps, and steps is 0"),
    (serve, [], "no value for model"),
]


@pytest.mark.parametrize(("program", "argv", "said"), PRINTS)
def test_a_configuration_that_would_run_is_printed(program, argv, said, capsys):
    with pytest.raises(SystemExit) as ended:
        program([*argv, "--print-config"])
    assert ended.value.code == 0 and said in capsys.readouterr().out


@pytest.mark.parametrize(("program", "argv", "said"), REFUSES)
def test_a_configuration_that_would_not_run_is_not_printed(program, argv, said, capsys):
    with pytest.raises(SystemExit) as ended:
        program([*argv, "--print-config"])
    captured = capsys.readouterr()
    assert ended.value.code == 2 and said in captured.err and not captured.out
