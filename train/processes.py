"""Runs of several processes: they check that they agree, exchange results, and end together."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from specjax.checked_json import CheckpointError
from specjax.command_line import ConfigError, fingerprint
from specjax.config.spec import TELEMETRY_VARIABLE
from specjax.engine.base import BaseEngine
from specjax.engine.engine import Engine
from specjax.engine.hosts import Hosts, Judgement
from specjax.engine.replicas import Replicas
from specjax.engine.request import Job, SampleOutput
from specjax.kernels import dispatch
from specjax.parallel import distributed, heartbeat
from specjax.parallel.copies import Copies
from specjax.parallel.heartbeat import Heartbeat
from specjax.telemetry import Collector
from train.cli import INTERRUPTED
from train.schema import RLConfig

# Prefixes of messages of XLA and its transports; jax 0.10.2 raises some of them as ValueError.
_STATUS = re.compile(r"(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED): ")


@contextlib.contextmanager
def watched(
    cfg: RLConfig, out: Path, user_errors: tuple[type[BaseException], ...]
) -> Iterator[None]:
    """Runs the body in every process of the job, and ends all processes when one fails.

    The process in which an error arose prints its message, and the others name that process. They
    exit at once, because the usual clean-up would wait for the lost process. A job of one process
    just runs the body.

    Args:
      cfg: settings of the run.
      out: directory of the run.
      user_errors: errors that are printed without traceback.
    """
    if not distributed.is_several():
        yield
        return
    token = distributed.of_first(lambda: secrets.token_hex(8), "start")
    beat = Heartbeat(
        out / "processes",
        jax.process_index(),
        jax.process_count(),
        token,
        cfg.distributed.lost_after,
        "The job cannot go on without it. Start all processes again with --resume, as many as "
        f"there are machines, to go on from the last checkpoint in {out}",
    )
    try:
        _agree(cfg, out, beat)
        yield
        distributed.gather(None, "end")  # the first one may have plots and exports to write
    except BaseException as error:
        if _may_be_loss(error):
            beat.wait_for_loss()
        if isinstance(error, user_errors):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
        beat.fail(error)
        heartbeat.exit_now(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)
    beat.close()


def _may_be_loss(error: BaseException) -> bool:
    """Whether the loss of another process may have caused this: a collective or a save failed."""
    broken = isinstance(error, (jax.errors.JaxRuntimeError, CheckpointError))
    if str(error).startswith("RESOURCE_EXHAUSTED"):  # this process's own memory
        return False
    return broken or _STATUS.match(str(error)) is not None


# Settings of jax, also set by its environment variables, that change traced programs.
_TRACED = (
    "jax_debug_nans",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)
# Variables that may change how a program is compiled, and so its last bits; kernels add theirs.
_COMPILED = (
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "NVIDIA_TF32_OVERRIDE",
)
# Variables of jax that concern a single process, caches or logs.
_OWN = re.compile(
    r"JAX_(PROCESS_ID|NUM_PROCESSES|COORDINATOR_\w+|\w*CACHE\w*|\w*VISIBLE_DEVICES|LOG\w*|DEBUG_LOG\w*"
    r"|DUMP_\w+|\w*TRACEBACK\w*)"
)


def _must_agree(cfg: RLConfig) -> dict[str, Any]:
    """Settings that all processes must share, by the names under which a user can change them."""
    mine = fingerprint(cfg, ("distributed",)) | {"the version of jax": jax.__version__}
    if cfg.rollout.telemetry is None:
        mine[TELEMETRY_VARIABLE] = cfg.rollout.spec().telemetry_on
    return mine | {name.upper(): getattr(jax.config, name) for name in _TRACED}


def _should_agree(environment: Mapping[str, str]) -> dict[str, list[str]]:
    """The words of environment variables that may change last bits."""
    traced = {name.upper() for name in _TRACED}
    names = {n for n in environment if n.startswith("JAX_") and not _OWN.fullmatch(n)} - traced
    names |= {*_COMPILED, *dispatch.environment()}
    return {n: sorted(environment[n].split()) for n in names if environment.get(n)}


def _agree(cfg: RLConfig, out: Path, beat: Heartbeat) -> None:
    """Checks that all processes have the same settings and see the same files.

    Raises:
      ConfigError: settings differ (the message names them), or the files do.
    """
    mine, bits = _must_agree(cfg), _should_agree(os.environ)
    gathered = distributed.gather((mine, bits), "settings")
    for process, (theirs, _) in enumerate(gathered):
        differing = sorted(key for key in mine if mine[key] != theirs.get(key))
        if differing:
            raise ConfigError(
                f"process {process} was started with another value of {', '.join(differing)} than "
                f"process {jax.process_index()}; start all with the same settings"
            )
    for process, (_, theirs) in enumerate(gathered):
        differing = sorted(n for n in bits.keys() | theirs if bits.get(n) != theirs.get(n))
        if differing and distributed.is_first():
            print(
                f"WARNING: process {process} has another value of {', '.join(differing)} in its "
                "environment than process 0, so results may differ in their last bits between "
                "them; start all with the same values",
                flush=True,
            )
    until = time.monotonic() + cfg.distributed.lost_after
    while missing := beat.missing():
        if time.monotonic() > until:
            raise ConfigError(
                f"out={out}: process {jax.process_index()} does not see there the files that "
                f"processes {missing} wrote; it must be on storage that all processes share, "
                "because they write their checkpoints together"
            )
        time.sleep(0.1)
    distributed.gather(None, "storage")


# --- engines --------------------------------------------------------------------------------------


def copies_for(
    cfg: RLConfig, mesh: jax.sharding.Mesh | None, meshes: Sequence[jax.sharding.Mesh | None]
) -> Copies | None:
    """The object that copies weights to all replicas of the job; None for one process.

    Args:
      cfg: settings of the run.
      mesh: mesh of training, see `train.programs.make_meshes`.
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
    return Copies(meshes, mesh)


