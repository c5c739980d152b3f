"""One round of an 8B model, taken apart.

The model has Qwen3-8B's shapes, random weights in bfloat16, and a draft head of one module. Random
heads guess nothing: what is measured of speculation is what a round costs, and not what it gains.

A round is taken apart as in `bench.round`; its `transform` is counted as part of `accept`. Passes
of the policy over 1 and 16 rows take turns, each several times before anybody waits, so that the
time to start a program is hidden as it is within a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console

from bench import hlo, protocol, traffic
from bench.common import (
    alternate,
    alternate_prepared,
    figure,
    median_interval,
    paired_ratio_interval,
)
from bench.full_batch import everyone, fill
from bench.gpu.job import Job
from bench.random_weights import random_weights
from bench.round import milliseconds, parts_table
from bench.round_parts import ROUND, Parts
from bench.workloads import Point, Workload
from specjax import ModelConfig, SpecConfig
from specjax.command_line import find_shipped
from specjax.decode.options import Features
from specjax.decode.state import prefix_lengths, take_positions, take_slots
from specjax.decode.tree import chain_bits
from specjax.draft.mtp import init_head_params
from specjax.engine.runner import Runner
from specjax.models.hf_config import read_config
from specjax.models.transformer import Params, init_params

NOT_AHEAD = "each of its programs is made from what the one before has computed"
SHAPE = "assets/shapes/Qwen3-8B"
FEW, MANY = 1, 16  # rows of the passes that are compared


class Sizes(NamedTuple):
    """shape: directory of a config.json, and what to change in it. The rest is of the round.

    Attributes:
      context: tokens of every slot. window: seconds, see `bench.round`. passes: before a wait.
      emitted: tokens of the last round, whose noise is drawn anew.
    """

    shape: str = SHAPE
    layers: int = 36
    dtype: str = "bfloat16"
    strategy: str = "4_1_5"
    batch: int = 8
    context: int = 2048
    emitted: int = 3
    repeats: int = 7
    window: float = 0.1
    passes: int = 4


SMALL = Sizes("assets/sums", 1, "float32", "1_1_2", 2, 48, 2, 2, 0.001, 2)


def sizes_of(job: Job) -> Sizes:
    return SMALL if job.small else Sizes()


def plain_model(sizes: Sizes, seed: int) -> tuple[ModelConfig, Params, None]:
    """Config and stacked policy parameters, without a head."""
    cfg = read_config(find_shipped(sizes.shape)).replace(
        num_layers=sizes.layers,
        mtp_num_layers=1,
        param_dtype=sizes.dtype,
        compute_dtype=sizes.dtype,
    )
    return cfg, random_weights(functools.partial(init_params, cfg), seed), None


def model_of(sizes: Sizes, seed: int) -> tuple[ModelConfig, Params, Params]:
    """Likewise, with a head."""
    cfg, policy, _ = plain_model(sizes, seed)
    return cfg, policy, random_weights(functools.partial(init_head_params, cfg), seed + 1)


# --- one round ---------------------------------------------------------------------------------


def measure(job: Job) -> None:
    """Kernels, rows, and the parts of a round."""
    sizes = sizes_of(job)
    job.tell(sizes=sizes._asdict())
    cfg, policy, head = model_of(sizes, job.seed)
    room = 8 * SpecConfig(sizes.strategy).resolve().rows
    cfg = cfg.replace(max_position=max(cfg.max_position, sizes.context + room))
    spec = SpecConfig(sizes.strategy)
    runner = Runner(cfg, spec, sizes.batch, sizes.context + room)
    runner.set_params(policy, head)
    del policy  # the runner has its own, in another layout
    job.tell(attention=runner.cfg.attention)
    work = Workload(sizes.context, room, (sizes.batch,), {"temperature": 1.0})
    chunk = protocol.Chunk(runner, Point("round", sizes.context, room, sizes.batch, work))
    job.each(
        [
            ("ms/round", functools.partial(_part_figures, runner, sizes)),
            (f"verify_{MANY}_rows_over_{FEW}", functools.partial(_rows_figures, runner, sizes)),
            ("round_ms/chunk", functools.partial(_chunk_figures, chunk, sizes)),
            ("kernels_per_round", functools.partial(_kernel_figures, chunk)),
        ]
    )


def _chunk_figures(chunk: protocol.Chunk, sizes: Sizes) -> dict[str, dict]:
    """Milliseconds of a round in the engine's own program."""
    seconds = alternate_prepared({"chunk": (chunk.prepare, chunk.run)}, sizes.repeats)["chunk"]
    value, *ends = median_interval([1e3 * s / chunk.rounds for s in seconds])
    return {"round_ms/chunk": figure(value, f"ms per round, in chunks of {chunk.rounds}", ends)}


