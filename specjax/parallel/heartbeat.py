"""Heartbeats: a job of several processes ends when one of them is lost, and names it.

Without heartbeats a process in a collective would wait minutes for one that was killed, and end
with a message of the transport or none at all. So each process repeatedly writes a file of its own
into a directory that all share (below that of the run, beside the checkpoints). Process 0 reads all
files, the others read that of process 0. A process is lost if its file does not change for
`lost_after` seconds, or if it wrote that it failed. All others then print which one, and exit with
status 70.

A `Reporter` reports the end of a process that cannot write anything any more: after SIGKILL, or
when jax aborts it because process 0, which runs the coordination service, is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from specjax.error_text import first_line

STATUS = 70  # EX_SOFTWARE
_BEATS = 10  # heartbeats in `lost_after` seconds
_REPORTER = 'read -r word; [ "$word" = cancel ] || printf "%s\\n" "$0" >&2'


class Reporter:
    """Prints a text if the process ends before `cancel`: a shell at the other end of a pipe."""

    def __init__(self, text: str):
        self._shell = None
        with contextlib.suppress(OSError):  # without a shell, only the message is missing
            self._shell = subprocess.Popen(
                ["sh", "-c", _REPORTER, text],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # signals to the process must not end the shell
            )

    def cancel(self) -> None:
        """Ends the shell, which prints nothing."""
        shell, self._shell = self._shell, None
        if shell is not None:
            with contextlib.suppress(OSError):
                shell.stdin.write(b"cancel\n")
                shell.stdin.close()
            shell.wait()


class Heartbeat:
    """Writes this process's file and reads those of others, from construction to `close`.

    Args:
      directory: directory that all processes share.
      process, processes: number of this process, and the number of processes.
      token: identifies this start of the job; files of earlier starts are ignored.
      lost_after: seconds without a change after which a process is lost.
      advice: what to do when a process is lost, as a sentence.
    """

    def __init__(
        self,
        directory: Path,
        process: int,
        processes: int,
        token: str,
        lost_after: float,
        advice: str,
    ):
        self.directory, self.process, self.processes = directory, process, processes
        self._token, self._lost_after, self._advice = token, lost_after, advice
        self._state, self._message, self._beats = "running", "", 0
        self._seen = {  # process -> its last content, and when that changed
            other: ({}, time.monotonic())
            for other in (range(1, processes) if process == 0 else [0])
        }
        self._lock, self._closed = threading.Lock(), threading.Event()
        directory.mkdir(parents=True, exist_ok=True)
        self._write()
        me = {"process": process, "host": socket.gethostname(), "pid": os.getpid()}
        self._reporter = Reporter(
            f"error: {_name(me)} of {processes} was killed, or ended by jax, whose lines above "
            f"then say that process 0 is lost. {advice}"
        )
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes that the process is done."""
        self._closed.set()
        self._thread.join()
        self._leave("done")

    def fail(self, error: BaseException) -> None:
        """Writes that the process has failed, which ends the others."""
        self._closed.set()
        self._leave("failed", first_line(error))
        self._linger()

    def missing(self) -> list[int]:
        """Returns the processes whose files of this start cannot be read here."""
        known = [self._read(other).get("token") for other in range(self.processes)]
        return [other for other, token in enumerate(known) if token != self._token]

    def wait_for_loss(self) -> None:
        """Waits until the loss of another process, which may have caused an error, is detected.

        If one is lost this ends the process.
        """
        self._closed.wait(self._lost_after * (1 + 4 / _BEATS))

    def _watch(self) -> None:
        while not self._closed.wait(self._lost_after / _BEATS):
            self._write()
            lost = self._look()
            if lost and not self._closed.is_set():  # it may have ended or failed meanwhile
                return self._end(lost)

    def _look(self) -> str:
        """Returns a sentence that says which process is lost; empty: none is."""
        now = time.monotonic()
        for other, (before, since) in self._seen.items():
            told = self._read(other)
            if told.get("token") == self._token and told != before:
                self._seen[other] = told, now
                if told["state"] == "lost":
                    return told["message"]
                if told["state"] == "failed":
                    return f"{_name(told)} ended with an error ({told['message']}); see its output"
            elif before.get("state") != "done" and now - since > self._lost_after:
                who = _name(before) if before else f"process {other}"
                return f"{who} is lost: no heartbeat for {now - since:.0f} s"
        return ""

    def _end(self, lost: str) -> None:
        """Writes the loss and ends the process; its main thread may be blocked in a collective."""
        print(f"error: {lost}. {self._advice}", file=sys.stderr, flush=True)
        self._leave("lost", lost)
        self._linger()
        exit_now(STATUS)

    def _leave(self, state: str, message: str = "") -> None:
        self._state, self._message = state, message
        self._write()
        self._reporter.cancel()

    def _linger(self) -> None:
        if self.process == 0:  # when it ends jax aborts the others, which must print first
            time.sleep(3 * self._lost_after / _BEATS)

    def _read(self, other: int) -> dict[str, Any]:
        try:
            return json.loads((self.directory / f"{other}.json").read_text())
        except (OSError, ValueError):  # not there yet, or the storage has an error
            return {}

    def _write(self) -> None:
        with self._lock:
            self._beats += 1
            told = {
                "token": self._token,
                "process": self.process,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "state": self._state,
                "message": self._message,
                "beats": self._beats,
            }
            partial = self.directory / f"{self.process}.tmp"
            with contextlib.suppress(OSError):  # a full disk does not end the run here
                partial.write_text(json.dumps(told))
                partial.replace(self.directory / f"{self.process}.json")


def _name(told: dict[str, Any]) -> str:
    return f"process {told['process']} (pid {told['pid']} on {told['host']})"


def exit_now(status: int) -> None:
    """Ends the process at once: `sys.exit` would wait for the other processes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
