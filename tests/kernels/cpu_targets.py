"""The kernels for CPUs as other processors, tunings and compilers have them, in this process."""

import contextlib
import ctypes
import functools
import platform
from pathlib import Path

import jax
import pytest

from specjax import shipped
from specjax.kernels.cpu import native

TARGETS = {
    "x86-64-v2": "-march=x86-64-v2",  # 4 lanes
    "sandybridge": "-march=sandybridge",  # 8 lanes, and no fused operations
    "x86-64-v3": "-march=x86-64-v3",  # 8 lanes, as all of the following
    "znver2": "-march=x86-64-v3 -mtune=znver2",
    "znver3": "-march=x86-64-v3 -mtune=znver3",
    "znver4": "-march=x86-64-v3 -mtune=znver4",
    "x86-64-v4": "-march=x86-64-v4",  # 16 lanes
}
UNKNOWN = ("bad value", "unknown target CPU")  # what GCC and clang say of a processor
CACHE = Path(__file__).resolve().parents[2] / ".cache"  # each build takes seconds


@contextlib.contextmanager
def built_for(name: str):
    """Has calls go to the kernels that are built for one of TARGETS; skips where that cannot be."""
    if platform.machine() != "x86_64":
        pytest.skip(f"{name} is a processor of x86")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.TARGET_VARIABLE, TARGETS[name])
        patch.setenv("XDG_CACHE_HOME", str(CACHE))
        try:
            path = native.build()
        except native.NoKernelError as error:
            if not any(text in str(error) for text in UNKNOWN):
                raise
            pytest.skip(f"the compiler does not know {name}: {error}")
        if name == "x86-64-v4" and "avx512vl" not in shipped.CPUINFO.read_text().split():
            pytest.skip("this processor has no AVX-512")
        for constant, target in _registered(path).items():
            patch.setattr(native, constant, target)
        patch.setattr(native, "load", lambda: None)
        yield


@functools.cache
def _registered(path: Path) -> dict[str, str]:
    """Registers a library's kernels with XLA under names of their own."""
    library = ctypes.CDLL(str(path))
    library.specjax_wake_for(ctypes.c_int64(0))
    names = {}
    for constant in ("PANELS", "ATTENTION", "LAYERS", "COMMIT"):
        symbol = f"specjax_{constant.lower()}"
        names[constant] = f"{symbol}_{path.stem}"
        handler = jax.ffi.pycapsule(getattr(library, symbol))
        jax.ffi.register_ffi_target(names[constant], handler, platform="cpu")
    return names
