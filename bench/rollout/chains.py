"""Long responses made of tasks: what `bench.rollout longtail` runs through an engine.

A response of many tokens is a chain of turns. A turn answers one task and ends where the policy
ends it, or at the chain's length; then the chain continues with the next task. Only
generated tokens count. A turn reads its own task and none of the turns before it: the
policies were trained on one task at a time, and with earlier turns in its context the embedded one
writes other text, of which much less is accepted. Tasks that are read alone also keep the cost of a
chain linear in its length.

A chain keeps its slot: no more chains are in the engine than it has slots. Tasks, seeds and lengths
are fixed before the first token, so every arm generates the same tokens.

A trace of a rollout, which `bench.control replay` reads, is JSON lines. The first has `settings`:
`model`, `task`, `slots`, `chunk_tokens`, `stretch`, `samples`, `lengths` (tokens of every chain)
and `strategies`. Then one line per static strategy with the chains' `histograms` (rounds by tokens
emitted), and one per drawn arm with its `spans`, the fields of `Span` in order.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.config import SamplingParams
from specjax.control import Observation
from specjax.engine.engine import Engine
from specjax.engine.request import Job, SampleOutput, make_jobs

_NORMAL = statistics.NormalDist()


def long_tailed(count: int, median: float, ratio: float, seed: int) -> list[int]:
    """Returns lengths of a log-normal distribution whose 99th percentile is `ratio` medians.

    They are its quantiles at the middles of `count` equal parts, in an order drawn from the seed:
    every seed has the same lengths, in another order.
    """
    sigma = math.log(ratio) / _NORMAL.inv_cdf(0.99)
    parts = (np.arange(count) + 0.5) / count
    lengths = [max(1, round(median * math.exp(sigma * _NORMAL.inv_cdf(q)))) for q in parts]
    return [lengths[i] for i in np.random.default_rng(seed).permutation(count)]


@dataclasses.dataclass(frozen=True)
class Work:
    """All chains that a rollout generates.

    Attributes:
      tasks: token ids of the prompts.
      lengths: number of tokens of each chain; the chains of a group are adjacent.
      samples: number of chains per group; they have the same tasks.
      eos_ids: tokens that end a turn.
      turn_limit: largest number of tokens in a turn.
      temperature: sampling temperature.
      seed: seed of all turns.
    """

    tasks: Sequence[Sequence[int]]
    lengths: Sequence[int]
    samples: int
    eos_ids: Sequence[int]
    turn_limit: int
    temperature: float = 1.0
    seed: int = 0

    @property
    def groups(self) -> int:
        return -(-len(self.lengths) // self.samples)

    @property
    def longest_prompt(self) -> int:
        return max(map(len, self.tasks))

    def params(self, seed: int, tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, max_tokens=tokens, seed=seed, n=self.samples
        )

    def _number(self, chain: int, turn: int) -> int:
        """Numbers the turns of all groups; no two have the same number."""
        return turn * self.groups + chain // self.samples

    def task(self, chain: int, turn: int) -> Sequence[int]:
        return self.tasks[self._number(chain, turn) % len(self.tasks)]

    def job(self, chain: int, turn: int, left: int) -> Job:
        """Makes the job of a turn; no other turn, task or chain has its noise."""
        # Numbers go up from a multiple of 2^20, so that seeds side by side share no noise.
        seed = (self.seed << 20) + self._number(chain, turn)
        params = self.params(seed, min(self.turn_limit, left))
        group, sample = divmod(chain, self.samples)
        return make_jobs(self.task(chain, turn), params, self.eos_ids, request=group)[sample]

    def single_turns(self) -> list[Job]:
        """Makes jobs of each task by itself, `samples` times, with noise that no chain has."""
        jobs = []
        for index, task in enumerate(self.tasks):
            params = self.params(((self.seed + 1) << 20) - 1 - index, self.turn_limit)
            jobs += make_jobs(task, params, self.eos_ids, request=index)
        return jobs


class Chain:
    """One long response while it is generated.

    Attributes:
      jobs: jobs of the turns that have started.
      turns: tokens of the turns that have ended.
      histogram: number of rounds by tokens emitted.
      admitted, ended: seconds since the rollout began.
    """

    def __init__(self, work: Work, index: int, admitted: float = 0.0):
        self.work, self.index, self.admitted = work, index, admitted
        self.left = work.lengths[index]
        self.jobs: list[Job] = []
        self.turns: list[list[int]] = []
        self.histogram: np.ndarray | int = 0
        self.ended = math.nan

    def next_turn(self) -> Job:
        self.jobs.append(self.work.job(self.index, len(self.turns), self.left))
        return self.jobs[-1]

    def take(self, sample: SampleOutput) -> None:
        self.turns.append(sample.token_ids)
        self.left -= len(sample.token_ids)
        self.histogram = self.histogram + np.array(sample.stats.histogram)


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive chunks with one strategy and one number of running slots.

    Attributes:
      until: end, in seconds since the rollout began.
      running: number of running slots when the chunks were enqueued.
      strategy: strategy of the chunks.
      rounds: number of rounds that ran.
      slot_rounds: number of (slot, round) pairs.
      accepted: number of accepted drafts in all of them.
    """

    until: float
    running: int
    strategy: str
    rounds: int
    slot_rounds: int
    accepted: int


