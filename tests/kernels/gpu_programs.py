"""Compiles an engine's programs for an H200 that is not there; prints JSON lines.

    JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 \
      python tests/kernels/gpu_programs.py auto off:1

Needs jax's CUDA plugin and the libraries it comes with, `jax-cuda13-plugin[with-cuda]`, and no GPU.
`test_gpu_compiler.py` runs it, in the environment of `make gpu-check`. Without a device nothing is
tuned, so that times mean nothing; memory, and what is copied, are what they are on one.
"""

from __future__ import annotations

import functools
import json
import sys
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies
from tpu_programs import MODEL, STRATEGY

from bench.gpu.program import CARDS
from specjax.config import SpecConfig, Strategy
from specjax.decode.admit import prefill
from specjax.decode.chunk import Until
from specjax.decode.options import Features
from specjax.decode.state import RowMap
from specjax.drafts.mtp import init_head_params
from specjax.engine.inputs import piece_of
from specjax.engine.runner import Runner
from specjax.models.transformer import init_params
from specjax.parallel import sharding

SLOTS, ROOM = 64, 2048


class Named:
    """A device as `jax.devices()` would give it."""

    platform, device_kind = "gpu", CARDS["h200"].kind


def runner_of(device, attention: str) -> Runner:
    """An engine's device side that holds shapes on a device."""
    cfg = MODEL.replace(max_position=ROOM).running(scan_layers=False)
    strategies = (Strategy.OFF, Strategy.parse(STRATEGY))
    with mock.patch("jax.devices", lambda *_: [Named()]):
        runner = Runner(
            cfg, SpecConfig(STRATEGY), SLOTS, ROOM, strategies=strategies, attention=attention
        )
    runner.hold_shapes(
        jax.eval_shape(lambda: init_params(cfg)), jax.eval_shape(lambda: init_head_params(cfg))
    )
    held = runner.params, runner.head, runner.state, runner.kept
    runner.params, runner.head, runner.state, runner.kept = on_device(device, held)
    return runner


def on_device(device, tree):
    where = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def lowered(runner: Runner, device, name: str) -> jax.stages.Lowered:
    """A chunk, by strategy and bucket, or `prefill` of pieces, by how many and their width."""
    kind, *sizes = name.split(":")
    if kind == "prefill":
        piece = on_device(device, piece_of([], int(sizes[0]), int(sizes[1]), runner))

        def program(params, head, state, kept, piece):
            model = runner.model(params)
            return prefill(model, head, runner.longest, state, kept, piece, runner.stride)

        inputs, donated = (runner.params, runner.head, runner.state, runner.kept, piece), (2, 3)
    else:
        bucket = int(sizes[0])
        table = np.zeros((bucket, runner.table_width), np.int32)
        rows = RowMap(np.arange(bucket, dtype=np.int32), np.ones(bucket, bool), table)
        host = on_device(device, (runner.alone(rows), Until.of(4)))
        program = functools.partial(runner._chunk_program, kind, Features(), bucket)
        inputs, donated = (runner.params, runner.head, runner.state, *host), (2,)
    return jax.jit(sharding.traced_on(None, program), donate_argnums=donated).lower(*inputs)


def main(attention: str, *wanted: str) -> None:
    where = {"platform": "cuda", "topology": "1x1x1", "target_config": CARDS["h200"].config}
    [device] = topologies.get_topology_desc("h200", **where).devices
    runner = runner_of(device, attention)
    cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(runner.state.memory.pages))
    for name in wanted:
        compiled = lowered(runner, device, name).compile()
        memory = compiled.memory_analysis()
        found = {
            "program": name,
            "device": device.device_kind,
            "attention": runner.cfg.run.attention,
            "cache": cache,
            "temporaries": memory.temp_size_in_bytes,
            "in_place": memory.alias_size_in_bytes,
            "mosaic": compiled.as_text().count("mosaic_gpu"),
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
