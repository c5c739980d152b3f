"""The replicas of a run: engines that share its samples, in one process or in several."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from specjax.engine.base import BaseEngine
from specjax.engine.engine import Engine
from specjax.engine.hosts import Copies, Hosts
from specjax.engine.replicas import Replicas
from specjax.engine.request import Job, SampleOutput
from specjax.parallel import distributed
from specjax.telemetry import Collector


def copies_for(meshes: Sequence[jax.sharding.Mesh | None]) -> Copies | None:
    """Returns what copies weights to all replicas of the job; None for one process.

    Args:
      meshes: meshes of all replicas of the job.

    Raises:
      ValueError: processes have different numbers of devices, or a process has parts of several
        replicas.
    """
    if not distributed.is_several():
        return None
    all_of_them, here = jax.device_count(), jax.local_device_count()
    if here * jax.process_count() != all_of_them:
        raise ValueError(
            f"expected the same number of devices in each process, got {all_of_them} in "
            f"{jax.process_count()} processes and {here} in process {jax.process_index()}: the "
            "exchange between processes needs as many devices in each; set "
            "distributed.local_devices to the smallest number that a process has"
        )
    return Copies(meshes)


def join_engines(
    engines: Sequence[Engine],
    copies: Copies | None,
    score: Callable[[Job, SampleOutput], Any] | None = None,
) -> BaseEngine:
    """Joins the engines of this process, and of all others, to one with the same interface.

    Args:
      engines: engines of this process.
      copies: object that copies weights to all processes; None for one process.
      score: function that begins to score a finished sample in the process that ran it.
    """
    engine = Replicas(engines) if len(engines) > 1 else engines[0]
    return engine if copies is None else Hosts(engine, copies, score)


def gather_replicas(own: Sequence[Engine], read: Callable[[Engine], Any]) -> list:
    """Returns what `read` says of each replica of the job; `own` are those of this process."""
    facts = [read(engine) for engine in own if engine.runner.agreement.is_first]
    return [*itertools.chain(*distributed.gather(facts, "replicas"))]


def write_telemetry(own: Sequence[Engine], collector: Collector | None, path: Path) -> None:
    """Appends what all replicas of the job collected to a file, and clears it.

    Args:
      own: replicas of this process.
      collector: the collector that they share; None: nothing is collected.
      path: the file.
    """
    if collector is None:
        return
    speaks = own and own[0].runner.agreement.is_first  # for the processes of this replica
    parts = distributed.gather(own[0].telemetry if speaks else None, "telemetry")
    if distributed.is_first():
        whole = Collector.joined([part for part in parts if part is not None])
        whole.write_jsonl(path, append=True)
    collector.clear()


def control_metrics(engines: Sequence[Engine]) -> dict[str, float | str]:
    """Returns metrics of the controllers; further replicas' have the replica's number."""
    metrics: dict[str, float | str] = {}
    for replica, fields in enumerate(gather_replicas(engines, lambda e: e.controller.log_fields())):
        prefix = f"control/replica_{replica}/" if replica else "control/"
        metrics |= {prefix + name: value for name, value in fields.items()}
    return metrics
