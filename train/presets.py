"""Presets of the section `algo`: the settings of a paper, by the name that people know.

`algo.preset=NAME` (also `algo=NAME`) changes the defaults of the section. So every key that the
user sets, in a file or on the command line, wins. With another `algo.objective` than the preset's,
the options of the preset's own objective are left out, and those of all objectives stay.

Presets do not set `updates_per_rollout`, on which clipping depends, nor anything of a rollout: how
many problems and samples a step has, and for how long they run, is a matter of model and machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.spelling import nearest

_PAPER = {"dynamic_sampling": False, "clip_ratio": 0.2, "clip_ratio_high": 0.2}
_TORCH = {"std_correction": 1}  # as the authors' programs, TRL and verl compute it

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300. Its KL in the loss is kl_loss_coef=0.04; TRL has 0.
    "grpo": {"objective": "grpo", "loss_aggregation": "sequence", **_PAPER, **_TORCH},
    # arXiv 2503.20783.
    "dr_grpo": {
        "objective": "grpo",
        "loss_aggregation": "constant",
        "normalize_std": False,
        **_PAPER,
    },
    # arXiv 2503.14476: a buffer of 4,096 of 20,480 tokens.
    "dapo": {
        "objective": "grpo",
        "loss_aggregation": "token",
        "clip_ratio": 0.2,
        "clip_ratio_high": 0.28,
        "dynamic_sampling": True,
        "overlong_buffer_len": 0.2,
        **_TORCH,
    },
    # arXiv 2507.18071.
    "gspo": {
        "objective": "gspo",
        "loss_aggregation": "sequence",
        "clip_ratio": 3e-4,
        "clip_ratio_high": 4e-4,
        "dynamic_sampling": False,
        **_TORCH,
    },
    # MiniMax-M1, arXiv 2506.13585, which has DAPO's dynamic sampling; bounds of arXiv 2510.13786.
    "cispo": {
        "objective": "cispo",
        "loss_aggregation": "token",
        "clip_ratio": 1.0,
        "clip_ratio_high": 4.0,
        "dynamic_sampling": True,
        **_TORCH,
    },
    # arXiv 2402.14740.
    "rloo": {"objective": "rloo", "loss_aggregation": "token", **_PAPER},
    # arXiv 2501.03262. Groups of equal rewards differ from the mean of the step.
    "reinforce_pp": {"objective": "reinforce_pp", "loss_aggregation": "token", **_PAPER},
}


def preset_of(name: str | None) -> Mapping[str, Any]:
    """The settings of a preset; none without a name.

    Raises:
      ValueError: there is no such preset.
    """
    if name is None:
        return {}
    if name not in PRESETS:
        known = ", ".join(PRESETS)
        raise ValueError(f"preset: unknown {name!r}{nearest(name, PRESETS)}; choose one of {known}")
    return PRESETS[name]
