"""Result files, and ratios of turns."""

import json

import numpy as np
import pytest

from bench.record import alternate, figure, figures_in, paired_ratio_interval, write_result


def test_pairs_that_were_slowed_down_together_leave_no_trace_in_their_ratio():
    slow = np.linspace(1.0, 3.0, 9)
    assert paired_ratio_interval(2.0 * slow, slow) == (2.0, 2.0, 2.0)
    value, low, high = paired_ratio_interval([2.0, 4.2, 6.0], [1.0, 2.0, 3.0])
    assert value == pytest.approx(2.0) and low <= value <= high
    with pytest.raises(ValueError, match="got 2 and 1"):
        paired_ratio_interval([1.0, 2.0], [1.0])


def test_functions_take_turns_in_alternating_order():
    calls = []
    jobs = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    assert [len(values) for values in alternate(jobs, 3).values()] == [3, 3]
    assert calls == ["a", "b", "b", "a", "a", "b"]


def test_a_result_file_names_machine_versions_and_command_and_refuses_bare_figures(tmp_path):
    entry = figure(float("nan"), "s")
    path = write_result("x", {"path": tmp_path}, {"f": entry}, tmp_path / "x.json")
    result = json.loads(path.read_text())
    assert {"name", "date", "machine", "versions", "command", "settings", "figures"} <= set(result)
    assert result["figures"]["f"] == {"value": None, "unit": "s", "interval": None}
    with pytest.raises(ValueError, match="value, unit and interval"):
        write_result("x", {}, {"f": {"value": 1}}, tmp_path / "x.json")
    assert figures_in(path, {"path": str(tmp_path)}) == result["figures"]
    with pytest.raises(ValueError, match="path"):  # of other settings none are added
        figures_in(path, {"path": "elsewhere"})
