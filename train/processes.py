"""A run of several processes: they must agree before it begins, and all end when one does."""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import jax

from specjax import distributed, lifeline
from specjax.checkpoint_format import CheckpointError
from specjax.lifeline import Lifeline
from train.config import ConfigError, fingerprint
from train.schema import RLConfig

# What the loss of another process looks like from here: a collective breaks, or so does a save.
_MAY_BE_LOSS = (jax.errors.JaxRuntimeError, CheckpointError)


@contextlib.contextmanager
def watched(cfg: RLConfig, out: Path, user_errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Runs the body in every process of the job; with one process nothing more.

    An error in one process, or its loss, ends all of them: with the error's own message where it
    arose, and with the name of that process everywhere else. The usual way out would wait for who
    is not there any more, so this one ends the process.

    Args:
      out: directory of the run. user_errors: what needs no traceback.
    """
    if not distributed.is_several():
        yield
        return
    token = distributed.of_first(lambda: secrets.token_hex(8), "start")
    line = Lifeline(
        out / "processes",
        jax.process_index(),
        jax.process_count(),
        token,
        cfg.distributed.lost_after,
        "The job cannot go on without it. Start all processes again with --resume, as many as "
        f"there are machines, to go on from the last checkpoint in {out}",
    )
    try:
        _agree(cfg, out, line)
        yield
        distributed.gather(None, "end")  # the first one may have plots and exports to write
    except BaseException as error:
        if isinstance(error, _MAY_BE_LOSS):
            line.await_verdict()
        if isinstance(error, user_errors):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
        line.fail(error)
        lifeline.leave(1)
    line.close()


def _agree(cfg: RLConfig, out: Path, line: Lifeline) -> None:
    """All have the same settings and see the same files.

    Raises:
      ConfigError: says what differs.
    """
    mine = fingerprint(cfg, ("distributed",)) | {"the version of jax": jax.__version__}
    for process, theirs in enumerate(distributed.gather(mine, "settings")):
        differing = sorted(key for key in mine if mine[key] != theirs.get(key))
        if differing:
            raise ConfigError(
                f"process {process} was started with another value of {', '.join(differing)} than "
                f"process {jax.process_index()}; start all with the same settings"
            )
    until = time.monotonic() + cfg.distributed.lost_after
    while missing := line.unseen():
        if time.monotonic() > until:
            raise ConfigError(
                f"out={out}: process {jax.process_index()} does not see there what processes "
                f"{missing} wrote; it must be on storage that all processes share, for they write "
                "their checkpoints together"
            )
        time.sleep(0.1)
    distributed.gather(None, "storage")
