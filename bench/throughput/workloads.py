"""`python -m bench.throughput workloads`: four workloads, whole calls and single rounds.

    workload    prompt / output   samples at once   sampling
    greedy       2048 /   128     1, 4, 8           temperature 0
    sampled      2048 /   128     1, 4, 8           temperature 0.7, top-p 0.9
    penalties    2048 /   128     1                 temperature 0, repetition 1.1, frequency 0.5
    long        16384 /   256     1                 temperature 0

Every length is multiplied by one factor, --scale, which is 1 on an accelerator and 1/8 on a CPU. A
prompt is natural text of its length: worked problems one after the other, and one to be solved.
End tokens are ignored, so that the output has its length. Where that needs more positions than the
policy was trained with, its text is unnatural there: times do not change, acceptance may.

Plain and speculative decoding take turns. The figures of each workload:

    tokens_per_sec       of decoding: seconds of a whole call less those of one that generates one
                         token, for the tokens of the rounds in between
    tokens_per_sec_call  of whole calls, prompts included
    accept_length, forwards_per_token    tokens per round, and rounds per token, of the policy; a
                         last round that the limit cuts counts as one
    draft_share          of a round's parts, timed as in bench/round/parts.py
    draft_over_forward   drafting over the verification
    bandwidth_share      bytes that a round touches (bench/round/counts.py) per second, over those
                         of a copy that takes turns with it; the rounds are a chunk of the engine's,
                         whose seconds include what a chunk costs beside them
    kernels_per_round    in the compiled program (bench/round/counts.py)
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import jax

from bench.command import add_prompt_arguments, bench_parser, user_errors
from bench.record import (
    alternate,
    alternate_prepared,
    figure,
    paired_ratio_interval,
    report,
    write_result,
)
from bench.round import counts
from bench.round.batch import SHAPES, fill, full_row_map
from bench.round.parts import PARTS, Parts, milliseconds
from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.decode.chunk import Until
from specjax.decode.options import Features
from specjax.drafts.mtp import init_head_params
from specjax.engine.options import features_of
from specjax.engine.request import make_jobs
from specjax.engine.runner import Runner
from specjax.models.transformer import init_params
from specjax.tokenizer import load_tokenizer
from train import data

# --- what is generated -------------------------------------------------------------------------

CPU_SCALE = Fraction(1, 8)


class Workload(NamedTuple):
    """Lengths in tokens before scaling, numbers of samples at once, and sampling parameters."""

    prompt: int
    output: int
    concurrency: tuple[int, ...]
    sampling: dict[str, float]


GREEDY = {"temperature": 0.0}
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.5}
WORKLOADS = {
    "greedy": Workload(2048, 128, (1, 4, 8), GREEDY),
    "sampled": Workload(2048, 128, (1, 4, 8), {"temperature": 0.7, "top_p": 0.9}),
    "penalties": Workload(2048, 128, (1,), GREEDY | PENALTIES),
    "long": Workload(16_384, 256, (1,), GREEDY),
}


class Point(NamedTuple):
    """A workload at its scaled size and one number of samples at once."""

    name: str
    prompt: int
    output: int
    batch: int
    workload: Workload

    def params(self, tokens: int, seed: int) -> SamplingParams:
        sampling = self.workload.sampling
        return SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True, **sampling)

    @property
    def options(self) -> dict[str, float]:
        """Returns the sampling parameters under the names of `Options`."""
        sampling = self.workload.sampling
        return {name.removesuffix("_penalty"): value for name, value in sampling.items()}

    def features(self, vocab: int) -> Features:
        """Returns the features of the engine's program for such requests."""
        job = make_jobs([0], self.params(self.output, 0), ())[0]
        return features_of(job, vocab).widened()


def points(names: Sequence[str], scale: Fraction) -> list[Point]:
    """Returns all workloads at their scaled sizes, in the order in which they are measured."""

    def scaled(tokens: int) -> int:
        return max(2, round(tokens * scale))

    return [
        Point(f"{name}/concurrency_{batch}", scaled(work.prompt), scaled(work.output), batch, work)
        for name, work in ((name, WORKLOADS[name]) for name in names)
        for batch in work.concurrency
    ]


