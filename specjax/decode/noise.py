"""Every random number that decides a token, and what it is keyed by.

The noise that decides the token at an absolute position is a function of (request key, position)
and of nothing else: not of batch, slot, round, tree, strategy or draft. A request key is made of
(seed, prompt, sample index). Plain decoding, drafting and verification look up the same noise, so
they choose the same token from the same logits (accept.py).

    target_noise   keyed by (request, TARGET, position): decides tokens; `NoiseRing` keeps the next
                   few positions of each slot
    round_noise    keyed by (request, domain, root, node): the draws of `block` and `recursive`
    round_coins    keyed by (request, ACCEPT, root, node): their tests

All noise is Gumbel noise: the argmax of log-weights plus Gumbel noise is a draw from them.

Where and how often the noise of a position is drawn does not change its bits, and differs by
platform. CPUs keep it in the ring, so that they draw a position once. TPUs and GPUs draw the noise
of all positions that a round may decide for all slots at the round's start (`NoiseRing.ahead`). A
TPU writes rows to places that it computes one after the other, which takes longer than to draw
them. On a GPU the loop that draws missing rows waits for the host at every turn, which takes as
long as to draw ten rows of 151,936 numbers. The ring is allocated there as well, and is not used:
the state of a chunk has the same shapes on all platforms.

Dimensions: B slots, R rows of a tree, C columns, V vocabulary, `ring` positions of a `NoiseRing`.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl
from jaxtyping import Array, Bool, Float, Int, UInt32

from specjax.decode import shards
from specjax.indexing import divide, put, take, take_along

TARGET, DRAFT, ACCEPT, RESIDUAL = 0, 1, 2, 3  # domains: no two uses share a key
# Rows are drawn a block at a time. A small vocabulary takes all that a round can need at once.
BLOCK_NUMBERS = 1 << 16
WORDS = 5  # seed low, seed high, prompt low, prompt high, sample index


def request_words(seed: int, prompt: Sequence[int], sample: int) -> np.ndarray:
    """Computes the five uint32 words that identify one sample of one request, on the host."""
    digest = hashlib.blake2b(np.asarray(prompt, "<u4").tobytes(), digest_size=8).digest()
    prompt_words = np.frombuffer(digest, "<u4")
    seed = int(seed) % (1 << 64)  # a negative one as its two's complement
    return np.array(
        [seed & 0xFFFFFFFF, seed >> 32, prompt_words[0], prompt_words[1], sample], np.uint32
    )


def request_keys(words: UInt32[Array, "B 5"]) -> UInt32[Array, "B 2"]:
    """Computes the request key of each sample, as raw threefry key data."""

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


@jax.named_scope("noise")
def target_noise(
    keys: UInt32[Array, "B 2"], positions: Int[Array, "B positions"], vocab: int
) -> Float[Array, "B positions V"]:
    """Generates the Gumbel noise that decides the tokens at absolute `positions`."""
    # Nothing but request and position is folded in: so tokens do not depend on the tree.
    words = _folded(_columns(keys), TARGET, positions)
    return shards.pin(_gumbel(words, positions.shape, vocab))


class NoiseRing(NamedTuple):
    """Target noise of the next positions of each slot, shared by drafting and verification.

    It is a cache: a position's noise lies at `position % ring` until the position is decided, so
    that it is generated once although several rounds may need it.

    Attributes:
      rows: noise of each position; zeros on a TPU or GPU.
      until: position of each slot below which noise has been generated.
      drawn: number of rows generated since the ring was made; tests and benches count them.
      ahead: on a TPU or GPU, while a round runs: the noise [B V] of the positions root + 1,
        root + 2, ... that the round may decide, which is used in place of `rows`. None between
        rounds.
    """

    rows: Float[Array, "B ring V"]
    until: Int[Array, " B"]
    drawn: Int[Array, " B"]
    ahead: tuple[Float[Array, "B V"], ...] | None = None

    AXES = {"rows": ("batch", None, "vocab")}  # a device holds those of its part of the vocabulary


def empty_ring(batch: int, positions: int, vocab: int) -> NoiseRing:
    """Makes a ring without noise."""
    rows = jnp.zeros((batch, positions, vocab), jnp.float32)
    return NoiseRing(rows, *jnp.zeros((2, batch), jnp.int32))


def take_rings(ring: NoiseRing, index: Int[Array, " some"]) -> NoiseRing:
    """Takes the rings of some slots; on a TPU or GPU, where they hold no noise, zeros."""

    def empty(rows, index):
        return jnp.zeros((len(index), *rows.shape[1:]), rows.dtype)

    rows = jax.lax.platform_dependent(ring.rows, index, tpu=empty, cuda=empty, default=take)
    return NoiseRing(rows, take(ring.until, index), take(ring.drawn, index))


def put_rings(ring: NoiseRing, index: Int[Array, " some"], new: NoiseRing) -> NoiseRing:
    """Writes back rings that `take_rings` took."""

    def as_before(rows, index, new):
        return rows

    rows = jax.lax.platform_dependent(
        ring.rows, index, new.rows, tpu=as_before, cuda=as_before, default=put
    )
    return NoiseRing(rows, put(ring.until, index, new.until), put(ring.drawn, index, new.drawn))


@jax.named_scope("noise")
def refill(
    ring: NoiseRing,
    keys: UInt32[Array, "B 2"],
    root: Int[Array, " B"],
    wanted: Bool[Array, " B"],
    count: int,
) -> NoiseRing:
    """Generates the noise that is missing at positions root + 1 .. root + count.

    The missing rows of all slots are numbered through and drawn in blocks, so that the work grows
    with the number of emitted tokens and not with the slot that emitted most.

    Args:
      root: position of each slot's root.
      wanted: whether each slot needs noise: it runs, at a temperature above 0.
      count: number of positions, at most the size of the ring.
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
        rows = rows.at[slot, place].set(  # slot B stands for no row, and is dropped
            fresh, mode="drop", wrap_negative_indices=False
        )
        return done + block, rows

    total = ends[-1]
    _, rows = jax.lax.while_loop(lambda c: c[0] < total, draw, (jnp.int32(0), ring.rows))
    until = jnp.where(missing > 0, first + missing, ring.until)
    return NoiseRing(rows, until, ring.drawn + missing)


