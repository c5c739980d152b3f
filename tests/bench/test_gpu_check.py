"""`make gpu-check` and `make gpu-wheels`: what is installed where, and what they cannot do."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.gpu import check, queue, wheels
from bench.gpu.program import CARDS


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Environments are made below a directory of the test's own; returns what was run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(check, "find_python", lambda: "python3.12")
    return tmp_path


def installs(monkeypatch, status=0):
    """Commands instead of being run."""
    ran = []

    def run(command, seconds, environment):
        ran.append(command)
        if "venv" in command:
            directory = check.home() / check.key()
            (directory / "bin").mkdir(parents=True)
            return 0
        return status

    monkeypatch.setattr(check, "run", run)
    return ran


def test_an_environment_is_made_once_and_pinned(cache, monkeypatch):
    ran = installs(monkeypatch)
    python = check.environment()
    assert python == cache / "specjax" / "gpu-check" / check.key() / "bin" / "python"
    assert check.PLUGIN in ran[1] and "pytest" in ran[1] and len(ran) == 2
    given = (python.parents[1] / "constraints.txt").read_text()
    assert "jax==0.11.2" in given.splitlines() and "jax==0.12" not in given
    assert check.environment() == python and len(ran) == 2  # it is there


def test_an_installation_that_was_killed_is_not_taken_for_whole(cache, monkeypatch):
    ran = installs(monkeypatch, status="timed out")
    with pytest.raises(check.Impossible, match="could not install"):
        check.environment()
    left = check.home() / check.key() / "half"
    left.write_text("")
    ran = installs(monkeypatch)
    check.environment()
    assert len(ran) == 2 and not left.exists()


def test_an_environment_that_cannot_be_made_is_said_to_be_impossible(cache, monkeypatch):
    """A full disk fails venv, or the first file that is written."""
    monkeypatch.setattr(check, "run", lambda *_: 1)
    with pytest.raises(check.Impossible, match="-m venv .* failed .exit status 1"):
        check.environment()
    monkeypatch.setattr(check, "run", lambda *_: 0)  # and yet there is no directory
    with pytest.raises(check.Impossible, match="could not be created.*No such file"):
        check.environment()


def test_its_name_changes_with_what_is_named_and_with_nothing_else(monkeypatch):
    before, (wanted, constraints) = check.key(), check.requirements()

    def key_with(lines):
        monkeypatch.setattr(check, "requirements", lambda: (wanted, lines))
        return check.key()

    assert key_with([*constraints, "selenium==9.9"]) == before
    assert key_with([line.replace("0.11.2", "0.11.3") for line in constraints]) != before
    assert key_with([*constraints, "flax==9.9"]) != before


@pytest.mark.parametrize("argv, status", [([], 1), (["--if-possible"], 75)])
def test_without_python_312_it_says_so(cache, monkeypatch, capsys, argv, status):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("PYENV_ROOT", str(cache))
    monkeypatch.setattr(check, "IS_312", "import sys; sys.exit(1)")
    assert check.main(argv) == status
    assert "NOT DONE: none of" in capsys.readouterr().out


def test_a_pythons_shim_that_does_not_work_is_passed_over(tmp_path, monkeypatch):
    works, shim = tmp_path / "versions" / "3.12.1" / "bin" / "python", tmp_path / "python3.12"
    for path, text in ((works, "exit 0"), (shim, "exit 127")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(shim))
    real = subprocess.run

    def run(command, **options):
        command = ["false"] if command[0] == "python3" else command
        return real(command, **options)

    monkeypatch.setattr(check.subprocess, "run", run)
    assert check.find_python() == str(works)


@pytest.mark.parametrize(
    "tests, dry, lines, failed",
    [
        (0, 0, [], 0),
        (1, 0, [f"{' and '.join(check.COMPILED)} failed with exit status 1"], 1),
        (0, check.UNFINISHED, ["not done: python -m bench.gpu --dry: the programs named"], 75),
        ("timed out", 0, ["not done: tests/kernels"], 75),
        ("timed out", 1, ["not done: tests/kernels", "python -m bench.gpu --dry failed"], 1),
    ],
)
def test_what_failed_is_told_from_what_there_was_no_time_for(
    monkeypatch, cache, tests, dry, lines, failed
):
    commands = []

    def run(command, seconds, environment):
        assert environment["SPECJAX_GPU_PYTHON"] == "python"
        if "pytest" in command:
            return tests
        commands.append(command)
        return dry

    monkeypatch.setattr(check, "run", run)
    found = check.check("python", 10.0, ["--cards", "h100"])
    assert len(found) == len(lines) and all(map(str.startswith, found, lines))
    monkeypatch.setattr(check, "environment", lambda minutes: "python")
    assert check.main(["--if-possible", "--cards", "h100"]) == failed
    assert check.main(["--cards", "h100"]) == int(bool(lines))
    assert all(command[-2:] == ["--cards", "h100"] for command in commands)


def test_a_command_that_takes_too_long_is_ended_with_what_it_began(tmp_path):
    began = tmp_path / "pid"
    script = f"sleep 300 & echo $! > {began}; wait"
    assert check.run(["sh", "-c", script], 2.0, {}) == "timed out"
    stat, end = Path("/proc", began.read_text().strip(), "stat"), time.monotonic() + 60

    def runs():
        try:
            return stat.read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False

    while runs():  # a signal takes a moment
        assert time.monotonic() < end
        time.sleep(0.05)


def test_wheels_have_the_pinned_versions_for_python_312():
    pins = dict(line.split("==") for line in wheels.pins())
    assert set(pins) == set(wheels.PACKAGES) and pins["flax"] == "0.12.12"


def test_what_travels_leaves_room_for_wheels_and_compiled_programs():
    try:
        tracked = wheels.tracked_bytes()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git checkout: it is not known which files are tracked")
    assert wheels.KEPT == queue.CACHE_BYTES * len(CARDS)
    assert tracked + wheels.KEPT + 8_000_000 < wheels.LIMIT  # the wheels are 7 MB