class Watch:
    """Wraps a controller and records spans; the controller decides as it would alone."""

    def __init__(self, inner):
        self.inner, self.started = inner, time.perf_counter()
        self.spans: list[Span] = []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def observe(self, seen: Observation) -> None:
        self.inner.observe(seen)
        if not seen.rounds:
            return
        drafts = int(seen.accepted[seen.accepted > 0].sum())
        now, rounds, pairs = time.perf_counter() - self.started, seen.rounds, seen.slot_rounds
        if self.spans:
            last = self.spans[-1]
            if (last.running, last.strategy) == (seen.batch_size, seen.strategy):
                self.spans.pop()
                rounds, pairs = rounds + last.rounds, pairs + last.slot_rounds
                drafts += last.accepted
        self.spans.append(Span(now, seen.batch_size, seen.strategy, rounds, pairs, drafts))


@dataclasses.dataclass(frozen=True)
class Rollout:
    """The result of one rollout.

    Attributes:
      seconds: seconds until the last chain ended.
      chains: all chains.
      spans: spans of chunks, in order.
    """

    seconds: float
    chains: list[Chain]
    spans: list[Span]

    @property
    def longest(self) -> Chain:
        return max(self.chains, key=lambda c: self.length(c))

    @staticmethod
    def length(chain: Chain) -> int:
        return sum(map(len, chain.turns))

    @property
    def longest_rate(self) -> float:
        """Tokens per second of the longest chain, from when it got its slot to its end."""
        chain = self.longest
        return self.length(chain) / (chain.ended - chain.admitted)

    def tail_seconds(self, left: int) -> float:
        """Seconds from when no more than `left` chains were left."""
        ends = sorted(chain.ended for chain in self.chains)
        return ends[-1] - (ends[-left - 1] if left < len(ends) else 0.0)

    @property
    def tokens(self) -> int:
        return sum(map(self.length, self.chains))

    @property
    def histograms(self) -> np.ndarray:
        """Rounds of each chain by tokens emitted, [chains, steps + 2]."""
        return np.stack([chain.histogram for chain in self.chains])


def accept_length(histograms: np.ndarray) -> float:
    """Returns the tokens per round over rows of histograms."""
    total = histograms.reshape(-1, histograms.shape[-1]).sum(axis=0)
    return float(total @ np.arange(len(total)) / total.sum())


def roll_out(engine: Engine, work: Work) -> Rollout:
    """Runs all chains to their ends; the engine's controller must be a `Watch`."""
    watch = engine.controller
    start = watch.started = time.perf_counter()
    waiting, running = deque(range(len(work.lengths))), {}
    done: list[Chain] = []
    while waiting or running:
        while waiting and len(running) < engine.batch:
            chain = Chain(work, waiting.popleft(), time.perf_counter() - start)
            running[engine.add(chain.next_turn())] = chain
        for event in engine.step():
            chain = running.pop(event.sequence)
            chain.take(event.sample)
            if chain.left > 0:
                running[engine.add(chain.next_turn())] = chain
            else:
                chain.ended = time.perf_counter() - start
                done.append(chain)
    seconds = time.perf_counter() - start
    return Rollout(seconds, sorted(done, key=lambda c: c.index), watch.spans)


def differing(a: Rollout, b: Rollout) -> Iterator[tuple[Chain, Chain, int]]:
    """Yields the chains whose tokens differ, with the first turn that does."""
    for x, y in zip(a.chains, b.chains, strict=True):
        if x.turns != y.turns:
            turns = zip(x.turns, y.turns, strict=False)
            yield x, y, next(i for i, (s, t) in enumerate(turns) if s != t)


# --- the trace of a rollout --------------------------------------------------------------------

SUFFIX = ".trace.jsonl"
PLAIN, GOODPUT = "plain", "goodput"  # arms beside the static strategies


@dataclasses.dataclass(frozen=True)
class Trace:
    """What `bench.rollout longtail` keeps of its rollouts for `bench.control replay`.

    Attributes:
      settings: settings of the rollouts.
      histograms: number of rounds by tokens emitted, for each strategy [chains, steps + 2].
      spans: spans of chunks, for each arm.
    """

    settings: Mapping[str, Any]
    histograms: Mapping[str, np.ndarray]
    spans: Mapping[str, Sequence[Span]]

    @property
    def lengths(self) -> list[int]:
        return list(self.settings["lengths"])

    def write(self, path: str | Path) -> None:
        rows: list[dict] = [{"settings": self.settings}]
        for name, values in self.histograms.items():
            rows.append({"strategy": name, "histograms": np.asarray(values).tolist()})
        for name, spans in self.spans.items():
            listed = [[round(s.until, 4), *dataclasses.astuple(s)[1:]] for s in spans]
            rows.append({"arm": name, "spans": listed})
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Reads a trace; the result file beside it may be named instead.

        Raises:
          FileNotFoundError, ValueError: there is none, or it is something else.
        """
        path = Path(path)
        if path.suffix == ".json":
            path = path.with_suffix(SUFFIX)
        if not path.is_file():
            raise FileNotFoundError(f"no {path}: expected a trace of `bench.rollout longtail`")
        histograms, spans = {}, {}
        try:
            first, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            settings = first["settings"]
            for row in rows:
                if "strategy" in row:
                    histograms[row["strategy"]] = np.array(row["histograms"], int)
                else:
                    spans[row["arm"]] = [Span(*values) for values in row["spans"]]
            chains = len(settings["lengths"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: not a trace of bench.rollout longtail ({type(error).__name__}: {error})"
            ) from error
        if not histograms or any(len(h) != chains for h in histograms.values()):
            raise ValueError(f"{path}: expected histograms of {chains} chains for each strategy")
        return cls(settings, histograms, spans)
