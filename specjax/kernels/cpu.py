"""The kernels for CPUs: `cpu_panels.cc` multiplies by weights, `cpu_attention.cc` attends.

They are built with the machine's C++ compiler when they are first needed, and handed to XLA. As
compilers of other frameworks do for CPUs, this compiles for the very processor it runs on and keeps
the result in the user's cache, under a name made of all that goes into it.

Both compute a row in one order, whatever stands beside it: in a batch of any size, in a tree of any
shape, as a draft that is verified or as the next token of plain decoding it gets the same bits.
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
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from specjax.cache import Table
from specjax.config import ModelConfig

SOURCES = tuple(Path(__file__).with_name(f"cpu_{name}.cc") for name in ("panels", "attention"))
HEADER = Path(__file__).with_name("cpu.h")
PANELS, ATTENTION = "specjax_panels", "specjax_attention"  # as XLA and the sources know them
WIDTH = 16  # of a vector, see `cpu.h`
COMPILERS = ("c++", "g++", "clang++")
# The first set of flags that the compiler takes; clang on ARM knows `-mcpu` alone.
NATIVE = (("-march=native",), ("-mcpu=native",), ())
SECONDS = 300  # that compiling may take


class NoKernelError(RuntimeError):
    """There is no kernel for this machine, and why."""


def no_kernel(cfg: ModelConfig, devices: int) -> str | None:
    """Why a model that decodes on so many devices does without, or None."""
    if devices > 1:
        return f"they run on one device, and the mesh has {devices}"
    if cfg.compute_dtype != "float32":
        return f"they compute in float32, and decoding in {cfg.compute_dtype}"
    return None


@functools.cache
def load() -> None:
    """Registers the kernels with XLA, after building them where that was not done yet.

    Raises:
      NoKernelError: there is no compiler, it failed, or what it made cannot be loaded.
    """
    path = _built()
    try:
        library = ctypes.CDLL(str(path))
        for name in (PANELS, ATTENTION):
            handler = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
    except (OSError, AttributeError) as error:
        raise NoKernelError(f"{path} cannot be loaded ({error}); delete it") from error


def tree_attention(
    q: Float[Array, "B N T H"],
    k_tree: Float[Array, "B K T2 H"],
    v_tree: Float[Array, "B K T2 H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    prefix_len: Int[Array, " B"],
    visible_bits: UInt32[Array, "*B T W"],
    table: Table = None,
) -> Float[Array, "B N T H"]:
    """See `specjax.kernels.reference.tree_attention`; all in float32, H a multiple of 16.

    Raises:
      TypeError: an array is not float32.
    """
    floats = q, k_tree, v_tree, k_pages, v_pages
    if any(x.dtype != jnp.float32 for x in floats):
        raise TypeError(f"expected float32 throughout, got {[str(x.dtype) for x in floats]}")
    bits = jnp.asarray(visible_bits)
    bits = bits if bits.ndim == 3 else bits[None]
    if table is None:
        table = jnp.arange(q.shape[0], dtype=jnp.int32)[:, None]
    load()
    call = jax.ffi.ffi_call(ATTENTION, jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(*floats, prefix_len, bits, table)


# --- building --------------------------------------------------------------------------------


def _built() -> Path:
    compiler = _compiler()
    name = f"specjax-{_fingerprint(compiler)}.so"
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
    texts = [path.read_text() for path in (*SOURCES, HEADER)]
    parts = "\n".join([*texts, version, jax.lib.__version__, processor])
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    """Into place at once: processes that start side by side find all of it or nothing."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [
            compiler, "-std=c++17", "-O3", "-fPIC", "-shared", "-w", "-o", str(made),
            f"-I{jax.ffi.include_dir()}", *map(str, SOURCES),
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
    raise NoKernelError(f"{compiler} failed: {errors[0]}")
