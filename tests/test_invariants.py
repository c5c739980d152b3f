"""Each invariant of docs/invariants.md names tests that exist, and steps that run them."""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/invariants.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^## (\d+)\. .*?\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
TEST = r"`(tests/[\w/]+\.py)::([\w:]+)`"
# Computed from shapes by `train.plan`, not measured.
RESULTS = [p for p in (ROOT / "bench/results").rglob("*.json") if p.parent.name != "pods"]


def functions_in(file: Path) -> set[str]:
    """`name` or `Class::name` of every test function of a file, also of a base of test classes."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        inner, prefix = [node], ""
        if isinstance(node, ast.ClassDef):
            inner, prefix = node.body, f"{node.name}::"
        found |= {f"{prefix}{each.name}" for each in inner if isinstance(each, ast.FunctionDef)}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}


def test_there_are_ten_and_each_names_a_test():
    assert [int(number) for number, _ in SECTIONS] == [*range(1, 11)]
    assert all(re.search(TEST, text) for _, text in SECTIONS)


@pytest.mark.parametrize("file", sorted({file for file, _ in re.findall(TEST, PAGE)}))
def test_every_test_that_is_named_exists(file):
    named = {test for each, test in re.findall(TEST, PAGE) if each == file}
    assert named <= functions_in(ROOT / file), sorted(named - functions_in(ROOT / file))


def test_every_name_with_a_colon_was_understood_as_a_test():
    assert PAGE.count("::") == sum(1 + test.count("::") for _, test in re.findall(TEST, PAGE))


def test_steps_that_are_named_are_those_of_continuous_integration():
    steps = set(re.findall(r"^run_(\w+)\(\)", (ROOT / ".ci/run").read_text(), re.M))
    text = dict(SECTIONS)
    assert set(re.findall(r"step `(\w+)`", text["8"])) == {"user"} <= steps
    _, _, named = text["9"].partition("Steps of `.ci/run`")
    named = set(re.findall(r"`([a-z]\w+)`(?: \(|,)", named))
    assert named == {"user", "newest", "torch", "zen3", "middle"} <= steps


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_result_says_how_it_was_made(path):
    result = json.loads(path.read_text(encoding="utf-8"))
    needed = {"name", "date", "machine", "versions", "command", "settings", "figures"}
    assert needed <= set(result), sorted(needed - set(result))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d.*", result["date"]) and result["figures"]
    assert re.match(r"([A-Z_]+=\S+ )*(python -m bench\.|make )", result["command"])
    for name, figure in result["figures"].items():
        assert {"value", "unit", "interval"} <= set(figure), name
