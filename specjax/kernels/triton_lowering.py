"""What kernels for GPUs have in common: how they are lowered, where they run, how they fail."""

from __future__ import annotations

import contextlib
import inspect
import math
import re

import jax

from specjax.interfaces import Device
from specjax.kernels.names import NVIDIA

LOG2E = math.log2(math.e)
# Kinds of devices, as jax names them, for which Triton does not compile these kernels.
OLDER = re.compile(
    r"\b(K80|M\d0|P\d+|V100\w*|T4G?|T1000|T[456]00|GTX|RTX 20\d\d|Quadro RTX|TITAN)\b",
    re.IGNORECASE,
)


def as_on_a_gpu():
    """Returns a context that lowers Triton kernels wherever the program is traced.

    jax from 0.11 on asks which GPU a kernel is lowered for, and fails where none is present or the
    name is not one that it knows. What it lowers depends on that in casts to float8 alone. Under a
    mesh its devices are the answer.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return contextlib.nullcontext()
    names = inspect.signature(jax.sharding.AbstractDevice).parameters
    facts = {"device_kind": "NVIDIA A100", "num_cores": None, "platform": "gpu"}
    device = jax.sharding.AbstractDevice(**{name: facts[name] for name in names})
    return jax.sharding.use_abstract_mesh(mesh.update(abstract_device=device))


def no_ampere(device: Device | None) -> str | None:
    """Returns why a device is no NVIDIA GPU from Ampere on; None: it is one, or is not known."""
    if device is None:
        return None
    # jax calls AMD's platform "gpu", too.
    if device.platform not in NVIDIA or device.kind.upper().startswith("AMD"):
        return f"it is compiled for NVIDIA GPUs, and the device is {device.kind!r}"
    if OLDER.search(device.kind):
        return f"it is written for GPUs from Ampere on, and the device is {device.kind!r}"
    return None


class OutOfMemory(Exception):
    """Raised where a kernel could not be tried, because the device has no memory left."""


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether a device has no memory left.

    A kernel that needs more shared memory than a multiprocessor has fails with the same status.
    """
    line = str(error).lower()
    wanted = "out of memory", "out_of_memory", "trying to allocate"
    return any(words in line for words in wanted) and "shared memory" not in line
