"""Reads FastRL's `speculative:` section without changes to it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from specjax.command_line import read_yaml
from specjax.config.strategy import Strategy
from specjax.control.base import log

_TOP = ("enable", "spec_strategy", "bs_threshold", "eagle")
_EAGLE = (
    "spec_model_path", "spec_steps", "spec_topk", "spec_verify_tokens", "tune_algorithm",
    "mab_configs", "mab_bs_threshold",
)  # fmt: skip


def read_fastrl(section: Mapping[str, Any] | str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads the section, with or without its key `speculative` around it, or a file that has it.

    `bs_threshold` is an upper limit, as in FastRL's code (a comment in its documents says the
    opposite). The arms are `mab_configs` and `off`, which its strategy space has although its
    example leaves it out.

    Returns:
      (spec, control): values for fields of `SpecConfig`, and of `ControlConfig`, where `bandit` is
      a mapping. Where `enable` is false, the strategy is `off`.

    Raises:
      ValueError: a key is not known, or its value is not supported.
      specjax.settings.ConfigError: the file cannot be read.
    """
    if isinstance(section, str):
        section = read_yaml(section)
    section = section.get("speculative", section)
    if not isinstance(section, Mapping):
        raise ValueError(f"fastrl: expected the section `speculative`, got {section!r}")
    eagle = section.get("eagle") or {}
    for where, keys, known in (("", section, _TOP), (".eagle", eagle, _EAGLE)):
        if unknown := sorted(set(keys) - set(known)):
            raise ValueError(
                f"fastrl: speculative{where} has unknown keys {', '.join(unknown)}; FastRL's keys "
                f"are {', '.join(known)}"
            )
    tune = eagle.get("tune_algorithm")
    for name, value, known in (
        ("enable", section.get("enable", True), (True, False)),
        ("spec_strategy", section.get("spec_strategy", "eagle"), ("eagle",)),
        ("tune_algorithm", tune, ("BEG", "EG", None)),
    ):
        if value not in known:
            raise ValueError(
                f"fastrl: {name} must be one of {', '.join(map(repr, known))}, got {value!r}"
            )
    most = int(eagle.get("spec_verify_tokens", 48))
    if tune is None:
        steps, topk = int(eagle.get("spec_steps", 8)), int(eagle.get("spec_topk", 4))
        rows = steps + 1 if topk == 1 else most
        arms = [_arm(f"{steps}_{topk}_{rows}", most)]
    else:
        arms = [_arm(name, most) for name in eagle.get("mab_configs", ())]
        if not arms:
            raise ValueError("fastrl: mab_configs lists no strategy; give some, such as '8_4_32'")
    first = next((arm for arm in arms if not arm.is_off), Strategy.OFF)
    spec = {
        "strategy": first if section.get("enable", True) else Strategy.OFF,
        "spec_verify_tokens": most,
        "draft": eagle.get("spec_model_path") or "auto",
    }
    thresholds = eagle.get("mab_bs_threshold", (1, 2, 5, 21)) if tune == "BEG" else (1,)
    control = {
        "controller": "bandit" if tune else "static",
        "strategies": tuple(dict.fromkeys([*arms, *([Strategy.OFF] if tune else [])])),
        "bs_threshold": section.get("bs_threshold"),
        "bandit": {"thresholds": tuple(thresholds)},
    }
    return spec, control


@functools.cache  # a section is read by every check of the settings around it
def _arm(name: str, most: int) -> Strategy:
    """Returns the strategy that FastRL's name stands for; warns once of one that runs as another.

    FastRL lists trees with fewer rows than steps + 1, such as `8_4_8`: seven drafted rows hold no
    path deeper than seven, so the deeper steps draft for nothing.
    """
    runs_as = name
    if match := re.fullmatch(r"(\d+)_(\d+)_(\d+)", name):
        steps, topk, rows = map(int, match.groups())
        if topk > 1:
            rows = min(rows, most)
            steps = min(steps, max(rows - 1, 1))
        runs_as = f"{steps}_{topk}_{rows}"
    if runs_as != name:
        log.warning(
            "%s runs as %s: rows are at most %d, and no path is deeper than rows - 1",
            name, runs_as, most,
        )  # fmt: skip
    return Strategy.parse(runs_as)
