"""`python -m bench.longtail --model assets/sums`: a rollout whose longest samples decide its time.

64 prompts, 4 samples each, lengths from a log-normal distribution with the 99th percentile at 20
medians. Long responses are chains of tasks (`bench.chains` says how and why); slots are refilled
while there are chains that wait, and then the batch shrinks to its tail. The arms take turns:

    plain       an engine with spec=None in the same settings
    off, ...    each strategy of the compiled set for ever, in the engine that can speculate
    goodput     the default controller over the same set, starting from its calibration every time

Everything is compiled before the clock starts. `wall_ratio/goodput/plain` charges every rollout of
goodput with the whole calibration, which an engine does once in its life; `.._calibration_shared`
charges it once for all repeats together, `.._calibration_apart` not at all. The best static
strategy is the one with the smallest median.

The longest sample's speed is its tokens over the seconds from when it got its slot to its end, and
`_from_start` from the beginning of the rollout. The tail begins when --tail chains are left.

Reading the tasks of later turns costs time that a response of one task would not need. It is part
of every arm's time; `prompt_reading_share` is an estimate of it.

Beside the result file come a figure and a trace for `bench.replay`.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench import chains, longtail_figures, longtail_plot
from bench.command import add_prompt_arguments, bench_parser, user_errors
from bench.record import RESULTS, alternate, figure, write_result
from bench.trace import GOODPUT, PLAIN, SUFFIX, Trace
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
WARM_TOKENS = 12  # per chain, before the clock starts


class Bench:
    """The engines of all arms, and what their rollouts came to.

    Attributes:
      arms: names. rollouts: the last one of each. records: figures of each rollout, by arm.
      spans: of each rollout, by arm. different: per arm, the first chains that differ from plain
        decoding's. calibration_seconds: of goodput.
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
        self.spans: dict[str, list[list[chains.Span]]] = {arm: [] for arm in self.arms}
        self.different: dict[str, list] = {arm: [] for arm in self.arms}
        self._reference: chains.Rollout | None = None

    def engine(self, arm: str) -> Engine:
        """The arm's engine, with a controller as at its start."""
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
        """One rollout, kept and compared with plain decoding's first."""
        rollout = chains.roll_out(self.engine(arm), self.work)
        self.rollouts[arm] = rollout
        self.spans[arm].append(rollout.spans)
        self.records[arm].append(
            {
                "seconds": rollout.seconds,
                "tail_seconds": rollout.tail_seconds(self.tail),
                "longest_rate": rollout.longest_rate,
                "longest_rate_from_start": rollout.longest_rate_from_start,
            }
        )
        self._reference = self._reference or rollout
        if not self.different[arm]:
            self.different[arm] = list(chains.differing(self._reference, rollout))

    def measure(self, repeats: int) -> None:
        """All arms in turns, after a short rollout of each."""
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
                    self.spec.runner, x.jobs[turn].request, x.jobs[turn].sample,
                    x.jobs[turn], x.turns[turn], y.turns[turn],
                ),
            )
            for arm in self.arms
            for x, y, turn in self.different[arm][:JUDGED_AT_MOST]
        ]  # fmt: skip

    def single_turns(self, strategy: str) -> np.ndarray:
        """Histograms [turns, steps + 2] of tasks that are answered one by one."""
        samples, _ = self.engine(strategy).generate(self.work.single_turns())
        return np.array([sample.stats.histogram for sample in samples])

    def prompt_seconds(self) -> dict[str, float]:
        """Estimated seconds that each arm's last rollout read prompts."""
        engines = {arm: self.plain if arm == PLAIN else self.spec for arm in self.arms}
        return {
            arm: chains.seconds_of_pieces(engine.runner, self.rollouts[arm].pieces)
            for arm, engine in engines.items()
        }


# --- command line ----------------------------------------------------------------------------


