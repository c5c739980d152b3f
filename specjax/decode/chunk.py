"""A chunk of rounds as one program: the host is asked once per chunk, not once per token.

    take over     rows whose sequences have ended go to sequences that wait
    rounds        of a fixed batch, until so many rows are free that it pays to take over again
    put back      the state of each sequence, to its slot

More sequences are started than there are rows, so that a free row is idle for a few rounds at
most; the host could refill it only after the chunk. Results are by sequence, not by row. Noise is
keyed by request and position, so tokens do not depend on which row a sequence has, or when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specjax.decode import report
from specjax.decode.report import Report
from specjax.decode.round import plain_round, spec_round
from specjax.decode.sampling import count_tokens
from specjax.decode.state import (
    RUNNING,
    DecodeState,
    Plan,
    RowMap,
    put_slots,
    take_over,
    take_positions,
    take_slots,
)
from specjax.decode.tree import TreePart
from specjax.indexing import take
from specjax.models.transformer import Transformer

TAKE_OVER_SHARE = 16  # rows are taken over when one in so many is free: each time costs some copies
NEVER = np.iinfo(np.int32).max


class Until(NamedTuple):
    """When a chunk ends, at the latest when no sequence is left.

    Attributes:
      rounds: when so many ran. leave_at: when no more sequences run than that, and none waits: a
        smaller batch is enough for them. ended: when so many ended: the host has others for them.
    """

    rounds: Int[Array, ""]
    leave_at: Int[Array, ""]
    ended: Int[Array, ""]

    @property
    def may_be_early(self) -> bool:
        """Whether it may end before its rounds are over, although sequences run."""
        return bool(self.leave_at or self.ended != NEVER)

    @classmethod
    def of(cls, rounds: int, leave_at: int = 0, ended: int = NEVER) -> Until:
        """Makes one from the host's numbers."""
        return cls(np.int32(rounds), np.int32(leave_at), np.int32(ended))


class Result(NamedTuple):
    """What the host reads of a chunk; the state stays on the device.

    Attributes:
      tokens: [N C] emitted, by sequence of the row map, the first length - begin of each.
      length, finish: [N] afterwards. rounds: that ran.
      report: one entry per token, or per round and sequence.
    """

    tokens: Int[Array, "N C"]
    length: Int[Array, " N"]
    finish: Int[Array, " N"]
    rounds: Int[Array, ""]
    report: Report


class _Carry(NamedTuple):
    """The state of a chunk between its batches.

    Attributes:
      who: [b] the sequence of each row. rounds: so far.
      begun: there was a batch, perhaps of no rounds: so the cost of an empty chunk can be measured.
    """

    state: DecodeState
    report: Report
    who: Int[Array, " b"]
    rounds: Int[Array, ""]
    begun: Bool[Array, ""]


