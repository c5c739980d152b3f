"""Compares answers with math-verify in a child process that is killed when time is up.

`math_verify` runs sympy on text that a policy wrote, which may take forever (`9**9**9**9`) inside
one call that no signal interrupts, and the library's own timeout works in the main thread alone.
`python -m train.math_worker` is the child; it reads and writes one line of JSON per request.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path

SECONDS = 10.0  # per answer
_START_SECONDS = 120.0


class MathWorker:
    """A child process that compares answers; started on first use, restarted after a kill."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def same(self, gold: str, found: str) -> bool:
        """Whether they are equivalent (`train.equivalence`); False where that takes too long.

        Raises:
          ModuleNotFoundError: math-verify is not installed.
          RuntimeError: the child cannot be started.
        """
        with self._lock:
            if self._process is None:
                self._start()
            reply = self._ask({"gold": gold, "found": found}, SECONDS)
            if reply is None:
                self.close()
            return reply == "true"

    def _start(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ModuleNotFoundError(
                "reward 'math_verify' needs the math-verify package; install it, or use the "
                "reward 'number'"
            )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "train.math_worker"],
            cwd=Path(__file__).resolve().parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        # Imports take seconds on a busy machine and must not be charged to the first answer.
        if self._ask({"gold": "x+1", "found": "1+x"}, _START_SECONDS) != "true":
            self.close()
            raise RuntimeError(
                f"the math-verify process gave no answer within {_START_SECONDS:.0f} s of its "
                f"start; run `{sys.executable} -m train.math_worker` to see why"
            )

    def _ask(self, request: dict[str, str], seconds: float) -> str | None:
        process, expired = self._process, threading.Event()

        def expire():
            expired.set()
            process.kill()

        alarm = threading.Timer(seconds, expire)
        alarm.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            reply = process.stdout.readline().strip()
        except OSError:  # the pipe breaks when the process was killed or died
            reply = ""
        alarm.cancel()
        alarm.join()
        return None if expired.is_set() else reply or None

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


WORKER = MathWorker()
atexit.register(WORKER.close)


def _serve() -> None:
    """The child: one request per line in, `true` or `false` per line out."""
    import logging

    from train.equivalence import same_answer

    # The library warns once per call that timeouts are off; the parent is the timeout.
    logging.disable(logging.WARNING)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            same = same_answer(request["gold"], request["found"])
        except Exception:  # any text may come in, and none of it may end the process
            same = False
        print(json.dumps(same), flush=True)


if __name__ == "__main__":
    _serve()
