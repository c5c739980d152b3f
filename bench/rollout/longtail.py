"""`python -m bench.rollout longtail`: a rollout whose longest samples decide its time.

64 prompts, 4 samples each, lengths from a log-normal distribution with the 99th percentile at 20
medians. Long responses are chains of tasks (`bench/rollout/chains.py` says how and why). Slots are
refilled while chains wait, and then the batch shrinks to its tail. The arms take turns:

    plain       an engine with spec=None in the same settings
    off, ...    each strategy of the compiled set throughout, in the engine that can speculate
    goodput     the default controller over the same set, starting from its calibration every time

Everything is compiled before the clock starts. `wall_ratio/goodput/plain` charges every rollout of
goodput with the whole calibration, which an engine does once in its life; `.._calibration_shared`
charges it once for all repeats together, `.._calibration_apart` not at all. The best static
strategy is the one with the smallest median.

The longest sample's speed is its tokens over the seconds from when it got its slot to its end. The
tail begins when --tail chains are left. Reading the tasks of later turns, which a response to one
task would not need, is part of every arm's time.

A picture and a trace for `bench.control replay` are written beside the result file.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from bench import plots
from bench.command import add_prompt_arguments, bench_parser, user_errors
from bench.record import (
    RESULTS,
    alternate,
    figure,
    paired_ratio_interval,
    report,
    write_result,
)
from bench.rollout import chains
from bench.rollout.chains import GOODPUT, PLAIN, SUFFIX, Trace
from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.control import OFF, ControlConfig, make_controller
from specjax.control.config import DEFAULT_STRATEGIES
from specjax.engine.compare import Difference, first_difference
from specjax.engine.engine import Engine
from specjax.engine.settings import EngineConfig
from specjax.tokenizer import load_tokenizer
from train import data

JUDGED_AT_MOST = 8
NATURAL = (0.95, 1.05)  # accept length in chains over that of single turns
WARM_TOKENS = 12  # per chain, before the clock starts


class Bench:
    """Runs rollouts of all arms, and keeps their results.

    Attributes:
      arms: names of the arms.
      rollouts: the last rollout of each arm.
      records: figures of each rollout, by arm.
      different: per arm, the first chains that differ from plain decoding's.
      calibration_seconds: seconds of goodput's calibration.
    """

    def __init__(self, model, work: chains.Work, args: argparse.Namespace):
        cfg, params, head = model
        self.work, self.tail = work, args.tail
        room = min(work.longest_prompt + work.turn_limit, cfg.max_position)
        how = EngineConfig(chunk_tokens=args.chunk_tokens, follow_ups=True)
        self.control = ControlConfig(strategies=tuple(args.strategies))
        names = [strategy.name for strategy in self.control.strategies]
        own = next((name for name in names if name != OFF), None)
        if own is None:
            raise ValueError(f"--strategies must list one that drafts, got {', '.join(names)}")
        wanted = [SamplingParams(temperature=work.temperature)]
        plain = LLM((cfg, params, None), None, args.slots, room, engine=how)
        spec = LLM(model, SpecConfig(own), args.slots, room, engine=how, control=self.control)
        plain.warm_up(wanted)
        start_up = spec.warm_up(wanted)
        print(start_up, flush=True)
        self.calibration_seconds = start_up.calibration_seconds
        self.plain, self.spec = plain.engine, spec.engine
        self._goodput = self.spec.controller
        self._calibrated = self._goodput.state()
        self.arms = (PLAIN, *names, GOODPUT)
        self.rollouts: dict[str, chains.Rollout] = {}
        self.records: dict[str, list[dict[str, float]]] = {arm: [] for arm in self.arms}
        self.different: dict[str, list] = {arm: [] for arm in self.arms}
        self._reference: chains.Rollout | None = None

    def engine(self, arm: str) -> Engine:
        """Returns the arm's engine, with its controller as it was at the start."""
        if arm == PLAIN:
            engine, controller = self.plain, make_controller("static", (OFF,))
        elif arm == GOODPUT:
            engine, controller = self.spec, self._goodput
            controller.load_state(copy.deepcopy(self._calibrated))
        else:
            engine, controller = self.spec, make_controller("static", (arm,))
        engine.controller = chains.Watch(controller)
        return engine

    def run(self, arm: str) -> None:
        """Runs one rollout, and compares it with the first one of plain decoding."""
        rollout = chains.roll_out(self.engine(arm), self.work)
        self.rollouts[arm] = rollout
        self.records[arm].append(
            {
                "seconds": rollout.seconds,
                "tail_seconds": rollout.tail_seconds(self.tail),
                "longest_rate": rollout.longest_rate,
            }
        )
        self._reference = self._reference or rollout
        if not self.different[arm]:
            self.different[arm] = list(chains.differing(self._reference, rollout))

    def measure(self, repeats: int) -> None:
        """Measures all arms in turns, after a short rollout of each."""
        short = [min(n, WARM_TOKENS) for n in self.work.lengths[: 2 * self.spec.batch]]
        for arm in self.arms:
            chains.roll_out(self.engine(arm), dataclasses.replace(self.work, lengths=short))
        built = self.compilations
        alternate({arm: lambda arm=arm: self.run(arm) for arm in self.arms}, repeats)
        self.compiled_meanwhile = self.compilations - built

    @property
    def compilations(self) -> int:
        return self.plain.runner.compilations + self.spec.runner.compilations

    def explain(self) -> list[tuple[str, Difference]]:
        """Judges chains that differ, `JUDGED_AT_MOST` of each arm."""
        return [
            (
                arm,
                first_difference(
                    self.spec.runner, x.jobs[turn], x.turns[turn], y.turns[turn]
                ),
            )
            for arm in self.arms
            for x, y, turn in self.different[arm][:JUDGED_AT_MOST]
        ]  # fmt: skip

    def single_turns(self, strategy: str) -> np.ndarray:
        """Histograms [turns, steps + 2] of tasks that are answered one by one."""
        samples, _ = self.engine(strategy).generate(self.work.single_turns())
        return np.array([sample.stats.histogram for sample in samples])


