"""A chunk of rounds as one program: the host is asked once per chunk, not once per token.

A chunk has more sequences (its row map) than its batch has rows. It repeats three steps:

    take over     rows whose sequences have ended are given to sequences that wait
    rounds        rounds of this fixed batch, until enough rows are free to be worth a take-over
    put back      the state of each row's sequence is written to its slot

So a free row is idle for a few rounds at most; the host could refill it only after the chunk.
Results are by sequence, not by row. Noise is keyed by request and position, so tokens do not depend
on which row a sequence has, or when.

Dimensions: sequences of the row map, `rows` of the batch, `tokens` that a sequence can emit in the
chunk.
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
    """The limits of a chunk: it ends at the first one reached, or when every sequence has ended.

    Attributes:
      rounds: the chunk ends after this many rounds.
      leave_at: the chunk ends once no sequence waits for a row and this many or fewer still run: a
        smaller batch can run those. 0: this limit is off.
      ended: the chunk ends once this many of its sequences have ended: the host has other sequences
        for their rows. NEVER: this limit is off.
    """

    rounds: Int[Array, ""]
    leave_at: Int[Array, ""]
    ended: Int[Array, ""]

    @property
    def may_be_early(self) -> bool:
        """Whether the chunk may end before its rounds are over, although sequences still run."""
        return bool(self.leave_at or self.ended != NEVER)

    @classmethod
    def of(cls, rounds: int, leave_at: int = 0, ended: int = NEVER) -> Until:
        """Makes the limits from the host's numbers."""
        return cls(np.int32(rounds), np.int32(leave_at), np.int32(ended))


class Result(NamedTuple):
    """What the host reads of a chunk; the state stays on the device.

    Attributes:
      tokens: [sequences tokens] emitted tokens of each sequence of the row map; only the first
        `length` minus the length at the start of the chunk are valid.
      length: [sequences] length of each sequence after the chunk.
      finish: [sequences] `DecodeState.finish` of each sequence after the chunk.
      rounds: number of rounds that ran.
      report: log-probabilities and counts, one entry per token, or per round and sequence.
    """

    tokens: Int[Array, "sequences tokens"]
    length: Int[Array, " sequences"]
    finish: Int[Array, " sequences"]
    rounds: Int[Array, ""]
    report: Report