@jax.named_scope("noise")
def ring_at(
    ring: NoiseRing, positions: Int[Array, "B R"], ids: Int[Array, "*R C"] | None = None
) -> Float[Array, "B R V"]:
    """Returns the noise that decides `positions`, which must be in the ring.

    Args:
      ids: [C] or [B R C] ids of the tokens whose noise is returned; None: all tokens. An id outside
        of the vocabulary gets an arbitrary number.
    """
    place = divide(positions, ring.rows.shape[1])[1]
    if ids is None:
        return take_along(ring.rows, place[..., None], axis=1)
    slot = np.arange(len(place))[:, None, None]
    return ring.rows.at[slot, place[..., None], ids].get(mode="clip")


@jax.named_scope("noise")
def prepare(
    ring: NoiseRing,
    keys: UInt32[Array, "B 2"],
    root: Int[Array, " B"],
    wanted: Bool[Array, " B"],
    count: int,
    chain: bool,
) -> NoiseRing:
    """Makes the noise of positions root + 1 .. root + count ready for `noise_at` of one round.

    Args:
      root: position of each slot's root.
      wanted: whether each slot needs noise: it runs, at a temperature above 0.
      count: number of positions, at most the size of the ring.
      chain: see `draw_ahead`.

    Returns:
      the ring, with `ahead` until `after_round`.
    """

    def refilled(ring, keys, root, wanted):
        # Of the shape that the other branch returns; without a reader it is not in the program.
        unread = jnp.zeros((ring.rows.shape[0], ring.rows.shape[2]), jnp.float32)
        return refill(ring, keys, root, wanted, count)._replace(ahead=(unread,) * count)

    def one_by_one(ring, keys, root, _):
        ahead = draw_ahead(keys, root, count, vocab, chain)
        return ring._replace(drawn=ring.drawn + count, ahead=ahead)

    def at_once(ring, keys, root, _):
        ahead = draw_at_once(keys, root, count, vocab)
        return ring._replace(drawn=ring.drawn + count, ahead=ahead)

    vocab = ring.rows.shape[2]
    return jax.lax.platform_dependent(
        ring, keys, root, wanted, tpu=one_by_one, cuda=at_once, default=refilled
    )


def draw_ahead(
    keys: UInt32[Array, "B 2"], root: Int[Array, " B"], count: int, vocab: int, chain: bool
) -> tuple[Float[Array, "B V"], ...]:
    """Draws `NoiseRing.ahead` on a TPU, for all slots: the noise of root + 1 .. root + count.

    A position is an array of its own, in which slots lie side by side in a TPU's vectors. A block
    of 64 rows of 37,984 numbers takes 150 thousand cycles, which the cipher's additions and shifts
    need at least. Rows drawn for missing positions alone would have to be moved to their slots: a
    gather of 320 such rows took as long as drawing 150 of them.

    Args:
      chain: whether the tree is a chain. The rows of a chain are stacked as they are drawn. In
        other trees the compiler would draw several positions in one operation, whose ciphers do
        not fit into registers together, and which took 5 times as long: there each draw waits for
        the last one.
    """
    if chain:  # each [B 1 V]: arrays [B V] are drawn twice, to be drafted with and to be stacked
        positions = [root[:, None] + 1 + i for i in range(count)]
        return tuple(target_noise(keys, position, vocab)[:, 0] for position in positions)
    words = _folded(_columns(keys), TARGET, root[:, None] + 1 + jnp.arange(count))
    rows = []
    for i in range(count):
        of_position = tuple(word[:, i] for word in words)
        if rows:
            of_position, rows[-1] = jax.lax.optimization_barrier((of_position, rows[-1]))
        rows.append(shards.pin(_gumbel(of_position, root.shape, vocab)))
    return tuple(rows)


