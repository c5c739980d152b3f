"""The table that a terminal shows during a run."""

import io

import pytest
from rich.console import Console

from train.run.live import CONSOLE_FIELDS, LiveTable
from train.run.log import MetricsLogger

STEP = {
    "rollout/reward": 0.25,
    "control/strategy": "4_1_5",
    "rollout/drafted_accept_length": 2.5,
    "rollout/tokens_per_sec": 1240.0,
    "train/loss": None,
    "nonfinite": ["train/loss"],
    "time/train": 3.0,
}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def shown():
    """(table of a run of 40 steps, its clock, function that returns what it shows now)."""
    clock = Clock()
    console = Console(
        file=io.StringIO(), force_terminal=True, width=90, height=14, highlight=False, _environ={}
    )
    table = LiveTable(console, CONSOLE_FIELDS, 1, 40, clock)

    def show() -> str:
        paper = Console(file=io.StringIO(), width=90)
        paper.print(table)
        return paper.file.getvalue()

    yield table, clock, show
    table.close()


def test_the_table_has_a_row_per_step_with_the_columns_that_have_values(shown):
    table, clock, show = shown
    for step in (1, 2):
        clock.now += 30
        table.add(step, STEP | {"rollout/reward": step / 4})
    head, first, second, last = show().splitlines()
    assert head.split() == [
        "step", "reward", "strategy", "accept", "length", "tok/s", "loss", "train"
    ]  # fmt: skip
    assert first.split() == ["1", "0.250", "4_1_5", "2.50", "1240", "not", "finite", "3.0s"]
    assert second.split()[:2] == ["2", "0.500"]
    assert last.split("━")[0].strip() == "step 2 of 40"
    assert last.rstrip().endswith("running for 0:01:00 left 0:19:00")  # 38 steps of 30 s


def test_a_terminal_gets_the_table_and_keeps_its_last_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("TERM", "xterm")
    with MetricsLogger(tmp_path, steps=2) as logger:
        for step in (1, 2):
            logger.log(step, {"rollout/reward": step / 4})
        print("WARNING: in between")
    output = capsys.readouterr().out
    assert "WARNING: in between" in output
    ending = output.rpartition("reward")[2]
    assert "0.250" in ending and "0.500" in ending and "step 2 of 2" in ending
