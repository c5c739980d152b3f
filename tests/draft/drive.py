"""Drives a draft source by hand, without a target: random trees, random acceptance."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.state import EMPTY, RUNNING
from specjax.decode.tree import ancestors, pack_bits, pack_words
from specjax.draft.source import Level


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
    draft: object


def empty_state(source, batch, max_len, steps) -> State:
    """Every slot empty."""
    slots = max_len + max(source.margin(steps), steps + 1)
    return State(
        tokens=jnp.zeros((batch, max_len), jnp.int32),
        length=jnp.ones((batch,), jnp.int32),
        finish=jnp.full((batch,), EMPTY, jnp.int32),
        keys=jnp.zeros((batch, 2), jnp.uint32),
        options=Options(jnp.ones((batch,), jnp.int32)),
        draft=source.empty(batch, slots, steps),
    )


def place(state: State, source, params, steps, prompts, width) -> State:
    """Prefills one prompt per slot; caches of `width` slots go to the front of the state's."""
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = jnp.array([len(p) for p in prompts], jnp.int32)
    memory = source.prefill(None, params, steps, jnp.asarray(tokens), lengths, None)

    def write(full, part):
        assert full.dtype == part.dtype
        return jax.lax.dynamic_update_slice(full, part, (0,) * full.ndim)

    return state._replace(
        tokens=state.tokens.at[:, :width].set(tokens),
        length=lengths,
        finish=jnp.full_like(lengths, RUNNING),
        keys=jnp.arange(2 * len(prompts), dtype=jnp.uint32).reshape(-1, 2),
        options=Options(lengths),
        draft=jax.tree.map(write, state.draft, memory),
    )


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
                visible=pack_bits(here[0]) if shared else pack_words(jnp.asarray(here)),
                path=jnp.asarray(paths_of(grown, i)),
            )
        )
    return levels


def _seen(grown: Grown, slot: int, rows: np.ndarray, last: int) -> np.ndarray:
    """Booleans [n n] over the rows of levels 0..last; rows of level 0 have no parent here."""
    parent = [np.arange(rows[1])]
    parent += [grown.parents[i][slot] + rows[i - 1] for i in range(1, last + 1)]
    return ancestors(np.concatenate(parent))


def propose(source, params, state: State, grown: Grown, shared: bool):
    """Runs one round's extend and steps: logits per level, the root's first, and the work."""
    levels = levels_of(grown, shared)
    logits, work = extend(source, params, state, len(levels) + 1, levels[0].total if levels else 0)
    found = [logits]
    for level in levels:
        fixed = (level.step, level.offset, level.total)
        shape = (level.parents, level.visible)
        constants = None
        if shared:  # enter the program as the numpy constants that they are in the core
            constants, shape = tuple((x.tobytes(), x.dtype.str, x.shape) for x in shape), None
        logits, work = _step(
            source, params, work, fixed, constants, level.tokens, shape, level.path
        )
        found.append(logits)
    return [np.asarray(x) for x in found], work


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def extend(source, params, state, steps, total):
    return source.extend(None, params, state, steps, total)


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _step(source, params, work, fixed, constants, tokens, shape, path):
    if constants is not None:
        shape = [np.frombuffer(x, dtype).reshape(size) for x, dtype, size in constants]
    return source.step(None, params, work, Level(*fixed, tokens, *shape, path))


def accept(state: State, source, work, emitted: np.ndarray, count: np.ndarray) -> State:
    """Appends the first count[b] of the emitted tokens [B E]; 0 where a slot does not run."""
    tokens, length = np.array(state.tokens), np.asarray(state.length)
    for b, n in enumerate(count):
        tokens[b, length[b] : length[b] + n] = emitted[b, :n]
    hidden = jnp.zeros((*emitted.shape, 1))
    return state._replace(
        tokens=jnp.asarray(tokens),
        length=jnp.asarray(length + count),
        draft=source.commit(state.draft, work, hidden, jnp.asarray(count)),
    )