class _Carry(NamedTuple):
    """The state of a chunk between its batches.

    Attributes:
      state: decode state of all slots.
      report: report of all sequences so far.
      row_to_sequence: [rows] index into the row map of the sequence that has each row.
      rounds: number of rounds that the chunk has run so far.
      begun: whether a batch has run, perhaps for no rounds: so an empty chunk costs what one batch
        costs beside its rounds, which the calibration measures.
    """

    state: DecodeState
    report: Report
    row_to_sequence: Int[Array, " rows"]
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
    """Runs rounds of a row map's sequences, as many sequences at once as there are rows.

    Args:
      state: decode state of all slots.
      rows: number of rows of the batch (static). The first `rows` sequences of the row map start
        with a row, and at least one of them is active.
      capacity: number of rounds that the report has room for; `until.rounds` is at most that.
      pin: function that lays the state of a batch over a mesh.
      part: the part of the plan's tree that is drafted; None: all of it.
    """
    begin, sequences = take(state.length, row_map.slots), len(row_map.slots)
    free_rows_wanted = max(1, rows // TAKE_OVER_SHARE)
    running_at_start = row_map.running(state).sum()

    def assign_rows(state, row_to_sequence):
        """Returns the sequence of each row after a take-over, the number of sequences that run, the
        number that wait, and the number that may still end before `until.ended` is reached."""
        unfinished = row_map.running(state)
        row_to_sequence = take_over(unfinished, row_map.active, row_to_sequence)
        running, remaining = take(unfinished, row_to_sequence).sum(), unfinished.sum()
        may_end = until.ended - (running_at_start - remaining)
        return row_to_sequence, running, remaining - running, may_end

    def go_on(carry: _Carry):
        _, running, waiting, may_end = assign_rows(carry.state, carry.row_to_sequence)
        goes_on = (may_end > 0) & ((running > until.leave_at) | (waiting > 0))
        return ~carry.begun | ((carry.rounds < until.rounds) & goes_on)

    def run_rows(carry: _Carry):
        row_to_sequence, running, waiting, may_end = assign_rows(carry.state, carry.row_to_sequence)
        entries = row_map.of(row_to_sequence)
        # Where sequences wait the batch ends when enough rows are free to be taken over.
        keep = jnp.where(waiting > 0, jnp.maximum(running - free_rows_wanted, 0), until.leave_at)
        stop_at = jnp.maximum(keep, running - may_end)
        batch, batch_report, rounds = _run_batch(
            model,
            draft_params,
            plan,
            part,
            pin(take_slots(carry.state, entries)),
            report.take_sequences(carry.report, row_to_sequence),
            take(begin, row_to_sequence),
            carry.rounds,
            until.rounds,
            stop_at,
        )
        state = put_slots(carry.state, batch, entries.slots)
        whole = report.put_sequences(carry.report, row_to_sequence, batch_report)
        return _Carry(state, whole, row_to_sequence, rounds, jnp.bool_(True))

    start = _Carry(
        state,
        report.start(plan, sequences, capacity),
        jnp.arange(rows, dtype=jnp.int32),
        jnp.int32(0),
        jnp.bool_(False),
    )
    state, whole, _, rounds, _ = jax.lax.while_loop(go_on, run_rows, start)
    most_tokens = capacity * (plan.steps + 1)
    tokens = take_positions(take(state.tokens, row_map.slots), begin, most_tokens)
    length, finish = (take(x, row_map.slots) for x in (state.length, state.finish))
    return state, Result(tokens, length, finish, rounds, whole)


def _run_batch(
    model: Transformer,
    draft_params,
    plan: Plan,
    part: TreePart | None,
    state: DecodeState,
    batch_report: Report,
    begin: Int[Array, " rows"],
    rounds_before: Int[Array, ""],
    max_rounds: Int[Array, ""],
    stop_at: Int[Array, ""],
) -> tuple[DecodeState, Report, Int[Array, ""]]:
    """Runs rounds of one batch until the chunk has had `max_rounds`, or `stop_at` rows still run.

    Args:
      state: decode state of the batch.
      batch_report: report of the batch's sequences.
      begin: lengths of the batch's sequences when the chunk began.
      rounds_before: number of rounds that the chunk ran before this batch.
      max_rounds: number of rounds after which the chunk ends.
      stop_at: number of running rows at or below which the batch ends.

    Returns:
      the state of the batch, its report, and the number of rounds of the chunk so far.
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
        shape = (batch, len(batch_report.counts), len(taps) * plan.cfg.hidden_size)
        hidden = jnp.zeros(shape, jnp.dtype(plan.cfg.run.compute_dtype))

    def go_on(carry):
        state, _, _, rounds = carry
        return ((state.finish == RUNNING).sum() > stop_at) & (rounds < max_rounds)

    def body(carry):
        state, batch_report, hidden, rounds = carry
        if plan.tree is None:
            state, step, tapped = plain_round(model, plan, state, taps)
            if hidden is not None:
                at = (0, rounds - rounds_before, 0)
                hidden = jax.lax.dynamic_update_slice(hidden, tapped.astype(hidden.dtype), at)
        else:
            state, step = spec_round(model, draft_params, plan, state, part)
        return state, report.write(batch_report, plan, rounds, begin, step), hidden, rounds + 1

    state, batch_report, hidden, rounds = jax.lax.while_loop(
        go_on, body, (state, batch_report, hidden, rounds_before)
    )
    if plan.tree is not None:
        state = state._replace(draft=source.pause(state.draft, between))
    elif source is not None:
        states = jnp.zeros((batch, 0, 0)) if hidden is None else hidden
        emitted = state.length - length
        state = state._replace(draft=source.commit(state.draft, None, states, emitted))
    return state, batch_report, rounds
