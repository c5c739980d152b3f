"""The commands of `specjax`, and their exit statuses.

The exit status is 0 after success, 1 after a failure, 2 after wrong arguments, and as in a shell
130 after Ctrl-C and 141 when the reader of a pipe has closed it. `specjax verify`
has further ones.
"""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence

from serve.cli import Failure, UsageError
from specjax import interrupts
from specjax.interrupts import INTERRUPTED
from specjax.spelling import nearest

COMMANDS = {
    "generate": "generate text, with speculation, from prompts or a file of them",
    "serve": "serve a model behind OpenAI's API",
    "convert": "convert checkpoints between the layouts of Hugging Face and Orbax",
    "verify": "check that speculative decoding of a model is lossless",
}
EXAMPLES = """examples:
  specjax generate --model assets/sums "17+25+8="
  specjax generate --model DIR --file prompts.jsonl --output samples.jsonl --stats
  specjax serve --model DIR speculation.control.controller=goodput
  specjax convert runs/sums exported/

JAX_PLATFORMS chooses the device; JAX_COMPILATION_CACHE_DIR where programs are kept."""
BROKEN_PIPE = 141
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of writing


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status.

    Raises:
      SystemExit: a parser printed help or refused the arguments.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    name = " ".join(["specjax", *args[:1]]) if args[:1] and args[0] in COMMANDS else "specjax"
    try:
        try:
            return _run(args)
        finally:
            # A broken pipe must raise while it can be caught, and not at exit.
            sys.stdout.flush()
    except Failure as error:
        hint = f"\nTry {name} --help" if isinstance(error, UsageError) else ""
        print(f"{name}: error: {error}{hint}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in NO_ROOM or error.filename is not None:
            raise
        _discard_output()
        print(f"{name}: error: writing the output failed: {error.strerror}", file=sys.stderr)
        return 1


def _discard_output() -> None:
    """Discards the buffered output, whose write would fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(args: list[str]) -> int:
    if not args:
        raise UsageError(f"expected a command: {', '.join(COMMANDS)}")
    name, rest = args[0], args[1:]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name in ("-V", "--version"):
        from specjax import __version__

        jax = importlib.metadata.version("jax")
        print(f"specjax {__version__} (jax {jax}, Python {platform.python_version()})")
        return 0
    if name not in COMMANDS:
        instead = nearest(name, COMMANDS, 0.5) or f"; there are {', '.join(COMMANDS)}"
        raise UsageError(f"there is no command {name!r}{instead}")
    modules = {"serve": "serve.__main__", "verify": "specjax.verify.__main__"}
    with interrupts.at_once(f"specjax {name}"):
        command = importlib.import_module(modules.get(name, f"serve.cli.{name}"))
    return command.main(rest, f"specjax {name}") or 0


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {does}" for name, does in COMMANDS.items())
    return (
        "usage: specjax COMMAND ...\n\n"
        "Speculative rollouts that change no token.\n\n"
        f"commands (specjax COMMAND --help says more):\n{commands}\n\n"
        "  --version  versions of specjax, jax and Python\n\n"
        f"{EXAMPLES}\n\n"
        "exit status: 0 success, 1 failure, 2 wrong arguments, "
        f"{INTERRUPTED} Ctrl-C, {BROKEN_PIPE} broken pipe"
    )
