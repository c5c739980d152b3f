"""Drives a draft source by hand, without a target: random trees, random acceptance."""

import functools
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.config.model import LogitForm
from specjax.decode.state import EMPTY, RUNNING
from specjax.decode.tree import ancestors, pack_bits
from specjax.drafts import ABSORBED
from specjax.interfaces import Level, Memory, Room

GARBAGE = 1e3  # states of what was not accepted or does not exist: far from any real one


class Target(NamedTuple):
    """What a head reads of the policy."""

    embed: jax.Array
    lm_head: jax.Array

    @property
    def cfg(self):
        return SimpleNamespace(logits=LogitForm())

    def embed_tokens(self, tokens, scaled=True):
        return self.embed[jnp.clip(tokens, 0, len(self.embed) - 1)]

    def head_weight(self):
        return self.lm_head


class Options(NamedTuple):
    """What sources read of `specjax.decode.options.Options`."""

    prompt_len: jax.Array


class State(NamedTuple):
    """What sources read of `DecodeState`."""

    tokens: jax.Array
    length: jax.Array
    finish: jax.Array
    keys: jax.Array
    options: Options
    draft: Memory
    table: jax.Array | None


def empty_state(source, batch, max_len, steps, page_size=None) -> State:
    """Every slot empty, as between chunks of up to `steps` steps.

    Args:
      page_size: of pages in no order, the last entry of the table is of no slot; None: a page each.
    """
    pages, size, table = batch, max_len + 2 * ABSORBED + steps + 1, None
    if page_size is not None:
        width = -(-max_len // page_size)
        pages, size = 1 + batch * width, page_size
        order = np.random.default_rng(batch).permutation(batch * width) + 1
        table = jnp.asarray(np.pad(order.reshape(batch, width), [(0, 0), (0, 1)]), jnp.int32)
    return State(
        tokens=jnp.zeros((batch, max_len), jnp.int32),
        length=jnp.ones((batch,), jnp.int32),
        finish=jnp.full((batch,), EMPTY, jnp.int32),
        keys=jnp.zeros((batch, 2), jnp.uint32),
        options=Options(jnp.ones((batch,), jnp.int32)),
        draft=source.empty(Room(batch, pages, size), steps),
        table=table,
    )


def place(state: State, source, params, prompts, width, model=None, hidden=None) -> State:
    """Reads one prompt per slot, in pieces of `width` positions, and starts the slots.

    Args:
      hidden: [B max_len D] the target's states, for sources that look at them.
    """
    batch, max_len = state.tokens.shape
    tokens = np.zeros((batch, max_len), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = jnp.array([len(p) for p in prompts], jnp.int32)
    if hidden is None:
        hidden = jnp.zeros((batch, max_len, 1))
    pages, known = state.draft.pages, np.pad(tokens, [(0, 0), (0, width + source.needs.states)])
    for start in range(0, max(map(len, prompts)), width):
        piece = known[:, start : start + width + source.needs.states]
        states = jnp.pad(hidden, [(0, 0), (0, width), (0, 0)])[:, start : start + width]
        begin = jnp.full((batch,), start, jnp.int32)
        pages = _prefill(source, model, params, pages, piece, begin, states, state.table)
    tail = None
    if source.needs.states:
        tail = states_at(hidden, lengths - 1 - source.needs.states, source.needs.states)
    started = source.start(jnp.asarray(tokens), lengths, tail)
    return state._replace(
        tokens=jnp.asarray(tokens),
        length=lengths,
        finish=jnp.full_like(lengths, RUNNING),
        keys=jnp.arange(2 * batch, dtype=jnp.uint32).reshape(-1, 2),
        options=Options(lengths),
        draft=source.pause(Memory(pages, started), state.draft.slots),
    )


@functools.partial(jax.jit, static_argnums=0)
def _prefill(source, model, params, pages, tokens, start, hidden, table):
    return source.prefill(model, params, pages, tokens, start, hidden, table)


def states_at(hidden, start, count):
    """hidden[b, start[b] : start[b] + count]; far too large where there is no such position."""
    at = start[:, None] + np.arange(count)
    inside = (at >= 0) & (at < hidden.shape[1])
    found = jnp.take_along_axis(hidden, jnp.where(inside, at, 0)[..., None], axis=1)
    return jnp.where(inside[..., None], found, GARBAGE)


def resume(state: State, source, params, steps, model=None) -> State:
    """Begins a chunk of rounds of `steps` steps."""
    return state._replace(draft=_resume(source, steps, model, params, state))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _resume(source, steps, model, params, state):
    return source.resume(model, params, state, steps)


def pause(state: State, source, between) -> State:
    """Ends a chunk of rounds; `between`: slots of a memory as it is between chunks."""
    return state._replace(draft=source.pause(state.draft, between))


def plain(state: State, source, emitted: np.ndarray, count: np.ndarray, hidden=None) -> State:
    """A chunk of plain decoding that emits the first count[b] of the tokens [B R].

    Args:
      hidden: as for `place`.
    """
    states = _states_of(state, emitted, count, hidden)
    memory = _follow(source, state.draft, states, jnp.asarray(count))
    return _append(state, emitted, count)._replace(draft=memory)


@functools.partial(jax.jit, static_argnums=0)
def _follow(source, memory, hidden, count):
    return source.commit(memory, None, hidden, count)


class Grown(NamedTuple):
    """A random tree per slot: R rows per level.

    Attributes:
      tokens: per level [B R]. parents: per level [B R] rows of the level before (0: the root).
    """

    tokens: list
    parents: list


def random_tree(rng, batch, widths, vocab, shared) -> Grown:
    """`widths` rows per level; `shared`: one shape for all slots."""
    tokens, parents, above = [], [], 1
    for width in widths:
        shape = (1 if shared else batch, width)
        parents.append(np.broadcast_to(rng.integers(0, above, shape), (batch, width)))
        tokens.append(rng.integers(0, vocab, (batch, width)).astype(np.int32))
        above = width
    return Grown(tokens, parents)


def relabelled(rng, grown: Grown, vocab) -> Grown:
    """The same shape with other tokens: no new program."""
    fresh = [rng.integers(0, vocab, t.shape).astype(np.int32) for t in grown.tokens]
    return grown._replace(tokens=fresh)


def paths_of(grown: Grown, level: int) -> np.ndarray:
    """[B R level + 1] tokens from below the root down to each row of a level."""
    tokens, parents = grown.tokens[level], grown.parents[level]
    if level == 0:
        return tokens[..., None]
    above = np.take_along_axis(paths_of(grown, level - 1), parents[..., None], axis=1)
    return np.concatenate([above, tokens[..., None]], axis=-1)


def levels_of(grown: Grown, shared: bool) -> list[Level]:
    """The levels as the core hands them out: numpy constants if the shape is shared."""
    total = sum(t.shape[1] for t in grown.tokens)
    rows = np.cumsum([0] + [t.shape[1] for t in grown.tokens])
    levels = []
    for i, (tokens, parents) in enumerate(zip(grown.tokens, grown.parents, strict=True)):
        seen = np.stack([_seen(grown, b, rows, i) for b in range(len(tokens))])
        here = seen[:, rows[i] : rows[i + 1]]
        levels.append(
            Level(
                step=i + 1,
                offset=int(rows[i]),
                total=int(total),
                tokens=jnp.asarray(tokens),
                parents=parents[0] if shared else jnp.asarray(parents),
                visible=pack_bits(here[0]) if shared else pack_bits(jnp.asarray(here)),
                path=jnp.asarray(paths_of(grown, i)),
            )
        )
    return levels


def _seen(grown: Grown, slot: int, rows: np.ndarray, last: int) -> np.ndarray:
    """Booleans [n n] over the rows of levels 0..last; rows of level 0 have no parent here."""
    parent = [np.arange(rows[1])]
    parent += [grown.parents[i][slot] + rows[i - 1] for i in range(1, last + 1)]
    return ancestors(np.concatenate(parent))


def propose(source, params, state: State, grown: Grown, shared: bool, model=None):
    """Runs one round's begin and steps: logits per level, the root's first, and the work."""
    static, arrays = [], []
    for level in levels_of(grown, shared):
        shape = (level.parents, level.visible)
        constants = None
        if shared:  # enter the program as the numpy constants that they are in the core
            constants, shape = tuple((x.tobytes(), x.dtype.str, x.shape) for x in shape), None
        static.append((level.step, level.offset, level.total, constants))
        arrays.append((level.tokens, shape, level.path))
    found, work = _propose(source, tuple(static), params, state, arrays, model)
    return [np.asarray(x) for x in found], work


@functools.partial(jax.jit, static_argnums=(0, 1))
def _propose(source, static, params, state, arrays, model):
    total = static[0][2] if static else 0
    proposal, work = source.begin(model, params, state, len(static) + 1, total)
    found = [dense(source, proposal)]
    for (*fixed, constants), (tokens, shape, path) in zip(static, arrays, strict=True):
        if constants is not None:
            shape = [np.frombuffer(x, dtype).reshape(size) for x, dtype, size in constants]
        proposal, work = source.step(model, params, work, Level(*fixed, tokens, *shape, path))
        found.append(dense(source, proposal))
    return found, work


def dense(source, proposal):
    """Logits of all tokens [B R V], -inf where none were given."""
    if proposal.ids is None:
        return proposal.scores
    batch, rows, _ = proposal.scores.shape
    vocab = source.cfg.target_vocab if hasattr(source, "taps_width") else source.vocab
    ids = jnp.broadcast_to(proposal.ids, proposal.scores.shape)
    slot, row = jnp.ogrid[:batch, :rows]
    logits = jnp.full((batch, rows, vocab), -jnp.inf)
    return logits.at[slot[..., None], row[..., None], ids].set(proposal.scores, mode="drop")


def accept(
    state: State, source, work, emitted: np.ndarray, count: np.ndarray, hidden=None
) -> State:
    """Appends the first count[b] of the emitted tokens [B E]; 0 where a slot does not run.

    Args:
      hidden: as for `place`.
    """
    states = _states_of(state, emitted, count, hidden)
    memory = source.commit(state.draft, work, states, jnp.asarray(count))
    return _append(state, emitted, count)._replace(draft=memory)


def _append(state: State, emitted: np.ndarray, count: np.ndarray) -> State:
    tokens, length = np.array(state.tokens), np.asarray(state.length)
    for b, n in enumerate(count):
        tokens[b, length[b] : length[b] + n] = emitted[b, :n]
    return state._replace(tokens=jnp.asarray(tokens), length=jnp.asarray(length + count))


def _states_of(state: State, emitted: np.ndarray, count: np.ndarray, hidden):
    """The states after which tokens were emitted, the root's first, and garbage past `count`."""
    if hidden is None:
        return jnp.zeros((*emitted.shape, 1))
    states = states_at(hidden, state.length - 1, emitted.shape[1])
    kept = np.arange(emitted.shape[1]) < count[:, None]
    return jnp.where(kept[..., None], states, GARBAGE)
