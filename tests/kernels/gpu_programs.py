"""Compiles an engine's programs for GPUs that are not there; prints JSON lines.

    JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 \
      python tests/kernels/gpu_programs.py "plain" "chain, one graph"

Needs jax's CUDA plugin and the libraries it comes with, `jax-cuda13-plugin[with-cuda]`, and no GPU.
`test_gpu_compiler.py` runs it, in the environment of `make gpu-check`. Without a device nothing is
tuned, so that times mean nothing; memory, and what is launched and copied, are what they are on
one.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
from compiled import (
    compiled_with_thunks,
    figures_of,
    lowered_update,
    update_figures,
)
from jax.experimental import topologies
from tpu_programs import MIXTURES, MODEL, PACKED, of_experts, of_weights

from bench.programs import (
    Ahead,
    alone,
    change_dense,
    lowered_chunk,
    mesh_over,
    runner_of,
    token_map,
)
from specjax.chips import CARDS
from specjax.config import ModelConfig, SpecConfig, Strategy
from specjax.decode.admit import prefill
from specjax.decode.chunk import Until
from specjax.decode.options import Features
from specjax.decode.state import RowMap
from specjax.drafts.mtp import init_head_params
from specjax.engine.programs import ONE_GRAPH
from specjax.engine.runner import Runner, piece_of
from specjax.engine.settings import EngineConfig
from specjax.models.transformer import init_params
from specjax.parallel import sharding
from specjax.weights.matrix import precision_of

CARD, SLOTS, ROOM = "h100", 64, 2048
CHAIN = "2_1_3"
FLOAT32 = MODEL.running(param_dtype="float32", compute_dtype="float32")
WIDE_HEADS = change_dense(MODEL, head_dim=256, num_heads=8, num_kv_heads=4)
# Operations of which compilers have several forms, beside a product and a sum in one operation.
ROUNDING = {"dot", "exponential", "rsqrt", "divide", "reduce"}
# Without operations that add by atomics; no product by Triton, whose defaults need a device then.
DETERMINISTIC = {
    "xla_gpu_exclude_nondeterministic_ops": True,
    "xla_gpu_enable_triton_gemm": False,
}


class Wanted(NamedTuple):
    """A program.

    Attributes:
      what: a strategy, or `prefill`.
      sizes: number of rows of a chunk; number and width of the pieces of a prefill.
      model: config of the model.
      attention: attention kernel, as in `EngineConfig`.
      features: sampling options of a chunk.
      graph: whether it is compiled to one CUDA graph.
      devices: number of devices that the model is split over.
      draft_vocab: number of tokens that are drafted from; None: the whole vocabulary.
    """

    what: str
    sizes: tuple[int, ...]
    model: ModelConfig = MODEL
    attention: str = "auto"
    features: Features = Features()
    graph: bool = False
    devices: int = 1
    draft_vocab: int | None = None


PROGRAMS = {
    "plain": Wanted("off", (8,)),
    "plain, one graph": Wanted("off", (8,), graph=True),
    "plain, one sequence": Wanted("off", (1,), attention="library:cudnn"),
    "plain, float32": Wanted("off", (8,), FLOAT32),
    "plain, heads of 256": Wanted("off", (8,), WIDE_HEADS),
    "plain, four devices": Wanted("off", (8,), devices=4),
    "chain": Wanted(CHAIN, (8,)),
    "chain, one graph": Wanted(CHAIN, (8,), features=Features(top_p=True), graph=True),
    "chain by cuDNN": Wanted(CHAIN, (16,), attention="library:cudnn"),
    "prefill": Wanted("prefill", (4, 128)),
    "prefill by cuDNN": Wanted("prefill", (4, 128), attention="library:cudnn"),
}

# Updates of the policy, by `tests/compiled.py update`; a length that is no width of the model.
UPDATES = {"update": "135M:1x1088:chunk=256", "update, float32": "135M:1x1088:chunk=256,float32"}


class Named:
    """A device as `jax.devices()` would give it."""

    platform, device_kind, process_index = "gpu", CARDS[CARD].kind, 0


def engine_of(device, wanted: Wanted) -> Runner:
    """An engine's device side that holds shapes on a device."""
    cfg = wanted.model.replace(max_position=ROOM).running(scan_layers=False)
    strategies, count = (Strategy.OFF, Strategy.parse(CHAIN)), wanted.draft_vocab
    with mock.patch("jax.devices", lambda *_: [Named()]):
        runner = Runner(
            cfg,
            SpecConfig(CHAIN, token_map=count and token_map(count)),
            SLOTS,
            ROOM,
            strategies=strategies,
            config=EngineConfig(attention=wanted.attention, stretch=1),
        )
    runner.hold_shapes(
        jax.eval_shape(lambda: init_params(cfg)), jax.eval_shape(lambda: init_head_params(cfg))
    )
    held = runner.weights.policy, runner.weights.head, runner.state, runner.kept
    runner.weights.policy, runner.weights.head, runner.state, runner.kept = on_device(device, held)
    return runner


