"""What a run computes with: the model it means, and everything that is jitted for it.

`Trainer` fills these programs with arrays and runs them; `train.plan` fills them with shapes and
asks the compiler what they would need. Nothing here holds a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specjax.command_line import ConfigError
from specjax.config import ModelConfig
from specjax.context import context_of
from specjax.decode.options import Features
from specjax.draft.source import DraftSource
from specjax.engine.engine import Engine
from train.draft import DraftTrainer
from train.engines import Mesh, build_engines
from train.policy import PolicyTrainer, rl_loss
from train.schema import RLConfig

# What the chunks of rollouts and evaluation serve: a config asks for a temperature, and no more.
FEATURES = (Features(),)


@dataclass
class Programs:
    """The jitted parts of a run.

    Attributes:
      policy: the policy's update and scoring. draft: the head's update; None: it is not trained.
      engines: that roll out. eval_engine: None: nothing is evaluated.
    """

    policy: PolicyTrainer
    draft: DraftTrainer | None
    engines: list[Engine]
    eval_engine: Engine | None


def drafts(cfg: RLConfig) -> bool:
    """Whether rollouts speculate."""
    return cfg.draft.mode != "none" and not cfg.rollout.spec().is_off


def drafts_with_head(cfg: RLConfig) -> bool:
    """Whether they speculate with the draft head."""
    return drafts(cfg) and cfg.rollout.spec().source == "head"


def on_policy(cfg: RLConfig) -> bool:
    """Whether a rollout feeds a single update, so that the policy is its own old policy."""
    return cfg.algo.updates_per_rollout == 1


def scores_to_add(cfg: RLConfig) -> list[str]:
    """Log-probabilities that a micro-batch gets before the update."""
    old = "fresh_logprobs" if cfg.rollout.partial else "old_logprobs"
    return [] if on_policy(cfg) else [old]


def require_length(cfg: RLConfig, model: ModelConfig) -> None:
    """Raises ConfigError if a sample may be longer than the model can read."""
    longest = cfg.rollout.max_prompt_tokens + cfg.rollout.max_tokens
    if longest > model.max_position:
        raise ConfigError(
            "rollout.max_prompt_tokens + rollout.max_tokens must be at most "
            f"{model.max_position}, the longest sequence of {cfg.model}; got {longest}"
        )


def as_computed(cfg: RLConfig, model: ModelConfig) -> ModelConfig:
    """A checkpoint's model with the run's arithmetic, which is settled (`DtypeSection.settle`)."""
    return model.replace(compute_dtype=cfg.dtype.compute, remat=cfg.remat)


def build_programs(
    cfg: RLConfig, model: ModelConfig, source: DraftSource | None, mesh: Mesh, places: Sequence
) -> Programs:
    """Everything jitted, before anything is compiled.

    Args:
      source: what drafts in the head's place. mesh, places: see `train.engines.make_meshes`.

    Raises:
      ConfigError: the settings do not fit together.
    """
    roll, speculate = cfg.rollout, drafts(cfg)
    loss = rl_loss(cfg.algo, on_policy(cfg), stale=roll.partial)
    context, kernel = context_of(cfg.mesh, mesh), cfg.attention
    policy = PolicyTrainer(
        model, loss, cfg.optim.build(), mesh, roll.temperature, context, attention=kernel
    )
    draft = None
    if speculate and cfg.draft.mode == "online":
        draft = DraftTrainer(model, cfg.draft, roll.temperature, mesh, context, attention=kernel)
    try:
        engines = build_engines(cfg, model, speculate, source, mesh, places)
    except ValueError as error:
        raise ConfigError(f"rollout: {error}") from error
    return Programs(policy, draft, *engines)
