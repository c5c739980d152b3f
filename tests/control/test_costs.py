"""Seconds per round: calibrated, followed, compared, guessed."""

import itertools
import json
import math

import pytest
from control_sim import ARMS, World, cost_table, drive

from specjax.control import CostTable, Goodput


def seen(table: CostTable, name: str, seconds: float, times: int = 1) -> None:
    for _ in range(times):
        table.observe(name, 1, seconds, 16)


def test_a_chunk_of_what_ran_before_moves_all_strategies_alike():
    table = CostTable([1], {"off": [1.0], "4_1_5": [2.0]})
    seen(table, "4_1_5", 4.0, times=60)
    assert table.seconds("4_1_5", 1) == pytest.approx(4.0, rel=0.05)
    assert table.seconds("off", 1) == pytest.approx(table.seconds("4_1_5", 1) / 2)


def test_one_outlier_moves_nothing_and_a_lasting_change_is_followed():
    table = CostTable([1], {"off": [1.0]})
    seen(table, "off", 1.0, times=3)
    seen(table, "off", 1000.0)
    assert table.seconds("off", 1) == pytest.approx(1.0)
    seen(table, "off", 2.0, times=60)
    assert table.seconds("off", 1) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, None])
def test_costs_ignore_what_is_no_time(seconds):
    table = CostTable([1], {"off": [1.0]})
    seen(table, "off", seconds)
    assert table.seconds("off", 1) == 1.0


def test_seconds_beside_the_rounds_are_told_apart_from_theirs():
    table = CostTable([1], {"off": [1.0]}, beside=[4.0])
    assert table.seconds("off", 1, rounds=8) == pytest.approx(1.5)
    table.observe("off", 1, 1.0 + 4.0 / 8, 8)
    assert table.seconds("off", 1) == pytest.approx(1.0)


def test_missing_costs_are_guessed_from_what_is_known():
    table = CostTable([1, 4, 16], {"off": [1.0, None, 4.0], "4_1_5": [None, None, None]})
    assert table.seconds("off", 2) == pytest.approx(2.0)
    assert 1.0 < table.seconds("4_1_5", 1) < 2.0
    assert table.known("off", 1)
    assert not table.known("4_1_5", 1)
    assert table.seconds("off", 1000) == pytest.approx(4.0)
    assert 0 < CostTable().seconds("8_4_32", 3) < 1
    seen(table, "4_1_5", 7.0)
    assert table.seconds("4_1_5", 1) == pytest.approx(7.0), "measured once is better than a guess"


# Of one slot: from 100 to 1100 tokens a plain round takes twice as long, one of 4_1_5 half more.
GROWING = CostTable([1, 4], {"off": [1.0, 2.0], "4_1_5": [2.0, 4.0]}, slope=1e-3, short=100)


def growing() -> CostTable:
    return CostTable.from_state(GROWING.state())


def test_a_cost_is_linear_in_the_tokens_of_all_slots_together():
    assert GROWING.seconds("off", 1, context=100) == pytest.approx(1.0)
    assert GROWING.seconds("off", 1, context=1100) == pytest.approx(2.0)
    assert GROWING.seconds("4_1_5", 1, context=1100) == pytest.approx(3.0)
    assert GROWING.seconds("off", 1) == pytest.approx(1.0), "the short context, if none is named"
    assert GROWING.seconds("off", 4, context=4400) == pytest.approx(6.0)
    assert GROWING.seconds("off", 3, context=4400) == pytest.approx(6.0), "of three long ones, too"
    assert GROWING.seconds("off", 4, context=0) == pytest.approx(1.6)


def test_a_growing_context_is_no_change_of_the_machine():
    """Or costs would be too high once samples are short again, and the growth would count twice."""
    table = growing()
    for length in range(100, 1100, 10):
        table.observe("off", 1, GROWING.seconds("off", 1, context=length), 16, length)
    for name, context in itertools.product(("off", "4_1_5"), (100, 1100)):
        expected = GROWING.seconds(name, 1, context=context)
        assert table.seconds(name, 1, context=context) == pytest.approx(expected)


def test_a_slower_machine_is_followed_at_a_long_context():
    table = growing()
    for _ in range(60):
        table.observe("4_1_5", 1, 2 * 3.0, 16, 1100)
    assert table.seconds("4_1_5", 1, context=1100) == pytest.approx(6.0, rel=0.02)
    assert table.seconds("off", 1) > 1.5


def test_a_state_is_json_and_goes_on_the_same():
    table = cost_table("h200_8b")
    before = table.state()
    controller = Goodput(ARMS, table)
    drive(controller, World(cost_table("h200_8b"), length=500.0), 2, 200)
    assert table.state() == before, "a controller does not change the table it was given"
    again = CostTable.from_state(json.loads(json.dumps(controller.costs.state())))
    for one in (again, controller.costs):
        seen(one, "off", 0.01)
        one.observe("4_1_5", 1, 0.02, 16, 900)
    assert again.state() == controller.costs.state()
