"""The worker process that `train.rewards.workers` starts: it calls rewards, one request at a time.

A request is (number of the reward, completions, columns of each, seconds by which an asynchronous
reward may be late), and its answer is (outcomes, seconds in the function, threads that asynchronous
rewards have abandoned). Both travel as pickles; the functions do not: the worker imports them by
their names. It imports no jax, unless a reward does.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from train.rewards import builtin
from train.rewards.calls import RewardCall
from train.rewards.loop import abandoned_threads

_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)


def main(descriptor: int, parent: int) -> None:
    """Serves requests until the parent closes the connection, or ends.

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
        calls = _load(setup)
    except Exception:
        connection.send(traceback.format_exc())
        return
    connection.send(None)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    while True:
        index, completions, rows, extra = requests.get()
        started = time.perf_counter()
        outcomes = calls[index](completions, rows, setup.seconds, extra)
        connection.send((outcomes, time.perf_counter() - started, abandoned_threads()))


def _load(setup: Any) -> list[RewardCall]:
    """Imports the rewards; of those that come with specjax also what their first call imports."""
    calls = [RewardCall(name, builtin.get_reward(name, setup.pattern)) for name in setup.names]
    # The library warns in every call that its timeouts are off; this process has one.
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.ERROR)
    builtin.has_time_limit = True
    if "math_verify" in setup.names:
        builtin.math_verify("\\boxed{x+1}", "1+x")
    if "reasoning_gym" in setup.names:
        importlib.import_module("reasoning_gym")
    return calls


def _receive(connection: Connection, requests: queue.SimpleQueue) -> None:
    """Reads requests in a thread, so that the end of the parent ends a reward that hangs."""
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)  # with what the reward has started
        os._exit(0)
