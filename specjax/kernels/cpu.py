"""The kernels for CPUs: `cpu_layers.cc` runs whole layers, `cpu_panels.cc` multiplies by weights,
`cpu_attention.cc` attends, `cpu_commit.cc` writes keys and values to their pages.

They are built with the machine's C++ compiler when they are first needed, and handed to XLA. As
compilers of other frameworks do for CPUs, this compiles for the very processor it runs on and keeps
the result in the user's cache, under a name made of all that goes into it.

All compute a row in one order, whatever stands beside it: in a batch of any size, in a tree of any
shape, as a draft that is verified or as the next token of plain decoding it gets the same bits from
them. XLA, which computes what lies between, does not promise as much.
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
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from specjax.config import ModelConfig

if TYPE_CHECKING:
    from specjax.cache import Table

SOURCE = Path(__file__).with_name("cpu.cc")  # includes the others
READ = tuple(sorted(path for path in SOURCE.parent.glob("cpu*") if path.suffix in (".cc", ".h")))
# As XLA and the sources know them.
PANELS, ATTENTION, LAYERS = "specjax_panels", "specjax_attention", "specjax_layers"
COMMIT = "specjax_commit"
WIDTH = 16  # `kWidth` of `cpu.h`: columns of a panel; heads are multiples of it
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-w", "-ffp-contract=off")
# The first set of flags that the compiler takes; clang on ARM knows `-mcpu` alone. For no processor
# in particular the kernels would be slower than XLA, which knows which one it is.
NATIVE = (("-march=native",), ("-mcpu=native",))
# XLA's flag: of several devices, simulated with a thread each, none takes another's.
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
SECONDS = 300  # that compiling may take
_LOCK = threading.Lock()


class NoKernelError(RuntimeError):
    """There is no kernel for this machine, and why."""


def no_kernel(cfg: ModelConfig, devices: int) -> str | None:
    """Why a model that decodes on so many devices does without, or None."""
    if devices > 1:
        return f"they run on one device, and the mesh has {devices}"
    if cfg.compute_dtype != "float32":
        return f"they compute in float32, and decoding in {cfg.compute_dtype}"
    return None


def load() -> None:
    """Registers the kernels with XLA, after building them where that was not done yet.

    Raises:
      NoKernelError: there is no compiler, none of them made it, or what they made cannot be loaded.
    """
    with _LOCK:
        reason = _try_to_load()
    if reason is not None:
        raise NoKernelError(reason)


@functools.cache
def _try_to_load() -> str | None:
    """Why there are no kernels, or None: a failure is as dear to find out as a success."""
    try:
        path = _built()
    except NoKernelError as error:
        return str(error)
    try:
        library = ctypes.CDLL(str(path))
        for name in (PANELS, ATTENTION, LAYERS, COMMIT):
            handler = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
        if ONE_THREAD in os.environ.get("XLA_FLAGS", "").split():
            library.specjax_use_one_thread()
    except (OSError, AttributeError) as error:
        return f"{path} cannot be loaded ({error}); delete it"
    return None


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


def runs_layers(cfg: ModelConfig) -> bool:
    """Whether decoding runs its layers by `layers`, every width being a multiple of 16."""
    widths = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    kernels = cfg.products == "panels" and cfg.attention == "cpu"
    return kernels and not any(width % WIDTH for width in widths)


def layers(
    cfg: ModelConfig,
    weights: Sequence[Mapping[str, Array]],
    x: Float[Array, "B T D"],
    cos: Float[Array, "B T H"],
    sin: Float[Array, "B T H"],
    pages: Sequence[tuple[Array, Array]],
    prefix_len: Int[Array, " B"],
    visible_bits: UInt32[Array, "*B T W"],
    before: Sequence[tuple[Array, Array]] | None = None,
    table: Table = None,
) -> tuple[Float[Array, "B T D"], list[tuple[Array, Array]]]:
    """Decoder layers over T tree rows, as `Block` has them one by one.

    Args:
      weights: of each layer, by the names of a fused `Block`, its projections in panels.
      cos, sin: see `rope_tables`.
      pages: keys and values of each layer's cache, [P K S H].
      visible_bits: numbers the rows `before` first, then the T rows themselves.
      before: keys and values of earlier tree rows, [B K held H] of each layer.
      table: the pages of each sequence; None: slot b has page b.

    Returns:
      states behind the last layer, and each layer's keys and values of the T rows [B K T H].

    Raises:
      TypeError: an array is not float32.
    """
    names = ["input_norm", "qkv_proj", "qkv_bias", "qk_norm", "o", "post_norm", "gate_up", "down"]
    names = [name for name in names if name in weights[0]]
    arrays = []
    for i, of in enumerate(weights):
        arrays += [*pages[i], *(before[i] if before else ()), *(of[name] for name in names)]
    if any(a.dtype != jnp.float32 for a in (x, *arrays)):
        raise TypeError(f"layers run in float32, got {sorted({str(a.dtype) for a in arrays})}")
    bits = jnp.asarray(visible_bits)
    bits = bits if bits.ndim == 3 else bits[None]
    if table is None:
        table = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    rows = jax.ShapeDtypeStruct(
        (x.shape[0], cfg.num_kv_heads, x.shape[1], cfg.head_dim), jnp.float32
    )
    load()
    call = jax.ffi.ffi_call(
        LAYERS, [jax.ShapeDtypeStruct(x.shape, x.dtype), *[rows] * (2 * len(weights))]
    )
    out, *kv = call(
        x, cos, sin, prefix_len, bits, table, *arrays,
        layers=np.int64(len(weights)),
        heads=np.int64(cfg.num_heads),
        kv_heads=np.int64(cfg.num_kv_heads),
        hidden=np.int64(cfg.intermediate_size),
        pages=np.int64(pages[0][0].shape[0]),
        size=np.int64(pages[0][0].shape[2]),
        before=np.int64(before[0][0].shape[2] if before else 0),
        eps=np.float32(cfg.rms_norm_eps),
        bias="qkv_bias" in names,
        qk_norm="qk_norm" in names,
    )  # fmt: skip
    return out, list(zip(kv[::2], kv[1::2], strict=True))


def commit(
    arrays: Sequence[Float[Array, "P K S H"]],
    rows: Sequence[Float[Array, "B K R H"]],
    start: Int[Array, " B"],
    table: Table = None,
) -> list[Array]:
    """See `specjax.cache.commit_rows`; what has no place in the tables is not written."""
    if table is None:
        table = jnp.arange(start.shape[0], dtype=jnp.int32)[:, None]
    load()
    call = jax.ffi.ffi_call(
        COMMIT,
        [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
        input_output_aliases={2 + i: i for i in range(len(arrays))},
    )
    return call(start, table, *arrays, *rows)


# --- building --------------------------------------------------------------------------------


def _built() -> Path:
    """The library, by the first compiler that can make it."""
    reasons = []
    for compiler in _compilers():
        try:
            folder, name = _cache(), f"specjax-{_fingerprint(compiler)}.so"
            if not (folder / name).exists():
                _compile(compiler, folder / name)
            return folder / name
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(f"{compiler}: {error}")
        except NoKernelError as error:
            reasons.append(str(error))
    raise NoKernelError("; ".join(reasons))


def _compilers() -> list[str]:
    asked = os.environ.get("CXX")
    candidates = (asked,) if asked else COMPILERS
    found = [path for path in map(shutil.which, candidates) if path]
    if not found:
        looked = f"CXX={asked}" if asked else ", ".join(COMPILERS)
        raise NoKernelError(f"no C++ compiler ({looked}); install one, or name it in CXX")
    return list(dict.fromkeys(found))


def _cache() -> Path:
    """The user's cache; where that cannot be written, a folder that this process alone uses."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specjax"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # nobody's home
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
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=SECONDS
    ).stdout
    texts = [path.read_text() for path in READ]
    flags = str((FLAGS, NATIVE))
    parts = "\n".join([*texts, flags, version, jaxlib.__version__, processor])
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    """Into place at once: processes that start side by side find all of it or nothing."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [
            compiler, *FLAGS, "-o", str(made),
            f"-I{jax.ffi.include_dir()}", str(SOURCE),
        ]  # fmt: skip
        for flags in NATIVE:
            done = subprocess.run(
                [*command, *flags], capture_output=True, text=True, timeout=SECONDS
            )
            if done.returncode == 0:
                os.replace(made, path)
                return
    errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr.strip()]
    raise NoKernelError(f"{compiler} failed: {errors[0]}")
