"""Builds the kernels for CPUs with the machine's C++ compiler, and hands them to XLA.

As compilers of other frameworks do for CPUs, this compiles for the very processor it runs on when
the kernels are first needed, and keeps the result in the user's cache, under a name made of all
that goes into it. Two variables of the environment say otherwise:

    SPECJAX_CPU_TARGET    flags that name the processor, "-march=x86-64-v3 -mtune=znver3" say, in
                          place of -march=native: what one machine builds, another finds and runs
    SPECJAX_CPU_FLAGS     further flags of the compiler; those that change arithmetic are refused
                          or overruled
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import jax
import jaxlib

SOURCE = Path(__file__).with_name("library.cc")  # includes the others
READ = tuple(sorted(path for path in SOURCE.parent.iterdir() if path.suffix in (".cc", ".h")))
# As XLA and the sources know them.
PANELS, ATTENTION, LAYERS = "specjax_panels", "specjax_attention", "specjax_layers"
COMMIT = "specjax_commit"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-w")
# The last on the command line: `common.h` says what is fused, and in which order sums run.
EXACT = (
    "-fno-unsafe-math-optimizations", "-fno-associative-math", "-fno-reciprocal-math",
    "-ffp-contract=off",
)  # fmt: skip
# The first set of flags that the compiler takes; clang on ARM knows `-mcpu` alone. For no processor
# in particular the kernels would be slower than XLA, which knows which one it is.
NATIVE = (("-march=native",), ("-mcpu=native",))
TARGET_VARIABLE, FLAGS_VARIABLE = "SPECJAX_CPU_TARGET", "SPECJAX_CPU_FLAGS"
CPUINFO = Path("/proc/cpuinfo")
# XLA's flag: of several devices, simulated with a thread each, none takes another's.
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
SECONDS = 300  # that compiling may take
_LOCK = threading.Lock()


class NoKernelError(RuntimeError):
    """There is no kernel for this machine, and why."""


def load() -> None:
    """Registers the kernels with XLA, after building them where that was not done yet.

    Raises:
      NoKernelError: there is no compiler, none of them made it, or what they made cannot be loaded
        or is for another processor.
    """
    with _LOCK:
        reason = _try_to_load()
    if reason is not None:
        raise NoKernelError(reason)


@functools.cache
def _try_to_load() -> str | None:
    """Why there are no kernels, or None. Kept, because a failure takes as long as a success."""
    try:
        path = build()
    except NoKernelError as error:
        return str(error)
    try:
        library = ctypes.CDLL(str(path))
        if lacking := _lacking(library):
            return (
                f"this processor lacks {', '.join(lacking)}, which {_asked(TARGET_VARIABLE)} has; "
                "name a target that the processor can run, or unset the variable"
            )
        for name in (PANELS, ATTENTION, LAYERS, COMMIT):
            handler = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
        if ONE_THREAD in os.environ.get("XLA_FLAGS", "").split():
            library.specjax_use_one_thread()
    except (OSError, AttributeError, ValueError) as error:
        return f"{path} cannot be loaded ({error}); delete it"
    return None


def _lacking(library: ctypes.CDLL) -> list[str]:
    """Instructions that a library may contain and this processor does not have.

    None where the system does not tell what it has, or where the compiler asked the processor.
    """
    has = _features().split()
    asked_here = any((flag,) in NATIVE for flags in _targets() for flag in flags)
    if asked_here or not has:
        return []
    first = ctypes.c_char.in_dll(library, "specjax_instructions")
    pairs = [word.split("=") for word in ctypes.string_at(ctypes.addressof(first)).decode().split()]
    # A macro that the compiler does not define is left as it is.
    return [name for name, value in pairs if not value.startswith("__") and name not in has]


def build() -> Path:
    """Builds the library where it is not kept yet, by the first compiler that can make it.

    Nothing of it is run: a machine may build for another, whose processor is named by
    SPECJAX_CPU_TARGET. Where there is no compiler at all, what another machine kept in a cache that
    both see will do: every compiler's library computes the same.

    Returns:
      where the library is.

    Raises:
      NoKernelError: there is no compiler, none of them made it, or a variable holds no flags.
    """
    targets, cache = _targets(), _cache()
    key = _key(targets)
    try:
        compilers = _compilers()
    except NoKernelError:
        kept = sorted(cache.glob(f"specjax-{key}-*.so")) if cache else []
        if kept and not os.environ.get("CXX"):
            return kept[0]
        raise
    reasons = []
    for compiler in compilers:
        try:
            name = f"specjax-{key}-{_digest(_version(compiler))}.so"
            if cache and os.path.exists(cache / name):  # no error where it may not be looked into
                return cache / name
            path = _writable(cache) / name
            _compile(compiler, targets, path)
            return path
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(f"{compiler}: {error}")
        except NoKernelError as error:
            reasons.append(str(error))
    raise NoKernelError("; ".join(reasons))


def _words(variable: str) -> tuple[str, ...]:
    """The flags that a variable of the environment holds; none where it is unset or empty."""
    try:
        words = tuple(shlex.split(os.environ.get(variable, "")))
    except ValueError:  # a quotation without an end
        words = ("",)
    if any(not word.startswith("-") for word in words):
        example = "-march=x86-64-v3 -mtune=znver3" if variable == TARGET_VARIABLE else "-g"
        raise NoKernelError(
            f"expected flags of a C++ compiler, such as {variable}={example!r}, got "
            f"{_asked(variable)}; correct or unset it"
        )
    return words


def _asked(variable: str) -> str:
    return f"{variable}={os.environ.get(variable, '')!r}"


def _targets() -> tuple[tuple[str, ...], ...]:
    """Sets of flags, of which the first that the compiler takes decides for whom it compiles."""
    target, others = _words(TARGET_VARIABLE), _words(FLAGS_VARIABLE)
    return tuple((*flags, *others) for flags in ((target,) if target else NATIVE))


def _compilers() -> list[str]:
    asked = os.environ.get("CXX")
    candidates = (asked,) if asked else COMPILERS
    found = [path for path in map(shutil.which, candidates) if path]
    if not found:
        looked = f"CXX={asked}" if asked else ", ".join(COMPILERS)
        raise NoKernelError(f"no C++ compiler ({looked}); install one, or name it in CXX")
    return list(dict.fromkeys(found))


def _cache() -> Path | None:
    """Where the user's libraries are kept, whether the folder exists or not."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specjax"
    except RuntimeError:  # no home directory is known
        return None


