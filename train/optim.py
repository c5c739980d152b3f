"""Optimizers, from optax, by config: AdamW, warm-up, a schedule and a clip norm of its own."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import optax

from train.config import option


@dataclass
class OptimConfig:
    """One optimizer. Policy and draft head have one each, and never share a clip norm."""

    lr: float = option(3e-4, "peak learning rate")
    warmup_steps: int = option(0, "updates of linear warm-up")
    decay_steps: int = option(0, "updates of cosine decay after warm-up; 0 keeps the rate constant")
    final_lr_ratio: float = option(0.1, "rate at the end of the decay, relative to the peak")
    weight_decay: float = option(0.0, "decoupled weight decay, on matrices only")
    b1: float = option(0.9, "Adam's first moment decay")
    b2: float = option(0.95, "Adam's second moment decay")
    clip_norm: float = option(1.0, "global gradient norm at most")

    def schedule(self) -> optax.Schedule:
        warmup = max(self.warmup_steps, 1)
        if self.decay_steps:
            return optax.warmup_cosine_decay_schedule(
                0.0, self.lr, warmup, warmup + self.decay_steps, self.lr * self.final_lr_ratio
            )
        return optax.linear_schedule(self.lr / warmup, self.lr, warmup - 1 or 1)

    def build(self) -> optax.GradientTransformation:
        def matrices(params):
            return jax.tree.map(lambda a: a.ndim > 1, params)

        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.adamw(
                self.schedule(),
                b1=self.b1,
                b2=self.b2,
                weight_decay=self.weight_decay,
                mask=matrices,
            ),
        )
