"""The section about speculation: the same keys, defaults and checks in every program."""

import dataclasses
import json
import subprocess
import sys

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
from specjax.control import ControlConfig, from_fastrl, make_controller
from specjax.drafts.mtp import MTPSource, init_head_params
from specjax.engine.settings import EngineConfig
from specjax.kernels import tpu
from specjax.kernels.names import ATTENTION, GROUPS, OWN
from specjax.registry import BACKENDS
from specjax.schema import keys_of
from specjax.speculation import KEYS, ControlSection, SpeculationSettings, settings_of
from specjax.verify.__main__ import _parser as verify_parser
from train import rl, sft
from train.head_files import HeadCheckpoints
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


def test_every_key_is_among_the_settings_that_were_tried():
    tried = {name for settings, _, _ in CHANGED for name in settings}
    keys = {key.name for key in keys_of(SpeculationSettings) if not key.section}
    assert keys - tried == {"control.ema_file", "control.fastrl"}  # below
    assert len(KEYS) == len(keys), "two keys would have one flag"


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
    ({"tau": "0.0"}, "tau must be a finite number greater than 0"),
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
    ({"draft": "ngram", "draft_overrides": '{"backbone": "qwen3"}'}, "names none; use"),
    ({"draft": "d", "draft_overrides": '{"norm": true}'}, "unknown setting of the head 'norm'"),
    ({"draft": "d", "draft_overrides": '{"norm_output": 1}'}, "must be true or false; got 1"),
    ({"draft": "checkpoint", "ngram_max": "6"}, "n-grams do not draft"),
    ({"invariant": "true", "acceptance": "block"}, "is about equal tokens"),
    ({"control.controller": "best"}, "expected one of goodput, static, ema, bandit"),
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
    ({"control.controller": "ema", "control.ema": '{"steps": 1}'}, "adaptive setting 'steps'"),
    ({"control.controller": "ema", "control.ema_file": "/no/such"}, "/no/such"),
    ({"control.controller": "bandit", "control.bandit": '{"eps": 1}'}, "'eps' of bandit"),
    ({"control.controller": "bandit", "control.goodput": '{"probe_fraction": 0.1}'}, "goodput"),
    ({"control.bs_threshold": "-1"}, "bs_threshold must be at least 0"),
    ({"control.fastrl": '{"enable": false}', "draft": "random"}, "says enable: false"),
    ({"control.fastrl": '{"enable": false}', "draft": "ngram"}, "says enable: false"),
    ({"control.fastrl": '{"enable": false}', "spec_verify_tokens": "9"}, "says enable: false"),
]  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_every_program_refuses_the_same_in_its_own_spelling(entry, settings, said, capsys):
    message = refused(entry, settings, capsys)
    assert said in message
    if entry in ("generate", "verify"):
        assert "speculation." not in message and "SpecConfig(" not in message
        ours = message.replace("true or false", "").replace("enable: false", "")  # FastRL's key
        assert " false" not in ours  # --no-NAME


@pytest.mark.parametrize("entry", ENTRIES)
def test_settings_of_ema_may_be_in_a_file(entry, tmp_path):
    file = tmp_path / "ema.json"
    file.write_text(json.dumps({"candidate_steps": [2, 5], "ema_alpha": 0.5}))
    found = read(entry, {"control.controller": "ema", "control.ema_file": str(file)})
    assert names(found.control_config()) == ["2_1_3", "5_1_6"]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("strategy", ["6_4_16", "4x2x1"])
def test_ema_stays_with_a_tree(entry, strategy):
    found = read(entry, {"control.controller": "ema", "strategy": strategy})
    assert names(found.control_config()) == [strategy]


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_strategy_of_ones_own_is_among_those_that_are_not_listed(entry):
    found = read(entry, {"control.controller": "goodput", "strategy": "6_4_16"})
    assert names(found.control_config()) == [*names(ControlConfig()), "6_4_16"]


# --- earlier names of the server's ---------------------------------------------------------------

OLD = ["speculation.controller=bandit", "speculation.strategies=[off, 2_1_3]"]
VERIFY_TOKENS = "speculation.verify_tokens=12"


def test_the_server_takes_the_names_that_it_had_before(tmp_path):
    asked = [*OLD, VERIFY_TOKENS]
    typed = parse_config(ServeConfig, ["model=d", *asked])[0].speculation
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: d\nspeculation: {controller: bandit, strategies: ['off', 2_1_3], verify_tokens: 12}"
    )
    filed = parse_config(ServeConfig, ["--config", str(file)])[0].speculation
    assert typed == filed
    assert typed.control == ControlSection("bandit", ["off", "2_1_3"])
    assert typed.spec_verify_tokens == 12


