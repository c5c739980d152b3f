"""Engines that generate the same samples in turns: how fast, and where their samples differ.

One measurement with three sets of engines, each a subcommand of `python -m bench.throughput`:

    decode      speculative, plain: what speculation gains
    invariant   these two, and both with `SpecConfig(invariant=True)`, where a request decodes
                plainly through the very program that speculation runs: what the mode costs, and
                that its samples never differ
    kernels     speculative and plain with specjax's own kernels for CPUs, and with XLA's programs

All decode the same held-out problems with the same seeds. A ratio is the median of the turns'
ratios. Several samples per slot keep the batch full: a slot is refilled when its sample ends.

Figures, by dtype and batch size:

    tokens_per_sec/../ENGINE            prefill included; interval: slowest and fastest turn
    accept_length/../ENGINE
    ratio/../ONE/OTHER                  tokens per second
    samples_different/../ONE/OTHER      samples with other tokens; tokens_compared counts tokens up
                                        to the first difference of each sample, after which two
                                        samples have different contexts
    logprobs_different/../ONE/OTHER     samples of which any bit of a log-probability differs

A ratio below 1 at a large batch is no fault: verifying T rows costs T rows where a chip is bound by
arithmetic, and plain decoding is faster there.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.command import (
    add_prompt_arguments,
    add_timing_arguments,
    bench_parser,
    heldout_prompts,
    user_errors,
)
from bench.record import alternate, figure, paired_ratio_interval, report, write_result
from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.engine.settings import EngineConfig
from specjax.tokenizer import load_tokenizer

OWN = EngineConfig(products="panels", attention="cpu")
XLA = EngineConfig(products="xla", attention="reference")


class Turns:
    """Functions that generate and take turns, with the tokens and seconds of every call.

    Args:
      functions: functions by name; they take the number of the call and return the tokens of all
        samples.
    """

    def __init__(self, functions: Mapping[str, Callable[[int], list[list[int]]]]):
        self.functions = functions
        self.samples: dict[str, list[list[int]]] = {}
        self.tokens: dict[str, list[int]] = {name: [] for name in functions}
        self.seconds: dict[str, list[float]] = {}

    def measure(self, repeats: int) -> None:
        """Calls each once, which compiles, and then all of them in turns."""
        jobs = {name: lambda name=name: self._call(name) for name in self.functions}
        for job in jobs.values():
            job()
        for counted in self.tokens.values():
            counted.clear()
        self.seconds = alternate(jobs, repeats)

    def _call(self, name: str) -> None:
        number = 1 + len(self.tokens[name]) + (name in self.samples)  # the first one is not counted
        self.samples[name] = self.functions[name](number)
        self.tokens[name].append(sum(map(len, self.samples[name])))

    def costs(self, name: str) -> list[float]:
        """Seconds per token of each call."""
        return [s / n for s, n in zip(self.seconds[name], self.tokens[name], strict=True)]

    def rate(self, name: str) -> dict:
        rates = [1 / cost for cost in self.costs(name)]
        unit = "tok/s, median over turns; slowest and fastest"
        return figure(statistics.median(rates), unit, [min(rates), max(rates)])

    def ratio(self, one: str, other: str) -> dict:
        """Returns the tokens per second of `one` over those of `other`."""
        value, *ends = paired_ratio_interval(self.costs(other), self.costs(one))
        return figure(value, f"tok/s, {one} / {other}, median over turns", ends)


class Engine(NamedTuple):
    """An `LLM`'s settings, and whether its requests may speculate."""

    spec: SpecConfig | None
    engine: EngineConfig | None = None
    speculative: bool = True


class Comparison(NamedTuple):
    """Engines by name, the pairs whose speed is compared, and those whose samples are."""

    engines: Callable[[argparse.Namespace], dict[str, Engine]]
    speeds: Sequence[tuple[str, str]]
    samples: Sequence[tuple[str, str]]
    defaults: Mapping[str, Any]


def _spec(args: argparse.Namespace, **more) -> SpecConfig:
    return SpecConfig(args.strategy, draft=args.draft, **more)


COMPARISONS = {
    "decode": Comparison(
        lambda args: {"speculative": Engine(_spec(args)), "plain": Engine(None)},
        [("speculative", "plain")],
        [("speculative", "plain")],
        {"batches": [1, 4, 32], "prompts": 8, "samples_per_slot": 2, "max_tokens": 160},
    ),
    "invariant": Comparison(
        lambda args: {
            "speculative": Engine(_spec(args)),
            "plain": Engine(None),
            "invariant": Engine(_spec(args, invariant=True)),
            "invariant_plain": Engine(_spec(args, invariant=True), speculative=False),
        },
        [("invariant", "speculative"), ("invariant_plain", "plain")],
        [("speculative", "plain"), ("invariant", "invariant_plain")],
        {"batches": [1, 8], "prompts": 16, "n": 2, "dtypes": ["float32", "bfloat16"]},
    ),
    "kernels": Comparison(
        lambda args: {
            "speculative": Engine(_spec(args), OWN),
            "plain": Engine(None, OWN),
            "xla_speculative": Engine(_spec(args), XLA),
            "xla_plain": Engine(None, XLA),
        },
        [
            ("plain", "xla_plain"),
            ("speculative", "xla_speculative"),
            ("speculative", "plain"),
            ("xla_speculative", "xla_plain"),
        ],
        [("speculative", "plain"), ("xla_speculative", "xla_plain")],
        {"batches": [1, 8, 32], "prompts": 16, "samples_per_slot": 1},
    ),
}


