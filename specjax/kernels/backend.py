"""The choice of a kernel backend, and the reasons against one."""

from __future__ import annotations

from typing import NamedTuple

from specjax.config import ModelConfig
from specjax.interfaces import Device
from specjax.kernels.names import GROUPS, OWN, check_attention
from specjax.registry import BACKENDS

REFERENCE = "reference"


class Declined(Exception):
    """Raised by an operation that does not support a call, with the reason.

    The backend's `rest` then runs the call.
    """


class Unsuited(str):
    """A reason to refuse a model that is logged without a warning.

    The kernels were never meant for such models.
    """


def head_sizes(cfg: ModelConfig) -> tuple[int, ...]:
    """Returns the head sizes of a model's attention layers, each once, in ascending order."""
    return tuple(sorted({mixer.head_dim for mixer in cfg.mixers("attention")}))


# --- choosing a backend ---------------------------------------------------------------------------


class Choice(NamedTuple):
    """The backend that was chosen.

    Attributes:
      name: name of the backend in the table, or its path.
      line: line to log.
      warn: whether the line is a warning, because the platform's own kernel does not run.
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
    """Chooses the backend for a model on a device.

    Args:
      platform, kind: platform and kind of the device, as jax names them.
      asked: the user's setting, see `names.check_attention`.
      invariant: whether rounds attend by position, which only the reference does.
      devices: number of devices in the mesh.
      decoding: True to choose for decoding, False for training.

    Raises:
      ValueError: the backend that was asked for is unknown, or cannot be used there.
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
    """Returns the choice for `auto`: the platform's first backend that has the operation."""
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
            f"attention {asked!r} cannot be used: {'; '.join(refused.values())}; choose another, "
            f"or 'auto', which chooses a backend that {device.kind} can run"
        )
    return _chosen(found, refused, ", as asked for")._replace(warn=BACKENDS.find(found).warns)


def _first(
    name: str, device: Device, cfg: ModelConfig, operation: str, invariant: bool | None = None
) -> tuple[str | None, dict[str, str]]:
    """Returns the first usable backend of a group, and why those before it are refused.

    Args:
      name: name of a group or of one backend.
      invariant: whether the engine is in `invariant` mode; None: the user asked for this name.
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
            return None, {name: reason or f"it supports {known}, and the device is {device.kind!r}"}
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
    """Returns the choice of a backend; its line says why earlier ones in the list are refused."""
    backend = BACKENDS.find(name)
    parts = [backend.line + why_it, *(f"not {other}: {why}" for other, why in refused.items())]
    warn = any(not isinstance(why, Unsuited) for why in refused.values())
    return Choice(name, "; ".join(parts), warn or backend.warns)
