"""What a table's row of kernels is made of, see `specjax.interfaces.Backend`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from specjax.config import ModelConfig
from specjax.interfaces import Device

# What `specjax.kernels.dispatch` asks of backends, under the names of its functions.
OPERATIONS = ("tree_attention", "causal_attention", "commit", "product", "layers")


class Declined(Exception):
    """An operation does not serve this call, and why; the backend's `rest` will."""


class Unsuited(str):
    """A reason to refuse a model that is nothing to warn of: the kernels are not meant for it."""


def _refuses_nothing(operation: str, device: Device | None, cfg: ModelConfig) -> str | None:
    return None


@dataclasses.dataclass(frozen=True)
class Kernels:
    """A `specjax.interfaces.Backend` by its parts, whose attributes are explained there."""

    operations: Mapping[str, Callable[..., Any]]
    line: str
    refuses: Callable[[str, Device | None, ModelConfig], str | None] = _refuses_nothing
    rest: str = "reference"
    kinds: tuple[str, ...] = ()
    page_multiple: int = 16
    by_device: bool = True
    prompts_alone: bool = True
    warns: bool = False
    environment: tuple[str, ...] = ()

    def __post_init__(self):
        if unknown := sorted(self.operations.keys() - set(OPERATIONS)):
            raise ValueError(
                f"unknown operations {', '.join(unknown)}; expected some of {', '.join(OPERATIONS)}"
            )


def head_sizes(cfg: ModelConfig) -> tuple[int, ...]:
    """The different sizes of heads that a model's attention has, in order."""
    return tuple(sorted({mixer.head_dim for mixer in cfg.mixers("attention")}))
