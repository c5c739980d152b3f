"""The command line of every program: what it accepts, what it says when it does not."""

import copy
import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest

from specjax.command_line import (
    ConfigError,
    fingerprint,
    load_config,
    parse_config,
    require_same_settings,
)
from specjax.schema import Needs, option
from train.schema import RLConfig
from train.trainer import Trainer


@dataclass
class Rollout:
    n: int = option(8, "samples per prompt")
    temperature: float = option(1.0, "sampling temperature")
    strategy: str = option("4_1_5", "draft strategy")


@dataclass
class Optimizer:
    lr: float = option(1e-4, "peak learning rate")
    clip: float | None = option(None, "largest gradient norm; null for none")


@dataclass
class Config:
    steps: int = option(10, "number of updates")
    mode: str = option("online", "how the draft head is trained", choices=("none", "online"))
    betas: list[float] = option([0.9, 0.95], "Adam's decay rates")
    resume: bool = option(False, "go on from the last checkpoint")
    rollout: Rollout = option(Rollout, "generation")
    optimizer: Optimizer = option(Optimizer, "the policy's optimizer")

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps: expected at least 1, got {self.steps}")


def _error(capsys, *argv: str, schema=Config) -> str:
    with pytest.raises(SystemExit) as exit_info:
        load_config(schema, argv, prog="train.rl")
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and not captured.out
    assert captured.err.startswith("python -m train.rl: error: ")
    return captured.err


def test_arguments_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("steps: 3\nrollout: {n: 4}\noptimizer: {clip: 1}\n")
    config = load_config(
        Config, ["--config", str(file), "rollout.n=2", "betas=[0.8,0.9]", "optimizer.lr=3e-4"]
    )
    assert isinstance(config, Config) and isinstance(config.rollout, Rollout)
    assert (config.steps, config.rollout.n, config.rollout.strategy) == (3, 2, "4_1_5")
    assert (config.optimizer.lr, config.optimizer.clip, config.betas) == (3e-4, 1.0, [0.8, 0.9])
    assert load_config(Config, ["optimizer.clip=null"]).optimizer.clip is None


def test_help_lists_every_key_with_type_default_and_documentation(capsys):
    with pytest.raises(SystemExit) as exit_info:
        load_config(Config, ["--help"], prog="train.rl", description="GRPO training")
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert "GRPO training" in text and "python -m train.rl" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert lines["rollout.n=8"].split()[1:] == ["int", "samples", "per", "prompt"]
    assert "float | None" in lines["optimizer.clip=null"]
    assert "[one of none, online]" in lines["mode=online"]
    assert "generation" in lines["rollout"]


def test_print_config_prints_yaml_that_reads_back_to_the_same_config(tmp_path, capsys):
    arguments = ["steps=7", "rollout.temperature=0.5"]
    with pytest.raises(SystemExit) as exit_info:
        load_config(Config, [*arguments, "--print-config"])
    assert exit_info.value.code == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert load_config(Config, ["--config", str(file)]) == load_config(Config, arguments)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("rolout.n=2", "unknown key 'rolout'; did you mean 'rollout'?"),
        ("lr=1", "unknown key 'lr'; did you mean 'optimizer.lr'?"),
        ("--stepz=3", "unknown key 'stepz'; did you mean 'steps'?"),
        ("steps=2.5", "steps: expected a whole number (int), got 2.5"),
        ("steps=", "steps: expected a whole number (int), got null"),
        ("rollout.temperature=hot", "rollout.temperature: expected a number (float), got 'hot'"),
        ("rollout=3", "rollout is a section: set rollout.KEY=value instead"),
        ("mode=onlin", "mode: expected one of none, online, got onlin"),
        ("steps=0", "steps: expected at least 1, got 0"),
        ("steps", "expected key=value, got 'steps'"),
        ("betas=[a]", "betas: entry 0: expected a number (float), got 'a'"),
        ("resume=yes", "resume: expected true or false (bool), got 'yes'; write true"),
    ],
)
def test_a_wrong_argument_is_one_clear_message_and_status_2(capsys, argument, expected):
    assert expected in _error(capsys, argument)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("stepz: 3", "c.yaml: unknown key 'stepz'; did you mean 'steps'?"),
        ("steps: [1", "c.yaml is not valid YAML"),
        ("steps: 1\nsteps: 2", "the key 'steps' is given twice"),
        ("steps: many", "c.yaml: steps: expected a whole number (int), got 'many'"),
    ],
)
def test_a_wrong_file_is_one_clear_message_and_status_2(tmp_path, capsys, content, expected):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    assert expected in _error(capsys, "--config", str(file))


def test_numbers_and_strategies_are_read_as_they_are_written(tmp_path):
    """YAML 1.1 takes 4_1_5 for 415 and 1e-3 for text."""
    file = tmp_path / "c.yaml"
    file.write_text("rollout: {strategy: 6_1_7}\noptimizer: {lr: 1e-3}\n")
    config = load_config(Config, ["--config", str(file)])
    assert (config.rollout.strategy, config.optimizer.lr) == ("6_1_7", 1e-3)
    config = load_config(Config, ["rollout.strategy=2_1_3", "optimizer.lr=-.5E+2", "steps=007"])
    assert (config.rollout.strategy, config.optimizer.lr, config.steps) == ("2_1_3", -50.0, 7)


