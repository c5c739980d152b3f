"""The tables of `train`: names that settings take, and the module of each."""

from specjax.registry import Registry

OBJECTIVES = Registry(
    "objective",
    {
        "grpo": "train.objectives.grpo:GRPO",
        "gspo": "train.objectives.gspo:GSPO",
        "cispo": "train.objectives.cispo:CISPO",
        "rloo": "train.objectives.rloo:RLOO",
        "reinforce_pp": "train.objectives.reinforce_pp:ReinforcePP",
    },
    "a specjax.interfaces.Objective, a frozen dataclass,",
)

# In order: the first one that recognises the columns of a row reads it.
TASKS = Registry(
    "task",
    {
        "verl": "train.tasks.verl:TASK",
        "math": "train.tasks.math:TASK",
        "gsm8k": "train.tasks.gsm8k:TASK",
        "slime": "train.tasks.slime:TASK",
        "prompt": "train.tasks.prompt:TASK",
        "messages": "train.tasks.messages:TASK",
    },
    "a train.tasks.layout.Layout",
)

REWARDS = Registry(
    "reward",
    {
        "exact": "train.rewards:EXACT",
        "number": "train.rewards:NUMBER",
        "math_verify": "train.rewards:MATH_VERIFY",
        "choice": "train.rewards:CHOICE",
        "format": "train.rewards:FORMAT",
        "reasoning_gym": "train.tasks.reasoning_gym:score",
    },
    "a function",
)
SUMS_REWARD = "exact"  # of generated sums, see train.tasks.sums
