"""The command line that `train.rl` and `train.sft` share: settings, `--resume`, errors."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.checked_json import CheckpointError, UnsupportedModelError
from specjax.checkpoint.store import Checkpointer
from specjax.checkpoint.weights import TOKENIZER
from specjax.command_line import Call, ConfigError, parse_config
from specjax.engine.request import InvalidLogitsError
from specjax.interrupts import INTERRUPTED
from specjax.parallel.distributed import DistributedError, of_first
from train.log import MetricsLogger
from train.reward_workers import WorkerError
from train.run_files import METRICS_FILE, RunFileError, check_files, first_date
from train.scoring import RewardsFailedError
from train.tasks.files import InputFileError


class NotFiniteError(ArithmeticError):
    """An update was not finite: what it was made of, or the weights that it gave, are lost."""


# Errors of a user's mistake, a missing package or a damaged file: printed without traceback.
USER_ERRORS = (
    WorkerError,
    ConfigError,
    CheckpointError,
    UnsupportedModelError,
    DistributedError,
    InvalidLogitsError,
    FileNotFoundError,
    InputFileError,
    ModuleNotFoundError,
    NotFiniteError,
    RewardsFailedError,
    RunFileError,
)
CHECKPOINTS = "checkpoints"  # subdirectory of a run


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with a message about the current step and the saved steps."""


@dataclasses.dataclass
class ResumableCall(Call):
    """What a run is told beside its settings.

    Attributes:
      resume: continue from the newest checkpoint in `out`.
      resume_step: with resume: the checkpoint to take.
    """

    resume: bool = False
    resume_step: int | None = None


def run_program(
    schema: type,
    argv: Sequence[str] | None,
    prog: str,
    description: str,
    run: Callable[[Any, bool, int | None], Any],
) -> Any:
    """Parses the settings and returns `run(config, resume, resume_step)`.

    Raises:
      SystemExit: the user made a mistake, or pressed Ctrl-C (status 130); with one message.
    """
    try:
        cfg, call = parse_config(
            schema, argv, prog, description, ResumableCall, lambda cfg: cfg.data.require_path()
        )
        return run(cfg, call.resume or call.resume_step is not None, call.resume_step)
    except USER_ERRORS as error:
        sys.exit(f"{prog}: error: {error}")
    except KeyboardInterrupt as error:
        where = str(error) or "interrupted before the run began; nothing was saved yet"
        print(f"\n{prog}: {where}", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)


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
        cfg.data.date = of_first(lambda: (run and first_date(run)) or today, "date")


class Progress:
    """The progress of a run, for messages.

    Attributes:
      steps: function that returns (steps done, steps in all); None during set-up.
    """

    def __init__(self) -> None:
        self.steps: Callable[[], tuple[int, int]] | None = None

    def __str__(self) -> str:
        if self.steps is None:
            return "during set-up"
        done, total = self.steps()
        return f"at step {done + 1}" if done < total else f"after step {done}, the last one"


@contextlib.contextmanager
def interruptible(out: Path) -> Iterator[Progress]:
    """Turns Ctrl-C in the body into `Interrupted`; the body must have ended running saves."""
    progress = Progress()
    try:
        yield progress
    except KeyboardInterrupt:
        saved = complete_steps(out)
        directory = (out / CHECKPOINTS).absolute()
        what_is_saved = "nothing was saved yet"
        if saved:
            names = ", ".join(map(str, saved))
            what_is_saved = f"steps {names} are" if saved[1:] else f"step {names} is"
            what_is_saved += f" saved in {directory}; go on with --resume"
        raise Interrupted(f"interrupted {progress}; {what_is_saved}") from None


def complete_steps(out: Path) -> list[int]:
    """The steps of a run's checkpoints, without those whose save was killed."""
    return sorted(int(p.name) for p in (out / CHECKPOINTS).glob("*") if p.name.isdigit())


# Metrics that are finite as long as weights are: of the policy's updates, and of the head's.
_FINITE_METRICS = {
    "optim.lr": ("train/loss", "train/grad_norm"),
    "draft.optim.lr": ("train/mtp_loss", "train/mtp_update_norm"),
}


def require_finite(
    step: int,
    metrics: Mapping[str, float],
    log: MetricsLogger,
    checkpoints: Checkpointer,
    source: str,
) -> None:
    """Ends a program at the first update that is not finite, before its weights are saved.

    Args:
      step: number of the step that made the update.
      metrics: its metrics, which are logged if it is not finite.
      log: log of the run.
      checkpoints: checkpoints of the run, of which the message names the steps.
      source: see `recovery_advice`.

    Raises:
      NotFiniteError: a loss, or the norm of an update or its gradient, is not finite.
    """
    for setting, names in _FINITE_METRICS.items():
        if wrong := [n for n in names if not math.isfinite(metrics.get(n, 0.0))]:
            log.log(step, metrics)
            whose = "policy" if setting == "optim.lr" else "draft head"
            raise NotFiniteError(
                f"step {step}: the update of the {whose} is not finite ({', '.join(wrong)}), and "
                f"its weights are lost. {recovery_advice(checkpoints, source, setting)}"
            )


def recovery_advice(checkpoints: Checkpointer, source: str, setting: str) -> str:
    """Says what to do when weights are lost: a run that is resumed would lose them again.

    Args:
      checkpoints: checkpoints of the run, which end being written.
      source: setting that starts a run from the weights of another, whose directory is {run}.
      setting: learning rate of what was lost.
    """
    checkpoints.wait()
    saved, run = checkpoints.all_steps(), Path(checkpoints.directory).parent
    instead = f"a smaller {setting} or {setting.removesuffix('lr')}clip_norm"
    if not saved:
        return f"Nothing was saved yet: start again with {instead}"
    names = ", ".join(map(str, saved))
    what = f"Steps {names} are" if saved[1:] else f"Step {names} is"
    return (
        f"{what} saved in {checkpoints.directory}: start a run "
        f"from the last one with {source.format(run=run)}, another out and {instead}"
    )


def can_resume(out: Path, step: int | None, say: Callable[[str], None]) -> bool:
    """Whether a run has a checkpoint to resume from; if not, `say` prints that it starts again.

    Args:
      out: directory of the run.
      step: step to resume from; None for the newest.
      say: function that prints a line.

    Raises:
      ConfigError: `out` is no directory of a run, or there is no checkpoint and `step` is set.
      RunFileError: a file of the run that is read to resume it is damaged.
    """
    if complete_steps(out):
        check_files(out)
        return True
    if not any((out / name).exists() for name in (CHECKPOINTS, METRICS_FILE, TOKENIZER)):
        raise ConfigError(
            "nothing to resume: expected out= to name the directory of a run, which holds "
            f"{CHECKPOINTS} and {METRICS_FILE}, and {out} holds neither; run without --resume"
        )
    if step is not None:
        raise ConfigError(
            f"{out} holds no complete checkpoint, and --resume_step asks for step {step}; leave it "
            "out to start again at step 1"
        )
    say(f"{out} holds no complete checkpoint: starting again at step 1")
    return False
