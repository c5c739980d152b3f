"""Logs the metrics of a run: JSON lines, the console, and optionally TensorBoard and wandb.

`metrics.jsonl` holds one JSON object per step, from which plots and tables are made. When a run is
resumed, an unfinished last line and the steps that will be repeated are dropped. TensorBoard and
wandb get the numbers under the same names. In a terminal the last steps are a table that is updated
while the run goes on (`train.run.live`); elsewhere each step prints a line.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from train.run.files import METRICS_FILE, keep_before, move_aside, read_lines
from train.run.live import CONSOLE_FIELDS, LiveTable, line_of


class MetricsLogger:
    """Writes the metrics of a run; on every process but the first it does nothing.

    Args:
        out_dir: the run's directory, created when absent.
        tensorboard: also write event files to `out_dir/tensorboard`.
        wandb: also send to Weights & Biases; a resumed run continues the same wandb run.
        resume_step: the first step that will be logged; records of it and of later steps are
            removed. None starts a new file and moves an existing one aside.
        console_fields: (metric, label, format) of the line printed per step.
        live: whether a terminal shows a table that is updated during the run.
        steps: number of the last step of the run, for the time left; None if it is not known.
        settings: settings of the run, which wandb shows; None for none.

    Raises:
        ModuleNotFoundError: TensorBoard or wandb is not installed, and a setting needs it.
    """

    def __init__(
        self,
        out_dir: str | Path,
        tensorboard: bool = False,
        wandb: bool = False,
        resume_step: int | None = None,
        console_fields: Sequence[tuple[str, str, str]] = CONSOLE_FIELDS,
        live: bool = True,
        steps: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        self.path = Path(out_dir) / METRICS_FILE
        self._fields = console_fields
        self._file = self._board = self._wandb = self._live = None
        self._active = jax.process_index() == 0
        self._console = Console(quiet=not self._active, highlight=False, soft_wrap=True)
        if not self._active:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Optional packages first, so that a missing one leaves the files of an earlier run alone.
        if tensorboard:
            self._board = _tensorboard_writer(self.path.parent / "tensorboard", resume_step)
        if wandb:
            self._wandb = _wandb_run(self.path.parent, resume_step, settings)
        if resume_step is not None:
            keep_before(self.path, resume_step)
        elif self.path.exists():
            move_aside(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        if live and LiveTable.fits(self._console):
            first = 1 if resume_step is None else resume_step
            self._live = LiveTable(self._console, console_fields, first, steps)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records one step and prints its line.

        Args:
            step: the step that the metrics belong to; each step is logged once.
            metrics: name -> number, 0-d array, string, or list of numbers. A value that is not
                finite is stored as null, named under "nonfinite", and warned about.
        """
        if self._file is None:
            return
        record: dict[str, Any] = {"step": int(step), "wall_time": round(time.time(), 3)}
        nonfinite = []
        for name, value in metrics.items():
            record[name], finite = _plain(value)
            if not finite:
                nonfinite.append(name)
        if nonfinite:
            record["nonfinite"] = nonfinite
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        numbers = {
            name: value
            for name, value in record.items()
            if isinstance(value, (int, float)) and name not in ("step", "wall_time")
        }
        if self._board is not None:
            for name, value in numbers.items():
                _add_scalar(self._board, name, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)
        if self._live is not None:
            self._live.add(step, record)
        else:
            self._console.print(line_of(self._fields, step, record))
        if nonfinite:
            self._console.print(
                f"WARNING: step {step}: not finite: {', '.join(nonfinite)}",
                style="bold white on red",
                markup=False,
            )

    def summary_table(self, rows: Sequence[Mapping[str, Any]], title: str = "") -> None:
        """Prints rows (column name -> value) as one table; columns in order of appearance.

        A live table ends here, with its last rows above.
        """
        self._stop_live()
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table = Table(title=title or None, title_justify="left")
        for index, name in enumerate(columns):
            numeric = index > 0 and all(not isinstance(row.get(name), str) for row in rows)
            table.add_column(name, justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*(_cell(row.get(name)) for name in columns))
        self._console.print(table, soft_wrap=False)

    def close(self) -> None:
        """Flushes and closes everything; more than one call does no harm."""
        self._stop_live()
        for sink in (self._file, self._board):
            if sink is not None:
                sink.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._file = self._board = self._wandb = None

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.close()
        self._live = None


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """The records of a run directory (or of a .jsonl file), in order of steps.

    An unfinished last line, left by a killed run, is ignored.

    Raises:
        FileNotFoundError: there is no such file.
        RunFileError: a line before the last one is damaged; the message has its number.
    """
    path = Path(run)
    path = path / METRICS_FILE if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"no metrics at {path}: expected the directory of a run")
    return sorted(read_lines(path), key=lambda record: record["step"])


