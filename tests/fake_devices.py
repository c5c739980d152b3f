"""Devices of a job of two processes, for what only looks at where they are."""

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import jax

from specjax.parallel import distributed


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of a device as meshes look at."""

    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


@contextlib.contextmanager
def four_and_four() -> Iterator[list[Device]]:
    """This process is the first of two with four devices each, which nothing can run on."""
    devices = [Device(i, i // 4) for i in range(8)]
    counts = {"process_count": 2, "device_count": 8, "local_device_count": 4, "process_index": 0}
    with contextlib.ExitStack() as stack:
        for name, value in {**counts, "devices": devices}.items():
            stack.enter_context(mock.patch.object(jax, name, lambda value=value: value))
        stack.enter_context(mock.patch.object(distributed, "is_several", lambda: True))
        yield devices
