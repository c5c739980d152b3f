"""What a chunk reports beside tokens: log-probabilities, accepted drafts, and why drafts failed.

A round returns what it knows (`Round`); `write` computes the report from it. Buffers as large as a
chunk can fill lie on the device, are written once per round and read by the host once per chunk.
Which of them exist is static: what is not asked for is None, and the compiled program holds neither
its buffer nor its arithmetic.

Two distributions appear. The *temperature-scaled* one is the raw logits over T: what a trainer
recomputes. The *transformed* one is what is sampled, after penalties, bias, masks and filters. At
T = 0 both are scored at T = 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.config.sampling import MAX_TOP_LOGPROBS
from specjax.decode import sampling, shards
from specjax.decode.noise import ring_at
from specjax.decode.options import Features
from specjax.decode.state import RUNNING, Plan, put_positions
from specjax.indexing import put, take
from specjax.models.transformer import record_shape

if TYPE_CHECKING:
    from specjax.decode.accept import Acceptance
    from specjax.decode.draft import DraftedTree
    from specjax.decode.sampling import Context, Rows
    from specjax.decode.state import DecodeState


class TopLogprobs(NamedTuple):
    """The N most likely tokens at each position, best first; N = min(20, V).

    Entry k of slot b is about the token at absolute position begin[b] + k.

    Attributes:
      ids, logprobs: of the temperature-scaled distribution.
      transformed_ids, transformed_logprobs: of the transformed one (-inf past its support); None
        unless transformed logprobs are asked for.
    """

    ids: Int[Array, "B C N"]
    logprobs: Float[Array, "B C N"]
    transformed_ids: Int[Array, "B C N"] | None
    transformed_logprobs: Float[Array, "B C N"] | None


class Rejections(NamedTuple):
    """Why drafts were rejected, one entry per round and slot; in a chunk, per round and sequence.

    A rejection is a round whose walk ended at a tree row that has drafted children, none of which
    was accepted. (A path accepted down to a leaf is none.) There is at most one per slot and round.

    Attributes:
      accepted: drafts that the walk accepted, before stop tokens and limits cut it; -1 where the
        slot was not running or does not speculate, and in rounds that did not run.
      valid: the round ended in a rejection; elsewhere the fields below are meaningless.
      emitted: False where a stop token or a limit ended the sample before the target token.
      position: absolute position of the rejected token. depth: its depth in the tree, 1 or more.
      draft_token: the rejected child; the best of them where there are several.
      target_token: what the target emitted there instead.
      draft_logprob: of the draft token in the draft's own transformed distribution.
      target_logprob, draft_token_target_logprob: of the target token and of the draft token in the
        target's transformed distribution.
      entropy: nats, of the target's temperature-scaled distribution.
      top_p_mass: temperature-scaled mass of the tokens that masks, top-k, top-p and min-p keep.
      outside_mask, outside_filter: the draft token cannot be sampled, because of a mask (allowed
        ids, bad words, minimum length) or because of top-k, top-p or min-p.
      penalty_changed: without penalties the outcome at this row would have been another: the token
        chosen with the same noise in `coupled` and `greedy`, the most likely one elsewhere.
    """

    accepted: Int[Array, "R B"]
    valid: Bool[Array, "R B"]
    emitted: Bool[Array, "R B"]
    position: Int[Array, "R B"]
    depth: Int[Array, "R B"]
    draft_token: Int[Array, "R B"]
    target_token: Int[Array, "R B"]
    draft_logprob: Float[Array, "R B"]
    target_logprob: Float[Array, "R B"]
    draft_token_target_logprob: Float[Array, "R B"]
    entropy: Float[Array, "R B"]
    top_p_mass: Float[Array, "R B"]
    outside_mask: Bool[Array, "R B"]
    outside_filter: Bool[Array, "R B"]
    penalty_changed: Bool[Array, "R B"]


class Report(NamedTuple):
    """The buffers of one chunk; None is what the plan does not ask for.

    C is the number of tokens that a slot can emit in a chunk, rounds * (steps + 1). Entry k of slot
    b is about the token at absolute position begin[b] + k. A chunk has one row per sequence of its
    row map, and rounds write to those of the sequences that they run, see `take_sequences`.

    Attributes:
      logprobs: [B C] log-probability of each emitted token in the temperature-scaled distribution.
      counts: [R B] tokens emitted per round, after stop tokens and limits; 0 where a slot was not
        running, and in rounds that did not run.
      accepted: [R B] drafts that the walk accepted, before stop tokens and limits cut it; -1 where
        the slot was not running or does not speculate, and in rounds that did not run. Plain
        decoding accepts 0.
      transformed: [B C] as `logprobs`, in the transformed distribution.
      records: [B C M ..] of the rows that decided the tokens, see `specjax.interfaces.Mlp.run`;
        None: the model has no layers that record anything.
    """

    logprobs: Float[Array, "B C"]
    counts: Int[Array, "R B"]
    accepted: Int[Array, "R B"]
    transformed: Float[Array, "B C"] | None = None
    top: TopLogprobs | None = None
    rejections: Rejections | None = None
    records: Int[Array, "B C M ..."] | None = None


_OF_ROUNDS = ("counts", "accepted", "rejections")


class Round(NamedTuple):
    """What a round knows once it has accepted, for `write`.

    Attributes:
      state: before the round. context: the history that the transforms saw.
      draft: None in plain decoding.
      accepted: the emitted tokens along the path, before stop tokens and limits; none that was
        drawn from logits that are no distribution.
      count: [B] tokens emitted after stop tokens and limits; 0 where a slot is not running.
      invalid: [B] slots whose walk ended at logits that are no distribution.
      logits, scores: [B E V] the target's raw and transformed logits at the rows after which these
        tokens were emitted. rows: those rows (depth [E], paths [B E D]).
      records: [B E M ..] of these rows; None: the model records nothing.
    """

    state: DecodeState
    context: Context
    draft: DraftedTree | None
    accepted: Acceptance
    count: Int[Array, " B"]
    invalid: Bool[Array, " B"]
    logits: Float[Array, "B E V"]
    scores: Float[Array, "B E V"]
    rows: Rows
    records: Int[Array, "B E M ..."] | None


def start(plan: Plan, batch: int, rounds: int) -> Report:
    """Makes empty buffers for a chunk of at most `rounds` rounds (static)."""
    features, room = plan.features, rounds * (plan.steps + 1)
    top_n = min(MAX_TOP_LOGPROBS, plan.cfg.vocab_size)
    transformed = top = rejections = None
    if features.transformed_logprobs:
        transformed = jnp.zeros((batch, room), jnp.float32)
    if features.top_logprobs:
        ids = jnp.full((batch, room, top_n), -1, jnp.int32)
        logprobs = jnp.full((batch, room, top_n), -jnp.inf, jnp.float32)
        both = features.transformed_logprobs
        top = TopLogprobs(ids, logprobs, ids if both else None, logprobs if both else None)
    number = jnp.zeros((rounds, batch), jnp.int32)
    if plan.telemetry and plan.tree is not None:
        real, flag = number.astype(jnp.float32), number.astype(bool)
        rejections = Rejections(
            accepted=number - 1,
            valid=flag,
            emitted=flag,
            position=number,
            depth=number,
            draft_token=number,
            target_token=number,
            draft_logprob=real,
            target_logprob=real,
            draft_token_target_logprob=real,
            entropy=real,
            top_p_mass=real,
            outside_mask=flag,
            outside_filter=flag,
            penalty_changed=flag,
        )
    logprobs, records = jnp.zeros((batch, room), jnp.float32), None
    if (shape := record_shape(plan.cfg)) is not None:
        records = jnp.full((batch, room, *shape), -1, jnp.int32)
    return Report(logprobs, number, number - 1, transformed, top, rejections, records)


def write(
    report: Report,
    plan: Plan,
    index: Int[Array, ""],
    begin: Int[Array, " B"],
    step: Round,
) -> Report:
    """Adds one round.

    Args:
      index: rounds of this chunk before this one.
      begin: lengths of the slots when the chunk began.
    """

    def put(buffer, values):
        return put_positions(buffer, values, step.state.length - begin, step.count)

    def put_round(buffer, values):
        return jax.lax.dynamic_update_index_in_dim(buffer, values, index, 0)

    temperature, tokens = step.state.options.temperature, step.accepted.tokens
    logprobs = sampling.chosen_logprobs(step.logits, temperature, tokens)
    transformed, top, rejections = report.transformed, report.top, report.rejections
    if transformed is not None:
        transformed = put(transformed, _logprob_of(step.scores, tokens))
    if top is not None:
        top = jax.tree.map(jax.vmap(put, (2, 2), 2), top, _top(step, top))
    if rejections is not None:
        rejections = jax.tree.map(put_round, rejections, _rejection(plan, step))
    records = report.records
    if records is not None:
        flat = (x.reshape(*x.shape[:2], -1) for x in (records, step.records))
        records = jax.vmap(put, (2, 2), 2)(*flat).reshape(records.shape)
    return Report(
        put(report.logprobs, logprobs),
        put_round(report.counts, step.count),
        put_round(report.accepted, _accepted(step)),
        transformed,
        top,
        rejections,
        records,
    )


def take_sequences(report: Report, sequences: Int[Array, " rows"]) -> Report:
    """Takes the report of some sequences, for the rounds of their batch to write to."""
    return _by_sequence(lambda x: take(x, sequences), report)


def put_sequences(report: Report, sequences: Int[Array, " rows"], new: Report) -> Report:
    """Writes what `take_sequences` took back into the whole report."""
    return _by_sequence(lambda x, new: put(x, sequences, new), report, new)


def _by_sequence(change: Callable[..., Array], *reports: Report) -> Report:
    """Changes every buffer as if it had sequences in front; those of rounds have them behind."""

    def behind(*buffers):
        return jnp.swapaxes(change(*(jnp.swapaxes(x, 0, 1) for x in buffers)), 0, 1)

    return Report(
        **{
            name: jax.tree.map(
                behind if name in _OF_ROUNDS else change,
                *(getattr(report, name) for report in reports),
            )
            for name in Report._fields
        }
    )


def _accepted(step: Round) -> Int[Array, " B"]:
    """Drafts accepted before the path was cut, -1 where a slot does not run or speculate."""
    counted = step.state.finish == RUNNING
    if step.draft is not None:
        counted &= step.state.options.speculate
    return jnp.where(counted, step.accepted.count - 1, -1)


def _logprob_of(scores: Float[Array, "... V"], tokens: Int[Array, "..."]) -> Array:
    picked = jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(scores, axis=-1)


def _top(step: Round, like: TopLogprobs) -> TopLogprobs:
    """The best tokens after each row of the path, in the distributions that `like` has."""
    number = like.ids.shape[-1]
    scaled = sampling.tempered(step.logits, step.state.options.temperature)
    logprobs, ids = shards.top_k(jax.nn.log_softmax(scaled), number)
    new = TopLogprobs(ids, logprobs, None, None)
    if like.transformed_ids is not None:
        logprobs, ids = shards.top_k(jax.nn.log_softmax(step.scores), number)
        new = new._replace(transformed_ids=ids, transformed_logprobs=logprobs)
    return new


# --- why drafts were rejected ---------------------------------------------------------------------


class _End(NamedTuple):
    """The row at which each slot's walk ended.

    Attributes:
      index: [B] its index along the path. logits, scores: [B V] the target's there.
      rows: the same row for `sampling.transform`.
    """

    index: Int[Array, " B"]
    logits: Float[Array, "B V"]
    scores: Float[Array, "B V"]
    rows: Rows


def _end(step: Round) -> _End:
    index = jnp.maximum(step.accepted.count - 1, 0)

    def at(x):
        return jnp.take_along_axis(x, index[:, None, None], axis=1)

    rows = step.rows._replace(depth=index[:, None], path=at(step.rows.path))
    return _End(index, at(step.logits)[:, 0], at(step.scores)[:, 0], rows)


def _rejection(plan: Plan, step: Round) -> Rejections:
    """The record of one round, all fields [B]."""
    state, draft, options = step.state, step.draft, step.state.options
    end = _end(step)
    child, has_children = _best_child(step)
    drafted = jnp.maximum(jnp.take_along_axis(draft.tokens, child, axis=1)[:, 0], 0)
    target = jnp.take_along_axis(step.accepted.tokens, end.index[:, None], axis=1)[:, 0]
    ran = (state.finish == RUNNING) & options.speculate
    scaled = jax.nn.softmax(sampling.tempered(end.logits, options.temperature))
    outside_mask, outside_filter = _outside(plan.features, step, end, drafted)
    return Rejections(
        accepted=_accepted(step),
        valid=ran & has_children & ~step.invalid,
        emitted=step.count > end.index,
        position=state.length + end.index,
        depth=end.index + 1,
        draft_token=drafted,
        target_token=target,
        draft_logprob=jnp.take_along_axis(draft.logprobs, child, axis=1)[:, 0],
        target_logprob=_logprob_of(end.scores, target),
        draft_token_target_logprob=_logprob_of(end.scores, drafted),
        entropy=jax.scipy.special.entr(scaled).sum(-1),
        top_p_mass=jnp.where(jnp.isneginf(end.scores), 0.0, scaled).sum(-1),
        outside_mask=outside_mask,
        outside_filter=outside_filter,
        penalty_changed=_penalty_changed(plan, step, end),
    )


def _best_child(step: Round) -> tuple[Int[Array, "B 1"], Bool[Array, " B"]]:
    """The first valid child of the row at which the walk ended, and whether there is one."""
    index = jnp.maximum(step.accepted.count - 1, 0)[:, None]
    last = jnp.take_along_axis(step.accepted.path, index, axis=1)
    below = jnp.asarray(step.draft.shape.parent) == last  # [B T]; the root is its own parent
    below &= (jnp.arange(below.shape[1]) > 0) & (step.draft.tokens >= 0)
    return jnp.argmax(below, axis=1)[:, None], below.any(axis=1)


def _scores(features: Features, step: Round, end: _End) -> Float[Array, "B V"]:
    """The target's scores at the end of the walk, if requests asked for `features` alone."""
    options = step.state.options
    logits = end.logits[:, None]
    return sampling.transform(logits, options, features, step.context, end.rows)[:, 0]


