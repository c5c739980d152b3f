"""From logits to the distribution that is sampled, for plain decoding, drafting and verification.

`transform` makes scores of raw logits: penalties, logit bias, masks (allowed ids, minimum length,
bad words), temperature, top-k, top-p, min-p, in that order. Names and definitions are those of vLLM
and Hugging Face, which differ from each other in the order. A token that cannot be sampled has the
score -inf. `perturb` adds the noise whose argmax is a sample; `probabilities` is the distribution
itself. A temperature of 0 is greedy: rows at temperature 0 are not divided, filtered or perturbed.

The scores of a node do not depend on the program that computes them, nor on which part of the
history is context and which is path: equal logits give equal bits, but for the edge of top-p (see
`top_p_threshold`). `coupled` acceptance rests on that.

Dimensions: B slots, R rows of a tree, C columns of a proposal, V vocabulary; the others are written
as words: `depth` of a path, `last` tokens before a position, `emitted` tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from specjax.decode import shards
from specjax.decode.options import BAD_WORD_LENGTH, Features, Options

_SIGN = np.uint32(1 << 31)
_DIGIT = 4  # bits of a threshold that one pass over the scores finds


# --- what has been generated so far ---------------------------------------------------------------

# The history of a tree's node is that of its slot (`Context`, one for all rows of a round) and the
# tokens on the path from the root down to the node (`Rows`). So penalties see branches without a
# copy of the counts per row.


class Counts(NamedTuple):
    """Which tokens occur up to and including the root, for penalties.

    Attributes:
      prompt: whether each token occurs in the prompt.
      output: how often each token was generated.
    """

    prompt: Bool[Array, "B V"]
    output: Int[Array, "B V"]


class Context(NamedTuple):
    """The history that all rows of a slot share.

    Attributes:
      root: absolute position of the root, length - 1.
      counts: counts of the tokens up to and including the root; None: no feature needs them.
      suffix: the last BAD_WORD_LENGTH - 1 tokens up to and including the root, -1 before the start
        of the sequence; None: no feature needs them.
    """

    root: Int[Array, " B"]
    counts: Counts | None
    suffix: Int[Array, "B last"] | None


class Rows(NamedTuple):
    """Where the rows of a batch of logits stand in their trees.

    A row of depth d under a root at position P decides the token at absolute position P + 1 + d.

    Attributes:
      depth: [R] or [B R] depth of each row; the root's is 0.
      path: tokens from below the root down to each row, then -1; there may be none.
    """

    depth: Int[Array, "*B R"]
    path: Int[Array, "B R depth"]


def root_rows(batch: int) -> Rows:
    """Makes the rows of plain decoding: the root alone, with an empty path."""
    return Rows(np.zeros(1, np.int32), jnp.zeros((batch, 1, 0), jnp.int32))


def count_tokens(
    tokens: Int[Array, "B M"],
    length: Int[Array, " B"],
    prompt_len: Int[Array, " B"],
    vocab: int,
) -> Counts:
    """Counts the first `length` tokens of each slot, of which `prompt_len` are its prompt.

    Reads the whole sequence: once per chunk. From round to round use `add_tokens`.
    """
    position = jnp.arange(tokens.shape[1])
    inside = position < length[:, None]
    generated = inside & (position >= prompt_len[:, None])
    empty = jnp.zeros((tokens.shape[0], vocab), jnp.int32)
    return Counts(
        prompt=_add(empty, tokens, inside & ~generated) > 0,
        output=_add(empty, tokens, generated),
    )


def add_tokens(counts: Counts, tokens: Int[Array, "B emitted"], count: Int[Array, " B"]) -> Counts:
    """Returns the counts after the first `count` of `tokens` were emitted."""
    emitted = jnp.arange(tokens.shape[1]) < count[:, None]
    return counts._replace(output=_add(counts.output, tokens, emitted))


def _add(
    output: Int[Array, "B V"], tokens: Int[Array, "B some"], take: Bool[Array, "B some"]
) -> Array:
    batch, vocab = output.shape
    # A negative index would wrap around, so what does not count goes past the end and is dropped.
    target = jnp.where(take & (tokens >= 0), tokens, vocab)
    return shards.pin(output.at[jnp.arange(batch)[:, None], target].add(1, mode="drop"))


def context_of(
    tokens: Int[Array, "B M"], length: Int[Array, " B"], features: Features, counts: Counts | None
) -> Context:
    """Makes the context of slots whose first `length` tokens are known; the last one is the root.

    Args:
      features: features of the program, which say what of the history is kept.
      counts: counts of these tokens; needed (and kept) only for penalties.

    Raises:
      ValueError: the features have penalties, and there are no counts.
    """
    if features.penalties and counts is None:
        raise ValueError("features.penalties needs counts, got None: pass count_tokens(...)")
    suffix = None
    if features.bad_words:
        place = length[:, None] + jnp.arange(1 - BAD_WORD_LENGTH, 0)
        found = jnp.take_along_axis(tokens, jnp.maximum(place, 0), axis=1)
        suffix = jnp.where(place >= 0, found, -1)
    return Context(length - 1, counts if features.penalties else None, suffix)


def last_tokens(context: Context, rows: Rows) -> Int[Array, "B R last"]:
    """Returns the last BAD_WORD_LENGTH - 1 tokens up to each row, its own included; -1: none."""
    batch, count, _ = rows.path.shape
    shared = jnp.broadcast_to(context.suffix[:, None], (batch, count, context.suffix.shape[1]))
    history = jnp.concatenate([shared, rows.path], axis=-1)
    depth = jnp.broadcast_to(jnp.asarray(rows.depth), (batch, count))
    place = depth[..., None] + jnp.arange(context.suffix.shape[1])
    return jnp.take_along_axis(history, place, axis=-1)


# --- which column of the scores stands for which token --------------------------------------------


class Columns(NamedTuple):
    """Which token each of the C columns of scores [B R C] stands for.

    A draft may propose from a part of the vocabulary (`Proposal.ids`), while transforms, noise and
    acceptance rules know the target's ids. With ids None every method is the plain operation.

    Attributes:
      ids: token id of each column: [C], ascending, for all rows, or [B R C] for each row, in any
        order; None: the columns are all V tokens.
      vocab: size V of the vocabulary.
    """

    ids: Int[Array, " C"] | Int[Array, "B R C"] | None
    vocab: int

    def widened(self, scores: Float[Array, "B R C"], count: int) -> tuple[Columns, Array]:
        """Adds columns that stand for no token, up to at least `count` columns."""
        missing = count - scores.shape[-1]
        if self.ids is None or missing <= 0:
            return self, scores
        pad = [(0, 0)] * (self.ids.ndim - 1) + [(0, missing)]
        ids = jnp.pad(self.ids, pad, constant_values=self.vocab)
        scores = jnp.pad(scores, [(0, 0), (0, 0), (0, missing)], constant_values=-jnp.inf)
        return Columns(ids, self.vocab), scores

    def masked(self, scores: Float[Array, "B R C"]) -> Float[Array, "B R C"]:
        """Sets scores to -inf in columns of no token, and of a token that has a column already.

        Two children of a node with the same token would both be accepted, so a draft source's ids
        are checked: of ids that all rows share, those that do not ascend stand for no token.
        """
        if self.ids is None:
            return scores
        ids = self.ids
        valid = (ids >= 0) & (ids < self.vocab)
        if ids.ndim == 1:
            before = jnp.pad(jnp.where(valid, ids, -1)[:-1], (1, 0), constant_values=-1)
            valid &= ids > jax.lax.cummax(before)
        else:
            same = ids[..., :, None] == ids[..., None, :]
            valid &= ~jnp.tril(same, -1).any(-1)
        return jnp.where(valid, scores, -jnp.inf)

    def at(self, x: Array) -> Array:
        """Picks numbers per column, [B 1 C] or [B R C], from numbers per token [B V]."""
        if self.ids is None:
            return x[:, None]
        x, safe = shards.pin(x), jnp.clip(self.ids, 0, self.vocab - 1)
        if self.ids.ndim == 1:
            return x[:, None, safe]
        flat = jnp.take_along_axis(x, safe.reshape(len(x), -1), axis=1)
        return flat.reshape(safe.shape)

    def at_rows(self, x: Float[Array, "B R V"]) -> Float[Array, "B R C"]:
        """Picks numbers per row and column from numbers per row and token."""
        if self.ids is None:
            return x
        x, safe = shards.pin(x), jnp.clip(self.ids, 0, self.vocab - 1)
        if self.ids.ndim == 1:
            return x[..., safe]
        return jnp.take_along_axis(x, safe, axis=-1)

    def of(self, tokens: Int[Array, "B R tokens"]) -> Int[Array, "B R tokens"]:
        """Returns the column of each token; C, past the end, where it has none."""
        if self.ids is None:  # a negative index would wrap around
            return jnp.where(tokens < 0, self.vocab, tokens)
        size = self.ids.shape[-1]
        if self.ids.ndim == 1:
            column = jnp.minimum(jnp.searchsorted(self.ids, tokens), size - 1)
            found = self.ids[column] == tokens
        else:
            equal = self.ids[:, :, None] == tokens[..., None]
            column, found = jnp.argmax(equal, axis=-1), equal.any(-1)
        return jnp.where(found, column, size)

    def tokens(self, columns: Int[Array, "B R columns"]) -> Int[Array, "B R columns"]:
        """Returns the token of each column."""
        if self.ids is None:
            return columns
        if self.ids.ndim == 1:
            return self.ids[columns]
        return jnp.take_along_axis(self.ids, columns, axis=-1)

    def spread(self, q: Float[Array, "B R C"]) -> Float[Array, "B R V"]:
        """Spreads probabilities over the whole vocabulary, 0 for tokens without a column."""
        if self.ids is None:
            return q
        batch, rows, _ = q.shape
        wide = shards.pin(jnp.zeros((batch, rows, self.vocab), q.dtype))
        ids = jnp.where(self.ids < 0, self.vocab, self.ids)
        if ids.ndim == 1:
            return wide.at[:, :, ids].add(q, mode="drop")
        slot, row = jnp.ogrid[:batch, :rows]
        return wide.at[slot[..., None], row[..., None], ids].add(q, mode="drop")


# --- logits to scores -----------------------------------------------------------------------------


@jax.named_scope("sampling")
def sanitise(logits: Float[Array, "... V"], needs_q: bool = True) -> Float[Array, "... V"]:
    """Makes NaN and +inf in draft logits harmless: a broken draft may only cost time.

    NaN would sort first in `top_k`. -inf stays what it is, no draft. Where the best logit is larger
    than 100 the row is shifted so that it becomes 0: added to 1e30 the noise would be rounded away,
    and the token drawn would not follow the q that `block` divides by. Other rows keep their
    logits, whose sign the repetition penalty looks at.

    Args:
      needs_q: whether the rule divides by q. Where it does not, no row is shifted, which changes no
        token that is emitted.
    """
    logits = shards.pin(logits)
    number = jnp.where(logits == jnp.inf, 1e30, logits)
    number = jnp.where(jnp.isnan(logits), -1e30, number)
    if not needs_q:
        return number
    best = number.max(axis=-1, keepdims=True)
    return number - jnp.where((jnp.abs(best) > 100) & ~jnp.isneginf(best), best, 0.0)


@jax.named_scope("sampling")
def transform(
    logits: Float[Array, "B R V"],
    options: Options,
    features: Features,
    context: Context,
    rows: Rows,
    columns: Columns | None = None,
) -> Float[Array, "B R V"]:
    """Computes scores of the tokens that may follow each row: log-weights, -inf where impossible.

    A step that no slot asks for is skipped when the program runs. A mask that would leave no token
    in a row is lifted for that row. Logits that come in as -inf stay impossible. NaN in a target's
    logits is not repaired: the scores of such a row are arbitrary, and no token is emitted from it
    (see `normaliser`).

    Args:
      logits: raw logits, float32.
      options: sampling options of the slots.
      features: features of the program (static). A feature that is not set is not in the program,
        and its options do nothing.
      context: history of the slots.
      rows: place of the rows below the root, and their paths.
      columns: the tokens that the logits belong to; None: the whole vocabulary.
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
        scores = _drop_if_any(k > 0, lambda s: top_k_threshold(s, k), scores)
    if features.top_p:
        p = jnp.where(sampled, options.top_p, 1.0)
        scores = _drop_if_any(p < 1, lambda s: top_p_threshold(s, p), scores)
    if features.min_p:
        least = jnp.where(sampled, options.min_p, 0.0)
        scores = _drop_if_any(least > 0, lambda s: min_p_threshold(s, least), scores)
    return scores


