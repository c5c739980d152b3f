"""What a chunk reports beside tokens: log-probabilities, and which drafted tokens were accepted.

A round returns what it knows (`Round`); `write` computes the report from it. Buffers as large as a
chunk can fill lie on the device, are written once per round and read by the host once per chunk.
Which of them exist is static: a field that is not asked for is None, and the compiled program holds
neither its buffer nor its arithmetic.

Two distributions appear. The *temperature-scaled* one is the raw logits over T: what a trainer
recomputes. The *transformed* one is what is sampled, after penalties, bias, masks and filters. At
T = 0 both are scored at T = 1.

Dimensions: B slots (in the report of a chunk: sequences), A = steps + 1 tokens that a round can
emit at most, V vocabulary, M layers that record facts; the others are written as words: `rounds` of
the chunk, `tokens` that a slot can emit in the chunk, rounds * A, and `top` = min(20, V).
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
from specjax.decode.noise import noise_at
from specjax.decode.options import Features
from specjax.decode.state import RUNNING, Plan, put_positions
from specjax.indexing import put, take
from specjax.models.transformer import no_records, record_form

if TYPE_CHECKING:
    from specjax.decode.accept import Acceptance
    from specjax.decode.draft import DraftedTree
    from specjax.decode.sampling import Context, Rows
    from specjax.decode.state import DecodeState


class TopLogprobs(NamedTuple):
    """The most likely tokens at each position, best first.

    Entry k of slot b is about the token at absolute position begin[b] + k.

    Attributes:
      ids: ids of the most likely tokens in the temperature-scaled distribution.
      logprobs: their log-probabilities in it.
    """

    ids: Int[Array, "B tokens top"]
    logprobs: Float[Array, "B tokens top"]


class Rejections(NamedTuple):
    """Why drafted tokens were rejected, one entry per round and slot.

    A rejection is a round whose accepted path ended at a tree row that has drafted children, none
    of which was accepted. (A path accepted down to a leaf is no rejection.) There is at most one
    per slot and round.

    Attributes:
      accepted: number of accepted drafted tokens, before stop tokens and limits cut the path; -1
        where the slot was not running or does not speculate, and in rounds that did not run.
      valid: whether the round ended in a rejection; where not, the fields below are meaningless.
      emitted: whether the target token was emitted; False where a stop token or a limit ended the
        sample before it.
      position: absolute position of the rejected token.
      depth: depth of the rejected token in the tree, 1 or more.
      draft_token: id of the rejected child; of the best one where there are several.
      target_token: id of the token that the target emitted there instead.
      draft_logprob: log-probability of the draft token in the draft's own transformed distribution.
      target_logprob: log-probability of the target token in the target's transformed distribution.
      draft_token_target_logprob: log-probability of the draft token in that distribution.
      entropy: entropy of the target's temperature-scaled distribution, in nats.
      top_p_mass: temperature-scaled mass of the tokens that masks, top-k, top-p and min-p keep.
      outside_mask: whether the draft token cannot be sampled because of a mask (allowed ids, bad
        words, minimum length).
      outside_filter: whether it cannot be sampled because of top-k, top-p or min-p.
      penalty_changed: whether the outcome at this row would have been another without penalties:
        the token chosen with the same noise in `coupled` and `greedy`, the most likely one in the
        other modes.
    """

    accepted: Int[Array, "rounds B"]
    valid: Bool[Array, "rounds B"]
    emitted: Bool[Array, "rounds B"]
    position: Int[Array, "rounds B"]
    depth: Int[Array, "rounds B"]
    draft_token: Int[Array, "rounds B"]
    target_token: Int[Array, "rounds B"]
    draft_logprob: Float[Array, "rounds B"]
    target_logprob: Float[Array, "rounds B"]
    draft_token_target_logprob: Float[Array, "rounds B"]
    entropy: Float[Array, "rounds B"]
    top_p_mass: Float[Array, "rounds B"]
    outside_mask: Bool[Array, "rounds B"]
    outside_filter: Bool[Array, "rounds B"]
    penalty_changed: Bool[Array, "rounds B"]


class Report(NamedTuple):
    """The buffers of one chunk; fields that the plan does not ask for are None.

    Entry k of slot b is about the token at absolute position begin[b] + k. A chunk has one row per
    sequence of its row map, and a round writes to the rows of the sequences that it runs, see
    `take_sequences`.

    Attributes:
      logprobs: log-probability of each emitted token in the temperature-scaled distribution.
      counts: number of tokens emitted per round, after stop tokens and limits; 0 where a slot was
        not running, and in rounds that did not run.
      accepted: number of accepted drafted tokens, before stop tokens and limits cut the path; -1
        where the slot was not running or does not speculate, and in rounds that did not run. Plain
        decoding accepts 0.
      transformed: log-probability of each emitted token in the transformed distribution.
      top: the most likely tokens at each position.
      rejections: why drafted tokens were rejected.
      records: facts of the rows that decided the tokens, see `specjax.interfaces.Mlp.run`; None:
        the model has no layers that record anything.
    """

    logprobs: Float[Array, "B tokens"]
    counts: Int[Array, "rounds B"]
    accepted: Int[Array, "rounds B"]
    transformed: Float[Array, "B tokens"] | None = None
    top: TopLogprobs | None = None
    rejections: Rejections | None = None
    records: Int[Array, "B tokens M ..."] | None = None


_OF_ROUNDS = ("counts", "accepted", "rejections")


class Round(NamedTuple):
    """What a round knows once it has accepted, for `write`.

    Attributes:
      state: decode state before the round.
      context: the history that the transforms saw.
      draft: the drafted tree; None in plain decoding.
      accepted: the emitted tokens along the accepted path, before stop tokens and limits, and
        without tokens that were drawn from logits that are no distribution.
      count: number of tokens emitted after stop tokens and limits; 0 where a slot is not running.
      invalid: whether the accepted path ended at logits that are no distribution.
      logits: the target's raw logits at the rows after which these tokens were emitted.
      scores: the target's transformed logits at these rows.
      rows: depth and path of these rows.
      records: facts of these rows; None: the model records nothing.
    """

    state: DecodeState
    context: Context
    draft: DraftedTree | None
    accepted: Acceptance
    count: Int[Array, " B"]
    invalid: Bool[Array, " B"]
    logits: Float[Array, "B A V"]
    scores: Float[Array, "B A V"]
    rows: Rows
    records: Int[Array, "B A M ..."] | None


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
        top = TopLogprobs(ids, logprobs)
    number = jnp.zeros((rounds, batch), jnp.int32)
    if plan.telemetry and plan.tree is not None:
        real, flag = number.astype(jnp.float32), number.astype(bool)
        # In the order of its fields.
        rejections = Rejections(number - 1, flag, flag, *[number] * 4, *[real] * 5, *[flag] * 3)
    logprobs, records = jnp.zeros((batch, room), jnp.float32), None
    if (form := record_form(plan.cfg)) is not None:
        records = jnp.asarray(no_records(form, batch, room))
    return Report(logprobs, number, number - 1, transformed, top, rejections, records)


def write(
    report: Report,
    plan: Plan,
    index: Int[Array, ""],
    begin: Int[Array, " B"],
    step: Round,
) -> Report:
    """Writes one round to the buffers.

    Args:
      index: number of rounds of this chunk before this one.
      begin: lengths of the slots when the chunk began.
      step: what the round knows.
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
    """Changes every buffer along its axis of sequences, which is behind rounds in some of them."""

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
    """Counts accepted drafted tokens; -1 where a slot does not run or does not speculate."""
    counted = step.state.finish == RUNNING
    if step.draft is not None:
        counted &= step.state.options.speculate
    return jnp.where(counted, step.accepted.count - 1, -1)


