"""Compiles the TPU kernel and programs around it for TPUs that are not there; prints JSON lines.

    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python tests/kernels/tpu_programs.py v5e:2x2 kernel chunk

Needs libtpu, whose compiler serves chips by name. `test_tpu_compiler.py` runs it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from compiled import figures_of
from hlo import Module
from sum_windows import products

from bench.programs import (
    WIDE,
    change_dense,
    lowered_chunk,
    mesh_over,
    runner_of,
    tpu_devices,
    wide_runner,
)
from specjax.decode import admit
from specjax.drafts.mtp import init_head_params, weight_axes
from specjax.engine.runner import piece_of
from specjax.interfaces import Where
from specjax.kernels import dispatch
from specjax.models.mlps.moe import Mixture
from specjax.models.transformer import init_params
from specjax.parallel import sharding
from specjax.parallel.context import context_of
from specjax.parallel.sharding import MeshConfig, make_mesh
from specjax.weights import matrix
from train.heads.training import DraftConfig, DraftTrainer, frozen_policy_parts
from train.loss.optim import OptimConfig
from train.loss.policy import PolicyTrainer
from train.loss.terms import count_denominators, sft_loss

# As Qwen3-8B, but for layers and vocabulary; in bfloat16, with heads of 128.
MODEL = change_dense(WIDE, vocab_size=1024, hidden_size=512, intermediate_size=1024, num_layers=2)
STRATEGY = "4_1_5"
STRATEGIES = ("off", STRATEGY)
# As Qwen3-30B-A3B, but for layers and vocabulary.
MIXTURE = Mixture(num_experts=128, num_experts_per_tok=8, intermediate_size=768)
SPARSE = change_dense(MODEL, hidden_size=2048, num_heads=32, num_kv_heads=4)
SPARSE = SPARSE.replace(layers=(dataclasses.replace(SPARSE.layers[0], mlp=MIXTURE),) * 2)
# Chunks with the widths of Qwen3-8B: plain, of a chain and of a tree, by `strategy:bucket`.
WIDE_CHUNKS = {
    f"{strategy}:{bucket}": (strategy, bucket)
    for strategy in ("off", STRATEGY, "8_4_32")
    for bucket in (1, 8, 64)
}


def on_mesh(mesh, tree, shardings):
    """Shapes where the arrays would lie."""
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings(mesh, tree)
    )


def whole(mesh, _=None):
    return jax.NamedSharding(mesh, jax.P())


def packed(mesh, _):
    return sharding.rows_sharding(mesh)


def kernel(mesh, rows: int, batch: int = 8, size: int = 128, stretches: int = 8):
    """Tree attention alone, with everything it can do."""
    cfg = dispatch.settle(MODEL, mesh)
    mixer = cfg.layers[0].mixer
    heads, kv_heads, head = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    pages = 1 + batch * stretches

    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=whole(mesh))

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


# An argmax whose maximum is not read: its comparisons may be in bfloat16 as well.
ROUNDED = re.compile(r"= \(bf16\[[^=]*, s32\[[^=]*\) reduce\(")


def small_runner(mesh):
    return runner_of(mesh, MODEL, 8, STRATEGIES)


def small_chunk(mesh):
    """A whole rollout chunk, by the code that the engine runs it with."""
    return lowered_chunk(small_runner(mesh), STRATEGY, 8)


def wide_chunk(mesh, name: str):
    strategy, bucket = WIDE_CHUNKS[name]
    return lowered_chunk(wide_runner(mesh, strategy), strategy, bucket)


def exact_chunk(mesh):
    """A chunk of plain decoding in float32."""
    model = MODEL.running(param_dtype="float32", compute_dtype="float32")
    return lowered_chunk(runner_of(mesh, model, 8, STRATEGIES), "off", 8)


def one_chunk(mesh):
    """A chunk of plain decoding of one sequence."""
    return lowered_chunk(small_runner(mesh), "off", 1)


def of_products(text: str) -> dict:
    """Of the target's products in a round their windows, and of all products the precisions."""
    found = re.findall(r" convolution\(.*", text)
    asked = [re.search(r"operand_precision=\{(\w+),(\w+)\}", product) for product in found]
    precisions = {name for each in asked for name in (each.groups() if each else ("default",))}
    return {"windows": products(Module(text)), "precisions": sorted(precisions)}