def _if_any(asked: Bool[Array, "..."], apply: Callable, scores: Float[Array, "B R V"]) -> Array:
    """Applies a step if any slot asks for it: a program may hold more than its batch needs."""
    return jax.lax.cond(asked.any(), apply, lambda scores: scores, scores)


def _drop_if_any(
    asked: Bool[Array, "..."], threshold: Callable, scores: Float[Array, "B R V"]
) -> Array:
    """Drops scores below a threshold, which is computed if any slot asks for it.

    The conditional returns the threshold alone: scores that it returned would be copied where no
    slot asks, and written to memory between two thresholds.
    """

    def keep_all(scores):
        return jnp.full(scores.shape[:-1], -jnp.inf)

    return drop_below(scores, jax.lax.cond(asked.any(), threshold, keep_all, scores))


# --- penalties and bias ---------------------------------------------------------------------------


def _asks_for_penalties(options: Options) -> Bool[Array, " B"]:
    return (options.repetition != 1) | (options.presence != 0) | (options.frequency != 0)


def _penalised(
    logits: Float[Array, "B R V"],
    options: Options,
    counts: Counts,
    path: Int[Array, "B R depth"],
    columns: Columns,
) -> Float[Array, "B R V"]:
    """Applies penalties at every node: the context's, then those of the tokens on each row's path.

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
    """Applies repetition, frequency and presence penalties elementwise; arguments have rank 3.

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
    """Rounds a product to float32 before whatever comes next.

    Compilers merge a product and a following sum into one instruction with one rounding, in one
    program and not in the next, and then the same logits give different tokens. They do not merge
    across a minimum. (A barrier or `reduce_precision` does not stop XLA on CPU.)
    """
    return jnp.minimum(product, jnp.finfo(jnp.float32).max)