def run_chunk(
    model: Transformer,
    draft_params,
    plan: Plan,
    state: DecodeState,
    row_map: RowMap,
    rows: int,
    capacity: int,
    until: Until,
    pin: Callable[[DecodeState], DecodeState],
    part: TreePart | None = None,
) -> tuple[DecodeState, Result]:
    """Runs rounds of a row map's sequences, as many at once as there are rows.

    Args:
      state: of all slots.
      rows: static; so many sequences at the front of the row map begin with a row, and at least one
        of them is active.
      capacity: rounds that the report has room for; `until.rounds` is at most that.
      pin: lays the state of a batch over a mesh.
      part: of the plan's tree that is drafted; None: all of it.
    """
    begin, sequences = take(state.length, row_map.slots), len(row_map.slots)
    few = max(1, rows // TAKE_OVER_SHARE)
    at_first = row_map.running(state).sum()

    def fill(state, who):
        """The sequence of each row, how many of them run, how many wait, and how many more may end
        before the chunk does."""
        runs = row_map.running(state)
        who = take_over(runs, row_map.active, who)
        here, all_of_them = take(runs, who).sum(), runs.sum()
        return who, here, all_of_them - here, until.ended - (at_first - all_of_them)

    def go_on(carry: _Carry):
        _, running, others, more = fill(carry.state, carry.who)
        goes_on = (more > 0) & ((running > until.leave_at) | (others > 0))
        return ~carry.begun | ((carry.rounds < until.rounds) & goes_on)

    def run_rows(carry: _Carry):
        who, running, others, more = fill(carry.state, carry.who)
        mine = row_map.of(who)
        needed = carry.state if plan.draws_noise else carry.state._replace(noise=None)
        least = jnp.where(others > 0, jnp.maximum(running - few, 0), until.leave_at)
        enough = jnp.maximum(least, running - more)
        here = pin(take_slots(needed, mine))
        told = report.take_sequences(carry.report, who)
        here, told, ran = _run_batch(
            model,
            draft_params,
            plan,
            part,
            here,
            told,
            take(begin, who),
            carry.rounds,
            until.rounds,
            enough,
        )
        state = put_slots(carry.state, here, mine.slots)
        told = report.put_sequences(carry.report, who, told)
        return _Carry(state, told, who, ran, jnp.bool_(True))

    who, told = jnp.arange(rows, dtype=jnp.int32), report.start(plan, sequences, capacity)
    start = _Carry(state, told, who, jnp.int32(0), jnp.bool_(False))
    state, told, _, ran, _ = jax.lax.while_loop(go_on, run_rows, start)
    room = capacity * (plan.steps + 1)
    tokens = take_positions(take(state.tokens, row_map.slots), begin, room)
    length, finish = (take(x, row_map.slots) for x in (state.length, state.finish))
    return state, Result(tokens, length, finish, ran, told)


def _run_batch(
    model: Transformer,
    draft_params,
    plan: Plan,
    part: TreePart | None,
    state: DecodeState,
    told: Report,
    begin: Int[Array, " b"],
    first: Int[Array, ""],
    most: Int[Array, ""],
    enough: Int[Array, ""],
) -> tuple[DecodeState, Report, Int[Array, ""]]:
    """Runs rounds of one batch until the chunk had `most`, or at most `enough` of its rows run.

    Args:
      told: the report of the batch's sequences. begin: their lengths when the chunk began.
      first: rounds that the chunk had before.

    Returns:
      the batch, its report, and the rounds of the chunk so far.
    """
    length, batch, source = state.length, len(state.length), plan.source
    if plan.features.penalties:
        prompt_len, vocab = state.options.prompt_len, plan.cfg.vocab_size
        counts = count_tokens(state.tokens, state.length, prompt_len, vocab)
        state = state._replace(counts=counts)
    between = state.draft and state.draft.slots
    hidden, taps = None, ()  # states of the roots of plain rounds, for a source that wants them
    if plan.tree is not None:
        state = state._replace(draft=source.resume(model, draft_params, state, plan.steps))
    elif source is not None and source.needs.window:
        taps = plan.taps
        shape = (batch, len(told.counts), len(taps) * plan.cfg.hidden_size)
        hidden = jnp.zeros(shape, jnp.dtype(plan.cfg.run.compute_dtype))

    def go_on(carry):
        state, _, _, rounds = carry
        return ((state.finish == RUNNING).sum() > enough) & (rounds < most)

    def body(carry):
        state, told, hidden, rounds = carry
        if plan.tree is None:
            state, step, tapped = plain_round(model, plan, state, taps)
            if hidden is not None:
                at = (0, rounds - first, 0)
                hidden = jax.lax.dynamic_update_slice(hidden, tapped.astype(hidden.dtype), at)
        else:
            state, step = spec_round(model, draft_params, plan, state, part)
        return state, report.write(told, plan, rounds, begin, step), hidden, rounds + 1

    state, told, hidden, rounds = jax.lax.while_loop(go_on, body, (state, told, hidden, first))
    if plan.tree is not None:
        state = state._replace(draft=source.pause(state.draft, between))
    elif source is not None:
        states = jnp.zeros((batch, 0, 0)) if hidden is None else hidden
        emitted = state.length - length
        state = state._replace(draft=source.commit(state.draft, None, states, emitted))
    return state, told, rounds
