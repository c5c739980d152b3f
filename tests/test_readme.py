"""What README and the pages in docs/ tell people to type works."""

import functools
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import specjax
from serve.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    page: page.read_text(encoding="utf-8")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
WORDS = 1500  # of README at most: what is longer belongs into docs/


def test_the_first_snippet_runs_and_finds_every_token_equal(monkeypatch, capsys):
    """With its twelve layers in a loop, which gives the same tokens and compiles in a fraction."""
    monkeypatch.chdir(ROOT)  # where the README is read
    monkeypatch.setattr(specjax, "LLM", functools.partial(specjax.LLM, scan_layers=True))
    [snippet] = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(compile(snippet, "README.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "[]" and len(said) == 5  # two samples of two prompts, and no difference


def test_a_new_user_can_read_it_and_everything_else_is_linked():
    assert len(README.split()) <= WORDS
    linked = {(ROOT / link).resolve() for link in re.findall(r"\]\(([\w./]+)\)", README)}
    assert PAGES.keys() - {ROOT / "README.md"} <= linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_name_modules_and_targets_that_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"^make ([a-z-]+)", PAGES[page], re.M)) <= targets
    for module in set(re.findall(r"python -m ([\w.]+)", PAGES[page])):
        assert importlib.util.find_spec(module), module


@pytest.mark.parametrize("command", ["generate", "verify", "convert"])
def test_flags_of_specjax_exist(command, capsys):
    flags = {
        flag
        for text in PAGES.values()
        for line in re.findall(rf"^specjax {command} ([^#\n]*)", text, re.M)
        for flag in re.findall(r"(?<!\S)--[a-z-]+", line)
    }
    with pytest.raises(SystemExit):
        main([command, "--help"])
    keys = re.findall(r"^  (?:--)?([\w-]+)(?==|  )", capsys.readouterr().out, re.M)
    assert flags <= {f"--{key.replace('_', '-')}" for key in keys}


def test_the_commands_of_the_first_minutes_are_there():
    assert {"rl", "test"} <= set(re.findall(r"^make ([a-z-]+)", README, re.M))
    modules = set(re.findall(r"python -m ([\w.]+)", README))
    assert {"train.rl", "train.data", "serve", "bench.decode"} <= modules


LINKS = [
    (page, link) for page, text in PAGES.items() for link in re.findall(r"\]\(([\w./]+)\)", text)
]


@pytest.mark.parametrize(("page", "link"), sorted(set(LINKS)), ids=lambda x: getattr(x, "name", x))
def test_links_point_at_files(page, link):
    assert (page.parent / link).is_file()


def test_the_range_of_jax_ends_with_the_versions_that_are_tested():
    """docs/development.md names them, constraints.txt pins the first and the last, and
    pyproject.toml refuses all others: a jax whose minor version was not tested."""
    page = (ROOT / "docs/development.md").read_text(encoding="utf-8")
    [said] = re.findall(r"The tests are run with (.*?)\.\s", page)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_the_repository_that_are_named_exist(page):
    path = r"(?<![\w/.])((?:specjax|train|serve|bench|tests|configs|docs)/[\w./-]*\w\.[a-z]+)\b"
    named = [file for file in re.findall(path, PAGES[page]) if "/NAME." not in file]
    assert [file for file in named if not (ROOT / file).exists()] == []
