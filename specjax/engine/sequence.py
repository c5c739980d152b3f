"""A sample while it is generated, as the host knows it, and what it reports."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.decode.chunk import Result
from specjax.decode.options import Features
from specjax.decode.state import INVALID, LENGTH, RUNNING, STOPPED
from specjax.decode.tree import DynamicTree, Tree
from specjax.engine.request import BONUS, DRAFT, ERROR, PLAIN, UNKNOWN, Job, SampleOutput, SpecStats
from specjax.engine.text import Cut, Decode, StopStrings, TextPieces

FINISH_REASONS = {STOPPED: "stop", LENGTH: "length", INVALID: ERROR}


class News(NamedTuple):
    """The tokens that a chunk emitted for one sample.

    Attributes:
      at: number of generated tokens before these. In `invariant` mode a preempted sample is
        generated again, and then the same tokens are reported again.
      tokens: the tokens, up to a stop string.
      logprobs: log-probability of each of them.
      top: the most likely tokens at each of them, see `SampleOutput.top_logprobs`; None unless
        asked for.
      rounds: number of tokens that each round emitted.
      steps: depth of the tree of the rounds; 0 where they drafted nothing for this sample.
      rows: number of drafted rows of that tree, likewise.
      text: text of the whole sample so far, in whole characters, if the sample has stop strings;
        else None. An end that may be the beginning of a stop string is left out. A stop string that
        ends the sample is not cut off.
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
        """The part of the news after the first `known` tokens of the sample."""
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


def listed(result: Result) -> Result:
    """A result that is on the host, with lists, whose elements are read many times as fast.

    They take the place of `tokens`, `length`, `finish`, and of the report's `logprobs` and, by
    sequence and round, `counts`.
    """
    counts = result.report.counts[: int(result.rounds)]
    used = int(counts.sum(axis=0).max(initial=0))
    logprobs = result.report.logprobs[:, :used].tolist()
    return result._replace(
        tokens=result.tokens[:, :used].tolist(),
        length=result.length.tolist(),
        finish=result.finish.tolist(),
        report=result.report._replace(logprobs=logprobs, counts=counts.T.tolist()),
    )


@dataclasses.dataclass(frozen=True)
class Finished:
    """A sample that ended.

    Attributes:
      sequence: the object that `add` returned for it.
      sample: the finished sample.
      verdict: the result of the `judge` of `specjax.engine.hosts.Hosts`, if there is one.
    """

    sequence: Sample
    sample: SampleOutput
    verdict: Any = None


_numbers = itertools.count(1)

# Records of pieces of prompts [rows T M ..], the row of a prompt, and its positions there.
PieceRecords = tuple[jax.Array | np.ndarray, int, slice]


def records_between(pieces: list[PieceRecords], begin: int, end: int) -> list[PieceRecords]:
    """The records of the positions from `begin` to `end` of those that pieces hold in order."""
    cut, first = [], 0
    for records, row, places in pieces:
        count = places.stop - places.start
        those = range(places.start, places.stop)[max(begin - first, 0) : max(end - first, 0)]
        if those:
            cut.append((records, row, slice(those.start, those.stop)))
        first += count
    return cut


