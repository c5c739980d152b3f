"""Every random number that decides a token, keyed so that nothing but the request decides it.

A request key folds (seed, prompt identity, sample index). The noise that picks the token at an
absolute position folds (request key, domain, position) and nothing else: not slot, batch, round,
tree or strategy. Hence the same seed gives the same tokens however they were decoded.

`block` needs coins beside that noise. They fold the root position and the node as well: a coin that
was tested and lost must not be met again in the next round, or the result is biased.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

TARGET, DRAFT, ACCEPT, RESIDUAL = 0, 1, 2, 3
WORDS = 5  # seed low, seed high, prompt low, prompt high, sample index


def request_words(seed: int, prompt: Sequence[int], sample: int) -> np.ndarray:
    """Host side: the five uint32 words that identify one sample of one request."""
    digest = hashlib.blake2b(np.asarray(prompt, "<u4").tobytes(), digest_size=8).digest()
    prompt_words = np.frombuffer(digest, "<u4")
    seed = seed % (1 << 64)
    return np.array(
        [seed & 0xFFFFFFFF, seed >> 32, prompt_words[0], prompt_words[1], sample], np.uint32
    )


def request_keys(words: UInt32[Array, "B 5"]) -> UInt32[Array, "B 2"]:
    """Raw threefry key data per sample."""

    def one(word):
        key = jax.random.wrap_key_data(word[:2], impl="threefry2x32")
        for i in range(2, WORDS):
            key = jax.random.fold_in(key, word[i])
        return jax.random.key_data(key)

    return jax.vmap(one)(words)


def _fold(key_data: UInt32[Array, " 2"], *data) -> Array:
    key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
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

    return jax.vmap(jax.vmap(one, (None, 0)), (0, 0))(keys, positions)


def round_noise(
    keys: UInt32[Array, "B 2"], domain: int, root: Int[Array, " B"], node: int, vocab: int
) -> Float[Array, "B V"]:
    """Gumbel noise private to one node of one round (drafting and residuals of `block`)."""

    def one(key, position):
        key = _fold(key, domain, position, node)
        return jax.random.gumbel(key, (vocab,), jnp.float32, mode="high")

    return jax.vmap(one)(keys, root)


def round_coins(keys: UInt32[Array, "B 2"], root: Int[Array, " B"], count: int) -> Array:
    """Uniform coins in (0, 1) [B, count], private to the nodes of one round."""

    def one(key, position, node):
        tiny = jnp.finfo(jnp.float32).tiny
        return jax.random.uniform(_fold(key, ACCEPT, position, node), minval=tiny)

    return jax.vmap(jax.vmap(one, (None, None, 0)), (0, 0, None))(keys, root, jnp.arange(count))
