"""Model families, one file per `model_type`, see `specjax.interfaces.Family`."""

from __future__ import annotations

from specjax.checked_json import UnsupportedModelError
from specjax.interfaces import Family
from specjax.registry import FAMILIES

# Why types that look like ones of the table are none.
_REASONS = {"ministral3": ": it scales queries by their positions"}


def family_of(model_type: object, where: object = "") -> Family:
    """Looks up the family of a `model_type` in the table; a checkpoint never imports one.

    Args:
      where: file that names the `model_type`, for the message.

    Raises:
      UnsupportedModelError: the table has no such family.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        reason = _REASONS.get(model_type, "") if isinstance(model_type, str) else ""
        raise UnsupportedModelError(
            f"{where}{': ' if where else ''}model_type {model_type!r:.60} is not supported"
            f"{reason}; expected one of {', '.join(FAMILIES.names)}"
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
      ValueError: this is no path, or there is no family at it.
    """
    if path is None:
        return
    try:
        family = FAMILIES.find(path)
    except ValueError as error:
        raise ValueError(f"family: {error}") from error
    if path in FAMILIES or not isinstance(family, Family):
        raise ValueError(
            f"family: expected {FAMILIES.expected} of your own as 'package.module:attribute', got "
            f"{path!r}; the model_type of a checkpoint says which of the others it is"
        )
    FAMILIES.rows[family.model_type] = path