class Sample:
    """A sample that waits or runs.

    Args:
      job: the sample to generate.
      steps: the most draft tokens that a round can accept.
      features: features of the programs that it needs.
      before: the sample as an earlier run left it, which it continues.

    Attributes:
      number: a number that no other sample of this process has.
      tokens: the tokens generated so far, as far as the host knows.
      logprobs: log-probability of each of them.
      versions: as `SampleOutput.weight_versions`.
      replica: index of the engine that runs it.
      slot: its slot in that engine; None: it waits.
      pages: its pages, in order; full pages of its prompt are shared.
      admitted: whether it ever started; if it waits nevertheless, it was preempted.
      unread: number of tokens emitted by plain decoding that the draft has not read yet.
      reusable: number of positions, from the first, whose pages hold what the present weights and
        the draft would write for these tokens.
      cached: number of positions of its prompt that were not computed, when it started first.
    """

    def __init__(
        self,
        job: Job,
        steps: int,
        features: Features = Features(),  # noqa: B008
        before: SampleOutput | None = None,
    ):
        self.number = next(_numbers)
        self.job, self._steps, self.features = job, steps, features
        self.replica = 0
        self.slot: int | None = None
        self.pages: list[int] = []
        self.admitted, self.unread, self.reusable, self.cached = False, 0, 0, 0
        self._of_prompt: list[PieceRecords] = []
        self._given = before or SampleOutput([], None, [], "abort", SpecStats(()))
        self.restart()

    def restart(self) -> None:
        """Forgets the tokens that were generated since it was added to the engine."""
        given, params = self._given, self.job.params
        self.tokens, self.logprobs = list(given.token_ids), list(given.logprobs)
        self.versions, count = list(given.weight_versions), len(given.token_ids)
        self._transformed: list[float] | None = None
        if params.transformed_logprobs:
            self._transformed = list(given.transformed_logprobs or [])
        self._records = [] if given.records is None else [given.records]
        # One piece per chunk, because a string cannot grow.
        self._origins = [given.origins[:count].ljust(count, UNKNOWN)]
        self._top: list[dict[int, float]] = []  # the most likely tokens of each position
        self._histogram = [0] * (self._steps + 2)
        self._drafted = 0
        self._depths = [0] * (self._steps + 1)
        self._stops = None
        if self.job.stop:
            include = params.include_stop_str_in_output
            self._stops = StopStrings(self.job.stop, self.job.decode, include, params.min_tokens)
            self._stops.skip(self.tokens)

    def take_prompt(self, records: list[PieceRecords]) -> None:
        """Takes the records of its prompt, unless it has tokens, whose records follow the prompt's.

        A prompt that is read again after a preemption has other records where weights changed.
        """
        if not self._records:
            self._of_prompt = records

    def is_of(self, version: int) -> bool:
        """Whether all tokens of this run are of this, the latest, version of the weights."""
        given = len(self._given.token_ids)
        of_first = [its for begin, its in self.versions if begin <= given][-1:]
        return len(self.tokens) == given or of_first == [version]

    @property
    def length(self) -> int:
        """Number of prompt and generated tokens."""
        return len(self.job.prompt) + len(self.tokens)

    @property
    def known(self) -> list[int]:
        """The prompt and the generated tokens."""
        return [*self.job.prompt, *self.tokens]

    @property
    def origin_counts(self) -> tuple[int, int, int]:
        """Numbers of tokens that were drafted, of bonus tokens, and of plainly decoded tokens."""
        accepted, bonus = self._stats.accepted, self._stats.drafted_rounds
        return accepted, bonus, len(self.tokens) - accepted - bonus

    @property
    def _stats(self) -> SpecStats:
        return SpecStats(tuple(self._histogram), tuple(self._depths), self._drafted)

    @property
    def most(self) -> int:
        """The most tokens to generate."""
        return self.job.limit - len(self.job.prompt)

    @property
    def records(self) -> np.ndarray | None:
        """See `SampleOutput.records`."""
        if not self._records:
            return None
        pieces, self._of_prompt = self._of_prompt, []
        self._records[:0] = [np.asarray(piece)[row, places] for piece, row, places in pieces]
        return np.concatenate(self._records)

    @property
    def text(self) -> str | None:
        """See `News.text`."""
        return None if self._stops is None else self._stops.text

    def take_in(
        self, row: int, result: Result, tree: Tree | DynamicTree | None, version: int
    ) -> SampleOutput | None:
        """Appends the tokens that a chunk emitted for this sample.

        Args:
          row: index of the sample in the row map.
          result: result of the chunk, `listed`.
          tree: tree of its rounds; None: they drafted nothing.
          version: version of the weights that ran.

        Returns:
          the finished sample, if it ended here.
        """
        count, finish = result.length[row] - self.length, result.finish[row]
        if count <= 0:
            return self.output(FINISH_REASONS[finish]) if finish == INVALID else None
        report, before, best = result.report, len(self.tokens), self.job.params.logprobs
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((before, version))
        new = result.tokens[row][:count]
        cut = None if self._stops is None else self._stops.feed(new)
        self.tokens += new
        self.logprobs += report.logprobs[row][:count]
        if self._transformed is not None:
            self._transformed += report.transformed[row, :count].tolist()
        if report.records is not None:
            # A view would keep the whole result of the chunk in memory until the sample ends.
            self._records.append(report.records[row, :count].copy())
        if best:  # if it is 0, the chosen tokens alone are reported
            rows = row, slice(count), slice(best)
            self._top += _entries(report.top.ids[rows], report.top.logprobs[rows])
        kept = count if cut is None else cut.tokens - before
        rounds = self._count_rounds(report.counts[row], kept)
        drafts = tree is not None and self.job.params.speculative
        steps, rows = (tree.steps, tree.rows - 1) if drafts else (0, 0)
        self._drafted += len(rounds) * rows
        self._depths[steps] += len(rounds)
        self._origins.append(origins_of(rounds, steps))
        self._latest = before, rounds, steps, rows
        if cut is not None:
            return self.output("stop", cut)
        return None if finish == RUNNING else self.output(FINISH_REASONS[finish])

    def news(self) -> News:
        """The news of the chunk that was read last."""
        begin, rounds, steps, rows = self._latest
        those = slice(begin, begin + sum(rounds))
        tokens, logprobs = self.tokens[those], self.logprobs[those]
        top = self._with_chosen(those)
        return News(begin, tokens, logprobs, top, rounds, steps, rows, self.text)

    def _with_chosen(self, those: slice) -> list[dict[int, float]] | None:
        """The most likely tokens at some positions, each with the token that was generated there.

        None: they were not asked for.
        """
        if self.job.params.logprobs is None:
            return None
        chosen = zip(self.tokens[those], self.logprobs[those], strict=True)
        best = self._top[those] if self._top else itertools.repeat({})
        return [likely | {t: value} for likely, (t, value) in zip(best, chosen, strict=False)]

    def _count_rounds(self, counts: list[int], kept: int) -> list[int]:
        """Counts the rounds that emitted the first `kept` tokens; returns how many each emitted.

        Of the last of these rounds only the kept tokens count, as where a stop token cuts a round.
        """
        rounds = []
        for count in counts:
            if count and kept:
                count = min(count, kept)
                self._histogram[count] += 1
                kept -= count
                rounds.append(count)
        return rounds

    def output(self, reason: str = "abort", cut: Cut | None = None) -> SampleOutput:
        """The sample so far, up to a stop string if one ends it.

        Args:
          reason: the finish reason.
          cut: where a stop string ends it; None: there is none.
        """
        those = slice(None if cut is None else cut.tokens)
        transformed, records = self._transformed, self.records
        ends = slice(None if cut is None else len(self.job.prompt) - 1 + cut.tokens)
        return SampleOutput(
            token_ids=self.tokens[those],
            text=None if cut is None else cut.text,
            logprobs=self.logprobs[those],
            finish_reason=reason,
            stats=self._stats,
            weight_versions=tuple(self.versions),
            transformed_logprobs=None if transformed is None else transformed[those],
            top_logprobs=self._with_chosen(those),
            records=None if records is None else records[ends],
            origins="".join(self._origins)[: len(self.tokens)][those],
            cached_tokens=self.cached,
        )


