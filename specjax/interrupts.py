"""Makes Ctrl-C end a program with one line and status 130, while it imports modules as well.

    if __name__ == "__main__":  # above the other imports
        from specjax import interrupts

        interrupts.begin("train.rl")
    ...
    if __name__ == "__main__":
        interrupts.run(main)

A program that imports within its functions does so `with interrupts.at_once(prog)`.

This module and the package around it import nothing that takes time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

INTERRUPTED = 130  # the exit status after Ctrl-C, as in shells
_state = {"prog": "", "imports": False}


def begin(prog: str) -> None:
    """Makes Ctrl-C end the process at once, until `run`.

    An exception would show the traceback of the module that is being imported, or be swallowed by
    callbacks of jax and by modules that try several imports.

    Args:
      prog: name of the program, for messages.
    """
    _state["prog"] = prog
    # A background job of a shell ignores Ctrl-C and must go on ignoring it.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _end)
        _state["imports"] = True


def _ready() -> None:
    if _state["imports"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _state["imports"] = False


@contextlib.contextmanager
def at_once(prog: str) -> Iterator[None]:
    """Makes Ctrl-C end the process at once within the block, see `begin`."""
    begin(prog)
    try:
        yield
    finally:
        _ready()


def run(main: Callable[[], int | None]) -> None:
    """Runs a program whose imports are done, and exits with the status that it returns, or 0.

    Raises:
      SystemExit: with status 130 after Ctrl-C that the program does not handle itself.
    """
    _ready()
    try:
        status = main()
    except KeyboardInterrupt:
        print(f"\n{_state['prog']}: interrupted", file=sys.stderr, flush=True)
        status = INTERRUPTED
    sys.exit(status)


def _end(number: int, frame: object) -> None:
    os.write(2, f"\n{_state['prog']}: interrupted before it began\n".encode())
    os._exit(INTERRUPTED)
