"""Worker processes in which rewards run, each with a time limit per completion.

A reward that hangs is ended with its process and with what that started, and the process is
replaced: no signal interrupts a regular expression or a product of large integers. A thread per
worker waits for its answers, so that the engine's thread waits for none.

The first call of a user's reward in a process may import libraries or load a model, and has more
time (`FirstCalls`): a process that is ended for that would be followed by one as slow. A process in
which asynchronous rewards have left `MOST_ABANDONED` threads behind is ended after its answer.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from train.rewards.calls import Failed, Outcome, took_too_long
from train.rewards.loop import MOST_ABANDONED

_START_SECONDS = 300.0  # imports may take minutes from a shared disk
_FIRST_SECONDS = 120.0  # by which a reward's first call in a process may be late
_FIRST_TIMES = 3  # how many of these may be late before one returned
_FIRST_FACTOR = 3.0  # what a later process's first call may take, times the slowest before
_MARGIN = 1.0  # seconds by which an asynchronous reward, which has the limit itself, may be late
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from train.rewards.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class WorkerError(RuntimeError):
    """A worker process cannot be started."""


class Setup(NamedTuple):
    """The first message to a worker.

    Attributes:
      names: names of the rewards.
      pattern: regular expression of the reward `format`.
      seconds: time limit of a completion.
    """

    names: tuple[str, ...]
    pattern: str
    seconds: float


class Answer(NamedTuple):
    """The outcomes of a call, one for each completion, and the seconds that it took."""

    outcomes: list[Outcome]
    seconds: float


class FirstCalls:
    """The extra time of the first call of each reward in a process, known from those before it.

    Until one has returned, it is `_FIRST_SECONDS`, and none after `_FIRST_TIMES` late ones: such a
    reward hangs. Afterwards it is `_FIRST_FACTOR` times the slowest first call that returned.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slowest: dict[int, float] = {}
        self._late: Counter[int] = Counter()

    def extra(self, index: int) -> float:
        """The seconds by which the next first call of that reward may be late."""
        with self._lock:
            if index in self._slowest:
                return _FIRST_FACTOR * self._slowest[index]
            return _FIRST_SECONDS if self._late[index] < _FIRST_TIMES else 0.0

    def returned(self, index: int, seconds: float) -> None:
        """Notes that a first call returned."""
        with self._lock:
            self._slowest[index] = max(seconds, self._slowest.get(index, 0.0))

    def was_late(self, index: int) -> None:
        """Notes that a first call was ended at its limit."""
        with self._lock:
            self._late[index] += 1


class Workers:
    """Processes that call rewards; each starts with the first call that it gets.

    Args:
      setup: names of the rewards, their options and the time limit.
      count: number of processes.

    Attributes:
      replaced: number of processes that were ended, or ended themselves, in or after a call so far.
    """

    def __init__(self, setup: Setup, count: int):
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        firsts = FirstCalls()
        self._threads = [_Worker(setup, self._tasks, firsts) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        self._close = weakref.finalize(self, _end, self._threads, self._tasks)  # at exit, too

    @property
    def replaced(self) -> int:
        return sum(thread.replaced for thread in self._threads)

    def pids(self) -> list[int]:
        """The process ids of the workers that run."""
        return [thread.process.pid for thread in self._threads if thread.process is not None]

    def submit(
        self,
        index: int,
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        margin: bool = False,
    ) -> Future[Answer]:
        """Has a worker call the reward of that number; returns at once.

        Args:
          index: number of the reward.
          completions: texts to score.
          rows: columns of the row of each completion.
          margin: whether the reward watches the time limit itself, and is ended only if it is late.
        """
        future: Future[Answer] = Future()
        self._tasks.put((future, index, list(completions), list(rows), margin))
        return future

    def close(self) -> None:
        """Ends all processes, also those that hang."""
        self._close()


def _end(threads: Sequence[_Worker], tasks: queue.SimpleQueue) -> None:
    for thread in threads:
        thread.close()
        tasks.put(None)


class _Worker(threading.Thread):
    """The thread that starts a worker process, sends it calls, and ends it when it is late.

    Attributes:
      process: the process; None while there is none.
      replaced: number of processes that ended in or after a call.
    """

    def __init__(self, setup: Setup, tasks: queue.SimpleQueue, firsts: FirstCalls):
        super().__init__(daemon=True, name="reward")
        self._setup, self._tasks, self._firsts = setup, tasks, firsts
        self._called: set[int] = set()  # the rewards that this process has called
        self._lock, self._closed = threading.Lock(), False
        self.process: subprocess.Popen | None = None
        self._connection: Any = None
        self.replaced = 0

    def run(self) -> None:
        # The kernel ends a child with the thread that started it (`train.rewards.worker`): this one
        # starts all processes of its worker, and lives as long as they may.
        while (task := self._tasks.get()) is not None:
            future, *call = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._ask(*call))
            except Exception as error:
                future.set_exception(error)

    def _ask(
        self,
        index: int,
        completions: list[str],
        rows: list[Mapping[str, Any]],
        margin: bool,
    ) -> Answer:
        if self.process is None:
            self._start()
        seconds, started = self._setup.seconds, time.perf_counter()
        is_first = index not in self._called
        extra = self._firsts.extra(index) if is_first else 0.0
        limit = seconds * len(completions) + extra + _MARGIN * margin
        try:
            self._connection.send((index, completions, rows, extra))
            if self._connection.poll(limit):
                outcomes, seconds_in_it, abandoned = self._connection.recv()
                if is_first:
                    self._called.add(index)
                    self._firsts.returned(index, seconds_in_it)
                if abandoned >= MOST_ABANDONED:
                    self._kill()
                    self.replaced += 1
                return Answer(outcomes, seconds_in_it)
            failed = took_too_long(seconds)
            if is_first:
                self._firsts.was_late(index)
        except (EOFError, OSError):
            failed = Failed("ended its process", f"{self._ended()}; a new one was started")
        self._kill()
        self.replaced += 1
        return Answer([failed] * len(completions), time.perf_counter() - started)

    def _start(self) -> None:
        connection, childs = multiprocessing.Pipe()
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
        self._connection = connection
        # Rewards that come with specjax have imported what they need before they begin.
        self._called = {i for i, name in enumerate(self._setup.names) if ":" not in name}
        problem: Any = f"it did not begin within {_START_SECONDS:.0f} s"
        try:
            connection.send(self._setup)
            if connection.poll(_START_SECONDS):
                problem = connection.recv()
        except (EOFError, OSError):
            problem = f"it ended with {self._ended()}"
        if problem is not None:
            self._kill()
            reason = str(problem).strip().splitlines()[-1]
            raise WorkerError(
                f"a process for reward={', '.join(self._setup.names)} cannot be started: {reason}; "
                "a worker imports the reward by its name, with this process's sys.path: mend it, "
                "or set rewards.workers=0 to call it in this process, without a time limit"
            )

    def _ended(self) -> str:
        """Waits until the process has ended; its exit status for a message.

        The process is not reaped, so that its id stays that of its group.
        """
        done = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        killed = done.si_code != os.CLD_EXITED
        return f"exit status {-done.si_status if killed else done.si_status}"

    def _kill(self) -> None:
        with self._lock:
            process, self.process = self.process, None
            if process is not None:
                _end_all(process)
        if process is not None:
            process.wait()
            self._connection.close()

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
