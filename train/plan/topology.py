"""Chips to plan for: devices to compile for that need not be present."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
from collections.abc import Sequence

import jax

from specjax.chips import CARDS, CHIPS, Chip
from specjax.command_line import ConfigError
from specjax.parallel import sharding

# Slices of one host, or of several whole hosts, by the number of a topology's dimensions.
_SLICES = {2: ("2x2", "2x4", "4x4", "4x8", "8x8"), 3: ("2x2x1", "2x2x2", "2x2x4", "2x4x4")}
log = logging.getLogger(__name__)
STANDS_FOR = "v5e"  # the chip whose memory a plan made on CPU is compared with


@dataclasses.dataclass(frozen=True)
class Topology:
    """The chips that a run is planned for.

    Attributes:
      name: name of the topology.
      devices: devices, in the order of meshes.
      chip: figures of one device.
      compiler: name of the compiler; None: nothing is compiled, figures are counted from shapes.
    """

    name: str
    devices: Sequence[jax.Device]
    chip: Chip
    compiler: str | None

    def for_replica(self, tp: int) -> Sequence[jax.Device] | None:
        """Returns the devices to compile a replica's programs for; None: the first of `devices`.

        For some TPUs (v5e) the compiler does not compile for a part of a multi-host slice, so a
        replica is compiled as if its host were a slice of its own.
        """
        if self.compiler != "tpu" or tp == len(self.devices):
            return None
        for shape in _SLICES[self.name.count("x") + 1]:
            if math.prod(map(int, shape.split("x"))) >= tp:
                return _tpu_devices(f"{self.kind}:{shape}")
        return None

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def platform(self) -> str:
        """The platform of the topology, as jax names it; `devices` may be CPUs instead."""
        return "cpu" if self.kind == "cpu" else "tpu" if self.kind.startswith("v") else "gpu"


def find_topology(name: str, memory: float | None = None, count: bool = False) -> Topology:
    """Returns the topology of a name, such as `v5e:8x8`, `v5p:4x4x4`, `h200:8` or `cpu:8`.

    Args:
      name: name of the topology.
      memory: bytes of HBM that replace the chip's.
      count: whether to count from shapes, without a compiler.

    Raises:
      ConfigError: the topology is unknown, or its compiler is not installed.
    """
    kind, _, size = name.partition(":")
    if not re.fullmatch(r"\d+(x\d+)*", size) or (kind != "cpu" and kind not in CHIPS):
        raise ConfigError(
            f"--topology: expected one of {', '.join(CHIPS)} or cpu, and a size, such as v5e:8x8, "
            f"h200:8 or cpu:8; got {name!r}"
        )
    chips = math.prod(map(int, size.split("x")))
    here = CHIPS[STANDS_FOR if kind == "cpu" else kind]
    if memory is not None:
        here = dataclasses.replace(here, memory=memory)
    if kind.startswith("v") and not count:
        return Topology(name, _tpu_devices(name), here, "tpu")
    if kind in CARDS and not count and (devices := _gpu_devices(kind, chips)):
        return Topology(name, devices, here, "gpu")
    compiler = "cpu" if kind == "cpu" and not count else None
    return Topology(name, _cpu_devices(chips), here, compiler)


def _cpu_devices(count: int) -> Sequence[jax.Device]:
    sharding.offer_cpu_devices(count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ConfigError(
            f"--topology: expected {count} CPU devices to stand for chips, got {len(devices)}; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return devices[:count]


def _gpu_devices(kind: str, count: int) -> Sequence[jax.Device]:
    """Returns the GPUs of a host that need not be there; none without jax's CUDA plugin."""
    from jax.experimental import topologies

    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    where = {"topology": f"1x1x{count}", "target_config": CARDS[kind].config}
    try:
        devices = topologies.get_topology_desc(kind, "cuda", **where).devices
    except Exception as error:  # noqa: BLE001 (jax raises several types)
        log.info("nothing is compiled for %s: %s", kind, str(error).splitlines()[0])
        return ()
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot read such programs
    return devices


def _tpu_devices(name: str) -> Sequence[jax.Device]:
    from jax.experimental import topologies

    try:
        devices = topologies.get_topology_desc(topology_name=name, platform="tpu").devices
        # As a run has them: those of a host follow each other.
        return sorted(devices, key=lambda device: (device.process_index, device.id))
    except Exception as error:  # noqa: BLE001 (plugins raise what they like)
        raise ConfigError(
            f"--topology: cannot compile for {name}: {str(error).splitlines()[0]}. `make plan "
            'ARGS="--config ..."` installs the TPU compiler, which needs no TPU; or try cpu:8'
        ) from error
