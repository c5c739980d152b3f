"""A chunk of rounds as one program: the host is asked once per chunk, not once per token.

    take over     rows whose sequences have ended go to those that wait
    rounds        of a fixed batch, until so many rows are free that it pays to take over again
    put back      what the rounds left of each sequence, to its slot

More sequences than there are rows are started, so a row is idle for a few rounds at most, where
refilling it from the host would leave it idle until the chunk's end, and the device at the host's
mercy. What a chunk tells is told by sequence, not by row. By the keying of the noise it does not
matter to the tokens which row a sequence has, or when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specjax.decode import report
from specjax.decode.history import count_tokens
from specjax.decode.part import Part
from specjax.decode.plan import Plan
from specjax.decode.report import Report
from specjax.decode.round import Side, plain_round, spec_round
from specjax.decode.state import (
    RUNNING,
    DecodeState,
    RowMap,
    put_slots,
    take_over,
    take_positions,
    take_slots,
)
from specjax.indexing import take
from specjax.models.transformer import Transformer

TAKE_OVER_SHARE = 16  # rows are taken over when one in so many is free: each time costs some copies
NEVER = np.iinfo(np.int32).max


class Until(NamedTuple):
    """When a chunk ends, apart from when nobody is left.

    Attributes:
      rounds: so many ran. leave_at: no more sequences run than that, and none waits: a
        smaller batch is enough for them. ended: so many did: the host has others for their places.
    """

    rounds: Int[Array, ""]
    leave_at: Int[Array, ""]
    ended: Int[Array, ""]

    @property
    def may_be_early(self) -> bool:
        """Whether it may end before its rounds are over, though somebody runs."""
        return bool(self.leave_at or self.ended != NEVER)

    @classmethod
    def of(cls, rounds: int, leave_at: int = 0, ended: int = NEVER) -> Until:
        """From the host's numbers."""
        return cls(np.int32(rounds), np.int32(leave_at), np.int32(ended))


class Result(NamedTuple):
    """What the host reads of a chunk, apart from the state, which the next chunk takes over.

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
    """Between batches of a chunk.

    Attributes:
      who: [b] has each row. rounds: so far. begun: there was a batch, though it may have had none:
        what a chunk costs beside its rounds can be measured.
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
    part: Part | None = None,
) -> tuple[DecodeState, Result]:
    """Rounds of a row map's sequences, as many at once as there are rows.

    Args:
      state: of all slots. rows: static; the first so many of the row map have them to begin with,
        and one at least of those is active. capacity: rounds that the report has room for;
        `until.rounds` is at most that. pin: lays the state of a batch over a mesh.
      part: of the plan's tree that is drafted; None: all of it.
    """
    begin, sequences = take(state.length, row_map.slots), len(row_map.slots)
    few = max(1, rows // TAKE_OVER_SHARE)
    at_first = row_map.running(state).sum()

    def fill(state, who):
        """Who has each row now, how many of them run, how many wait, and how many more may end
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
        side = Side(None, report.take_sequences(carry.report, who), take(begin, who), carry.rounds)
        least = jnp.where(others > 0, jnp.maximum(running - few, 0), until.leave_at)
        enough = jnp.maximum(least, running - more)
        here = pin(take_slots(needed, mine))
        here, side, ran = _run_batch(
            model, draft_params, plan, part, here, side, until.rounds, enough
        )
        state = put_slots(carry.state, here, mine.slots)
        told = report.put_sequences(carry.report, who, side.report)
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
    part: Part | None,
    state: DecodeState,
    side: Side,
    most,
    enough,
) -> tuple[DecodeState, Side, Int[Array, ""]]:
    """Rounds of one batch until the chunk had `most`, or no more than `enough` of its rows run.

    Returns:
      the batch, what is told of it, and the rounds of the chunk so far.
    """
    begin, batch = state.length, state.length.shape[0]
    counts = hidden = None
    if plan.features.penalties:
        prompt_len, vocab = state.options.prompt_len, plan.cfg.vocab_size
        counts = count_tokens(state.tokens, state.length, prompt_len, vocab)
    between = state.draft and state.draft.slots
    if plan.tree is not None:
        memory = plan.source.resume(model, draft_params, state, plan.steps)
        state = state._replace(draft=memory)
    elif plan.source is not None and plan.source.needs.window:
        shape = (batch, side.report.counts.shape[0], len(plan.taps) * plan.cfg.hidden_size)
        hidden = jnp.zeros(shape, jnp.dtype(plan.cfg.run.compute_dtype))
    side = side._replace(counts=counts, hidden=hidden)

    def go_on(carry):
        state, _, rounds = carry
        return ((state.finish == RUNNING).sum() > enough) & (rounds < most)

    def body(carry):
        state, side, rounds = carry
        if plan.tree is None:
            state, side = plain_round(model, plan, state, side, rounds)
        else:
            state, side = spec_round(model, draft_params, plan, state, side, rounds, part)
        return state, side, rounds + 1

    state, side, rounds = jax.lax.while_loop(go_on, body, (state, side, side.first))
    if plan.tree is not None:
        state = state._replace(draft=plan.source.pause(state.draft, between))
    elif plan.source is not None:
        states = jnp.zeros((batch, 0, 0)) if side.hidden is None else side.hidden
        emitted = state.length - begin
        state = state._replace(draft=plan.source.commit(state.draft, None, states, emitted))
    return state, side, rounds