def of_a_round(text: str) -> dict:
    """What a chunk of `WIDE_CHUNKS` does in a round, beside its figures in a result file."""
    module = Module(text)
    given = module.computations[module.entry].values()
    names = {op.traced_name: op.shapes[0].dims for op in given if op.opcode == "parameter"}
    whole = re.findall(rf"\b\w+\[(?:\d+,)*{WIDE.vocab_size}\b[^ ]*", text)
    return {
        "figures": {key: entry["value"] for key, entry in figures_of(text).items()},
        "rounded": ROUNDED.findall(text),
        "whole_vocabulary": sorted(set(whole)),
        "projections": [dims for name, dims in names.items() if name.endswith("['proj']")],
    }


def prefill(mesh):
    """Reads pieces of prompts, by the code that the engine runs it with."""
    runner = small_runner(mesh)
    piece = piece_of([], 4, 512, runner)

    def program(params, head, state, kept, piece):
        model = runner.model(params)
        return admit.prefill(model, head, runner.longest, state, kept, piece)

    inputs = runner.weights.policy, runner.weights.head, runner.state, runner.kept, piece
    key = ("prefill", piece.tokens.shape)
    return runner.executables.get(key, program, inputs, (2, 3))


def training(mesh, head: bool, model=MODEL, rows=(4, 1024)):
    """The policy's update, or the head's over two recursive steps, on rows that are packed."""
    split = functools.partial(sharding.param_shardings, axes=weight_axes(model))
    batch = {
        name: jax.ShapeDtypeStruct(rows, jnp.int32)
        for name in ("tokens", "positions", "segment_ids")
    }
    batch["loss_mask"] = jax.ShapeDtypeStruct(rows, jnp.float32)
    batch = {k: on_mesh(mesh, a, packed) for k, a in batch.items()}
    params = jax.eval_shape(lambda: init_params(model))
    params = on_mesh(mesh, params, split)
    optimizer = OptimConfig().build(())
    if not head:
        trainer = PolicyTrainer(model, sft_loss, optimizer, mesh)
        gradients = jax.eval_shape(trainer._zeros_program, params)
        gradients = on_mesh(mesh, gradients, split)
        counts = count_denominators([{k: np.ones(rows, np.int32) for k in batch}])
        return trainer._accumulate.lower(params, gradients, batch, counts)
    settings = DraftConfig(unroll_steps=2, optim=OptimConfig(lr=1e-4))
    trainer = DraftTrainer(model, settings, mesh=mesh)
    head_params = jax.eval_shape(lambda: init_head_params(model))
    opt_state = on_mesh(mesh, jax.eval_shape(trainer.optimizer.init, head_params), split)
    head_params = on_mesh(mesh, head_params, split)
    states = jax.ShapeDtypeStruct((*rows, model.hidden_size), jnp.bfloat16)
    states = on_mesh(mesh, states, packed)
    policy = frozen_policy_parts(params)
    return trainer._update.lower(head_params, opt_state, policy, batch, states)


def mixture(mesh, rows: tuple[int, int] = (8, 5)):
    """A layer's experts in a round, of so many slots and rows of each."""
    kernel, width = dispatch.settle(SPARSE, mesh).run.attention, SPARSE.hidden_size
    given = MIXTURE.params(width)
    split = functools.partial(sharding.param_shardings, axes={n: p.axes for n, p in given.items()})
    weights = {n: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16) for n, p in given.items()}
    x = jax.ShapeDtypeStruct((*rows, width), jnp.bfloat16)

    def run(weights, x):
        where = Where("tree", jnp.zeros(rows, jnp.int32), kernel=kernel)
        return MIXTURE.run(weights, x, where)[0]

    inputs = on_mesh(mesh, weights, split), on_mesh(mesh, x, whole)
    return jax.jit(sharding.traced_on(mesh, run)).lower(*inputs)


def mixture_update(mesh):
    """The policy's update of two layers of mixtures on one device."""
    return training(mesh_over(mesh.devices.flat[:1]), False, SPARSE, (1, 4096))


# Kernels that multiply by stacks of matrices, by their names in compiled programs.
MULTIPLY = re.compile(r"ragged-dot-none|\bt?gmm\b|\bexperts(_outer)?(?=/pallas_call)")


def of_experts(text: str) -> dict:
    """How a program multiplies by stacks of matrices, and the sizes of the arrays that it makes.

    `by_xla` is the size of the largest array that XLA itself multiplies or makes by a product, and
    `blocks` the longest list that a kernel begins with: a block of rows is multiplied by one matrix
    of a stack.
    """
    module = Module(text)
    made = [(op, ops) for ops in module.computations.values() for op in ops.values() if op.launches]
    calls = [
        (name[0], [others[operand].shapes[0].size for operand in op.operands if operand in others])
        for op, others in made
        if op.is_kernel and (name := MULTIPLY.search(op.traced_name))
    ]
    by_xla = [
        shape.size
        for op, others in made
        if op.opcode in ("dot", "convolution") or op.is_library
        for part in (op, *(others[operand] for operand in op.operands if operand in others))
        for shape in part.shapes
    ]
    return {
        "kernels": collections.Counter(name for name, _ in calls),
        "largest": max(shape.size for op, _ in made for shape in op.shapes),
        "by_xla": max(by_xla, default=0),
        "blocks": max(next(size for size in sizes if size > 1) for _, sizes in calls),
    }