def test_a_name_and_its_earlier_one_are_not_both_taken(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("model: d\nspeculation: {spec_verify_tokens: 9, verify_tokens: 12}")
    with pytest.raises(SystemExit):
        parse_config(ServeConfig, ["--config", str(file)])
    assert "another name of speculation.spec_verify_tokens" in capsys.readouterr().err
    both = ["speculation.controller=goodput", "speculation.control.controller=ema"]
    for argv in (both, both[::-1]):
        with pytest.raises(SystemExit):
            parse_config(ServeConfig, ["model=d", *argv])
        said = "speculation.controller is another name of speculation.control.controller"
        assert said in capsys.readouterr().err


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


def test_the_names_of_kernels_are_those_that_are_known():
    assert set(GROUPS["tpu"]) == {f"tpu:{generation}" for generation in tpu.TUNING}
    members = {name for names in (*GROUPS.values(), *OWN.values()) for name in names}
    assert members <= {*BACKENDS.names, *GROUPS}, "what stands for others, and for `auto`"


@pytest.mark.parametrize("name", ["my.kernels:BACKEND", "kernels:FAST"])
def test_a_kernel_of_ones_own_may_be_named_in_every_program(name):
    assert parse_config(RLConfig, [f"attention={name}"])[0].attention == name
    assert EngineConfig(attention=name).attention == name
    for parser in (build_parser(), verify_parser("verify")):
        assert parser.parse_args(["--model", "d", "--attention", name]).attention == name


@pytest.mark.parametrize("name", ["gpuu", "tpu:v3", ":BACKEND", "kernels:"])
def test_what_is_no_kernel_and_no_path_is_refused(name, capsys):
    with pytest.raises(ValueError, match="attention must be one of .*package.module:attribute"):
        EngineConfig(attention=name)
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--model", "d", "--attention", name])
    assert "attention must be one of" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_config(RLConfig, [f"attention={name}"])
    assert "attention: expected one of" in capsys.readouterr().err


def test_the_flags_are_made_without_importing_jax():
    code = "import sys, serve.cli.arguments as a; a.build_parser(); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


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


RENAMED = [
    ("rollout.head=some/path", "rollout.draft=some/path"),
    ("rollout.head=random", "rollout.draft=random"),
    ("rollout.source=head", "rollout.draft=checkpoint"),
    ("rollout.source=ngram", "rollout.draft=ngram"),
    ("rollout.draft_model=d", "rollout.draft=d"),
    ("--rollout.head=some/path", "rollout.draft=some/path"),
    ("rollout.speculative_draft_model_path=d", "rollout.draft=d"),
]


@pytest.mark.parametrize(("argument", "meant"), RENAMED)
def test_names_that_one_key_replaces_are_translated(argument, meant, tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse_config(RLConfig, [argument])
    assert f"; use {meant}\n" in capsys.readouterr().err
    key, _, value = argument.removeprefix("--rollout.").removeprefix("rollout.").partition("=")
    with pytest.raises(SystemExit):
        parse_config(ServeConfig, ["model=d", f"speculation.{key}={value}"])
    assert f"; use {meant.replace('rollout', 'speculation')}\n" in capsys.readouterr().err
    (tmp_path / "c.yaml").write_text(f"rollout: {{{key}: {value}}}")
    with pytest.raises(SystemExit):
        parse_config(RLConfig, ["--config", str(tmp_path / "c.yaml")])
    assert f"; use {meant}\n" in capsys.readouterr().err
    with pytest.raises(TypeError, match=f"use SpecConfig.draft='{meant.partition('=')[2]}'"):
        SpecConfig(**{key: value})
    with pytest.raises(TypeError, match="use LLM.spec=SpecConfig.draft='"):
        LLM("x", **{key: value})


def test_what_a_name_that_is_gone_stands_for_is_there():
    keys = {meant for meant in RLConfig.renamed.values() if " " not in meant}  # others are advice
    assert keys and keys <= {key.name for key in keys_of(RLConfig)}


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


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_bandits_other_reward_stands_beside_fastrls_section(entry):
    bandit = {"reward": "accept_length", "epsilon": 0.2}
    settings = {"control.fastrl": json.dumps(FASTRL), "control.bandit": json.dumps(bandit)}
    found = read(entry, settings).control_config().bandit
    assert (found.reward, found.epsilon, found.thresholds) == ("accept_length", 0.2, (1, 2, 5, 21))


@pytest.mark.parametrize("entry", ENTRIES)
def test_fastrl_switched_off_is_plain_decoding_with_no_head(entry):
    found = read(entry, {"control.fastrl": json.dumps({**FASTRL, "enable": False})})
    assert found.spec().is_off and found.control_config() is None
    assert found.draft == "auto"  # no head is asked for


@pytest.mark.parametrize("entry", ENTRIES)
def test_settings_of_trees_go_with_those_of_fastrls_section(entry):
    settings = {"control.fastrl": json.dumps({"eagle": EAGLE}), "adaptive_width": "true"}
    spec = read(entry, settings | {"tau": "0.5"}).spec()
    same = SpecConfig("8_4_32", tau=0.5, adaptive_width=True, spec_verify_tokens=40)
    assert dataclasses.replace(spec, telemetry=None) == same


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("draft.mode=online", "there is no head to train"),
        ("draft.loss=ce", "changes nothing"),
        ("draft.mtp_loss_scaling_factor=0.5", "changes nothing"),
        ("checkpoint.draft_only=true", "changes nothing"),
        ("draft.spot.enabled=true", "there is none to train"),
    ],
)
def test_fastrl_switched_off_is_named_where_the_head_is_to_be_trained(key, said, capsys):
    with pytest.raises(SystemExit):
        parse_config(RLConfig, ["rollout.control.fastrl={enable: false}", key])
    message = capsys.readouterr().err
    assert said in message and "enable: false" in message and "rollout.strategy" not in message


