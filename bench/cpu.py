"""`python -m bench.cpu --model assets/sums`: what specjax's own kernels bring on a CPU.

Four engines take turns in one run, on the same prompts and seeds, at each number of slots:

    kernels/off, kernels/4_1_5     as engines run on a CPU (`specjax.kernels.cpu`)
    xla/off, xla/4_1_5             EngineConfig(products="xla", attention="reference")

Speed: tokens per second, kernels over XLA, plain and speculative, and speculative over plain with
each. Bits: samples of which a log-probability differs between speculative and plain decoding; the
kernels compute a row in one order, whatever stands beside it, and XLA does not.
"""

from __future__ import annotations

import argparse
import statistics
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
from specjax.engine.settings import EngineConfig
from specjax.tokenizer import load_tokenizer

ENGINES = {
    "kernels": EngineConfig(products="panels", attention="cpu"),
    "xla": EngineConfig(products="xla", attention="reference"),
}


class Arms:
    """The four engines at one number of slots, and the samples each gave last."""

    def __init__(self, args: argparse.Namespace, model, batch: int, prompts: Sequence):
        cfg, weights, head = model
        max_len = args.max_prompt_tokens + args.max_tokens
        self._llms, self._prompts, self._asked = {}, prompts[: max(batch, args.fewest)], args
        for by, engine in ENGINES.items():
            for name, spec in (("off", None), (args.strategy, SpecConfig(args.strategy))):
                loaded = (cfg, weights, head if spec else None)
                self._llms[f"{by}/{name}"] = LLM(loaded, spec, batch, max_len, engine=engine)
        self.samples: dict[str, list] = {}

    def run(self, name: str) -> None:
        asked = self._asked
        params = SamplingParams(
            temperature=asked.temperature, max_tokens=asked.max_tokens, seed=asked.seed
        )
        outputs = self._llms[name].generate(self._prompts, params)
        self.samples[name] = [sample for output in outputs for sample in output.samples]

    def measure(self, repeats: int) -> dict[str, list[float]]:
        """Seconds of each, in turns, after a run of each that compiles."""
        for name in self._llms:
            self.run(name)
        return alternate({name: lambda name=name: self.run(name) for name in self._llms}, repeats)


def batch_figures(arms: Arms, seconds: Mapping[str, list[float]], batch: int, strategy: str):
    """Rates, ratios and differing samples at one number of slots."""
    at, result = f"batch_{batch}", {}
    for name, values in seconds.items():
        count = sum(len(sample.token_ids) for sample in arms.samples[name])
        rates = [count / s for s in values]
        result[f"tokens_per_sec/{at}/{name}"] = figure(
            statistics.median(rates), "tok/s, median over turns; least and most",
            [min(rates), max(rates)],
        )  # fmt: skip
    pairs = {f"kernels/xla/{s}": (f"kernels/{s}", f"xla/{s}") for s in ("off", strategy)}
    pairs |= {f"{strategy}/off/{by}": (f"{by}/{strategy}", f"{by}/off") for by in ENGINES}
    for what, (ours, theirs) in pairs.items():
        value, low, high = paired_ratio_interval(seconds[theirs], seconds[ours])
        unit = f"tok/s, {ours} / {theirs}, median over turns"
        result[f"ratio/{at}/{what}"] = figure(value, unit, [low, high])
    for by in ENGINES:
        both = zip(arms.samples[f"{by}/off"], arms.samples[f"{by}/{strategy}"], strict=True)
        wrong = sum(a.token_ids != b.token_ids or a.logprobs != b.logprobs for a, b in both)
        unit = f"samples of {len(arms.samples[f'{by}/off'])}: a bit of a log-probability differs"
        result[f"bits_different/{at}/{by}"] = figure(wrong, unit)
    return result


def run(args: argparse.Namespace) -> Path:
    """Measures every number of slots and writes the result file."""
    result, tokenizer = {}, load_tokenizer(args.model)
    most = max(*args.batches, args.fewest)
    prompts = heldout_prompts(
        tokenizer, args.task, args.data, most, args.max_prompt_tokens, args.seed
    )
    model = hf.load_checkpoint(args.model, "float32")
    for batch in args.batches:
        arms = Arms(args, model, batch, prompts)
        here = batch_figures(arms, arms.measure(args.repeats), batch, args.strategy)
        for name, entry in here.items():
            if not name.startswith("tokens"):
                print(name, round(entry["value"], 2), entry["interval"], flush=True)
        result |= here
    path = write_result(f"cpu_{Path(args.model).name}", vars(args), result, args.out)
    print(path)
    return path


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("cpu", __doc__, "cpu_<model>")
    add_prompt_arguments(parser)
    add_timing_arguments(parser, (1, 8, 32))
    add = parser.add_argument
    add("--strategy", default="4_1_5", help="what a round drafts")
    add("--fewest", type=int, default=16, help="samples of each measurement at least")
    add("--max_tokens", type=int, default=96, help="response tokens at most")
    add("--temperature", type=float, default=1.0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("cpu"):
        run(parse(argv))


if __name__ == "__main__":
    main()
