"""Cost tables for `bench.control predict` and `replay`: seconds by running samples and rows.

    python -m bench.control costs measure --model assets/sums    this machine: bench/costs/cpu.json
    python -m bench.control costs measure --model assets/shapes/Qwen3-8B --random ...
    python -m bench.control costs model                          a roofline of other chips

`measure` times the very programs that the engine runs, in turns: a chunk of plain rounds, chunks of
speculative rounds for each number of rows, and the drafting alone. The engine has a head, so that a
plain round keeps the states that drafting may need. Every slot has pages of its own; what a chunk
costs beside its rounds is spread over --rounds of them. `draft` is one drafted token, averaged over
a four-token chain, the extension of the head's cache included; `verify` is a round less its drafted
tokens, so acceptance and commit are in it. Times do not depend on weights, unless experts are
mixed, whose routing decides what is read: with --random a directory needs no more than a
config.json. With --longer all is measured at a second context, too.

`model` is no measurement: a step costs what its bytes take at the chip's bandwidth or its
operations at its peak, whichever is more. Weights are read once per step, keys and values once per
sample. No efficiency factor, no launch overhead, no communication: real chips are slower, mostly on
both sides of the ratio alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from bench.command import user_errors
from bench.record import alternate_prepared, machine, versions
from bench.round.batch import fill, full_row_map, random_weights
from specjax import chips
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.huggingface import read_config
from specjax.chips import BYTES, cache_values, layer_weights, roofline
from specjax.command_line import ArgumentParser
from specjax.config import ModelConfig, SpecConfig, Strategy
from specjax.control import OFF
from specjax.decode.chunk import Result, Until
from specjax.decode.draft import draft_tree
from specjax.decode.noise import refill
from specjax.decode.options import Features
from specjax.decode.sampling import context_of
from specjax.decode.state import put_positions, take_slots
from specjax.drafts.mtp import init_head_params
from specjax.engine.compiling import CompilePool
from specjax.engine.runner import Packed, Runner
from specjax.kernels.names import attention_flag
from specjax.models.families.dense import dense_config
from specjax.models.transformer import Params, init_params
from specjax.shipped import find_shipped

HERE = Path(__file__).resolve().parents[1] / "costs"
DRAFT_CHAIN = 4  # drafted tokens over which the cost of one is averaged
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


# --- measured ---------------------------------------------------------------------


class Model(NamedTuple):
    """Config, stacked policy parameters, and the head's."""

    cfg: ModelConfig
    params: Params
    head: Params


class StepCosts(NamedTuple):
    """Median seconds at one batch size: of a plain step, of one drafted token, and of verification
    by rows."""

    plain: float
    draft: float
    verify: dict[int, float]


def model_of(args: argparse.Namespace) -> Model:
    """The policy that is measured; a head of random weights where it has none."""
    directory = find_shipped(args.model)
    if args.random:
        cfg = read_config(directory).running(param_dtype=args.dtype)
        params = random_weights(functools.partial(init_params, cfg), 0)
        head = None
    else:
        cfg, params, head = hf.load_checkpoint(directory, args.dtype)
    cfg = cfg.running(compute_dtype=args.dtype)
    cfg = cfg.replace(mtp_num_layers=max(cfg.mtp_num_layers, 1))
    if head is None:
        head = random_weights(functools.partial(init_head_params, cfg), 1)
    return Model(cfg, params, head)


def chain(rows: int) -> str:
    """The strategy that verifies so many rows."""
    return f"{rows - 1}_1_{rows}" if rows > 1 else OFF


