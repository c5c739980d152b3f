"""What README tells people to type works."""

import functools
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import specjax

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_snippet_runs_and_finds_every_token_equal(monkeypatch, capsys):
    """With its twelve layers in a loop, which gives the same tokens and compiles in a fraction."""
    monkeypatch.chdir(ROOT)  # where the README is read
    monkeypatch.setattr(specjax, "LLM", functools.partial(specjax.LLM, scan_layers=True))
    [snippet] = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(compile(snippet, "README.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "[]" and len(said) == 5  # two samples of two prompts, and no difference


def test_commands_name_modules_and_targets_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"^make ([a-z-]+)", README, re.M))
    assert {"rl", "test"} <= named <= targets
    modules = set(re.findall(r"python -m ([\w.]+)", README))
    assert {"train.rl", "bench.identity", "specjax.verify"} <= modules
    for module in modules:
        assert importlib.util.find_spec(module), module


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([\w./]+)\)", README))))
def test_links_point_at_files(path):
    assert (ROOT / path).is_file()


def test_the_range_of_jax_ends_with_the_versions_that_are_tested():
    """README names them, constraints.txt pins the first and the last, and pyproject.toml refuses
    what lies outside: a jax whose minor version nobody has run."""
    [said] = re.findall(r"The tests are run with (.*?)\.\s", README)
    tested = re.findall(r"\d+(?:\.\d+)+", said)
    pins = (ROOT / "constraints.txt").read_text()
    for package in ("jax", "jaxlib"):
        assert re.findall(rf"^{package}==([\d.]+);", pins, re.M) == [tested[0], tested[-1]]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = map(Requirement, project["dependencies"])
    [allowed] = [r.specifier for r in named if r.name == "jax"]
    assert all(version in allowed for version in tested)
    assert any(one.operator == ">=" and one.version == tested[0] for one in allowed)
    major, minor = map(int, tested[-1].split(".")[:2])
    assert f"{major}.{minor + 1}.0" not in allowed
