"""The section about speculation: the same keys, defaults and checks in every program."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from serve.__main__ import main as serve
from serve.cli import UsageError, generate
from serve.cli.arguments import build_parser
from serve.settings import ServeConfig, load_llm
from specjax import LLM, SpecConfig, verify
from specjax.checked_json import CheckpointError
from specjax.checkpoint import huggingface as hf
from specjax.command_line import parse_config
from specjax.control import ControlConfig
from specjax.drafts.mtp import MTPSource, init_head_params
from specjax.kernels.names import ATTENTION
from specjax.schema import keys_of
from specjax.speculation import SpeculationSettings, settings_of
from specjax.verify.__main__ import _parser as verify_parser
from train import rl, sft
from train.heads.files import HeadCheckpoints
from train.programs import describe_drafting, drafts, settle_drafting
from train.schema import RLConfig, SFTConfig

ENTRIES = ("train.rl", "serve", "generate", "verify")
# Keys that a program refuses, with the reason.
CANNOT = {
    "train.rl": {},
    "serve": {"exact_mode": "a server sends them as they grow"},
    "generate": {},
    "verify": {
        "exact_mode": "the check of identity compares every token",
        "telemetry": "the checks use random requests",
    },
}


def read(entry: str, settings: dict[str, str]) -> SpeculationSettings:
    """The section of a program that is told these settings, by their names below it."""
    if entry in ("generate", "verify"):
        parser = build_parser() if entry == "generate" else verify_parser("verify")
        argv = ["--model", "d"]
        for name, value in settings.items():
            flag = "--" + name.rpartition(".")[2].replace("_", "-")
            if value in ("true", "false"):
                argv.append(flag if value == "true" else "--no" + flag[1:])
            else:
                argv += [flag, value.strip("[]") if name.endswith("strategies") else value]
        return settings_of(parser.parse_args(argv))
    program, section = (
        (RLConfig, "rollout") if entry == "train.rl" else (ServeConfig, "speculation")
    )
    argv = [] if entry == "train.rl" else ["model=d"]
    if entry == "train.rl" and "aligned" in settings:
        argv.append("rollout.top_p=0.9")  # else there is nothing to align with
    if entry == "train.rl" and settings.get("acceptance") == "greedy":
        argv.append("rollout.temperature=0")
    argv += [f"{section}.{name}={value}" for name, value in settings.items()]
    return getattr(parse_config(program, argv)[0], section)


def names(control: ControlConfig) -> list[str]:
    return [arm.name for arm in control.arms]


def refused(entry: str, settings: dict[str, str], capsys) -> str:
    """What a program says when it refuses them."""
    with pytest.raises((SystemExit, ValueError)) as ended:
        read(entry, settings)
    if isinstance(ended.value, SystemExit):
        assert ended.value.code == 2
    return f"{ended.value} {capsys.readouterr().err}"


# One value for each key that differs from its default, with what it needs to have an effect.
CHANGED = [
    ({"strategy": "6_4_16"}, SpecConfig("6_4_16"), None),
    ({"acceptance": "block"}, SpecConfig(acceptance="block"), None),
    ({"draft": "checkpoint"}, SpecConfig(draft="checkpoint"), None),
    ({"draft": "random"}, SpecConfig(draft="random"), None),
    (
        {"draft": "random", "draft_kind": "eagle3"},
        SpecConfig(draft="random", draft_kind="eagle3"),
        None,
    ),
    ({"draft": "d"}, SpecConfig(draft="d"), None),
    (
        {"draft": "d", "draft_overrides": '{"backbone": "qwen3"}'},
        SpecConfig(draft="d", draft_overrides={"backbone": "qwen3"}),
        None,
    ),
    (
        {"draft_vocab": "16", "token_map": "map.json"},
        SpecConfig(draft_vocab=16, token_map="map.json"),
        None,
    ),
    (
        {"draft": "ngram", "ngram_max": "6", "ngram_min": "2", "ngram_siblings": "false"},
        SpecConfig(draft="ngram", ngram_max=6, ngram_min=2, ngram_siblings=False),
        None,
    ),
    ({"aligned": "false"}, SpecConfig(aligned=False), None),
    (
        {"strategy": "6_4_16", "tau": "0.3", "adaptive_width": "true", "spec_verify_tokens": "12"},
        SpecConfig("6_4_16", tau=0.3, adaptive_width=True, spec_verify_tokens=12),
        None,
    ),
    ({"invariant": "true"}, SpecConfig(invariant=True), None),
    ({"exact_mode": "true"}, SpecConfig(exact_mode=True), None),
    ({"telemetry": "true"}, SpecConfig(telemetry=True), None),
    ({"control.controller": "goodput"}, SpecConfig(), ControlConfig()),
    ({"control.bs_threshold": "4"}, SpecConfig(), ControlConfig(bs_threshold=4)),
    (
        {"control.controller": "bandit", "control.strategies": "[off,4_1_5,6_4_16]",
         "control.bandit": '{"reward": "accept_length", "window": 9}'},
        SpecConfig(),
        ControlConfig.from_dict(
            {"controller": "bandit", "strategies": ("off", "4_1_5", "6_4_16"),
             "bandit": {"reward": "accept_length", "window": 9}}
        ),
    ),
    (
        {"control.goodput": '{"probe_fraction": 0.5}'},
        SpecConfig(),
        ControlConfig.from_dict({"goodput": {"probe_fraction": 0.5}}),
    ),
    (  # it starts where the strategy says
        {"strategy": "7_1_8", "control.controller": "ema",
         "control.ema": '{"candidate_steps": [2, 6]}'},
        SpecConfig("7_1_8"),
        ControlConfig.from_dict(
            {"controller": "ema", "initial": "7_1_8", "ema": {"candidate_steps": [2, 6]},
             "strategies": (*ControlConfig().strategies, "7_1_8")}
        ),
    ),
    (
        {"control.controller": "static", "control.initial": "2_1_3"},
        SpecConfig("2_1_3"),
        ControlConfig("static", initial="2_1_3"),
    ),
    (  # one of the strategies is a dynamic tree
        {"strategy": "4_4_16", "adaptive_width": "true", "control.controller": "goodput"},
        SpecConfig("4_4_16", adaptive_width=True),
        ControlConfig(strategies=(*ControlConfig().strategies, "4_4_16")),
    ),
    (
        {"adaptive_width": "true", "tau": "0.5", "control.strategies": "[off,4_1_5,8_4_32]"},
        SpecConfig(adaptive_width=True, tau=0.5),
        ControlConfig(strategies=("off", "4_1_5", "8_4_32")),
    ),
    (  # the strategy was not set, and the default is none of these
        {"adaptive_width": "true", "tau": "0.5", "control.strategies": "[off,8_4_32]"},
        SpecConfig("8_4_32", adaptive_width=True, tau=0.5),
        ControlConfig(strategies=("off", "8_4_32")),
    ),
    (
        {"control.strategies": "[off,1_1_2]", "spec_verify_tokens": "3"},
        SpecConfig("1_1_2", spec_verify_tokens=3),
        ControlConfig(strategies=("off", "1_1_2")),
    ),
    (
        {"adaptive_width": "true", "control.controller": "static", "control.initial": "8_4_32"},
        SpecConfig("8_4_32", adaptive_width=True),
        ControlConfig("static", (*ControlConfig().strategies,), "8_4_32"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("settings", "spec", "control"), CHANGED)
def test_every_program_makes_the_same_of_a_setting(entry, settings, spec, control, capsys):
    for name in settings.keys() & CANNOT[entry].keys():
        assert CANNOT[entry][name] in refused(entry, settings, capsys)
        return
    if entry == "serve":
        spec = dataclasses.replace(spec, telemetry=True)
    found = read(entry, settings)
    assert found.spec() == spec
    assert found.control_config() == control


@pytest.mark.parametrize("entry", ["train.rl", "serve"])
def test_the_sections_have_the_same_keys_and_defaults(entry):
    program, section = (
        (RLConfig, "rollout") if entry == "train.rl" else (ServeConfig, "speculation")
    )
    there = {key.name: key for key in keys_of(program)}
    for key in keys_of(SpeculationSettings):
        found = there[f"{section}.{key.name}"]
        same = dataclasses.replace(found, name=key.name)
        if (entry, key.name) == ("serve", "telemetry"):
            assert found.default is True  # for the metrics of rejections
            same = dataclasses.replace(same, default=key.default, doc=key.doc)
        assert same == key


REFUSED = [
    ({"strategy": "6_4_16", "acceptance": "recursive"}, "coupled"),
    ({"strategy": "4x4x4"}, "48"),
    ({"tau": "0.3"}, "it scores the paths of a dynamic tree"),
    ({"adaptive_width": "true"}, "changes the width of dynamic trees"),
    (
        {"adaptive_width": "true", "control.strategies": "[off,2_1_3]"},
        "no strategy that may be selected is one",
    ),
    ({"strategy": "6_4_16", "tau": "0.3", "acceptance": "greedy"}, "adds no noise"),
    ({"strategy": "off", "draft": "ngram"}, "changes nothing"),
    ({"strategy": "off", "control.controller": "ema"}, "leave one of them out"),
    ({"draft_kind": "eagle3"}, "is the kind of a new head"),
    ({"draft_overrides": '{"backbone": "qwen3"}'}, "is about an EAGLE-3 head in files"),
    ({"draft": "d", "draft_overrides": '{"norm": true}'}, "unknown setting of the head 'norm'"),
    ({"draft": "checkpoint", "ngram_max": "6"}, "n-grams do not draft"),
    ({"invariant": "true", "acceptance": "block"}, "is about equal tokens"),
    ({"control.strategies": "[wide]"}, "strategy 'wide' is not understood"),
    ({"control.strategies": "[off,9_4_64]", "spec_verify_tokens": "6"}, "raise it to 10 or more"),
    ({"control.strategies": "[off,2_1_3]", "strategy": "6_1_7"}, "list it there"),
    (
        {"control.controller": "static", "control.strategies": "[1_1_2,2_1_3]"},
        "always has the first of them",
    ),
    (
        {"control.controller": "static", "control.initial": "2_1_3", "strategy": "6_1_7"},
        "leave out one of them",
    ),
    ({"control.initial": "2_1_3"}, "static or ema"),
    ({"control.ema": '{"candidate_steps": [1]}'}, "has other settings"),
    ({"control.controller": "ema", "control.ema_file": "/no/such"}, "/no/such"),
    ({"control.controller": "bandit", "control.goodput": '{"probe_fraction": 0.1}'}, "goodput"),
    ({"control.fastrl": '{"enable": false}', "draft": "random"}, "says enable: false"),
]  # fmt: skip


@pytest.mark.parametrize("entry", ["train.rl", "generate"])
@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_every_program_refuses_the_same_in_its_own_spelling(entry, settings, said, capsys):
    message = refused(entry, settings, capsys)
    assert said in message
    if entry in ("generate", "verify"):
        assert "speculation." not in message and "SpecConfig(" not in message
        ours = message.replace("true or false", "").replace("enable: false", "")  # FastRL's key
        assert " false" not in ours  # --no-NAME


# --- earlier names of the server's ---------------------------------------------------------------

# --- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ATTENTION)
def test_a_kernel_may_be_named_in_every_program(name, capsys):
    assert parse_config(RLConfig, [f"attention={name}"])[0].attention == name
    assert parse_config(SFTConfig, [f"attention={name}"])[0].attention == name
    served = parse_config(ServeConfig, ["model=d", f"engine.attention={name}"])[0]
    assert served.engine.config().attention == name
    for parser in (build_parser(), verify_parser("verify")):
        args = parser.parse_args(["--model", "d", "--attention", name])
        assert args.attention == name
    for program in (RLConfig, SFTConfig):
        with pytest.raises(SystemExit):
            parse_config(program, ["attention=gpuu"])
        assert "did you mean 'gpu'" in capsys.readouterr().err


# --- keys that are not known ---------------------------------------------------------------------

MEANT = [
    (RLConfig, "algo.max_resample", "algo.max_num_gen_batches"),
    (RLConfig, "rollout.attention", "attention"),
    (RLConfig, "rollout.lr", "optim.lr"),
    (RLConfig, "draft.lr", "draft.optim.lr"),
    (RLConfig, "rollout.draft_knd", "rollout.draft_kind"),
    (RLConfig, "rollout.control.controler", "rollout.control.controller"),
    (ServeConfig, "speculation.attention", "engine.attention"),
]


@pytest.mark.parametrize(("program", "name", "meant"), MEANT)
def test_a_key_that_is_not_there_names_the_one_that_is_meant(program, name, meant, capsys):
    with pytest.raises(SystemExit):
        parse_config(program, [f"{name}=2", *(["model=d"] if program is ServeConfig else [])])
    assert f"unknown key {name!r}; did you mean {meant!r}?" in capsys.readouterr().err


# --- FastRL's section ----------------------------------------------------------------------------

EAGLE = {"tune_algorithm": "BEG", "mab_configs": ["8_4_32", "4_1_5"], "spec_verify_tokens": 40}
FASTRL = {"enable": True, "bs_threshold": 32, "eagle": {**EAGLE, "spec_model_path": "some/head"}}


@pytest.mark.parametrize("entry", ENTRIES)
def test_fastrls_section_is_taken_as_it_stands(entry):
    found = read(entry, {"control.fastrl": json.dumps(FASTRL)})
    control = found.control_config()
    assert (control.controller, names(control)) == ("bandit", ["8_4_32", "4_1_5", "off"])
    assert (control.bs_threshold, control.bandit.reward) == (32, "throughput")
    spec = found.spec()
    same = SpecConfig("8_4_32", draft="some/head", spec_verify_tokens=40)
    assert dataclasses.replace(spec, telemetry=None) == same
    named = read(entry, {"control.fastrl": json.dumps({"speculative": FASTRL})})
    assert (named.spec(), named.control_config()) == (spec, control)


def test_fastrl_switched_off_trains_no_head():
    off = json.dumps({**FASTRL, "enable": False})
    cfg = parse_config(RLConfig, [f"rollout.control.fastrl={off}"])[0]
    assert cfg.draft.mode == "none" and not drafts(cfg)
    said = describe_drafting(cfg, settle_drafting(cfg, MTPSource))
    assert "draft: none" in said and "rollout.control.fastrl with enable: false" in said


# --- a head at another path ---------------------------------------------------------------------


def loaded(entry: str, model: str, head: str):
    """The LLM of a program that drafts with the head at a path; nothing is compiled."""
    if entry == "LLM":
        return LLM(model, SpecConfig(draft=head), max_batch=1, max_len=32)
    if entry == "serve":
        argv = [f"model={model}", f"speculation.draft={head}", "engine.max_batch=1"]
        return load_llm(parse_config(ServeConfig, argv)[0])
    argv = ["--model", model, "--draft", head]
    if entry == "verify":
        settings = settings_of(verify_parser("verify").parse_args(argv))
        return verify.load(model, settings.spec())
    args = build_parser().parse_args(argv)
    args.speculation = settings_of(args)
    return generate._load(args, 1)


@pytest.fixture(scope="module")
def heads(thin_policy, tmp_path_factory):
    """Paths of one head that is not the policy's own, by layout, with its parameters."""
    directory = tmp_path_factory.mktemp("heads")
    model, policy, _ = hf.load_checkpoint(thin_policy)
    head = init_head_params(model, 11)
    hf.save_head(directory / "head.safetensors", model, head)
    with HeadCheckpoints(directory / "draft", model, keep_last=1) as saved:
        saved.save(7, head)
    paths = {"file": "head.safetensors", "draft": "draft/7", "newest": "draft"}
    return {name: str(directory / path) for name, path in paths.items()}, head


@pytest.mark.parametrize(
    ("entry", "layout"),
    [("LLM", "file"), ("LLM", "draft"), ("LLM", "newest"), ("serve", "file"), ("generate", "draft"),
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
    name = {"serve": "speculation.draft", "generate": "--draft"}.get(entry, "draft")
    assert f"{name}: expected auto, checkpoint, random, ngram, the directory or" in said
    assert "got '/no/such'" in said


def test_a_head_of_another_policy_is_refused(heads, thin_policy, tmp_path):
    model, _, _ = hf.load_checkpoint(thin_policy)
    wide = model.replace(hidden_size=32)
    with HeadCheckpoints(tmp_path, wide, keep_last=1) as saved:
        saved.save(1, init_head_params(wide, 0))
    as_saved = r"in the checkpoint and .* in the model"
    of_a_run = r"is of another model: .* is \[.*\], expected \["
    for path, said in ((tmp_path / "1", as_saved), (tmp_path, of_a_run)):
        with pytest.raises(CheckpointError, match=said):
            loaded("LLM", str(thin_policy), str(path))


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
    (sft.main, ["steps=0", "optim.lr=0.1"], "steps=0 trains no policy"),
    (serve, [], "no value for the required keys ['model']"),
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
