"""Ctrl-C while a program imports what it needs ends it with one line and status 130."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INTERRUPTED = 130


@pytest.mark.parametrize(
    "program",
    [["train.rl", "steps=1"], ["serve.cli", "generate", "--model", "nowhere", "1+1="]],
    ids=lambda program: program[0],
)
def test_ctrl_c_while_a_program_imports_is_no_traceback(program):
    """It comes as soon as Python says that a module, of many that follow, is imported."""
    # A test that is a background job ignores Ctrl-C, and so would what it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", *program],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if line.rpartition("|")[2].strip() == "numpy":
                process.send_signal(signal.SIGINT)
                break
        said += process.communicate(timeout=120)[1].splitlines(keepends=True)
    finally:
        process.kill()
    own = "".join(line for line in said if not line.startswith("import time:")).strip()
    assert process.returncode == INTERRUPTED, own
    assert "interrupted" in own and len(own.splitlines()) == 1, own