def _logprob_of(scores: Float[Array, "... V"], tokens: Int[Array, "..."]) -> Array:
    picked = jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(scores, axis=-1)


def _top(step: Round, like: TopLogprobs) -> TopLogprobs:
    """Finds as many best tokens after each row of the path as `like` has."""
    number = like.ids.shape[-1]
    scaled = sampling.tempered(step.logits, step.state.options.temperature)
    logprobs, ids = shards.top_k(jax.nn.log_softmax(scaled), number)
    return TopLogprobs(ids, logprobs)


# --- why drafted tokens were rejected -------------------------------------------------------------


class _End(NamedTuple):
    """The row at which each slot's accepted path ended.

    Attributes:
      index: index of the row along the path.
      logits: the target's raw logits at the row.
      scores: the target's transformed logits at the row.
      rows: depth and path of the row, for `sampling.transform`.
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
    """Computes the rejections of one round, all fields [B]."""
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
    """Finds the first valid child of the row at which the path ended, and whether there is one."""
    index = jnp.maximum(step.accepted.count - 1, 0)[:, None]
    last = jnp.take_along_axis(step.accepted.path, index, axis=1)
    below = jnp.asarray(step.draft.shape.parent) == last  # [B T]; the root is its own parent
    below &= (jnp.arange(below.shape[1]) > 0) & (step.draft.tokens >= 0)
    return jnp.argmax(below, axis=1)[:, None], below.any(axis=1)


def _scores(features: Features, step: Round, end: _End) -> Float[Array, "B V"]:
    """Computes the target's scores at the end of the path, if only `features` were asked for."""
    options = step.state.options
    logits = end.logits[:, None]
    return sampling.transform(logits, options, features, step.context, end.rows)[:, 0]


def _outside(
    features: Features, step: Round, end: _End, token: Int[Array, " B"]
) -> tuple[Bool[Array, " B"], Bool[Array, " B"]]:
    """Returns whether a mask excludes `token`, and whether a filter alone excludes it."""

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
    """Returns whether another token would have been chosen there without penalties."""
    if not plan.features.penalties:
        return jnp.zeros(step.count.shape, bool)

    def choice(scores):
        if plan.draws_noise:
            state, index = step.state, end.index[:, None]
            noise = noise_at(state.noise, state.keys, state.length - 1, index)[:, 0]
            scores = sampling.perturb(scores, step.state.options.temperature, noise)
        return shards.argmax(scores)

    without = _scores(dataclasses.replace(plan.features, penalties=False), step, end)
    return choice(without) != choice(end.scores)