def draw_at_once(
    keys: UInt32[Array, "B 2"], root: Int[Array, " B"], count: int, vocab: int
) -> tuple[Float[Array, "B V"], ...]:
    """Draws what `draw_ahead` draws on a GPU, by one operation whose result lies in memory.

    A number takes about 160 integer operations, of which an H100 does 1.5e13 per second: a row of
    151,936 numbers is drawn in about 2 microseconds.
    """
    drawn = target_noise(keys, root[:, None] + 1 + jnp.arange(count), vocab)
    # Without a barrier the compiler draws it again for each of its readers.
    drawn = jax.lax.optimization_barrier(drawn)
    return tuple(drawn[:, i] for i in range(count))


def after_round(ring: NoiseRing) -> NoiseRing:
    """Returns the ring of the state between rounds."""
    return ring._replace(ahead=None)


@jax.named_scope("noise")
def noise_at(
    ring: NoiseRing,
    keys: UInt32[Array, "B 2"],
    root: Int[Array, " B"],
    depth: np.ndarray | Int[Array, "*B R"],
    ids: Int[Array, "*R C"] | None = None,
) -> Float[Array, "B R V"]:
    """Returns the noise that decides the positions root + 1 + depth, which `prepare` made ready.

    Args:
      depth: [R] or [B R] depths of rows. Where they are known to the program (numpy), and all
        different, nothing is selected.
      ids: as those of `ring_at`.
    """

    def from_ring(ring, keys, root, depth, ids):
        place = jnp.broadcast_to(root[:, None] + 1 + depth, (len(root), depth.shape[-1]))
        return ring_at(ring, place, ids)

    def from_ahead(ring, keys, root, depth, ids):
        static = known if known is not None else depth
        return ahead_at(ring.ahead, keys, root, static, ids)

    def gathered(ring, keys, root, depth, ids):
        if ids is not None or (known is not None and len(set(known.flat)) == known.size):
            return from_ahead(ring, keys, root, depth, ids)
        return gather_ahead(ring.ahead, depth)

    if ring.ahead is None:
        return from_ring(ring, keys, root, depth, ids)
    known = depth if isinstance(depth, np.ndarray) else None
    arguments = ring, keys, root, jnp.asarray(depth), ids
    return jax.lax.platform_dependent(*arguments, tpu=from_ahead, cuda=gathered, default=from_ring)


def ahead_at(
    ahead: tuple[Float[Array, "B V"], ...],
    keys: UInt32[Array, "B 2"],
    root: Int[Array, " B"],
    depth: np.ndarray | Int[Array, "*B R"],
    ids: Int[Array, "*R C"] | None = None,
) -> Float[Array, "B R V"]:
    """Returns the noise of positions root + 1 + depth, of `NoiseRing.ahead`, see `noise_at`."""
    if ids is not None:  # to draw some columns costs less than to gather them
        positions = jnp.broadcast_to(root[:, None] + 1 + depth, (len(root), depth.shape[-1]))
        words = _folded(_columns(keys), TARGET, positions)
        vocab = ahead[0].shape[-1]
        return _gumbel(words, positions.shape, vocab, jnp.clip(ids, 0, vocab - 1))
    if isinstance(depth, np.ndarray) and len(set(depth.flat)) == depth.size:
        return shards.pin(jnp.stack([ahead[d] for d in depth], axis=1))
    depth = jnp.broadcast_to(depth, (len(root), depth.shape[-1]))[..., None]
    found = ahead[0][:, None]
    for i, row in enumerate(ahead[1:], start=1):
        found = jnp.where(depth == i, row[:, None], found)
    return shards.pin(jnp.broadcast_to(found, (*depth.shape[:2], found.shape[-1])))


def gather_ahead(
    ahead: tuple[Float[Array, "B V"], ...], depth: Int[Array, "*B R"]
) -> Float[Array, "B R V"]:
    """Returns what `ahead_at` returns at depths that repeat, by a gather.

    A GPU's gather reads each number once, where a chain of selections reads all positions.
    """
    rows = jnp.stack(ahead, axis=1)
    depth = jnp.broadcast_to(depth, (len(rows), depth.shape[-1]))
    return shards.pin(take_along(rows, depth[..., None], axis=1))


