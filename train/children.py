"""Child processes that end with their parent, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, on Linux.

    A child that waits for its parent reads the end of its pipe in any case, on every system. One
    that hangs in a call which holds the interpreter's lock reads nothing, and would go on forever.

    Args:
      parent: process id of the parent; this process ends if that has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
