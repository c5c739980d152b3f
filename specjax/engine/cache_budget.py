"""The memory that caches take by default: a share of what the devices have."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import jax

from specjax.config import ModelConfig
from specjax.interfaces import Draft, Room
from specjax.memory import bytes_of, cost, empty
from specjax.models.transformer import init_params
from specjax.parallel.sharding import device_bytes, shapes, state_shardings

DEVICE_SHARE = 0.9  # of an accelerator's memory, for weights and caches; vLLM's default
# Of a computer's memory, which other programs use, and in which weights are read and converted.
HOST_SHARE = 1 / 16
PAGE = 128  # positions


def cache_budget(
    cfg: ModelConfig, source: Draft | None, mesh: jax.sharding.Mesh | None
) -> int | None:
    """Computes the most bytes that the caches of an `LLM`'s replica take where no setting says it.

    The budget depends on the machine and the model alone, so that every start compiles the same
    programs.

    Returns:
      bytes over all devices of the replica; None: not known (the devices of several processes, or
      those that a program is only compiled for).
    """
    devices = [jax.local_devices()[0]] if mesh is None else list(mesh.devices.flat)
    if {device.process_index for device in devices} != {jax.process_index()}:
        return None
    if devices[0].platform == "cpu":
        on_one = int(host_memory() * HOST_SHARE) // jax.local_device_count()
    else:
        limits = [memory_limit(device) for device in devices]
        if None in limits:
            return None
        models = [cfg, source.network] if source and source.network else [cfg]
        weights = sum(bytes_of(jax.eval_shape(lambda m=m: init_params(m))) for m in models)
        # `LLM` keeps the weights beside those in the layout in which the engine decodes.
        on_one = max(int(min(limits) * DEVICE_SHARE) - 2 * weights // len(devices), 0)
    page = jax.eval_shape(lambda: empty(cfg, Room(slots=0, pages=1, page_size=PAGE)).pages)
    # Heads that the devices cannot divide among themselves lie on each of them.
    ways = bytes_of(page) / max(device_bytes(shapes(page, mesh, state_shardings)), 1)
    return int(on_one * ways)


def memory_limit(device: jax.Device) -> int | None:
    """Returns the bytes of an accelerator that a process may use; None: not known."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return None  # programs are only compiled for this device


# Limits of the control group of a container, in both versions of control groups.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> int:
    """Returns the bytes of memory of this computer, or of the container that it runs in."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is no such file, or no limit
            sizes.append(int(Path(file).read_text()))
    return min(sizes)


def longest_that_fits(cfg: ModelConfig, source: Draft | None, budget: int) -> int:
    """Returns the most tokens of a sample whose caches, the draft's too, fit into the budget."""
    page = cost(cfg, PAGE).page + (source.cost(PAGE).page if source else 0)
    # Further pages: the null page, copies of a prompt's last page, and those past the last token.
    return max(budget // max(page, 1) - 4, 0) * PAGE