def _writable(cache: Path | None) -> Path:
    """The user's cache; where that cannot be written, a folder that this process alone uses."""
    try:
        if cache:
            cache.mkdir(parents=True, exist_ok=True)
            if os.access(cache, os.W_OK):
                return cache
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="specjax-"))


def _key(targets: Sequence[Sequence[str]]) -> str:
    """A digest of all that decides what is built, but the compiler.

    The processor is part of it where the compiler looks at it, for homes are shared by machines of
    different processors, and is not where flags name another.
    """
    parts = [*(path.read_text() for path in READ), str((FLAGS, targets, EXACT))]
    parts += [jaxlib.__version__, platform.machine()]
    if any("native" in flag for flags in targets for flag in flags):
        parts += [platform.processor(), _features()]
    return _digest("\n".join(parts))


def _features() -> str:
    """Names of what the processor can do; none where the system does not tell."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:  # not Linux
        return ""
    of_one = (line for line in lines if line.startswith(("flags", "Features")))
    return next(of_one, "").partition(":")[2]


def _version(compiler: str) -> str:
    command = [compiler, "--version"]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS).stdout


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _compile(compiler: str, targets: Sequence[Sequence[str]], path: Path) -> None:
    """Into place at once: processes that start side by side find all of it or nothing."""
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
    asked = [_asked(name) for name in (TARGET_VARIABLE, FLAGS_VARIABLE) if os.environ.get(name)]
    told = f" with {' and '.join(asked)}, to be corrected or unset" if asked else ""
    raise NoKernelError(f"{compiler} failed{told}: {errors[0]}")
