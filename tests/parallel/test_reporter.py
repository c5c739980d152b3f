"""A process that cannot write anything any more is spoken for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [("os.kill(os.getpid(), 9)", -9, "Start again."), ("reporter.cancel()", 0, "")],
)
def test_a_process_that_is_killed_is_spoken_for(end, status, said):
    program = (
        "import os; from specjax.parallel.distributed import Reporter; "
        f"reporter = Reporter('Start again.'); {end}"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr.strip()) == (status, said)
