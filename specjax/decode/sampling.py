"""From logits to the distribution that is sampled: one implementation for plain decoding, drafting
and verification alike, at every node of a tree.

`transform` makes scores of raw logits: penalties, logit bias, masks (allowed ids, minimum length,
bad words), temperature, top-k, top-p, min-p, in that order. Names and definitions are those of vLLM
and Hugging Face, which differ from each other in the order. A token that cannot be sampled has the
score -inf. `perturb` adds the noise whose argmax is a sample, `probabilities` is the distribution
itself.

A temperature of 0 is greedy: such rows are not divided, not filtered and not perturbed.

The scores of a node do not depend on the program that computes them, nor on which part of the
history is context and which is path: from the same logits come the same bits. (What floating point
leaves of that at the edge of top-p, see `filters.top_p_threshold`.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from specjax.decode import filters, shards
from specjax.decode.columns import Columns
from specjax.decode.history import Context, Counts, Rows, last_tokens
from specjax.decode.options import Features, Options


def sanitise(logits: Float[Array, "... V"]) -> Float[Array, "... V"]:
    """Draft logits with NaN and +inf made harmless; a broken draft may only cost time.

    NaN sorts first in `top_k`; a head that went to NaN must look like a head that knows nothing.
    -inf stays what it is, no draft. Where the best logit is beyond all measure it becomes 0: added
    to 1e30 the noise would be lost, and the token drawn would no longer follow the q that `block`
    divides by. Logits of a sane draft keep their sign, which the repetition penalty looks at.
    """
    logits = shards.pin(logits)
    number = jnp.where(
        jnp.isneginf(logits), -jnp.inf, jnp.nan_to_num(logits, nan=-1e30, posinf=1e30)
    )
    best = number.max(axis=-1, keepdims=True)
    return number - jnp.where((jnp.abs(best) > 100) & ~jnp.isneginf(best), best, 0.0)


def transform(
    logits: Float[Array, "B R V"],
    options: Options,
    features: Features,
    context: Context,
    rows: Rows,
    columns: Columns | None = None,
) -> Float[Array, "B R V"]:
    """Scores of the tokens that may follow each row: tempered log-weights, -inf where impossible.

    A step that none of the slots asks for at the moment is skipped when the program runs. Where bad
    words would leave no token at all in a row, they are lifted for that row, and likewise the
    minimum length; allowed ids are lifted only where the policy itself excludes all of them. Logits
    that come in as -inf stay impossible. NaN in a target's logits is not repaired: what is made of
    such a row is arbitrary, and nothing of it is emitted (see `normaliser`).

    Args:
      logits: raw, float32.
      features: static. What is not set is not in the program, and its options do nothing.
      context, rows: the history of the slot, and of the row below its root.
      columns: the tokens that there are logits of; None: of all.
    """
    logits = scores = shards.pin(logits)
    columns = columns or Columns(None, logits.shape[-1])
    if features.penalties:
        penalised = functools.partial(
            _penalised, options=options, counts=context.counts, path=rows.path, columns=columns
        )
        scores = _if_any(_asks_for_penalties(options), penalised, scores)
    if features.bias:
        bias = functools.partial(_biased, options=options, columns=columns)
        scores = _if_any(options.bias_ids >= 0, bias, scores)
    if features.allowed or features.bad_words or features.min_tokens:
        scores = _masked(scores, options, features, context, rows, columns)
    if not features.sampled:
        return scores
    scores = tempered(scores, options.temperature)
    sampled = options.temperature > 0
    if features.top_k:
        k = jnp.where(sampled, options.top_k, 0)
        scores = _if_any(
            k > 0, lambda s: filters.drop_below(s, filters.top_k_threshold(s, k)), scores
        )
    if features.top_p:
        p = jnp.where(sampled, options.top_p, 1.0)
        scores = _if_any(
            p < 1, lambda s: filters.drop_below(s, filters.top_p_threshold(s, p)), scores
        )
    if features.min_p:
        least = jnp.where(sampled, options.min_p, 0.0)
        scores = _if_any(
            least > 0, lambda s: filters.drop_below(s, filters.min_p_threshold(s, least)), scores
        )
    return scores


def _if_any(asked: Bool[Array, "..."], apply: Callable, scores: Float[Array, "B R V"]) -> Array:
    """`apply(scores)` if any slot asks for it. The program may hold more than its batch needs."""
    return jax.lax.cond(asked.any(), apply, lambda scores: scores, scores)


# --- penalties and bias ---------------------------------------------------------------------------


def _asks_for_penalties(options: Options) -> Bool[Array, " B"]:
    return (options.repetition != 1) | (options.presence != 0) | (options.frequency != 0)


def _penalised(
    logits: Float[Array, "B R V"],
    options: Options,
    counts: Counts,
    path: Int[Array, "B R D"],
    columns: Columns,
) -> Float[Array, "B R V"]:
    """Penalties at every node: the context's for all rows, then the few tokens on each row's path.

    The path's tokens are computed anew from their raw logits, not adjusted, so that a token gives
    the same bits whether it was counted in the context or on the path.
    """
    scores = _penalty(logits, options, columns.at(counts.prompt), columns.at(counts.output))
    batch, number, depth = path.shape
    if depth == 0:
        return scores
    ids = jnp.maximum(path, 0)

    def at_path(x):
        flat = jnp.take_along_axis(x, ids.reshape(batch, -1), axis=1)
        return flat.reshape(path.shape)

    repeats = (path[..., :, None] == path[..., None, :]).sum(axis=-1)
    column = columns.of(path)
    raw = jnp.take_along_axis(logits, jnp.where(column == logits.shape[-1], 0, column), axis=-1)
    output = at_path(counts.output) + repeats
    values = _penalty(raw, options, at_path(counts.prompt), output)
    # Past the end it is dropped. Repeats write the same value.
    slot, row = jnp.ogrid[:batch, :number]
    return scores.at[slot[..., None], row[..., None], column].set(values, mode="drop")


def _penalty(logits: Array, options: Options, prompt: Array, output: Array) -> Array:
    """Repetition, frequency and presence, elementwise; all arguments start with B, rank 3.

    The frequency penalty is applied in two halves of 12 bits, which makes both products exact (up
    to 4,096 occurrences): then it does not matter whether they are rounded (see `_rounded`).
    """
    repetition, presence, frequency = (
        x[:, None, None] for x in (options.repetition, options.presence, options.frequency)
    )
    generated = output > 0
    factor = jnp.where(logits > 0, 1 / repetition, repetition)
    logits = jnp.where(prompt | generated, _rounded(logits * factor), logits)
    bits = jax.lax.bitcast_convert_type(frequency, jnp.uint32)
    upper = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFF000), jnp.float32)
    times = output.astype(jnp.float32)
    logits = logits - upper * times - (frequency - upper) * times
    return logits - jnp.where(generated, presence, 0.0)


def _rounded(product: Float[Array, "*R"]) -> Float[Array, "*R"]:
    """A product that is rounded to float32 whatever comes next.

    Compilers merge a product and a following sum into one instruction with one rounding, in one
    program and not in the next, and then the same logits give different tokens. They do not merge
    across a minimum. (A barrier or `reduce_precision` does not stop XLA on CPU.)
    """
    return jnp.minimum(product, jnp.finfo(jnp.float32).max)


def _biased(
    scores: Float[Array, "B R V"], options: Options, columns: Columns
) -> Float[Array, "B R V"]:
    """Scores plus the bias of every token; -0.0 where there is none, for -0.0 + 0.0 is 0.0."""
    batch, vocab = len(scores), columns.vocab
    column = jnp.where(options.bias_ids < 0, vocab, options.bias_ids)
    bias = jnp.full((batch, vocab), -0.0, jnp.float32)
    bias = bias.at[jnp.arange(batch)[:, None], column].set(options.bias_values, mode="drop")
    return scores + columns.at(bias)


# --- masks ----------------------------------------------------------------------------------------


def _masked(
    scores: Float[Array, "B R V"],
    options: Options,
    features: Features,
    context: Context,
    rows: Rows,
    columns: Columns,
) -> Float[Array, "B R V"]:
    """The masks one after the other, each only where it leaves something: what must hold first."""
    batch, number, _ = scores.shape
    vocab = columns.vocab

    def allow(scores):
        allowed = columns.at(_allowed(options.allowed, vocab))
        return _unless_nothing_is_left(jnp.where(allowed, scores, -jnp.inf), scores)

    def go_on(scores):
        stops = columns.at(_among(options.stop_ids, vocab))
        return _unless_nothing_is_left(
            jnp.where(early[..., None] & stops, -jnp.inf, scores), scores
        )

    def spare_bad_words(scores):
        ends = _completing(options.bad_words, last_tokens(context, rows), vocab)
        column = columns.of(ends)
        slot, row = jnp.ogrid[:batch, :number]
        spared = scores.at[slot[..., None], row[..., None], column].set(-jnp.inf, mode="drop")
        return _unless_nothing_is_left(spared, scores)

    if features.allowed:
        scores = _if_any(options.allowed != np.uint32(0xFFFFFFFF), allow, scores)
    if features.min_tokens:
        early = context.root[:, None] + 1 + rows.depth < options.min_len[:, None]
        scores = _if_any(early, go_on, scores)
    if features.bad_words:
        scores = _if_any(options.bad_words >= 0, spare_bad_words, scores)
    return scores


def _unless_nothing_is_left(masked: Float[Array, "B R V"], scores: Float[Array, "B R V"]) -> Array:
    return jnp.where((masked > -jnp.inf).any(axis=-1, keepdims=True), masked, scores)


def _allowed(words: UInt32[Array, "B W"], vocab: int) -> Bool[Array, "B V"]:
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab] == 1


def _among(ids: Int[Array, "B E"], vocab: int) -> Bool[Array, "B V"]:
    batch = ids.shape[0]
    column = jnp.where(ids < 0, vocab, ids)
    nothing = jnp.zeros((batch, vocab), bool)
    return nothing.at[jnp.arange(batch)[:, None], column].set(True, mode="drop")


def _completing(
    words: Int[Array, "B X L"], last: Int[Array, "B R S"], vocab: int
) -> Int[Array, "B R X"]:
    """The token that would complete each bad word after each row; `vocab` where none would.

    Args:
      words: right-aligned, -1 in front; all -1 is no word.
      last: the L - 1 tokens before the one that is decided, -1 before the start of the sequence.
    """
    beginning, end = words[:, None, :, :-1], words[:, None, :, -1]
    fits = ((beginning < 0) | (beginning == last[:, :, None])).all(axis=-1)
    return jnp.where(fits & (end >= 0), end, vocab)


# --- scores to samples ----------------------------------------------------------------------------


def _broadcast(temperature: Float[Array, " B"], rank: int) -> Array:
    return temperature.reshape(temperature.shape + (1,) * (rank - 1))


def tempered(logits: Float[Array, "B ... V"], temperature: Float[Array, " B"]) -> Array:
    """Logits divided by the temperature; untouched where it is 0.

    The reciprocal is explicit, for XLA divides by a row's scalar in some programs and multiplies by
    its reciprocal in others.
    """
    t = _broadcast(temperature, logits.ndim)
    return _rounded(logits * (1 / jnp.where(t > 0, t, 1.0)))


def perturb(
    scores: Float[Array, "B ... V"], temperature: Float[Array, " B"], noise: Array
) -> Float[Array, "B ... V"]:
    """Numbers whose argmax is a sample (Gumbel-max): scores plus noise, none at T = 0."""
    return scores + jnp.where(_broadcast(temperature, scores.ndim) > 0, noise, 0.0)


def probabilities(scores: Float[Array, "B ... V"], temperature: Float[Array, " B"]) -> Array:
    """The distribution that is sampled: softmax; one-hot on the first argmax at T = 0."""
    t = _broadcast(temperature, scores.ndim)
    greedy = jax.nn.one_hot(shards.argmax(scores), scores.shape[-1], dtype=jnp.float32)
    return jnp.where(t > 0, jax.nn.softmax(scores, axis=-1), greedy)


class Normaliser(NamedTuple):
    """What raw logits come to over the vocabulary.

    Attributes:
      log_sum: log-sum-exp of the temperature-scaled logits (T = 0 scaled at T = 1).
      valid: the raw logits are a distribution: no NaN, no +inf, and not all -inf. Some may be -inf.
    """

    log_sum: Float[Array, "B R"]
    valid: Bool[Array, "B R"]


def normaliser(logits: Float[Array, "B R V"], temperature: Float[Array, " B"]) -> Normaliser:
    """The log-sum-exp that log-probabilities need anyway, which NaN and an empty row spoil.

    Only +inf would be lost in it, for scaling rounds it to the largest float: the greatest raw
    logit, whose scaled value the sum is taken around, tells it. A maximum need not pass NaN on, a
    sum does.
    """
    most = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    peak = tempered(most, temperature)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    total = jnp.exp(tempered(logits, temperature) - peak).sum(axis=-1)
    log_sum = jnp.log(total) + peak[..., 0]
    return Normaliser(log_sum, jnp.isfinite(log_sum) & (most[..., 0] < jnp.inf))


def chosen_logprobs(
    logits: Float[Array, "B R V"], temperature: Float[Array, " B"], tokens: Array
) -> Float[Array, "B R"]:
    """Log-probability of `tokens` under the temperature-scaled target (T = 0 scored at T = 1)."""
    scaled = tempered(logits, temperature)
    picked = jnp.take_along_axis(scaled, tokens[..., None], axis=-1)[..., 0]
    return picked - normaliser(logits, temperature).log_sum
