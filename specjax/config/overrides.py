"""Settings of an EAGLE-3 head that a user may give in place of those of its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.config.checks import choice

FC_NORMS = ("none", "joined", "each")
BACKBONES = ("llama", "qwen3")
OVERRIDES = (
    "aux_hidden_state_layer_ids",
    "norm_before_residual",
    "fc_norm",
    "norm_output",
    "backbone",
)


def are_ids(values: Sequence[Any], least: int) -> bool:
    """Whether all values are integers of at least `least`."""
    return all(isinstance(i, int) and not isinstance(i, bool) and i >= least for i in values)


def checked_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by hand in the types of `specjax.drafts.eagle3_config.Eagle3Config`.

    All values are hashable.

    Raises:
      ValueError: a name is not in `OVERRIDES`, or a value is invalid.
    """
    if unknown := sorted({str(name) for name in overrides} - set(OVERRIDES)):
        raise ValueError(
            f"unknown setting of the head {', '.join(map(repr, unknown))}; expected "
            f"{', '.join(OVERRIDES)}"
        )
    given = dict(overrides)
    for name in ("norm_before_residual", "norm_output"):
        if name in given and not isinstance(given[name], bool):
            raise ValueError(f"{name} must be true or false; got {given[name]!r}")
    for name, choices in (("fc_norm", FC_NORMS), ("backbone", BACKBONES)):
        if name in given:
            choice(name, given[name], choices)
    name = "aux_hidden_state_layer_ids"
    if name in given and given[name] != "post_norm":
        ids = given[name]
        if isinstance(ids, str) or not isinstance(ids, Sequence) or not ids or not are_ids(ids, 0):
            raise ValueError(
                f"{name} must be a list of boundaries, the numbers of layers that ran before each "
                f"state, or post_norm; got {ids!r}"
            )
        given[name] = tuple(ids)
    return given
