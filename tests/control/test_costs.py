"""Seconds per round: calibrated, followed, compared, guessed."""

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


def test_the_first_chunk_after_another_strategy_moves_its_own_cost_alone():
    table = CostTable([1], {"off": [1.0], "4_1_5": [2.0]})
    seen(table, "4_1_5", 2.0)
    doubt = table.slack("off", 1)
    for _ in range(12):
        seen(table, "off", 1.25)
        seen(table, "4_1_5", 2.0)
    assert table.seconds("off", 1) == pytest.approx(1.25, rel=0.03)
    assert table.seconds("4_1_5", 1) == pytest.approx(2.0, rel=0.01)
    assert 0 < table.slack("off", 1) < doubt, "it was compared often"


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


def test_of_several_measurements_the_least_counts():
    table = CostTable.from_samples({("off", 1): [3.0, 2.0, 4.0], ("off", 2): [4.0]})
    assert table.seconds("off", 1) == pytest.approx(2.0)
    assert table.seconds("off", 2) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("buckets", "seconds", "beside"),
    [
        ([], {}, None),
        ([4, 2], {}, None),
        ([0, 2], {}, None),
        ([1, 2], {"off": [1.0]}, None),
        ([1], {"off": [0.0]}, None),
        ([1], {"off": [math.inf]}, None),
        ([1], {}, [-1.0]),
        ([1], {}, [math.nan]),
        ([1, 2], {}, [0.1]),
    ],
)
def test_tables_that_make_no_sense_are_refused(buckets, seconds, beside):
    with pytest.raises(ValueError):
        CostTable(buckets, seconds, beside)


def test_a_state_is_json_and_goes_on_the_same():
    table = cost_table("cpu")
    before = table.state()
    controller = Goodput(ARMS, table)
    drive(controller, World(cost_table("cpu")), 2, 200)
    assert table.state() == before, "a controller does not change the table it was given"
    again = CostTable.from_state(json.loads(json.dumps(controller.costs.state())))
    for one in (again, controller.costs):
        seen(one, "off", 0.01)
    assert again.state() == controller.costs.state()
