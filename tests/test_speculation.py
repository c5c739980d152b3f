"""The section about speculation: the same keys, defaults and checks in every program."""

import dataclasses
import json
import subprocess
import sys

import pytest

from serve.cli.arguments import build_parser
from serve.settings import ServeConfig
from specjax import SpecConfig
from specjax.command_line import parse_config
from specjax.control import ControlConfig
from specjax.kernels import choice, tpu
from specjax.kernels.names import ATTENTION
from specjax.schema import keys_of
from specjax.speculation import ControlSection, SpeculationSettings
from specjax.speculation_flags import KEYS, settings_of
from specjax.verify.__main__ import _parser as verify_parser
from train.schema import RLConfig, SFTConfig

DOORS = ("train.rl", "serve", "generate", "verify")
# Keys that a program refuses, with the reason.
CANNOT = {
    "train.rl": {"exact_mode": "would decode every rollout twice"},
    "serve": {"exact_mode": "a server sends them as they grow"},
    "generate": {},
    "verify": {
        "exact_mode": "the check of identity compares every token",
        "telemetry": "the requests of the checks are drawn at random",
    },
}


def read(door: str, settings: dict[str, str], file=None) -> SpeculationSettings:
    """The section of a program that is told these settings, by their names below it."""
    if door in ("generate", "verify"):
        parser = build_parser() if door == "generate" else verify_parser("verify")
        argv = ["--model", "d"]
        for name, value in settings.items():
            flag = "--" + name.rpartition(".")[2].replace("_", "-")
            if value in ("true", "false"):
                argv.append(flag if value == "true" else "--no" + flag[1:])
            else:
                argv += [flag, value.strip("[]") if name.endswith("strategies") else value]
        return settings_of(parser.parse_args(argv))
    program, section = (RLConfig, "rollout") if door == "train.rl" else (ServeConfig, "speculation")
    argv = [] if door == "train.rl" else ["model=d"]
    argv += [] if file is None else ["--config", str(file)]
    argv += [f"{section}.{name}={value}" for name, value in settings.items()]
    return getattr(parse_config(program, argv)[0], section)


def refused(door: str, settings: dict[str, str], capsys) -> str:
    """What a program says when it refuses them."""
    with pytest.raises((SystemExit, ValueError)) as ended:
        read(door, settings)
    if isinstance(ended.value, SystemExit):
        assert ended.value.code == 2
    return f"{ended.value} {capsys.readouterr().err}"


