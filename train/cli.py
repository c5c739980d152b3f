"""The command line that programs of training share: settings, `--resume`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from specjax.command_line import Call, parse_config
from specjax.interrupts import INTERRUPTED
from train.run.start import USER_ERRORS


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
    run: Callable[..., Any],
    resumes: bool = True,
) -> Any:
    """Parses the settings and returns `run(config, resume, resume_step)`, or `run(config)`.

    Raises:
      SystemExit: the user made a mistake, or pressed Ctrl-C (status 130); with one message.
    """
    try:
        kind = ResumableCall if resumes else Call
        cfg, call = parse_config(
            schema, argv, prog, description, kind, lambda cfg: cfg.data.require_path()
        )
        if not resumes:
            return run(cfg)
        return run(cfg, call.resume or call.resume_step is not None, call.resume_step)
    except USER_ERRORS as error:
        sys.exit(f"{prog}: error: {error}")
    except KeyboardInterrupt as error:
        where = str(error) or "interrupted; nothing was saved yet"
        print(f"\n{prog}: {where}", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)
