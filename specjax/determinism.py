"""Equal bits from every process that runs a program on a GPU: the setting `deterministic=true`.

On a GPU two runs of one program may differ for two reasons. Some operations add in the order in
which threads arrive: scatter-adds, as in the gradient of the embedding, and the backward pass of
cuDNN's attention. And XLA measures several algorithms for a product when it compiles it, and takes
the fastest, so that two processes may take different ones.

`set_up` sets XLA's flags against both. XLA then adds duplicates in sorted order, leaves algorithms
out that add by atomics, and keeps what it has chosen in a directory, the *autotune cache*. A later
process that has the directory chooses the same. All processes of a job must share it, as they share
the run's directory. On CPUs and TPUs nothing is to be done: their compilers measure nothing.

A resumed run must also take the same kernels. specjax chooses them by the device, and passes over
one whose values are wrong there, so that `record` has their names. Two choices are not among them,
since neither changes a bit: CUDA graphs launch the same kernels, and the kernel that writes keys
and values only moves them.

Flags are read when jax starts its backends, once per process.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib

NO_ATOMICS = "--xla_gpu_exclude_nondeterministic_ops"
NO_AUTOTUNING = "--xla_gpu_deterministic_ops"  # implies the flag above
CACHE = "--xla_gpu_per_fusion_autotune_cache_dir"
FOLDER = "autotune"
GPUS = ("gpu", "cuda", "rocm")  # platforms, as JAX_PLATFORMS names them
# Where jax has a compilation cache, it sets `CACHE` for every program, unless this says otherwise.
_XLA_CACHES = "jax_persistent_cache_enable_xla_caches"

_cache: Path | None = None  # the autotune cache of this process, after `set_up`


def set_up(directory: Path) -> None:
    """Makes the GPU programs of this process deterministic; a later call changes nothing.

    Nor does any call change anything where jax was told to use platforms without GPUs
    (JAX_PLATFORMS), or found none.

    Flags that the user has set in XLA_FLAGS stay: another autotune cache, or the flag
    `--xla_gpu_deterministic_ops=true`, with which XLA measures nothing and takes its default
    algorithms.

    Args:
      directory: directory that gets a folder with the autotune cache. Where jax has a compilation
        cache, the folder lies in that one's directory instead: compiled programs have their
        algorithms in them, and both caches must be kept together.

    Raises:
      ValueError: it is too late, or the user's XLA_FLAGS contradict the setting.
    """
    global _cache
    if _cache is not None or not may_have_gpus():
        return
    flags = dict(word.partition("=")[::2] for word in os.environ.get("XLA_FLAGS", "").split())
    for name in (NO_ATOMICS, NO_AUTOTUNING):
        if flags.get(name, "true") not in ("true", "1", ""):
            raise ValueError(
                f"deterministic=true cannot be kept: XLA_FLAGS has {name}={flags[name]}; remove it"
            )
    kept = jax.config.jax_compilation_cache_dir
    cache = Path(flags.get(CACHE) or (Path(kept or directory) / FOLDER / jaxlib.__version__))
    wanted = {CACHE: str(cache.absolute())} if CACHE not in flags else {}
    if NO_ATOMICS not in flags and NO_AUTOTUNING not in flags:
        wanted[NO_ATOMICS] = "true"
    missing = " ".join(f"{name}={value}" for name, value in wanted.items())
    if missing and backends_run():
        if platform() != "gpu":
            return
        raise ValueError(
            "deterministic=true comes too late: jax read its flags when it started its backends; "
            "ask for it before the first computation, or start Python with "
            f"XLA_FLAGS={missing!r}"
        )
    cache.mkdir(parents=True, exist_ok=True)
    if missing:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {missing}".strip()
    jax.config.update(_XLA_CACHES, "none")
    _cache = cache


def may_have_gpus() -> bool:
    """Whether jax may find GPUs: it was not told to use other platforms alone."""
    named = (jax.config.jax_platforms or "").split(",")
    return named == [""] or any(name in GPUS for name in named)


def is_set_up() -> bool:
    """Whether `set_up` has set the flags of this process, or found them set."""
    return _cache is not None


def backends_run() -> bool:
    """Whether jax has started its backends: it then refuses another number of CPU devices."""
    count = jax.config.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", max(count, 0) + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


def platform() -> str:
    """The platform of the default device; starts the backends."""
    return jax.devices()[0].platform


def line() -> str:
    """What the setting does in this process, for the user."""
    if platform() != "gpu":
        return (
            f"deterministic=true changes nothing on {platform().upper()}: programs there give the "
            "same bits whenever they run"
        )
    return f"deterministic: algorithms of products are kept in {_cache}, {len(_files())} so far"


def without() -> str | None:
    """The warning of a resumed run that does not have the setting; None if there is none."""
    if platform() != "gpu":
        return None
    return (
        "on a GPU XLA chooses algorithms by measuring them, so that the last bits of a resumed run "
        "may differ from those of a run that was never stopped. Runs with deterministic=true keep "
        "what was chosen"
    )


def record(kernels: Mapping[str, str]) -> dict[str, Any] | None:
    """What a later process must have to give the same bits, as JSON.

    Its entries are the flags, the device's kind, the version of jaxlib, the kernels, and a digest
    of each file of the autotune cache by its name. It is None without `set_up`, and where the
    devices are no GPUs.

    Args:
      kernels: names of the kernels that run, by what they do.
    """
    if _cache is None or platform() != "gpu":
        return None
    flags = os.environ.get("XLA_FLAGS", "").split()
    return {
        "flags": sorted(flag for flag in flags if "_gpu_" in flag and not flag.startswith(CACHE)),
        "device": jax.devices()[0].device_kind,
        "jaxlib": jaxlib.__version__,
        "kernels": dict(kernels),
        "autotune": _files(),
    }


def _files() -> dict[str, str]:
    files = sorted(path for path in _cache.rglob("*") if path.is_file())
    return {
        path.relative_to(_cache).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in files
    }


def difference(saved: Mapping[str, Any] | None, kernels: Mapping[str, str]) -> str | None:
    """Why this process may give other bits than the one that made a record; None if it may not.

    The autotune cache may have grown.

    Args:
      saved: what `record` returned there.
      kernels: as in `record`.
    """
    now = record(kernels)
    if saved is None or now is None:
        return None
    for name in ("flags", "device", "jaxlib"):
        if saved[name] != now[name]:
            what = "XLA's flags" if name == "flags" else f"the {name}"
            return f"{what} was {_text(saved[name])} and is {_text(now[name])}"
    for name, before in saved["kernels"].items():
        if before != (after := now["kernels"].get(name)):
            return f"{name} was by {before!r} and is by {after!r}"
    before, after = saved["autotune"], now["autotune"]
    changed = [name for name, digest in before.items() if after.get(name) != digest]
    if changed:
        return (
            f"of the autotune cache's {len(before)} files {len(changed)} are missing or changed in "
            f"{_cache} ({changed[0]}); put them back"
        )
    return None


def _text(value: Any) -> str:
    return repr(" ".join(value) if isinstance(value, list) else value)
