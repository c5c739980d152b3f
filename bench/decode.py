"""`python -m bench.decode --model assets/sums`: speculative over plain decoding through `LLM`.

Both generate the same samples of the same held-out problems at temperature 1, in turns within one
process; the ratio is that of the median times. Several samples per slot are generated, so that a
slot is refilled when its sample ends, and the batch is the batch that is written. Tokens are
compared too: they must be the same, up to ties that floating point explains.

A figure at a large batch may well be below 1: verifying T rows costs T rows where the chip is bound
by arithmetic, and plain decoding is right there. Nothing is asserted about time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
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

# At least so many samples per measurement, so that one long sample does not decide it.
FEWEST_SAMPLES = 8


class Pair:
    """Speculative and plain decoding of one policy, at one batch size.

    Attributes:
      spec_outputs, plain_outputs: of the last run of each.
      spec_totals, plain_totals: its sums.
    """

    def __init__(self, model, spec: SpecConfig, batch: int, max_len: int, prompts, params):
        cfg, weights, head = model
        self.spec = LLM((cfg, weights, head), spec, batch, max_len)
        self.plain = LLM((cfg, weights, None), None, batch, max_len)
        self.prompts, self.params, self.batch = prompts, params, batch
        self.outputs: dict[str, list] = {}

    def run(self, name: str) -> None:
        self.outputs[name] = getattr(self, name).generate(self.prompts, self.params)

    def measure(self, repeats: int) -> dict[str, list[float]]:
        """Seconds of each, in turns, after a run of each that compiles."""
        self.run("spec")
        self.run("plain")
        return alternate(
            {"plain": lambda: self.run("plain"), "spec": lambda: self.run("spec")}, repeats
        )

    def different_samples(self) -> int:
        """Samples whose tokens are not the same in both."""
        pairs = zip(self.outputs["plain"], self.outputs["spec"], strict=True)
        return sum(
            a.token_ids != b.token_ids
            for x, y in pairs
            for a, b in zip(x.samples, y.samples, strict=True)
        )

    def figures(self, seconds: dict[str, list[float]]) -> dict[str, dict]:
        """What this batch size contributes to the result file."""
        tokens = self.plain.totals.tokens
        ratio, low, high = paired_ratio_interval(seconds["plain"], seconds["spec"])
        rates = {
            name: [getattr(self, name).totals.tokens / s for s in values]
            for name, values in seconds.items()
        }
        depths = self.spec.totals.per_depth()
        rows = self.spec.engine.runner.tree.rows
        at = f"/batch_{self.batch}"

        result = {
            f"speedup{at}": figure(ratio, "speculative / plain, median over turns", [low, high]),
            f"accept_length{at}": figure(self.spec.totals.accept_length, "tokens per round"),
            f"rows_per_round{at}": figure(self.batch * rows, f"rows ({self.batch} x {rows})"),
            f"tokens{at}": figure(tokens, "tokens per measurement"),
            f"samples_different{at}": figure(self.different_samples(), "samples"),
        }
        for name, values in rates.items():
            middle, ends = statistics.median(values), [min(values), max(values)]
            result[f"{name}_tokens_per_sec{at}"] = figure(middle, "tok/s", ends)
        for depth, rate in enumerate(depths, start=1):
            result[f"accept_rate_depth_{depth}{at}"] = figure(rate, "share of rounds")
        return result


def run(args: argparse.Namespace) -> Path:
    """Measures every batch size and writes the result file."""
    cfg, weights, head = hf.load_checkpoint(args.model, args.dtype)
    cfg = cfg.running(compute_dtype=args.dtype)
    tokenizer = load_tokenizer(args.model)
    spec = SpecConfig(args.strategy, head=args.head)
    figures = {}
    for batch in args.batches:
        count = max(FEWEST_SAMPLES, args.samples_per_slot * batch)
        prompts = heldout_prompts(
            tokenizer, args.task, args.data, count, args.max_prompt_tokens, args.seed
        )
        params = SamplingParams(
            temperature=args.temperature,
            max_tokens=args.max_tokens,
            seed=args.seed,
            ignore_eos=args.ignore_eos,
        )
        max_len = min(args.max_prompt_tokens + args.max_tokens, cfg.max_position)
        pair = Pair((cfg, weights, head), spec, batch, max_len, prompts, params)
        here = pair.figures(pair.measure(args.repeats))
        figures |= here
        print(summary(batch, here), flush=True)
    path = write_result(f"decode_{Path(args.model).name}", vars(args), figures, args.out)
    print(path)
    return path


def summary(batch: int, figures: dict[str, dict]) -> str:
    """One line for people."""
    value = {name.split("/")[0]: entry["value"] for name, entry in figures.items()}
    low, high = figures[f"speedup/batch_{batch}"]["interval"]
    return (
        f"batch {batch:>3}: {value['speedup']:.2f}x [{low:.2f}, {high:.2f}]  "
        f"plain {value['plain_tokens_per_sec']:.0f}, speculative "
        f"{value['spec_tokens_per_sec']:.0f} tok/s  accept length {value['accept_length']:.2f}  "
        f"{value['rows_per_round']} rows per round  {value['samples_different']} samples differ"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("decode", __doc__, "decode_<model>")
    add_prompt_arguments(parser)
    add_timing_arguments(parser, (1, 4, 32))
    add = parser.add_argument
    add("--strategy", default="4_1_5", help="what a round drafts")
    add("--head", default="checkpoint", choices=("checkpoint", "random"))
    add("--samples_per_slot", type=int, default=2)
    add("--max_tokens", type=int, default=160, help="response tokens at most")
    add("--temperature", type=float, default=1.0)
    add("--ignore_eos", action="store_true", help="every sample has max_tokens tokens")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("decode"):
        run(parse(argv))


if __name__ == "__main__":
    main()
