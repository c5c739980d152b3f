"""The tables of `train`: names that settings take, and the module of each."""

from specjax.registry import Registry

OBJECTIVES = Registry(
    "objective",
    {
        "grpo": "train.loss.objectives.grpo:GRPO",
        "gspo": "train.loss.objectives.gspo:GSPO",
        "cispo": "train.loss.objectives.cispo:CISPO",
        "rloo": "train.loss.objectives.rloo:RLOO",
        "reinforce_pp": "train.loss.objectives.reinforce_pp:ReinforcePP",
    },
    "a specjax.interfaces.Objective, a frozen dataclass,",
)

# In order: the first one that recognises the columns of a row reads it.
TASKS = Registry(
    "task",
    {
        "verl": "train.data.tasks.verl:TASK",
        "math": "train.data.tasks.math:TASK",
        "gsm8k": "train.data.tasks.gsm8k:TASK",
        "slime": "train.data.tasks.slime:TASK",
        "prompt": "train.data.tasks.prompt:TASK",
        "messages": "train.data.tasks.messages:TASK",
    },
    "a train.data.tasks.layout.Layout",
)

REWARDS = Registry(
    "reward",
    {
        "exact": "train.rewards.builtin:EXACT",
        "number": "train.rewards.builtin:NUMBER",
        "math_verify": "train.rewards.builtin:MATH_VERIFY",
        "choice": "train.rewards.builtin:CHOICE",
        "format": "train.rewards.builtin:FORMAT",
        "reasoning_gym": "train.data.tasks.reasoning_gym:score",
    },
    "a function",
)
ENVIRONMENTS = Registry(
    "environment",
    {
        "calculator": "train.environments.examples:Calculator",
        "guess": "train.environments.examples:Guess",
    },
    "a class with the methods reset and step",
)
SUMS_REWARD = "exact"  # of generated sums, see train.data.tasks.sums
