"""The command line that `train.rl` and `train.sft` share: settings, `--resume`, errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from specjax.checkpoint import CheckpointError
from specjax.command_line import ConfigError, parse_config
from specjax.distributed import DistributedError
from specjax.engine.request import InvalidLogitsError
from specjax.models.hf import UnsupportedModelError
from train.scoring import RewardsFailedError

# What a mistake of the user, a missing package or a damaged file raises: one message, no traceback.
USER_ERRORS = (
    ConfigError,
    CheckpointError,
    UnsupportedModelError,
    DistributedError,
    InvalidLogitsError,
    FileNotFoundError,
    ModuleNotFoundError,
    RewardsFailedError,
)


def run_program(
    schema: type,
    argv: Sequence[str] | None,
    prog: str,
    description: str,
    run: Callable[[Any, bool, int | None], Any],
) -> Any:
    """Parses the settings and calls `run(config, resume, resume_step)`; returns what it returns.

    Raises:
      SystemExit: a mistake of the user, with one message.
    """
    cfg, flags = parse_config(schema, argv, prog, description, _add_resume)
    try:
        return run(cfg, flags.resume or flags.resume_step is not None, flags.resume_step)
    except USER_ERRORS as error:
        sys.exit(f"{prog}: error: {error}")


def _add_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in `out`"
    )
    parser.add_argument(
        "--resume_step", type=int, metavar="N", help="with --resume: the checkpoint to take"
    )
