"""The commands of `specjax`, their exit statuses, and `specjax bench`.

The exit status is 0 after success, 1 after a failure, 2 after wrong arguments, and as in a shell
130 after Ctrl-C and 141 when the reader of a pipe has closed it. `specjax verify` and the benches
have further ones.
"""

from __future__ import annotations

import ast
import errno
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from serve.cli import Failure, UsageError
from specjax import interrupts
from specjax.interrupts import INTERRUPTED
from specjax.spelling import nearest

COMMANDS = {
    "generate": "generate text, with speculation, from prompts or a file of them",
    "serve": "serve a model behind OpenAI's API",
    "convert": "convert checkpoints between the layouts of Hugging Face and Orbax",
    "verify": "check that speculative decoding of a model is lossless",
    "bench": "run one of the benches behind the numbers in docs/results.md",
}
EXAMPLES = """examples:
  specjax generate --model assets/sums "17+25+8="
  specjax generate --model DIR --file prompts.jsonl --output samples.jsonl --stats
  specjax serve --model DIR speculation.control.controller=goodput
  specjax convert runs/sums exported/
  specjax bench decode speed --model assets/sums

JAX_PLATFORMS chooses the device; JAX_COMPILATION_CACHE_DIR=DIR keeps compiled programs."""
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
        print(_version())
        return 0
    if name not in COMMANDS:
        raise UsageError(f"there is no command {name!r}{_instead(name, COMMANDS)}")
    if name == "bench":
        return bench(rest)
    modules = {"serve": "serve.__main__", "verify": "specjax.verify.__main__"}
    with interrupts.at_once(f"specjax {name}"):
        command = importlib.import_module(modules.get(name, f"serve.cli.{name}"))
    if name == "serve":
        command.main(rest, "specjax serve")
        return 0
    return command.main(rest, "specjax verify") if name == "verify" else command.run(rest)


def _instead(name: str, known: Iterable[str]) -> str:
    """A suggestion for an unknown name, or the list of known ones."""
    return nearest(name, known, 0.5) or f"; there are {', '.join(known)}"


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


def _version() -> str:
    from specjax import __version__

    jax = importlib.metadata.version("jax")
    return f"specjax {__version__} (jax {jax}, Python {platform.python_version()})"


# --- specjax bench -------------------------------------------------------------------------------

BENCH_USAGE = "usage: specjax bench NAME [ARGUMENTS]"


def bench(argv: Sequence[str]) -> int:
    """Lists the benches, or runs `bench.NAME`; returns the exit status."""
    benches = find_benches()
    if not argv:
        raise UsageError(f"expected a bench: {', '.join(benches)}")
    name, rest = argv[0], list(argv[1:])
    if name in ("-h", "--help", "list"):
        width = max(map(len, benches))
        rows = "\n".join(f"  {bench:<{width}}  {does}" for bench, does in benches.items())
        print(
            f"{BENCH_USAGE}\n\n"
            "Runs `python -m bench.NAME`, which result files name as their command.\n"
            "`specjax bench NAME --help` lists its arguments.\n\n"
            f"benches:\n{rows}"
        )
        return 0
    if name not in benches:
        raise UsageError(f"there is no bench {name!r}{_instead(name, benches)}")
    try:
        with interrupts.at_once("specjax bench"):
            module = importlib.import_module(f"bench.{name}")
    except ModuleNotFoundError as error:
        raise Failure(f"{error}; pip install 'specjax[dev]' has what benches need") from error
    return module.main(rest) or 0


def find_benches() -> dict[str, str]:
    """The benches that can be run -> a line about each, from their source without importing it."""
    package = importlib.util.find_spec("bench")
    if package is None or not package.submodule_search_locations:
        raise Failure("the package `bench` is not installed; install specjax from its source tree")
    benches = {}
    for folder in package.submodule_search_locations:
        files = {file.stem: file for file in Path(folder).glob("*.py")}
        for name, file in sorted(files.items()):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            if _is_program(tree):
                benches[name] = _first_sentence(ast.get_docstring(tree) or "")
    return benches


def _is_program(tree: ast.Module) -> bool:
    """Whether a module has a `main` that takes arguments."""
    mains = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main")
    return any(main.args.args for main in mains)


def _first_sentence(doc: str) -> str:
    """The first sentence of a docstring, without the command that many begin with."""
    text = " ".join(doc.split("\n\n")[0].split())
    text = re.sub(r"^`python -m bench\.[^`]*`: ", "", text)
    return re.split(r"(?<=[.?!])\s", text, maxsplit=1)[0].rstrip(".")
