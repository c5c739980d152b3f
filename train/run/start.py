"""A start of a training program: what it resumes, logs and saves, and what ends it.

    with start("train.rl", cfg, resume) as run:
        state = Trainer(cfg)           # reads data and model, and makes programs
        run.restore(state)             # takes the checkpoint that the run goes on from
        run.begin(model, last)         # describes the run, and opens its log
        while run.goes_on():
            metrics = state.update()
            run.log.log(state.done_steps, metrics)
            run.end_step(due)          # saves

The first Ctrl-C or SIGTERM after `begin` ends the run after the step in progress, which is saved; a
second one, or one before, ends it at once. In a job of several processes SIGTERM to one of them
ends all in the same way, and Ctrl-C ends all at once.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax

from specjax.checked_json import CheckpointError, UnsupportedModelError
from specjax.checkpoint.store import Checkpointer
from specjax.checkpoint.weights import TOKENIZER
from specjax.command_line import ConfigError
from specjax.engine.request import InvalidLogitsError
from specjax.hub import ModelNotFoundError, find_model
from specjax.models.families import add_family
from specjax.parallel import distributed
from specjax.parallel.distributed import DistributedError
from specjax.settings import require_same_settings
from specjax.tokenizer import reads_date
from train.data.tasks.files import InputFileError
from train.rewards.scoring import RewardsFailedError
from train.rewards.workers import WorkerError
from train.run.describe import describe_run, settings_of
from train.run.files import (
    CHECKPOINTS,
    METRICS_FILE,
    RunFileError,
    complete_steps,
    first_date,
    read_lines,
    read_settings,
    read_starts,
)
from train.run.live import CONSOLE_FIELDS, Fields
from train.run.log import MetricsLogger
from train.run.processes import watched


class NotFiniteError(ArithmeticError):
    """An update was not finite: what it was made of, or the weights that it gave, are lost."""


class Terminated(RuntimeError):
    """The run got SIGTERM, and has saved its state."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with a message about the current step and the saved steps."""


# Errors of a user's mistake, a missing package or a damaged file: printed without traceback.
USER_ERRORS = (
    WorkerError, ConfigError, CheckpointError, UnsupportedModelError, DistributedError,
    InvalidLogitsError, FileNotFoundError, InputFileError, ModuleNotFoundError, NotFiniteError,
    RewardsFailedError, RunFileError, Terminated,
)  # fmt: skip


class State(Protocol):
    """What a program trains, as a run saves and restores it.

    Attributes:
      cfg: settings of the program.
      done_steps: number of updates, or of steps of RL, that are done.
      work: the part of the step that is in progress.
      notes: lines to print at start.
      tokenizer: tokenizer of the policy.
      restart: setting that starts a run from the weights of another, whose directory is {run}.
    """

    cfg: Any
    done_steps: int
    work: str
    notes: list[str]
    tokenizer: Any
    restart: str

    def fingerprint(self) -> dict[str, Any]:
        """Returns the settings that change the result; a resumed run must have the same."""

    def trees(self, meta: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the arrays of a checkpoint by name; of the one with `meta`, perhaps abstract."""

    def meta(self) -> dict[str, Any]:
        """Returns what a checkpoint has beside arrays, step and fingerprint, as JSON."""

    def check(self, meta: Mapping[str, Any]) -> None:
        """Raises ConfigError if the run cannot go on from a checkpoint with `meta`."""

    def load(self, trees: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Takes the content of a checkpoint."""


def save(state: State, checkpoints: Checkpointer, block: bool = False) -> None:
    """Starts saving a state; `block` waits until it is on disk."""
    about = {"step": state.done_steps, "settings": state.fingerprint(), **state.meta()}
    checkpoints.save(state.done_steps, state.trees(), about, block)


def restore(state: State, checkpoints: Checkpointer, step: int | None = None) -> None:
    """Restores the checkpoint of a step, by default the newest.

    Later steps are those of a run that was never stopped.

    Raises:
      ConfigError: the checkpoint was made with other settings.
      CheckpointError: the checkpoint cannot be read.
    """
    _, meta = checkpoints.restore(step, {})
    require_same(meta["settings"], state.fingerprint(), state.tokenizer)
    state.check(meta)
    abstract = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state.trees(meta)
    )
    trees, meta = checkpoints.restore(meta["step"], abstract)
    state.load(trees, meta)
    state.done_steps = meta["step"]