def _kernel_figures(chunk: protocol.Chunk) -> dict[str, dict]:
    """Kernels that a round of that program launches, see `bench.hlo`."""
    counted = hlo.round_kernels(chunk.text())
    kinds = ", ".join(f"{n} {opcode}" for opcode, n in counted.most_common())
    return {"kernels_per_round": figure(counted.total(), f"kernels: {kinds}")}


def passes(runner: Runner, rows: int, count: int) -> Callable[[], None]:
    """A function that runs the policy `count` times over so many rows of every slot and waits."""

    def program(params, state, lineup):
        here = take_slots(state._replace(noise=None, draft=None), lineup)
        root, model = here.length - 1, runner.model(params)
        x, new = model.decode(
            take_positions(here.tokens, root - rows + 1, rows),
            root[:, None] + jnp.arange(rows),
            here.cache,
            prefix_len=prefix_lengths(here),
            visible_bits=chain_bits(rows),
            table=here.table,
        )
        return model.logits(x), new

    inputs = runner.params, runner.state, everyone(runner)
    compiled = jax.jit(program).lower(*inputs).compile()

    def run() -> None:
        for _ in range(count):
            found = compiled(*inputs)
        jax.block_until_ready(found)

    run()
    return run


def _rows_figures(runner: Runner, sizes: Sizes) -> dict[str, dict]:
    """Verifying many rows over verifying one."""
    fill(runner, sizes.context)
    runs = {rows: passes(runner, rows, sizes.passes) for rows in (FEW, MANY)}
    seconds = alternate(runs, sizes.repeats)
    ratio, *ends = paired_ratio_interval(seconds[MANY], seconds[FEW])
    result = {f"verify_{MANY}_rows_over_{FEW}": figure(ratio, "times a pass over one row", ends)}
    for rows, values in seconds.items():
        value, *ends = median_interval([1e3 * s / sizes.passes for s in values])
        result[f"ms/verify_{rows}_rows"] = figure(value, "ms", ends)
    return result


def _part_figures(runner: Runner, sizes: Sizes) -> dict[str, dict]:
    """Milliseconds and shares of a round's parts."""
    parts = Parts(runner, Features(), {}, sizes.context, min(sizes.emitted, runner.steps + 1))
    times = milliseconds(parts, sizes.window, sizes.repeats)
    result = part_figures(times)
    cfg, batch = runner.cfg, sizes.batch
    drafted = traffic.draft_bytes(cfg, runner.params, runner.head, batch, sizes.context)
    rows = runner.tree.rows
    verified = traffic.forward_bytes(cfg, runner.params, batch, rows, sizes.context)
    bound = runner.steps * drafted / verified
    unit = f"bytes of {runner.steps} drafted tokens over those of a verification"
    result["draft_over_verify_bytes"] = figure(bound, unit)
    print_parts(result, sizes)
    return result


def part_figures(times: Mapping[str, tuple[float, float]]) -> dict[str, dict]:
    """From (least, median) milliseconds of the parts of `bench.round_parts`."""

    def summed(*names: str) -> tuple[float, float]:
        return tuple(map(sum, zip(*(times[name] for name in names), strict=True)))

    mine = {name: times[name] for name in ROUND} | {"accept": summed("transform", "accept")}
    total, result = sum(least for least, _ in mine.values()), {}
    for name, (least, middle) in (mine | {"round": times["round"]}).items():
        result[f"ms/{name}"] = figure(least, "ms, least; interval: least, median", [least, middle])
    for name in ROUND:
        result[f"share/{name}"] = _over(mine[name][0], total, "of the parts' sum")
    both = mine["noise"][0] + mine["accept"][0]
    whole, drafting, verifying = times["round"][0], mine["draft"][0], mine["verify"][0]
    return result | {
        "noise_and_accept_share": _over(both, total, "of the parts' sum, transforms included"),
        "draft_over_verify": _over(drafting, verifying, "all drafting over verification, least"),
        "sum_of_parts": _over(total, whole, "times the whole round"),
        "us_beside_parts": figure(1e3 * (whole - total), "us of a round beside its parts, least"),
    }


def _over(value: float, total: float, unit: str) -> dict:
    """The ratio's figure; a tiny model's parts may be too quick for the clock."""
    if not total:
        return figure(None, f"left out: too quick for the clock, {unit}")
    return figure(value / total, unit)


def print_parts(figures: Mapping[str, Mapping], sizes: Sizes) -> None:
    title = f"one round, {sizes.strategy}, {sizes.batch} slots at {sizes.context} tokens"
    Console(width=100).print(parts_table(title, ROUND, figures))
