"""How the programs here read their settings: see `specjax.command_line`."""

from specjax.command_line import (
    REQUIRED,
    ConfigError,
    at_least,
    find_shipped,
    fingerprint,
    load_config,
    option,
    parse_config,
    require_same_settings,
)

__all__ = [
    "REQUIRED",
    "ConfigError",
    "at_least",
    "find_shipped",
    "fingerprint",
    "load_config",
    "option",
    "parse_config",
    "require_same_settings",
]
