"""The tiny models of the engine's tests serve here, too."""

import ctypes
import platform
import sys
from pathlib import Path

import jax
import pytest

from specjax.kernels import cpu

sys.path.append(str(Path(__file__).resolve().parent.parent / "engine"))


@pytest.fixture(scope="session", autouse=True)
def small_calls_have_threads():
    """What these tests compute is too little to wake threads for, and they are to try them."""
    try:
        cpu.load()
    except cpu.NoKernelError:
        return
    ctypes.CDLL(str(cpu._built())).specjax_wake_for(ctypes.c_int64(0))


@pytest.fixture(scope="session")
def built_narrower(tmp_path_factory):
    """Where these builds are kept: each takes seconds."""
    return tmp_path_factory.mktemp("narrower")


@pytest.fixture(params=["x86-64", "x86-64-v3"])
def narrower(request, monkeypatch, built_narrower):
    """The kernels for CPUs as a processor with registers of 16 or 32 bytes has them."""
    processor = request.param
    if platform.machine() != "x86_64":
        pytest.skip("names processors of x86")
    if processor == "x86-64-v3" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    monkeypatch.setattr(cpu, "NATIVE", ((f"-march={processor}",),))
    monkeypatch.setenv("XDG_CACHE_HOME", str(built_narrower))
    library = ctypes.CDLL(str(cpu._built()))
    library.specjax_wake_for(ctypes.c_int64(0))
    for constant in ("PANELS", "ATTENTION", "LAYERS", "COMMIT"):
        target = getattr(cpu, constant)
        handler = jax.ffi.pycapsule(getattr(library, target))
        jax.ffi.register_ffi_target(f"{target}_{processor}", handler, platform="cpu")
        monkeypatch.setattr(cpu, constant, f"{target}_{processor}")
    monkeypatch.setattr(cpu, "load", lambda: None)