# --- figures ---------------------------------------------------------------------------------


def figures_of(bench: Bench) -> dict[str, dict]:
    """Computes the figures of the measured rollouts."""
    of = {name: _column(bench, name) for name in next(iter(bench.records.values()))[0]}
    seconds = of["seconds"]
    names = [strategy.name for strategy in bench.control.strategies]
    best = min(names, key=lambda name: statistics.median(seconds[name]))
    result = {"best_static": figure(best, "strategy with the smallest median wall time")}
    result |= _wall_ratios(bench, seconds, best)
    for name, unit in (
        ("longest_rate", "tok/s of the longest sample since it got its slot, goodput / plain"),
        ("tail_seconds", f"seconds since {bench.tail} chains were left, goodput / plain"),
    ):
        result[f"{name}_ratio/goodput/plain"] = _ratio(of[name][GOODPUT], of[name][PLAIN], unit)
        against = unit.replace("plain", best)
        result[f"{name}_ratio/goodput/best_static"] = _ratio(
            of[name][GOODPUT], of[name][best], against
        )
    for arm in bench.arms:
        result |= _of_arm(bench, arm, of)
    work = bench.work
    result["tokens"] = figure(sum(work.lengths), "tokens of one rollout")
    result["length_median"] = figure(statistics.median(work.lengths), "tokens")
    result["length_p99"] = figure(float(np.quantile(work.lengths, 0.99, method="hazen")), "tokens")
    result["length_longest"] = figure(max(work.lengths), "tokens")
    result["calibration_seconds"] = figure(bench.calibration_seconds, "s, once per engine")
    result["compilations"] = figure(bench.compiled_meanwhile, "programs built while measuring")
    return result


def _column(bench: Bench, name: str) -> dict[str, list[float]]:
    return {arm: [record[name] for record in bench.records[arm]] for arm in bench.arms}


def _ratio(a: Sequence[float], b: Sequence[float], unit: str) -> dict:
    value, low, high = paired_ratio_interval(a, b)
    return figure(value, unit, [low, high])


def _wall_ratios(bench: Bench, seconds: Mapping[str, list[float]], best: str) -> dict[str, dict]:
    """Compares goodput's wall time with that of plain decoding and the best static strategy."""
    whole = bench.calibration_seconds
    charges = {
        "": (whole, "its calibration charged to each rollout"),
        "_calibration_shared": (
            whole / len(seconds[GOODPUT]),
            f"its calibration charged once to {len(seconds[GOODPUT])} rollouts",
        ),
        "_calibration_apart": (0.0, "its calibration left out"),
    }
    result = {}
    for suffix, (charge, how) in charges.items():
        mine = [value + charge for value in seconds[GOODPUT]]
        for name, other in ((PLAIN, PLAIN), ("best_static", best)):
            result[f"wall_ratio/goodput/{name}{suffix}"] = _ratio(
                mine, seconds[other], f"wall time, goodput / {other}, median over turns, {how}"
            )
    return result


