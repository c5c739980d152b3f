"""N-grams as a draft source: what followed the last tokens where they stood before.

Prompt lookup (Saxena 2023) and suffix decoding (arXiv 2411.04975) without a tree on the host. A row
of the draft tree is looked up by its own suffix, the context and the path down to it, in the tokens
of its slot and of slots that sample the same prompt (GRPO siblings), finished ones included. It has
no weights and no cache.

For every row and every searched position the work holds the length of the common suffix, up to
`longest`. One more token on a path shifts these lengths by one position and resets those where
another token is: a step costs one pass over the positions whatever the length.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from specjax.config import ModelConfig, SpecConfig
from specjax.decode.state import EMPTY, take_positions
from specjax.decode.tree import take_parents
from specjax.interfaces import Cost, Draft, DraftNeeds, Level, Memory, Proposal, Room

OCCURRENCES = 32  # matches that are counted for the continuations of a row at most
OTHERS = 7  # sibling slots searched at most, the longest first
PER_TOKEN = 16.0  # how much more a continuation weighs per token of its match
HALF_FULL = 6.0  # occurrences that count for half of what infinitely many would


class NgramSlots(NamedTuple):
    """What the source remembers of each slot.

    Attributes:
      group: hash of the slot's prompt, in two words; 0 0: the slot has had no prompt yet.
    """

    group: UInt32[Array, "B 2"]


class _Work(NamedTuple):
    """The work of a round: the sequences that are searched for each slot, its own first.

    Attributes:
      tokens: tokens of each searched sequence.
      first: position of each sequence from which on continuations count.
      length: length of each sequence; 0: it is not to be searched.
      match: length of the common suffix of a row's path and the tokens up to each position.
    """

    tokens: Int[Array, "B searched max_len"]
    first: Int[Array, "B searched"]
    length: Int[Array, "B searched"]
    match: Int[Array, "B R searched max_len"]


@dataclasses.dataclass(frozen=True)
class NgramSource(Draft):
    """Drafts what followed the last tokens where they occurred before; it has no parameters (`{}`).

    Logits are log-weights of at most `OCCURRENCES` tokens; a row without a match has none.

    Attributes:
      vocab: vocabulary size of the target.
      longest: length of the longest suffix that is looked up.
      shortest: length of the shortest suffix that is looked up.
      siblings: whether other slots of the same prompt are searched, too.
    """

    vocab: int
    longest: int = 4
    shortest: int = 1
    siblings: bool = True

    @classmethod
    def of(cls, target: ModelConfig, spec: SpecConfig) -> NgramSource:
        return cls(target.vocab_size, spec.ngram_max, spec.ngram_min, spec.ngram_siblings)

    @property
    def needs(self) -> DraftNeeds:
        return DraftNeeds(siblings=self.siblings)

    def cost(self, page_size: int) -> Cost:
        return Cost(0, 8)

    def empty(self, room: Room, steps: int) -> Memory:
        return Memory(None, NgramSlots(jnp.zeros((room.slots, 2), jnp.uint32)))

    def start(self, tokens, prompt_len, states) -> NgramSlots:
        return NgramSlots(prompt_hash(tokens, prompt_len))

    def begin(self, model, params, state, steps: int, total: int):
        tokens, first, length = self._searched(state)
        match = jnp.zeros((len(tokens), 1, *tokens.shape[1:]), jnp.int8)
        start = state.length - self.longest
        last = take_positions(state.tokens, start, self.longest)
        last = jnp.where(start[:, None] + np.arange(self.longest) < 0, -1, last)
        for i in range(self.longest):
            match = self._append(match, tokens, last[:, i, None])
        work = _Work(tokens, first, length, match)
        return self._proposal(work), work

    def step(self, model, params, work: _Work, level: Level):
        batch, rows = level.tokens.shape
        above = work.match.reshape(*work.match.shape[:2], -1)
        match = take_parents(above, level.parents).reshape(batch, rows, *work.tokens.shape[1:])
        work = work._replace(match=self._append(match, work.tokens, level.tokens))
        return self._proposal(work), work

    def _searched(self, state) -> tuple[Array, Array, Array]:
        """Returns `tokens`, `first` and `length` of `_Work`: the slot's and its longest siblings'.

        The prompt counts once, in the slot's own tokens.
        """
        tokens, length = state.tokens[:, None], state.length[:, None]
        others = min(OTHERS, state.length.shape[0] - 1)
        if not self.siblings or not others:
            return tokens, jnp.zeros_like(length), length
        reach = jnp.where(may_search(state), state.length, 0)  # [B B]
        reach, slots = jax.lax.top_k(reach, others)
        tokens = jnp.concatenate([tokens, state.tokens[slots]], axis=1)
        first = jnp.broadcast_to(state.options.prompt_len[:, None], reach.shape)
        first = jnp.pad(first, [(0, 0), (1, 0)])
        return tokens, first, jnp.concatenate([length, reach], axis=1)

    def _append(self, match, tokens: Int[Array, "B searched max_len"], token: Int[Array, "B R"]):
        """Updates match lengths by one more token per row; a negative token matches no token."""
        before = jnp.pad(match[..., :-1], [(0, 0)] * 3 + [(1, 0)])
        longer = jnp.minimum(before + 1, self.longest).astype(jnp.int8)
        return jnp.where(tokens[:, None] == token[..., None, None], longer, 0)

    def _proposal(self, work: _Work) -> Proposal:
        """Weighs the tokens that followed the best matches: length first, then count and place.

        A token's weight counts its longest matches only. Between two lengths lies a factor of
        PER_TOKEN, which their number, saturating, cannot make up for: the longest match wins.
        """
        batch, rows = work.match.shape[:2]
        position, length = np.arange(work.tokens.shape[-1]) + 1, work.length[..., None]
        late = 0.45 + 0.5 * position / jnp.maximum(length, 1)  # below 0.95 where it is used
        known = (position >= work.first[..., None]) & (position < length)
        matches = known[:, None] & (work.match >= self.shortest)
        key = jnp.where(matches, work.match + late[:, None], 0.0).reshape(batch, rows, -1)
        key, places = jax.lax.top_k(key, min(OCCURRENCES, key.shape[-1]))
        following = jnp.roll(work.tokens, -1, axis=-1).reshape(batch, 1, -1)
        token = jnp.where(key > 0, jnp.take_along_axis(following, places, axis=-1), self.vocab)

        size, same = jnp.floor(key), token[..., None] == token[..., None, :]
        alike = same & (size[..., None] == size[..., None, :])
        often = jnp.where(alike, (key - size)[..., None, :], 0.0).sum(-1)
        weight = size * math.log(PER_TOKEN) + jnp.log(often / (1 + often / HALF_FULL))
        # The best match of a token comes first; V stands for no token.
        token = jnp.where(jnp.tril(same, -1).any(-1), self.vocab, token)
        token, weight = jax.lax.sort((token, weight), num_keys=1)  # ties go to the lowest id
        return Proposal(weight, token)


def may_search(state) -> Bool[Array, "B B"]:
    """Returns whether slot b may search slot c: another sample of the same prompt.

    A slot that holds the same request (a replay, or a request made twice) is left out, and so are
    slots from before a reset: tokens drawn with a request's own noise must not decide its drafts,
    or p/q acceptance would be biased.
    """
    group, keys = state.draft.slots.group, state.keys
    related = (group[:, None] == group).all(-1) & (group != 0).any(-1)
    return related & (keys[:, None] != keys).any(-1) & (state.finish != EMPTY)


def prompt_hash(
    tokens: Int[Array, "prompts max_len"], lengths: Int[Array, " prompts"]
) -> UInt32[Array, "prompts 2"]:
    """Hashes prompts to two words, never 0 0, independent of the padding.

    Two polynomials modulo 2^32 over mixed tokens. Prompts that collide search each other's tokens
    and draft badly; no token depends on it.
    """
    inside = np.arange(tokens.shape[1]) < lengths[:, None]
    words = []
    for base in (np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)):
        powers = np.cumprod(np.full(tokens.shape[1], base, np.uint32), dtype=np.uint32)
        mixed = (tokens.astype(jnp.uint32) + 1) * base
        mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x2C1B3C6D)
        total = jnp.where(inside, mixed * powers, 0).sum(-1, dtype=jnp.uint32)
        total = total + lengths.astype(jnp.uint32) * base
        words.append((total ^ (total >> 13)) * base)
    words[1] = jnp.where((words[0] | words[1]) == 0, 1, words[1])
    return jnp.stack(words, axis=-1)
