"""The parts of a round of an 8B model.

The model has Qwen3-8B's shapes, random weights in bfloat16, and a draft head of one module. Drafts
of a random head are hardly ever accepted, so only the cost of a round is measured, not its gain.

The parts are those of `bench.round`; `transform` is counted in `accept`. They are compiled one
after the other, each for the results of those before; if there is too little time, only compiled
parts are measured. All programs have the compiler options of the engine's chunks, so that on a GPU
each is one CUDA graph. Passes of the policy over 1 and 16 rows are measured in turns, several of
each before the host waits, which hides the time to start a program, as within a chunk.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.gpu.chunks import policy_pass
from bench.gpu.job import Job
from bench.record import (
    alternate,
    alternate_prepared,
    figure,
    median_interval,
    paired_ratio_interval,
)
from bench.round import counts
from bench.round.batch import fill, full_row_map, random_weights
from bench.round.parts import EMPTY, ROUND, Parts, turn_times
from bench.throughput import workloads
from bench.throughput.workloads import Point, Workload
from specjax import ModelConfig, SpecConfig
from specjax.checkpoint.huggingface import read_config
from specjax.decode.options import Features
from specjax.drafts.mtp import init_head_params
from specjax.engine.runner import Runner
from specjax.models.transformer import Params, init_params
from specjax.shipped import find_shipped

NOT_AHEAD = "each of its programs needs the results of the one before"
SHAPE = "assets/shapes/Qwen3-8B"
FEW, MANY = 1, 16  # rows of the passes that are compared
# Figures of a round's parts that are recorded as missing if there is no time for them.
OF_PARTS = ("ms/round", "draft_over_verify", "us_beside_parts")


class Sizes(NamedTuple):
    """The model and the round.

    Attributes:
      shape: directory of the model's config.json.
      layers, dtype: changes to that config.
      context: number of tokens in every slot.
      emitted: tokens of the last round, whose noise is drawn again.
      window: seconds of a turn, see `bench.round`.
      passes: number of passes before the host waits.
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
    """Makes a config and random stacked policy parameters, without a head."""
    cfg = read_config(find_shipped(sizes.shape))
    cfg = cfg.replace(layers=cfg.layers[:1] * sizes.layers, mtp_num_layers=1)
    cfg = cfg.running(param_dtype=sizes.dtype, compute_dtype=sizes.dtype)
    return cfg, random_weights(functools.partial(init_params, cfg), seed), None


def model_of(sizes: Sizes, seed: int) -> tuple[ModelConfig, Params, Params]:
    """Makes a config, random policy parameters and a random head."""
    cfg, policy, _ = plain_model(sizes, seed)
    return cfg, policy, random_weights(functools.partial(init_head_params, cfg), seed + 1)


# --- one round ---------------------------------------------------------------------------------


def measure(job: Job, draft_vocab: int | None = None) -> None:
    """Measures the parts of a round, passes over more rows, whole rounds, and counts kernels.

    Args:
      draft_vocab: number of tokens that are drafted from; None: the whole vocabulary.
    """
    sizes = sizes_of(job)
    job.tell(sizes=sizes._asdict(), draft_vocab=draft_vocab)
    drafted = min(draft_vocab, 16) if draft_vocab and job.small else draft_vocab
    cfg, policy, head = model_of(sizes, job.seed)
    room = 8 * SpecConfig(sizes.strategy).resolve().rows
    cfg = cfg.replace(max_position=max(cfg.max_position, sizes.context + room))
    spec = SpecConfig(sizes.strategy, draft_vocab=drafted)
    runner = Runner(cfg, spec, sizes.batch, sizes.context + room)
    runner.set_params(policy, head)
    del policy  # the runner has its own, in another layout
    job.tell(attention=runner.cfg.run.attention)
    work = Workload(sizes.context, room, (sizes.batch,), {"temperature": 1.0})
    chunk = workloads.Chunk(runner, Point("round", sizes.context, room, sizes.batch, work))
    job.each(
        [
            (OF_PARTS, functools.partial(_part_figures, job, runner, sizes)),
            (f"verify_{MANY}_rows_over_{FEW}", functools.partial(_rows_figures, runner, sizes)),
            ("round_ms/chunk", functools.partial(_chunk_figures, chunk, sizes)),
            ("kernels_per_round", functools.partial(_kernel_figures, chunk)),
        ]
    )


def _chunk_figures(chunk: workloads.Chunk, sizes: Sizes) -> dict[str, dict]:
    """Measures milliseconds per round in the engine's own program."""
    seconds = alternate_prepared({"chunk": (chunk.prepare, chunk.run)}, sizes.repeats)["chunk"]
    value, *ends = median_interval([1e3 * s / chunk.rounds for s in seconds])
    return {"round_ms/chunk": figure(value, f"ms per round, in chunks of {chunk.rounds}", ends)}


def _kernel_figures(chunk: workloads.Chunk) -> dict[str, dict]:
    """Counts the kernels that a round of that program launches."""
    counted = counts.round_kernels(chunk.text())
    kinds = ", ".join(f"{n} {opcode}" for opcode, n in counted.most_common())
    return {"kernels_per_round": figure(counted.total(), f"kernels: {kinds}")}