def on_device(device, tree):
    where = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def traced(runner: Runner, device, wanted: Wanted) -> jax.stages.Traced:
    """A program of an engine on one device, as the engine traces it."""
    if wanted.what == "prefill":
        piece = on_device(device, piece_of([], *wanted.sizes, runner))

        def program(params, head, state, kept, piece):
            model = runner.model(params)
            return prefill(model, head, runner.longest, state, kept, piece)

        inputs, donated = (
            (runner.weights.policy, runner.weights.head, runner.state, runner.kept, piece),
            (2, 3),
        )
    else:
        [bucket] = wanted.sizes
        table = np.zeros((bucket, runner.table_width), np.int32)
        rows = RowMap(np.arange(bucket, dtype=np.int32), np.ones(bucket, bool), table)
        run = runner.strategies[wanted.what]
        host = on_device(device, (alone(runner, rows), Until.of(4), run.part))
        program = functools.partial(runner._chunk_program, run.plan, wanted.features, bucket)
        inputs, donated = (runner.weights.policy, runner.weights.draft, runner.state, *host), (2,)
    program = precision_of(runner.cfg)(sharding.traced_on(None, program))
    return jax.jit(program, donate_argnums=donated).trace(*inputs)


def lowered(devices, wanted: Wanted) -> tuple[Runner, jax.stages.Lowered]:
    """A program, lowered for devices that need not be there."""
    if wanted.devices > 1:
        runner = runner_of(mesh_over(devices), wanted.model, SLOTS, (Strategy.OFF, CHAIN))
        return runner, lowered_chunk(runner, wanted.what, *wanted.sizes)
    with Ahead(CARD).seen():
        runner = engine_of(devices[0], wanted)
        return runner, traced(runner, devices[0], wanted).lower()


def less_than_float32(text: str) -> list[str]:
    """Lines of products of a compiled program that may be rounded to TF32."""
    found = []
    for line in text.splitlines():
        product = re.search(r" dot\(| convolution\(", line) and "= f32[" in line
        called = "__cublas$" in line and ("gemm" in line or "matmul" in line) and "f32[" in line
        exact = "{highest,highest}" in line or '["HIGHEST","HIGHEST"]' in line
        if (product or called) and not exact or "tf32" in line.lower():
            found.append(line.strip()[:200])
    return found


@functools.cache
def described(count: int):
    """So many devices of one host."""
    where = {"topology": f"1x1x{count}", "target_config": CARDS[CARD].config}
    return topologies.get_topology_desc(CARD, "cuda", **where).devices


def of_engine(name: str) -> dict:
    """What became of a program of an engine."""
    wanted = PROGRAMS[name]
    runner, program = lowered(described(wanted.devices), wanted)
    compiled, text, sequence = compiled_with_thunks(program, ONE_GRAPH if wanted.graph else {})
    memory = compiled.memory_analysis()
    pages = jax.tree.leaves(runner.state.memory.pages)
    figures = figures_of(text, sequence, whole=wanted.what == "prefill")
    return {
        "device": described(wanted.devices)[0].device_kind,
        "attention": runner.cfg.run.attention,
        "cache": sum(x.size * x.dtype.itemsize for x in pages),
        "temporaries": memory.temp_size_in_bytes,
        "in_place": memory.alias_size_in_bytes,
        "less_than_float32": less_than_float32(text) if wanted.model is FLOAT32 else [],
        "figures": {key: entry["value"] for key, entry in figures.items()},
    }


def of_update(name: str) -> dict:
    """What became of an update of the policy."""
    update, place = UPDATES[name], Ahead(CARD)
    with place.seen():
        program = lowered_update(place, update, layers=2)
    compiled = program.compile(DETERMINISTIC)
    text, figures = compiled.as_text(), update_figures(update, program, compiled)
    scatters = [line for line in text.splitlines() if re.search(r"= (f|bf)\d+\[.* scatter\(", line)]
    return {
        "figures": {key: entry["value"] for key, entry in figures.items()},
        "atomics": [line.strip()[:200] for line in scatters if "unique_indices=true" not in line],
        "cudnn": text.count("__cudnn$fmha"),
        "less_than_float32": less_than_float32(text) if "float32" in update else [],
    }


def of_mixture(name: str) -> dict:
    """What became of a layer or an update of mixtures of experts."""
    program = MIXTURES[name](mesh_over(described(1))).compile()
    temporaries = program.memory_analysis().temp_size_in_bytes
    return {"temporaries": temporaries, **of_experts(program.as_text())}


def of_packed(name: str) -> dict:
    """What became of a product by packed weights."""
    lowered = PACKED[name](mesh_over(described(1)))
    compiled = lowered.compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return {"temporaries": temporaries, **of_weights(lowered, compiled)}


OTHERS = {**dict.fromkeys(UPDATES, of_update), **dict.fromkeys(MIXTURES, of_mixture)}
OTHERS |= dict.fromkeys(PACKED, of_packed)


def main(*names: str) -> None:
    for name in names:
        found = OTHERS.get(name, of_engine)(name)
        print(json.dumps({"program": name, **found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
