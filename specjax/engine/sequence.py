"""One sample on its way through the engine, as the host knows it, and what it reports."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple, Protocol

import numpy as np

from specjax.decode.chunk import Result
from specjax.decode.options import Features
from specjax.decode.report import Rejections, Report, TopLogprobs
from specjax.decode.state import INVALID, LENGTH, RUNNING, STOPPED
from specjax.decode.tree import DynamicTree, Tree
from specjax.engine.request import ERROR, Job, SampleOutput, SpecStats
from specjax.engine.stops import Cut, StopStrings

FINISH_REASONS = {STOPPED: "stop", LENGTH: "length", INVALID: ERROR}


@dataclasses.dataclass
class Progress:
    """The state of a sample that is not finished, from which another run can go on.

    Attributes:
      tokens, logprobs: one entry per generated token. versions: runs of tokens that were sampled
        by the same weights, as (index of the first token, version of the weights).
      transformed: as `SampleOutput.transformed_logprobs`; None unless asked for.
      records: as `SampleOutput.records`.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int]]
    transformed: list[float] | None = None
    records: np.ndarray | None = None


class News(NamedTuple):
    """The tokens of one sample that came with a chunk.

    Attributes:
      at: generated tokens before these. In `invariant` mode a preempted sample is generated anew,
        and then tokens come again, the same ones.
      tokens, logprobs: one entry per token, those beyond a stop string left out.
      top: likewise, see `SampleOutput.top_logprobs`; None unless asked for.
      rounds: tokens that each round lists. steps, rows: depth and drafted rows of their tree; 0
        where they drafted nothing for this sample.
      text: of the whole sample so far, in whole characters, where it is searched for stop strings;
        else None. What may be the beginning of one is left out, but the string that ends the sample
        may be there.
    """

    at: int
    tokens: list[int]
    logprobs: list[float]
    top: list[dict[int, float]] | None
    rounds: list[int]
    steps: int
    rows: int
    text: str | None = None

    def since(self, known: int) -> News:
        """The part of it beyond the first `known` tokens of the sample."""
        drop = max(0, known - self.at)
        if not drop:
            return self
        rounds, skip = [], drop
        for count in self.rounds:
            rounds.append(count - min(skip, count))
            skip -= min(skip, count)
        return self._replace(
            at=self.at + drop,
            tokens=self.tokens[drop:],
            logprobs=self.logprobs[drop:],
            top=None if self.top is None else self.top[drop:],
            rounds=[count for count in rounds if count],
        )


class Watcher(Protocol):
    """Is called by the thread that steps the engine, and must not keep it waiting."""

    def chunk(self, strategy: str, bucket: int, rounds: int) -> None:
        """A chunk of so many rounds came in."""

    def news(self, sequence: Sequence, news: News) -> None:
        """It brought this sample something; that it ended is what `step` returns."""


