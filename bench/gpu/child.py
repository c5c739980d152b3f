"""The process of one part: `python -m bench.gpu.child '<a task as JSON>'`, see `queue.py`.

Where a kernel hangs, or the driver fails, this process ends, and the other parts go on.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading

from bench.gpu.job import Job
from bench.gpu.table import Part


def end_with_parent() -> None:
    """Ends this process, and all that it began, when the process that began it has ended.

    That one holds the other end of this one's standard input. Without this, a part would go on
    computing beside one of the next call.
    """

    def watch() -> None:
        # Not `sys.stdin`: Python could not close it while this thread waits.
        while os.read(0, 4096):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    end_with_parent()
    task = json.loads(sys.argv[1])
    module, settings = task.pop("module"), task.pop("settings")
    job = Job(**task)
    ok = job.run(functools.partial(_measure, Part(job.part, "", module), settings))
    sys.exit(0 if ok else 3)


def _measure(part: Part, settings: dict, job: Job) -> None:
    part.load().measure(job, **settings)


if __name__ == "__main__":
    main()
