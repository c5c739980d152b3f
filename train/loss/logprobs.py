"""Log-probabilities of the tokens of packed rows, and the entropy of their distributions.

Tokens are scored at logits divided by a temperature; or with `Transforms` under the distribution
that a rollout sampled from, after all of them, with the engine's own code
(`specjax.decode.sampling.transform`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.config import SamplingParams
from specjax.decode import sampling
from specjax.decode.options import Features, Options
from specjax.decode.sampling import Context as History
from specjax.decode.sampling import Counts, Rows
from specjax.engine.request import features_of, make_jobs, option_rows
from specjax.parallel.context import Context, shift
from train.loss.logits import Cut, Head, next_token_scores, over_tokens

LOGPROBS = ("temperature", "processed")


@dataclasses.dataclass(frozen=True, eq=False)
class Scoring:
    """How the tokens of packed rows are scored; static.

    Attributes:
      temperature: temperature of the rollout; ratios at another temperature compare two different
        policies. 0 (greedy) counts as 1.
      transforms: transforms of the rollout, in the place of the temperature; None for that alone.
      context: split of rows over devices, if any; scores stay on the devices of their logits, and
        only the ends of chunks change devices.
      entropy_gradient: whether the entropy carries a gradient.
    """

    temperature: float = 1.0
    transforms: Transforms | None = None
    context: Context | None = None
    entropy_gradient: bool = False

    @property
    def scale(self) -> Float[Array, ""]:
        """The number that logits are divided by."""
        temperature = jnp.asarray(self.temperature, jnp.float32)
        return jnp.where(temperature > 0, temperature, 1.0)


def score_logits(
    how: Scoring, logits: Float[Array, "R S V"], batch: Mapping[str, Array]
) -> tuple[Float[Array, "R S"], Float[Array, "R S"]]:
    """Log-probability of every token given those before it, and the entropy of its distribution.

    Index t describes token t, which logits[t - 1] predicted. No array of probabilities [R S V]
    outlives the reductions: the backward pass keeps the logits alone and recomputes. With penalties
    positions are scored one after the other, because each needs the counts of the tokens before it.

    Args:
      how: temperature or transforms.
      logits: raw logits of the policy, of any float type; arithmetic is float32.
      batch: `tokens` and `segment_ids` [R S], where 0 is padding; with transforms `positions` and
        `loss_mask` as well, which is 1 exactly on generated tokens.

    Returns:
      (logprobs, entropy in nats), float32, both 0 at segment starts and padding; with transforms
      both are 0 except at generated tokens.
    """
    if how.transforms is not None:
        counts, rows = _processed_rows(how, batch, logits.shape[-1])
        _, scores = _score_block(how.transforms, how.entropy_gradient, counts, logits, rows)
        return own_tokens(how, *scores, batch)
    following = shift(batch["tokens"], 1, how.context)
    return own_tokens(how, *_score_next(how.entropy_gradient, logits, following, how.scale), batch)


def score_states(
    how: Scoring,
    head: Head,
    normed: Float[Array, "R S D"],
    matrix: Array,
    batch: Mapping[str, Array],
) -> tuple[Float[Array, "R S"], Float[Array, "R S"]]:
    """Does what `score_logits` does from states, without the logits of all tokens at once.

    Args:
      how, batch: see `score_logits`.
      head: the language-model head.
      normed: states after the final norm.
      matrix: the head's matrix, as it is stored.
    """
    if head.is_whole:
        return score_logits(how, head.all_logits(normed, matrix), batch)
    if how.transforms is None:
        following = shift(batch["tokens"], 1, how.context)
        scores = next_token_scores(head, normed, matrix, following, how.scale, how.entropy_gradient)
        return own_tokens(how, *scores, batch)
    cut = Cut.of(head, batch["tokens"].shape, how.context)
    counts, rows = _processed_rows(how, batch, head.matrix.shape[head.axis])
    score = functools.partial(_score_block, how.transforms, how.entropy_gradient)
    return own_tokens(how, *over_tokens(cut, score, counts, normed, matrix, rows), batch)


def own_tokens(
    how: Scoring,
    logprobs: Float[Array, "R S"],
    entropy: Float[Array, "R S"],
    batch: Mapping[str, Array],
) -> tuple[Float[Array, "R S"], Float[Array, "R S"]]:
    """Moves values from the position that predicted a token to the token; 0 where none did."""
    segments, context = batch["segment_ids"], how.context
    predicted = (shift(segments, 1, context) == segments) & (segments > 0)
    if how.transforms is not None:
        predicted &= shift(batch["loss_mask"] > 0, 1, context)

    def place(x):
        return shift(jnp.where(predicted, x, 0.0), -1, context)

    return place(logprobs), place(entropy)


@functools.partial(jax.checkpoint, static_argnums=0)
def _score_next(entropy_gradient: bool, logits, next_tokens, temperature):
    scaled = logits.astype(jnp.float32) / temperature
    return logprobs_and_entropy(scaled, next_tokens, entropy_gradient)


def logprobs_and_entropy(
    scaled: Float[Array, "*R V"], next_tokens: Int[Array, "*R"], entropy_gradient: bool = False
) -> tuple[Float[Array, "*R"], Float[Array, "*R"]]:
    """Log-probability of tokens and entropy, from scores that may be -inf.

    Args:
      scaled: scores, whose softmax is the distribution.
      next_tokens: the tokens.
      entropy_gradient: whether the entropy has a gradient.
    """
    log_z = jax.nn.logsumexp(scaled, axis=-1)
    picked = jnp.take_along_axis(scaled, next_tokens[..., None], axis=-1)[..., 0]
    if entropy_gradient:
        finite = jnp.where(scaled > -jnp.inf, scaled, 0.0)  # its gradient at -inf is 0, not NaN
        p = jnp.exp(scaled - log_z[..., None])
        return picked - log_z, log_z - jnp.sum(p * finite, axis=-1)
    fixed, fixed_z = jax.lax.stop_gradient((scaled, log_z))
    p = jnp.exp(fixed - fixed_z[..., None])
    # A masked logit is -inf and its probability 0: their product must be 0, not NaN.
    entropy = fixed_z - jnp.sum(jnp.where(p > 0, p * fixed, 0.0), axis=-1)
    return picked - log_z, entropy


BLOCK = 16  # positions whose scores exist at once in the backward pass with penalties


@dataclasses.dataclass(frozen=True, eq=False)
class Transforms:
    """The transforms of logits before a token is drawn, the same at every token of a rollout.

    The filters (top-k, top-p, min-p) are applied to the policy that is scored. They may exclude a
    token that was sampled: the policy has changed since, or the engine's arithmetic differs at the
    edge. Its log-probability would be -inf, which gives no ratio, KL or gradient. Hence the filters
    always keep the sampled token as well. If they keep it anyway, this is the distribution itself.
    If not, the token counts as the least likely one that is kept, with a gradient that can raise
    it. (NeMo-RL takes such tokens out of the loss; DeepSeek-V3.2, arXiv 2512.02556, stores the
    tokens that the filters kept when the token was sampled.) The choice of the filters carries no
    gradient; all other transforms do.

    Attributes:
      options: options of sampling, in one row; `min_len` is the number of response tokens below
        which stop tokens are masked, because lengths here are those of the response.
      features: features of sampling that the options use, static.
    """

    options: Options
    features: Features

    @classmethod
    def of(cls, params: SamplingParams, eos_ids: Sequence[int], vocab: int) -> Transforms:
        """Makes the transforms of a rollout; stop strings are none, because they mask no token."""
        plain = dataclasses.replace(params, n=1, stop=(), transformed_logprobs=False)
        job = make_jobs([0], plain, eos_ids)[0]
        options = option_rows([job], vocab, max(1, len(job.stop_ids)))
        options = options._replace(min_len=np.full(1, params.min_tokens, np.int32))
        return cls(options, features_of(job, vocab))

    def scores(
        self,
        logits: Float[Array, "B R V"],
        tokens: Int[Array, "B R"],
        length: Int[Array, "B R"],
        counts: Counts | None = None,
    ) -> Float[Array, "B R V"]:
        """Transformed scores of the next token at each row; -inf for excluded tokens.

        Args:
          logits: raw logits.
          tokens: sampled next tokens, which the filters always keep.
          length: number of response tokens up to each row.
          counts: counts of the tokens up to the row; required for penalties, and then R is 1.
        """
        batch = logits.shape[0]
        options = jax.tree.map(
            lambda x: jnp.broadcast_to(jnp.asarray(x), (batch, *x.shape[1:])), self.options
        )
        history = History(jnp.full(batch, -1), counts, None)
        rows = Rows(length, jnp.zeros((*logits.shape[:2], 0), jnp.int32))
        masked = self._split(filters=False)
        scores = sampling.transform(logits.astype(jnp.float32), options, masked, history, rows)
        if not self._filters:
            return scores
        untempered = options._replace(temperature=jnp.ones(batch, jnp.float32))  # they are already
        kept = jax.lax.stop_gradient(scores)
        kept = sampling.transform(kept, untempered, self._split(filters=True), history, rows)
        ids = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
        return jnp.where((kept > -jnp.inf) | (ids == tokens[..., None]), scores, -jnp.inf)

    @property
    def _filters(self) -> bool:
        return self.features.top_k or self.features.top_p or self.features.min_p

    def _split(self, filters: bool) -> Features:
        """The filters alone, or the transforms before them."""
        used = self.features
        if filters:
            return Features(top_k=used.top_k, top_p=used.top_p, min_p=used.min_p)
        return dataclasses.replace(used, top_k=False, top_p=False, min_p=False)


def _processed_rows(how: Scoring, batch: Mapping[str, Array], vocab: int) -> tuple:
    """Returns the counts before the first token, and what `_score_block` reads of each token."""
    tokens, segments, context = batch["tokens"], batch["segment_ids"], how.context
    generated = batch["loss_mask"] > 0
    length = jnp.maximum(batch["positions"] + 1 - _prompt_lengths(generated, segments), 0)
    rows = shift(tokens, 1, context), length
    if not how.transforms.features.penalties:
        return None, rows
    shape = len(tokens), vocab
    nothing = Counts(jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32))
    begins = shift(segments, -1, context) != segments
    return nothing, (*rows, tokens, generated, begins)


def _score_block(
    transforms: Transforms, entropy_gradient: bool, counts: Counts | None, logits, rows
) -> tuple:
    """Scores consecutive tokens: (counts after them, (logprobs, entropies))."""
    if counts is None:
        return None, _score(transforms, entropy_gradient, logits, *rows)
    return _score_in_order(transforms, entropy_gradient, counts, logits, *rows)


def _prompt_lengths(generated: Bool[Array, "R S"], segments: Int[Array, "R S"]) -> Array:
    """[R S]: number of prompt tokens of each token's sample."""

    def of_own_segment(given, ids):
        return jax.ops.segment_sum(given, ids, num_segments=ids.shape[0] + 1)[ids]

    return jax.vmap(of_own_segment)((~generated).astype(jnp.int32), segments)