def _entries(ids: np.ndarray, logprobs: np.ndarray) -> list[dict[int, float]]:
    """The most likely tokens of each position with their log-probabilities, best first."""
    return [
        {t: value for t, value in zip(tokens, values, strict=True) if value > -np.inf}
        for tokens, values in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]


class Unfinished(dict[Sample, None]):
    """The samples that were added to an engine and have not ended, in the order of their coming.

    Attributes:
      seen: all features needed since there was none last.
    """

    seen = Features()

    def add(self, sample: Sample) -> None:
        """Adds a sample that was queued."""
        self.seen = self.seen | sample.features if self else sample.features
        self[sample] = None

    @property
    def features(self) -> Features:
        """All features that unfinished samples need; the default ones where there are none."""
        return functools.reduce(operator.or_, {s.features for s in self} or [Features()])


def origins_of(rounds: list[int], steps: int) -> str:
    """The origin of each token of a chunk, see `SampleOutput.origins`.

    Args:
      rounds: number of tokens that each round emitted.
      steps: depth of the tree of the rounds; 0 where they drafted nothing.
    """
    if not steps:
        return PLAIN * sum(rounds)
    return "".join(DRAFT * (count - 1) + BONUS for count in rounds)


class SampleStream:
    """The pieces in which a sample grows while an engine generates it.

    Args:
      sample: the sample.
      decode: function from token ids to text; None: without a tokenizer, all text is empty.
    """

    def __init__(self, sample: Sample, decode: Decode | None):
        self._sample, self._pieces, self._count = sample, TextPieces(decode), 0

    def take(self, output: SampleOutput | None = None) -> tuple[list[int], str]:
        """Returns the tokens since the last call, and the text that is final since then.

        Args:
          output: the sample with its text, once it has ended; it may end before its last tokens.
        """
        text = self._sample.text
        tokens = (self._sample.tokens if output is None else output.token_ids)[self._count :]
        self._count += len(tokens)
        if output is None:
            return tokens, self._pieces.push(tokens, text)
        return tokens, self._pieces.finish(tokens, output.text or "", text)