def idle_device_warnings(
    mesh: jax.sharding.Mesh | None, meshes: Sequence[jax.sharding.Mesh | None]
) -> list[str]:
    """Warnings about devices of a job of several processes that are not used.

    Args:
      mesh: mesh of training.
      meshes: meshes of all replicas of the job.
    """
    if not distributed.is_several():
        return []
    used = {
        "training": (mesh.devices.flat, "the axes of mesh"),
        "rollouts": ([d for p in meshes for d in p.devices.flat], "rollout.replicas * rollout.tp"),
    }
    lines, sets = [], {part: set(devices) for part, (devices, _) in used.items()}
    for part, (_, setting) in used.items():
        idle = jax.device_count() - len(sets[part])
        without = sorted(set(range(jax.process_count())) - {d.process_index for d in sets[part]})
        if idle:
            none = f"; processes {without} have none for it" if without else ""
            lines.append(
                f"WARNING: {part}: {idle} of the job's {jax.device_count()} devices have no part "
                f"in it ({setting} come to {len(sets[part])}){none}"
            )
    if sets["training"] != sets["rollouts"]:
        lines.append(
            "weights go from training to rollouts through the memory of the hosts, because these "
            "have other devices"
        )
    return lines


def join_engines(
    engines: Sequence[Engine],
    copies: Copies | None,
    score: Callable[[Job, SampleOutput], Judgement | None] | None = None,
) -> BaseEngine:
    """Joins the engines of this process, and of all others, to one with the same interface.

    Args:
      engines: engines of this process.
      copies: object that copies weights to all processes; None for one process.
      score: function that begins to score a finished sample in the process that ran it.
    """
    own = Replicas(engines) if len(engines) > 1 else engines[0]
    return own if copies is None else Hosts(own, copies, score)


def gather_replicas(own: Sequence[Engine], read: Callable[[Engine], Any]) -> list:
    """The result of `read` for each replica of the job; `own` are those of this process."""
    found = [read(engine) for engine in own if engine.runner.agreement.is_first]
    return [*itertools.chain(*distributed.gather(found, "replicas"))]


def gather_telemetry(own: Sequence[Engine]) -> Collector:
    """The telemetry of all replicas of the job; `own`, those of this process, share a collector."""
    is_first = own and own[0].runner.agreement.is_first  # of the processes of this replica
    parts = distributed.gather(own[0].telemetry if is_first else None, "telemetry")
    return Collector.joined([part for part in parts if part is not None])


def gather_events(own: Sequence[Engine], events: list[dict]) -> list[dict]:
    """The events of the replicas of all processes, see `train.log`.

    Args:
      own: replicas of this process.
      events: events of this process; the event of the whole rollout is taken from the first one.
    """
    if not (own and own[0].runner.agreement.is_first):
        events = []
    if not distributed.is_first():
        events = [event for event in events if event["replica"] is not None]
    return [*itertools.chain(*distributed.gather(events, "trace"))]


def control_metrics(engines: Sequence[Engine]) -> dict[str, float | str]:
    """Metrics of the controllers; those of further replicas have the replica's number."""
    metrics: dict[str, float | str] = {}
    for replica, fields in enumerate(gather_replicas(engines, lambda e: e.controller.log_fields())):
        prefix = f"control/replica_{replica}/" if replica else "control/"
        metrics |= {prefix + name: value for name, value in fields.items()}
    return metrics