def _outside(
    features: Features, step: Round, end: _End, token: Int[Array, " B"]
) -> tuple[Bool[Array, " B"], Bool[Array, " B"]]:
    """Whether `token` cannot be sampled: because of a mask, or because of a filter alone."""

    def excluded(scores):
        return jnp.isneginf(jnp.take_along_axis(scores, token[:, None], axis=1)[:, 0])

    masks = features.allowed or features.bad_words or features.min_tokens
    filters = features.top_k or features.top_p or features.min_p
    outside, no = excluded(end.scores), jnp.zeros(token.shape, bool)
    if not (masks and filters):
        return (outside if masks else no), (outside if filters else no)
    unfiltered = dataclasses.replace(features, top_k=False, top_p=False, min_p=False)
    by_mask = outside & excluded(_scores(unfiltered, step, end))
    return by_mask, outside & ~by_mask


def _penalty_changed(plan: Plan, step: Round, end: _End) -> Bool[Array, " B"]:
    """Whether another token would have been chosen there without penalties."""
    if not plan.features.penalties:
        return jnp.zeros(step.count.shape, bool)

    def choice(scores):
        if plan.draws_noise:
            noise = ring_at(step.state.noise, (step.state.length + end.index)[:, None])[:, 0]
            scores = sampling.perturb(scores, step.state.options.temperature, noise)
        return shards.argmax(scores)

    without = _scores(dataclasses.replace(plan.features, penalties=False), step, end)
    return choice(without) != choice(end.scores)
