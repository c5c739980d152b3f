"""Chunks of an engine whose devices need not be there, lowered by the code that an engine runs."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import topologies

from specjax.config import ModelConfig, RunConfig, SpecConfig, Strategy
from specjax.decode.chunk import Until
from specjax.decode.options import Features
from specjax.decode.state import RowMap
from specjax.drafts.mtp import init_head_params
from specjax.engine.runner import Runner
from specjax.engine.sources import laid_out
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params
from specjax.parallel.sharding import MESH_AXES

# As Qwen3-8B, with a head for drafting, but for the number of layers.
MODEL = dense_config(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_layers=4,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mtp_num_layers=1,
    tie_embeddings=False,
    run=RunConfig(param_dtype="bfloat16", compute_dtype="bfloat16"),
)
LAYERS = 36  # of Qwen3-8B
# More pages than any weight has numbers per layer: a copy of them is not taken for one of a weight.
BATCH, PAGES, MAX_LEN = 64, 1600, 1024


def tpu_devices(topology: str) -> Sequence[jax.Device]:
    """Returns the devices of a topology, which need not be there.

    Raises:
      ModuleNotFoundError: the TPU compiler is not installed.
      ValueError: it does not know the topology.
    """
    # The compiler asks for the host's metadata, and refuses a second process, unless it is told.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        import libtpu  # noqa: F401
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the TPU compiler is not installed in this environment; `make tpu-check` makes one "
            "that has it: run .venv-plan/bin/python -m bench.tpu"
        ) from None
    try:
        return topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"--topology: expected one that libtpu knows, such as v5e:2x2 or v5p:2x2x1, got "
            f"{topology!r}: {str(error).splitlines()[0]}"
        ) from error


def mesh_over(devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """Returns a mesh with all devices on the axis `tp`."""
    return jax.sharding.Mesh(np.array(devices).reshape(1, 1, 1, -1), MESH_AXES)


def runner_of(
    mesh: jax.sharding.Mesh,
    model: ModelConfig,
    batch: int,
    strategies: Sequence[str],
    pages: int | None = None,
) -> Runner:
    """Makes the device side of an engine that holds shapes.

    Args:
      strategies: strategies that chunks can run; the last one is the engine's own.
      pages: number of pages of the cache; None: enough for all slots.
    """
    *_, own = strategies
    model = laid_out(model, mesh)
    make = functools.partial(
        Runner,
        model,
        SpecConfig(own),
        batch,
        MAX_LEN,
        mesh=mesh,
        strategies=[Strategy.parse(strategy) for strategy in strategies],
    )
    runner = make()
    if pages is not None:
        runner = make(cache_bytes=pages * runner.page_bytes)
    runner.executables.build = lambda key, lower, donate: lower()
    runner.hold_shapes(
        jax.eval_shape(lambda: init_params(model)), jax.eval_shape(lambda: init_head_params(model))
    )
    return runner


def wide_runner(mesh: jax.sharding.Mesh, strategy: str, model: ModelConfig = MODEL) -> Runner:
    """Makes the device side of an engine with 64 slots, for `off` and a strategy."""
    own = strategy if strategy != "off" else "4_1_5"
    return runner_of(mesh, model, BATCH, ("off", own), PAGES)


def chunk(
    runner: Runner, strategy: str, bucket: int, features: Features | None = None
) -> jax.stages.Lowered:
    """Lowers a whole chunk of rounds, as the engine compiles it.

    Args:
      runner: as `runner_of` makes it.
      bucket: number of rows.
      features: sampling options of the program; None: those of a temperature.
    """
    features = features or Features(sampled=True)
    table = np.zeros((bucket, runner.table_width), np.int32)
    rows = RowMap(np.arange(bucket, dtype=np.int32), np.ones(bucket, bool), table)
    inputs = runner.params, runner.head, runner.state, runner.alone(rows), Until.of(4)
    plan = runner.program_of(strategy, features).plan
    program = functools.partial(runner._chunk_program, plan, features, bucket)
    key = ("chunk", strategy, bucket, features)
    return runner.executables.get(key, program, inputs, (2,))
