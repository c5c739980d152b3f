"""Runs of several processes: they check that they agree, and end together."""

from __future__ import annotations

import contextlib
import re
import secrets
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from specjax.checked_json import CheckpointError
from specjax.command_line import ConfigError
from specjax.interrupts import INTERRUPTED
from specjax.parallel import distributed
from specjax.settings import fingerprint

LINGER = 5.0  # seconds
# Prefixes of messages of XLA and its transports; jax 0.10.2 raises some of them as ValueError.
_STATUS = re.compile(r"(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED): ")


@contextlib.contextmanager
def watched(cfg: Any, out: Path, user_errors: tuple[type[BaseException], ...]) -> Iterator[None]:
    """Runs the body in every process of the job, and ends all processes when one fails.

    The process in which an error arose prints its message and exits at once, because the usual
    clean-up would wait for the others. jax then names that process, and ends the others. A job of
    one process just runs the body.

    Args:
      cfg: settings of the run.
      out: directory of the run.
      user_errors: errors that are printed without traceback.
    """
    if not distributed.is_several():
        yield
        return
    if distributed.is_first():
        print(
            f"{jax.process_count()} processes: where one is lost, jax says which task (or that its "
            "coordinator, process 0, is gone) and ends the others; start all again with --resume "
            f"to go on from the last checkpoint in {out}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    try:
        _agree(cfg, out)
        yield
        distributed.gather(None, "end")  # the first one may have plots and exports to write
    except BaseException as error:
        if _may_be_loss(error):
            time.sleep(1.2 * cfg.distributed.lost_after)  # jax ends the process if one is lost
        if isinstance(error, user_errors):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
        if distributed.is_first():  # when it ends jax aborts the others, which must print first
            time.sleep(LINGER)
        distributed.exit_now(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)


def _may_be_loss(error: BaseException) -> bool:
    """Returns whether the loss of another process may be the cause: a collective or save failed."""
    broken = isinstance(error, (jax.errors.JaxRuntimeError, CheckpointError))
    if str(error).startswith("RESOURCE_EXHAUSTED"):  # this process's own memory
        return False
    return broken or _STATUS.match(str(error)) is not None


# Settings of jax, also set by its environment variables, that change traced programs.
_TRACED = (
    "jax_debug_nans", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_disable_jit",
    "jax_enable_x64", "jax_numpy_dtype_promotion", "jax_threefry_partitionable",
)  # fmt: skip


def _agree(cfg: Any, out: Path) -> None:
    """Checks that all processes have the same settings and see the same files.

    Raises:
      ConfigError: settings differ (the message names them), or the files do.
    """
    traced = {name.upper(): getattr(jax.config, name) for name in _TRACED}
    mine = fingerprint(cfg, ("distributed",)) | traced | {"the version of jax": jax.__version__}
    for process, theirs in enumerate(distributed.gather(mine, "settings")):
        differing = sorted(key for key in mine if mine[key] != theirs.get(key))
        if differing:
            raise ConfigError(
                f"process {process} was started with another value of {', '.join(differing)} than "
                f"process {jax.process_index()}; start all with the same settings"
            )
    mark = out / f".shared.{distributed.of_first(lambda: secrets.token_hex(8), 'start')}"
    if distributed.is_first():
        out.mkdir(parents=True, exist_ok=True)
        mark.touch()
    until = time.monotonic() + cfg.distributed.lost_after
    while not mark.exists():
        if time.monotonic() > until:
            raise ConfigError(
                f"out={out}: process {jax.process_index()} does not see what process 0 wrote; "
                "it must be on storage that all processes share, to which they write checkpoints"
            )
        time.sleep(0.1)
    distributed.gather(None, "storage")
    mark.unlink(missing_ok=True)
