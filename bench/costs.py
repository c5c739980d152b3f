"""Cost tables for `bench.predict`: seconds by running samples and rows, measured or modelled.

    python -m bench.costs measure --model assets/sums     this machine -> bench/costs/cpu.json
    python -m bench.costs measure --model assets/shapes/Qwen3-8B --random --dtype bfloat16 ...
    python -m bench.costs model                           roofline of other chips -> bench/costs/

`measure` times the very programs that the engine runs, in turns: a chunk of plain rounds, chunks of
speculative rounds for each number of rows, and the drafting alone. The engine has a head, so that a
plain round keeps the states that drafting may need. Every slot has pages of its own; what a chunk
costs beside its rounds is spread over --rounds of them. `draft` is one drafted token, averaged over
a four-token chain, the extension of the head's cache included; `verify` is a round less its drafted
tokens, so acceptance and commit are in it. Times do not depend on weights, unless experts are
mixed, whose routing decides what is read: with --random a directory needs no more than a
config.json.

`model` is no measurement: a step costs what its bytes take at the chip's bandwidth or its
operations at its peak, whichever is more. Weights are read once per step, keys and values once per
sample. No efficiency factor, no launch overhead, no communication: real chips are slower, mostly on
both sides of the ratio alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from bench import costs_measure
from bench.command import user_errors
from specjax import chips
from specjax.chips import BYTES, cache_values, layer_weights, roofline
from specjax.command_line import ArgumentParser
from specjax.kernels.names import attention_flag
from specjax.models.families.dense import dense_config

HERE = Path(__file__).resolve().parent / "costs"


CHIPS = {
    "h200": dataclasses.replace(chips.CHIPS["h200"], title="one H200 SXM"),
    # 8B weights in bfloat16 do not fit one v5e beside a cache.
    "v5e_4": chips.CHIPS["v5e"].times(4, "four v5e as tp 4"),
}
QWEN3_8B = dense_config(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    tie_embeddings=False,
    mtp_num_layers=1,
)


def modelled(name: str, args: argparse.Namespace) -> dict:
    """The roofline table of one chip for an 8B model in bfloat16."""
    chip, cfg = CHIPS[name], QWEN3_8B
    lm_head = cfg.vocab_size * cfg.hidden_size
    head = lm_head + 2 * cfg.hidden_size**2
    largest = cache_values(cfg.layers, max(args.batches) * args.context)
    needed = BYTES * (layer_weights(cfg.layers, cfg.hidden_size) + 2 * lm_head + largest)
    if needed > chip.memory:
        raise ValueError(
            f"weights and {max(args.batches)} caches of {args.context} tokens are "
            f"{needed / 1e9:.0f} GB, but {chip.title} has {chip.memory / 1e9:.0f} GB; lower "
            "--batches or --context"
        )

    def verify(batch: int, rows: int) -> float:
        return roofline(chip, cfg.layers, cfg.hidden_size, lm_head, batch, rows, args.context)

    def draft(batch: int) -> float:
        return roofline(chip, cfg.layers[:1], cfg.hidden_size, head, batch, 1, args.context)

    return {
        "name": f"{name}_8b",
        "source": f"modelled: roofline of {chip.title} ({chip.bandwidth / 1e12:.2f} TB/s, "
        f"{chip.peak / 1e12:.0f} TFLOP/s bfloat16), Qwen3-8B with a one-layer MTP head; no "
        "efficiency factor, launch overhead or communication",
        "model": "Qwen3-8B shapes, bfloat16",
        "context": args.context,
        "batches": list(args.batches),
        "plain": [verify(b, 1) for b in args.batches],
        "draft": [draft(b) for b in args.batches],
        "verify": {str(r): [verify(b, r) for b in args.batches] for r in args.rows},
    }


# --- command line ----------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        prog="python -m bench.costs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure", help="measure this machine")
    one.add_argument("--model", default="assets/sums", help="Hugging Face directory")
    one.add_argument("--random", action="store_true", help="weights, in the shapes of its config")
    one.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    one.add_argument("--attention", default="auto", type=attention_flag, help="kernel")
    one.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    one.add_argument("--rows", type=int, nargs="+", default=[2, 3, 5, 8], help="rows per sample")
    one.add_argument("--context", type=int, default=96, help="tokens in the cache at the start")
    one.add_argument("--rounds", type=int, default=16, help="rounds per chunk")
    one.add_argument("--repeats", type=int, default=5)
    one.add_argument("--name", help="of the table; default: the file's")
    one.add_argument("--out", default=str(HERE / "cpu.json"))
    other = commands.add_parser("model", help="write the roofline tables")
    other.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    other.add_argument(
        "--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 192, 256]
    )
    other.add_argument("--rows", type=int, nargs="+", default=[2, 3, 4, 5, 6, 8, 12, 16])
    other.add_argument("--context", type=int, default=1024, help="tokens in each sample's cache")
    other.add_argument("--out", default=str(HERE), help="directory")
    args = parser.parse_args(argv)
    if any(rows < 2 for rows in args.rows):
        parser.error("--rows are of speculative rounds, 2 or more; one row is the plain step")
    return args


def write(path: Path, table: dict) -> None:
    """One key per line: short enough to read, and to compare."""
    lines = [f"  {json.dumps(key)}: {json.dumps(_rounded(value))}" for key, value in table.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(path)


def _rounded(value):
    """Four digits of every cost are more than a measurement has."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return {k: _rounded(v) for k, v in value.items()} if isinstance(value, dict) else value


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    with user_errors("costs"):
        if args.command == "measure":
            write(Path(args.out), costs_measure.measure(args))
        else:
            for name in args.chips:
                write(Path(args.out) / f"{name}_8b.json", modelled(name, args))


if __name__ == "__main__":
    main()
