"""A chunk of rounds as one program: the host is asked once per chunk, not once per token."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.decode import report
from specjax.decode.history import count_tokens
from specjax.decode.plan import Plan
from specjax.decode.report import Report
from specjax.decode.round import Side, plain_round, spec_round
from specjax.decode.state import RUNNING, DecodeState, take_positions
from specjax.models.transformer import Transformer


class Result(NamedTuple):
    """What the host reads of a chunk, apart from the state, which the next chunk takes over.

    Attributes:
      tokens: [B C] emitted, the first length - begin of each row. length, finish: [B] afterwards.
      rounds: that ran. report: one entry per token, or per round and slot.
      who: [B] ran in each row, see `take_over`; None: those that the chunk was started with.
    """

    tokens: Int[Array, "B C"]
    length: Int[Array, " B"]
    finish: Int[Array, " B"]
    rounds: Int[Array, ""]
    report: Report
    who: Int[Array, " B"] | None = None


def run_chunk(
    model: Transformer,
    draft_params,
    plan: Plan,
    state: DecodeState,
    capacity: int,
    max_rounds: Int[Array, ""],
    leave_at: Int[Array, ""],
) -> tuple[DecodeState, Result]:
    """Rounds until all slots are done, `max_rounds` are, or no more than `leave_at` slots run.

    Args:
      state: as `take_slots` gives it. capacity: rounds that the report has room for; `max_rounds`
        is at most that.
    """
    batch = state.length.shape[0]
    counts = hidden = None
    if plan.features.penalties:
        prompt_len, vocab = state.options.prompt_len, plan.cfg.vocab_size
        counts = count_tokens(state.tokens, state.length, prompt_len, vocab)
    between = state.draft and state.draft.slots
    if plan.tree is not None:
        memory = plan.source.enter(model, draft_params, state, plan.steps)
        state = state._replace(draft=memory)
    elif plan.source is not None and plan.source.tail:
        shape = (batch, capacity, plan.cfg.hidden_size)
        hidden = jnp.zeros(shape, jnp.dtype(plan.cfg.compute_dtype))
    side = Side(counts, report.start(plan, batch, capacity), state.length, hidden)

    def go_on(carry):
        state, _, rounds = carry
        running = (state.finish == RUNNING).sum()
        return (running > leave_at) & (rounds < max_rounds)

    def body(carry):
        state, side, rounds = carry
        if plan.tree is None:
            state, side = plain_round(model, plan, state, side, rounds)
        else:
            state, side = spec_round(model, draft_params, plan, state, side, rounds)
        return state, side, rounds + 1

    state, side, rounds = jax.lax.while_loop(go_on, body, (state, side, jnp.int32(0)))
    if plan.tree is not None:
        state = state._replace(draft=plan.source.leave(state.draft, between))
    elif plan.source is not None:
        count = state.length - side.begin
        states = jnp.zeros((batch, 0, 0)) if side.hidden is None else side.hidden
        state = state._replace(draft=plan.source.follow(state.draft, states, count))
    room = capacity * (plan.steps + 1)
    tokens = take_positions(state.tokens, side.begin, room)
    return state, Result(tokens, state.length, state.finish, rounds, side.report)
