"""The engines of a run: those that roll out, and the one that evaluates."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from specjax import distributed, sharding
from specjax.config import ModelConfig
from specjax.draft.source import DraftSource
from specjax.engine.engine import Engine
from specjax.engine.hosts import Copies, Hosts
from specjax.engine.replicas import Replicas
from specjax.engine.request import Job, SampleOutput
from train.schema import RLConfig

Mesh = jax.sharding.Mesh | None  # None is one device, the first


def make_meshes(cfg: RLConfig) -> tuple[Mesh, list[Mesh]]:
    """Where the run trains, and where each of its replicas rolls out, on all processes.

    Raises:
      ValueError: there are not so many devices, or some processes would have nothing to do.
    """
    roll = cfg.rollout
    sharding.offer_cpu_devices(max(cfg.mesh.size, cfg.rollout_devices))
    if distributed.is_several():
        _check_processes(cfg)
    mesh = sharding.make_mesh(cfg.mesh)
    return mesh, sharding.replica_meshes(roll.replicas, roll.tp) if roll.own_devices else [mesh]


def _check_processes(cfg: RLConfig) -> None:
    """Refuses settings that leave devices of a job of several processes without work.

    Raises:
      ValueError: says what to change.
    """
    roll, all_of_them, here = cfg.rollout, jax.device_count(), jax.local_device_count()
    job = f"{jax.process_count()} processes with {all_of_them} devices, {here} in each,"
    if here * jax.process_count() != all_of_them:
        raise ValueError(f"expected the same number of devices in each process, got {job} of them")
    if here % roll.tp:
        raise ValueError(
            f"rollout.tp={roll.tp}: a replica must have its devices in one process, and of {job} "
            f"none has so many, or some would be left over; set rollout.tp to a divisor of {here}"
        )
    if cfg.mesh.size != all_of_them:
        raise ValueError(
            f"{job} all train: the product of the axes of mesh must be {all_of_them}, got "
            f"{cfg.mesh.size}"
        )
    if roll.replicas * roll.tp != all_of_them:
        raise ValueError(
            f"{job} all roll out, as replicas that each lie in one process: set "
            f"rollout.replicas={all_of_them // roll.tp} with rollout.tp={roll.tp}, got "
            f"rollout.replicas={roll.replicas}"
        )
    if roll.spec().telemetry_on:
        raise ValueError(
            "rollout.telemetry tells of the samples of one process alone; turn it off (and unset "
            "SPECJAX_TELEMETRY), or look at it in a run of one process"
        )


def build_engines(
    cfg: RLConfig,
    model: ModelConfig,
    speculate: bool,
    source: DraftSource | None,
    mesh: Mesh,
    places: Sequence[Mesh],
) -> tuple[list[Engine], Engine | None]:
    """One engine for each place, and one for evaluation on `mesh` if the run evaluates.

    Args:
      places: of this process. Evaluation, too, stays in one of them where there are several
        processes.

    Raises:
      ValueError: the settings do not fit together.
    """
    roll = cfg.rollout
    mesh = places[0] if distributed.is_several() else mesh
    settings = {
        "max_len": roll.max_prompt_tokens + roll.max_tokens,
        "stop_width": max(1, len(model.eos_token_ids)),
        "prompt_widths": [roll.max_prompt_tokens],  # one width, one set of executables
        "config": dataclasses.replace(roll.engine_config(), attention=cfg.attention),
    }
    spec = roll.spec() if speculate else None
    control = roll.control_config() if speculate else None

    def build(spec, batch: int, place: Mesh, **more) -> Engine:
        # Fused weights, as unrolled layers have them, cannot be split.
        scan = roll.scan_layers or (place is not None and place.size > 1)
        decoder = model.replace(scan_layers=scan, remat=False)
        return Engine(decoder, spec, batch, mesh=place, **settings, **more)

    engines = [
        build(spec, roll.max_batch, place, source=source, control=control) for place in places
    ]
    return engines, build(None, cfg.eval.max_batch, mesh) if cfg.eval.problems else None


def as_one(
    engines: Sequence[Engine],
    copies: Copies | None,
    judge: Callable[[Job, SampleOutput], float] | None = None,
) -> Engine | Replicas | Hosts:
    """Engines of this process, and those like them of all others, behind the interface of one.

    Args:
      copies: brings weights to all processes; None: there is one. judge: see `Hosts`.
    """
    own = Replicas(engines) if len(engines) > 1 else engines[0]
    return own if copies is None else Hosts(own, copies, judge)


def everywhere(own: Sequence[Any]) -> list:
    """What each replica of the job has, from what those of this process have."""
    return [*itertools.chain(*distributed.gather(list(own), "replicas"))]


def control_metrics(engines: Sequence[Engine]) -> dict[str, float | str]:
    """What the controllers chose last; those of further replicas under their numbers."""
    metrics: dict[str, float | str] = {}
    for replica, fields in enumerate(everywhere([e.controller.log_fields() for e in engines])):
        prefix = f"control/replica_{replica}/" if replica else "control/"
        metrics |= {prefix + name: value for name, value in fields.items()}
    return metrics