class Decodings:
    """The engines of a comparison at one batch size, and the samples that each generated last."""

    def __init__(self, engines: Mapping[str, Engine], model, batch: int, max_len: int):
        cfg, weights, head = model
        self.llms, loaded = {}, {}
        for name, (spec, engine, _) in engines.items():
            if (spec, engine) not in loaded:
                own = (cfg, weights, head if spec else None)
                loaded[spec, engine] = LLM(own, spec, batch, max_len, engine=engine)
            self.llms[name] = loaded[spec, engine]
        self.engines = engines
        self.samples: dict[str, list] = {}
        self.accepted: dict[str, float] = {}

    def turns(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Turns:
        def generate(name: str) -> list[list[int]]:
            asked = params
            if not self.engines[name].speculative:
                asked = dataclasses.replace(params, speculative=False)
            outputs = self.llms[name].generate(prompts, asked)
            self.samples[name] = [sample for output in outputs for sample in output.samples]
            self.accepted[name] = self.llms[name].totals.accept_length
            return [sample.token_ids for sample in self.samples[name]]

        return Turns({name: lambda _, name=name: generate(name) for name in self.engines})

    def differences(self, one: str, other: str, at: str) -> dict[str, dict]:
        """Counts where the samples of two engines differ."""
        ours, theirs = self.samples[one], self.samples[other]
        found = differences([s.token_ids for s in ours], [s.token_ids for s in theirs])
        bits = sum(
            a.token_ids != b.token_ids or a.logprobs != b.logprobs
            for a, b in zip(ours, theirs, strict=True)
        )
        key, unit = f"{at}/{one}/{other}", f"of {len(ours)} samples"
        return {
            f"samples_different/{key}": figure(found.samples, unit),
            f"tokens_compared/{key}": figure(found.compared, "tokens up to a difference"),
            f"logprobs_different/{key}": figure(bits, f"{unit}, in any bit"),
        }


class Differences(NamedTuple):
    """How many samples differ, and tokens up to and including the first difference of each."""

    samples: int
    compared: int


def differences(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Differences:
    """Compares two lists of the same samples, token by token."""
    samples = compared = 0
    for a, b in zip(ours, theirs, strict=True):
        wrong = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
        samples += list(a) != list(b)
        first = wrong[0] if wrong else min(len(a), len(b))
        compared += min(first + 1, max(len(a), len(b)))
    return Differences(samples, compared)


def measure(name: str, args: argparse.Namespace) -> dict[str, dict]:
    """Measures one comparison with every dtype and batch size."""
    comparison, result, tokenizer = COMPARISONS[name], {}, load_tokenizer(args.model)
    params = SamplingParams(
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        n=args.n,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )
    for dtype in args.dtypes:
        cfg, weights, head = hf.load_checkpoint(args.model, dtype)
        model = cfg.running(compute_dtype=dtype), weights, head
        max_len = min(args.max_prompt_tokens + args.max_tokens, cfg.max_position)
        for batch in args.batches:
            count = max(args.prompts, args.samples_per_slot * batch)
            prompts = heldout_prompts(
                tokenizer, args.task, args.data, count, args.max_prompt_tokens, args.seed
            )
            decodings = Decodings(comparison.engines(args), model, batch, max_len)
            turns = decodings.turns(prompts, params)
            turns.measure(args.repeats)
            at, here = f"{dtype}/batch_{batch}", {}
            for engine in decodings.engines:
                here[f"tokens_per_sec/{at}/{engine}"] = turns.rate(engine)
                accepted = figure(decodings.accepted[engine], "tokens per round")
                here[f"accept_length/{at}/{engine}"] = accepted
            for one, other in comparison.speeds:
                here[f"ratio/{at}/{one}/{other}"] = turns.ratio(one, other)
            for one, other in comparison.samples:
                here |= decodings.differences(one, other, at)
            print(report(here), flush=True)
            result |= here
    return result


def run(name: str, argv: Sequence[str] | None) -> dict[str, dict]:
    args = parse(name, argv)
    with user_errors(f"throughput {name}"):
        figures = measure(name, args)
        print(write_result(f"{name}_{Path(args.model).name}", vars(args), figures, args.out))
    return figures


def parse(name: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser(f"throughput {name}", __doc__, f"{name}_<model>")
    add_prompt_arguments(parser)
    add_timing_arguments(parser, (1,))
    add = parser.add_argument
    add("--strategy", default="4_1_5", help="what a round drafts")
    add("--draft", default="checkpoint", choices=("checkpoint", "random"))
    add("--prompts", type=int, help="held-out problems at least")
    add("--samples_per_slot", type=int, default=0, help="problems per slot at least")
    add("--n", type=int, default=1, help="samples of each problem")
    add("--max_tokens", type=int, default=96, help="response tokens at most")
    add("--temperature", type=float, default=1.0)
    add("--ignore_eos", action="store_true", help="every sample has max_tokens tokens")
    add("--dtypes", nargs="+", default=["float32"], choices=("float32", "bfloat16"))
    parser.set_defaults(**COMPARISONS[name].defaults)
    return parser.parse_args(argv)


def decode(argv: Sequence[str] | None = None) -> None:
    run("decode", argv)


def kernels(argv: Sequence[str] | None = None) -> None:
    run("kernels", argv)


def invariant(argv: Sequence[str] | None = None) -> None:
    figures = run("invariant", argv)
    wrong = sum(
        entry["value"]
        for key, entry in figures.items()
        if key.startswith("samples_different/") and key.endswith("/invariant/invariant_plain")
    )
    if wrong:
        sys.exit(
            f"bench.throughput invariant: {wrong} samples differ in invariant mode, expected none: "
            "a bug"
        )
