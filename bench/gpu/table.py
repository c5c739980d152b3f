"""The parts of the queue, the most deciding first: one row each."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple


class Part(NamedTuple):
    """One row.

    Attributes:
      name: of the part. decides: what its figures are for.
      module: has `measure(job, **settings)` and, unless it says in `NOT_AHEAD` why not,
        `programs(place, small, **settings)`: what `--dry` compiles.
      settings: what tells rows of one module apart.
      seconds: that it has, compilation included; it is ended then.
      environment: variables of its process; XLA_FLAGS are added to the user's.
    """

    name: str
    decides: str
    module: str
    settings: Mapping[str, Any] = MappingProxyType({})
    seconds: float = 180.0
    environment: Mapping[str, str] = MappingProxyType({})

    def load(self):
        """The module."""
        return importlib.import_module(self.module)


# For parts whose process is not the only one, or not the only framework, to want memory.
SHARED = MappingProxyType({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def _row(name: str, decides: str, module: str, seconds=180.0, environment=None, **settings) -> Part:
    module = f"bench.gpu.parts.{module}"
    return Part(name, decides, module, settings, seconds, environment or {})


def _rows() -> tuple[Part, ...]:
    row = _row
    return (
        row("ceilings", "denominators of all shares", "ceilings", 60),
        row("one_graph", "whether WHILE in a graph is safe", "one_graph"),
        row("launches/off", "one graph per chunk", "launches", strategy="off"),
        row("launches/4_1_5", "one graph per chunk", "launches", strategy="4_1_5"),
        row("values", "whether kernels are right", "values"),
        row("values/own", "whether the own kernel is right", "values", 120, kernels=("gpu",)),
        *(
            row(f"attention/{size}", "default kernel", "attention", batch=size)
            for size in (8, 1, 64, "mixed")
        ),
        *(
            row(f"plain/{size}", "share of the roofline", "plain", batch=size)
            for size in (1, 8, 32, 128)
        ),
        row("plain_1.7B/1", "share of the roofline at 1.7B", "plain", batch=1, shape="1.7B"),
        *(
            row(f"rows/{size}", "cost curve of strategies", "rows", batch=size)
            for size in (1, 8, 32)
        ),
        *(row(f"round/{size}", "true speed-ups", "rounds", batch=size) for size in (1, 8, 32, 128)),
        row("round_parts", "parts of a round and of a draft step", "round_parts"),
        row("transformers", "comparison with a peer", "transformers", 180, SHARED),
        row("train.rl", "end to end", "rl", 150, SHARED),
        row("protocol", "four workloads at full size", "protocol", 480),
    )


PARTS: tuple[Part, ...] = _rows()


def named(names: Sequence[str], table: Sequence[Part] = PARTS) -> list[Part]:
    """The rows of these names, in the table's order; a name that ends in `/` stands for all below.

    Raises:
      ValueError: there is no such row.
    """
    found = []
    for name in names:
        below = [part for part in table if part.name == name or part.name.startswith(f"{name}/")]
        if not below:
            known = ", ".join(part.name for part in table)
            raise ValueError(f"there is no part {name!r}; the parts are {known}")
        found += below
    return [part for part in table if part in found]
