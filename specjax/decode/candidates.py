"""Which tokens a draft puts below a row: the best continuations by the source's logits.

The logits pass through the very transforms that the target's will pass through, along each branch
(unless `plan.aligned` is off: then only through the temperature). In `coupled` mode candidates are
ranked with the very noise that will decide the position, which makes the draft guess the sample and
not merely the distribution. `block` and `recursive` draw with noise of their own and keep q, the
distribution that was drawn from.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.decode import rng, sampling, shards
from specjax.decode.columns import Columns
from specjax.decode.history import Context, Rows
from specjax.decode.plan import Plan
from specjax.decode.state import DecodeState
from specjax.interfaces import Proposal


class Candidates(NamedTuple):
    """The best `count` continuations of each of R rows.

    Attributes:
      tokens: [B R count], -1 where there are fewer.
      gain: [B R count] what each adds to its path's score, at most 0 (dynamic trees).
      q: [B R V] what they were drawn from, 0 in a row without any (`block`, `recursive`).
      logprobs: [B R count] log q of each (telemetry).
    """

    tokens: Int[Array, "B R C"]
    gain: Float[Array, "B R C"] | None
    q: Float[Array, "B R V"] | None
    logprobs: Float[Array, "B R C"] | None


def candidates(
    plan: Plan,
    state: DecodeState,
    context: Context,
    proposal: Proposal,
    paths: Int[Array, "B R P"],
    nodes: np.ndarray,
    count: int,
) -> Candidates:
    """The best continuations of R rows of one depth.

    Args:
      proposal: the source's logits, of all tokens or of some.
      paths: tokens from below the root down to each row; its length is the rows' depth.
      nodes: [R] numbers of the rows in the tree; they key noise that is private to a node.
    """
    options, root, depth = state.options, state.length - 1, paths.shape[-1]
    logits, columns = proposal.scores, Columns(None, proposal.scores.shape[-1])
    if proposal.ids is not None:
        columns = Columns(proposal.ids, plan.cfg.vocab_size)
        columns, logits = columns.widened(logits, count)
        logits = columns.masked(logits)
    logits = sampling.sanitise(logits)
    if plan.aligned:
        rows = Rows(np.full(paths.shape[1], depth), paths)
        log_q = sampling.transform(logits, options, plan.features, context, rows, columns)
    else:
        log_q = sampling.tempered(logits, options.temperature)
    perturbed = log_q
    if plan.draws_noise:  # a row of that depth decides the position after it
        noise = rng.ring_at(state.noise, root[:, None] + depth + 1, columns.ids)
        perturbed = sampling.perturb(log_q, options.temperature, noise)
    elif plan.needs_q and plan.features.sampled:
        noise = rng.round_noise(state.keys, rng.DRAFT, root, nodes, columns.vocab)
        perturbed = sampling.perturb(log_q, options.temperature, columns.at_rows(noise))
    picked, best = top_candidates(perturbed, count)
    gain = q = logprobs = None
    if plan.tree.is_dynamic:
        gain = _gain(plan, options.temperature, perturbed, best)
        if plan.adaptive_width:
            gain = jnp.where(np.arange(count) < _width(log_q)[..., None], gain, -jnp.inf)
    if plan.needs_q:
        q = sampling.probabilities(log_q, options.temperature)
        q = columns.spread(jnp.where(jnp.isfinite(best[..., :1]), q, 0.0))
    if plan.telemetry:
        of_picked = jnp.take_along_axis(log_q, picked, axis=-1)
        logprobs = of_picked - jax.nn.logsumexp(log_q, axis=-1, keepdims=True)
    tokens = jnp.where(jnp.isfinite(best), columns.tokens(picked), -1)
    return Candidates(tokens, gain, q, logprobs)


def top_candidates(scores: Float[Array, "B R V"], count: int) -> tuple[Array, Array]:
    """Columns and values [B R count] of the `count` best scores, ties to the lowest id."""
    best, ids = shards.top_k(scores, count, _top_k)
    return ids.astype(jnp.int32), best


def _top_k(scores: Float[Array, "B R V"], count: int) -> tuple[Array, Array]:
    """As `jax.lax.top_k`; the first few by argmaxes, for on CPU it sorts the whole vocabulary."""
    if count > 8:
        return jax.lax.top_k(scores, count)
    ids, best = [], []
    for _ in range(count):
        value, pick = shards.whole_best(scores)
        ids.append(pick)
        best.append(value)
        scores = jnp.where(jnp.arange(scores.shape[-1]) == pick[..., None], -jnp.inf, scores)
    return jnp.stack(best, axis=-1), jnp.stack(ids, axis=-1)


def _gain(plan: Plan, temperature: Array, perturbed: Array, best: Array) -> Array:
    """log_softmax(perturbed / tau) at the best ones, where tau says how far to trust the ranking.

    Without noise the perturbed scores are log q itself, and tau is 1.
    """
    tau = plan.tau if plan.mode == "coupled" else 1.0
    tau = jnp.where(temperature > 0, tau, 1.0)[:, None, None]
    total = jax.nn.logsumexp(perturbed / tau, axis=-1, keepdims=True)
    return jnp.where(jnp.isfinite(best), jnp.minimum(best / tau - total, 0.0), -jnp.inf)


def _width(log_q: Float[Array, "B R V"]) -> Float[Array, "B R"]:
    """How many children a row is worth: the perplexity of its q, an effective nucleus size."""
    log_p = jax.nn.log_softmax(log_q, axis=-1)
    entropy = -jnp.where(jnp.isfinite(log_p), jnp.exp(log_p) * log_p, 0.0).sum(-1)
    return jnp.round(jnp.exp(entropy))