def _plain(value: Any) -> tuple[Any, bool]:
    """(JSON value, whether all numbers are finite); numbers that are not become None."""
    if value is None or isinstance(value, (str, bool)):
        return value, True
    if isinstance(value, (list, tuple)):
        pairs = [_plain(item) for item in value]
        return [plain for plain, _ in pairs], all(finite for _, finite in pairs)
    number = np.asarray(value)
    if number.ndim > 0:
        return _plain(number.tolist())
    scalar = number.item()
    if isinstance(scalar, float) and not math.isfinite(scalar):
        return None, False
    return scalar, True


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)


def _need(module: str, setting: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"{setting} needs {module}, but {module} is not installed: pip install 'specjax[log]'"
    )


def _tensorboard_writer(directory: Path, resume_step: int | None) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError as error:
        raise _need("tensorboardX", "TensorBoard") from error
    return SummaryWriter(str(directory), purge_step=resume_step)


def _add_scalar(board: Any, name: str, value: float, step: int) -> None:
    """Writes a number under its own name: `add_scalar` replaces characters such as that of avg@8.

    TensorBoard takes any name; tensorboardX keeps to those of an old version of TensorFlow.
    """
    from tensorboardX.proto.summary_pb2 import Summary

    board.file_writer.add_summary(
        Summary(value=[Summary.Value(tag=name, simple_value=float(value))]), step
    )


def _wandb_run(run_dir: Path, resume_step: int | None, settings: Mapping[str, Any] | None) -> Any:
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise _need("wandb", "wandb") from error
    id_file = run_dir / "wandb_id"
    if resume_step is None or not id_file.exists():
        id_file.write_text(secrets.token_hex(4))
    return wandb.init(
        dir=str(run_dir),
        name=run_dir.name,
        id=id_file.read_text(),
        resume="allow",
        config=dict(settings or {}),
        allow_val_change=True,  # a resumed run may have other steps
    )


# --- replicas -----------------------------------------------------------------------------------

TRACE_FILE = "replicas.jsonl"


class Trace:
    """Records the times in which each replica was busy, idle or training, as JSON lines.

        {"step": 3, "replica": 1, "event": "busy", "start": 0.0, "end": 1.25}

    `event` is `busy` (the replica has samples), `idle` (it has none), `draft_gap` (it trained the
    draft head in a gap of the rollout), `draft_after` (it trained the head after the rollout), or
    `rollout` (the whole rollout; `replica` is null). Times are in seconds since the rollout began.
    An update of the draft head ends when the host notices that it is done.

    Args:
      replicas: number of replicas of this process.
      first: number of the first of them in the job.

    Attributes:
      events: events of the current or last step.
    """

    def __init__(self, replicas: int, first: int = 0):
        self.replicas, self._first = replicas, first
        self.events: list[dict[str, Any]] = []
        self._truncated = False
        self.begin(0)

    def begin(self, step: int) -> None:
        """Starts the record of a rollout."""
        self._step, self._zero, self.events = step, time.perf_counter(), []
        self._since = [0.0] * self.replicas
        self._busy = [True] * self.replicas  # until `record_idle` is called

    def record_idle(self, replicas: Sequence[int]) -> None:
        """Records which replicas are idle now; the others are busy."""
        now = time.perf_counter() - self._zero
        for replica in range(self.replicas):
            busy = replica not in replicas
            if busy != self._busy[replica]:
                self._close(replica, now)
                self._busy[replica] = busy

    def draft(self, replica: int, started: float, in_gap: bool) -> None:
        """Records an update of the draft head that began at `started` and is done by now."""
        event = "draft_gap" if in_gap else "draft_after"
        self._add(replica, event, started - self._zero, time.perf_counter() - self._zero)

    def end(self) -> None:
        """Ends the record of the rollout; updates of the head may follow."""
        now = time.perf_counter() - self._zero
        for replica in range(self.replicas):
            self._close(replica, now)
        self._add(None, "rollout", 0.0, now)

    def write(self, path: Path, events: Sequence[dict[str, Any]] | None = None) -> None:
        """Appends the events of the step to a file.

        The first call drops this and later steps from the file, which a resumed run repeats.

        Args:
          path: file of JSON lines.
          events: events of all processes; None for those of this process.
        """
        events = self.events if events is None else events
        if not self._truncated:
            kept = [e for e in read_lines(path) if e["step"] < self._step] if path.exists() else []
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(e) + "\n" for e in kept), encoding="utf-8")
            self._truncated = True
        with path.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(event) + "\n" for event in events)

    def _close(self, replica: int, now: float) -> None:
        if now > self._since[replica]:
            event = "busy" if self._busy[replica] else "idle"
            self._add(replica, event, self._since[replica], now)
        self._since[replica] = now

    def _add(self, replica: int | None, event: str, start: float, end: float) -> None:
        self.events.append(
            {
                "step": self._step,
                "replica": None if replica is None else self._first + replica,
                "event": event,
                "start": round(start, 6),
                "end": round(end, 6),
            }
        )