def _of_arm(bench: Bench, arm: str, of: Mapping[str, Mapping]) -> dict[str, dict]:
    rollout = bench.rollouts[arm]
    wall = statistics.median(of["seconds"][arm])
    units = {
        "seconds": "s of wall time",
        "tail_seconds": f"s since {bench.tail} chains were left",
        "longest_rate": "tok/s of the longest sample since it got its slot",
    }
    result = {}
    for name, unit in units.items():
        values = of[name][arm]
        ends = [min(values), max(values)]
        result[f"{name}/{arm}"] = figure(statistics.median(values), unit, ends)
    result[f"tokens_per_sec/{arm}"] = figure(rollout.tokens / wall, "tok/s, all samples")
    result[f"accept_length/{arm}"] = figure(
        chains.accept_length(rollout.histograms), "tokens per slot and round"
    )
    result[f"samples_different/{arm}"] = figure(
        len(bench.different[arm]), "samples with other tokens than plain decoding"
    )
    return result


def naturalness(chained: np.ndarray, single: np.ndarray, strategy: str) -> dict[str, dict]:
    """Compares the accept length in chains with that of single turns; the interval resamples."""
    rng = np.random.default_rng(0)

    def resampled(rows: np.ndarray) -> list[float]:
        picks = rng.integers(len(rows), size=(1000, len(rows)))
        return [chains.accept_length(rows[pick]) for pick in picks]

    a, b = chains.accept_length(chained), chains.accept_length(single)
    ratios = np.array(resampled(chained)) / np.array(resampled(single))
    low, high = np.quantile(ratios, [0.025, 0.975])
    how = f"tokens per round of {strategy}"
    return {
        "accept_length_chained": figure(a, f"{how}, chains of tasks"),
        "accept_length_single": figure(b, f"{how}, tasks one by one"),
        "accept_length_ratio": figure(a / b, "chains / tasks one by one", [low, high]),
    }


def judge_naturalness(found: Mapping[str, Mapping]) -> str:
    """Returns one line, a warning if the accept length in chains is not that of single turns."""
    ratio = found["accept_length_ratio"]["value"]
    text = (
        f"accept length {found['accept_length_chained']['value']:.2f} in chains, "
        f"{found['accept_length_single']['value']:.2f} in single turns: {ratio:.3f}x"
    )
    if NATURAL[0] <= ratio <= NATURAL[1]:
        return text
    return (
        f"WARNING: {text}, outside {NATURAL[0]} to {NATURAL[1]}: the chained text is not like "
        "natural text, and neither is its speed; use other tasks, or more of them"
    )


# --- command line ----------------------------------------------------------------------------


def tasks_of(tokenizer, args: argparse.Namespace) -> list[list[int]]:
    """Returns the token ids of the first `--tasks` held-out problems that are short enough to ask.

    Raises:
      ValueError: there are fewer.
    """
    terms = {} if args.task != "sums" else {"min_terms": args.min_terms}
    cfg = data.DataConfig(task=args.task, path=args.data, seed=args.seed, **terms)
    prompts = (data.encode_prompt(tokenizer, p.prompt) for p in data.problems(cfg, "heldout"))
    found = [prompt for prompt in prompts if len(prompt) <= args.max_prompt_tokens]
    if len(found) < args.tasks:
        raise ValueError(
            f"expected {args.tasks} held-out tasks of at most {args.max_prompt_tokens} tokens, got "
            f"{len(found)}; give more data, a larger --max_prompt_tokens, or fewer --tasks"
        )
    return found[: args.tasks]


