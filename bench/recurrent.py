"""`python -m bench.recurrent`: what a round costs in a Gated DeltaNet layer on a TPU.

The rule of one layer of Qwen3.5-35B-A3B over the rows of a tree, and its commit of a path: with the
mask of ancestors, as specjax verifies, and with a state per row, as other engines do. Figures are
those of the compiled programs, by rows of the tree:

    flops, bytes, temporaries / FORM / ROWS     of the program, for all sequences
    kept / FORM / ROWS                          bytes that verifying hands to the commit
    ratio / WHAT / ROWS                         with a state per row, by that with the mask
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from bench.command import bench_parser, user_errors
from bench.programs import tpu_devices
from bench.record import figure, report, write_result
from specjax import SpecConfig
from specjax.decode.tree import TreeShape, build_tree
from specjax.kernels import delta_rule
from specjax.memory import bytes_of
from specjax.models.mixers.gated_delta import GatedDelta

LAYER = GatedDelta(num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128)
STRATEGIES = "3_1_4", "2x2x2", "4x3x2"


def by_tree(x: delta_rule.Inputs, state, shape):
    """Returns the outputs of the rows, and what the commit takes."""
    out, d = delta_rule.at_once(x, state, jnp.asarray(shape.visible))
    return out, (x.k, d, x.g)


def by_row(x: delta_rule.Inputs, state, shape):
    """Returns the outputs of the rows, and the state of each row, which the commit takes."""
    parents, states, outs = shape.parent, [], []
    for row, parent in enumerate(parents):
        before = state if row == 0 else states[parent]
        k, v, g, beta = (a[:, row] for a in x[1:])
        after, _ = delta_rule.step(before, k[:, :, None], v, g, beta)
        states.append(after)
        outs.append((after * x.q[:, row, :, None, :, None]).sum(-2))
    return jnp.stack(outs, axis=1), jnp.stack(states, axis=1)


def commit_tree(state, kept, path, count):
    rows = (a[:, path] for a in kept)
    return delta_rule.advanced(state, *rows, count)


def commit_row(state, kept, path, count):
    row = jnp.asarray(path)[jnp.maximum(count - 1, 0)]
    return jax.vmap(lambda states, row: states[row])(kept, row)


FORMS = {"tree": (by_tree, commit_tree), "state_per_row": (by_row, commit_row)}


def shapes_of(batch: int, rows: int) -> tuple[delta_rule.Inputs, jax.ShapeDtypeStruct]:
    heads, group, k, v = LAYER.num_k_heads, LAYER.group, LAYER.head_k_dim, LAYER.head_v_dim

    def shape(*rest: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *rest), jnp.float32)

    keys, per_head = shape(rows, heads, k), shape(rows, heads, group)
    inputs = delta_rule.Inputs(keys, keys, shape(rows, heads, group, v), per_head, per_head)
    return inputs, shape(heads, group, k, v)


def costs(
    form: str, shape: TreeShape, batch: int, place: jax.sharding.Sharding
) -> dict[str, float]:
    """Compiles both programs of a form, and returns their costs by name."""
    verify, commit = FORMS[form]
    inputs, path = shapes_of(batch, len(shape.depth)), np.flatnonzero(shape.visible[-1])
    count = jax.ShapeDtypeStruct((batch,), jnp.int32)
    verify = functools.partial(verify, shape=shape)
    kept = jax.eval_shape(verify, *inputs)[1]

    def compiled(program: Callable, donate: tuple[int, ...], *arguments):
        arguments = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), arguments
        )
        return jax.jit(program, donate_argnums=donate).lower(*arguments).compile()

    programs = (
        compiled(verify, (), *inputs),
        compiled(lambda s, k, c: commit(s, k, path, c), (0,), inputs[1], kept, count),
    )
    analyses = [program.cost_analysis() for program in programs]
    return {
        "flops": sum(analysis["flops"] for analysis in analyses),
        "bytes": sum(analysis["bytes accessed"] for analysis in analyses),
        "temporaries": max(p.memory_analysis().temp_size_in_bytes for p in programs),
        "kept": bytes_of(kept),
    }


def main(argv: list[str] | None = None) -> None:
    parser = bench_parser("recurrent", __doc__)
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--topology", default="v5p:2x2x1", help="chips to compile for")
    parser.add_argument("--out", help="file; default: bench/results/tpu/recurrent_CHIP.json")
    args, figures = parser.parse_args(argv), {}
    with user_errors("recurrent"):
        device = tpu_devices(args.topology)[0]
    place = jax.sharding.SingleDeviceSharding(device)
    for strategy in STRATEGIES:
        shape = build_tree(SpecConfig(strategy).resolve()).shape
        rows = len(shape.depth)
        by_form = {form: costs(form, shape, args.batch, place) for form in FORMS}
        for what in by_form["tree"]:
            for form, values in by_form.items():
                unit = "operations" if what == "flops" else "bytes"
                figures[f"{what}/{form}/{rows}"] = figure(values[what], unit)
            ratio = by_form["state_per_row"][what] / by_form["tree"][what]
            figures[f"ratio/{what}/{rows}"] = figure(ratio, "ratio")
    print(report(figures))
    settings = {"batch": args.batch, "topology": args.topology}
    name = f"tpu/recurrent_{args.topology.partition(':')[0]}"
    print(write_result(name, settings, figures, args.out))


if __name__ == "__main__":
    main(sys.argv[1:])
