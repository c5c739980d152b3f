"""Every random number that decides a token, keyed so that nothing but the request decides it.

A request key folds (seed, prompt identity, sample index). The noise that picks the token at an
absolute position folds (request key, domain, position) and nothing else: not slot, batch, round,
tree or strategy. Hence the same seed gives the same tokens however they were decoded.

`block` and `recursive` need coins and noise beside that. These fold the root position and the node
as well: a coin that was tested and lost must not be met again in the next round, or the result is
biased.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from specjax.decode import shards
from specjax.decode.threefry import key_of
from specjax.indexing import divide, take, take_along

TARGET, DRAFT, ACCEPT, RESIDUAL = 0, 1, 2, 3
# Rows are drawn a block at a time. A small vocabulary takes all that a round can need at once.
BLOCK_NUMBERS = 1 << 16
WORDS = 5  # seed low, seed high, prompt low, prompt high, sample index


def request_words(seed: int, prompt: Sequence[int], sample: int) -> np.ndarray:
    """Host side: the five uint32 words that identify one sample of one request."""
    digest = hashlib.blake2b(np.asarray(prompt, "<u4").tobytes(), digest_size=8).digest()
    prompt_words = np.frombuffer(digest, "<u4")
    seed = int(seed) % (1 << 64)  # a negative one as its two's complement
    return np.array(
        [seed & 0xFFFFFFFF, seed >> 32, prompt_words[0], prompt_words[1], sample], np.uint32
    )


def request_keys(words: UInt32[Array, "B 5"]) -> UInt32[Array, "B 2"]:
    """Raw threefry key data per sample."""

    def one(word):
        key = key_of(word[:2])
        for i in range(2, WORDS):
            key = jax.random.fold_in(key, word[i])
        return jax.random.key_data(key)

    return jax.vmap(one)(words)


def _fold(key_data: UInt32[Array, " 2"], *data) -> Array:
    key = key_of(key_data)
    for value in data:
        key = jax.random.fold_in(key, value)
    return key


def target_noise(
    keys: UInt32[Array, "B 2"], positions: Int[Array, "B P"], vocab: int
) -> Float[Array, "B P V"]:
    """Gumbel noise that decides the tokens at absolute `positions`.

    `mode="high"`: the default generator caps at 15.94 and is biased below p of about 1e-7.
    """

    def one(key, position):
        return jax.random.gumbel(_fold(key, TARGET, position), (vocab,), jnp.float32, mode="high")

    return shards.pin(jax.vmap(jax.vmap(one, (None, 0)), (0, 0))(keys, positions))


def next_noise(
    keys: UInt32[Array, "B 2"], root: Int[Array, " B"], wanted: Bool[Array, " B"], vocab: int
) -> Float[Array, "B 1 V"]:
    """Gumbel noise for the one position after each root, of the slots that want it.

    A large vocabulary is drawn for these slots only, a block of rows at a time; a small one for all
    at once, which costs less than sorting out whom it is for.
    """
    batch = root.shape[0]
    if batch * vocab <= BLOCK_NUMBERS:
        return target_noise(keys, root[:, None] + 1, vocab)
    return refill(empty_ring(batch, 1, vocab), keys, root, wanted, 1).rows


class NoiseRing(NamedTuple):
    """Target noise of the next E positions of each slot, shared by drafting and verification.

    A position's noise lies at `position % E` until the position is decided; rows that a round did
    not use serve the next one, so that each position's noise is generated once.

    Attributes:
      rows: [B E V]. until: [B] positions below it have been generated.
      drawn: [B] rows generated since the ring was made, for the record.
    """

    rows: Float[Array, "B E V"]
    until: Int[Array, " B"]
    drawn: Int[Array, " B"]

    AXES = {"rows": ("batch", None, "vocab")}  # a device holds those of its part of the vocabulary


def empty_ring(batch: int, positions: int, vocab: int) -> NoiseRing:
    """A ring in which nothing has been generated."""
    rows = jnp.zeros((batch, positions, vocab), jnp.float32)
    return NoiseRing(rows, *jnp.zeros((2, batch), jnp.int32))


def refill(
    ring: NoiseRing,
    keys: UInt32[Array, "B 2"],
    root: Int[Array, " B"],
    wanted: Bool[Array, " B"],
    count: int,
) -> NoiseRing:
    """Generates what is missing of positions root + 1 .. root + count, count <= E.

    The missing rows of all slots are numbered through and drawn in blocks, so that the work grows
    with the tokens that were emitted and not with the slot that emitted most.
    """
    batch, size, vocab = ring.rows.shape
    block = min(batch * count, max(batch, BLOCK_NUMBERS // vocab))
    first = jnp.maximum(ring.until, root + 1)
    missing = jnp.where(wanted, jnp.maximum(root + 1 + count - first, 0), 0)
    ends = jnp.cumsum(missing)

    def draw(carry):
        done, rows = carry
        number = done + jnp.arange(block)
        slot = jnp.searchsorted(ends, number, side="right")
        inside = jnp.minimum(slot, batch - 1)
        position = take(first - (ends - missing), inside) + number
        fresh = target_noise(take(keys, inside), position[:, None], vocab)[:, 0]
        place = divide(position, size)[1]
        rows = rows.at[slot, place].set(  # slot B: nothing is missing
            fresh, mode="drop", wrap_negative_indices=False
        )
        return done + block, rows

    total = ends[-1]
    _, rows = jax.lax.while_loop(lambda c: c[0] < total, draw, (jnp.int32(0), ring.rows))
    until = jnp.where(missing > 0, first + missing, ring.until)
    return NoiseRing(rows, until, ring.drawn + missing)


def ring_at(
    ring: NoiseRing, positions: Int[Array, "B R"], ids: Int[Array, "*R C"] | None = None
) -> Float[Array, "B R V"]:
    """The noise that decides `positions`; they must be among the next E.

    Args:
      ids: [C] or [B R C] of the tokens whose noise it is; None: of all. The noise of an id that is
        none of the vocabulary's is some number.
    """
    place = divide(positions, ring.rows.shape[1])[1]
    if ids is None:
        return take_along(ring.rows, place[..., None], axis=1)
    slot = np.arange(len(place))[:, None, None]
    return ring.rows.at[slot, place[..., None], ids].get(mode="clip")


def round_noise(
    keys: UInt32[Array, "B 2"],
    domain: int,
    root: Int[Array, " B"],
    nodes: Int[Array, " R"],
    vocab: int,
) -> Float[Array, "B R V"]:
    """Gumbel noise private to nodes of one round (drafts and residuals of `block`, `recursive`)."""

    def one(key, position, node):
        key = _fold(key, domain, position, node)
        return jax.random.gumbel(key, (vocab,), jnp.float32, mode="high")

    noise = jax.vmap(jax.vmap(one, (None, None, 0)), (0, 0, None))(keys, root, jnp.asarray(nodes))
    return shards.pin(noise)


def round_coins(
    keys: UInt32[Array, "B 2"], root: Int[Array, " B"], nodes: Int[Array, " R"]
) -> Float[Array, "B R"]:
    """Uniform coins in (0, 1), private to nodes of one round."""

    def one(key, position, node):
        tiny = jnp.finfo(jnp.float32).tiny
        return jax.random.uniform(_fold(key, ACCEPT, position, node), minval=tiny)

    nodes = jnp.asarray(nodes)
    return jax.vmap(jax.vmap(one, (None, None, 0)), (0, 0, None))(keys, root, nodes)
