"""Builds `cpu.cc` with the machine's C++ compiler, once per machine, and hands it to XLA.

As compilers of other frameworks do for CPUs, it compiles for the very processor it runs on and
keeps the result in the user's cache, under a name made of all that goes into it.
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
from pathlib import Path

import jax

SOURCE = Path(__file__).with_name("cpu.cc")
TARGET = "specjax_panels"
COMPILERS = ("c++", "g++", "clang++")
# The first set of flags that the compiler takes; clang on ARM knows `-mcpu` alone.
NATIVE = (("-march=native",), ("-mcpu=native",), ())
SECONDS = 300  # that compiling may take


class NoKernelError(RuntimeError):
    """There is no kernel for this machine, and why."""


@functools.cache
def load() -> str:
    """Registers the kernel with XLA, after building it where that was not done yet.

    Returns:
      the name to call it by.

    Raises:
      NoKernelError: there is no compiler, it failed, or what it made cannot be loaded.
    """
    path = _built()
    try:
        handler = getattr(ctypes.CDLL(str(path)), TARGET)
    except (OSError, AttributeError) as error:
        raise NoKernelError(f"{path} cannot be loaded ({error}); delete it") from error
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler), platform="cpu")
    return TARGET


def _built() -> Path:
    compiler = _compiler()
    name = f"{TARGET}-{_fingerprint(compiler)}.so"
    try:
        folder = _cache()
        if not (folder / name).exists():
            _compile(compiler, folder / name)
    except OSError as error:
        raise NoKernelError(f"no place to build it: {error}") from error
    return folder / name


def _compiler() -> str:
    asked = os.environ.get("CXX")
    for candidate in (asked,) if asked else COMPILERS:
        if found := shutil.which(candidate):
            return found
    looked = f"CXX={asked}" if asked else ", ".join(COMPILERS)
    raise NoKernelError(f"no C++ compiler ({looked}); install one, or name it in CXX")


def _cache() -> Path:
    """The user's cache; where that cannot be written, a folder that this process alone uses."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specjax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="specjax-"))


def _fingerprint(compiler: str) -> str:
    """Of all that decides what is built: homes are shared by machines of different processors."""
    processor = platform.machine() + platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass  # not Linux: the names above must do
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    parts = SOURCE.read_text(), version, jax.lib.__version__, processor
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    """Into place at once: processes that start side by side find all of it or nothing."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [
            compiler, "-std=c++17", "-O3", "-fPIC", "-shared", "-w", "-o", str(made), str(SOURCE),
            f"-I{jax.ffi.include_dir()}",
        ]  # fmt: skip
        for flags in NATIVE:
            try:
                done = subprocess.run(
                    [*command, *flags], capture_output=True, text=True, timeout=SECONDS
                )
            except subprocess.TimeoutExpired as error:
                raise NoKernelError(f"{compiler} took more than {SECONDS} s") from error
            if done.returncode == 0:
                os.replace(made, path)
                return
    errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr.strip()]
    raise NoKernelError(f"{compiler} failed on {SOURCE.name}: {errors[0]}")
