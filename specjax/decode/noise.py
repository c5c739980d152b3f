"""Every random number that decides a token, and what it is keyed by.

The noise that decides the token at an absolute position is a function of (request key, position)
and of nothing else: not of batch, slot, round, tree, strategy or draft. A request key is made of
(seed, prompt, sample index). Plain decoding, drafting and verification look up the same noise, so
they choose the same token from the same logits (accept.py).

    target_noise   keyed by (request, TARGET, position): decides tokens
    round_noise    keyed by (request, domain, root, node): the draws of `block` and `recursive`
    round_coins    keyed by (request, ACCEPT, root, node): their tests

All noise is Gumbel noise: the argmax of log-weights plus Gumbel noise is a draw from them.

The noise of all positions that a round may decide is drawn at the round's start (`draw_ahead`).

Dimensions: B slots, R rows of a tree, C columns, V vocabulary.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from specjax.decode import shards
from specjax.indexing import take_along

TARGET, DRAFT, ACCEPT, RESIDUAL = 0, 1, 2, 3  # domains: no two uses share a key


def request_words(seed: int, prompt: Sequence[int], sample: int) -> np.ndarray:
    """Computes the uint32 words that identify one sample of one request, on the host.

    They are the two halves of the seed, two of the prompt's digest, and the sample's index.
    """
    digest = hashlib.blake2b(np.asarray(prompt, "<u4").tobytes(), digest_size=8).digest()
    prompt_words = np.frombuffer(digest, "<u4")
    seed = int(seed) % (1 << 64)  # a negative one as its two's complement
    return np.array(
        [seed & 0xFFFFFFFF, seed >> 32, prompt_words[0], prompt_words[1], sample], np.uint32
    )


def request_keys(words: UInt32[Array, "B 5"]) -> UInt32[Array, "B 2"]:
    """Computes the request key of each sample, as raw threefry key data."""
    words = jnp.asarray(words)
    return jnp.stack(_folded((words[:, 0], words[:, 1]), *words[:, 2:].T), axis=-1)


@jax.named_scope("noise")
def target_noise(
    keys: UInt32[Array, "B 2"], positions: Int[Array, "B positions"], vocab: int
) -> Float[Array, "B positions V"]:
    """Generates the Gumbel noise that decides the tokens at absolute `positions`."""
    # Nothing but request and position is folded in: so tokens do not depend on the tree.
    words = _folded(_columns(keys), TARGET, positions)
    return shards.pin(_gumbel(words, positions.shape, vocab))


# The noise of the positions root + 1, root + 2, ... that a round may decide, one array for each.
Ahead = tuple[Float[Array, "B V"], ...]


@jax.named_scope("noise")
def draw_ahead(
    keys: UInt32[Array, "B 2"], root: Int[Array, " B"], count: int, vocab: int, chain: bool
) -> Ahead:
    """Draws the noise of the positions root + 1 .. root + count of all slots.

    Each platform has a way of its own to draw a number once that several operations read.

    Args:
      chain: whether the tree is a chain, see `one_by_one`.
    """
    return jax.lax.platform_dependent(
        keys,
        root[:, None] + 1 + jnp.arange(count),
        tpu=functools.partial(one_by_one, vocab=vocab, chain=chain),
        cuda=functools.partial(at_once, vocab=vocab),
        default=functools.partial(in_a_loop, vocab=vocab),
    )


def in_a_loop(
    keys: UInt32[Array, "B 2"], positions: Int[Array, "B positions"], vocab: int
) -> Ahead:
    """Draws on a CPU, whose compiler drops barriers: what a loop has made lies in memory."""
    rows = jax.lax.map(lambda at: target_noise(keys, at[:, None], vocab)[:, 0], positions.T)
    return tuple(shards.pin(row) for row in rows)


def one_by_one(
    keys: UInt32[Array, "B 2"], positions: Int[Array, "B positions"], vocab: int, chain: bool
) -> Ahead:
    """Draws on a TPU.

    A position is an array of its own, in which slots lie side by side in a TPU's vectors. A block
    of 64 rows of 37,984 numbers takes 150 thousand cycles, which the cipher's additions and shifts
    need at least.

    Args:
      chain: whether the tree is a chain. The rows of a chain are stacked as they are drawn. In
        other trees the compiler would draw several positions in one operation, whose ciphers do
        not fit into registers together, and which took 5 times as long: there each draw waits for
        the last one.
    """
    count = positions.shape[1]
    if chain:  # each [B 1 V]: arrays [B V] are drawn twice, to be drafted with and to be stacked
        return tuple(target_noise(keys, positions[:, [i]], vocab)[:, 0] for i in range(count))
    words = _folded(_columns(keys), TARGET, positions)
    rows = []
    for i in range(count):
        of_position = tuple(word[:, i] for word in words)
        if rows:
            of_position, rows[-1] = jax.lax.optimization_barrier((of_position, rows[-1]))
        rows.append(shards.pin(_gumbel(of_position, (len(keys),), vocab)))
    return tuple(rows)


def at_once(keys: UInt32[Array, "B 2"], positions: Int[Array, "B positions"], vocab: int) -> Ahead:
    """Draws on a GPU, by one operation whose result lies in memory.

    A number takes about 160 integer operations, of which an H100 does 1.5e13 per second: a row of
    151,936 numbers is drawn in about 2 microseconds.
    """
    # Without a barrier the compiler draws it again for each of its readers.
    drawn = jax.lax.optimization_barrier(target_noise(keys, positions, vocab))
    return tuple(drawn[:, i] for i in range(positions.shape[1]))


@jax.named_scope("noise")
def noise_at(
    ahead: Ahead,
    keys: UInt32[Array, "B 2"],
    root: Int[Array, " B"],
    depth: np.ndarray | Int[Array, "*B R"],
    ids: Int[Array, "*R C"] | None = None,
) -> Float[Array, "B R V"]:
    """Returns the noise that decides the positions root + 1 + depth.

    Args:
      ahead: what `draw_ahead` returned.
      depth: [R] or [B R] depths of rows. Where they are known to the program (numpy), and all
        different, nothing is selected.
      ids: [C] or [B R C] ids of the tokens whose noise is returned; None: all tokens. An id outside
        of the vocabulary gets an arbitrary number.
    """
    shape = len(root), depth.shape[-1]
    if ids is not None:  # to draw some columns costs less than to gather them
        words = _folded(_columns(keys), TARGET, jnp.broadcast_to(root[:, None] + 1 + depth, shape))
        vocab = ahead[0].shape[-1]
        return _gumbel(words, shape, vocab, jnp.clip(ids, 0, vocab - 1))
    if isinstance(depth, np.ndarray) and len(set(depth.flat)) == depth.size:
        return shards.pin(jnp.stack([ahead[d] for d in depth], axis=1))
    depth = jnp.broadcast_to(depth, shape)[..., None]
    return shards.pin(jax.lax.platform_dependent(ahead, depth, tpu=selected, default=gathered))


def selected(ahead: Ahead, depth: Int[Array, "B R 1"]) -> Float[Array, "B R V"]:
    """Picks rows by a chain of selections: a TPU's gather takes longer."""
    found = ahead[0][:, None]
    for i, row in enumerate(ahead[1:], start=1):
        found = jnp.where(depth == i, row[:, None], found)
    return jnp.broadcast_to(found, (*depth.shape[:2], found.shape[-1]))


