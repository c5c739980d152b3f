"""`python -m bench.longtail`: a rollout whose longest samples decide its time.

64 prompts, 4 samples each, lengths from a log-normal distribution with the 99th percentile at 20
medians. Slots are refilled while samples wait, and then the batch shrinks to its tail. The arms
take turns:

    plain       an engine with spec=None in the same settings
    off, ...    each strategy of the compiled set throughout, in the engine that can speculate
    goodput     the default controller over the same set, starting from its calibration every time

A response of many tokens is a chain of turns. A turn answers one task and ends where the policy
ends it, or at the chain's length; then the chain continues with the next task. A turn reads its own
task and none of the turns before it: the policies were trained on one task at a time, and with
earlier turns in its context the embedded one writes other text, of which much less is accepted. A
chain keeps its slot. Tasks, seeds and lengths are fixed before the first token, so every arm
generates the same tokens.

Everything is compiled before the clock starts. `wall_ratio/.._calibration_shared` charges goodput
with its calibration once for all repeats, as an engine calibrates once; `.._calibration_apart` not
at all. The best static strategy is the one with the smallest median. The longest sample's speed is
its tokens over the seconds from when it got its slot to its end. The tail begins when --tail chains
are left. `samples_different` counts samples with other tokens than plain decoding's. A picture is
written beside the result file.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench import plots
from bench.command import add_prompt_arguments, bench_parser, heldout_prompts, user_errors
from bench.record import RESULTS, alternate, figure, ratio_figure, report, write_result
from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.control import OFF, ControlConfig, Observation, Static
from specjax.control.config import DEFAULT_STRATEGIES
from specjax.engine.engine import Engine
from specjax.engine.request import Job, SampleOutput, make_jobs
from specjax.engine.settings import EngineConfig
from specjax.tokenizer import load_tokenizer

WARM_TOKENS = 12  # per chain, before the clock starts
PLAIN, GOODPUT = "plain", "goodput"  # arms beside the static strategies
UNITS = {
    "seconds": "s of wall time",
    "tail_seconds": "s of the tail",
    "longest_rate": "tok/s of the longest sample since it got its slot",
}


def long_tailed(count: int, median: float, ratio: float, seed: int) -> list[int]:
    """Returns lengths of a log-normal distribution whose 99th percentile is `ratio` medians.

    They are its quantiles at the middles of `count` equal parts, in an order drawn from the seed:
    every seed has the same lengths, in another order.
    """
    normal = statistics.NormalDist()
    sigma, parts = math.log(ratio) / normal.inv_cdf(0.99), (np.arange(count) + 0.5) / count
    lengths = [max(1, round(median * math.exp(sigma * normal.inv_cdf(q)))) for q in parts]
    return [lengths[i] for i in np.random.default_rng(seed).permutation(count)]


# --- chains --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Work:
    """All chains that a rollout generates.

    Attributes:
      tasks: token ids of the prompts.
      lengths: number of tokens of each chain; the chains of a group are adjacent.
      samples: number of chains per group; they have the same tasks.
      eos_ids: tokens that end a turn.
      turn_limit: largest number of tokens in a turn.
    """

    tasks: Sequence[Sequence[int]]
    lengths: Sequence[int]
    samples: int
    eos_ids: Sequence[int]
    turn_limit: int
    seed: int = 0

    @property
    def room(self) -> int:
        return max(map(len, self.tasks)) + self.turn_limit

    def job(self, chain: int, turn: int, left: int) -> Job:
        """Makes the job of a turn; no other turn, task or chain has its noise."""
        group, sample = divmod(chain, self.samples)
        number = turn * -(-len(self.lengths) // self.samples) + group
        # Numbers go up from a multiple of 2^20, so that seeds side by side share no noise.
        params = SamplingParams(
            max_tokens=min(self.turn_limit, left),
            seed=(self.seed << 20) + number,
            n=self.samples,
        )
        task = self.tasks[number % len(self.tasks)]
        return make_jobs(task, params, self.eos_ids, request=group)[sample]


class Chain:
    """One long response while it is generated.

    Attributes:
      turns: tokens of the turns that have ended.
      admitted, ended: seconds since the rollout began.
    """

    def __init__(self, work: Work, index: int, admitted: float = 0.0):
        self.work, self.index, self.admitted = work, index, admitted
        self.left = work.lengths[index]
        self.turns: list[list[int]] = []
        self.accepted = self.rounds = 0
        self.ended = math.nan

    def next_turn(self) -> Job:
        return self.work.job(self.index, len(self.turns), self.left)

    def take(self, sample: SampleOutput) -> None:
        self.turns.append(sample.token_ids)
        self.left -= len(sample.token_ids)
        self.accepted += sample.stats.accepted
        self.rounds += sample.stats.rounds

    @property
    def length(self) -> int:
        return sum(map(len, self.turns))


class Span(NamedTuple):
    """Consecutive chunks with one strategy and one number of running slots.

    `until` is their end, in seconds since the rollout began.
    """

    until: float
    running: int
    strategy: str
    rounds: int


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
        rounds, here = seen.rounds, (seen.batch_size, seen.strategy)
        if self.spans and self.spans[-1][1:3] == here:
            rounds += self.spans.pop().rounds
        self.spans.append(Span(time.perf_counter() - self.started, *here, rounds))


class Rollout(NamedTuple):
    """The result of one rollout: seconds until the last chain ended, chains, and spans in order."""

    seconds: float
    chains: list[Chain]
    spans: list[Span]

    def values(self, tail: int) -> dict[str, float]:
        """Returns what is compared, see `UNITS`."""
        longest = max(self.chains, key=lambda chain: chain.length)
        ends = sorted(chain.ended for chain in self.chains)
        return {
            "seconds": self.seconds,
            "tail_seconds": ends[-1] - (ends[-tail - 1] if tail < len(ends) else 0.0),
            "longest_rate": longest.length / (longest.ended - longest.admitted),
        }


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


# --- arms ----------------------------------------------------------------------------------------


class Bench:
    """Runs rollouts of all arms, and keeps their results.

    Attributes:
      rollouts: the last rollout of each arm.
      records: what is compared of each rollout, by arm.
      different: per arm, how many samples of some rollout differed from plain decoding's.
    """

    def __init__(self, model, work: Work, args: argparse.Namespace):
        cfg, params, _ = model
        self.work, self.tail, self.names = work, args.tail, args.strategies
        how = EngineConfig(follow_ups=True)
        own = next((name for name in self.names if name != OFF), None)
        if own is None:
            raise ValueError(f"--strategies must list one that drafts, got {', '.join(self.names)}")
        control = ControlConfig(strategies=tuple(self.names))
        wanted = [SamplingParams()]
        plain = LLM((cfg, params, None), None, args.slots, work.room, engine=how)
        spec = LLM(model, SpecConfig(own), args.slots, work.room, engine=how, control=control)
        plain.warm_up(wanted)
        start_up = spec.warm_up(wanted)
        print(start_up, flush=True)
        self.calibration_seconds = start_up.calibration_seconds
        self.plain, self.spec = plain.engine, spec.engine
        self._goodput = self.spec.controller
        self._calibrated = self._goodput.state()
        self.arms = (PLAIN, *self.names, GOODPUT)
        self.rollouts: dict[str, Rollout] = {}
        self.records: dict[str, list[dict[str, float]]] = {arm: [] for arm in self.arms}
        self.different = dict.fromkeys(self.arms, 0)
        self._reference: Rollout | None = None

    def engine(self, arm: str) -> Engine:
        """Returns the arm's engine, with its controller as it was at the start."""
        engine = self.plain if arm == PLAIN else self.spec
        if arm == GOODPUT:
            controller = self._goodput
            controller.load_state(copy.deepcopy(self._calibrated))
        else:
            controller = Static(OFF if arm == PLAIN else arm)
        engine.controller = Watch(controller)
        return engine

    def run(self, arm: str) -> None:
        """Runs one rollout, and compares it with the first one of plain decoding."""
        rollout = self.rollouts[arm] = roll_out(self.engine(arm), self.work)
        self.records[arm].append(rollout.values(self.tail))
        self._reference = self._reference or rollout
        pairs = zip(self._reference.chains, rollout.chains, strict=True)
        count = sum(a.turns != b.turns for a, b in pairs)
        self.different[arm] = max(self.different[arm], count)

    def measure(self, repeats: int) -> None:
        """Measures all arms in turns, after a short rollout of each."""
        short = [min(n, WARM_TOKENS) for n in self.work.lengths[: 2 * self.spec.batch]]
        for arm in self.arms:
            roll_out(self.engine(arm), dataclasses.replace(self.work, lengths=short))
        alternate({arm: lambda arm=arm: self.run(arm) for arm in self.arms}, repeats)


