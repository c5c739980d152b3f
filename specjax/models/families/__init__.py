"""Model families, one file per `model_type`, see `specjax.interfaces.Family`."""

from __future__ import annotations

from specjax.checked_json import UnsupportedModelError
from specjax.interfaces import Family
from specjax.registry import FAMILIES

_ROWS = dict(FAMILIES.rows)  # the package's own; `add_family` adds to the table
MEMBERS = (
    "model_type", "architecture", "layer_prefix", "head_style", "read", "write", "stored", "zeros",
)  # fmt: skip


def family_of(model_type: object, where: object = "") -> Family:
    """Looks up the family of a `model_type` in the table; a checkpoint never imports one.

    Args:
      where: file that names the `model_type`, for the message.

    Raises:
      UnsupportedModelError: the table has no such family.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"{where}{': ' if where else ''}model_type {model_type!r:.60} is not supported; "
            f"expected one of {', '.join(FAMILIES.names)}"
        )
    return FAMILIES.named(model_type)


def add_family(path: str | None) -> None:
    """Adds a user's own family to this process, for every checkpoint with its `model_type`.

    Until the process ends it replaces the package's family of that `model_type`, if there is one:
    also for models that name no family, and for models that were loaded before and are exported
    afterwards.

    Args:
      path: path `module:attribute`, as a user gave it in the setting `family`; None adds nothing.

    Raises:
      ValueError: this is no path, there is no family at it, or a user's other family has that
        `model_type`.
    """
    if path is None:
        return
    if not all(path.partition(":")):
        known = ", ".join(FAMILIES.names)
        raise ValueError(
            "family: expected a family of your own as 'package.module:attribute', "
            f"got {path!r}; those that are known, {known}, need no setting: the checkpoint's "
            "model_type says which it is"
        )
    try:
        family = FAMILIES.find(path)
    except ValueError as error:
        raise ValueError(f"family: {error}") from error
    if not isinstance(family, Family):
        lacking = [name for name in MEMBERS if not hasattr(family, name)]
        raise ValueError(
            f"family: expected {FAMILIES.expected} at {path}, got "
            f"{type(family).__name__} without {', '.join(lacking)}"
        )
    held = FAMILIES.rows.get(family.model_type)
    if held not in (None, _ROWS.get(family.model_type)) and FAMILIES.find(held) is not family:
        raise ValueError(
            f"family: model_type {family.model_type!r} is that of {held} in this "
            f"process, expected no other, got another, {path}; give one of the two a "
            "model_type of its own, or use a process for each"
        )
    FAMILIES.rows[family.model_type] = path