def tasks_of(tokenizer, args: argparse.Namespace) -> list[list[int]]:
    """Token ids of the first `--tasks` held-out problems that are short enough to ask.

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
    """The chains that all arms generate.

    Raises:
      ValueError: lengths or tasks do not fit, or a turn may not fit the policy's positions.
    """
    count = args.prompts * args.samples
    if args.lengths:
        lengths = chains.read_lengths(args.lengths, count)
    else:
        lengths = chains.long_tailed(count, args.median, args.ratio, args.seed)
    work = chains.Work(
        tasks=tasks_of(tokenizer, args),
        lengths=lengths,
        samples=args.samples,
        eos_ids=cfg.eos_token_ids,
        turn_limit=args.turn_limit,
        temperature=args.temperature,
        seed=args.seed,
        keep_turns=args.keep_turns,
    )
    needed = work.longest_prompt + work.turn_limit
    if needed > cfg.max_position:
        raise ValueError(
            f"a turn may need {needed} positions and the policy has {cfg.max_position}; lower "
            "--keep_turns, --turn_limit or --max_prompt_tokens"
        )
    return work


def run(args: argparse.Namespace) -> list[tuple[str, Difference]]:
    """Measures, writes result, trace and figure; returns differences that nothing explains."""
    cfg, weights, head = hf.load_checkpoint(args.model, args.dtype)
    cfg = cfg.running(compute_dtype=args.dtype)
    work = work_of(cfg, load_tokenizer(args.model), args)
    bench = Bench((cfg, weights, head), work, args)
    bench.measure(args.repeats)
    figures = longtail_figures.figures_of(bench)
    drafting = [s.name for s in bench.control.strategies if not s.is_off]
    natural = args.judge if args.judge in drafting else drafting[-1]
    chained = bench.rollouts[natural].histograms
    figures |= longtail_figures.naturalness(chained, bench.single_turns(natural), natural)
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
    longtail_plot.draw(path.with_suffix(".png"), trace, figures)
    print(longtail_figures.report(figures, bench.arms))
    print(longtail_figures.judge_naturalness(figures))
    for arm, difference in judged:
        print(f"{arm}: {difference}")
    print(f"{path}\n{path.with_suffix('.png')}\n{path.with_suffix(SUFFIX)}")
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
    parser = bench_parser("longtail", __doc__, "longtail_<model>")
    add_prompt_arguments(parser)
    add: Callable = parser.add_argument
    add("--prompts", type=int, default=64)
    add("--samples", type=int, default=4, help="per prompt")
    add("--median", type=float, default=64, help="tokens of the median sample")
    add("--ratio", type=float, default=20, help="99th percentile over the median")
    add("--lengths", metavar="JSON", help="lengths of all samples, instead of the distribution")
    add("--slots", type=int, default=32, help="samples that run at once")
    add("--chunk_tokens", type=int, default=EngineConfig.chunk_tokens)
    add("--strategies", nargs="+", default=list(DEFAULT_STRATEGIES), help="the compiled set")
    add("--judge", default="4_1_5", help="strategy whose accept length is compared with natural")
    add("--tasks", type=int, default=64, help="different tasks that chains are made of")
    add("--min_terms", type=int, default=8, help="of a task of sums: longer tasks, fewer turns")
    add("--turn_limit", type=int, default=192, help="tokens of a turn at most")
    add("--keep_turns", type=int, default=0, help="earlier turns that a turn reads again")
    add("--tail", type=int, default=8, help="chains that are left when the tail begins")
    add("--temperature", type=float, default=1.0)
    add("--repeats", type=int, default=7)
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args(argv)
    for name in ("prompts", "samples", "slots", "tasks", "turn_limit", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.keep_turns < 0 or args.ratio <= 1 or args.median < 1:
        parser.error("expected --keep_turns >= 0, --ratio > 1 and --median >= 1")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("longtail"):
        unexplained = run(parse(argv))
    if unexplained:
        sys.exit("bench.longtail: tokens differ, and floating point does not explain it: a bug")


if __name__ == "__main__":
    main()