class Run:
    """A start of a program, see the module's docstring; made by `start`.

    Attributes:
      program: name of the program.
      cfg: its settings.
      out: directory of the run.
      resumed: whether it goes on from a checkpoint.
      state: what is trained.
      last: number of the last step.
      checkpoints: saved states; open from `restore` on.
      log: metrics; open from `begin` on.
      signal: Ctrl-C or SIGTERM, if it ends the run after the step in progress.
    """

    def __init__(self, program: str, cfg: Any, resumed: bool, resume_step: int | None):
        self.program, self.cfg, self.out, self.resumed = program, cfg, Path(cfg.out), resumed
        self.state: State | None = None
        self.last: int | None = None
        self._resume_step, self._stack = resume_step, contextlib.ExitStack()
        self._signals = contextlib.ExitStack()
        self._saved: int | None = None  # the step of the newest checkpoint of this start
        self.signal: str | None = None

    def restore(self, state: State, keep_last: int) -> None:
        """Opens the checkpoints of a state, says its notes, and restores the one to go on from.

        Args:
          state: the state.
          keep_last: number of checkpoints that are kept.

        Raises:
          ConfigError, CheckpointError: see `restore`.
        """
        self.state, checkpoints = state, Checkpointer(self.out / CHECKPOINTS, keep_last)
        self.checkpoints = self._stack.enter_context(checkpoints)
        for line in state.notes:
            say(line)
        if self.resumed:
            restore(state, self.checkpoints, self._resume_step)
            self._saved = state.done_steps
            say(f"resumed at step {state.done_steps}")

    def begin(self, model: str | None, last: int, fields: Fields = CONSOLE_FIELDS) -> None:
        """Describes the run, opens its log, and has signals end it after a step.

        Args:
          model: checkpoint that training starts from; None if there is none.
          last: number of the last step.
          fields: (metric, label, format) of the line of each step.
        """
        cfg, first, self.last = self.cfg, self.state.done_steps + 1, last
        describe_run(self.out, cfg, self.program, model, first, self.resumed)
        self.log = self._stack.enter_context(
            MetricsLogger(
                self.out,
                cfg.log.tensorboard,
                cfg.log.wandb,
                self.first_logged,
                fields,
                cfg.log.live,
                last,
                settings_of(cfg),
                self._progress,
            )
        )
        self._stack.push(self._signals)
        if self.goes_on():  # else what follows ends at once
            self._signals.enter_context(self._listening())

    @property
    def first_logged(self) -> int | None:
        """The first step that a resumed run logs; None: the files of the run begin anew."""
        return self.state.done_steps + 1 if self.resumed else None

    def _progress(self) -> str:
        """Describes the work in progress, for the log of a long step."""
        return f"step {min(self.state.done_steps + 1, self.last)} of {self.last}: {self.state.work}"

    def goes_on(self) -> bool:
        """Returns whether there are further steps."""
        return self.state.done_steps < self.last

    def require_finite(self, metrics: Mapping[str, float]) -> None:
        """Ends the program at the first update that is not finite, before its weights are saved.

        Args:
          metrics: metrics of the update, which are logged if it is not finite.

        Raises:
          NotFiniteError: a loss, or the norm of an update or its gradient, is not finite.
        """
        for setting, names in _FINITE.items():
            if wrong := [n for n in names if not math.isfinite(metrics.get(n, 0.0))]:
                self.log.log(self.state.done_steps, metrics)
                whose = "policy" if setting == "optim.lr" else "draft head"
                raise NotFiniteError(
                    f"step {self.state.done_steps}: the update of the {whose} is not finite "
                    f"({', '.join(wrong)}), and its weights are lost. {self.recovery(setting)}"
                )

    def end_step(self, due: bool = False) -> None:
        """Saves the state where that is due, at the last step, and when a signal ends the run.

        Raises:
          Interrupted: by Ctrl-C.
          Terminated: by SIGTERM.
        """
        step = self.state.done_steps
        told = self.signal or ("SIGTERM" if distributed.told_to_end(step) else None)
        ends = told is not None and step < self.last
        if due or ends or step >= self.last:
            self.save(block=ends or step >= self.last)
        if step >= self.last:  # what follows ends at once
            self._signals.close()
        if ends:
            error = Interrupted if told == "Ctrl-C" else Terminated
            raise error(f"ended by {told} after step {step}; {self.saved()}; go on with --resume")

    def save(self, block: bool = False) -> None:
        """Starts saving the current step, unless it is saved already; `block` waits for it."""
        state = self.state
        if state.done_steps != self._saved:
            save(state, self.checkpoints)
            self._saved = state.done_steps
        if block:
            self.checkpoints.wait()

    def saved(self) -> str:
        """Says which steps are saved, and where."""
        if not (steps := complete_steps(self.out)):
            return "nothing was saved yet"
        names = ", ".join(map(str, steps))
        names = f"steps {names} are" if steps[1:] else f"step {names} is"
        return f"{names} saved in {(self.out / CHECKPOINTS).absolute()}"

    def recovery(self, setting: str) -> str:
        """Says what to do when weights are lost: a run that is resumed would lose them again.

        Args:
          setting: learning rate of what was lost.
        """
        self.checkpoints.wait()
        instead = f"a smaller {setting} or {setting.removesuffix('lr')}clip_norm"
        if not complete_steps(self.out):
            return f"Nothing was saved yet: start again with {instead}"
        source = self.state.restart.format(run=self.out)
        return (
            f"{self.saved()}: start a run from the last one with {source}, another out and "
            f"{instead}"
        )

    def where(self) -> str:
        """Says how far the run is."""
        if self.last is None:
            return "during set-up"
        step = self.state.done_steps
        return f"at step {step + 1}" if step < self.last else f"after step {step}, the last one"

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Within it signals are noted, unless the process ignores them; a second one raises."""
        names, before = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}, {}

        def note(number: int, frame: object) -> None:
            if self.signal is not None:
                raise KeyboardInterrupt
            self.signal = names[number]
            print(f"\n{self.signal}: ending after this step", file=sys.stderr, flush=True)

        # In a job of several processes jax takes SIGTERM, see `distributed.told_to_end`.
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and not distributed.is_several():
            for number in names:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


# Metrics that are finite as long as weights are: of the policy's updates, and of the head's.
_FINITE = {
    "optim.lr": ("train/loss", "train/grad_norm"),
    "draft.optim.lr": ("train/mtp_loss", "train/mtp_update_norm"),
}


@contextlib.contextmanager
def start(
    program: str, cfg: Any, resume: bool = False, resume_step: int | None = None
) -> Iterator[Run]:
    """Makes the run of a program, whose body ends with the job's other processes.

    Args:
      program: name of the program.
      cfg: settings of the program.
      resume: whether the run in `cfg.out` goes on.
      resume_step: step of the checkpoint to go on from; None for the newest.

    Raises:
      ConfigError: `cfg.out` is no directory of a run, or there is no such checkpoint.
      RunFileError: a file of the run that is read to resume it is damaged.
      Interrupted: by Ctrl-C.
    """
    out = Path(cfg.out)
    settle_date(cfg, out if resume else None)
    run = Run(program, cfg, resume and can_resume(out, resume_step), resume_step)
    with watched(cfg, out, (*USER_ERRORS, Interrupted)):
        try:
            with run._stack:
                yield run
        except Interrupted:
            raise
        except KeyboardInterrupt:
            more = "; go on with --resume" if complete_steps(out) else ""
            raise Interrupted(f"interrupted {run.where()}; {run.saved()}{more}") from None


def say(text: str) -> None:
    """Prints a line in the first process."""
    if distributed.is_first():
        print(text, flush=True)


def find_policy(cfg: Any) -> str:
    """Makes `cfg.model` a path, and returns it as the user named it.

    The path of a Hugging Face id names one commit, as --resume needs.

    Raises:
      ConfigError: there is no such checkpoint, or `cfg.family` is no model family.
    """
    named = cfg.model
    add_own_family(cfg.family)
    try:
        cfg.model, cfg.revision = str(find_model(named, cfg.revision)), None
    except ModelNotFoundError as error:
        raise ConfigError(
            f"model: expected a checkpoint directory, got {named!r}: {error}"
        ) from error
    return named


def add_own_family(path: str | None) -> None:
    """Registers the model family that the setting `family` names, see `add_family`.

    Raises:
      ConfigError: the name leads to no model family.
    """
    try:
        add_family(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def settle_date(cfg: Any, run: Path | None) -> None:
    """Fills in `data.date`: the date of a run's first start, else today's, in UTC.

    All processes of a job must call it, and get the same date.

    Args:
      cfg: settings of a program.
      run: directory of the run that goes on, or that is evaluated; None for a new run.

    Raises:
      RunFileError: a file of the run is damaged.
    """
    if cfg.data.date is None:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        cfg.data.date = distributed.of_first(lambda: (run and first_date(run)) or today, "date")


def require_same(saved: Mapping[str, Any], now: Mapping[str, Any], tokenizer: Any) -> None:
    """Refuses to go on with other settings; a date that the chat template does not read is none.

    Raises:
      ConfigError: the settings differ; the message names them.
    """
    if not reads_date(tokenizer):
        saved = {**saved, "data": {**saved["data"], "date": now["data"]["date"]}}
    require_same_settings(saved, now)


def can_resume(out: Path, step: int | None) -> bool:
    """Returns whether a run has a checkpoint to resume from; if not, says that it starts again.

    Args:
      out: directory of the run.
      step: step to resume from; None for the newest.

    Raises:
      ConfigError: `out` is no directory of a run, or there is no checkpoint and `step` is set.
      RunFileError: a file of the run that is read to resume it is damaged.
    """
    if complete_steps(out):
        read_starts(out)
        read_settings(out)
        if (out / METRICS_FILE).exists():
            read_lines(out / METRICS_FILE)
        return True
    if step is not None or not any(
        (out / n).exists() for n in (CHECKPOINTS, METRICS_FILE, TOKENIZER, "samples")
    ):
        raise ConfigError(
            f"nothing to resume: {out} holds no complete checkpoint; expected out= to name the "
            "directory of a run, or run without --resume"
        )
    say(f"{out} holds no complete checkpoint: starting again at step 1")
    return False


def require_unused(out: Path, beside: str = "") -> None:
    """Refuses a directory with checkpoints of an earlier run, or with lines in `beside`.

    Raises:
      ConfigError: there are some.
    """
    if any((out / CHECKPOINTS).glob("*")) or (beside and any((out / beside).glob("*.jsonl"))):
        names = f"{beside} or {CHECKPOINTS}" if beside else CHECKPOINTS
        raise ConfigError(
            f"{out} holds {names} of an earlier run; set out= to another, or use --resume"
        )
