"""What a terminal shows of a run: a table of its last steps, progress and time left.

    step  reward  strategy  accept length  tok/s  ...
      11   0.250  4_1_5              2.31   1240
      12   0.281  4_1_5              2.34   1262
    step 13 of 40  ━━━━━━━━━━━          running for 0:03:20, 0:07:00 left

Steps that leave the table are printed above it as the lines that other outputs get, so that all of
them can still be read.
"""

from __future__ import annotations

import datetime
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Fields = Sequence[tuple[str, str, str]]

# Fields of the line that is printed per step, if present: (metric, label, format).
CONSOLE_FIELDS: Fields = (
    ("rollout/reward", "reward", "{:.3f}"),
    ("control/strategy", "strategy", "{}"),
    ("rollout/drafted_accept_length", "accept length", "{:.2f}"),
    ("rollout/tokens_per_sec", "tok/s", "{:.0f}"),
    ("rollout/response_length_mean", "length", "{:.0f}"),
    ("train/loss", "loss", "{:+.4f}"),
    ("train/entropy", "entropy", "{:.3f}"),
    ("train/mtp_loss", "mtp", "{:.3f}"),
    ("time/rollout", "rollout", "{:.1f}s"),
    ("time/train", "train", "{:.1f}s"),
    ("time/draft", "draft", "{:.1f}s"),
)
ROWS = 12  # of the table, or as many as the terminal has room for
EVALUATION = re.compile(r"eval/.+/avg@\d+")  # the mean reward of an evaluation set
RECENT = 10  # records whose steps' mean duration gives the time left


def line_of(fields: Fields, step: int, record: Mapping[str, Any]) -> str:
    """Returns the line of a step, in rich's markup."""
    parts = [f"step {step:>4}"]
    for name, label, form in fields:
        value = record.get(name)
        if isinstance(value, (str, int, float)):
            parts.append(f"[dim]{label}[/dim] {escape(form.format(value))}")
        elif name in record.get("nonfinite", ()):
            parts.append(f"[bold red]{label} not finite[/bold red]")
    return "  ".join(parts)


class LiveTable:
    """A table at the bottom of a terminal; what is printed meanwhile appears above it.

    Args:
        console: console of a terminal.
        fields: (metric, label, format) of the columns.
        first: first step of this start.
        steps: last step of the run; None if it is not known.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        console: Console,
        fields: Fields,
        first: int = 1,
        steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._console, self._fields, self._steps, self._clock = console, fields, steps, clock
        self._rows: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._done, self._started = first - 1, clock()
        self._ends = deque([(self._done, self._started)], maxlen=RECENT + 1)  # (step, time)
        self._slow_start = True
        self._live = Live(
            self, console=console, refresh_per_second=2, vertical_overflow="crop", transient=False
        )
        self._live.start()

    @staticmethod
    def fits(console: Console) -> bool:
        """Whether the console is a terminal that can be drawn on."""
        return console.is_terminal and not console.is_dumb_terminal and not console.quiet

    def add(self, step: int, record: Mapping[str, Any]) -> None:
        """Adds the row of a step that has ended."""
        self._rows.append((step, record))
        if step <= self._done:  # an evaluation before the first step is no step
            self._ends.clear()
        elif len(self._ends) == 2 and self._slow_start:  # programs were compiled in the first one
            self._ends.popleft()
            self._slow_start = False
        self._done = step
        self._ends.append((step, self._clock()))
        while len(self._rows) > max(1, min(ROWS, self._console.height - 6)):
            self._live.console.print(line_of(self._fields, *self._rows.popleft()))
        self._live.refresh()

    def close(self) -> None:
        """Draws the table for the last time and leaves it there."""
        self._live.stop()

    def left(self) -> float | None:
        """Returns the seconds until the last step ends; None while no step has ended."""
        if self._steps is None or len(self._ends) < 2:
            return None
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        mean = (ended - began) / (last - first)
        rest, running = self._steps - last, self._clock() - ended
        # The step that runs may take longer than the mean: then the others are left.
        return max(mean * rest - running, mean * (rest - 1), 0.0)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Group(self._table(), self._progress())

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
        table.add_column("step", justify="right", no_wrap=True)
        columns, room = [[Text(str(step)) for step, _ in self._rows]], self._console.width - 8
        first, *others = self._fields
        for name, label, form in (first, *self._evaluations(), *others):
            if not any(name in record for _, record in self._rows):
                continue
            cells = [_cell(record, name, form) for _, record in self._rows]
            room -= max(map(len, (label, *cells))) + 2
            if room < 0:  # the first columns say most
                break
            justify = "left" if form == "{}" else "right"
            table.add_column(label, justify=justify, no_wrap=True)
            columns.append(cells)
        for row in zip(*columns, strict=True):
            table.add_row(*row)
        return table

    def _evaluations(self) -> list[tuple[str, str, str]]:
        """Returns columns of the mean rewards of evaluations, in order of appearance."""
        names = dict.fromkeys(name for _, record in self._rows for name in record)
        return [
            (name, "held out" if name == "eval/reward" else name.removeprefix("eval/"), "{:.3f}")
            for name in names
            if name == "eval/reward" or EVALUATION.fullmatch(name)
        ]

    def _progress(self) -> Table:
        line, total = Table.grid(padding=(0, 2, 0, 0)), self._steps
        text = f"running for {_duration(self._clock() - self._started)}"
        if total is None:
            line.add_row(Text(f"step {self._done + 1}"), Text(text, "dim"))
            return line
        if self._done >= total:
            text = text.replace("running for", "done after")
        elif (left := self.left()) is not None:
            text += f", {_duration(left)} left"
        bar = ProgressBar(total=max(total, 1), completed=self._done, width=24)
        step = Text(f"step {min(self._done + 1, total)} of {total}", "bold")
        line.add_row(step, bar, Text(text, "dim"))
        return line


def _cell(record: Mapping[str, Any], name: str, form: str) -> Text:
    value = record.get(name)
    if isinstance(value, (str, int, float)):
        return Text(form.format(value))
    if name in record.get("nonfinite", ()):
        return Text("not finite", "bold red")
    return Text("")


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))
