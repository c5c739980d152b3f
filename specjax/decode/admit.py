"""Before the first round: read prompts into pages, start sequences in slots, and score prompts.

One prompt is sampled many times, so these are two programs: `prefill` runs the model over a prompt,
piece by piece, and `place` starts a slot that samples it. The slot's table refers to the prompt's
full pages, which are not written any more; of the last page, which the slot fills up, it gets a
copy. `score` reads a prompt for its log-probabilities alone.

Dimensions: B slots, T positions of a piece, S positions whose tokens are scored, X pages of one
sequence; the others are written as words: `prompts`, `new` sequences, `states` of one prompt that a
draft source starts from, and the width of its taps.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from specjax.config.sampling import MAX_TOP_LOGPROBS
from specjax.decode import shards
from specjax.decode.noise import request_keys
from specjax.decode.options import Options
from specjax.decode.sampling import normaliser
from specjax.decode.state import RUNNING, DecodeState, Plan, per_slot, with_pages
from specjax.decode.tree import chain_bits
from specjax.indexing import put, take, take_along
from specjax.interfaces import Memory, Where
from specjax.memory import (
    Commit,
    after_of,
    choose_slots,
    commit,
    copy_pages,
    empty_slots,
    put_slots,
    take_slots,
)
from specjax.models.transformer import Transformer

LOGIT_ROWS = 64  # rows scored at once; the logits of one take 0.6 MB at 150,000 tokens


class Prompts(NamedTuple):
    """What is kept of prompts, beside their pages, for the sequences that start from them.

    Attributes:
      tails: the target's states at the last positions before the root, which the draft source
        starts from; None: it needs none.
      slots: slots of the target's memory after all positions read so far, the root excluded.
    """

    tails: Float[Array, "prompts states taps_width"] | None
    slots: Any


class Piece(NamedTuple):
    """Up to T positions of some prompts.

    Attributes:
      tokens: T + `needs.states` tokens from `start` on; tokens beyond a prompt are arbitrary.
      start: first position, a multiple of the page size, or of T if that is less.
      length: length of the prompt up to which it is read now, root included.
      prompts: row of each prompt in `Prompts`.
      begin: row of the slot that it begins with: its own, or one that another prompt left there.
      keep: row that gets a copy of the slot that it ends with.
      table: pages of each prompt; 0 for the pages of positions that are not to be kept.
    """

    tokens: Int[Array, "prompts T+states"]
    start: Int[Array, " prompts"]
    length: Int[Array, " prompts"]
    prompts: Int[Array, " prompts"]
    begin: Int[Array, " prompts"]
    keep: Int[Array, " prompts"]
    table: Int[Array, "prompts X"]


class Admission(NamedTuple):
    """Sequences to start; a slot that is listed twice is written twice.

    Attributes:
      slots: slot of each sequence.
      prompts: row of each sequence's prompt in `Prompts`.
      source: pages to copy from; 0, with target 0: nothing is copied.
      target: page that each of these is copied to.
      tokens: tokens known of each sequence, right padded.
      lengths: number of these tokens.
      limit: length at which each sequence ends.
      words: words that identify each sample, see `noise.request_words`.
      options: sampling options of each sequence.
    """

    slots: Int[Array, " new"]
    prompts: Int[Array, " new"]
    source: Int[Array, " copies"]
    target: Int[Array, " copies"]
    tokens: Int[Array, "new max_len"]
    lengths: Int[Array, " new"]
    limit: Int[Array, " new"]
    words: UInt32[Array, "new 5"]
    options: Options


def empty_prompts(plan: Plan, prompts: int, more: int = 0) -> Prompts:
    """Makes empty rows for a number of prompts, and `more` slots."""
    tails = None
    if plan.source is not None and plan.source.needs.states:
        width = len(plan.taps) * plan.cfg.hidden_size
        shape = (prompts, plan.source.needs.states, width)
        tails = jnp.zeros(shape, jnp.dtype(plan.cfg.run.compute_dtype))
    return Prompts(tails, empty_slots(plan.cfg, prompts + more))


def prefill(
    model: Transformer,
    draft_params,
    plan: Plan,
    state: DecodeState,
    kept: Prompts,
    piece: Piece,
) -> tuple[DecodeState, Prompts, Int[Array, "prompts T M ..."] | None]:
    """Runs a piece of some prompts through target and draft source, and writes it to their memory.

    Rows past a prompt's end are written to pages as well, and never visible. A piece that
    starts at position 0 begins with an empty slot, whatever an earlier prompt left in its row.

    Args:
      kept: what is kept of all prompts; the rows of the piece's prompts are updated.

    Returns:
      the state, what is kept, and the records of the positions, see `Mlp.run`.
    """
    tail = plan.source.needs.states if plan.source else 0
    count, start, table = piece.tokens.shape[1] - tail, piece.start, piece.table
    positions = start[:, None] + jnp.arange(count)
    where = Where("tree", positions, prefix=start, visible=chain_bits(count), table=table)
    before = take_slots(kept.slots, piece.begin)
    slots = choose_slots(start == 0, empty_slots(plan.cfg, len(start)), before)
    target = Memory(state.memory.pages, slots)
    found = model.decode(piece.tokens[:, :count], where, target, taps=plan.taps)
    records = found.records
    to = Commit(start, table, after_of(found.x))
    known = jnp.clip(piece.length - 1 - start, 0, count)  # without the root
    target = commit(plan.cfg, target, found.scratch, None, known, to)
    for rows in (piece.prompts, piece.keep):
        kept = kept._replace(slots=put_slots(kept.slots, rows, target.slots))
    state = state._replace(memory=state.memory._replace(pages=target.pages))
    if plan.source is None:
        return state, kept, records
    hidden = found.tapped
    memory = state.draft._replace(
        pages=plan.source.prefill(
            model, draft_params, state.draft.pages, piece.tokens, start, hidden, table
        )
    )
    if tail:
        # The states of the last positions before the root, as far as they lie in this piece.
        at = piece.length[:, None] - 1 - tail + jnp.arange(tail) - start[:, None]
        found = take_along(hidden, jnp.clip(at, 0, count - 1)[..., None], axis=1)
        inside = ((at >= 0) & (at < count))[..., None]
        found = jnp.where(inside, found.astype(kept.tails.dtype), kept.tails[piece.prompts])
        kept = kept._replace(tails=kept.tails.at[piece.prompts].set(found))
    return state._replace(draft=memory), kept, records


def place(plan: Plan, state: DecodeState, kept: Prompts, new: Admission) -> DecodeState:
    """Starts sequences in slots; the last token of each becomes its root."""
    draft = None
    pages = copy_pages(state.memory.pages, new.source, new.target)
    draft_pages = None
    if plan.source is not None:
        draft_pages = state.draft.pages
        if draft_pages is not None:
            draft_pages = copy_pages(draft_pages, new.source, new.target)
        states = None if kept.tails is None else take(kept.tails, new.prompts)
        started = plan.source.start(new.tokens, new.options.prompt_len, states)
        draft = plan.source.pause(Memory(None, started), state.draft.slots)
    # A prompt of one token is the root alone: none of it was read, and its row holds an old slot.
    slots = take_slots(kept.slots, new.prompts)
    empty = empty_slots(plan.cfg, len(new.slots))
    slots = choose_slots(new.lengths == 1, empty, slots)
    fresh = DecodeState(
        tokens=new.tokens,
        length=new.lengths,
        limit=new.limit,
        finish=jnp.full_like(new.lengths, RUNNING),
        keys=request_keys(new.words),
        options=new.options,
        memory=Memory(None, slots),
        draft=draft,
    )
    own = jax.tree.map(lambda x, y: put(x, new.slots, y), per_slot(state), fresh)
    copied = state._replace(
        memory=state.memory._replace(pages=pages),
        draft=state.draft and state.draft._replace(pages=draft_pages),
    )
    return with_pages(own, copied)


# --- scores of prompts ----------------------------------------------------------------------------


class Scores(NamedTuple):
    """How likely each token of a prompt was, and the `top` = min(20, V) most likely tokens there.

    Log-probabilities are those of the raw logits: a prompt was not sampled, and so has no
    temperature.

    Attributes:
      logprobs: log-probability of the token that follows each position.
      ranks: rank of that token, 1 for the most likely one.
      top_ids: ids of the most likely tokens, best first.
      top_logprobs: log-probabilities of the most likely tokens.
      valid: whether the logits are a distribution, see `normaliser`; else the rest is arbitrary.
    """

    logprobs: Float[Array, "B S"]
    ranks: Int[Array, "B S"]
    top_ids: Int[Array, "B S top"]
    top_logprobs: Float[Array, "B S top"]
    valid: Bool[Array, "B S"]


def score(
    model: Transformer,
    memory: Memory,
    tokens: Int[Array, "B S+1"],
    start: Int[Array, " B"],
    table: Int[Array, "B X"],
) -> tuple[Memory, Scores]:
    """Reads S positions of each prompt, as `prefill` does, and scores the tokens that follow them.

    Logits are made for some positions at a time: those of all would take B S V numbers.

    Args:
      memory: memory of these prompts alone: pages, of which the first belongs to no prompt, and a
        slot for each.
      tokens: S + 1 tokens from `start` on; tokens past a prompt's end are arbitrary, and so are
        their scores.
      start: first position that is read, a multiple of S.
      table: the pages of each prompt.
    """
    batch, width = tokens.shape[0], tokens.shape[1] - 1
    positions = start[:, None] + jnp.arange(width)
    where = Where("tree", positions, prefix=start, visible=chain_bits(width), table=table)
    slots = choose_slots(start == 0, empty_slots(model.cfg, batch), memory.slots)
    memory = Memory(memory.pages, slots)
    found = model.decode(tokens[:, :-1], where, memory)
    hidden = found.x
    to = Commit(start, table, after_of(hidden))
    # Slots are advanced over what is beyond a prompt as well: they are not read after it.
    count = jnp.full_like(start, width)
    memory = commit(model.cfg, memory, found.scratch, None, count, to)
    piece = math.gcd(width, max(1, LOGIT_ROWS // batch))
    untempered = jnp.ones(batch, jnp.float32)

    def one(piece):
        states, token = piece
        logits = shards.pin(model.logits(states))
        log_sum, valid = normaliser(logits, untempered)
        total = log_sum[..., None]
        chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)
        best, ids = shards.top_k(logits, min(MAX_TOP_LOGPROBS, logits.shape[-1]))
        ranks = 1 + (logits > chosen).sum(axis=-1, dtype=jnp.int32)
        return Scores((chosen - total)[..., 0], ranks, ids, best - total, valid)

    def pieces(x):
        return jnp.moveaxis(x.reshape(batch, width // piece, piece, *x.shape[2:]), 1, 0)

    scores = jax.lax.map(one, (pieces(hidden), pieces(tokens[:, 1:])))
    scores = jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, width, *x.shape[3:]), scores
    )
    return memory, scores
