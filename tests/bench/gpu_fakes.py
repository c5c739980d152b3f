"""Parts for the queue's tests that end well, badly, or not at all."""

import os
import threading
import time
from pathlib import Path

from bench.record import figure


def measure(job, how, say=None):
    job.add({"before": figure(1.0, "measured before it ended")})
    if say:
        Path(say).write_text(str(os.getpid()))
    if how == "is_short":
        job.left_over = job.measured = 1
    else:
        endings[how]()


def does_not_fit():
    # What jax raises: its type and the rest of its text differ from release to release.
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes")


def stays():
    """The part ends, its process does not."""
    threading.Thread(target=time.sleep, args=(3600,)).start()


def fails():
    raise ValueError("no such kernel")


endings = {
    "ends": lambda: None,
    "hangs": lambda: time.sleep(3600),
    "aborts": os.abort,
    "does_not_fit": does_not_fit,
    "fails": fails,
    "stays": stays,
}
