"""The command line that `train.rl`, `train.sft` and `train.draft` share: settings, `--resume`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from specjax.command_line import parse_config
from specjax.interrupts import INTERRUPTED
from train.run.start import USER_ERRORS


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
        cfg, flags = parse_config(
            schema, argv, prog, description, _add_resume, lambda cfg: cfg.data.require_path()
        )
        return run(cfg, flags.resume or flags.resume_step is not None, flags.resume_step)
    except USER_ERRORS as error:
        sys.exit(f"{prog}: error: {error}")
    except KeyboardInterrupt as error:
        where = str(error) or "interrupted before the run began; nothing was saved yet"
        print(f"\n{prog}: {where}", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)


def _add_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in `out`"
    )
    parser.add_argument(
        "--resume_step", type=int, metavar="N", help="with --resume: the checkpoint to take"
    )
