"""What goes into the engine and what comes out: plain Python and numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from specjax.config import SamplingParams
from specjax.decode import rng


@dataclasses.dataclass(frozen=True)
class SpecStats:
    """Speculation figures of one sample.

    Attributes:
      rounds: rounds in which the sample ran.
      drafted: draft tokens proposed. accepted: of these, how many were emitted.
      histogram: rounds by tokens emitted (index 0..steps+1); its sum is `rounds`.
    """

    rounds: int
    drafted: int
    accepted: int
    histogram: tuple[int, ...]

    @property
    def accept_length(self) -> float:
        """Tokens per round, bonus included: 1 + accepted / rounds."""
        return 1.0 + self.accepted / self.rounds if self.rounds else float("nan")


@dataclasses.dataclass(frozen=True)
class SampleOutput:
    """One finished sample; logprobs are the target's, temperature-scaled, one per token."""

    token_ids: list[int]
    text: str | None
    logprobs: list[float]
    finish_reason: str
    stats: SpecStats


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """All samples of one prompt."""

    prompt_token_ids: list[int]
    samples: list[SampleOutput]


@dataclasses.dataclass(frozen=True)
class Job:
    """One sample to generate.

    Attributes:
      prompt: token ids. limit: prompt and generated tokens at most.
      words: the five uint32 words that key its randomness. stop_ids: tokens that end it.
    """

    prompt: Sequence[int]
    limit: int
    words: np.ndarray
    temperature: float
    stop_ids: tuple[int, ...]


def make_jobs(
    prompt: Sequence[int], params: SamplingParams, eos_ids: Sequence[int]
) -> list[Job]:
    """One job per sample of a request."""
    stops = tuple(params.stop_token_ids) + (() if params.ignore_eos else tuple(eos_ids))
    limit = len(prompt) + params.max_tokens
    return [
        Job(
            prompt,
            limit,
            rng.request_words(params.seed, prompt, sample),
            params.temperature,
            tuple(dict.fromkeys(stops)),
        )
        for sample in range(params.n)
    ]


@dataclasses.dataclass
class Totals:
    """Sums over samples, for metrics that are never a mean of means.

    Attributes:
      histogram: rounds by tokens emitted. tokens: generated tokens. seconds: of the whole run.
      longest: tokens of the longest sample.
    """

    steps: int
    histogram: np.ndarray
    tokens: int = 0
    longest: int = 0
    seconds: float = 0.0

    def add(self, sample: SampleOutput) -> None:
        self.histogram = self.histogram + np.array(sample.stats.histogram)
        self.tokens += len(sample.token_ids)
        self.longest = max(self.longest, len(sample.token_ids))

    def merge(self, other: Totals) -> None:
        """Adds a run that came after this one."""
        self.histogram = self.histogram + other.histogram
        self.tokens += other.tokens
        self.longest = max(self.longest, other.longest)
        self.seconds += other.seconds

    @property
    def rounds(self) -> int:
        return int(self.histogram.sum())

    @property
    def accepted(self) -> int:
        return int((self.histogram[1:] * np.arange(len(self.histogram) - 1)).sum())

    @property
    def accept_length(self) -> float:
        return 1.0 + self.accepted / self.rounds if self.rounds else float("nan")

    @property
    def accept_rate(self) -> float:
        """Accepted draft tokens over proposed depth."""
        return self.accepted / (self.rounds * self.steps) if self.rounds and self.steps else 0.0

    def per_depth(self) -> list[float]:
        """Share of rounds in which the draft of depth 1, 2, .. was accepted."""
        if not self.rounds:
            return [float("nan")] * self.steps
        at_least = np.cumsum(self.histogram[::-1])[::-1]
        return [float(at_least[d + 1] / self.rounds) for d in range(1, self.steps + 1)]