# One value for each key that differs from its default, with what it needs to have an effect.
CHANGED = [
    ({"strategy": "6_4_16"}, SpecConfig("6_4_16"), None),
    ({"acceptance": "block"}, SpecConfig(acceptance="block"), None),
    ({"source": "head"}, SpecConfig(source="head"), None),
    ({"head": "random"}, SpecConfig(head="random"), None),
    ({"draft_model": "d"}, SpecConfig(draft_model="d"), None),
    (
        {"source": "ngram", "ngram_max": "6", "ngram_min": "2", "ngram_siblings": "false"},
        SpecConfig(source="ngram", ngram_max=6, ngram_min=2, ngram_siblings=False),
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
        SpecConfig(),
        ControlConfig("static", initial="2_1_3"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("settings", "spec", "control"), CHANGED)
def test_every_program_makes_the_same_of_a_setting(door, settings, spec, control, capsys):
    for name in settings.keys() & CANNOT[door].keys():
        assert CANNOT[door][name] in refused(door, settings, capsys)
        return
    if door == "serve":
        spec = dataclasses.replace(spec, telemetry=True)
    found = read(door, settings)
    assert found.spec() == spec
    assert found.control_config() == control


def test_every_key_is_among_the_settings_that_were_tried():
    tried = {name for settings, _, _ in CHANGED for name in settings}
    keys = {key.name for key in keys_of(SpeculationSettings) if not key.section}
    assert keys - tried == {"control.ema_file", "control.fastrl"}  # below
    assert len(KEYS) == len(keys), "two keys would have one flag"


@pytest.mark.parametrize("door", ["train.rl", "serve"])
def test_the_sections_have_the_same_keys_and_defaults(door):
    program, section = (RLConfig, "rollout") if door == "train.rl" else (ServeConfig, "speculation")
    there = {key.name: key for key in keys_of(program)}
    for key in keys_of(SpeculationSettings):
        found = there[f"{section}.{key.name}"]
        same = dataclasses.replace(found, name=key.name)
        if (door, key.name) == ("serve", "telemetry"):
            assert found.default is True  # for the metrics of rejections
            same = dataclasses.replace(same, default=key.default, doc=key.doc)
        assert same == key


REFUSED = [
    ({"strategy": "6_4_16", "acceptance": "recursive"}, "coupled"),
    ({"strategy": "4x4x4"}, "48"),
    ({"tau": "0.0"}, "tau must be a finite number greater than 0"),
    ({"tau": "0.3"}, "it scores the paths of a dynamic tree"),
    ({"adaptive_width": "true"}, "changes the width of dynamic trees"),
    ({"strategy": "off", "source": "ngram"}, "changes nothing"),
    ({"strategy": "off", "control.controller": "ema"}, "leave one of them out"),
    ({"source": "ngram", "head": "random"}, "drafts without a head"),
    ({"source": "head", "ngram_max": "6"}, "n-grams do not draft"),
    ({"invariant": "true", "acceptance": "block"}, "is about equal tokens"),
    ({"control.controller": "best"}, "expected one of goodput, static, ema, bandit"),
    ({"control.strategies": "[wide]"}, "strategy 'wide' is not understood"),
    ({"control.strategies": "[off,9_4_64]", "spec_verify_tokens": "6"}, "raise it to 10 or more"),
    ({"control.strategies": "[off,2_1_3]", "strategy": "6_1_7"}, "list it there"),
    ({"control.initial": "2_1_3"}, "static or ema"),
    ({"control.ema": '{"candidate_steps": [1]}'}, "has other settings"),
    ({"control.controller": "ema", "control.ema": '{"steps": 1}'}, "adaptive setting 'steps'"),
    ({"control.controller": "ema", "control.ema_file": "/no/such"}, "/no/such"),
    ({"control.controller": "bandit", "control.bandit": '{"eps": 1}'}, "'eps' of bandit"),
    ({"control.controller": "bandit", "control.goodput": '{"probe_fraction": 0.1}'}, "goodput"),
    ({"control.bs_threshold": "-1"}, "bs_threshold must be at least 0"),
]  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_every_program_refuses_the_same_in_its_own_spelling(door, settings, said, capsys):
    message = refused(door, settings, capsys)
    assert said in message
    if door in ("generate", "verify"):
        assert "speculation." not in message and "SpecConfig(" not in message


@pytest.mark.parametrize("door", DOORS)
def test_settings_of_ema_may_lie_in_a_file(door, tmp_path):
    file = tmp_path / "ema.json"
    file.write_text(json.dumps({"candidate_steps": [2, 5], "ema_alpha": 0.5}))
    found = read(door, {"control.controller": "ema", "control.ema_file": str(file)})
    assert found.control_config().arms == ("2_1_3", "5_1_6")


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("strategy", ["6_4_16", "4x2x1"])
def test_ema_stays_with_a_tree(door, strategy):
    found = read(door, {"control.controller": "ema", "strategy": strategy})
    assert found.control_config().arms == (strategy,)


@pytest.mark.parametrize("door", DOORS)
def test_a_strategy_of_ones_own_is_among_those_that_are_not_listed(door):
    found = read(door, {"control.controller": "goodput", "strategy": "6_4_16"})
    assert found.control_config().arms == (*ControlConfig().arms, "6_4_16")


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
    full = {f"tpu:{generation}" for generation in tpu.TUNING}
    assert full == {name for name in ATTENTION if name.startswith("tpu:")} - {"tpu:interpret"}
    assert set(choice.GENERATIONS.values()) == set(tpu.TUNING)


def test_the_flags_are_made_without_importing_jax():
    code = "import sys, serve.cli.arguments as a; a.build_parser(); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