def test_fastrl_switched_off_trains_no_head():
    off = json.dumps({**FASTRL, "enable": False})
    cfg = parse_config(RLConfig, [f"rollout.control.fastrl={off}"])[0]
    assert cfg.draft.mode == "none" and not drafts(cfg)
    said = describe_drafting(cfg, settle_drafting(cfg, MTPSource))
    assert "draft: none" in said and "rollout.control.fastrl with enable: false" in said


FASTRL_REFUSED = [
    ({"control.controller": "bandit"}, {}, "in place of all other keys but bandit"),
    ({"strategy": "2_1_3"}, {}, "says which strategies there are"),
    ({"spec_verify_tokens": "12"}, {}, "says which strategies there are, and how many rows"),
    ({"draft": "random"}, {}, "drafts, and spec_model_path=some/head"),
    ({"control.bandit": '{"thresholds": [1, 2]}'}, {}, "are FastRL's mab_bs_threshold"),
    ({"control.bandit": '{"eps": 1}'}, {}, "unknown setting 'eps' of bandit"),
    ({"control.bandit": '{"epsilon": 0.2}'}, {"tune_algorithm": None}, "asks for no bandit"),
    ({}, {"mode": 1}, "speculative.eagle has unknown keys mode"),
    ({}, {"mab_configs": []}, "mab_configs lists no strategy"),
]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("settings", "eagle", "said"), FASTRL_REFUSED)
def test_what_contradicts_fastrls_section_is_refused(entry, settings, eagle, said, capsys):
    section = {**FASTRL, "eagle": {**FASTRL["eagle"], **eagle}}
    message = refused(entry, {"control.fastrl": json.dumps(section), **settings}, capsys)
    assert said in message


@pytest.mark.parametrize("entry", ["generate", "verify"])
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_flag_takes_the_file_with_fastrls_section(entry, suffix, tmp_path, capsys):
    file = tmp_path / f"fastrl.{suffix}"
    file.write_text(json.dumps({"speculative": FASTRL}))  # which is YAML, too
    assert read(entry, {"control.fastrl": str(file)}).spec().draft == "some/head"
    assert "/no/such" in refused(entry, {"control.fastrl": "/no/such"}, capsys)


def test_python_is_given_both_configurations_of_fastrls_section():
    spec, control = from_fastrl({"speculative": FASTRL}, {"reward": "accept_length"})
    assert spec == SpecConfig("8_4_32", draft="some/head", spec_verify_tokens=40)
    assert names(control) == ["8_4_32", "4_1_5", "off"]
    assert control.bandit.reward == "accept_length"
    assert from_fastrl({"enable": False, "eagle": EAGLE}) == (None, None)
    with pytest.raises(ValueError, match="spec_model_path=some/head .* use specjax.control.from"):
        ControlConfig.from_fastrl(FASTRL)
    with pytest.raises(ValueError, match="spec_verify_tokens=40"):
        ControlConfig.from_fastrl({"eagle": EAGLE})
    with pytest.raises(ValueError, match="enable must be true or false, got 'no'"):
        from_fastrl({"enable": "no"})
    with pytest.raises(ValueError, match="must be a map"):
        from_fastrl({"eagle": "BEG"})


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


@pytest.mark.parametrize("entry", ["LLM", "serve", "generate", "verify"])
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


