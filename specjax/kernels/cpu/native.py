"""Builds the kernels for CPUs with the machine's C++ compiler, and registers them with XLA.

They are compiled for the processor of this machine when they are first needed, and cached in the
user's cache directory, under a hash of everything that determines the result. The environment
variable SPECJAX_CPU_TARGET has flags for the processor, such as "-march=x86-64-v3 -mtune=znver3",
in place of -march=native: other machines can then use the same library.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import jaxlib

from specjax.shipped import cache_dir, is_writable, processor_features

SOURCE = Path(__file__).with_name("library.cc")  # includes the others
READ = tuple(sorted(path for path in SOURCE.parent.iterdir() if path.suffix in (".cc", ".h")))
# Names of the handlers, as in the sources and in XLA's registry.
PANELS, ATTENTION, LAYERS = "specjax_panels", "specjax_attention", "specjax_layers"
COMMIT = "specjax_commit"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-w")
# These come last on the command line: `common.h` decides what is fused, and the order of sums.
EXACT = (
    "-fno-unsafe-math-optimizations", "-fno-associative-math", "-fno-reciprocal-math",
    "-ffp-contract=off",
)  # fmt: skip
# The first set of flags that the compiler accepts is used; clang on ARM accepts only `-mcpu`.
# There is no generic target: its kernels would be slower than XLA, which targets this processor.
NATIVE = (("-march=native",), ("-mcpu=native",))
TARGET_VARIABLE = "SPECJAX_CPU_TARGET"
# XLA's flag: with several simulated devices, each computes in its own single thread.
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
SECONDS = 300  # time limit of the compiler


class NoKernelError(RuntimeError):
    """The kernels cannot be used on this machine; the message says why."""


def load() -> None:
    """Registers the kernels with XLA; builds them first unless they are cached.

    A target (SPECJAX_CPU_TARGET) that this processor cannot run ends the process by SIGILL.

    Raises:
      NoKernelError: there is no compiler, every compiler failed, or the library cannot be loaded.
    """
    if (reason := load_soon().result()) is not None:
        raise NoKernelError(reason)


@functools.cache
def load_soon() -> Future[str | None]:
    """Begins to load the kernels on a thread; the result is why there are none, or None."""
    return ThreadPoolExecutor(1).submit(_try_to_load)


def _try_to_load() -> str | None:
    try:
        path = build()
    except NoKernelError as error:
        return str(error)
    try:
        library = ctypes.CDLL(str(path))
        for name in (PANELS, ATTENTION, LAYERS, COMMIT):
            handler = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
        if ONE_THREAD in os.environ.get("XLA_FLAGS", "").split():
            library.specjax_use_one_thread()
    except (OSError, AttributeError, ValueError) as error:
        return f"{path} cannot be loaded ({error}); delete it"
    return None


def build() -> Path:
    """Builds the library unless it is cached, by the first compiler that succeeds.

    The library is not run, so a machine may build for another processor (SPECJAX_CPU_TARGET), and
    one without a compiler uses what another one put into a shared cache: the libraries of all
    compilers compute the same.

    Returns:
      the path of the library.

    Raises:
      NoKernelError: there is no compiler, every compiler failed, or a variable's flags are invalid.
    """
    target, cache = tuple(os.environ.get(TARGET_VARIABLE, "").split()), cache_dir()
    targets = (target,) if target else NATIVE
    name = f"specjax-{_key(targets)}.so"
    if cache and os.path.exists(cache / name):  # no error without permission
        return cache / name
    compilers, reasons = _compilers(), []
    folder = cache if cache and is_writable(cache) else Path(tempfile.mkdtemp(prefix="specjax-"))
    path = folder / name
    for compiler in compilers:
        try:
            _compile(compiler, targets, path)
            return path
        except (OSError, subprocess.SubprocessError, NoKernelError) as error:
            reasons.append(f"{compiler}: {error}")
    raise NoKernelError("; ".join(reasons))


def _compilers() -> list[str]:
    asked = os.environ.get("CXX")
    candidates = (asked,) if asked else COMPILERS
    found = [path for path in map(shutil.which, candidates) if path]
    if not found:
        looked = f"CXX={asked}" if asked else ", ".join(COMPILERS)
        raise NoKernelError(f"no C++ compiler ({looked}); install one, or name it in CXX")
    return list(dict.fromkeys(found))


def _key(targets: Sequence[Sequence[str]]) -> str:
    """Returns a digest of everything that determines the library, except the compiler's version.

    The processor is part of it unless flags name a target, because machines with different
    processors may share a home directory.
    """
    parts = [*(path.read_text() for path in READ), str((FLAGS, targets, EXACT))]
    parts += [jaxlib.__version__, platform.machine(), os.environ.get("CXX", "")]
    if any("native" in flag for flags in targets for flag in flags):
        parts += [platform.processor(), processor_features()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, targets: Sequence[Sequence[str]], path: Path) -> None:
    """Compiles, and renames the result into place, so that no process sees a partial file."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [
            compiler, "-o", str(made), f"-I{jax.ffi.include_dir()}", str(SOURCE), *FLAGS,
        ]  # fmt: skip
        for flags in targets:
            done = subprocess.run(
                [*command, *flags, *EXACT], capture_output=True, text=True, timeout=SECONDS
            )
            if done.returncode == 0:
                os.replace(made, path)
                return
    errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr.strip()]
    target = os.environ.get(TARGET_VARIABLE)
    remedy = f" with {TARGET_VARIABLE}={target!r}; correct or unset it" if target else ""
    raise NoKernelError(f"failed{remedy}: {errors[0]}")
