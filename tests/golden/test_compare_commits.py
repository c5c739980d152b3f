"""What the comparison of two commits calls a difference."""

import json
import math

import pytest
from compare_commits import differences


def recorded(close, equal=(1, 2)):
    return {"rl": json.loads(json.dumps({"equal": list(equal), "close": close}))}


@pytest.mark.parametrize(
    ("base", "here"),
    [
        ([[1.0, -2.0], [3.0]], [[1.0 + 1e-6, -2.0], [3.0]]),
        ([-math.inf, None], [-math.inf, None]),
        ([{"train/loss": 0.5}], [{"train/loss": 0.5}]),
    ],
)
def test_equal_and_close_recordings_do_not_differ(base, here):
    assert list(differences(recorded(base), recorded(here))) == []


@pytest.mark.parametrize(
    ("base", "here", "distance"),
    [
        ([1.0, 2.0], [1.0, 2.5], "0.5"),
        ([1.0, 2.0], [math.nan, 2.0], "inf"),
        ([1.0, 2.0], [1.0, math.nan], "inf"),
        ([math.nan], [math.nan], "inf"),
        ([math.inf], [-math.inf], "inf"),
        ([1.0], [math.inf], "inf"),
        ([{"a": 1.0, "b": 1.0}], [{"a": 1.0, "b": math.nan}], "inf"),
        ([1.0, 2.0], [1.0], "inf"),
        ([{"a": 1.0}], [{"b": 1.0}], "inf"),
        ([1.0], [None], "inf"),
    ],
)
def test_numbers_that_are_far_apart_or_none_are_told(base, here, distance):
    [line] = differences(recorded(base), recorded(here))
    assert line == f"rl: expected a difference of at most 1e-05, got {distance}"


def test_other_ids_and_other_names_are_told():
    [line] = differences(recorded([], [1, 2]), recorded([], [1, 3]))
    assert line.startswith("rl: expected equal values, got\n  base [1, 2]")
    assert [*differences(recorded([]), {})] == ["rl: recorded in the base only"]
    assert [*differences({}, recorded([]))] == ["rl: recorded here only"]
