"""The worker process that `train.reward_workers` starts: it calls rewards, one request at a time.

A request is (number of the reward, completions, columns of each, seconds by which an asynchronous
reward may be late), and its answer is (outcomes, seconds in the function, threads that asynchronous
rewards have abandoned). Both travel as pickles; the functions do not: the worker imports them by
their names. It imports no jax, unless a reward does.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import queue
import signal
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from train.children import die_with_parent
from train.reward_calls import RewardCall
from train.reward_loop import abandoned_threads, run_in_loop
from train.rewards import compare_in_this_process, get_reward


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


def main(descriptor: int, parent: int) -> None:
    """Serves requests until the parent closes the connection, or ends.

    Args:
      descriptor: file descriptor of the connection.
      parent: process id of the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal
    die_with_parent(parent)
    connection = Connection(descriptor)
    setup: Setup = connection.recv()
    try:
        calls = _load(setup)
    except Exception:
        connection.send(traceback.format_exc())
        return
    connection.send(None)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    is_async = any(call.is_async for call in calls)
    while True:
        request = run_in_loop(_next(requests)) if is_async else requests.get()
        index, completions, rows, extra = request
        started = time.perf_counter()
        outcomes = calls[index](completions, rows, setup.seconds, extra)
        connection.send((outcomes, time.perf_counter() - started, abandoned_threads()))


def _load(setup: Setup) -> list[RewardCall]:
    calls = [RewardCall(name, get_reward(name, setup.pattern)) for name in setup.names]
    # The library warns in every call that its timeouts are off; the parent has one.
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # A reward of the user's own may call `math_verify`, too; then its first call imports it.
    compare_in_this_process(at_once="math_verify" in setup.names)
    if "reasoning_gym" in setup.names:
        importlib.import_module("reasoning_gym")  # which takes seconds
    return calls


async def _next(requests: queue.SimpleQueue) -> Any:
    """The next request.

    The event loop runs meanwhile: rewards that were cancelled may clean up, and clients may keep
    their connections. It waits in a thread of its own, for those of `asyncio.to_thread` may all be
    taken.
    """
    loop = asyncio.get_running_loop()
    found = loop.create_future()

    def get() -> None:
        request = requests.get()
        loop.call_soon_threadsafe(found.set_result, request)

    threading.Thread(target=get, daemon=True, name="next request").start()
    return await found


def _receive(connection: Connection, requests: queue.SimpleQueue) -> None:
    """Reads requests in a thread, so that the end of the parent ends a reward that hangs."""
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)  # with what the reward has started
        os._exit(0)