def _biased(
    scores: Float[Array, "B R V"], options: Options, columns: Columns
) -> Float[Array, "B R V"]:
    """Adds the bias of every token; -0.0 where there is none, for -0.0 + 0.0 is 0.0."""
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
    """Applies the masks in turn, each only where it leaves a token; the most binding one first."""
    batch, number, _ = scores.shape
    vocab = columns.vocab

    def allow(scores):
        allowed = columns.at(_allowed(options.allowed, vocab))
        return _unless_empty(jnp.where(allowed, scores, -jnp.inf), scores)

    def drop_stops(scores):
        stops = columns.at(_among(options.stop_ids, vocab))
        return _unless_empty(jnp.where(early[..., None] & stops, -jnp.inf, scores), scores)

    def drop_bad_words(scores):
        ends = _completing(options.bad_words, last_tokens(context, rows), vocab)
        column = columns.of(ends)
        slot, row = jnp.ogrid[:batch, :number]
        dropped = scores.at[slot[..., None], row[..., None], column].set(-jnp.inf, mode="drop")
        return _unless_empty(dropped, scores)

    if features.allowed:
        scores = _if_any(options.allowed != np.uint32(0xFFFFFFFF), allow, scores)
    if features.min_tokens:
        early = context.root[:, None] + 1 + rows.depth < options.min_len[:, None]
        scores = _if_any(early, drop_stops, scores)
    if features.bad_words:
        scores = _if_any(options.bad_words >= 0, drop_bad_words, scores)
    return scores


