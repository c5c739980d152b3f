"""`specjax bench`: which benches there are, and one of them with its arguments."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from serve.cli import Failure, UsageError
from serve.cli.main import nearest
from specjax import interrupts

USAGE = "usage: specjax bench NAME [ARGUMENTS]"


def run(argv: Sequence[str]) -> int:
    """Lists the benches, or runs `bench.NAME`; returns the exit status."""
    benches = find()
    if not argv:
        raise UsageError(f"expected a bench: {', '.join(benches)}")
    name, rest = argv[0], list(argv[1:])
    if name in ("-h", "--help", "list"):
        width = max(map(len, benches))
        rows = "\n".join(f"  {bench:<{width}}  {does}" for bench, does in benches.items())
        print(
            f"{USAGE}\n\nRuns `python -m bench.NAME`, which result files name as their command.\n"
            f"`specjax bench NAME --help` lists its arguments.\n\nbenches:\n{rows}"
        )
        return 0
    if name not in benches:
        raise UsageError(f"there is no bench {name!r}{nearest(name, benches)}")
    try:
        with interrupts.at_once("specjax bench"):
            bench = importlib.import_module(f"bench.{name}")
            if not hasattr(bench, "main"):  # a package, whose program is a module of its own
                bench = importlib.import_module(f"bench.{name}.__main__")
    except ModuleNotFoundError as error:
        raise Failure(f"{error}; pip install 'specjax[dev]' has what benches need") from error
    return bench.main(rest) or 0


def find() -> dict[str, str]:
    """The benches that can be run, and what each does in a line; none of them is imported."""
    package = importlib.util.find_spec("bench")
    if package is None or not package.submodule_search_locations:
        raise Failure("the package `bench` is not installed; install specjax from its source tree")
    found = {}
    for folder in package.submodule_search_locations:
        files = {file.stem: file for file in Path(folder).glob("*.py")}
        files |= {file.parent.name: file for file in Path(folder).glob("*/__main__.py")}
        for name, file in sorted(files.items()):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            if _is_program(tree):
                found[name] = _summary(ast.get_docstring(tree) or "")
    return found


def _is_program(tree: ast.Module) -> bool:
    """Whether it has a `main` that takes arguments."""
    mains = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main")
    return any(main.args.args for main in mains)


def _summary(doc: str) -> str:
    """The first sentence, without the command that many begin with."""
    text = " ".join(doc.split("\n\n")[0].split())
    text = re.sub(r"^`python -m bench\.[^`]*`: ", "", text)
    return re.split(r"(?<=[.?!])\s", text, maxsplit=1)[0].rstrip(".")
