"""The memory that caches take by default: a share of what the devices have."""

from __future__ import annotations

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


def cache_budget(cfg: ModelConfig, mesh: jax.sharding.Mesh | None) -> int | None:
    """The most bytes that all caches of a replica take where no setting says it.

    It depends on the machine and the model alone, so that every start compiles the same programs.

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
        weights = bytes_of(jax.eval_shape(lambda: init_params(cfg))) // len(devices)
        on_one = max(int(min(limits) * DEVICE_SHARE) - weights, 0)
    page = jax.eval_shape(lambda: empty(cfg, Room(slots=0, pages=1, page_size=PAGE)).pages)
    # Heads that the devices cannot divide among themselves lie on each of them.
    ways = bytes_of(page) / max(device_bytes(shapes(page, mesh, state_shardings)), 1)
    return int(on_one * ways)


def memory_limit(device: jax.Device) -> int | None:
    """The bytes of an accelerator that a process may use; None: not known."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:  # a device that programs are only compiled for
        return None


def host_memory() -> int:
    """The bytes of memory of this computer, or of the container that it runs in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # there is no control group, or it has no limit
        return total


def longest_that_fits(cfg: ModelConfig, source: Draft | None, budget: int) -> int:
    """The most tokens of a sample whose caches, the draft's included, fit into `budget` bytes."""
    page = cost(cfg, PAGE).page + (source.cost(PAGE).page if source else 0)
    # Further pages: the null page, copies of a prompt's last page, and those past the last token.
    return max(budget // max(page, 1) - 4, 0) * PAGE