def gathered(ahead: Ahead, depth: Int[Array, "B R 1"]) -> Float[Array, "B R V"]:
    """Picks rows by a gather, which reads each number once."""
    return take_along(jnp.stack(ahead, axis=1), depth, axis=1)


@jax.named_scope("noise")
def round_noise(
    keys: UInt32[Array, "B 2"],
    domain: int,
    root: Int[Array, " B"],
    nodes: Int[Array, " R"],
    vocab: int,
) -> Float[Array, "B R V"]:
    """Generates noise private to nodes of one round, for `block` and `recursive`.

    Args:
      domain: use of the noise: DRAFT or RESIDUAL.
      root: position of each slot's root.
      nodes: numbers of the nodes in the tree.
    """
    # A draw that decided something may not be met again in a later round: root is folded in.
    words = _folded(_columns(keys), domain, root[:, None], jnp.asarray(nodes))
    return shards.pin(_gumbel(words, (len(root), len(nodes)), vocab))


@jax.named_scope("noise")
def round_coins(
    keys: UInt32[Array, "B 2"], root: Int[Array, " B"], nodes: Int[Array, " R"]
) -> Float[Array, "B R"]:
    """Generates uniform numbers in (0, 1) that test the drafted tokens at `nodes` of one round."""
    words = _folded(_columns(keys), ACCEPT, root[:, None], jnp.asarray(nodes))
    return _uniform(words, jnp.uint32(0)) + jnp.finfo(jnp.float32).tiny


