"""Jobs of several processes: how a job starts, and how its processes exchange data.

On a pod every host runs the same program on its own chips. All processes read the same settings and
data, take the same decisions, and make collective calls (`gather`, programs over a global mesh,
checkpoints) in the same order. With one process these functions do nothing.

jax sends heartbeats to process 0. Where those of a process fail to come, or process 0 is gone, jax
prints which one is lost, and aborts all others, whose main threads may be blocked in a collective.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pickle
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from specjax.parallel import sharding
from specjax.settings import option

MODES = ("auto", "on", "off")
_BLOCKS = (1 << 14, 1 << 20)  # bytes of the first block that is gathered, and of each further one


class DistributedError(RuntimeError):
    """The processes of a job cannot work together."""


@dataclasses.dataclass
class DistributedConfig:
    """The processes of a job.

    Attributes:
      mode: auto: several processes if the environment describes them (SLURM, Open MPI, TPU pods on
        GKE, or JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and JAX_PROCESS_ID); on: several,
        which jax detects (pods of Cloud TPU VMs); off: one process.
      coordinator: host:port of process 0, to which all processes connect; null: from the
        environment.
      process_id: number of this process, from 0; null: from the environment.
      num_processes: number of processes of the job; null: from the environment.
      local_devices: number of devices that this process uses, from the first; 0: all, or one where
        SLURM or Open MPI started the process.
      start_timeout: seconds to wait for all processes at the start.
      lost_after: seconds without a heartbeat after which a process counts as lost.
    """

    mode: str = option("auto", choices=MODES)
    coordinator: str | None = option(None, needs="mode=auto|on")
    process_id: int | None = option(None, needs="mode=auto|on")
    num_processes: int | None = option(None, needs="mode=auto|on")
    local_devices: int = option(0, least=0, needs="mode=auto|on")
    start_timeout: int = option(300, least=1, needs="mode=auto|on")
    lost_after: int = option(150, least=1, needs="mode=auto|on")


class Job(NamedTuple):
    """The address and processes of a job, before it starts; None: jax detects the value."""

    coordinator: str | None
    num_processes: int | None
    process_id: int | None

    def __str__(self) -> str:
        count = "an unknown number" if self.num_processes is None else self.num_processes
        me = "this process" if self.process_id is None else f"process {self.process_id}"
        address = "the launcher's coordinator" if self.coordinator is None else self.coordinator
        return f"{me} of {count}, which connect to {address}"


def find_job(cfg: DistributedConfig, environment: Mapping[str, str]) -> Job | None:
    """Returns the job that this process belongs to; None: the process is alone.

    Raises:
      DistributedError: some of the three explicit settings are missing, or do not fit together.
    """
    if cfg.mode == "off":
        return None
    names = {
        "coordinator": "JAX_COORDINATOR_ADDRESS",
        "num_processes": "JAX_NUM_PROCESSES",
        "process_id": "JAX_PROCESS_ID",
    }
    given = {key: getattr(cfg, key) for key in names}
    given = {k: environment.get(names[k]) if v is None else v for k, v in given.items()}
    launched = cfg.mode == "on" or _launched_several(environment)
    if all(value is None for value in given.values()):
        return Job(None, None, None) if launched else None
    missing = [key for key, value in given.items() if value is None]
    if missing and not launched:
        raise DistributedError(
            f"distributed: no value for {', '.join(missing)}; set all three, or none of them"
        )
    address, count, index = given.values()
    count, index = (None if x is None else int(x) for x in (count, index))
    if count is not None and index is not None and not 0 <= index < count:
        raise DistributedError(
            f"distributed.process_id: expected 0 to {count - 1} of {count} processes, got {index}"
        )
    return None if count == 1 else Job(address, count, index)


def _launched_several(environment: Mapping[str, str]) -> bool:
    """Returns whether the environment of a launcher that jax knows has several processes."""

    def number(name: str) -> int:
        return int(environment.get(name) or 1)

    slurm = number("SLURM_NTASKS") if "SLURM_STEP_NODELIST" in environment else 1
    hosts = environment.get("TPU_WORKER_HOSTNAMES", "").count(",") + 1
    counts = (slurm, number("OMPI_COMM_WORLD_SIZE"), hosts, number("MEGASCALE_NUM_SLICES"))
    return max(counts) > 1


def start(cfg: DistributedConfig, devices: int) -> None:
    """Joins the job, if there is one; must run before anything initialises jax's backends.

    Args:
      devices: number of devices that the job needs; where the CPU simulates them, each process gets
        its share.

    Raises:
      DistributedError: the settings do not fit together, or not all processes connected.
    """
    job = find_job(cfg, os.environ)
    if job is None or jax.distributed.is_initialized():
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if job.num_processes is not None:
        sharding.offer_cpu_devices(max(1, devices // job.num_processes))
    # jax aborts, and names no process, when the others do not connect.
    waits = (
        f"{job}, within {cfg.start_timeout} s: num_processes processes, each with a process_id of "
        "its own, and all with a coordinator that they can reach"
    )
    shown = functools.partial(print, waits, file=sys.stderr, flush=True)
    timer = threading.Timer(min(10, cfg.start_timeout / 2), shown)
    timer.start()
    try:
        jax.distributed.initialize(
            coordinator_address=job.coordinator,
            num_processes=job.num_processes,
            process_id=job.process_id,
            local_device_ids=list(range(cfg.local_devices)) or None,
            # With explicit settings, jax must not also detect a cluster.
            cluster_detection_method="deactivate" if None not in job else None,
            initialization_timeout=cfg.start_timeout,
            heartbeat_timeout_seconds=cfg.lost_after,
        )
    except (RuntimeError, ValueError) as error:
        raise DistributedError(f"{waits}; {str(error).splitlines()[0]}") from error
    finally:
        timer.cancel()


def exit_now(status: int) -> None:
    """Ends the process at once: `sys.exit` would wait for the other processes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def is_several() -> bool:
    """Returns whether the job has more than one process."""
    # `jax.process_count` alone would initialise the backends, before `offer_cpu_devices`.
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Returns whether this is process 0, which writes logs and plots."""
    return not is_several() or jax.process_index() == 0


def gather(value: Any, place: str) -> list[Any]:
    """Returns the values of all processes, in their order; all must call it, as a barrier.

    Args:
      value: this process's value; anything that pickle takes.
      place: the place of the call in the program, in a word or two.

    Raises:
      DistributedError: another process called it from another place.
    """
    if not is_several():
        return [value]
    data = pickle.dumps((place, value))
    data = len(data).to_bytes(8, "little") + data
    rows = _gather_block(data[: _BLOCKS[0]], _BLOCKS[0])
    lengths = [8 + int.from_bytes(row[:8], "little") for row in rows]
    for begin in range(_BLOCKS[0], max(lengths), _BLOCKS[1]):
        more = _gather_block(data[begin : begin + _BLOCKS[1]], _BLOCKS[1])
        rows = [row + piece for row, piece in zip(rows, more, strict=True)]
    found = [pickle.loads(row[8:length]) for row, length in zip(rows, lengths, strict=True)]
    places = [name for name, _ in found]
    if set(places) != {place}:
        raise DistributedError(
            f"the processes are at different places of the program: {places}; start all alike"
        )
    return [value for _, value in found]


def _gather_block(data: bytes, size: int) -> list[bytes]:
    """Gathers one block of every process; few sizes are used, so few programs are compiled."""
    block = np.zeros(size, np.uint8)
    block[: len(data)] = np.frombuffer(data, np.uint8)
    return [row.tobytes() for row in np.asarray(multihost_utils.process_allgather(block))]


def of_first(make: Callable[[], Any], place: str) -> Any:
    """Runs `make` in process 0 alone, and returns its result in all; all must call it."""
    return gather(make() if is_first() else None, place)[0]


def told_to_end(step: int) -> bool:
    """Returns whether a process got SIGTERM, as before preemption; the same value in all processes.

    jax catches that signal in jobs of several processes, so that all can end together.

    Args:
      step: number of the step that has ended; each process must call this once after each step.
    """
    return is_several() and multihost_utils.reached_preemption_sync_point(step)
