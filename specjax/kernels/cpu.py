"""The kernels for CPUs: `cpu_layers.cc` runs whole layers, `cpu_panels.cc` multiplies by weights,
`cpu_attention.cc` attends, `cpu_commit.cc` writes keys and values to their pages.

They are built with the machine's C++ compiler when they are first needed, and handed to XLA. As
compilers of other frameworks do for CPUs, this compiles for the very processor it runs on and keeps
the result in the user's cache, under a name made of all that goes into it. Two variables of the
environment say otherwise:

    SPECJAX_CPU_TARGET    flags that name the processor, "-march=x86-64-v3 -mtune=znver3" say, in
                          place of -march=native: what one machine builds, another finds and runs
    SPECJAX_CPU_FLAGS     further flags of the compiler; those that change arithmetic are refused
                          or overruled

All compute a row in one order, whatever stands beside it: in a batch of any size, in a tree of any
shape, as a draft that is verified or as the next token of plain decoding it gets the same bits from
them. XLA, which computes what lies between, does not promise as much. The bits depend neither on
the compiler nor on its tuning, only on the width of the target's vectors and on whether it has
fused multiply-add (`cpu.h`).
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
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from specjax.config import ModelConfig
from specjax.interfaces import Table

SOURCE = Path(__file__).with_name("cpu.cc")  # includes the others
READ = tuple(sorted(path for path in SOURCE.parent.glob("cpu*") if path.suffix in (".cc", ".h")))
# As XLA and the sources know them.
PANELS, ATTENTION, LAYERS = "specjax_panels", "specjax_attention", "specjax_layers"
COMMIT = "specjax_commit"
WIDTH = 16  # `kWidth` of `cpu.h`: columns of a panel; heads are multiples of it
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-w")
# The last on the command line: `cpu.h` says what is fused, and in which order sums run.
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


def no_kernel(cfg: ModelConfig, devices: int) -> str | None:
    """Why a model that decodes on so many devices does without, or None."""
    if devices > 1:
        return f"they run on one device, and the mesh has {devices}"
    if cfg.run.compute_dtype != "float32":
        return f"they compute in float32, and decoding in {cfg.run.compute_dtype}"
    return None


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
    """Why there are no kernels, or None: a failure is as dear to find out as a success."""
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
    """Whether decoding runs its layers by `layers`: they are alike, of attention over all positions
    and a dense mlp, and every width is a multiple of 16."""
    if cfg.run.products != "panels" or cfg.run.attention != "cpu" or len(set(cfg.layers)) != 1:
        return False
    mixer, mlp = cfg.layers[0].mixer, cfg.layers[0].mlp
    if (mixer.kind, mlp.kind) != ("attention", "dense") or mixer.window is not None:
        return False
    widths = cfg.hidden_size, mlp.intermediate_size, mixer.head_dim
    return not any(width % WIDTH for width in widths)


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
    mixer, mlp = cfg.layers[0].mixer, cfg.layers[0].mlp
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
        (x.shape[0], mixer.num_kv_heads, x.shape[1], mixer.head_dim), jnp.float32
    )
    load()
    call = jax.ffi.ffi_call(
        LAYERS, [jax.ShapeDtypeStruct(x.shape, x.dtype), *[rows] * (2 * len(weights))]
    )
    out, *kv = call(
        x, cos, sin, prefix_len, bits, table, *arrays,
        layers=np.int64(len(weights)),
        heads=np.int64(mixer.num_heads),
        kv_heads=np.int64(mixer.num_kv_heads),
        hidden=np.int64(mlp.intermediate_size),
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
    """See `specjax.kernels.commit`; all in float32, and what has no page is not written."""
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
    """Of all that decides what is built, but the compiler.

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