def work_of(cfg, tokenizer, args: argparse.Namespace) -> chains.Work:
    """Makes the chains that all arms generate.

    Raises:
      ValueError: lengths or tasks do not fit, or a turn may not fit the policy's positions.
    """
    count = args.prompts * args.samples
    work = chains.Work(
        tasks=tasks_of(tokenizer, args),
        lengths=chains.long_tailed(count, args.median, args.ratio, args.seed),
        samples=args.samples,
        eos_ids=cfg.eos_token_ids,
        turn_limit=args.turn_limit,
        temperature=args.temperature,
        seed=args.seed,
    )
    needed = work.longest_prompt + work.turn_limit
    if needed > cfg.max_position:
        raise ValueError(
            f"a turn may need {needed} positions and the policy has {cfg.max_position}; lower "
            "--turn_limit or --max_prompt_tokens"
        )
    return work


def run(args: argparse.Namespace) -> list[tuple[str, Difference]]:
    """Measures and writes result, trace and picture; returns the unexplained differences."""
    cfg, weights, head = hf.load_checkpoint(args.model, args.dtype)
    cfg = cfg.running(compute_dtype=args.dtype)
    work = work_of(cfg, load_tokenizer(args.model), args)
    bench = Bench((cfg, weights, head), work, args)
    bench.measure(args.repeats)
    figures = figures_of(bench)
    drafting = [s.name for s in bench.control.strategies if not s.is_off]
    natural = args.judge if args.judge in drafting else drafting[-1]
    chained = bench.rollouts[natural].histograms
    figures |= naturalness(chained, bench.single_turns(natural), natural)
    judged = bench.explain()
    unexplained = [pair for pair in judged if not pair[1].explained]
    figures["samples_unexplained"] = figure(
        len(unexplained), f"of {len(judged)} judged: floating point does not explain them"
    )
    default = RESULTS / f"longtail_{Path(args.model).name}.json"
    settings = {**vars(args), "samples_in_all": len(work.lengths)}
    path = write_result("longtail", settings, figures, args.out or default)
    trace = trace_of(bench, args)
    trace.write(path.with_suffix(SUFFIX))
    picture = plots.draw(path)
    print(report(figures))
    print(judge_naturalness(figures))
    for arm, difference in judged:
        print(f"{arm}: {difference}")
    print(f"{path}\n{picture}\n{path.with_suffix(SUFFIX)}")
    return unexplained


def trace_of(bench: Bench, args: argparse.Namespace) -> Trace:
    settings = {
        "model": str(args.model),
        "task": args.task,
        "slots": args.slots,
        "chunk_tokens": args.chunk_tokens,
        "stretch": EngineConfig.stretch,
        "samples": args.samples,
        "strategies": [strategy.name for strategy in bench.control.strategies],
        "lengths": list(bench.work.lengths),
    }
    names = [strategy.name for strategy in bench.control.strategies]
    histograms = {name: bench.rollouts[name].histograms for name in names}
    spans = {arm: bench.rollouts[arm].spans for arm in (PLAIN, GOODPUT)}
    return Trace(settings, histograms, spans)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("rollout longtail", __doc__, "longtail_<model>")
    add_prompt_arguments(parser)
    add: Callable = parser.add_argument
    add("--prompts", type=int, default=64)
    add("--samples", type=int, default=4, help="per prompt")
    add("--median", type=float, default=64, help="tokens of the median sample")
    add("--ratio", type=float, default=20, help="99th percentile over the median")
    add("--slots", type=int, default=32, help="samples that run at once")
    add("--chunk_tokens", type=int, default=EngineConfig.chunk_tokens)
    add("--strategies", nargs="+", default=list(DEFAULT_STRATEGIES), help="the compiled set")
    add("--judge", default="4_1_5", help="strategy whose accept length is compared with natural")
    add("--tasks", type=int, default=64, help="different tasks that chains are made of")
    add("--min_terms", type=int, default=8, help="of a task of sums: longer tasks, fewer turns")
    add("--turn_limit", type=int, default=192, help="tokens of a turn at most")
    add("--tail", type=int, default=8, help="chains that are left when the tail begins")
    add("--temperature", type=float, default=1.0)
    add("--repeats", type=int, default=7)
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args(argv)
    for name in ("prompts", "samples", "slots", "tasks", "turn_limit", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.ratio <= 1 or args.median < 1:
        parser.error("expected --ratio > 1 and --median >= 1")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("rollout longtail"):
        unexplained = run(parse(argv))
    if unexplained:
        sys.exit(
            "bench.rollout longtail: tokens differ, and floating point does not explain it: a bug"
        )