def long_prompts(source: Sequence, tokenizer, length: int, count: int) -> list[list[int]]:
    """Returns the token ids of `count` prompts of exactly `length`, each ending with a problem.

    Args:
      source: demonstrations, which precede the problem and repeat where there are too few. With at
        least `count` of them no two prompts end alike.
    """
    encoded = []
    for index in range(min(len(source), 4096)):
        problem, answer, _ = data.encode_demonstration(tokenizer, source[index])
        encoded.append((problem, problem + answer))
        if sum(len(whole) for _, whole in encoded) > length * count:
            break
    prompts = []
    for first in range(count):
        ids, index = encoded[first % len(encoded)][0], first
        while len(ids) < length:
            index += count
            ids = encoded[index % len(encoded)][1] + ids
        prompts.append(ids[-length:])
    return prompts


# --- whole calls -------------------------------------------------------------------------------


class Calls:
    """Times whole calls of one `LLM`, and calls that generate a single token."""

    def __init__(self, llm: LLM, point: Point, prompts: list[list[int]], seed: int):
        self.llm, self.prompts = llm, prompts
        self.params = {n: point.params(n, seed) for n in (point.output, 1)}
        self.totals: dict[int, Any] = {}

    def run(self, tokens: int) -> None:
        self.llm.generate(self.prompts, self.params[tokens])
        self.totals[tokens] = self.llm.totals

    def costs(self, whole: Sequence[float], first: Sequence[float]) -> list[float]:
        """Returns the seconds per decoded token of each repeat: the difference of the two calls.

        It is 0 where the whole output came in the first round.
        """
        most, least = self.totals[max(self.totals)], self.totals[min(self.totals)]
        tokens = most.tokens * (1 - least.rounds / most.rounds)
        return [(w - f) / tokens if tokens else 0.0 for w, f in zip(whole, first, strict=True)]


def call_figures(point: Point, llms: Mapping[str, LLM], prompts, args) -> dict[str, dict]:
    """Measures rates and acceptance of plain and speculative decoding."""
    calls = {name: Calls(llm, point, prompts, args.seed) for name, llm in llms.items()}
    jobs: dict[str, Callable[[], None]] = {}
    for name, one in calls.items():
        for tokens in (point.output, 1):
            jobs[f"{name} {tokens}"] = lambda one=one, tokens=tokens: one.run(tokens)
    for job in jobs.values():
        job()  # compiles
    seconds = alternate(jobs, args.repeats)
    result, at, costs, wholes = {}, f"/{point.name}", {}, {}
    for name, one in calls.items():
        wholes[name] = seconds[f"{name} {point.output}"]
        costs[name] = one.costs(wholes[name], seconds[f"{name} 1"])
        rate, ends = _rate(costs[name])
        result[f"{name}_tokens_per_sec{at}"] = figure(rate, "tok/s, decoding", ends)
        rate, ends = _rate([s / one.totals[point.output].tokens for s in wholes[name]])
        result[f"{name}_tokens_per_sec_call{at}"] = figure(rate, "tok/s, prompts included", ends)
    ratio, ends = _ratio(costs["plain"], costs["spec"])
    result[f"speedup{at}"] = figure(ratio, "speculative / plain decoding, median over turns", ends)
    ratio, ends = _ratio(wholes["plain"], wholes["spec"])
    result[f"speedup_call{at}"] = figure(ratio, "the same, of whole calls", ends)
    totals = calls["spec"].totals[point.output]
    result[f"accept_length{at}"] = figure(totals.accept_length, "tokens per round")
    forwards = totals.rounds / totals.tokens
    result[f"forwards_per_token{at}"] = figure(forwards, "verifier forwards per emitted token")
    return result


def _rate(costs: Sequence[float]) -> tuple[float | None, list[float] | None]:
    """Returns median and ends of 1 / cost; None where the two calls took equally long."""
    if min(costs) <= 0:
        return None, None
    rates = [1 / cost for cost in costs]
    return statistics.median(rates), [min(rates), max(rates)]


