"""Compiles the TPU kernel and programs around it for TPUs that are not there; prints JSON lines.

    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python tests/kernels/tpu_programs.py v5e:2x2 kernel chunk

Needs libtpu, whose compiler serves chips by name. `test_tpu_compiler.py` runs it.
"""

from __future__ import annotations

import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from specjax.config import ModelConfig, RunConfig, SpecConfig, Strategy
from specjax.decode import admit
from specjax.decode.chunk import Until
from specjax.decode.options import Features
from specjax.decode.state import RowMap
from specjax.drafts.mtp import init_head_params, weight_axes
from specjax.engine.inputs import piece_of
from specjax.engine.runner import PAGE_SIZE, Runner
from specjax.kernels import dispatch
from specjax.models.families.dense import change_dense, dense_config
from specjax.models.transformer import init_params, to_decode_layout
from specjax.parallel import sharding
from specjax.parallel.sharding import MESH_AXES
from train.draft import DraftConfig, DraftTrainer, frozen_policy_parts
from train.loss import count_denominators, sft_loss
from train.optim import OptimConfig
from train.plan.hlo import Module, Op
from train.policy import PolicyTrainer

# As Qwen3-8B, but for layers and vocabulary; in bfloat16, with heads of 128.
MODEL = dense_config(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1024,
    num_layers=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mtp_num_layers=1,
    tie_embeddings=False,
    run=RunConfig(scan_layers=True, param_dtype="bfloat16", compute_dtype="bfloat16"),
)
STRATEGY = "4_1_5"
STRATEGIES = ("off", STRATEGY)
# Chunks whose batch is the smallest and the largest, with Qwen3's vocabulary, and with pages of a
# layer that are more than any weight: a copy of them cannot be taken for one of something else.
SPLIT = functools.partial(sharding.param_shardings, axes=weight_axes(MODEL))
WIDE = change_dense(MODEL, vocab_size=151_936, num_layers=8)
WIDE_BATCH, WIDE_PAGES = 64, 1600
WIDE_CHUNKS = {
    f"{strategy} x {bucket}, 152k": (strategy, bucket)
    for strategy in ("off", STRATEGY)
    for bucket in (1, WIDE_BATCH)
}


def on_mesh(mesh, tree, shardings):
    """Shapes where the arrays would lie."""
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings(mesh, tree)
    )


def packed(mesh, _):
    return sharding.rows_sharding(mesh)


