"""Worker processes in which rewards run, each with a time limit per completion.

A reward that hangs is ended with its process and with what that started, and the process is
replaced: no signal interrupts a regular expression or a product of large integers. A thread per
worker waits for its answers, so that the engine's thread waits for none.

A request is (number of the reward, completions, columns of each, seconds by which a first call may
be late), and its answer is the outcomes. Both travel as pickles; the functions do not: the worker
imports them by their names. It imports no jax, unless a reward does.

The first call of a user's reward in a process may import libraries or load a model, and has more
time: a process that is ended for that would be followed by one as slow.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from train.rewards.calls import Failed, Outcome, took_too_long

_START_SECONDS = 300.0  # imports may take minutes from a shared disk
_FIRST_SECONDS = 120.0  # by which a reward's first call in a process may be late
_FIRST_TIMES = 3  # how many of these may be late: such a reward hangs
_MARGIN = 1.0  # seconds by which a reward may be late, for asynchronous ones have the limit too
_MOST_LATE = 100  # late asynchronous calls, which may go on, with which a process is replaced
_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from train.rewards import workers; workers.serve(int(sys.argv[2]), int(sys.argv[3]))"
)
# What makes the functions of a worker, by the kind of its `Setup`.
_LOADERS = {"reward": "train.rewards.builtin", "environment": "train.environments.calls"}

Outcomes = list[Outcome]


class WorkerError(RuntimeError):
    """A worker process cannot be started."""


class Setup(NamedTuple):
    """The first message to a worker.

    Attributes:
      names: names of the rewards.
      pattern: regular expression of the reward `format`.
      seconds: time limit of a completion.
      kind: `reward`, or `environment`, which `train.environments.calls` calls.
    """

    names: tuple[str, ...]
    pattern: str
    seconds: float
    kind: str = "reward"


class Workers:
    """Processes that call rewards; each starts with the first call that it gets.

    Args:
      setup: names of the rewards, their options and the time limit.
      count: number of processes.
      took: function to call with the seconds that each call took.
    """

    def __init__(self, setup: Setup, count: int, took: Callable[[float], Any]):
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        late: Counter[int] = Counter()
        self._workers = [_Worker(setup, self._calls, took, late) for _ in range(count)]
        self._close = weakref.finalize(self, _end, self._workers, self._calls)  # at exit, too

    def pids(self) -> list[int]:
        """Returns the process ids of the workers that run."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def submit(
        self, index: int, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> Future[Outcomes]:
        """Has a worker call the reward of that number; returns at once.

        Args:
          index: number of the reward.
          completions: texts to score.
          rows: columns of the row of each completion.
        """
        future: Future[Outcomes] = Future()
        self._calls.put((future, index, list(completions), list(rows)))
        return future

    def close(self) -> None:
        """Ends all processes, also those that hang."""
        self._close()


def _end(workers: Sequence[_Worker], calls: queue.SimpleQueue) -> None:
    for worker in workers:
        worker.close()
        calls.put(None)