def _ratio(numerator, denominator) -> tuple[float | None, list[float] | None]:
    if min(*numerator, *denominator) <= 0:
        return None, None
    ratio, *ends = paired_ratio_interval(numerator, denominator)
    return ratio, ends


# --- single rounds -----------------------------------------------------------------------------


class Chunk:
    """Runs the engine's own program for a full batch, from the same state each time.

    Attributes:
      rounds: number of rounds in a run.
      name: name of the strategy.

    Raises:
      ValueError: in `run`, samples ended before the last round.
    """

    def __init__(self, runner: Runner, point: Point):
        self.runner, self.point = runner, point
        self.features = point.features(runner.cfg.vocab_size)
        self.name = next(iter(runner.plans))
        most = max(1, point.output // (runner.plan.steps + 1))  # so that no sample ends within
        self.rounds = min(runner.rounds(self.name, runner.batch), most)

    def prepare(self) -> None:
        fill(self.runner, self.point.prompt, self.point.options)

    def run(self) -> None:
        row_map = self.runner.alone(full_row_map(self.runner))
        chunk = self.runner.chunk(self.name, self.features, row_map, Until.of(self.rounds))
        ran = int(chunk.open().rounds)
        if ran != self.rounds:
            raise ValueError(
                f"expected {self.rounds} rounds of {self.name}, got {ran}: the samples ended "
                "before; use a larger --scale"
            )

    def text(self) -> str:
        """Returns the text of the compiled program."""
        compiled, bucket = self.runner.executables, self.runner.batch
        features = compiled.covering(self.name, bucket, self.features)
        return compiled.by_key["chunk", self.name, bucket, features].as_text()


def round_figures(point: Point, llms: Mapping[str, LLM], args) -> dict[str, dict]:
    """Measures bandwidth, kernels and the draft's share; it consumes the runners' states."""
    runners = {name: llm.engine.runner for name, llm in llms.items()}
    chunks = {name: Chunk(runner, point) for name, runner in runners.items()}
    copy, copied = counts.copy_of(args.copy_bytes)
    jobs = {name: (chunk.prepare, chunk.run) for name, chunk in chunks.items()}
    seconds = alternate_prepared(jobs | {"copy": (lambda: None, copy)}, args.repeats)
    at, result = f"/{point.name}", {}
    result[f"copy_bandwidth{at}"] = _bandwidth(copied, seconds["copy"])
    per_copied = [s / copied for s in seconds["copy"]]
    for name, chunk in chunks.items():
        runner = runners[name]
        rows = runner.tree.rows if runner.tree else 1
        size = counts.round_bytes(
            runner.cfg, runner.params, runner.head, runner.steps, rows, point.batch, point.prompt
        )
        spent = [s / chunk.rounds for s in seconds[name]]
        result[f"{name}_round_ms{at}"] = figure(
            1e3 * statistics.median(spent), "ms", [1e3 * min(spent), 1e3 * max(spent)]
        )
        result[f"{name}_bandwidth{at}"] = _bandwidth(size, spent)
        ratio, *ends = paired_ratio_interval(per_copied, [s / size for s in spent])
        result[f"{name}_bandwidth_share{at}"] = figure(ratio, "of the copy's bytes/s", ends)
        counted = counts.round_kernels(chunk.text())
        kinds = ", ".join(f"{n} {opcode}" for opcode, n in counted.most_common())
        result[f"{name}_kernels_per_round{at}"] = figure(counted.total(), f"kernels: {kinds}")
    return result | draft_figures(point, runners["spec"], args)


def _bandwidth(size: int, seconds: Sequence[float]) -> dict:
    rates = [size / s / 1e9 for s in seconds]
    return figure(statistics.median(rates), "GB/s", [min(rates), max(rates)])


def draft_figures(point: Point, runner: Runner, args) -> dict[str, dict]:
    """Measures the share of a round that drafting takes."""
    emitted = min(args.emitted, runner.steps + 1)
    features = point.features(runner.cfg.vocab_size)
    parts = Parts(runner, features, point.options, point.prompt, emitted)
    times = milliseconds(parts, args.window, args.repeats)
    counted = PARTS if parts.plan.draws_noise else [name for name in PARTS if name != "noise"]
    total, at = sum(times[name][0] for name in counted), f"/{point.name}"
    draft, verify = times["draft"][0], times["verify"][0]
    # A tiny model's parts may be too quick for the clock.
    share = draft / total if total else None
    over = draft / verify if verify else None
    return {
        f"draft_share{at}": figure(share, f"of the sum of {', '.join(counted)}; least times"),
        f"draft_over_forward{at}": figure(over, "times the verification; least times"),
    }


# --- command line ------------------------------------------------------------------------------


def load(args: argparse.Namespace):
    """Loads config, weights and head of a directory, or makes random ones of a shape."""
    if args.shape is not None:
        cfg = SHAPES[args.shape].running(param_dtype=args.dtype, compute_dtype=args.dtype)
        return cfg, init_params(cfg, args.seed), init_head_params(cfg, args.seed)
    cfg, weights, head = hf.load_checkpoint(args.model, args.dtype)
    if head is None:
        raise ValueError(
            f"{args.model} has no draft head, which the speculative arm needs; give a policy with "
            "one, or --shape for random weights"
        )
    return cfg.running(compute_dtype=args.dtype), weights, head


def measure(args: argparse.Namespace) -> dict[str, dict]:
    """Measures all workloads."""
    cfg, weights, head = load(args)
    tokenizer = load_tokenizer(args.model)
    heldout = data.DataConfig(task=args.task, path=args.data, seed=args.seed)
    source = data.demonstrations(heldout, "heldout")
    figures = {}
    for point in points(args.workloads, args.scale):
        found = point_figures(point, (cfg, weights, head), source, tokenizer, args)
        figures |= found
        print(report(found), flush=True)
    return figures


def point_figures(point: Point, model, source, tokenizer, args, engine=None) -> dict[str, dict]:
    """Measures one workload with one number of samples at once.

    Args:
      model: config, weights and head.
      source: demonstrations for prompts.
      args: result of `parse`.
      engine: an `EngineConfig`, or None.
    """
    cfg, weights, head = model
    longest = point.prompt + point.output
    here = cfg.replace(max_position=max(cfg.max_position, longest))
    spec, size = SpecConfig(args.strategy), (point.batch, longest)
    llms = {
        "plain": LLM((here, weights, None), None, *size, engine=engine),
        "spec": LLM((here, weights, head), spec, *size, engine=engine),
    }
    prompts = long_prompts(source, tokenizer, point.prompt, point.batch)
    return call_figures(point, llms, prompts, args) | round_figures(point, llms, args)


def run(args: argparse.Namespace) -> Path:
    if args.scale is None:
        args.scale = CPU_SCALE if jax.default_backend() == "cpu" else Fraction(1)
    figures = measure(args)
    used = {name: WORKLOADS[name]._asdict() for name in args.workloads}
    settings = vars(args) | {"workloads": used, "scale": str(args.scale)}
    name = f"workloads_{args.shape or Path(args.model).name}"
    path = write_result(name, settings, figures, args.out)
    print(path)
    return path


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("throughput workloads", __doc__, "workloads_<model or shape>")
    add_prompt_arguments(parser)
    add = parser.add_argument
    add("--shape", choices=SHAPES, help="random weights of this shape in place of the policy's")
    add("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    add("--scale", type=Fraction, help="of all lengths, such as 1/8; default: 1, on a CPU 1/8")
    add("--strategy", default="4_1_5", help="a chain or a static tree")
    add("--repeats", type=int, default=7, help="measurements of each")
    add("--emitted", type=int, default=3, help="tokens per round, whose noise is drawn anew")
    add("--window", type=float, default=0.05, help="seconds per window of a round's parts")
    add("--copy_bytes", type=int, default=1 << 28, help="of the array that is copied")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("throughput workloads"):
        run(parse(argv))