def passes(runner: Runner, rows: int, count: int) -> Callable[[], None]:
    """Returns a function that runs the policy `count` times over `rows` rows per slot and waits."""

    inputs = runner.params, runner.state, full_row_map(runner)
    options = dict(runner.executables.graphs.options(("chunk",)))
    compiled = jax.jit(policy_pass(runner, rows)).lower(*inputs).compile(options)

    def run() -> None:
        for _ in range(count):
            found = compiled(*inputs)
        jax.block_until_ready(found)

    run()
    return run


def _rows_figures(runner: Runner, sizes: Sizes) -> dict[str, dict]:
    """Measures passes over many rows and over one, and their ratio."""
    fill(runner, sizes.context)
    runs = {rows: passes(runner, rows, sizes.passes) for rows in (FEW, MANY)}
    seconds = alternate(runs, sizes.repeats)
    ratio, *ends = paired_ratio_interval(seconds[MANY], seconds[FEW])
    result = {f"verify_{MANY}_rows_over_{FEW}": figure(ratio, "times a pass over one row", ends)}
    for rows, values in seconds.items():
        value, *ends = median_interval([1e3 * s / sizes.passes for s in values])
        result[f"ms/verify_{rows}_rows"] = figure(value, "ms", ends)
    return result


def _part_figures(job: Job, runner: Runner, sizes: Sizes) -> dict[str, dict]:
    """Measures milliseconds and shares of a round's parts, as far as there is time to compile."""
    began = [time.monotonic()]

    def go_on() -> bool:
        began.append(time.monotonic())
        return job.time_for(max(np.diff(began)))

    emitted = min(sizes.emitted, runner.steps + 1)
    parts = Parts(runner, Features(), {}, sizes.context, emitted, go_on)
    found = turn_times(parts, sizes.window, sizes.repeats)
    names = [name for name in found if not name.endswith(EMPTY)]
    result = part_figures(
        {name: np.subtract(found[name], found[f"{name}{EMPTY}"]) for name in names}
    )
    if missing := [name for name in OF_PARTS if name not in result]:
        job.no_time(missing)
    cfg, batch = runner.cfg, sizes.batch
    drafted = counts.draft_bytes(cfg, runner.params, runner.head, batch, sizes.context)
    rows = runner.tree.rows
    verified = counts.forward_bytes(cfg, runner.params, batch, rows, sizes.context)
    bound = runner.steps * drafted / verified
    unit = f"bytes of {runner.steps} drafted tokens over those of a verification"
    result["draft_over_verify_bytes"] = figure(bound, unit)
    print_parts(result, sizes)
    return result


def part_figures(times: Mapping[str, Sequence[float]]) -> dict[str, dict]:
    """Makes figures from milliseconds, in each turn, of a round and of its parts.

    Figures that need a part which is missing are left out.
    """
    times = {name: np.asarray(values, float) for name, values in times.items()}
    mine = {name: times[name] for name in ROUND if name in times}
    if "accept" in mine:
        mine["accept"] = times["transform"] + times["accept"]
    result = {}
    for name, values in (mine | {n: times[n] for n in ("round",) if n in times}).items():
        value, *ends = median_interval(values)
        result[f"ms/{name}"] = figure(value, "ms, median", ends)
    if {"draft", "verify"} <= mine.keys():
        unit = "all drafting over verification"
        result["draft_over_verify"] = _over(mine["draft"], mine["verify"], unit)
    if len(mine) < len(ROUND):
        return result
    total = sum(mine.values())
    medians = {name: result[f"ms/{name}"]["value"] for name in ROUND}
    for name in ROUND:
        whole = np.array([sum(medians.values())])
        result[f"share/{name}"] = _over(np.array([medians[name]]), whole, "of the parts' sum")
    unit = "of the parts' sum, transforms included"
    result["noise_and_accept_share"] = _over(mine["noise"] + mine["accept"], total, unit)
    if "round" in times:
        result["sum_of_parts"] = _over(total, times["round"], "times the whole round")
        value, *ends = median_interval(1e3 * (times["round"] - total))
        result["us_beside_parts"] = figure(value, "us of a round beside its parts", ends)
    return result


def _over(values: np.ndarray, total: np.ndarray, unit: str) -> dict:
    """Makes the figure of a ratio; a tiny model's parts may be too short for the clock."""
    if min(total) <= 0:
        return figure(None, f"left out: too short for the clock, {unit}")
    ratio, *ends = paired_ratio_interval(values, total)
    return figure(ratio, unit, ends)


def print_parts(figures: Mapping[str, Mapping], sizes: Sizes) -> None:
    title = f"one round, {sizes.strategy}, {sizes.batch} slots at {sizes.context} tokens"
    table = Table(title=title, title_justify="left")
    for column in ("part", "ms, median", "share"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for name in (*ROUND, "round"):
        if f"ms/{name}" in figures:
            share = figures.get(f"share/{name}", {}).get("value")
            cell = "" if share is None else f"{100 * share:.1f}%"
            table.add_row(name, f"{figures[f'ms/{name}']['value']:.3f}", cell)
    Console(width=100).print(table)
