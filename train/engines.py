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
AnyEngine = Engine | Replicas | Hosts


def make_meshes(cfg: RLConfig) -> tuple[Mesh, list[Mesh], Copies | None]:
    """Where the run trains, and where each replica of this process rolls out.

    Returns:
      mesh, places, and what brings weights to the replicas of all processes if there are several.

    Raises:
      ValueError: there are not so many devices, or not all processes would have something to do.
    """
    roll = cfg.rollout
    sharding.offer_cpu_devices(max(cfg.mesh.size, cfg.rollout_devices))
    if distributed.is_several():
        _check_processes(cfg)
    mesh = sharding.make_mesh(cfg.mesh)
    if not roll.own_devices:
        return mesh, [mesh], None
    places = sharding.replica_meshes(roll.replicas, roll.tp)
    copies = Copies(places) if distributed.is_several() else None
    return mesh, copies.own if copies else places, copies


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
    copies: Copies | None = None,
    judge: Callable[[Job, SampleOutput], float] | None = None,
) -> tuple[list[Engine], AnyEngine, AnyEngine | None]:
    """The engines of this process.

    Args:
      mesh, places, copies: see `make_meshes`; with `copies` evaluation runs on `places`, too.
      judge: see `Hosts`.

    Returns:
      one engine for each place, all of them (of all processes) as one, and what evaluates if the
      run does.

    Raises:
      ValueError: the settings do not fit together.
    """
    roll = cfg.rollout
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
    together = Replicas(engines) if len(engines) > 1 else engines[0]
    evaluates = None
    if cfg.eval.problems:
        evaluates = build(None, cfg.eval.max_batch, mesh if copies is None else places[0])
    if copies is not None:
        together = Hosts(together, copies, judge)
        evaluates = evaluates and Hosts(evaluates, copies)
    return engines, together, evaluates


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
