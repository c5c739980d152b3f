"""One process of `bench.gpu`: `python -m bench.gpu_child '<a task as JSON>'`.

A kernel that hangs or a driver that gives up takes its process with it, and no other part.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import jax

from bench import gpu_kernels, gpu_round, gpu_torch
from bench.gpu_job import Job

PARTS = {
    "correctness": gpu_kernels.values,
    "correctness/experimental": functools.partial(
        gpu_kernels.values, asked=gpu_kernels.EXPERIMENTAL
    ),
    "bandwidth": gpu_kernels.bandwidth,
    "bandwidth/experimental": functools.partial(
        gpu_kernels.bandwidth, asked=gpu_kernels.EXPERIMENTAL
    ),
    "round": gpu_round.one_round,
    "protocol": gpu_round.workloads,
    "transformers": gpu_torch.beside,
}


def main() -> None:
    task = json.loads(sys.argv[1])
    for name, seconds in task["parts"].items():
        job = Job(
            name, Path(task["directory"]), seconds, task["small"], task["seed"], task["attention"]
        )
        job.run(PARTS[name])
        jax.clear_caches()


if __name__ == "__main__":
    main()
