"""The table that a terminal shows during a run, and the time left."""

import io

import pytest
from rich.console import Console

from train.live import CONSOLE_FIELDS, LiveTable
from train.log import MetricsLogger

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
    assert last.split("━")[0].strip() == "step 3 of 40"
    assert last.rstrip().endswith("running for 1:00, 19 min left")  # 38 steps of 30 s


def test_evaluations_have_columns_beside_the_reward(shown):
    table, _, show = shown
    table.add(0, {"eval/reward": 0.125, "eval/aime/avg@8": 0.5, "eval/aime/pass@8": 0.75})
    table.add(1, STEP)
    head, first, second, _ = show().splitlines()
    assert head.split()[:5] == ["step", "reward", "held", "out", "aime/avg@8"]
    assert first.split() == ["0", "0.125", "0.500"] and second.split()[1] == "0.250"


def test_the_time_left_is_that_of_the_last_steps_and_falls_while_one_runs(shown):
    table, clock, _ = shown
    assert table.left() is None
    clock.now += 500  # an evaluation before the first step is none of them
    table.add(0, {})
    assert table.left() is None
    clock.now += 90  # programs are compiled in the first step
    table.add(1, STEP)
    assert table.left() == 39 * 90
    for step in (2, 3):
        clock.now += 10
        table.add(step, STEP)
        assert table.left() == (40 - step) * 10
    clock.now += 4
    assert table.left() == 366
    clock.now += 100  # the step takes longer than those before it
    assert table.left() == 360
    for step in range(4, 15):
        clock.now += 20
        table.add(step, STEP)
    assert table.left() == 26 * 20


def test_rows_that_leave_the_table_are_printed_above_it_as_lines(shown):
    table, _, show = shown
    for step in range(1, 11):
        table.add(step, STEP)
    assert [line.split()[0] for line in show().splitlines()[1:-1]] == [*map(str, range(3, 11))]
    output = table._console.file.getvalue()
    assert all(f"step    {step}  \x1b[2mreward\x1b[0m" in output for step in (1, 2))
    assert "step    3  \x1b[2mreward" not in output


def test_a_narrow_terminal_shows_the_first_columns_whole():
    console = Console(file=io.StringIO(), force_terminal=True, width=40, height=20, _environ={})
    table = LiveTable(console, CONSOLE_FIELDS, 1, 5)
    table.add(1, STEP)
    table.close()
    paper = Console(file=io.StringIO(), width=40)
    paper.print(table)
    assert paper.file.getvalue().splitlines()[0].split() == ["step", "reward", "strategy"]


@pytest.mark.parametrize(("live", "terminal"), [(True, False), (False, True)])
def test_without_terminal_or_setting_every_step_is_a_line_of_its_own(
    tmp_path, monkeypatch, capsys, live, terminal
):
    monkeypatch.setattr("rich.console.Console.is_terminal", terminal)
    with MetricsLogger(tmp_path, live=live, steps=2) as logger:
        logger.log(1, {"rollout/reward": 0.5})
        assert "step    1" in capsys.readouterr().out
        assert logger._live is None


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
    assert "done after 0:00" in ending
