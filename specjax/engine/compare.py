"""Why two decodings of one request differ: rounding, or a bug?

In `coupled` mode speculative and plain decoding draw the same noise, so their tokens can differ
only where the two programs' logits differ in their last bits and the two best perturbed logits are
that close. `first_difference` recomputes the logits at the first differing position by three
programs (full forward, one-row decode, tree-row decode), measures how far they are apart, and
compares that with the gap between the two tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode import rng, sampling
from specjax.decode.tree import chain_bits
from specjax.engine.request import Job

# Rounding beyond this share of the largest logit is not rounding.
ROUNDING_LIMIT = {"float32": 1e-4, "bfloat16": 5e-2}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference of one sample.

    Attributes:
      request, sample: which. position: absolute position of the differing token.
      plain_token, spec_token: what each decoding chose (-1: it had already ended).
      plain_gap: perturbed logit of the plain token minus that of the other, by one-row decoding.
      spec_gap: the other token's lead over the plain one, by the tree-row program.
      logit_difference: largest difference of a logit between the programs at this position.
      explained: both gaps are within twice that difference, and it is small enough for rounding.
    """

    request: int
    sample: int
    position: int
    plain_token: int
    spec_token: int
    plain_gap: float
    spec_gap: float
    logit_difference: float
    explained: bool

    def __str__(self) -> str:
        verdict = "explained by floating point" if self.explained else "NOT explained: a bug"
        return (
            f"request {self.request} sample {self.sample} position {self.position}: plain "
            f"{self.plain_token}, speculative {self.spec_token}; gaps {self.plain_gap:.3g} and "
            f"{self.spec_gap:.3g}, logit difference {self.logit_difference:.3g}; {verdict}"
        )


def first_difference(
    runner, request: int, sample: int, job: Job, plain: Sequence[int], spec: Sequence[int]
) -> Difference:
    """Locates and judges the first difference between two token lists of one job.

    Args:
      runner: the speculative engine's; its parameters and tree shape are used.
    """
    at = next(
        (i for i, (a, b) in enumerate(zip(plain, spec, strict=False)) if a != b),
        min(len(plain), len(spec)),
    )
    position = len(job.prompt) + at
    a = plain[at] if at < len(plain) else -1
    b = spec[at] if at < len(spec) else -1
    context = np.array([*job.prompt, *plain[:at]], np.int32)
    views = [np.asarray(v, np.float64) for v in _logits_by_program(runner, context)]
    key = rng.request_keys(jnp.asarray(job.words)[None])
    noise = np.asarray(rng.target_noise(key, jnp.array([[position]]), runner.cfg.vocab_size))
    temperature = np.array([job.temperature], np.float32)

    def gap(logits, winner, loser):
        if winner < 0 or loser < 0:  # one ended early without a differing token: never rounding
            return float("inf")
        scores = sampling.perturbed(jnp.asarray(logits, jnp.float32)[None], temperature, noise[0])
        return float(scores[0, winner] - scores[0, loser])

    spread = max(np.abs(v - views[0]).max() for v in views[1:])
    limit = ROUNDING_LIMIT[runner.cfg.compute_dtype] * max(1.0, np.abs(views[0]).max())
    plain_gap, spec_gap = gap(views[1], a, b), gap(views[2], b, a)
    # Logits are divided by the temperature before they are compared.
    scale = job.temperature if job.temperature > 0 else 1.0
    allowed = 2 * max(spread, np.finfo(np.float32).eps * np.abs(views[0]).max()) / scale
    explained = max(abs(plain_gap), abs(spec_gap)) <= allowed and spread <= limit
    return Difference(
        request, sample, position, a, b, plain_gap, spec_gap, float(spread), bool(explained)
    )


def _logits_by_program(runner, context: np.ndarray) -> list[jax.Array]:
    """Next-token logits [V] of one context by full forward, one-row and tree-row decoding."""
    rows = runner.tree.rows if runner.tree else 2
    length = len(context)
    tokens = np.broadcast_to(context, (runner.batch, length))

    def full(params):
        model, _ = runner.modules(params, None)
        x, _ = model.prefill(tokens, jnp.full((runner.batch,), length))
        return model.logits(x[0, -1])

    def by_rows(params, count):
        model, _ = runner.modules(params, None)
        count = min(count, length)
        start = length - count
        _, cache = model.prefill(tokens, jnp.full((runner.batch,), length))
        positions = jnp.broadcast_to(jnp.arange(start, length), (runner.batch, count))
        x, _ = model.decode(
            tokens[:, start:],
            positions,
            cache,
            jnp.full((runner.batch,), start),
            chain_bits(count),
        )
        return model.logits(x[0, -1])

    return [
        jax.jit(full)(runner.params),
        jax.jit(by_rows, static_argnums=1)(runner.params, 1),
        jax.jit(by_rows, static_argnums=1)(runner.params, rows),
    ]