def kernel(mesh, rows: int, batch: int = 8, size: int = 128, stretches: int = 8):
    """Tree attention alone, with everything it can do."""
    cfg = dispatch.settle(MODEL, mesh)
    mixer = cfg.layers[0].mixer
    heads, kv_heads, head = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    pages = 1 + batch * stretches

    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=jax.NamedSharding(mesh, jax.P()))

    arrays = [
        shape(batch, heads, rows, head),
        *[shape(batch, kv_heads, rows, head)] * 2,
        *[shape(pages, kv_heads, size, head)] * 2,
        shape(batch, dtype=jnp.int32),
        shape(batch, rows, -(-rows // 32), dtype=jnp.uint32),
        shape(batch, stretches, dtype=jnp.int32),
    ]

    def attend(sinks, *arrays):
        return dispatch.tree_attention(
            *arrays, sinks=sinks, window=512, with_lse=True, kernel=cfg.run.attention
        )

    sinks = shape(heads, dtype=jnp.float32)
    return jax.jit(sharding.traced_on(mesh, attend)).lower(sinks, *arrays)


def runner_of(mesh, model: ModelConfig = MODEL, batch: int = 8, **more) -> Runner:
    """The device side of an engine that holds shapes.

    Args:
      more: arguments of `Runner`.
    """
    strategies = [*map(Strategy.parse, STRATEGIES)]
    runner = Runner(
        model, SpecConfig(STRATEGY), batch, max_len=1024, mesh=mesh, strategies=strategies, **more
    )
    runner.executables.build = lambda key, lower, donate: lower()
    params = jax.eval_shape(
        functools.partial(to_decode_layout, cfg=model), jax.eval_shape(lambda: init_params(model))
    )
    head = jax.eval_shape(lambda: init_head_params(model))
    runner.params = on_mesh(mesh, params, SPLIT)
    runner.head = on_mesh(mesh, head, SPLIT)
    runner.state, runner.kept = on_mesh(
        mesh, jax.eval_shape(runner._empty), sharding.state_shardings
    )
    return runner


def chunk(mesh, strategy: str = STRATEGY, bucket: int = 8, runner: Runner | None = None):
    """A whole rollout chunk, by the code that the engine runs it with."""
    runner = runner or runner_of(mesh)
    features = Features(sampled=True)
    table = np.zeros((bucket, runner.table_width), np.int32)
    rows = RowMap(np.arange(bucket, dtype=np.int32), np.ones(bucket, bool), table)
    row_map, until = runner.alone(rows), Until.of(4)
    inputs = runner.params, runner.head, runner.state, row_map, until
    program = functools.partial(runner._chunk_program, strategy, features, bucket)
    key = ("chunk", strategy, bucket, features)
    return runner.executables.get(key, program, inputs, (2,))


def wide_runner(mesh) -> Runner:
    page = Runner(WIDE, SpecConfig(STRATEGY), WIDE_BATCH, 1024, mesh=mesh).page_bytes
    return runner_of(mesh, WIDE, WIDE_BATCH, cache_bytes=WIDE_PAGES * page)


def wide_chunk(mesh, strategy: str, bucket: int):
    return chunk(mesh, strategy, bucket, wide_runner(mesh))


def copies_of_pages(text: str, size: int) -> list[str]:
    """Of a compiled program with a loop, what copies or transposes that many numbers, or more,
    inside of it."""
    module = Module(text)

    def copies(op: Op) -> bool:
        if op.opcode == "fusion":
            fused = module.computations[next(op.called())]
            return copies(next(o for o in fused.values() if o.root))
        return op.opcode in ("copy", "copy-start", "transpose")

    return [
        f"{op.opcode} {op.name}"
        for name, ops in module.computations.items()
        for op in ops.values()
        if name != module.entry and copies(op) and max(s.size for s in op.shapes) >= size
    ]


# An argmax whose maximum is not read: its comparisons may be in bfloat16 as well.
ROUNDED = re.compile(r"= \(bf16\[[^=]*, s32\[[^=]*\) reduce\(")


def prefill(mesh):
    """Reads pieces of prompts, by the code that the engine runs it with."""
    runner = runner_of(mesh)
    piece = piece_of([], 4, 512, runner)

    def program(params, head, state, kept, piece):
        model = runner.model(params)
        return admit.prefill(model, head, runner.longest, state, kept, piece, runner.stride)

    inputs = runner.params, runner.head, runner.state, runner.kept, piece
    key = ("prefill", piece.tokens.shape)
    return runner.executables.get(key, program, inputs, (2, 3))


def training(mesh, head: bool):
    """The policy's update, or the head's over two recursive steps, on rows that are packed."""
    rows = 4, 1024
    batch = {
        name: jax.ShapeDtypeStruct(rows, jnp.int32)
        for name in ("tokens", "positions", "segment_ids")
    }
    batch["loss_mask"] = jax.ShapeDtypeStruct(rows, jnp.float32)
    batch = {k: on_mesh(mesh, a, packed) for k, a in batch.items()}
    params = jax.eval_shape(lambda: init_params(MODEL))
    params = on_mesh(mesh, params, SPLIT)
    optimizer = OptimConfig().build()
    if not head:
        trainer = PolicyTrainer(MODEL, sft_loss, optimizer, mesh)
        gradients = jax.eval_shape(trainer._zeros_program, params)
        gradients = on_mesh(mesh, gradients, SPLIT)
        counts = count_denominators([{k: np.ones(rows, np.int32) for k in batch}])
        return trainer._accumulate.lower(params, gradients, batch, counts)
    trainer = DraftTrainer(MODEL, DraftConfig(unroll_steps=2), mesh=mesh)
    head_params = jax.eval_shape(lambda: init_head_params(MODEL))
    opt_state = on_mesh(mesh, jax.eval_shape(trainer.optimizer.init, head_params), SPLIT)
    head_params = on_mesh(mesh, head_params, SPLIT)
    states = jax.ShapeDtypeStruct((*rows, MODEL.hidden_size), jnp.bfloat16)
    states = on_mesh(mesh, states, packed)
    policy = frozen_policy_parts(params)
    return trainer._update.lower(head_params, opt_state, policy, batch, states)


# Name -> the program for a mesh, lowered.
PROGRAMS = {
    "kernel": lambda mesh: kernel(mesh, rows=5),
    "tree of 64": lambda mesh: kernel(mesh, rows=64),
    "piece": lambda mesh: kernel(mesh, rows=512),
    "prefill": prefill,
    "chunk": chunk,
    "policy update": lambda mesh: training(mesh, head=False),
    "draft update": lambda mesh: training(mesh, head=True),
    **{name: functools.partial(wide_chunk, strategy=s, bucket=b)
       for name, (s, b) in WIDE_CHUNKS.items()},
}  # fmt: skip


# jax 0.10.2 cannot print what libtpu 0.0.52 makes of these: its asynchronous collectives have more
# operands than jaxlib knows. What they were made of is read in place of it.
UNPRINTED = ("policy update", "draft update")


def mesh_over(devices) -> jax.sharding.Mesh:
    """All devices on the axis `tp`."""
    return jax.sharding.Mesh(np.array(devices).reshape(1, 1, 1, -1), MESH_AXES)


def main(topology: str, *wanted: str) -> None:
    devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    for name in wanted:
        lowered = PROGRAMS[name](mesh_over(devices))
        compiled = lowered.compile()
        text = (lowered if name in UNPRINTED else compiled).as_text()
        calls = [line for line in text.splitlines() if "tpu_custom_call" in line]
        found = {
            "topology": topology,
            "program": name,
            "device": devices[0].device_kind,
            "tree_attention": sum("tree_attention" in line for line in calls),
            "splash": sum("splash" in line for line in calls),
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        }
        if name in WIDE_CHUNKS:
            mixer = WIDE.layers[0].mixer
            pages = WIDE_PAGES * mixer.num_kv_heads // len(devices) * PAGE_SIZE * mixer.head_dim
            found["copies_of_pages"] = copies_of_pages(text, pages)
            found["rounded"] = ROUNDED.findall(text)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
