"""Cost tables for `bench.predict`: seconds by running samples and rows, measured or modelled.

    python -m bench.costs measure --model assets/sums     this machine -> bench/costs/cpu.json
    python -m bench.costs model                           roofline of other chips -> bench/costs/

`measure` times the very programs that the engine runs, in turns: a chunk of plain rounds, chunks of
speculative rounds for each number of rows, and the drafting alone. The batch is full, every slot in
pages of its own; what a chunk costs beside its rounds is spread over --rounds of them. `draft` is
one drafted token, averaged over a four-token chain, the extension of the head's cache included;
`verify` is a round less its drafted tokens, so acceptance and commit are in it.

`model` is no measurement: a step costs what its bytes take at the chip's bandwidth or its
operations at its peak, whichever is more. Weights are read once per step, keys and values once per
sample. No efficiency factor, no launch overhead, no communication: real chips are slower, mostly on
both sides of the ratio alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from bench.common import alternate, machine, user_errors, versions
from bench.full_batch import everyone, fill
from specjax import chips
from specjax.chips import BYTES, layer_weights, roofline
from specjax.config import ModelConfig, SpecConfig
from specjax.decode import rng
from specjax.decode.chunk import Until
from specjax.decode.draft import draft_tree
from specjax.decode.history import context_of
from specjax.decode.options import Features
from specjax.decode.state import put_positions, take_slots
from specjax.draft.mtp import init_head_params
from specjax.engine.runner import Runner
from specjax.models import hf

HERE = Path(__file__).resolve().parent / "costs"
DRAFT_CHAIN = 4  # drafted tokens over which the cost of one is averaged


# --- measured --------------------------------------------------------------------------------


class Bench:
    """One batch size: a full batch of a plain or speculative runner, stepped in chunks."""

    def __init__(self, model, batch: int, context: int, rounds: int):
        self.cfg, self.params, self.head = model
        self.batch, self.context, self.rounds = batch, context, rounds

    def runner(self, steps: int, longest: int) -> Runner:
        """A runner with weights; `steps` 0 is plain decoding."""
        spec = SpecConfig(f"{steps}_1_{steps + 1}") if steps else None
        room = self.context + self.rounds * (longest + 1) + 1
        tokens = self.rounds * (steps + 1)  # equally many rounds for all of them
        runner = Runner(self.cfg, spec, self.batch, room, chunk_tokens=tokens)
        runner.set_params(self.params, self.head if steps else None)
        return runner

    def chunk(self, runner: Runner) -> Callable[[], None]:
        """One measurement: a chunk of rounds from a full batch, which `fill` has prepared."""
        (strategy,) = runner.plans
        lineup, until = runner.alone(everyone(runner)), Until.of(self.rounds)

        def run() -> None:
            result = runner.chunk(strategy, Features(), lineup, until)
            done = int(result.open().rounds)
            assert done == self.rounds, (done, self.rounds)

        return run

    def drafting(self, runner: Runner) -> Callable[[], None]:
        """One measurement: as many draftings, each starting from what the last one proposed."""

        def program(params, head, state, rows):
            model, plan = runner.model(params), runner.plan
            here = take_slots(state, rows)
            here = here._replace(draft=plan.source.enter(model, head, here, plan.steps))

            def body(_, state):
                root, count = state.length - 1, plan.steps + 1
                ring = rng.refill(state.noise, state.keys, root, rows.active, count)
                state = state._replace(noise=ring)
                context = context_of(state.tokens, state.length, plan.features, None)
                draft = draft_tree(model, head, plan, state, context)
                # The next drafting depends on this one, or the compiler would do it only once.
                tokens = put_positions(state.tokens, draft.tokens[:, 1:2], root, root * 0 + 1)
                hidden = state.draft.slots.hidden[:, :count]
                memory = plan.source.commit(state.draft, draft.work, hidden, root * 0 + 1)
                return state._replace(draft=memory, tokens=tokens)

            return jax.lax.fori_loop(0, self.rounds, body, here)

        fill(runner, self.context)
        inputs = (runner.params, runner.head, runner.state, everyone(runner))
        compiled = jax.jit(program).lower(*inputs).compile()
        return lambda: jax.block_until_ready(compiled(*inputs).tokens)

    def seconds(self, rows: Sequence[int], repeats: int) -> tuple[float, float, dict[int, float]]:
        """Medians: a plain step, one drafted token, and verification by rows."""
        longest = max(*rows, DRAFT_CHAIN + 1)
        runners = {r: self.runner(r - 1, longest) for r in (1, *rows)}
        jobs = {f"rows {r}": self.chunk(runner) for r, runner in runners.items()}
        jobs["draft"] = self.drafting(self.runner(DRAFT_CHAIN, longest))
        times: dict[str, list[float]] = {name: [] for name in jobs}
        for repeat in range(repeats + 1):
            for runner in runners.values():
                fill(runner, self.context)
            for name, values in alternate(jobs, 1).items():
                times[name] += values if repeat else []  # the first one compiles
        middle = {name: statistics.median(v) / self.rounds for name, v in times.items()}
        draft = middle["draft"] / DRAFT_CHAIN
        verify = {r: max(middle[f"rows {r}"] - (r - 1) * draft, 0.0) for r in rows}
        return middle["rows 1"], draft, verify


def measure(args: argparse.Namespace) -> dict:
    """The table of this machine."""
    cfg, params, head = hf.load_checkpoint(args.model, args.dtype)
    if head is None:
        cfg = cfg.replace(mtp_num_layers=max(cfg.mtp_num_layers, 1))
        head = init_head_params(cfg)
    model = (cfg.replace(compute_dtype=args.dtype), params, head)
    plain, draft, verify = [], [], {rows: [] for rows in args.rows}
    for batch in args.batches:
        bench = Bench(model, batch, args.context, args.rounds)
        one, per_token, by_rows = bench.seconds(args.rows, args.repeats)
        plain.append(one)
        draft.append(per_token)
        for rows, value in by_rows.items():
            verify[rows].append(value)
        relative = "  ".join(f"{rows} rows {v / one:.2f}" for rows, v in by_rows.items())
        print(
            f"batch {batch:>3}: plain {1e3 * one:.2f} ms  draft {per_token / one:.2f}  {relative}",
            flush=True,
        )
    device = jax.devices()[0].device_kind
    return {
        "name": args.name or Path(args.out).stem,
        "source": f"measured: python -m bench.costs measure on {device} ({platform.machine()}), "
        f"medians of {args.repeats} chunks of {args.rounds} rounds",
        "model": str(args.model),
        "context": args.context,
        "batches": list(args.batches),
        "plain": plain,
        "draft": draft,
        "verify": {str(rows): values for rows, values in verify.items()},
        "machine": machine(),
        "versions": versions(),
    }


# --- modelled --------------------------------------------------------------------------------


CHIPS = {
    "h200": dataclasses.replace(chips.CHIPS["h200"], title="one H200 SXM"),
    # 8B weights in bfloat16 do not fit one v5e beside a cache.
    "v5e_4": chips.CHIPS["v5e"].times(4, "four v5e as tp 4"),
}
QWEN3_8B = ModelConfig(
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
    per_token = 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim
    largest = max(args.batches) * args.context * per_token
    needed = BYTES * (cfg.num_layers * layer_weights(cfg) + 2 * lm_head + largest)
    if needed > chip.memory:
        raise ValueError(
            f"weights and {max(args.batches)} caches of {args.context} tokens are "
            f"{needed / 1e9:.0f} GB, but {chip.title} has {chip.memory / 1e9:.0f} GB; lower "
            "--batches or --context"
        )

    def verify(batch: int, rows: int) -> float:
        return roofline(chip, cfg, cfg.num_layers, lm_head, batch, rows, args.context)

    return {
        "name": f"{name}_8b",
        "source": f"modelled: roofline of {chip.title} ({chip.bandwidth / 1e12:.2f} TB/s, "
        f"{chip.peak / 1e12:.0f} TFLOP/s bfloat16), Qwen3-8B with a one-layer MTP head; no "
        "efficiency factor, launch overhead or communication",
        "model": "Qwen3-8B shapes, bfloat16",
        "context": args.context,
        "batches": list(args.batches),
        "plain": [verify(b, 1) for b in args.batches],
        "draft": [roofline(chip, cfg, 1, head, b, 1, args.context) for b in args.batches],
        "verify": {str(r): [verify(b, r) for b in args.batches] for r in args.rows},
    }


# --- command line ----------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.costs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure", help="measure this machine")
    one.add_argument("--model", default="assets/sums", help="Hugging Face directory")
    one.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
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
            write(Path(args.out), measure(args))
        else:
            for name in args.chips:
                write(Path(args.out) / f"{name}_8b.json", modelled(name, args))


if __name__ == "__main__":
    main()
