"""A job of several processes ends when one of them is gone, and says which."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specjax.parallel import heartbeat
from specjax.parallel.heartbeat import STATUS, Heartbeat

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def left(monkeypatch):
    """The statuses that processes would have ended with."""
    statuses = []
    monkeypatch.setattr(heartbeat, "exit_now", statuses.append)
    return statuses


def sign(directory: Path, process: int, state="running", message="", token="now") -> None:
    """A sign of life of a process that this test plays."""
    told = {"token": token, "process": process, "host": "far", "pid": 7, "state": state}
    (directory / f"{process}.json").write_text(json.dumps(told | {"message": message}))


def watch(directory: Path, process: int, lost_after: float = 0.4) -> Heartbeat:
    return Heartbeat(directory, process, 3, "now", lost_after, advice="Start again.")


def wait(statuses: list, seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not statuses and time.monotonic() < until:
        time.sleep(0.01)


@pytest.mark.parametrize("last", ["now", "of an earlier start", None])
def test_who_gives_no_sign_of_life_is_lost(tmp_path, left, capfd, last):
    sign(tmp_path, 2, "done")
    if last:
        sign(tmp_path, 1, token=last)
    line = watch(tmp_path, 0)
    wait(left)
    who = "process 1 (pid 7 on far)" if last == "now" else "process 1"
    error = capfd.readouterr().err
    assert left == [STATUS] and f"error: {who} is lost: no heartbeat for" in error
    assert "Start again." in error
    assert "process 1" in json.loads((tmp_path / "0.json").read_text())["message"]
    assert line.missing() == ([] if last == "now" else [1])


def test_all_others_hear_of_it_from_process_0(tmp_path, left, capfd):
    sign(tmp_path, 0, "lost", "process 2 is lost")
    watch(tmp_path, 1)
    wait(left)
    assert left == [STATUS] and "error: process 2 is lost. Start again." in capfd.readouterr().err


def test_who_failed_says_why(tmp_path, left, capfd):
    sign(tmp_path, 2)
    failing = watch(tmp_path, 1)
    watch(tmp_path, 0)
    failing.fail(ValueError("no room\nin here"))
    wait(left)
    error = capfd.readouterr().err
    assert left == [STATUS] and "ended with an error (ValueError: no room); see its" in error


def test_a_process_that_is_killed_is_spoken_for(tmp_path):
    program = (
        "import os, pathlib; from specjax.parallel.heartbeat import Heartbeat; "
        f"Heartbeat(pathlib.Path({str(tmp_path)!r}), 1, 2, 'now', 60, 'Start again.'); "
        "os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == -9
    assert "error: process 1" in ended.stderr and "was killed, or ended by jax" in ended.stderr
    assert "Start again." in ended.stderr