class ResultLists(NamedTuple):
    """A chunk's result as lists, which are many times as quick to pick from as arrays.

    Attributes:
      tokens, logprobs: [N][C]. length, finish: [N]. counts: [N][R] tokens emitted per round.
      report: as arrays, for what is rarely used.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    length: list[int]
    finish: list[int]
    counts: list[list[int]]
    report: Report

    @classmethod
    def of(cls, result: Result) -> ResultLists:
        """Args: result: on the host."""
        report = result.report
        counts = report.counts[: int(result.rounds)]
        used = int(counts.sum(axis=0).max(initial=0))
        return cls(
            result.tokens[:, :used].tolist(),
            report.logprobs[:, :used].tolist(),
            result.length.tolist(),
            result.finish.tolist(),
            counts.T.tolist(),
            report,
        )


@dataclasses.dataclass(frozen=True)
class Finished:
    """A sample that ended.

    Attributes:
      sequence: that `add` returned for it.
      verdict: of the `judge` of an engine that has one (`specjax.engine.hosts`).
    """

    sequence: Sequence
    sample: SampleOutput
    verdict: Any = None


_numbers = itertools.count(1)


class Sequence:
    """A sample that waits or runs.

    Args:
      steps: longest path that a round can accept. features: what it asks of the programs it runs
        in. progress: tokens that were generated earlier, which it continues.

    Attributes:
      number: that no other sequence of this process has.
      tokens, logprobs: generated so far, as far as the host knows.
      replica: index of the engine that runs it. slot: where it runs there; None: it waits.
      pages: its pages, in order; full pages of its prompt are shared.
      admitted: whether it was ever started: if it waits nonetheless, it was preempted.
      unread: rounds of plain decoding, since the draft last read what was emitted.
    """

    def __init__(
        self,
        job: Job,
        steps: int,
        features: Features = Features(),  # noqa: B008
        progress: Progress | None = None,
    ):
        self.number = next(_numbers)
        self.job, self._steps, self.features = job, steps, features
        self.replica = 0
        self.slot: int | None = None
        self.pages: list[int] = []
        self.admitted, self.unread = False, 0
        self._given = progress
        self.restart()

    def restart(self) -> None:
        """Forgets what was generated since it came to the engine."""
        job, given = self.job, self._given or Progress([], [], [])
        params = job.params
        self.tokens, self.logprobs = list(given.tokens), list(given.logprobs)
        self.versions = list(given.versions)
        self._transformed: list[float] | None = None
        if params.transformed_logprobs:
            self._transformed = list(given.transformed or [])
        self._records = [] if given.records is None else [given.records]
        self._top = _Top([], []) if params.top_logprobs else None
        self._histogram = [0] * (self._steps + 2)
        self._drafted = self._accepted = 0
        self._depths = [0] * (self._steps + 1)
        self._stops = None
        if params.stop:
            self._stops = StopStrings(
                params.stop,
                job.decode,
                params.include_stop_str_in_output,
                params.min_tokens,
                job.name,
            )
            self._stops.feed(self.tokens)

    def is_of(self, version: int) -> bool:
        """Whether all that was generated here is of this version of the weights, the latest."""
        given = len(self._given.tokens) if self._given else 0
        first = [of for at, of in self.versions if at <= given][-1:]
        return len(self.tokens) == given or first == [version]

    @property
    def length(self) -> int:
        """Prompt and generated tokens."""
        return len(self.job.prompt) + len(self.tokens)

    @property
    def known(self) -> list[int]:
        """The tokens that the model must have read before it can go on."""
        return [*self.job.prompt, *self.tokens]

    @property
    def origins(self) -> tuple[int, int, int]:
        """Tokens that were drafted, that ended a round that drafted, and all others."""
        bonus = sum(self._depths[1:])
        return self._accepted, bonus, len(self.tokens) - self._accepted - bonus

    @property
    def most(self) -> int:
        """Tokens to generate at most."""
        return self.job.limit - len(self.job.prompt)

    def progress(self) -> Progress:
        transformed = None if self._transformed is None else list(self._transformed)
        return Progress(
            list(self.tokens), list(self.logprobs), list(self.versions), transformed, self.records
        )

    @property
    def records(self) -> np.ndarray | None:
        """See `SampleOutput.records`."""
        return np.concatenate(self._records) if self._records else None

    def take_in(
        self, row: int, lists: ResultLists, tree: Tree | DynamicTree | None, version: int
    ) -> SampleOutput | None:
        """Takes in a chunk.

        Args:
          row: place of the sequence in the row map. tree: of its rounds; None: nothing drafted.
          version: of the weights that ran.

        Returns:
          the finished sample, if it ended here.
        """
        count, finish = lists.length[row] - self.length, lists.finish[row]
        if count <= 0:
            return self.output(FINISH_REASONS[finish]) if finish == INVALID else None
        report, before = lists.report, len(self.tokens)
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((before, version))
        new = lists.tokens[row][:count]
        cut = None if self._stops is None else self._stops.feed(new)
        self.tokens += new
        self.logprobs += lists.logprobs[row][:count]
        if self._transformed is not None:
            self._transformed += report.transformed[row, :count].tolist()
        if report.records is not None:
            # A view would keep the whole of the chunk's result until the sample ends.
            self._records.append(report.records[row, :count].copy())
        if self._top is not None:
            self._top.add(report.top, row, count, self.job.params.top_logprobs)
        kept = count if cut is None else cut.tokens - before
        rounds = self._count_rounds(lists.counts[row], kept)
        drafts = tree is not None and self.job.params.speculative
        steps, rows = (tree.steps, tree.rows - 1) if drafts else (0, 0)
        self._drafted += len(rounds) * rows
        self._depths[steps] += len(rounds)
        self._latest = before, rounds, steps, rows
        if cut is not None:
            return self.output("stop", cut)
        return None if finish == RUNNING else self.output(FINISH_REASONS[finish])

    def news(self) -> News:
        """News of the chunk that was taken in last."""
        at, rounds, steps, rows = self._latest
        end = at + sum(rounds)
        tokens, logprobs = self.tokens[at:end], self.logprobs[at:end]
        top = None
        if self._top is not None:
            top = _with_chosen(self._top.scaled[at:end], tokens, logprobs)
        text = None if self._stops is None else self._stops.text
        return News(at, tokens, logprobs, top, rounds, steps, rows, text)

    def _count_rounds(self, counts: list[int], kept: int) -> list[int]:
        """Takes in the rounds that brought the first `kept` tokens; returns what each lists.

        The round that brought the last of them counts with the tokens that are kept of it, as where
        a stop token cuts a round.
        """
        rounds = []
        for count in counts:
            if count and kept:
                count = min(count, kept)
                self._histogram[count] += 1
                self._accepted += count - 1
                kept -= count
                rounds.append(count)
        return rounds

    def output(self, reason: str = "abort", cut: Cut | None = None) -> SampleOutput:
        """The sample as it stands, or up to where a stop string ends it."""
        count = len(self.tokens) if cut is None else cut.tokens
        tokens, logprobs = self.tokens[:count], self.logprobs[:count]
        transformed = None if self._transformed is None else self._transformed[:count]
        records = self.records
        top = None if self._top is None else self._top.with_chosen(tokens, logprobs, transformed)
        bins = self._histogram
        return SampleOutput(
            token_ids=tokens,
            text=None if cut is None else cut.text,
            logprobs=logprobs,
            finish_reason=reason,
            stats=SpecStats(
                rounds=sum(bins),
                drafted=self._drafted,
                accepted=self._accepted,
                histogram=tuple(bins),
                depths=tuple(self._depths),
            ),
            weight_versions=tuple(self.versions),
            transformed_logprobs=transformed,
            top_logprobs=top and top.scaled,
            top_transformed_logprobs=top and top.transformed,
            records=None if records is None else records[:count],
        )


def rejections_until(rejections: Rejections, ends: np.ndarray) -> Rejections:
    """Drops what came after the `ends` [B] of samples that a stop string cut within a chunk."""
    begins = rejections.position - rejections.accepted  # a round's first token
    return rejections._replace(
        accepted=np.where(begins >= ends, -1, rejections.accepted),
        emitted=rejections.emitted & (rejections.position < ends),
    )


class _Top(NamedTuple):
    """Most likely tokens per position, best first; `transformed` is None unless asked for."""

    scaled: list[dict[int, float]]
    transformed: list[dict[int, float]] | None

    def add(self, top: TopLogprobs, row: int, count: int, best: int) -> None:
        _add(self.scaled, top.ids, top.logprobs, row, count, best)
        if top.transformed_ids is not None:
            _add(self.transformed, top.transformed_ids, top.transformed_logprobs, row, count, best)

    def with_chosen(self, tokens, logprobs, transformed) -> _Top:
        """As many entries as there are tokens, each with the token generated there."""
        scaled = _with_chosen(self.scaled, tokens, logprobs)
        if transformed is None:  # another request of the batch may have asked for them
            return _Top(scaled, None)
        return _Top(scaled, _with_chosen(self.transformed, tokens, transformed))


def _add(entries: list, ids, logprobs, row: int, count: int, best: int) -> None:
    for tokens, values in zip(
        ids[row, :count, :best].tolist(), logprobs[row, :count, :best].tolist(), strict=True
    ):
        entries.append({t: v for t, v in zip(tokens, values, strict=True) if v > -np.inf})


def _with_chosen(entries, tokens, logprobs) -> list[dict[int, float]]:
    return [
        best | {token: logprob}
        for best, token, logprob in zip(entries, tokens, logprobs, strict=False)
    ]
