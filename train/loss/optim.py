"""Optimizers from settings: AdamW of optax with warm-up, a schedule and a clip norm."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import jax
import optax

from specjax.settings import option


@dataclass
class OptimConfig:
    """Settings of one optimizer; policy and draft head have one each.

    Attributes:
      lr: peak learning rate.
      warmup_steps: updates of linear warm-up.
      decay_steps: updates of cosine decay after warm-up; 0 keeps the rate constant.
      final_lr_ratio: rate at the end of the decay, relative to the peak.
      weight_decay: decoupled weight decay, on weight matrices only.
      b1: Adam's first moment decay.
      b2: Adam's second moment decay.
      clip_norm: global gradient norm at most; inf: whatever it is.
    """

    lr: float = option(1e-6, least=0)
    warmup_steps: int = option(10, least=0)
    decay_steps: int = option(0, least=0)
    final_lr_ratio: float = option(0.1, least=0, needs="decay_steps")
    weight_decay: float = option(0.0, least=0)
    b1: float = option(0.9, least=0, below=1)
    b2: float = option(0.999, least=0, below=1)
    clip_norm: float = option(1.0, least=0, infinite=True)

    def schedule(self) -> optax.Schedule:
        """Learning rate of update i (from 0): lr (i + 1) / warmup_steps, then cosine or constant.

        The rate of the first update is above 0; the update with the peak rate begins the decay.
        """
        warmup = max(self.warmup_steps, 1)
        rise = optax.linear_schedule(self.lr / warmup, self.lr, warmup - 1 or 1)
        if not self.decay_steps:
            return rise
        fall = optax.cosine_decay_schedule(self.lr, self.decay_steps, self.final_lr_ratio)
        return optax.join_schedules([rise, fall], [warmup - 1])

    def build(self, decayed: Collection[str]) -> optax.GradientTransformation:
        """The optimizer: clipping by global norm, then AdamW.

        Args:
          decayed: names of the arrays with weight decay.
        """
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.adamw(
                self.schedule(),
                b1=self.b1,
                b2=self.b2,
                weight_decay=self.weight_decay,
                mask=functools.partial(decays, decayed),
            ),
        )


# Weights that start at random have far to go, and what a few updates of such a rate do to trained
# ones takes many to mend.
NEW_LR, SFT_LR, HEAD_LR = 1e-3, 2e-5, 1e-4


@dataclass
class SFTOptimConfig(OptimConfig):
    """Settings of the optimizer of a policy that is trained on demonstrations."""

    trained_lr: ClassVar[float] = SFT_LR

    lr: float | None = option(
        None,
        f"peak learning rate; null: {SFT_LR:g} of a policy, {HEAD_LR:g} of a draft head, or "
        f"{NEW_LR:g} of one that starts at random",
        least=0,
    )

    def settle(self, is_new: bool) -> None:
        """Fills in `lr` if it is null, for weights that start at random or were trained before."""
        if self.lr is None:
            self.lr = NEW_LR if is_new else self.trained_lr


@dataclass
class HeadOptimConfig(SFTOptimConfig):
    """Settings of the optimizer of a draft head."""

    trained_lr: ClassVar[float] = HEAD_LR


def decays(decayed: Collection[str], params):
    """A tree of bools that marks the leaves with weight decay, by their names."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: getattr(path[-1], "key", None) in decayed, params
    )
