"""Logs the metrics of a run: JSON lines, the console, and optionally TensorBoard and wandb.

`metrics.jsonl` holds one JSON object per step, from which plots and tables are made. When a run is
resumed, an unfinished last line and the steps that will be repeated are dropped. TensorBoard and
wandb get the numbers under the same names. In a terminal the last steps are a table that is updated
while the run goes on (`train.run.live`). Elsewhere each step prints a line, and during a long step
the work in progress is printed every `QUIET` seconds.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.markup import escape

from train.run.files import METRICS_FILE, keep_before, move_aside
from train.run.live import CONSOLE_FIELDS, Fields, LiveTable, line_of

QUIET = 20.0  # seconds


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
        progress: function that describes the work in progress; None prints no such lines.

    Raises:
        ModuleNotFoundError: TensorBoard or wandb is not installed, and a setting needs it.
    """

    def __init__(
        self,
        out_dir: str | Path,
        tensorboard: bool = False,
        wandb: bool = False,
        resume_step: int | None = None,
        console_fields: Fields = CONSOLE_FIELDS,
        live: bool = True,
        steps: int | None = None,
        settings: Mapping[str, Any] | None = None,
        progress: Callable[[], str] | None = None,
    ):
        out, self._fields, self._live, self._stack = Path(out_dir), console_fields, None, None
        self._printed = threading.Event()  # set by each line of a step
        active = jax.process_index() == 0
        self._console = Console(quiet=not active, highlight=False, soft_wrap=True)
        if not active:
            return
        out.mkdir(parents=True, exist_ok=True)
        self._stack = contextlib.ExitStack()
        # Optional packages first, so that a missing one leaves the files of an earlier run alone.
        self._senders: list[Callable[[int, dict[str, float]], None]] = []
        if tensorboard:
            self._senders.append(self._stack.enter_context(_tensorboard(out, resume_step)))
        if wandb:
            self._senders.append(self._stack.enter_context(_wandb(out, resume_step, settings)))
        path = out / METRICS_FILE
        if resume_step is not None:
            keep_before(path, resume_step)
        elif path.exists():
            move_aside(path)
        self._file = self._stack.enter_context(path.open("a", encoding="utf-8"))
        if live and LiveTable.fits(self._console):
            first = 1 if resume_step is None else resume_step
            self._live = LiveTable(self._console, console_fields, first, steps)
        elif progress is not None:
            self._stack.enter_context(_printing(self._console, progress, self._printed))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records one step and prints its line.

        Args:
            step: the step that the metrics belong to; each step is logged once.
            metrics: name -> number, 0-d array, string, or list of numbers. A value that is not
                finite is stored as null, named under "nonfinite", and warned about.
        """
        if self._stack is None:
            return
        record = {name: _plain(value) for name, value in metrics.items()}
        lost = [name for name, value in record.items() if not _is_finite(value)]
        record |= dict.fromkeys(lost) | ({"nonfinite": lost} if lost else {})
        record = {"step": int(step), "wall_time": round(time.time(), 3), **record}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        numbers = {n: record[n] for n in metrics if isinstance(record[n], (int, float))}
        for send in self._senders:
            send(step, numbers)
        if self._live is not None:
            self._live.add(step, record)
        else:
            self._console.print(line_of(self._fields, step, record))
            self._printed.set()
        if lost:
            text = f"WARNING: step {step}: not finite: {', '.join(lost)}"
            self._console.print(text, style="bold white on red", markup=False)

    def close(self) -> None:
        """Flushes and closes everything; more than one call does no harm."""
        self._stop_live()
        if self._stack is not None:
            self._stack.close()
        self._stack = None

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.close()
        self._live = None


def _plain(value: Any) -> Any:
    """The value as JSON has it."""
    if value is None or isinstance(value, (str, bool)):
        return value
    return np.asarray(value).tolist()


def _is_finite(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _need(module: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"log.{module} needs a package that is not installed: pip install 'specjax[log]'"
    )


@contextlib.contextmanager
def _printing(
    console: Console, progress: Callable[[], str], printed: threading.Event
) -> Iterator[None]:
    """Within it the work in progress is printed when no step has printed its line for a while."""
    since, closed = time.monotonic(), False

    def run() -> None:
        nonlocal since
        while True:
            if printed.wait(QUIET):
                since = time.monotonic()
                printed.clear()
                if closed:
                    return
            else:
                console.print(f"[dim]{escape(progress())}, {time.monotonic() - since:.0f} s")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed = True
        printed.set()
        thread.join()


@contextlib.contextmanager
def _tensorboard(out: Path, resume_step: int | None) -> Iterator[Callable]:
    try:
        from tensorboardX import SummaryWriter
        from tensorboardX.proto.summary_pb2 import Summary
    except ModuleNotFoundError as error:
        raise _need("tensorboard") from error

    def send(step: int, numbers: Mapping[str, float]) -> None:
        # `add_scalar` would replace characters such as that of avg@8; TensorBoard takes any name.
        values = [Summary.Value(tag=n, simple_value=float(v)) for n, v in numbers.items()]
        board.file_writer.add_summary(Summary(value=values), step)

    with SummaryWriter(str(out / "tensorboard"), purge_step=resume_step) as board:
        yield send


@contextlib.contextmanager
def _wandb(out: Path, resume_step: int | None, settings: Mapping[str, Any] | None) -> Iterator:
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise _need("wandb") from error
    id_file = out / "wandb_id"
    if resume_step is None or not id_file.exists():
        id_file.write_text(secrets.token_hex(4))
    run = wandb.init(
        dir=str(out),
        name=out.name,
        id=id_file.read_text(),
        resume="allow",
        config=dict(settings or {}),
        allow_val_change=True,  # a resumed run may have other steps
    )
    try:
        yield lambda step, numbers: run.log(numbers, step=step)
    finally:
        run.finish()
