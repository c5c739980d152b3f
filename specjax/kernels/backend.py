"""The choice of a kernel backend, and the reasons against one."""

from __future__ import annotations

from typing import NamedTuple

from specjax.config import ModelConfig
from specjax.interfaces import Device
from specjax.kernels.names import OWN, check_attention
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
    device, own = Device(platform, kind, devices), asked == "auto"
    operation = "tree_attention" if decoding else "causal_attention"
    names = [asked]
    if own:
        kinds = {name: BACKENDS.find(name).kinds for name in OWN.get(platform, ())}
        names = [name for name in kinds if not kinds[name] or kind in kinds[name]]
    if not names:
        line = f"{BACKENDS.find(REFERENCE).line}: there is no kernel for {kind!r} ({platform})"
        return Choice(REFERENCE, line, True)
    found, refused = None, {}
    for name in names:
        backend = BACKENDS.find(name)
        passed = operation not in backend.operations or invariant and not backend.prompts_alone
        if own and passed:  # of the platform's own, those without the operation are passed over
            continue
        reason = backend.refuses(operation, device, cfg)
        if reason is None:
            found = name
            break
        refused[name] = reason
    if found is None and not own:
        raise ValueError(
            f"attention {asked!r} cannot be used: {'; '.join(refused.values())}; choose another, "
            f"or 'auto', which chooses a backend that {kind} can run"
        )
    name = found or REFERENCE
    backend = BACKENDS.find(name)
    parts = [backend.line if own else f"{backend.line}, as asked for"]
    parts += [f"not {other}: {why}" for other, why in refused.items()]
    warn = own and any(not isinstance(why, Unsuited) for why in refused.values())
    if invariant and name != REFERENCE:
        parts.append("rounds in invariant mode attend by position in XLA, without it")
        warn = True
    return Choice(name, "; ".join(parts), warn)
