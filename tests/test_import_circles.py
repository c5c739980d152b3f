"""No module imports itself over others, inside functions included, and no room of `train` does."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for package in ("specjax", "train", "serve", "bench")
    for file in (ROOT / package).rglob("*.py")
}


INNER = "train.data.tasks", "train.rewards.answers"  # rooms within rooms


def imports(file: Path) -> set[str]:
    """Returns the modules that a file imports when it runs: not those of its annotations alone."""
    names, nodes = set(), [ast.parse(file.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom):
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= members & FILES.keys() or {node.module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        nodes += ast.iter_child_nodes(node)
    return names & FILES.keys()


def room(module: str) -> str:
    """Returns the room of `train` that holds a module; a file that is in none is its own."""
    inner = next((name for name in INNER if f"{module}.".startswith(f"{name}.")), None)
    return inner or ".".join(module.split(".")[:2])


@pytest.mark.parametrize("place", [str, room], ids=["modules", "rooms"])
def test_imports_have_no_circle(place):
    graph = {}
    for module, file in FILES.items():
        if place is str or module.startswith("train."):
            graph.setdefault(place(module), set()).update(map(place, imports(file)))
    for name, imported in graph.items():
        imported.discard(name)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules
