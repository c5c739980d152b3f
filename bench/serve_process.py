"""`python -m serve` as a process of its own, for benches."""

from __future__ import annotations

import collections
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent


class ServerProcess:
    """A server on loopback, on a free port, from when it listens to the end of the `with`.

    Args:
      model: Hugging Face directory. settings: `key=value`, as on the command line.

    Attributes:
      url: where it listens.

    Raises:
      RuntimeError: it ended instead; with what it said last.
    """

    def __init__(self, model: str, settings: Sequence[str] = ()):
        self._command = [sys.executable, "-m", "serve", "--model", model, "port=0", *settings]
        self._said: collections.deque[str] = collections.deque(maxlen=30)

    def __enter__(self) -> ServerProcess:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(
            self._command, env=environment, stderr=subprocess.PIPE, text=True
        )
        for line in self._process.stderr:
            self._said.append(line)
            print(line, end="", file=sys.stderr, flush=True)
            if found := re.search(r"running on (http://127\.0\.0\.1:\d+)", line):
                self.url = found[1]
                threading.Thread(target=self._drain, daemon=True).start()
                return self
        self._process.wait()
        raise RuntimeError("the server ended instead of listening:\n" + "".join(self._said))

    def __exit__(self, *_) -> None:
        self._process.terminate()
        try:
            self._process.wait(90)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    def _drain(self) -> None:
        """Lest the pipe fills."""
        self._said.extend(self._process.stderr)

    @property
    def resident_bytes(self) -> int | None:
        """Memory that it holds; None where the system does not say so in /proc."""
        try:
            text = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        except OSError:
            return None
        return 1024 * int(re.search(r"VmRSS:\s+(\d+) kB", text)[1])

    def info(self) -> dict:
        """What GET /server_info says."""
        return httpx.get(f"{self.url}/server_info", timeout=60).json()

    def metrics(self) -> dict[str, float]:
        """What GET /metrics says, by name and labels as written, without the prefix."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name.removeprefix("specjax:"): float(value) for name, value in pairs}

    def idle_metrics(self, seconds: float = 60) -> dict[str, float]:
        """The metrics when nothing runs or waits any more, or after that many seconds."""
        until = time.perf_counter() + seconds
        while True:
            now = self.metrics()
            busy = now["num_requests_running"] + now["num_requests_waiting"]
            if not busy or time.perf_counter() > until:
                return now
            time.sleep(0.1)