def test_a_controller_that_may_only_decode_plainly_asks_for_no_head(thin_policy):
    model, policy, _ = hf.load_checkpoint(thin_policy)
    bare = model.replace(mtp_num_layers=0), policy, None
    off = ControlConfig.from_fastrl({"enable": False})
    llm = LLM(bare, SpecConfig(draft="checkpoint"), max_batch=1, max_len=32, control=off)
    assert llm.spec is None and llm.head is None
    assert llm.drafting.described() == "draft: none, by plain decoding"


@pytest.mark.parametrize("control", ["ema", {"controller": "ema"}, ControlConfig("ema")])
def test_python_takes_a_controller_by_name_by_map_or_by_configuration(control, thin_policy):
    llm = LLM(str(thin_policy), max_batch=1, max_len=32, control=control)
    assert llm.engine.control == ControlConfig("ema")
    assert "the controller ema chooses among 1_1_2, 3_1_4, 7_1_8" in llm.drafting.described()


PYTHON_REFUSED = [
    (SpecConfig("off"), ControlConfig(strategies=("off", "2_1_3")), "leave one of them out"),
    (None, ControlConfig(), "give a SpecConfig"),
    (SpecConfig(), {"controler": "ema"}, "unknown control setting 'controler'"),
    (SpecConfig(), "best", "controller must be one of goodput"),
    (SpecConfig(adaptive_width=True), None, "got strategies off, 4_1_5; use one such as '6_4_16'"),
    (
        SpecConfig("4_4_16", adaptive_width=True),
        ControlConfig(strategies=("off", "2_1_3")),
        "got strategies off, 2_1_3; use one",
    ),
]


@pytest.mark.parametrize(("spec", "control", "said"), PYTHON_REFUSED)
def test_python_is_refused_what_the_sections_refuse(spec, control, said, thin_policy):
    with pytest.raises(ValueError) as ended:
        LLM(str(thin_policy), spec, max_batch=1, max_len=32, control=control)
    assert said in str(ended.value)


def test_what_is_no_controller_is_refused(thin_policy):
    with pytest.raises(TypeError, match="expected a ControlConfig, the name of a controller"):
        LLM(str(thin_policy), max_batch=1, max_len=32, control=["off", "2_1_3"])


@pytest.mark.parametrize("invariant", [False, True])
def test_the_width_of_dynamic_trees_alone_is_adaptive(invariant, thin_policy):
    spec = SpecConfig("4_4_16", adaptive_width=True, invariant=invariant)
    control = ControlConfig(strategies=("off", "2_1_3", "4_4_16"))
    engine = LLM(str(thin_policy), spec, max_batch=1, max_len=32, control=control).engine
    widths = {name: plan.adaptive_width for name, plan in engine.runner.plans.items()}
    assert widths == {"off": False, "2_1_3": False, "4_4_16": True}
    programs = {name: plan.adaptive_width for name, plan in engine.runner.programs.items()}
    assert programs == ({"4_4_16": True} if invariant else widths)


def test_the_servers_ema_starts_at_the_tier_next_to_its_strategy():
    for strategy, tier in (("7_1_8", "7_1_8"), ("5_1_6", "7_1_8"), ("2_1_3", "3_1_4")):
        settings = {"strategy": strategy, "control.controller": "ema"}
        controller = make_controller(read("serve", settings).control_config())
        assert controller.select(1) == tier
    settings = {"strategy": "6_4_16", "control.controller": "ema"}
    assert make_controller(read("serve", settings).control_config()).select(1) == "6_4_16"


# --- --print-config ------------------------------------------------------------------------------

PRINTS = [
    (rl.main, [], "steps: 100"),
    (sft.main, [], "draft_steps: 300"),
    (serve, ["model=d"], "model: d"),
]
REFUSES = [
    (rl.main, ["rollout.tau=0.3"], "rollout.tau=0.3 changes nothing"),
    (rl.main, ["reward=exakt"], "unknown reward 'exakt'; choose one of exact"),
    (rl.main, ["data.task=gsm8k"], "task gsm8k reads a file"),
    (rl.main, ["packing.row_length=8"], "must fit a row"),
    (rl.main, ["rollout.control.strategies=[wide]"], "strategy 'wide'"),
    (sft.main, ["revision=main"], "init names none"),
    (sft.main, ["steps=0", "optim.lr=0.1"], "steps=0 trains no policy"),
    (sft.main, ["packing.rows=0"], "packing.rows: expected at least 1"),
    (serve, [], "no value for the required keys ['model']"),
    (serve, ["model=d", "port=99999"], "port: expected at most 65535"),
    (serve, ["model=d", "speculation.tau=0.3"], "speculation.tau=0.3 changes nothing"),
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