# --- the generator --------------------------------------------------------------------------------

# Threefry-2x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), unrolled. The
# numbers are those of `jax.random` with "threefry2x32", whatever `jax_threefry_partitionable` says.
# On CPU jax runs the cipher as a loop, to compile sooner, and XLA starts a dozen operations for
# each turn of it: the noise of one round took as long as several layers of a small policy. Unrolled
# it is one operation.

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def threefry2x32(key: tuple[Array, Array], x0: Array, x1: Array) -> tuple[Array, Array]:
    """Applies the cipher's 20 rounds to counters `x0`, `x1`; words and counters broadcast."""
    words = key[0], key[1], key[0] ^ key[1] ^ _PARITY
    x0, x1 = x0 + words[0], x1 + words[1]
    for group in range(5):
        for by in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << np.uint32(by)) | (x1 >> np.uint32(32 - by)))
        x0 = x0 + words[(group + 1) % 3]
        x1 = x1 + words[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def _columns(keys: UInt32[Array, "B 2"]) -> tuple[Array, Array]:
    return keys[:, :1], keys[:, 1:]


def _folded(words: tuple[Array, Array], *data: int | Array) -> tuple[Array, Array]:
    """Folds numbers into the two words of keys, as `jax.random.fold_in` does, elementwise."""
    for value in data:
        words = threefry2x32(words, jnp.uint32(0), jnp.asarray(value).astype(jnp.uint32))
    return words


def _uniform(words: tuple[Array, Array], counter: Array) -> Array:
    """Computes numbers in [0, 1) of keys and counters, as `jax.random.uniform` does."""
    bits = jnp.bitwise_xor(*threefry2x32(words, jnp.uint32(0), counter))
    exponent_of_one = np.float32(1).view(np.uint32)
    number = jax.lax.bitcast_convert_type((bits >> 9) | exponent_of_one, jnp.float32)
    return number - 1


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def _gumbel(
    words: tuple[Array, Array],
    shape: tuple[int, ...],
    vocab: int,
    ids: Int[Array, "*R C"] | None = None,
) -> Float[Array, "*R V"]:
    """Computes `jax.random.gumbel(key, (vocab,), mode="high")` of keys of a shape, or some of it.

    Each number takes two uniform ones, those of counters id and vocab + id. They are computed side
    by side, not as one array of both: so it is one operation, with nothing in memory but the
    result. (The default mode caps at 15.94 and is biased below probabilities of about 1e-7.)

    Args:
      words: the two words of the keys; they broadcast to the shape.
      ids: ids of the numbers, as those of `noise_at`; None: all of them.
    """
    if ids is None:  # no reshape: a split axis stays split
        ids = jax.lax.broadcasted_iota(jnp.uint32, (*shape, vocab), len(shape))
    words, ids = tuple(word[..., None] for word in words), ids.astype(jnp.uint32)
    high, low = _uniform(words, ids), _uniform(words, ids + np.uint32(vocab))
    info = jnp.finfo(jnp.float32)
    x = jnp.where(high >= 0.5, high, high + 2**-info.nmant * low + info.tiny)
    return -jnp.log(-jnp.log1p(-x))
