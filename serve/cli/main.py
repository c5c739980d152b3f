"""Which command, and how it ends.

The exit status is 0 if all went well, 1 if something failed, 2 after a mistake in the arguments,
and as a shell has it 130 after Ctrl-C and 141 when nobody reads the output any more. `specjax
verify` and the benches have further ones of their own.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence

from serve.cli import Failure, UsageError
from specjax import interrupts
from specjax.interrupts import INTERRUPTED

COMMANDS = {
    "generate": "generate text, with speculation, from prompts or a file of them",
    "serve": "serve a model behind OpenAI's API",
    "convert": "turn Hugging Face checkpoints into Orbax ones and back",
    "verify": "check that speculative decoding of a model is lossless",
    "bench": "run one of the benches behind the numbers in docs/measurements.md",
}
EXAMPLES = """examples:
  specjax generate --model assets/sums "17+25+8="
  specjax generate --model DIR --file prompts.jsonl --output samples.jsonl --stats
  specjax serve --model DIR speculation.control.controller=goodput
  specjax convert runs/sums exported/
  specjax bench throughput decode --model assets/sums

JAX_PLATFORMS chooses the device; JAX_COMPILATION_CACHE_DIR=DIR keeps compiled programs."""
NOBODY_READS = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status.

    Raises:
      SystemExit: a parser's, after help or a mistake.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    name = " ".join(["specjax", *args[:1]]) if args[:1] and args[0] in COMMANDS else "specjax"
    try:
        try:
            return _run(args)
        finally:
            # A broken pipe is to be noticed here: at exit nobody could catch it.
            sys.stdout.flush()
    except Failure as error:
        hint = f"\nTry {name} --help" if isinstance(error, UsageError) else ""
        print(f"{name}: error: {error}{hint}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS


def _run(args: list[str]) -> int:
    if not args:
        raise UsageError(f"expected a command: {', '.join(COMMANDS)}")
    name, rest = args[0], args[1:]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name in ("-V", "--version"):
        print(_version())
        return 0
    if name not in COMMANDS:
        raise UsageError(f"there is no command {name!r}{nearest(name, COMMANDS)}")
    modules = {"serve": "serve.__main__", "verify": "specjax.verify.__main__"}
    with interrupts.at_once(f"specjax {name}"):
        command = importlib.import_module(modules.get(name, f"serve.cli.{name}"))
    if name == "serve":
        command.main(rest, "specjax serve")
        return 0
    return command.main(rest, "specjax verify") if name == "verify" else command.run(rest)


def nearest(name: str, known: Sequence[str]) -> str:
    """What may have been meant, or what there is."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {does}" for name, does in COMMANDS.items())
    return (
        "usage: specjax COMMAND ...\n\n"
        "Lossless speculative rollouts: the same tokens, sooner.\n\n"
        f"commands (specjax COMMAND --help says more):\n{commands}\n\n"
        "  --version  versions of specjax, jax and Python\n\n"
        f"{EXAMPLES}\n\n{_statuses()}"
    )


def _statuses() -> str:
    return (
        "exit status: 0 all went well, 1 something failed, 2 the arguments are wrong, "
        f"{INTERRUPTED} Ctrl-C,\n  {NOBODY_READS} nobody reads the output any more"
    )


def _version() -> str:
    from specjax import __version__

    jax = importlib.metadata.version("jax")
    return f"specjax {__version__} (jax {jax}, Python {platform.python_version()})"
