"""Reads FastRL's `speculative:` section without changes to it."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from specjax.config.strategy import Strategy
from specjax.control.bandit import BanditConfig
from specjax.control.base import log
from specjax.spelling import checks_keywords

_TOP = ("enable", "spec_strategy", "bs_threshold", "eagle")
_EAGLE = (
    "spec_model_path", "spec_steps", "spec_topk", "spec_verify_tokens", "tune_algorithm",
    "mab_configs", "mab_bs_threshold",
)  # fmt: skip
FASTRL_ROWS = 48  # spec_verify_tokens where the section does not say


@checks_keywords
@dataclasses.dataclass(frozen=True)
class FastRLSettings:
    """Settings of FastRL's section in the terms of this project.

    Attributes:
      enabled: whether to speculate at all.
      controller: kind of controller, `bandit`, or `static` where speculation is off or not tuned.
      strategies: the strategies to choose from, or the one fixed strategy.
      bs_threshold: largest number of running slots for which to speculate; None for no limit.
      bandit: settings of the bandit.
      spec_model_path: path of the draft head; None: `SpecConfig.draft` says what drafts.
      spec_verify_tokens: largest number of rows, as in `SpecConfig`.
    """

    enabled: bool
    controller: str
    strategies: tuple[Strategy, ...]
    bs_threshold: int | None
    bandit: BanditConfig
    spec_model_path: str | None
    spec_verify_tokens: int


def read_fastrl(section: Mapping[str, Any], seed: int = 0) -> FastRLSettings:
    """Reads the section, with or without its key `speculative` around it.

    `bs_threshold` is an upper limit, as in FastRL's code (a comment in its documents says the
    opposite). The arms are `mab_configs` and `off`, which its strategy space has although its
    example leaves it out.

    Raises:
      ValueError: a key is not known, or its value is not supported.
    """
    if isinstance(section, Mapping) and set(section) == {"speculative"}:
        section = section["speculative"]
    _check_keys("speculative", section, _TOP)
    eagle = section.get("eagle") or {}
    _check_keys("speculative.eagle", eagle, _EAGLE)
    enabled = section.get("enable", True)
    if not isinstance(enabled, bool):
        raise ValueError(f"enable must be true or false, got {enabled!r}")
    if section.get("spec_strategy", "eagle") != "eagle":
        raise ValueError(
            f"spec_strategy must be 'eagle', got {section['spec_strategy']!r}; other drafts are "
            "chosen by SpecConfig.draft"
        )
    most = int(eagle.get("spec_verify_tokens", FASTRL_ROWS))
    tune = eagle.get("tune_algorithm")
    if tune not in ("BEG", "EG", None):
        raise ValueError(
            f"tune_algorithm must be 'BEG' (epsilon-greedy per batch-size group), 'EG' (one group) "
            f"or null (no tuning), got {tune!r}"
        )
    thresholds = eagle.get("mab_bs_threshold", (1, 2, 5, 21)) if tune == "BEG" else (1,)
    if not enabled:
        controller, strategies = "static", (Strategy.OFF,)
    elif tune is None:
        steps, topk = int(eagle.get("spec_steps", 8)), int(eagle.get("spec_topk", 4))
        rows = steps + 1 if topk == 1 else most
        controller, strategies = "static", (_arm(f"{steps}_{topk}_{rows}", most),)
    else:
        listed = [_arm(name, most) for name in eagle.get("mab_configs", ())]
        if not listed:
            raise ValueError("mab_configs lists no strategy; give some, such as '8_4_32'")
        controller, strategies = "bandit", tuple(dict.fromkeys([*listed, Strategy.OFF]))
    threshold = section.get("bs_threshold")
    return FastRLSettings(
        enabled=enabled,
        controller=controller,
        strategies=strategies,
        bs_threshold=None if threshold is None else int(threshold),
        bandit=BanditConfig(thresholds=tuple(thresholds), seed=seed),
        spec_model_path=eagle.get("spec_model_path"),
        spec_verify_tokens=most,
    )


def _check_keys(where: str, section: Any, known: tuple[str, ...]) -> None:
    if not isinstance(section, Mapping):
        raise ValueError(f"{where} must be a map with keys such as {known[0]}, got {section!r}")
    unknown = sorted(set(section) - set(known))
    if unknown:
        raise ValueError(
            f"{where} has unknown keys {', '.join(unknown)}; FastRL's keys are {', '.join(known)}"
        )


def _arm(name: str, most: int) -> Strategy:
    """Returns the strategy that FastRL's name stands for.

    FastRL lists trees with fewer rows than steps + 1, such as `8_4_8`: seven drafted rows hold no
    path deeper than seven, so the deeper steps draft for nothing.
    """
    match = re.fullmatch(r"(\d+)_(\d+)_(\d+)", name)
    if match:
        steps, topk, rows = map(int, match.groups())
        rows = min(rows, most) if topk > 1 else rows
        if topk > 1 and 1 < rows <= steps:
            steps = rows - 1
        if name != f"{steps}_{topk}_{rows}":
            _say_cut(name, f"{steps}_{topk}_{rows}", most)
        name = f"{steps}_{topk}_{rows}"
    return Strategy.parse(name)


@functools.cache  # a section is read by every check of the settings around it
def _say_cut(name: str, runs_as: str, most: int) -> None:
    """Warns once of a strategy that runs as another."""
    log.warning(
        "%s runs as %s: rows are at most %d, and no path is deeper than rows - 1",
        name, runs_as, most,
    )  # fmt: skip
