"""Child processes that end with their parent, however it ends."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, on Linux.

    A child that waits for its parent reads the end of its pipe in any case, on every system. One
    that hangs in a call which holds the interpreter's lock reads nothing, and would go on forever.

    The kernel does so when the parent's thread that started this process ends, and not only when
    the whole parent does: `start_child` starts a process from a thread that lives long enough.

    Args:
      parent: process id of the parent; this process ends if that has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def start_child(arguments: Sequence[str], **options: Any) -> subprocess.Popen:
    """Starts a process that may call `die_with_parent`, from whatever thread this is called in.

    Args:
      arguments: program and arguments.
      options: further arguments of `subprocess.Popen`.

    Raises:
      OSError: the program cannot be started.
    """
    started: queue.SimpleQueue[subprocess.Popen | OSError] = queue.SimpleQueue()

    def start_and_wait() -> None:
        try:
            process = subprocess.Popen(arguments, **options)
        except OSError as error:
            started.put(error)
            return
        started.put(process)
        process.wait()  # so the thread that started the process lives as long as the process

    threading.Thread(target=start_and_wait, daemon=True, name="child").start()
    process = started.get()
    if isinstance(process, OSError):
        raise process
    return process
