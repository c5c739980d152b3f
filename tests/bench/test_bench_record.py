"""Result files, ratios of turns, and how subcommands are found."""

import json
import shutil
import subprocess

import numpy as np
import pytest

from bench.command import run_subcommand
from bench.record import RESULTS, alternate, figure, paired_ratio_interval, write_result


def test_pairs_that_were_slowed_down_together_leave_no_trace_in_their_ratio():
    slow = np.linspace(1.0, 3.0, 9)
    value, low, high = paired_ratio_interval(2.0 * slow, slow)
    assert value == low == high == 2.0
    value, low, high = paired_ratio_interval([2.0, 4.2, 6.0], [1.0, 2.0, 3.0])
    assert value == pytest.approx(2.0) and low <= value <= high
    with pytest.raises(ValueError, match="got 2 and 1"):
        paired_ratio_interval([1.0, 2.0], [1.0])


def test_functions_take_turns_in_alternating_order():
    calls = []
    jobs = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    seconds = alternate(jobs, 3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert all(len(values) == 3 for values in seconds.values())


def test_a_result_file_names_machine_versions_and_command_and_refuses_bare_figures(tmp_path):
    entry = figure(float("nan"), "s")
    path = write_result("x", {"path": tmp_path}, {"f": entry}, tmp_path / "x.json")
    result = json.loads(path.read_text())
    assert {"name", "date", "machine", "versions", "command", "settings", "figures"} <= set(result)
    assert result["figures"]["f"] == {"value": None, "unit": "s", "interval": None}
    if shutil.which("git"):
        command = ["git", "-C", str(RESULTS), "rev-parse", "HEAD"]
        head = subprocess.run(command, capture_output=True, text=True)
        if head.returncode == 0:  # else it is no checkout, or not ours to ask
            named = result["versions"]["specjax"].removesuffix("-dirty")
            assert len(named) >= 12 and head.stdout.startswith(named)
    with pytest.raises(ValueError, match="value, unit and interval"):
        write_result("x", {}, {"f": {"value": 1}}, tmp_path / "x.json")


def test_a_subcommand_gets_its_arguments_and_a_wrong_one_is_named(capsys):
    functions = {"path": "posixpath:basename", "other": "no.such:module"}
    assert run_subcommand("x", "All of it.", {"path": "builtins:list"}, ["path", "a"]) == ["a"]
    assert run_subcommand("x", "All of it.", functions, ["--help"]) is None
    assert "usage: python -m bench.x {path,other}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="expected one of path, other, got 'pth'; did you mean"):
        run_subcommand("x", "All of it.", functions, ["pth"])
    with pytest.raises(SystemExit, match="got nothing"):
        run_subcommand("x", "All of it.", functions, [])
