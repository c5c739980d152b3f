"""Sampling options on the device: one row per slot, and static flags for what the rows ask for.

A slot's options are data, so that changing them compiles nothing. The flags (`Features`) decide
what a compiled program contains. Programs are compiled for a few sets of flags only; what a program
contains and its batch does not ask for is skipped at run time (`sampling.transform`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

BIAS_WIDTH = 300  # OpenAI's limit
BAD_WORDS, BAD_WORD_LENGTH = 64, 8


class Options(NamedTuple):
    """How each slot is sampled. Neutral values (see `neutral`) have no effect.

    Attributes:
      temperature: temperature; 0: greedy.
      top_k: number of tokens that top-k keeps; 0: all.
      top_p: mass that top-p keeps; 1: all.
      min_p: probability, relative to the best token's, below which min-p drops a token; 0: none.
      repetition: repetition penalty; 1: none.
      presence: presence penalty; 0: none.
      frequency: frequency penalty; 0: none.
      bias_ids: [B BIAS_WIDTH] ids of tokens that have a logit bias, padded with -1.
      bias_values: [B BIAS_WIDTH] numbers added to the logits of these tokens.
      allowed: [B ceil(V / 32)] bit v % 32 of word v // 32 is set iff token v may be generated.
      bad_words: [B BAD_WORDS BAD_WORD_LENGTH] token ids of each bad word, right-aligned and padded
        with -1 in front.
      stop_ids: [B stops] ids of tokens that end the slot, padded with -1.
      prompt_len: length of the prompt.
      min_len: length below which stop tokens are masked.
      speculate: whether the slot speculates; False: no drafted token is accepted, nor counted.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    repetition: Float[Array, " B"]
    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]
    bias_ids: Int[Array, "B biased"]
    bias_values: Float[Array, "B biased"]
    allowed: UInt32[Array, "B W"]
    bad_words: Int[Array, "B words length"]
    stop_ids: Int[Array, "B stops"]
    prompt_len: Int[Array, " B"]
    min_len: Int[Array, " B"]
    speculate: Bool[Array, " B"]


def neutral(batch: int, vocab: int, stop_width: int, np=jnp) -> Options:
    """Makes options without effect; `np` may be numpy, for the host side."""

    def full(value, *shape, dtype):
        return np.full((batch, *shape), value, dtype)

    f32, i32 = np.float32, np.int32
    return Options(
        temperature=full(1.0, dtype=f32),
        top_k=full(0, dtype=i32),
        top_p=full(1.0, dtype=f32),
        min_p=full(0.0, dtype=f32),
        repetition=full(1.0, dtype=f32),
        presence=full(0.0, dtype=f32),
        frequency=full(0.0, dtype=f32),
        bias_ids=full(-1, BIAS_WIDTH, dtype=i32),
        bias_values=full(0.0, BIAS_WIDTH, dtype=f32),
        allowed=full(0xFFFFFFFF, -(-vocab // 32), dtype=np.uint32),
        bad_words=full(-1, BAD_WORDS, BAD_WORD_LENGTH, dtype=i32),
        stop_ids=full(-1, stop_width, dtype=i32),
        prompt_len=full(1, dtype=i32),
        min_len=full(0, dtype=i32),
        speculate=full(True, dtype=bool),
    )


@dataclasses.dataclass(frozen=True)
class Features:
    """The options that a compiled program takes into account; other options have no effect in it.

    Attributes:
      sampled: whether a temperature is above 0; without it no noise is drawn.
      penalties: whether there is a repetition, presence or frequency penalty.
      transformed_logprobs: whether log-probabilities after all transforms are returned.
      top_logprobs: whether the most likely tokens are returned.
    """

    sampled: bool = True
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalties: bool = False
    bias: bool = False
    allowed: bool = False
    bad_words: bool = False
    min_tokens: bool = False
    transformed_logprobs: bool = False
    top_logprobs: bool = False

    @functools.cached_property
    def _bits(self) -> int:
        """The flags as bits, for comparing sets quickly: the host does so for each chunk."""
        flags = (getattr(self, field.name) for field in dataclasses.fields(self))
        return sum(flag << i for i, flag in enumerate(flags))

    def __hash__(self) -> int:
        return self._bits

    def __eq__(self, other: object) -> bool:
        return self._bits == other._bits if isinstance(other, Features) else NotImplemented

    def __or__(self, other: Features) -> Features:
        if self.covers(other):  # the common case
            return self
        bits = self._bits | other._bits
        return Features(*(bool(bits >> i & 1) for i in range(len(dataclasses.fields(self)))))

    def covers(self, other: Features) -> bool:
        """Returns whether a program with these features serves a batch that needs `other`."""
        return not other._bits & ~self._bits

    def widened(self) -> Features:
        """Returns the smallest set that covers this one among the few that programs have."""
        filters = Features(top_k=True, top_p=True, min_p=True)
        results = {"transformed_logprobs": False, "top_logprobs": False}
        everything_sampled = dataclasses.replace(Features.all(), **results)
        ladder = (Features.none(), Features(), filters, everything_sampled, Features.all())
        return next(step for step in ladder if step.covers(self))

    @property
    def size(self) -> int:
        """How many flags are set: of two programs that cover a batch, fewer is cheaper."""
        return self._bits.bit_count()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f.name for f in dataclasses.fields(self) if getattr(self, f.name))

    @classmethod
    def none(cls) -> Features:
        return cls(sampled=False)

    @classmethod
    def all(cls) -> Features:
        return cls(*(True for _ in dataclasses.fields(cls)))