def figures_of(bench: Bench) -> dict[str, dict]:
    """Computes the figures of the measured rollouts."""
    of = {
        name: {arm: [record[name] for record in bench.records[arm]] for arm in bench.arms}
        for name in UNITS
    }
    seconds, whole = of["seconds"], bench.calibration_seconds
    best = min(bench.names, key=lambda name: statistics.median(seconds[name]))
    result = {"best_static": figure(best, "strategy with the smallest median wall time")}
    shared = whole / len(seconds[GOODPUT])
    for suffix, charge in (("_calibration_shared", shared), ("_calibration_apart", 0.0)):
        mine = [value + charge for value in seconds[GOODPUT]]
        for name, other in ((PLAIN, PLAIN), ("best_static", best)):
            result[f"wall_ratio/goodput/{name}{suffix}"] = _ratio(mine, seconds[other], other)
    for name in ("longest_rate", "tail_seconds"):
        ratio = _ratio(of[name][GOODPUT], of[name][PLAIN], PLAIN)
        result[f"{name}_ratio/goodput/plain"] = ratio
    for arm in bench.arms:
        for name, unit in UNITS.items():
            values = of[name][arm]
            ends = [min(values), max(values)]
            result[f"{name}/{arm}"] = figure(statistics.median(values), unit, ends)
        chains = bench.rollouts[arm].chains
        length = 1 + sum(c.accepted for c in chains) / sum(c.rounds for c in chains)
        result[f"accept_length/{arm}"] = figure(length, "tokens per slot and round")
        unit = "samples with other tokens than plain decoding"
        result[f"samples_different/{arm}"] = figure(bench.different[arm], unit)
    result["calibration_seconds"] = figure(whole, "s, once per engine")
    return result