def of_packed(mesh, name: str, shape: tuple[int, ...]):
    """Products of 32 sorted rows by packed experts [E I O], or of eight rows by a matrix [I O]."""
    mesh, experts = mesh_over(mesh.devices.flat[:1]), len(shape) > 2
    array = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    weight = jax.eval_shape(lambda a: matrix.packed(a, name, False, experts), array)
    x = jax.ShapeDtypeStruct((32 if experts else 8, shape[-2]), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    kernel = dispatch.settle(MODEL, mesh).run.attention
    by_experts = functools.partial(matrix.experts, kernel=kernel)
    product = by_experts if experts else lambda x, weight, _: matrix.dot(x, weight)
    where = lambda mesh, tree: jax.tree.map(lambda _: whole(mesh), tree)  # noqa: E731
    return jax.jit(product).lower(*(on_mesh(mesh, one, where) for one in (x, weight, sizes)))


def of_weights(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> dict:
    """Bytes of the weights of a product, and of all that it reads and writes."""
    _, weight, _ = lowered.in_avals[0]
    size = sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(weight))
    return {"weights": size, "bytes": (compiled.cost_analysis() or {}).get("bytes accessed")}


def split_rows(mesh) -> jax.stages.Lowered:
    """Attention of rows that are split over four devices, and its gradients."""
    config = MeshConfig(cp=4)
    context = context_of(config, make_mesh(config, list(mesh.devices.flat)))

    def shape(*dims, dtype=jnp.bfloat16):
        spec = jax.P(None, None, "cp", None) if len(dims) == 4 else jax.P(None, "cp")
        return jax.ShapeDtypeStruct(dims, dtype, sharding=jax.NamedSharding(context.mesh, spec))

    def loss(q, k, v, segments):
        out = dispatch.causal_attention(q, k, v, segments, context, kernel="tpu:v5e")
        return out.astype(jnp.float32).sum()

    keys = shape(1, 2, 4096, 128)
    arrays = shape(1, 4, 4096, 128), keys, keys, shape(1, 4096, dtype=jnp.int32)
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays)


# Name -> the program for a mesh, lowered.
MIXTURES = {
    "mixture": mixture,
    "mixture of one row": functools.partial(mixture, rows=(1, 1)),
    "mixture update": mixture_update,
}
STACK, WIDE_MATRIX = (32, 2880, 2880), (2880, 4096)  # of gpt-oss-20b
PACKED = {
    f"{name} {kind}": functools.partial(of_packed, name=name, shape=shape)
    for name in ("xla", "int8", "fp8", "fp8_block", "mxfp4", "int4")
    for kind, shape in (("experts", STACK), ("matrix", WIDE_MATRIX))
}
PACKED["fp8_block long"] = functools.partial(of_packed, name="fp8_block", shape=(29568, 512))
PROGRAMS = {
    "kernel": lambda mesh: kernel(mesh, rows=5),
    "tree of 64": lambda mesh: kernel(mesh, rows=64),
    "piece": lambda mesh: kernel(mesh, rows=512),
    "split rows": split_rows,
    "prefill": prefill,
    "chunk": small_chunk,
    "chunk in float32": exact_chunk,
    "chunk of one": one_chunk,
    "policy update": lambda mesh: training(mesh, head=False),
    "draft update": lambda mesh: training(mesh, head=True),
    **MIXTURES,
    **PACKED,
    **{name: functools.partial(wide_chunk, name=name) for name in WIDE_CHUNKS},
}  # fmt: skip


# jax 0.10.2 cannot print what libtpu 0.0.52 makes of these: its asynchronous collectives have more
# operands than jaxlib knows. What they were made of is read in place of it.
UNPRINTED = ("policy update", "draft update")


def main(topology: str, *wanted: str) -> None:
    devices = tpu_devices(topology)
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
            "flash": sum("flash" in line for line in calls),
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        }
        if name.startswith("chunk"):
            found |= of_products(text)
        if name in MIXTURES:
            found |= of_experts(text)
        if name in PACKED:
            found |= of_weights(lowered, compiled)
        if name in WIDE_CHUNKS:
            found |= of_a_round(text)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
