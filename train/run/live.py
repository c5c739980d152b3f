"""What a terminal shows of a run: a table of its last steps, progress and time left.

    step  reward  strategy  accept length  tok/s  ...
      11   0.250  4_1_5              2.31   1240
      12   0.281  4_1_5              2.34   1262
    step 12 of 40  ━━━━━━━━━━━          running for 0:03:20 left 0:07:00

Steps that leave the table are printed above it as the lines that other outputs get, so that all of
them can still be read.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from specjax.engine.request import Totals

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


@contextlib.contextmanager
def sample_bar(total: int) -> Iterator[Callable[[int, Totals], None]]:
    """Shows progress of `total` samples; yields the `on_progress` of `BaseEngine.generate`."""
    with tqdm(total=total, unit="sample", dynamic_ncols=True, disable=None) as bar:

        def show(ended: int, totals: Totals) -> None:
            bar.update(ended - bar.n)
            bar.set_postfix_str(f"{totals.tokens / max(totals.seconds, 1e-9):.0f} tok/s")

        yield show


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
        self._console, self._fields = console, fields
        self._rows: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._progress = Progress(
            TextColumn("[bold]step {task.completed} of {task.total}"),
            BarColumn(24),
            TextColumn("running for"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            get_time=clock,
            speed_estimate_period=3600,
        )
        self._task = self._progress.add_task("", total=steps, completed=first - 1)
        self._live = Live(
            self, console=console, refresh_per_second=2, vertical_overflow="crop", transient=False
        )
        self._live.start()

    @staticmethod
    def fits(console: Console) -> bool:
        """Returns whether the console is a terminal that can be drawn on."""
        return console.is_terminal and not console.is_dumb_terminal and not console.quiet

    def add(self, step: int, record: Mapping[str, Any]) -> None:
        """Adds the row of a step that has ended."""
        self._rows.append((step, record))
        self._progress.update(self._task, completed=step)
        while len(self._rows) > max(1, min(ROWS, self._console.height - 6)):
            self._live.console.print(line_of(self._fields, *self._rows.popleft()))
        self._live.refresh()

    def close(self) -> None:
        """Draws the table for the last time and leaves it there."""
        self._progress.stop_task(self._task)
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Group(self._table(), self._progress)

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
        table.add_column("step", justify="right", no_wrap=True)
        columns, room = [[Text(str(step)) for step, _ in self._rows]], self._console.width - 8
        first, *others = self._fields
        names = dict.fromkeys(name for _, record in self._rows for name in record)
        evaluations = [
            (name, "held out" if name == "eval/reward" else name.removeprefix("eval/"), "{:.3f}")
            for name in names
            if name == "eval/reward" or EVALUATION.fullmatch(name)
        ]
        for name, label, form in (first, *evaluations, *others):
            if name not in names:
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


def _cell(record: Mapping[str, Any], name: str, form: str) -> Text:
    value = record.get(name)
    if isinstance(value, (str, int, float)):
        return Text(form.format(value))
    return Text("not finite", "bold red") if name in record.get("nonfinite", ()) else Text("")
