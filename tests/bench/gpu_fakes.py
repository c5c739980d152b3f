"""Parts for the queue's tests that end well, badly, or not at all."""

import os
import time
from pathlib import Path

from bench.record import figure


def measure(job, how, say=None):
    job.add({"before": figure(1.0, "measured before it ended")})
    if say:
        Path(say).write_text(str(os.getpid()))
    if how == "is_short":
        job.left_over = job.measured = 1
    elif how == "hangs":
        time.sleep(3600)
    elif how == "aborts":
        os.abort()
    elif how == "does_not_fit":
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes")
    elif how == "fails":
        raise ValueError("no such kernel")