def _ratio(mine: Sequence[float], others: Sequence[float], other: str) -> dict:
    return ratio_figure(mine, others, f"goodput / {other}, median over turns")


# --- command line --------------------------------------------------------------------------------


def work_of(cfg, tokenizer, args: argparse.Namespace) -> Work:
    """Makes the chains that all arms generate.

    Raises:
      ValueError: lengths or tasks do not fit, or a turn may not fit the policy's positions.
    """
    terms = {"min_terms": args.min_terms} if args.task == "sums" else {}
    work = Work(
        tasks=heldout_prompts(tokenizer, args, args.tasks, **terms),
        lengths=long_tailed(args.prompts * args.samples, args.median, args.ratio, args.seed),
        samples=args.samples,
        eos_ids=cfg.eos_token_ids,
        turn_limit=args.turn_limit,
        seed=args.seed,
    )
    if work.room > cfg.max_position:
        raise ValueError(
            f"a turn may need {work.room} positions and the policy has {cfg.max_position}; lower "
            "--turn_limit or --max_prompt_tokens"
        )
    return work


def run(args: argparse.Namespace) -> None:
    """Measures and writes result and picture."""
    cfg, weights, head = hf.load_checkpoint(args.model, "float32")
    cfg = cfg.running(compute_dtype="float32")
    work = work_of(cfg, load_tokenizer(args.model), args)
    bench = Bench((cfg, weights, head), work, args)
    bench.measure(args.repeats)
    figures = figures_of(bench)
    path = args.out or RESULTS / f"longtail_{Path(args.model).name}.json"
    path = write_result("longtail", vars(args), figures, path)
    spans = {
        f"{arm}: median {figures[f'seconds/{arm}']['value']:.2f} s": bench.rollouts[arm].spans
        for arm in (PLAIN, GOODPUT)
    }
    title = f"{len(work.lengths)} samples, {args.slots} slots, longest {max(work.lengths)} tokens"
    plots.draw_spans(spans, args.strategies, title, path.with_suffix(".png"))
    print(report(figures), path, sep="\n")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("longtail", __doc__, "longtail_<model>")
    add_prompt_arguments(parser)
    add = parser.add_argument
    add("--prompts", type=int, default=64)
    add("--samples", type=int, default=4, help="per prompt")
    add("--median", type=float, default=64, help="tokens of the median sample")
    add("--ratio", type=float, default=20, help="99th percentile over the median")
    add("--slots", type=int, default=32, help="samples that run at once")
    add("--strategies", nargs="+", default=list(DEFAULT_STRATEGIES), help="the compiled set")
    add("--tasks", type=int, default=64, help="different tasks that chains are made of")
    add("--min_terms", type=int, default=8, help="of a task of sums: longer tasks, fewer turns")
    add("--turn_limit", type=int, default=192, help="tokens of a turn at most")
    add("--tail", type=int, default=8, help="chains that are left when the tail begins")
    add("--repeats", type=int, default=7)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    with user_errors("longtail"):
        run(args)


if __name__ == "__main__":
    main()
