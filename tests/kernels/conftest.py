"""The tiny models of the engine's tests serve here, too."""

import ctypes
import sys
from pathlib import Path

import pytest

from specjax.kernels.cpu import native

sys.path.append(str(Path(__file__).resolve().parent.parent / "engine"))


@pytest.fixture(scope="session", autouse=True)
def small_calls_have_threads():
    """What these tests compute is too little to wake threads for, and they are to try them."""
    try:
        native.load()
    except native.NoKernelError:
        return
    ctypes.CDLL(str(native.build())).specjax_wake_for(ctypes.c_int64(0))
