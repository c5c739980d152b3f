"""The engines of a run: those that roll out, those of exact mode, and the one that evaluates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from specjax.config import ModelConfig, SpecConfig
from specjax.engine.engine import Engine
from specjax.interfaces import Draft
from specjax.parallel import distributed, sharding
from train.schema import RLConfig

Mesh = jax.sharding.Mesh | None  # None is one device, the first


def make_meshes(cfg: RLConfig, devices: sharding.Devices = None) -> tuple[Mesh, list[Mesh]]:
    """Where the run trains, and where each of its replicas rolls out.

    Without devices of its own a rollout has those of training: its slots are split over all axes
    but `tp`, and weights over `tp` alone, so that no step has to gather them. In a job of several
    processes each replica has devices of its own, and one device that trains is a mesh, too.

    Args:
      devices: to take them from, see `sharding.make_mesh`.

    Raises:
      ValueError: there are not so many devices.
    """
    roll = cfg.rollout
    if devices is None:
        sharding.offer_cpu_devices(max(cfg.mesh.size, cfg.rollout_devices))
    mesh, several = sharding.make_mesh(cfg.mesh, devices), distributed.is_several()
    if several and mesh is None:
        mesh = sharding.replica_meshes(1)[0]
    if not roll.own_devices and not several:
        return mesh, [_rollout_mesh(mesh)]
    # A replica must not straddle processes, and `rollout_mesh` keeps neighbours together only where
    # tp grows.
    near = mesh if not several or roll.tp % cfg.mesh.tp == 0 else None
    return mesh, sharding.replica_meshes(roll.replicas, roll.tp, devices, near)


def build_engines(
    cfg: RLConfig,
    model: ModelConfig,
    speculate: bool,
    source: Draft | None,
    mesh: Mesh,
    places: Sequence[Mesh],
) -> tuple[list[Engine], list[Engine], Engine | None]:
    """One engine for each place; one more for each that decodes plainly, if exact mode needs these;
    and one for evaluation on `mesh` if the run evaluates.

    Args:
      places: of this process. With several processes each evaluates on the first of these. One
        that has none gets engines on its first device that never run, and only know what an engine
        takes.

    Raises:
      ValueError: the settings do not fit together.
    """
    roll, places = cfg.rollout, places or [None]
    exact = speculate and roll.exact_mode
    if exact and distributed.is_several() and roll.tp > jax.local_device_count():
        raise ValueError(
            "rollout.exact_mode explains a difference by logits that one process computes, and "
            f"with rollout.tp={roll.tp} a replica has devices of several processes, which have "
            f"{jax.local_device_count()} each; use a smaller rollout.tp, or leave out exact_mode"
        )
    mesh = places[0] if distributed.is_several() else mesh
    settings = {
        "max_len": roll.max_prompt_tokens + roll.max_tokens,
        "stop_width": max(1, len(model.eos_token_ids)),
        "prompt_widths": [roll.max_prompt_tokens],  # one width, one set of executables
        "config": dataclasses.replace(
            roll.engine_config(), attention=cfg.attention, named_strategies=False
        ),
    }
    plain = SpecConfig("off", invariant=roll.invariant)
    spec = roll.spec() if speculate else plain
    control = roll.control_config() if speculate else None

    def build(spec, batch: int, place: Mesh, **more) -> Engine:
        # Fused weights, as unrolled layers have them, cannot be split.
        scan = roll.scan_layers or (place is not None and place.size > 1)
        decoder = model.running(scan_layers=scan, remat=False)
        return Engine(decoder, spec, batch, mesh=place, **settings, **more)

    engines = [
        build(spec, roll.max_batch, place, source=source, control=control) for place in places
    ]
    plain_engines = []
    if exact and not roll.invariant:  # in that mode one program has to decode both ways
        plain_engines = [build(plain, roll.max_batch, place) for place in places]
    if not cfg.eval.problems:
        return engines, plain_engines, None
    return engines, plain_engines, build(plain, cfg.eval.max_batch, _rollout_mesh(mesh))


def _rollout_mesh(mesh: Mesh) -> Mesh:
    return None if mesh is None else sharding.rollout_mesh(mesh)