class FullBatch:
    """A full state, and measurements of its buckets.

    Args:
      batches, rows: that will be measured; 1 row is plain decoding.
      context: most tokens of every slot when a chunk begins. rounds: of a chunk.
    """

    def __init__(
        self,
        model: Model,
        batches: Sequence[int],
        rows: Sequence[int],
        context: int,
        rounds: int,
        attention: str = "auto",
    ):
        self.batches, self.rounds = tuple(batches), rounds
        self.rows = tuple(dict.fromkeys((1, *rows)))
        self.drafts = chain(DRAFT_CHAIN + 1)
        names = [chain(rows) for rows in self.rows] + [self.drafts]
        longest = max(*rows, DRAFT_CHAIN + 1)
        self.runner = Runner(
            model.cfg,
            SpecConfig(self.drafts),
            max(batches),
            context + rounds * (longest + 1) + 1,
            chunk_tokens=rounds * longest,  # of the longest; `Until` ends all alike
            strategies=[*map(Strategy.parse, names)],
            attention=attention,
        )
        self.runner.set_params(model.params, model.head)

    def compile(self, on_built: Callable[[int, int], None]) -> None:
        """Every chunk and every drafting, several at once where that helps."""
        executables, done = self.runner.executables, 0
        total = len(self.batches) * (len(self.rows) + 1)
        self.runner.reset()
        self._drafts: dict[int, jax.stages.Compiled] = {}

        def ready(count: int) -> None:
            nonlocal done
            done += count
            on_built(done, total)

        with CompilePool(executables.threads, ready) as pool:
            with executables.ahead(pool):
                for batch in self.batches:
                    for rows in self.rows:
                        self._start(chain(rows), batch)
                pool.finish()
            for batch in self.batches:
                keep = functools.partial(self._drafts.__setitem__, batch)
                pool.submit(self._drafting(batch).compile, keep)
            pool.finish()

    def _start(self, strategy: str, batch: int) -> Packed[Result]:
        row_map = self.runner.alone(full_row_map(self.runner, batch))
        return self.runner.chunk(strategy, Features(), row_map, Until.of(self.rounds))

    def _chunk(self, strategy: str, batch: int) -> None:
        done = int(self._start(strategy, batch).open().rounds)
        assert done == self.rounds, (done, self.rounds)

    def _drafting(self, batch: int) -> jax.stages.Lowered:
        """As many draftings as a chunk has rounds, each starting from what the last proposed."""
        runner, plan = self.runner, self.runner.plans[self.drafts]

        def program(params, head, state, rows):
            model = runner.model(params)
            here = take_slots(state, rows)._replace(memory=None)  # the policy's, which none reads
            here = here._replace(draft=plan.source.resume(model, head, here, plan.steps))

            def body(_, state):
                root, count = state.length - 1, plan.steps + 1
                ring = refill(state.noise, state.keys, root, rows.active, count)
                state = state._replace(noise=ring)
                context = context_of(state.tokens, state.length, plan.features, None)
                draft = draft_tree(model, head, plan, state, context)
                # The next drafting depends on this one, or the compiler would do it only once.
                tokens = put_positions(state.tokens, draft.tokens[:, 1:2], root, root * 0 + 1)
                hidden = state.draft.slots.hidden[:, :count]
                memory = plan.source.commit(state.draft, draft.work, hidden, root * 0 + 1)
                return state._replace(draft=memory, tokens=tokens)

            return jax.lax.fori_loop(0, self.rounds, body, here).tokens

        return jax.jit(program).lower(*self._inputs(batch))

    def _inputs(self, batch: int) -> tuple:
        runner = self.runner
        return runner.params, runner.head, runner.state, full_row_map(runner, batch)

    def _draft(self, batch: int) -> None:
        jax.block_until_ready(self._drafts[batch](*self._inputs(batch)))

    def seconds(self, batch: int, repeats: int, context: int) -> StepCosts:
        """Medians, everything in turns, with `context` tokens in every slot."""

        def prepare() -> None:
            fill(self.runner, context)

        runs = {f"rows {r}": functools.partial(self._chunk, chain(r), batch) for r in self.rows}
        runs["draft"] = functools.partial(self._draft, batch)
        times = alternate_prepared({name: (prepare, run) for name, run in runs.items()}, repeats)
        middle = {name: statistics.median(v) / self.rounds for name, v in times.items()}
        draft = middle["draft"] / DRAFT_CHAIN
        verify = {r: max(middle[f"rows {r}"] - (r - 1) * draft, 0.0) for r in self.rows if r > 1}
        return StepCosts(middle["rows 1"], draft, verify)


