"""What the host gathers of a running sample, chunk by chunk, and the output made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax.decode.report import Rejections, Report, TopLogprobs
from specjax.decode.state import LENGTH, STOPPED
from specjax.engine.request import Job, SampleOutput, SpecStats
from specjax.engine.stops import Cut, StopStrings

FINISH_REASONS = {STOPPED: "stop", LENGTH: "length"}


class Finished(NamedTuple):
    """A slot's row of the state, on the host: all [M] but `histogram` [X], `length`, `finish`."""

    tokens: np.ndarray
    logprobs: np.ndarray
    histogram: np.ndarray
    length: int
    finish: int


class Running:
    """One sample in its slot.

    Args:
      index: of its job in the call. drafts: draft tokens proposed per round.

    Attributes:
      length: prompt and generated tokens at the last look.
    """

    def __init__(self, index: int, job: Job, drafts: int):
        self.index, self.job, self.length = index, job, len(job.prompt)
        params = job.params
        self._drafts = drafts if params.speculative else 0
        self._stops = None
        if params.stop:
            self._stops = StopStrings(
                params.stop, job.decode, params.include_stop_str_in_output, params.min_tokens
            )
        self._transformed: list[float] | None = [] if params.transformed_logprobs else None
        self._rounds: list[int] = []  # tokens emitted per round
        self._top = _Top([], []) if params.top_logprobs else None

    @property
    def has_stops(self) -> bool:
        return self._stops is not None

    def look(self, slot: int, length: int, report: Report, tokens: np.ndarray | None) -> Cut | None:
        """Takes in a chunk.

        Args:
          length: the slot's, now. tokens: [M] of the slot; needed for stop strings only.

        Returns:
          where the sample ends, if a stop string was completed.
        """
        count = length - self.length
        if self._transformed is not None:
            self._transformed += report.transformed[slot, :count].tolist()
        if self._top is not None:
            self._top.add(report.top, slot, count, self.job.params.top_logprobs)
        begin, self.length = self.length, length
        if self._stops is None:
            return None
        self._rounds += [int(n) for n in report.counts[:, slot] if n]
        return self._stops.feed(tokens[begin:length].tolist())

    def output(self, last: Finished, cut: Cut | None) -> SampleOutput:
        """The finished sample.

        Args:
          cut: where a stop string ends it, before or with the end that the device found.
        """
        begin = len(self.job.prompt)
        count = last.length - begin if cut is None else cut.tokens
        tokens = last.tokens[begin : begin + count].tolist()
        logprobs = last.logprobs[begin : begin + count].tolist()
        transformed = None if self._transformed is None else self._transformed[:count]
        top = None if self._top is None else self._top.with_chosen(tokens, logprobs, transformed)
        return SampleOutput(
            token_ids=tokens,
            text=None if cut is None else cut.text,
            logprobs=logprobs,
            finish_reason="stop" if cut else FINISH_REASONS[last.finish],
            stats=self._stats(last.histogram, count, cut),
            transformed_logprobs=transformed,
            top_logprobs=top and top.scaled,
            top_transformed_logprobs=top and top.transformed,
        )

    def _stats(self, histogram: np.ndarray, count: int, cut: Cut | None) -> SpecStats:
        if cut is not None:
            histogram = _histogram_until(self._rounds, count, len(histogram))
        bins = histogram.tolist()
        rounds = sum(bins)
        return SpecStats(
            rounds=rounds,
            drafted=rounds * self._drafts,
            accepted=count - rounds,
            histogram=tuple(bins),
        )


def rejections_until(rejections: Rejections, ends: np.ndarray) -> Rejections:
    """Without what came after the `ends` [B] of samples that a stop string cut within a chunk."""
    begins = rejections.position - rejections.accepted  # a round's first token
    return rejections._replace(
        accepted=np.where(begins >= ends, -1, rejections.accepted),
        emitted=rejections.emitted & (rejections.position < ends),
    )


def _histogram_until(rounds: Sequence[int], count: int, bins: int) -> np.ndarray:
    """Rounds by tokens emitted, of the rounds that the first `count` tokens took.

    The round that brought the last of them counts with the tokens that are kept of it, as where a
    stop token cuts a round.
    """
    ends = np.minimum(np.cumsum(rounds), count)
    kept = np.diff(ends, prepend=0)
    return np.bincount(kept[kept > 0], minlength=bins)


class _Top(NamedTuple):
    """Most likely tokens per position, best first; `transformed` is None unless asked for."""

    scaled: list[dict[int, float]]
    transformed: list[dict[int, float]] | None

    def add(self, top: TopLogprobs, slot: int, count: int, best: int) -> None:
        _add(self.scaled, top.ids, top.logprobs, slot, count, best)
        if top.transformed_ids is not None:
            _add(self.transformed, top.transformed_ids, top.transformed_logprobs, slot, count, best)

    def with_chosen(self, tokens, logprobs, transformed) -> _Top:
        """As many entries as there are tokens, each with the token generated there."""
        scaled = _with_chosen(self.scaled, tokens, logprobs)
        if transformed is None:  # another request of the batch may have asked for them
            return _Top(scaled, None)
        return _Top(scaled, _with_chosen(self.transformed, tokens, transformed))


def _add(entries: list, ids, logprobs, slot: int, count: int, best: int) -> None:
    for row, values in zip(
        ids[slot, :count, :best].tolist(), logprobs[slot, :count, :best].tolist(), strict=True
    ):
        entries.append({t: v for t, v in zip(row, values, strict=True) if v > -np.inf})


def _with_chosen(entries, tokens, logprobs) -> list[dict[int, float]]:
    return [
        best | {token: logprob}
        for best, token, logprob in zip(entries, tokens, logprobs, strict=False)
    ]
