"""What a `model_type` means: one file each, see `specjax.interfaces.Family`."""

from __future__ import annotations

from specjax.checked_json import UnsupportedModelError
from specjax.interfaces import Family
from specjax.registry import Registry
from specjax.spelling import SettingError

FAMILIES = Registry(
    "model family",
    {
        "llama": "specjax.models.families.llama:FAMILY",
        "qwen2": "specjax.models.families.qwen2:FAMILY",
        "qwen3": "specjax.models.families.qwen3:FAMILY",
        "mimo": "specjax.models.families.mimo:FAMILY",
        "mistral": "specjax.models.families.mistral:FAMILY",
    },
    "a specjax.interfaces.Family",
)


MEMBERS = (
    "model_type", "architecture", "layer_prefix", "head_style", "read", "write", "stored", "zeros",
)  # fmt: skip


def family_of(model_type: object, where: object = "") -> Family:
    """The family of a `model_type`, which is looked up in the table and never imported by itself.

    Args:
      where: the file that names it, for the message.

    Raises:
      UnsupportedModelError: there is none.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"{where}{': ' if where else ''}model_type {model_type!r:.60} is not supported; "
            f"expected one of {', '.join(FAMILIES.names)}"
        )
    return FAMILIES.named(model_type)


def add_family(path: str | None) -> None:
    """Adds a user's own family to those of this process, by its `model_type`, whose place it takes.

    Args:
      path: `module:attribute`, as a user gave it in the setting `family`; None adds nothing.

    Raises:
      SettingError: there is no family.
    """
    if path is None or path in FAMILIES:
        return
    try:
        family = FAMILIES.find(path)
    except ValueError as error:
        reason = str(error)
        raise SettingError(lambda say: f"{say('family')}: {reason}") from error
    if not isinstance(family, Family):
        lacking = [name for name in MEMBERS if not hasattr(family, name)]
        raise SettingError(
            lambda say: (
                f"{say('family')}: expected {FAMILIES.expected} at {path}, got "
                f"{type(family).__name__} without {', '.join(lacking)}"
            )
        )
    FAMILIES.rows[family.model_type] = path
