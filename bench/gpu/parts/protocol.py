"""`bench.throughput workloads` at full size, on a model of 8B shapes with random weights."""

from __future__ import annotations

import functools

from bench.gpu.job import Job
from bench.gpu.parts.round_parts import model_of, sizes_of
from bench.record import report
from bench.throughput import workloads
from bench.throughput.workloads import WORKLOADS, Point, points
from specjax.shipped import find_shipped
from specjax.tokenizer import load_tokenizer
from train import data

NOT_AHEAD = "its engines compile on first use; other parts compile the same chunks"
TOKENIZER = "assets/sums"


def measure(job: Job) -> None:
    """Measures the figures of `bench.throughput workloads`, beginning with one sample at a time."""
    sizes = sizes_of(job)
    job.tell(sizes=sizes._asdict())
    argv = ["--strategy", sizes.strategy, "--seed", str(job.seed), "--emitted", str(sizes.emitted)]
    argv += ["--repeats", "2" if job.small else "3", "--scale", "1/64" if job.small else "1"]
    argv += ["--window", str(sizes.window), "--copy_bytes", str(1 << 16 if job.small else 1 << 30)]
    args = workloads.parse([*argv, "--dtype", sizes.dtype])
    tokenizer = load_tokenizer(find_shipped(TOKENIZER))
    source = data.demonstrations(data.DataConfig(seed=job.seed), "heldout")
    model = model_of(sizes, job.seed)

    def one(point: Point) -> dict:
        found = workloads.point_figures(point, model, source, tokenizer, args)
        print(report(found), flush=True)
        return {f"protocol/{name}": entry for name, entry in found.items()}

    job.each(
        (f"protocol/speedup/{point.name}", functools.partial(one, point))
        for point in ordered(points(list(WORKLOADS), args.scale), job.small)
    )


def ordered(found: list[Point], small: bool) -> list[Point]:
    """Orders points: batch 1, the largest batch, the rest; `small` keeps batch 1 only."""
    largest = max(point.batch for point in found)
    ranks = {1: 0, largest: 1}
    found = sorted(found, key=lambda point: ranks.get(point.batch, 2))
    return [point for point in found if point.batch == 1] if small else found
