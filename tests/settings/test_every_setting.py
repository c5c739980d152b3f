"""Every setting of every program changes something, at the cheapest level at which it acts.

The settings come from the schemas themselves, so that a new one fails here until it has a row.
"""

import dataclasses
import sys

import draft_rows
import eval_rows
import pytest
import serve_rows
import train_rows
from library_rows import CHAIN, LIBRARY, chunk
from rows import Reaches, ReadBy, Refused, Row, check, leaves, make

from serve.settings import ServeConfig
from specjax import SpecConfig
from specjax.command_line import parse_config
from specjax.schema import absent_keys_of
from train.draft_schema import DraftRunConfig
from train.eval_schema import EvalSet
from train.schema import RLConfig, SFTConfig

TABLES = {
    **LIBRARY, **train_rows.TRAIN, **draft_rows.TABLES, EvalSet: eval_rows.EVAL_SET,
    ServeConfig: serve_rows.SERVE,
}  # fmt: skip
BASE = {**train_rows.BASE, **draft_rows.BASE, **eval_rows.BASE, **serve_rows.BASE}
SETTINGS = [
    pytest.param(program, name, id=f"{program.__name__}-{name}")
    for program, table in TABLES.items()
    for name in sorted({*leaves(program), *table})
]
SETTINGS += [
    pytest.param(program, name, id=f"{program.__name__}-{objective}-{name}")
    for objective, program in train_rows.OBJECTIVES.items()
    for name in sorted(leaves(program).keys() - leaves(RLConfig).keys())
]


@pytest.mark.parametrize(("program", "name"), SETTINGS)
def test_a_setting_changes_something(program, name):
    __tracebackhide__ = True
    assert name in leaves(program), f"{program.__name__} has no setting {name}; remove its row"
    row = TABLES.get(program, train_rows.OF_OBJECTIVES).get(name)
    assert row is not None, f"{program.__name__}.{name} has no row in tests/settings"
    check(program, name, row, LIBRARY, BASE.get(program, {}))


# --- the tables themselves ------------------------------------------------------------------------


@dataclasses.dataclass
class Program:
    """Attributes:
    idle: nothing reads it. used: something does. off: never taken.
    """

    idle: int = 0
    used: int = 0
    off: int = 0

    def __post_init__(self):
        if self.off:
            raise ValueError("off changes nothing here")


def used(cfg: Program) -> int:
    return 2 * cfg.used


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("idle", Row(1, used), "idle=1 changes nothing"),
        ("used", Row(0, used), "the row gives its default"),
        ("used", Refused(1, "nothing here"), "is taken; give it a row"),
        ("off", Refused(1, "another reason"), "off changes nothing here"),
        ("used", Reaches(1, lambda cfg: cfg, Program, "off"), "no row for off"),
        ("used", Reaches(1, lambda cfg: 3, Program, "used"), "int arrives"),
        ("idle", Reaches(1, lambda cfg: Program(), Program, "used"), "idle=1 changes nothing"),
        ("idle", ReadBy(1, sys.modules[__name__]), "nothing reads cfg.idle"),
    ],
)
def test_a_row_that_shows_nothing_fails(name, row, said):
    with pytest.raises(AssertionError, match=said):
        check(Program, name, row, {Program: {"used": Row(1, used)}}, {})


def test_rows_that_show_something_pass():
    library = {Program: {"used": Row(1, used)}}
    check(Program, "used", Row(1, used), library, {})
    check(Program, "used", Reaches(1, lambda cfg: cfg, Program, "used"), library, {})
    check(Program, "off", Refused(1, "nothing here"), library, {})
    check(Program, "used", ReadBy(1, sys.modules[__name__]), library, {})


def test_rows_of_settings_that_only_some_objectives_have_are_of_one_of_them():
    known = {name for program in train_rows.OBJECTIVES.values() for name in leaves(program)}
    assert train_rows.OF_OBJECTIVES.keys() <= known - leaves(RLConfig).keys()


def test_programs_of_equal_settings_are_traced_alike():
    """Or a row would be shown by the noise of tracing."""
    traced = [chunk.__wrapped__(SpecConfig(**CHAIN)) for _ in range(2)]
    assert traced[0] == traced[1]


@pytest.mark.parametrize("program", [RLConfig, SFTConfig])
def test_keys_that_a_program_does_not_have_are_in_no_help_and_print_and_say_why(program, capsys):
    assert absent_keys_of(program)
    for ask in ("--help", "--print-config"):
        with pytest.raises(SystemExit):
            parse_config(program, [ask])
    shown = capsys.readouterr().out
    for name, why in absent_keys_of(program).items():
        assert f"  {name}" not in shown and f"{name.rpartition('.')[2]}:" not in shown
        with pytest.raises(SystemExit):
            parse_config(program, [f"{name}=1"])
        assert f"unknown key '{name}': {why}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "settings"),
    [
        (RLConfig, {"optim.lr": 0.5, "rollout.control.controller": "bandit", "eval.every": 3}),
        (SFTConfig, {"draft.optim.lr": 0.5, "packing.rows": 4}),
        (DraftRunConfig, {"kind": "mtp", "epochs": 3, "states": "cache", "rollout.n": 2}),
        (ServeConfig, {"model": "d", "limits.n": 3, "speculation.strategy": "2_1_3"}),
    ],
)
def test_configurations_of_rows_are_those_of_the_command_line(program, settings):
    typed, _ = parse_config(program, [f"{name}={value}" for name, value in settings.items()])
    assert make(program, settings) == typed