@pytest.mark.parametrize(
    "argv",
    [
        ["steps=3", "rollout.n=2", "optimizer.lr=-1e-3", "resume=true"],
        ["--steps", "3", "--rollout.n", "2", "--optimizer.lr", "-1e-3", "--resume", "true"],
        ["--resume", "--steps", "3", "rollout.n=2", "--optimizer.lr=-1e-3"],
    ],
)
def test_a_setting_may_be_written_with_dashes_and_without(argv):
    config = load_config(Config, argv)
    assert (config.steps, config.rollout.n, config.optimizer.lr) == (3, 2, -1e-3)
    assert config.resume is True


@dataclass
class Words:
    start_from: str | None = option(None, "directory")
    template: str = option("{question}", "text")


@dataclass
class Ruled:
    rules: ClassVar[tuple[Needs, ...]] = (
        Needs(
            ("rollout.*", "!rollout.n"),
            lambda v: v["mode"] == "online",
            "[mode] samples nothing; set mode=online, or leave it out",
        ),
        Needs(("warm",), lambda v: v["steps"] > 1, "there is one step", unless=7),
    )

    mode: str = option("online", "what is done")
    steps: int = option(5, "number of updates")
    warm: int = option(0, "of them")
    rollout: Rollout = option(Rollout, "generation")


def test_a_setting_that_changes_nothing_is_refused_with_the_reason(capsys):
    message = _error(capsys, "mode=idle", "rollout.temperature=0.5", schema=Ruled)
    assert "rollout.temperature=0.5 changes nothing: mode=idle samples nothing; set" in message
    assert "warm=2 changes nothing: there is one step" in _error(
        capsys, "steps=1", "warm=2", schema=Ruled
    )
    for argv in (["mode=idle", "rollout.temperature=1.0", "rollout.n=3"], ["steps=1", "warm=7"]):
        load_config(Ruled, argv)


def test_a_command_line_may_make_settings_of_a_file_idle_but_a_file_not_its_own(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("rollout: {temperature: 0.5}\n")
    assert load_config(Ruled, ["--config", str(file), "mode=idle"]).mode == "idle"
    file.write_text("rollout: {temperature: 0.5}\nmode: idle\n")
    message = _error(capsys, "--config", str(file), schema=Ruled)
    assert "rollout.temperature=0.5 changes nothing" in message
    assert load_config(Ruled, ["--config", str(file), "mode=online"]).rollout.temperature == 0.5


# --- settings in a checkpoint ---------------------------------------------------------------------


def saved_settings(*gone: str, schema=RLConfig) -> dict:
    """The default settings as a version saved them that did not have these yet."""
    settings = fingerprint(schema())
    for name in gone:
        *above, last = name.split(".")
        del functools.reduce(dict.__getitem__, above, settings)[last]
    return settings


@pytest.mark.parametrize("gone", ["seed", "algo", "draft.spot.gaps", "rollout.control"])
def test_a_setting_that_the_version_before_lacked_is_no_difference_at_its_default(gone):
    require_same_settings(saved_settings(gone), fingerprint(RLConfig()), RLConfig)


@pytest.mark.parametrize(
    ("gone", "setting", "section"),
    [
        ("algo.tis", "algo.tis=true", "algo"),
        ("rollout.control", "rollout.control.bs_threshold=4", "rollout"),
        ("rewards.weights", "rewards.weights=[0.5]", "rewards"),
        ("draft.spot.updates", "optim.lr=0.5", "optim"),
    ],
)
def test_but_where_it_has_another_value_the_run_is_not_resumed(gone, setting, section):
    current = fingerprint(parse_config(RLConfig, [setting])[0])
    with pytest.raises(ConfigError, match=f"made with other settings of {section};"):
        require_same_settings(saved_settings(gone), current, RLConfig)


def test_a_run_whose_choice_has_another_name_since_goes_on():
    current = fingerprint(parse_config(RLConfig, ["draft.loss=kl"])[0])
    saved = copy.deepcopy(current)
    saved["draft"]["loss"] = "soft_ce"
    require_same_settings(saved, current, RLConfig)
    saved["draft"]["loss"] = "ce"
    said = r"made with other settings of draft; resume .* configuration \(draft.loss=ce\)"
    with pytest.raises(ConfigError, match=said):
        require_same_settings(saved, current, RLConfig)


def test_in_invariant_mode_one_replica_without_devices_of_its_own_is_another_program():
    def settings(*given) -> dict:
        cfg, _ = parse_config(RLConfig, ["model=m", "rollout.invariant=true", *given])
        return Trainer.fingerprint(SimpleNamespace(cfg=cfg))

    one, two, three = settings(), *(settings(f"rollout.replicas={n}") for n in (2, 3))
    require_same_settings(two, three, RLConfig)
    for saved, current in ((one, two), (two, one)):
        with pytest.raises(ConfigError, match="made with other settings of rollout;"):
            require_same_settings(saved, current, RLConfig)