def _unless_empty(masked: Float[Array, "B R V"], scores: Float[Array, "B R V"]) -> Array:
    return jnp.where((masked > -jnp.inf).any(axis=-1, keepdims=True), masked, scores)


def _allowed(words: UInt32[Array, "B W"], vocab: int) -> Bool[Array, "B V"]:
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab] == 1


def _among(ids: Int[Array, "B some"], vocab: int) -> Bool[Array, "B V"]:
    batch = ids.shape[0]
    column = jnp.where(ids < 0, vocab, ids)
    none = jnp.zeros((batch, vocab), bool)
    return none.at[jnp.arange(batch)[:, None], column].set(True, mode="drop")


def _completing(
    words: Int[Array, "B words length"], last: Int[Array, "B R last"], vocab: int
) -> Int[Array, "B R words"]:
    """Returns the token that would complete each bad word after each row; `vocab` where none would.

    Args:
      words: token ids of each bad word, right-aligned, -1 in front; all -1 is no word.
      last: the length - 1 tokens before the one that is decided, -1 before the sequence's start.
    """
    beginning, end = words[:, None, :, :-1], words[:, None, :, -1]
    fits = ((beginning < 0) | (beginning == last[:, :, None])).all(axis=-1)
    return jnp.where(fits & (end >= 0), end, vocab)