def measure(args: argparse.Namespace) -> dict:
    """The table of this machine."""
    sizes = args.batches, args.rows, args.longer or args.context, args.rounds
    bench = FullBatch(model_of(args), *sizes, args.attention)
    bench.compile(lambda done, total: print(f"compiled {done} of {total}", end="\r", flush=True))

    def costs(context: int) -> dict:
        found = [_told(b, bench.seconds(b, args.repeats, context)) for b in args.batches]
        verify = {str(rows): [each.verify[rows] for each in found] for rows in args.rows}
        parts = {"plain": [each.plain for each in found], "draft": [each.draft for each in found]}
        return {**parts, "verify": verify}

    longer = {"longer": {"context": args.longer, **costs(args.longer)}} if args.longer else {}
    device = jax.devices()[0].device_kind
    weights = "random weights, " if args.random else ""
    return {
        "name": args.name or Path(args.out).stem,
        "source": f"measured: python -m bench.control costs measure on {device} "
        f"({platform.machine()}), "
        f"{weights}{args.dtype}, attention {bench.runner.cfg.run.attention}, medians of "
        f"{args.repeats} chunks of {args.rounds} rounds",
        "model": str(args.model),
        "context": args.context,
        "batches": list(args.batches),
        **costs(args.context),
        **longer,
        "machine": machine(),
        "versions": versions(),
    }


def _told(batch: int, costs: StepCosts) -> StepCosts:
    one = costs.plain
    relative = "  ".join(f"{rows} rows {v / one:.2f}" for rows, v in costs.verify.items())
    print(
        f"batch {batch:>3}: plain {1e3 * one:.2f} ms  draft {costs.draft / one:.2f}  {relative}",
        flush=True,
    )
    return costs


# --- modelled ---------------------------------------------------------------------


def modelled(name: str, args: argparse.Namespace) -> dict:
    """The roofline table of one chip for an 8B model in bfloat16."""
    chip, cfg = CHIPS[name], QWEN3_8B
    lm_head = cfg.vocab_size * cfg.hidden_size
    head = lm_head + 2 * cfg.hidden_size**2

    def needed(batch: int, context: int) -> float:
        weights = layer_weights(cfg.layers, cfg.hidden_size) + 2 * lm_head
        return BYTES * (weights + cache_values(cfg.layers, batch * context))

    largest = needed(max(args.batches), args.context)
    if largest > chip.memory:
        raise ValueError(
            f"weights and {max(args.batches)} caches of {args.context} tokens are "
            f"{largest / 1e9:.0f} GB, but {chip.title} has {chip.memory / 1e9:.0f} GB; lower "
            "--batches or --context"
        )

    def costs(context: int) -> dict:
        """Seconds of each part by batch; None where the caches do not fit."""

        def row(layers, extra: int, rows: int) -> list[float | None]:
            width = cfg.hidden_size
            return [
                roofline(chip, layers, width, extra, batch, rows, context)
                if needed(batch, context) <= chip.memory
                else None
                for batch in args.batches
            ]

        return {
            "plain": row(cfg.layers, lm_head, 1),
            "draft": row(cfg.layers[:1], head, 1),
            "verify": {str(rows): row(cfg.layers, lm_head, rows) for rows in args.rows},
        }

    if needed(min(args.batches), args.longer) > chip.memory:
        raise ValueError(
            f"weights and {min(args.batches)} caches of {args.longer} tokens do not fit "
            f"{chip.title}; lower --longer"
        )
    return {
        "name": f"{name}_8b",
        "source": f"modelled: roofline of {chip.title} ({chip.bandwidth / 1e12:.2f} TB/s, "
        f"{chip.peak / 1e12:.0f} TFLOP/s bfloat16), Qwen3-8B with a one-layer MTP head; no "
        "efficiency factor, launch overhead or communication",
        "model": "Qwen3-8B shapes, bfloat16",
        "context": args.context,
        "batches": list(args.batches),
        **costs(args.context),
        "longer": {"context": args.longer, **costs(args.longer)},
    }


# --- command line ----------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        prog="python -m bench.control costs",
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
    one.add_argument("--longer", type=int, help="tokens of a second context; default: none")
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
    other.add_argument("--longer", type=int, default=16384, help="tokens of a second context")
    other.add_argument("--out", default=str(HERE), help="directory")
    args = parser.parse_args(argv)
    if any(rows < 2 for rows in args.rows):
        parser.error("--rows are of speculative rounds, 2 or more; one row is the plain step")
    if args.longer is not None and args.longer <= args.context:
        parser.error(f"--longer must be above --context {args.context}, got {args.longer}")
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
    with user_errors("control costs"):
        if args.command == "measure":
            write(Path(args.out), measure(args))
        else:
            for name in args.chips:
                write(Path(args.out) / f"{name}_8b.json", modelled(name, args))


if __name__ == "__main__":
    main()