@functools.partial(jax.checkpoint, static_argnums=(0, 1))
def _score(transforms: Transforms, entropy_gradient: bool, logits, following, length):
    scores = transforms.scores(logits, following, length)
    return logprobs_and_entropy(scores, following, entropy_gradient)


def _score_in_order(
    transforms: Transforms,
    entropy_gradient: bool,
    counts,
    logits,
    following,
    length,
    tokens,
    generated,
    begins,
):
    """`_score`, position by position in blocks.

    The backward pass keeps the counts at the beginning of each block, and recomputes the rest.
    """
    rows, positions, vocab = logits.shape

    def one(counts: Counts, now):
        logits, following, length, token, is_generated, begins = now
        one_hot = jax.nn.one_hot(token, vocab, dtype=jnp.int32)
        made = is_generated[:, None]
        prompt = (counts.prompt & ~begins[:, None]) | ((one_hot > 0) & ~made)
        counts = Counts(prompt, jnp.where(begins[:, None], 0, counts.output) + one_hot * made)
        scores = transforms.scores(logits[:, None], following[:, None], length[:, None], counts)
        return counts, logprobs_and_entropy(scores[:, 0], following, entropy_gradient)

    def of_blocks(x):
        return jnp.moveaxis(x, 1, 0).reshape(positions // size, size, *x.shape[:1], *x.shape[2:])

    size = math.gcd(positions, BLOCK)
    blocks = jax.tree.map(of_blocks, (logits, following, length, tokens, generated, begins))
    block = jax.checkpoint(lambda counts, now: jax.lax.scan(one, counts, now))
    counts, scores = jax.lax.scan(block, counts, blocks)
    return counts, jax.tree.map(lambda x: jnp.moveaxis(x.reshape(positions, rows), 0, 1), scores)