class _Worker:
    """A worker process, and the thread that starts it, sends it calls, and ends it when it is late.

    Attributes:
      process: the process; None while there is none.
    """

    def __init__(self, setup: Setup, calls: queue.SimpleQueue, took: Callable, late: Counter):
        self._setup, self._calls, self._took, self._late_first = setup, calls, took, late
        self._called: set[int] = set()  # the rewards that this process has called
        self._late = 0  # late calls of asynchronous rewards in this process
        self._lock, self._closed = threading.Lock(), False
        self.process: subprocess.Popen | None = None
        self._connection: Any = None
        threading.Thread(target=self._run, daemon=True, name="reward").start()

    def _run(self) -> None:
        # The kernel ends a child with the thread that started it (`serve`): this one starts all
        # processes of its worker, and lives as long as they may.
        while (call := self._calls.get()) is not None:
            future, *request = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if self.process is None:
                    self._start()
                started = time.perf_counter()
                outcomes = self._answer(*request)
                self._took(time.perf_counter() - started)
                future.set_result(outcomes)
            except Exception as error:
                future.set_exception(error)

    def _answer(self, index: int, completions: list, rows: list) -> Outcomes:
        seconds, is_first = self._setup.seconds, index not in self._called
        extra = _FIRST_SECONDS * (is_first and self._late_first[index] < _FIRST_TIMES)
        limit = seconds * len(completions) + extra + _MARGIN
        try:
            self._connection.send((index, completions, rows, extra))
            if self._connection.poll(limit):
                outcomes = self._connection.recv()
                self._called.add(index)
                self._late += sum(isinstance(o, Failed) and o.timed_out for o in outcomes)
                # A late environment may block the event loop of all others in the process.
                if self._late >= (1 if self._setup.kind == "environment" else _MOST_LATE):
                    self._kill()
                return outcomes
            failed = took_too_long(seconds)
            self._late_first[index] += is_first
            self._kill()
        except (EOFError, OSError):
            failed = Failed("ended its process", f"{self._kill()}; a new one was started")
        return [failed] * len(completions)

    def _start(self) -> None:
        self._connection, childs = multiprocessing.Pipe()
        with self._lock:
            if self._closed:
                raise WorkerError("the rewards' processes were closed")
            path = json.dumps([str(entry) for entry in sys.path])
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CODE, path, str(childs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward prints is no output of the program
                pass_fds=[childs.fileno()],
                start_new_session=True,  # `_end_all` ends what the reward starts, too
                # A reward that uses jax must not take the memory of the accelerator.
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
        childs.close()
        # Rewards that come with specjax have imported what they need before they begin.
        self._called = {i for i, name in enumerate(self._setup.names) if ":" not in name}
        self._late = 0
        problem: Any = f"it did not begin within {_START_SECONDS:.0f} s"
        try:
            self._connection.send(self._setup)
            if self._connection.poll(_START_SECONDS):
                problem = self._connection.recv()
        except (EOFError, OSError):
            problem = f"it ended with {self._kill()}"
        if problem is not None:
            self._kill()
            reason = str(problem).strip().splitlines()[-1]
            raise WorkerError(
                f"a process for {self._setup.kind}={', '.join(self._setup.names)} cannot be "
                f"started: {reason}; "
                "correct it, or set rewards.workers=0: it runs in this process, without a limit"
            )

    def _kill(self) -> str:
        """Ends the process; returns its exit status for a message."""
        with self._lock:
            process, self.process = self.process, None
            if process is None:
                return "no process"
            _end_all(process)
        process.wait()
        self._connection.close()
        return f"exit status {process.returncode}"

    def close(self) -> None:
        """Ends the process, from any thread; its call, if it runs one, fails."""
        with self._lock:
            self._closed = True
            if self.process is not None:
                _end_all(self.process)


def _end_all(process: subprocess.Popen) -> None:
    """Ends a process that was not reaped, and what it started in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has ended, and started nothing that runs
        pass
    except PermissionError:  # on macOS, of a group whose only process has ended
        process.kill()


# --- the worker process --------------------------------------------------------------------------


def serve(descriptor: int, parent: int) -> None:
    """Calls rewards until the parent closes the connection, or ends.

    Args:
      descriptor: file descriptor of the connection.
      parent: process id of the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal
    # A reward that hangs in a call which holds the interpreter's lock never reads the end of the
    # connection. On Linux the kernel ends this process with the thread that started it.
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    connection = Connection(descriptor)
    setup = connection.recv()
    try:
        calls = importlib.import_module(_LOADERS[setup.kind]).load(setup)
    except Exception:
        connection.send(traceback.format_exc())
        return
    connection.send(None)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    while True:
        index, completions, rows, extra = requests.get()
        connection.send(calls[index](completions, rows, setup.seconds, extra))


def _receive(connection: Connection, requests: queue.SimpleQueue) -> None:
    """Reads requests in a thread, so that the end of the parent ends a reward that hangs."""
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)  # with what the reward has started
        os._exit(0)