@jax.named_scope("noise")
def next_noise(
    keys: UInt32[Array, "B 2"], root: Int[Array, " B"], wanted: Bool[Array, " B"], vocab: int
) -> Float[Array, "B 1 V"]:
    """Generates Gumbel noise for the position after each root, in plain decoding.

    With a large vocabulary noise is drawn for the wanted slots alone, a block of rows at a time;
    with a small one, and on a TPU or GPU, for all slots at once, which is cheaper than selecting
    them.
    """
    batch = root.shape[0]

    def of_all(keys, root, _):
        return target_noise(keys, root[:, None] + 1, vocab)

    def of_wanted(keys, root, wanted):
        return refill(empty_ring(batch, 1, vocab), keys, root, wanted, 1).rows

    if batch * vocab <= BLOCK_NUMBERS:
        return of_all(keys, root, wanted)
    return jax.lax.platform_dependent(
        keys, root, wanted, tpu=of_all, cuda=of_all, default=of_wanted
    )


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

    def one(key, position, node):
        tiny = jnp.finfo(jnp.float32).tiny
        return jax.random.uniform(_fold(key, ACCEPT, position, node), minval=tiny)

    nodes = jnp.asarray(nodes)
    return jax.vmap(jax.vmap(one, (None, None, 0)), (0, 0, None))(keys, root, nodes)


# --- the generator --------------------------------------------------------------------------------

# Threefry-2x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), unrolled. The
# numbers are those of `jax.random` with "threefry2x32", whatever `jax_threefry_partitionable` says.
# On CPU jax runs the cipher as a loop, to compile sooner, and XLA starts a dozen operations for
# each turn of it: the noise of one round took as long as several layers of a small policy. Unrolled
# it is one operation.

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def threefry2x32(
    key: UInt32[Array, " 2"] | tuple[Array, Array], x0: Array, x1: Array
) -> tuple[Array, Array]:
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


def _counted(key: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Computes the cipher of 0, 1, 2, ... in two arrays of a shape."""
    if math.prod(shape) >= 1 << 32:
        raise ValueError(f"expected fewer than 2^32 numbers of one key, got shape {shape}")
    low = jnp.zeros(shape, jnp.uint32)
    stride = math.prod(shape)
    for axis, size in enumerate(shape):  # no reshape: a split axis stays split
        stride //= max(size, 1)
        low += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride)
    return threefry2x32(key, jnp.zeros_like(low), low)


def _bits(key: Array, width: int, shape: tuple[int, ...]) -> Array:
    if width != 32:
        raise ValueError(f"expected 32 bits per number, got {width}")
    high, low = _counted(key, shape)
    return high ^ low


def _fold_in(key: Array, data: Int[Array, ""]) -> Array:
    return jnp.stack(threefry2x32(key, jnp.uint32(0), data.astype(jnp.uint32)))


_IMPL = define_prng_impl(
    key_shape=(2,),
    seed=lambda seed: jnp.stack([jnp.uint32(0), seed.astype(jnp.uint32)]),
    split=lambda key, shape: jnp.stack(_counted(key, shape), axis=-1),
    random_bits=_bits,
    fold_in=_fold_in,
    name="threefry2x32_unrolled",
    tag="fryu",
)


def _columns(keys: UInt32[Array, "B 2"]) -> tuple[Array, Array]:
    return keys[:, :1], keys[:, 1:]


def _folded(words: tuple[Array, Array], *data: int | Array) -> tuple[Array, Array]:
    """Folds numbers into the two words of keys, as `jax.random.fold_in` does, elementwise."""
    for value in data:
        words = threefry2x32(words, jnp.uint32(0), jnp.asarray(value).astype(jnp.uint32))
    return words


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
      ids: ids of the numbers, as those of `ring_at`; None: all of them.
    """
    if ids is None:  # no reshape: a split axis stays split
        ids = jax.lax.broadcasted_iota(jnp.uint32, (*shape, vocab), len(shape))
    words, ids = tuple(word[..., None] for word in words), ids.astype(jnp.uint32)

    def uniform(counter):
        bits = jnp.bitwise_xor(*threefry2x32(words, jnp.uint32(0), counter))
        exponent_of_one = np.float32(1).view(np.uint32)
        number = jax.lax.bitcast_convert_type((bits >> 9) | exponent_of_one, jnp.float32)
        return number - 1

    high, low = uniform(ids), uniform(ids + np.uint32(vocab))
    info = jnp.finfo(jnp.float32)
    x = jnp.where(high >= 0.5, high, high + 2**-info.nmant * low + info.tiny)
    return -jnp.log(-jnp.log1p(-x))


def key_of(data: UInt32[Array, "*B 2"]) -> Array:
    """Makes a key for `jax.random` from its two words."""
    return jax.random.wrap_key_data(data, impl=_IMPL)
