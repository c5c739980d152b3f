"""What `python -m bench.costs measure` measures: rounds of the engine's own programs.

One runner holds the largest batch and has every strategy; smaller batches are its buckets, as they
are an engine's. Every slot has pages of its own.
"""

from __future__ import annotations

import argparse
import functools
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from bench.record import alternate_prepared, machine, versions
from bench.round.batch import fill, full_row_map, random_weights
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.huggingface import read_config
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
from specjax.models.transformer import Params, init_params
from specjax.shipped import find_shipped

DRAFT_CHAIN = 4  # drafted tokens over which the cost of one is averaged


class Model(NamedTuple):
    """Config, stacked policy parameters, and the head's."""

    cfg: ModelConfig
    params: Params
    head: Params


class Costs(NamedTuple):
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


class Bench:
    """A full state, and measurements of its buckets.

    Args:
      batches, rows: that will be measured; 1 row is plain decoding.
      context: tokens of every slot when a chunk begins. rounds: of a chunk.
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
        self.batches, self.context, self.rounds = tuple(batches), context, rounds
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

    def seconds(self, batch: int, repeats: int) -> Costs:
        """Medians, everything in turns."""

        def prepare() -> None:
            fill(self.runner, self.context)

        runs = {f"rows {r}": functools.partial(self._chunk, chain(r), batch) for r in self.rows}
        runs["draft"] = functools.partial(self._draft, batch)
        times = alternate_prepared({name: (prepare, run) for name, run in runs.items()}, repeats)
        middle = {name: statistics.median(v) / self.rounds for name, v in times.items()}
        draft = middle["draft"] / DRAFT_CHAIN
        verify = {r: max(middle[f"rows {r}"] - (r - 1) * draft, 0.0) for r in self.rows if r > 1}
        return Costs(middle["rows 1"], draft, verify)


def measure(args: argparse.Namespace) -> dict:
    """The table of this machine."""
    sizes = args.batches, args.rows, args.context, args.rounds
    bench = Bench(model_of(args), *sizes, args.attention)
    bench.compile(lambda done, total: print(f"compiled {done} of {total}", end="\r", flush=True))
    found = [_told(batch, bench.seconds(batch, args.repeats)) for batch in args.batches]
    device = jax.devices()[0].device_kind
    weights = "random weights, " if args.random else ""
    return {
        "name": args.name or Path(args.out).stem,
        "source": f"measured: python -m bench.costs measure on {device} ({platform.machine()}), "
        f"{weights}{args.dtype}, attention {bench.runner.cfg.run.attention}, medians of "
        f"{args.repeats} chunks of {args.rounds} rounds",
        "model": str(args.model),
        "context": args.context,
        "batches": list(args.batches),
        "plain": [costs.plain for costs in found],
        "draft": [costs.draft for costs in found],
        "verify": {str(rows): [costs.verify[rows] for costs in found] for rows in args.rows},
        "machine": machine(),
        "versions": versions(),
    }


def _told(batch: int, costs: Costs) -> Costs:
    one = costs.plain
    relative = "  ".join(f"{rows} rows {v / one:.2f}" for rows, v in costs.verify.items())
    print(
        f"batch {batch:>3}: plain {1e3 * one:.2f} ms  draft {costs.draft / one:.2f}  {relative}",
        flush=True,
    )
    return costs
