"""Backends of kernels: what one is made of, and which one runs on a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specjax.config import ModelConfig
from specjax.interfaces import Device
from specjax.kernels.names import GROUPS, OWN, check_attention
from specjax.registry import BACKENDS

REFERENCE = "reference"
# What `specjax.kernels.dispatch` asks of backends, under the names of its functions.
OPERATIONS = ("tree_attention", "causal_attention", "commit", "product", "layers")


class Declined(Exception):
    """Raised by an operation that does not serve a call, with the reason; the `rest` serves it."""


class Unsuited(str):
    """A reason to refuse a model that needs no warning: the kernels are not for such models."""


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


# --- which one runs -------------------------------------------------------------------------------


class Choice(NamedTuple):
    """The backend that was chosen.

    Attributes:
      name: in the table, or a path. line: to log.
      warn: log it as a warning, because the platform's own kernel does not run.
    """

    name: str
    line: str
    warn: bool = False


def choose(
    platform: str,
    kind: str,
    cfg: ModelConfig,
    asked: str = "auto",
    invariant: bool = False,
    devices: int = 1,
    decoding: bool = True,
) -> Choice:
    """The backend for a model on a device.

    Args:
      platform, kind: of the device, as jax names them. asked: see `names.check_attention`.
      invariant: rounds attend by position, which only the reference does.
      devices: of the mesh. decoding: and not training.

    Raises:
      ValueError: what is asked for is unknown, or cannot be used there.
    """
    check_attention(asked)
    device = Device(platform, kind, devices)
    operation = "tree_attention" if decoding else "causal_attention"
    if asked == "auto":
        choice = _own(device, cfg, operation, invariant)
    else:
        choice = _asked(device, cfg, operation, asked)
    if invariant and choice.name != REFERENCE:
        line = f"{choice.line}; rounds in invariant mode attend by position in XLA, without it"
        choice = choice._replace(line=line, warn=True)
    return choice


def _own(device: Device, cfg: ModelConfig, operation: str, invariant: bool) -> Choice:
    """The choice of `auto`: the first of the platform's own backends that has the operation."""
    if device.platform not in OWN:
        line = (
            f"{BACKENDS.find(REFERENCE).line}: there is no kernel for platform {device.platform!r}"
        )
        return Choice(REFERENCE, line, True)
    refused: dict[str, str] = {}
    for name in OWN[device.platform]:
        found, reasons = _first(name, device, cfg, operation, invariant)
        refused |= reasons
        if found is not None:
            return _chosen(found, refused)
    return _chosen(REFERENCE, refused)


def _asked(device: Device, cfg: ModelConfig, operation: str, asked: str) -> Choice:
    found, refused = _first(asked, device, cfg, operation)
    if found is None:
        raise ValueError(
            f"attention {asked!r} cannot be used: {'; '.join(refused.values())}; take another, or "
            f"'auto', which runs what there is for {device.kind}"
        )
    return _chosen(found, refused, ", as asked for")._replace(warn=BACKENDS.find(found).warns)


def _first(
    name: str, device: Device, cfg: ModelConfig, operation: str, invariant: bool | None = None
) -> tuple[str | None, dict[str, str]]:
    """The first of a group (or the one of that name) that can be used, and why others cannot.

    Args:
      invariant: whether the engine is in that mode; None: the name was asked for by the user.
    """
    members = GROUPS.get(name, (name,))
    if len(members) > 1:
        backends = [BACKENDS.find(member) for member in members]
        for_it = [
            member
            for member, backend in zip(members, backends, strict=True)
            if not backend.kinds or device.kind in backend.kinds
        ]
        if not for_it:
            reason = backends[0].refuses(operation, device, cfg)
            known = ", ".join(member.partition(":")[2] for member in members)
            return None, {name: reason or f"there is one for {known}, and this is {device.kind!r}"}
        members = for_it
    refused = {}
    for member in members:
        backend = BACKENDS.find(member)
        if invariant is not None:
            if operation not in backend.operations or invariant and not backend.prompts_alone:
                continue
        reason = backend.refuses(operation, device, cfg)
        if reason is None:
            return member, refused
        refused[member] = reason
    return None, refused


def _chosen(name: str, refused: dict[str, str], why_it: str = "") -> Choice:
    """The choice of a backend; its line says why those before it in the list are not used."""
    backend = BACKENDS.find(name)
    parts = [backend.line + why_it, *(f"not {other}: {why}" for other, why in refused.items())]
    warn = any(not isinstance(why, Unsuited) for why in refused.values())
    return Choice(name, "; ".join(parts), warn or backend.warns)
