"""`python -m bench.invariant --model assets/sums`: what `invariant=True` costs, and what it buys.

Speculative and plain decoding are two programs, and floating point rounds differently in each. In
`coupled` mode tokens then differ where two perturbed logits tie within rounding: about never in
float32, now and then in bfloat16. In `invariant` mode a request decodes plainly, with
`SamplingParams(speculative=False)`, through the very program that speculation runs.

Four decodings take turns in one run, on the same prompts and seeds:

    speculative            SpecConfig(strategy)
    invariant              SpecConfig(strategy, invariant=True)
    plain                  no SpecConfig
    plain_invariant        SpecConfig(strategy, invariant=True), speculative=False

Cost: tokens per second of `invariant` over `speculative`, and of `plain_invariant` over `plain`.
Gain: samples whose tokens differ between `speculative` and `plain`, against those that differ
between `invariant` and `plain_invariant`, which must be 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.command import (
    add_prompt_arguments,
    add_timing_arguments,
    bench_parser,
    heldout_prompts,
    user_errors,
)
from bench.record import alternate, figure, paired_ratio_interval, write_result
from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.tokenizer import load_tokenizer

PAIRS = {"normal": ("speculative", "plain"), "invariant": ("invariant", "plain_invariant")}


@dataclasses.dataclass(frozen=True)
class Differences:
    """Two lists of samples, compared token by token.

    Attributes:
      samples: that differ. tokens: at places where one has another token, or none.
      compared: tokens up to and including the first difference of each sample, after which two
        samples have another context and nothing more to do with each other.
    """

    samples: int
    tokens: int
    compared: int


def differences(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Differences:
    """Counts where two decodings of the same samples differ."""
    samples = tokens = compared = 0
    for a, b in zip(ours, theirs, strict=True):
        common = min(len(a), len(b))
        wrong = [i for i in range(common) if a[i] != b[i]]
        tokens += len(wrong) + max(len(a), len(b)) - common
        samples += list(a) != list(b)
        first = wrong[0] if wrong else common
        compared += min(first + 1, max(len(a), len(b)))
    return Differences(samples, tokens, compared)


class Decodings:
    """The four decodings of one policy at one batch size."""

    def __init__(self, model, strategy: str, batch: int, max_len: int, prompts, params):
        normal, invariant = SpecConfig(strategy), SpecConfig(strategy, invariant=True)
        cfg, weights, head = model
        self._llms = {
            "speculative": LLM(model, normal, batch, max_len),
            "invariant": LLM(model, invariant, batch, max_len),
            "plain": LLM((cfg, weights, None), None, batch, max_len),
        }
        self._prompts, self._params = prompts, params
        self.tokens: dict[str, list[list[int]]] = {}

    def run(self, name: str) -> None:
        """Decodes all prompts; the tokens are kept."""
        params, llm = self._params, self._llms.get(name)
        if name == "plain_invariant":
            params = dataclasses.replace(params, speculative=False)
            llm = self._llms["invariant"]
        outputs = llm.generate(self._prompts, params)
        self.tokens[name] = [sample.token_ids for out in outputs for sample in out.samples]

    def measure(self, repeats: int) -> dict[str, list[float]]:
        """Seconds of each, in turns, after a run of each that compiles."""
        names = [*self._llms, "plain_invariant"]
        for name in names:
            self.run(name)
        return alternate({name: lambda name=name: self.run(name) for name in names}, repeats)


def setting_figures(at: str, found: Decodings, seconds: Mapping[str, list[float]]) -> dict:
    """Rates, ratios and differences of one dtype and batch size."""
    result = {}
    for name, values in seconds.items():
        count = sum(map(len, found.tokens[name]))
        rates = [count / s for s in values]
        result[f"tokens_per_sec/{at}/{name}"] = figure(
            statistics.median(rates), "tok/s", [min(rates), max(rates)]
        )
    for ours, theirs in zip(PAIRS["invariant"], PAIRS["normal"], strict=True):
        value, low, high = paired_ratio_interval(seconds[theirs], seconds[ours])
        unit = f"tok/s, {ours} / {theirs}, median over turns"
        result[f"cost/{at}/{ours}"] = figure(value, unit, [low, high])
    for kind, (ours, theirs) in PAIRS.items():
        counted = differences(found.tokens[ours], found.tokens[theirs])
        samples = len(found.tokens[ours])
        result |= {
            f"samples_different/{at}/{kind}": figure(counted.samples, f"of {samples} samples"),
            f"tokens_different/{at}/{kind}": figure(counted.tokens, "tokens"),
            f"tokens_compared/{at}/{kind}": figure(counted.compared, "tokens up to a difference"),
        }
    return result


def run(args: argparse.Namespace) -> tuple[Path, int]:
    """Measures every dtype and batch size.

    Returns:
      the result file, and how many samples differ in invariant mode.
    """
    result, tokenizer = {}, load_tokenizer(args.model)
    prompts = heldout_prompts(
        tokenizer, args.task, args.data, args.prompts, args.max_prompt_tokens, args.seed
    )
    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, n=args.samples, seed=args.seed
    )
    for dtype in args.dtypes:
        cfg, weights, head = hf.load_checkpoint(args.model, dtype)
        model = cfg.running(compute_dtype=dtype), weights, head
        for batch in args.batches:
            max_len = args.max_prompt_tokens + args.max_tokens
            found = Decodings(model, args.strategy, batch, max_len, prompts, params)
            at = f"{dtype}/batch_{batch}"
            here = setting_figures(at, found, found.measure(args.repeats))
            print(summary(at, here), flush=True)
            result |= here
    path = write_result(f"invariant_{Path(args.model).name}", vars(args), result, args.out)
    print(path)
    wrong = [key for key in result if key.startswith("samples_d") and key.endswith("/invariant")]
    return path, sum(result[key]["value"] for key in wrong)


def summary(at: str, figures: Mapping[str, Mapping]) -> str:
    """Two lines for people."""
    costs = []
    for name in PAIRS["invariant"]:
        low, high = figures[f"cost/{at}/{name}"]["interval"]
        costs.append(f"{name} {figures[f'cost/{at}/{name}']['value']:.2f}x [{low:.2f}, {high:.2f}]")
    counts = []
    for kind in PAIRS:
        entry = figures[f"samples_different/{at}/{kind}"]
        tokens = figures[f"tokens_compared/{at}/{kind}"]["value"]
        counts.append(f"{kind} {entry['value']} {entry['unit']} ({tokens} tokens compared)")
    return (
        f"{at}: tok/s against the normal programs: {', '.join(costs)}\n    differ from plain: "
        + (", ".join(counts))
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("invariant", __doc__, "invariant_<model>")
    add_prompt_arguments(parser)
    add_timing_arguments(parser, (1, 8))
    add = parser.add_argument
    add("--strategy", default="4_1_5", help="what a round drafts")
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    add("--prompts", type=int, default=16, help="held-out problems")
    add("--samples", type=int, default=2, help="samples per prompt")
    add("--max_tokens", type=int, default=96, help="response tokens at most")
    add("--temperature", type=float, default=1.0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("invariant"):
        _, wrong = run(parse(argv))
    if wrong:
        sys.exit(f"bench.invariant: {wrong} samples differ in invariant mode, expected none: a bug")


if __name__ == "__main__":
    main()
