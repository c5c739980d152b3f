"""`python -m bench.round`: where the time of one round goes.

A round is taken apart into the functions that it is made of, each compiled as a program of its own:

    noise      the ring of position-keyed noise is filled up     decode/rng.py
    draft      the head proposes a tree                          decode/draft.py
    verify     one pass of the policy over the tree              decode/verify.py
    transform  the policy's logits, through the sampling options decode/sampling.py
    accept     the rule                                          decode/accept.py
    commit     the accepted path goes to the caches              decode/round.py

They take turns with the whole round in one run. The least of many windows counts, less the least of
an empty program with as many arguments and results: a round in a chunk is called by nobody. Caches
are donated, as in a chunk. Shares are of the sum of the parts; how near that is to the whole round
is reported beside them. Weights are random: times do not depend on them. Drafting holds the
transforms of the draft's own logits and, in `coupled` mode, no noise.

Noise is drawn for as many positions as `--emitted` tokens used up, for each position's noise is
generated once: plain decoding draws as much per token. How many rows per emitted token that is in a
real generation is counted with `--model`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from bench.command import bench_parser, heldout_prompts, user_errors
from bench.record import alternate, figure, write_result
from bench.round_parts import EMPTY, PARTS, Parts
from specjax import LLM, ModelConfig, SamplingParams, SpecConfig
from specjax.decode.options import Features
from specjax.drafts.mtp import init_head_params
from specjax.engine.runner import Runner
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params
from specjax.tokenizer import load_tokenizer

SHAPES = {
    "vocab_1024": dense_config(
        vocab_size=1024,
        hidden_size=192,
        intermediate_size=640,
        num_layers=12,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        mtp_num_layers=1,
    ),
    "qwen3_0.6b": dense_config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1_000_000.0,
        tie_embeddings=True,
        mtp_num_layers=1,
    ),
}
# What requests ask for, and the options that make it bite.
FEATURES = {
    "temperature": (Features(), {}),
    "top_p_and_penalties": (
        Features(top_p=True, penalties=True).widened(),  # the program that such requests run
        {"top_p": 0.9, "repetition": 1.1, "frequency": 0.5},
    ),
}
WITHIN = 1.25  # the sum of the parts is expected to be within this factor of the whole round


def milliseconds(parts: Parts, window: float, repeats: int) -> dict[str, tuple[float, float]]:
    """Least and median time of one call of each part, less that of its empty program.

    Args:
      window: see `turn_times`.
    """
    found = turn_times(parts, window, repeats)
    return {
        name: tuple(
            max(of(found[name]) - min(found[f"{name}{EMPTY}"]), 0.0)
            for of in (min, statistics.median)
        )
        for name in (*PARTS, "round")
    }


def turn_times(parts: Parts, window: float, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of one call of each program in each of so many windows, which take turns.

    Args:
      window: seconds that a window should last; a program that takes longer runs once.
    """
    calls = {}
    for name, run in parts.programs.items():
        once = min(alternate({name: run}, 3)[name])
        calls[name] = max(1, min(200, round(window / once)))

    def several(name: str) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls[name]):
                parts.programs[name]()

        return run

    seconds = alternate({name: several(name) for name in parts.programs}, repeats)
    return {name: [1e3 * s / calls[name] for s in values] for name, values in seconds.items()}


def part_figures(at: str, times: Mapping[str, tuple[float, float]]) -> dict[str, dict]:
    """Times and shares of one setting."""
    total = sum(times[name][0] for name in PARTS)
    silent = total - times["noise"][0]
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
        result[f"share_without_noise/{at}/{name}"] = figure(value / silent, unit)
    unit = f"times the whole round; expected within {WITHIN}"
    result[f"sum_of_parts/{at}"] = figure(total / times["round"][0], unit)
    return result


def noise_figures(args: argparse.Namespace) -> dict[str, dict]:
    """Noise rows that real generations draw; every slot runs one sample."""
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
    """Figures of every shape, strategy and set of features."""
    result = {}
    for shape in args.shapes:
        cfg = SHAPES[shape].replace(max_position=args.context + 64)
        cfg = cfg.running(param_dtype=args.dtype, compute_dtype=args.dtype)
        weights = init_params(cfg, args.seed), init_head_params(cfg, args.seed)
        for strategy in args.strategies:
            result |= _strategy_figures(shape, cfg, weights, strategy, args)
    return result


def _strategy_figures(shape: str, cfg: ModelConfig, weights, strategy: str, args) -> dict:
    """One runner, whose copy of the weights is gone before the next one makes its own."""
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
        print_table(at, here)
        result |= here
    return result


def parts_table(title: str, parts: Sequence[str], figures: Mapping[str, Mapping], at="") -> Table:
    """Milliseconds and shares of the parts, and of the whole round.

    Args:
      at: what stands before a part's name in the figures' names, with its slash.
    """
    table = Table(title=title, title_justify="left")
    for column in ("part", "ms, least", "median", "share"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for name in (*parts, "round"):
        low, middle = figures[f"ms/{at}{name}"]["interval"]
        share = figures.get(f"share/{at}{name}", {}).get("value")
        cell = "" if share is None else f"{100 * share:.1f}%"
        table.add_row(name, f"{low:.3f}", f"{middle:.3f}", cell)
    return table


def print_table(at: str, figures: Mapping[str, Mapping]) -> None:
    """One setting: its parts, and how far they can be trusted."""
    console = Console(width=100)
    console.print(parts_table(at, PARTS, figures, f"{at}/"))
    last = figures[f"share_without_noise/{at}/accept_and_commit"]["value"]
    ratio = figures[f"sum_of_parts/{at}"]["value"]
    odd = "" if 1 / WITHIN <= ratio <= WITHIN else " (NOT near it: do not trust the shares)"
    console.print(
        f"accept + commit, without noise: {100 * last:.1f}%; the parts sum up to {ratio:.2f} times "
        f"the whole round{odd}",
        highlight=False,
    )


def run(args: argparse.Namespace) -> Path:
    result = measure(args) | noise_figures(args)
    for key, entry in result.items():
        if key.startswith("noise_rows"):
            print(f"{key}: {entry['value']:.3f} {entry['unit']}")
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
