"""`python -m bench.round`: which part of a round takes how much of its time.

    noise      the ring of position-keyed noise is filled up
    draft      the head proposes a tree
    verify     one policy forward over the tree
    transform  the policy's logits, through the sampling options
    accept     the acceptance rule
    commit     the accepted path is written to the caches

The parts (`specjax/decode/`, compiled one by one: bench/round/parts.py) and the whole round are
measured in turns in one run; the minimum of many windows is reported. Shares are of the sum of the
parts; how near that is to the whole round is reported beside them. Weights are random: times do not
depend on them. Drafting includes the transforms of the draft's own logits and, in `coupled` mode,
no noise.

Noise is drawn for as many positions as `--emitted` tokens used up, because each position's noise is
generated once: plain decoding draws as much per token. How many noise rows per emitted token a real
generation draws is counted with `--model`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from bench.command import bench_parser, heldout_prompts, user_errors
from bench.record import figure, report, write_result
from bench.round.batch import SHAPES
from bench.round.parts import PARTS, Parts, milliseconds
from specjax import LLM, ModelConfig, SamplingParams, SpecConfig
from specjax.decode.options import Features
from specjax.drafts.mtp import init_head_params
from specjax.engine.runner import Runner
from specjax.models.transformer import init_params
from specjax.tokenizer import load_tokenizer

# Features of the compiled program, and sampling options that use them.
FEATURES = {
    "temperature": (Features(), {}),
    "top_p_and_penalties": (
        Features(top_p=True, penalties=True).widened(),  # the engine's program for such requests
        {"top_p": 0.9, "repetition": 1.1, "frequency": 0.5},
    ),
}
WITHIN = 1.25  # the sum of the parts is expected to be within this factor of the whole round


def part_figures(at: str, times: Mapping[str, tuple[float, float]]) -> dict[str, dict]:
    """Returns the times and shares of one setting."""
    total = sum(times[name][0] for name in PARTS)
    without_noise = total - times["noise"][0]
    result = {}
    for name, (least, middle) in times.items():
        unit = "ms, least; interval: least and median"
        result[f"ms/{at}/{name}"] = figure(least, unit, [least, middle])
    for name in PARTS:
        result[f"share/{at}/{name}"] = figure(times[name][0] / total, "of the parts' sum")
    last = times["accept"][0] + times["commit"][0]
    for name, value in (
        ("accept_and_commit", last),
        ("transform_accept_and_commit", last + times["transform"][0]),
    ):
        unit = "of the parts' sum, noise left out of both"
        result[f"share_without_noise/{at}/{name}"] = figure(value / without_noise, unit)
    unit = f"times the whole round; expected within {WITHIN}"
    result[f"sum_of_parts/{at}"] = figure(total / times["round"][0], unit)
    return result


def noise_figures(args: argparse.Namespace) -> dict[str, dict]:
    """Counts the noise rows that real generations draw; every slot runs one sample."""
    result, batch = {}, 8
    tokenizer = load_tokenizer(args.model)
    prompts = heldout_prompts(tokenizer, "sums", None, batch, 64, args.seed)
    params = SamplingParams(max_tokens=args.max_tokens, seed=args.seed)
    for strategy in args.strategies:
        longest = max(map(len, prompts)) + args.max_tokens
        llm = LLM(args.model, SpecConfig(strategy), batch, longest, dtype="float32")
        llm.generate(prompts, params)
        state = jax.device_get(llm.engine.runner.state)
        drawn = int(state.noise.drawn.sum())
        # Positions from the first generated one up to the last whose noise was drawn; the last
        # slot is the spare one.
        positions = int((state.noise.until - state.options.prompt_len)[:batch].sum())
        at, tokens = f"{Path(args.model).name}/{strategy}", llm.totals.tokens
        result |= {
            f"noise_rows_per_token/{at}": figure(drawn / tokens, "noise rows / emitted tokens"),
            f"noise_rows_drawn_twice/{at}": figure(drawn - positions, f"of {drawn} rows"),
        }
    return result


def measure(args: argparse.Namespace) -> dict[str, dict]:
    """Measures every shape, strategy and set of features."""
    result = {}
    for shape in args.shapes:
        cfg = SHAPES[shape].replace(max_position=args.context + 64)
        cfg = cfg.running(param_dtype=args.dtype, compute_dtype=args.dtype)
        weights = init_params(cfg, args.seed), init_head_params(cfg, args.seed)
        for strategy in args.strategies:
            result |= _strategy_figures(shape, cfg, weights, strategy, args)
    return result


def _strategy_figures(shape: str, cfg: ModelConfig, weights, strategy: str, args) -> dict:
    """Measures one runner, whose copy of the weights is freed before the next one makes its own."""
    result = {}
    runner = Runner(cfg, SpecConfig(strategy), args.batch, cfg.max_position)
    if runner.tree.strategy.is_dynamic:
        raise ValueError(
            f"expected chains or static trees, whose shape is known beforehand; got {strategy!r}"
        )
    runner.set_params(*weights)
    emitted = min(args.emitted, runner.steps + 1)
    for name in args.features:
        parts = Parts(runner, *FEATURES[name], args.context, emitted)
        at = f"{shape}/{strategy}/{name}"
        here = part_figures(at, milliseconds(parts, args.window, args.repeats))
        print(report(here), flush=True)
        result |= here
    return result


def run(args: argparse.Namespace) -> Path:
    result = measure(args)
    noise = noise_figures(args)
    print(report(noise))
    result |= noise
    settings = vars(args) | {"shapes": {name: SHAPES[name] for name in args.shapes}}
    settings["features"] = {name: FEATURES[name] for name in args.features}
    path = write_result("round", settings, result, args.out)
    print(path)
    return path


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("round", __doc__, "round")
    add = parser.add_argument
    add("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    add("--strategies", nargs="+", default=["4_1_5", "default"], help="chains or static trees")
    add("--features", nargs="+", default=list(FEATURES), choices=FEATURES)
    add("--batch", type=int, default=1, help="slots, all running")
    add("--context", type=int, default=128, help="tokens in every slot")
    add("--emitted", type=int, default=3, help="tokens per round, whose noise is drawn anew")
    add("--repeats", type=int, default=9, help="windows of each program")
    add("--window", type=float, default=0.05, help="seconds per window")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--model", default="assets/sums", help="policy whose noise rows per token are counted")
    add("--max_tokens", type=int, default=128, help="response tokens of that count")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("round"):
        run(parse(argv))


if __name__ == "__main__":
    main()
