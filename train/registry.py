"""The tables of `train`: what has a name in its settings, and where it lies."""

from specjax.registry import Registry

OBJECTIVES = Registry(
    "objective",
    {
        "grpo": "train.objectives.grpo:GRPO",
        "gspo": "train.objectives.gspo:GSPO",
    },
    "a specjax.interfaces.Objective, a frozen dataclass,",
)