# --- top-k, top-p and min-p as thresholds ---------------------------------------------------------

# No threshold needs a sorted vocabulary. Float32 numbers map monotonically to unsigned integers, so
# 32 halvings of their range find the score at which a count or a mass is reached, whatever k and p
# are; a halving is a pass over the scores. (On two CPU cores at [5, 151936], 32 passes took 3 ms
# for top-k and 4 ms for top-p; `jnp.sort` took 150 ms.) Where a pass waits for more than its
# arithmetic, for an all-reduce over a split vocabulary (`shards`) or for the memory of a TPU,
# it is 8 passes that divide the range by 16. Ties with the last token kept are kept, so the result
# does not depend on the order of tokens.


def _order(x: Float[Array, "*R"]) -> UInt32[Array, "*R"]:
    """Maps float32 numbers to integers of the same order (-0.0 just below 0.0)."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)


def _number(order: UInt32[Array, "*R"]) -> Float[Array, "*R"]:
    """Maps the integers of `_order` back to float32 numbers."""
    bits = jnp.where(order >= _SIGN, order ^ _SIGN, ~order)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def largest_threshold(
    scores: Float[Array, "*R V"], weights: Float[Array, "*R V"] | float, need: Float[Array, "*R"]
) -> Float[Array, "*R"]:
    """Finds the largest t for which the weights of {score >= t} sum up to at least `need`.

    -inf where no finite t does: everything is kept. NaN scores are in no such set.
    """
    lowest = _order(jnp.float32(-jnp.inf))
    enough = jnp.full(need.shape, lowest)
    too_far = jnp.maximum(_order(scores.max(axis=-1)), lowest) + 1
    split = shards.ways(scores.shape[-1]) > 1
    arguments = scores, jnp.broadcast_to(weights, scores.shape), need, enough, too_far
    found = jax.lax.platform_dependent(
        *arguments,
        tpu=digits_side_by_side,
        # Several devices cannot share one reduction of many numbers, and a GPU's loops wait for the
        # host.
        cuda=functools.partial(digits_side_by_side, unroll=True)
        if split
        else digits_by_one_reduction,
        default=digits_side_by_side if split else by_halving,
    )
    return _number(found)


# Each finds the threshold's order in [enough, too_far).


def by_halving(scores, weights, need, enough, too_far) -> UInt32[Array, "*R"]:
    """Halves the range 32 times."""

    def halve(_, bounds):
        enough, too_far = bounds
        middle = enough + (too_far - enough) // 2
        above = scores >= _number(middle)[..., None]
        reached = jnp.where(above, weights, 0.0).sum(axis=-1) >= need
        return jnp.where(reached, middle, enough), jnp.where(reached, too_far, middle)

    enough, _ = jax.lax.fori_loop(0, 32, halve, (enough, too_far))
    return enough


def digits_by_one_reduction(scores, weights, need, enough, too_far) -> UInt32[Array, "*R"]:
    """Finds one hexadecimal digit after the other; a digit's 15 sums are one reduction.

    So a GPU reads scores and weights once per digit, by two kernels, and there is no loop, which
    would wait for the host.
    """
    digits = np.arange(1, 1 << _DIGIT, dtype=np.uint32)

    def add(a, b):
        return tuple(x + y for x, y in zip(a, b, strict=True))

    found = jnp.zeros(need.shape, jnp.uint32)
    for shift in range(32 - _DIGIT, -1, -_DIGIT):
        candidates = found[..., None] + (digits << np.uint32(shift))
        # Orders below that of -inf stand for NaN, which no score reaches.
        least = _number(jnp.maximum(candidates, enough[..., None]))
        # Behind a barrier the reductions of all digits are the same kernels, compiled once.
        least = jax.lax.optimization_barrier(least)
        parts = [
            jnp.where(scores >= least[..., i : i + 1], weights, 0.0) for i in range(len(digits))
        ]
        zeros = (np.float32(0),) * len(digits)
        sums = jax.lax.reduce(tuple(parts), zeros, add, (scores.ndim - 1,))
        below = sum((total >= need).astype(jnp.uint32) for total in sums)
        found = found + (below << np.uint32(shift))
    return jnp.clip(found, enough, too_far - 1)


def digits_side_by_side(
    scores, weights, need, enough, too_far, unroll: bool = False
) -> UInt32[Array, "*R"]:
    """Finds one hexadecimal digit after the other, with a sum of its own for each candidate.

    The TPU compiler makes one operation of these that reads scores and weights once, and the slots
    lie side by side in its vectors. Along one more axis the same sums took 3.5 times as long.
    """
    rank3 = scores.ndim == 3  # [B R V]: R would be padded to 8
    if rank3:
        scores, weights = scores.swapaxes(0, 1), weights.swapaxes(0, 1)
        need, enough, too_far = (x.swapaxes(0, 1) for x in (need, enough, too_far))

    def reached(candidate):
        total = jnp.where(scores >= _number(candidate)[..., None], weights, 0.0).sum(axis=-1)
        return ((candidate < too_far) & (total >= need)) | (candidate <= enough)

    def find(place, found):
        shift = (32 - _DIGIT - _DIGIT * place).astype(jnp.uint32)
        digits = [jnp.uint32(digit) << shift for digit in range(1, 1 << _DIGIT)]
        below = sum(reached(found + digit).astype(jnp.uint32) for digit in digits)
        return found + (below << shift)

    start = jnp.zeros(need.shape, jnp.uint32)
    order = jnp.maximum(jax.lax.fori_loop(0, 32 // _DIGIT, find, start, unroll=unroll), enough)
    return order.swapaxes(0, 1) if rank3 else order


def top_k_threshold(scores: Float[Array, "B R V"], top_k: Int[Array, " B"]) -> Float[Array, "B R"]:
    """Finds the k-th largest score; -inf where k is 0 or less, or not below the vocabulary size."""
    k = jnp.broadcast_to(top_k[:, None], scores.shape[:-1])
    threshold = largest_threshold(scores, 1.0, k.astype(jnp.float32))  # exact up to V = 2^24
    return jnp.where(k > 0, threshold, -jnp.inf)


def top_p_threshold(
    scores: Float[Array, "B R V"], top_p: Float[Array, " B"]
) -> Float[Array, "B R"]:
    """Finds the t with mass of {score > t} < p <= mass of {score >= t}; -inf where p is 1.

    Masses are float32 sums, accurate to about 1e-7. A token whose mass ends that close to p may be
    kept by one program and dropped by another that adds in another order. That is about as rare as
    a tie of two float32 logits, and cannot happen within one program (`invariant`).
    """
    mass = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    p = jnp.broadcast_to(top_p[:, None], scores.shape[:-1])
    threshold = largest_threshold(scores, mass, p * mass.sum(axis=-1))
    return jnp.where(p < 1, threshold, -jnp.inf)


def min_p_threshold(
    scores: Float[Array, "B R V"], min_p: Float[Array, " B"]
) -> Float[Array, "B R"]:
    """Computes the score of a token min_p times as likely as the best; -inf where min_p is 0."""
    return scores.max(axis=-1) + jnp.log(min_p)[:, None]


def drop_below(
    scores: Float[Array, "B R V"], threshold: Float[Array, "B R"]
) -> Float[Array, "B R V"]:
    """Sets scores below the threshold of their row to -inf."""
    return jnp.where(scores < threshold[..., None], -jnp.inf, scores)


# --- scores to samples ----------------------------------------------------------------------------


def _broadcast(temperature: Float[Array, " B"], rank: int) -> Array:
    return temperature.reshape(temperature.shape + (1,) * (rank - 1))


def tempered(logits: Float[Array, "B ... V"], temperature: Float[Array, " B"]) -> Array:
    """Divides logits by the temperature; they stay as they are where it is 0."""
    # The reciprocal is explicit: XLA divides by a row's scalar in some programs and multiplies by
    # its reciprocal in others.
    t = _broadcast(temperature, logits.ndim)
    return _rounded(logits * (1 / jnp.where(t > 0, t, 1.0)))


@jax.named_scope("sampling")
def perturb(
    scores: Float[Array, "B ... V"], temperature: Float[Array, " B"], noise: Array
) -> Float[Array, "B ... V"]:
    """Adds noise to scores, so that their argmax is a sample (Gumbel-max); none at T = 0."""
    return scores + jnp.where(_broadcast(temperature, scores.ndim) > 0, noise, 0.0)


@jax.named_scope("sampling")
def probabilities(scores: Float[Array, "B ... V"], temperature: Float[Array, " B"]) -> Array:
    """Computes the distribution that is sampled: a softmax; one-hot on the argmax at T = 0."""
    t = _broadcast(temperature, scores.ndim)
    greedy = jax.nn.one_hot(shards.argmax(scores), scores.shape[-1], dtype=jnp.float32)
    return jnp.where(t > 0, jax.nn.softmax(scores, axis=-1), greedy)


class Normaliser(NamedTuple):
    """The normaliser of raw logits, and whether they are a distribution.

    Attributes:
      log_sum: log-sum-exp of the temperature-scaled logits (T = 0 scaled at T = 1).
      valid: whether the raw logits are a distribution: no NaN, no +inf, not all -inf.
    """

    log_sum: Float[Array, "B R"]
    valid: Bool[Array, "B R"]


@jax.named_scope("sampling")
def normaliser(logits: Float[Array, "B R V"], temperature: Float[Array, " B"]) -> Normaliser:
    """Computes the log-sum-exp that log-probabilities need; it also tells invalid rows.

    NaN, and a row of -inf alone, make it not finite. +inf does not, for scaling rounds it to the
    largest float: so the greatest raw logit is looked at as well.
    """
    # A maximum need not pass NaN on; the sum does.
    largest = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    peak = tempered(largest, temperature)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    total = jnp.exp(tempered(logits, temperature) - peak).sum(axis=-1)
    log_sum = jnp.log(total) + peak[..., 0]
    return Normaliser(log_sum, jnp.isfinite(log_sum) & (largest[..., 0] < jnp.inf))


def chosen_logprobs(
    logits: Float[Array, "B R V"], temperature: Float[Array, " B"], tokens: Array
) -> Float[Array, "B R"]:
    """Computes log-probabilities of `tokens` under the logits over T (T = 0 scored at T = 1)."""
    scaled = tempered(logits, temperature)
    picked = jnp.take_along_axis(scaled, tokens[..., None], axis=-1)[..., 0]
    return picked - normaliser(logits, temperature).log_sum
