"""The GPU kernel: what can be known of it without a GPU, and its values on one."""

import functools
import os

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import other_python
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_dispatch import finite
from test_tpu import HEAD, TOLERANCE, random_case
from tiny import tiny_config

from bench.programs import change_dense
from specjax.kernels import dispatch, gpu, reference
from specjax.kernels.backend import choose
from specjax.kernels.reference import NEG_INF

ON_GPU = jax.default_backend() == "gpu"
PYTHON = os.environ.get("SPECJAX_GPU_PYTHON")


def emulated(shape, interpret, rows, words, slots, work, table, k_pages, v_pages):
    """`gpu._call` with arrays in place of copies and of the tensor cores' products."""
    size = shape.tiles * gpu.ROWS + (2 * shape.tree_blocks + 1) * shape.block
    rows = jnp.pad(rows, [(0, 0), (0, 0), (0, size), (0, 0)])  # a copy from beyond gives zeros
    per_head = shape.tiles // shape.warpgroups

    def spread(x, dims):
        return jax.lax.broadcast_in_dim(x, dims, [0])

    def item(number, warpgroup):
        slot = jnp.clip((slots[4] <= number).sum() - 1, 0)
        length, blocks, chunks, first, first_item = slots[:, slot]
        unit, chunk = jnp.divmod(number - first_item, chunks)
        unit = jnp.clip(unit, 0, shape.units - 1)  # numbers after the last are computed, not read
        head, row = unit // per_head, unit % per_head * shape.warpgroups * gpu.ROWS
        here = row + warpgroup * gpu.ROWS

        def mine(x):
            return jax.lax.dynamic_slice_in_dim(x, here, gpu.ROWS)

        q, depth = mine(rows[slot, head]), mine(words[-1, slot])[:, None]

        def one_block(block, running):
            at = first + block - shape.tree_blocks
            page = table[slot, jnp.clip(at, 0) // shape.per_page]
            start = jnp.clip(at, 0) % shape.per_page * shape.block
            size = 1, 1, shape.block, shape.head
            in_tree = block < shape.tree_blocks
            keys, values = (
                jnp.where(
                    in_tree,
                    jax.lax.dynamic_slice(rows, (slot, head, tree + block * shape.block, 0), size),
                    jax.lax.dynamic_slice(pages, (page, head, start, 0), size),
                )[0, 0]
                for tree, pages in zip(shape.tree_rows, (k_pages, v_pages), strict=True)
            )
            column = jnp.arange(shape.block)[None]
            of_block = block * shape.words + jnp.arange(shape.words)
            seen = jnp.where(
                in_tree,
                gpu.tree_seen([mine(words[i, slot])[:, None] for i in of_block], column),
                gpu.prefix_seen(shape, at * shape.block + column, length, depth),
            )

            def dot(a, b):
                return jnp.dot(a, b, precision="highest", preferred_element_type=jnp.float32)

            def weigh(acc, weights):
                return acc + dot(weights.astype(values.dtype), values)

            scores = gpu.scaled(shape, dot(q, keys.T))
            return gpu.absorb(running, scores, seen, spread, weigh)

        none = jnp.zeros(gpu.ROWS)
        running = none + NEG_INF, none, jnp.zeros((gpu.ROWS, shape.head))
        begin, end = gpu.share(blocks, chunks, chunk)
        peak, total, acc = jax.lax.fori_loop(begin, end, one_block, running)
        return (acc / total[:, None])[: shape.kept], peak / gpu.LOG2E + jnp.log(total)

    every = jax.vmap(jax.vmap(item, (None, 0)), (0, None))
    return every(jnp.arange(shape.items), jnp.arange(shape.warpgroups))


CASES = dict(
    seed=st.integers(0, 2**16),
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 16),
    rows=st.integers(1, 64) | st.integers(65, 140),
    before=st.integers(0, 100),
    size=st.sampled_from([64, 128]),
    stretches=st.sampled_from([1, 6]),
    head=st.sampled_from(sorted(gpu.TUNING)),
    window=st.none() | st.integers(1, 300),
    soft_cap=st.none() | st.sampled_from([0.5, 30.0]),
    sinks=st.booleans(),
    dtype=st.sampled_from(sorted(TOLERANCE)),
    processors=st.sampled_from([1, 5, 132]),
)


def compare_emulated(processors, **case):
    """The whole call, but for what only the GPU does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "_call", emulated)
        patch.setattr(gpu, "MULTIPROCESSORS", processors)
        compare(**case, interpret=True)


def compare(
    seed, batch, kv_heads, group, rows, before, size, stretches, head, window, soft_cap, sinks,
    dtype, prefix=None, interpret=None,
):  # fmt: skip
    sizes = batch, kv_heads, group, rows, size, stretches
    case = finite(random_case(seed, *sizes, dtype, prefix, before, head))
    rng = np.random.default_rng(seed + 1)
    sinks = jnp.asarray(rng.normal(size=kv_heads * group), jnp.float32) if sinks else None
    options = dict(window=window, soft_cap=soft_cap, with_lse=True)
    attend = functools.partial(gpu.tree_attention, **options, interpret=interpret)
    out, lse = (attend if ON_GPU or interpret not in (None, True) else jax.jit(attend))(
        *case, sinks=sinks
    )
    wanted, wanted_lse = jax.jit(functools.partial(reference.tree_attention, **options))(
        *case, sinks=sinks
    )
    close = TOLERANCE[dtype]
    np.testing.assert_allclose(np.float32(out), np.float32(wanted), atol=close, rtol=close)
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-5, rtol=2e-5)


# Several tiles and chunks; the window leaves nothing of some of them.
SPLIT = dict(
    seed=0, batch=2, kv_heads=1, group=4, rows=33, before=5, size=128, stretches=6, head=128,
    window=200, soft_cap=None, sinks=True, dtype="float32", processors=5,
)  # fmt: skip


@settings(max_examples=3)
@given(**CASES)
@example(**SPLIT)
@example(**{**SPLIT, "window": None, "head": 96, "soft_cap": 2.0, "dtype": "bfloat16"})
@example(**{**SPLIT, "rows": 70, "group": 1, "head": 256, "before": 0, "processors": 132})
def test_its_items_masks_softmax_and_merge_equal_the_reference(**case):
    compare_emulated(**case)


@pytest.mark.skipif(not ON_GPU, reason="needs a Hopper GPU: the kernel is compiled for it")
@settings(max_examples=60)
@given(**{**CASES, "dtype": st.just("bfloat16"), "processors": st.just(None)})
def test_it_equals_the_reference_on_a_gpu(processors, **case):
    compare(**case)


# --- the kernel itself, in jax's interpreter ------------------------------------------------------

SIMULATED = dict(
    seed=1, batch=2, kv_heads=1, group=4, rows=5, before=3, size=64, stretches=5, head=64,
    window=None, soft_cap=None, sinks=False, dtype="bfloat16", prefix=(320, 65), processors=3,
)  # fmt: skip


@pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="this jax has no interpreter of GPU kernels"
)
@pytest.mark.parametrize("changed", [
    dict(batch=3, prefix=(0, 320, 65), processors=2),
    pytest.param(dict(rows=33, before=40, window=100, sinks=True), marks=pytest.mark.slow),
    pytest.param(dict(rows=130, group=2, soft_cap=5.0, head=128), marks=pytest.mark.slow),
    pytest.param(dict(rows=1, kv_heads=2, group=3, head=96), marks=pytest.mark.slow),
    pytest.param(dict(rows=4, group=8, head=256, window=70), marks=pytest.mark.slow),
    pytest.param(dict(rows=4, group=16, size=128, prefix=(7, 200)), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_the_kernel_equals_the_reference_without_races_in_the_interpreter(
    changed, monkeypatch, capfd
):
    """Memory that nothing was written to holds NaN; a barrier that nobody waits for is an error."""
    case = SIMULATED | changed
    monkeypatch.setattr(gpu, "MULTIPROCESSORS", case.pop("processors"))
    compare(**case, interpret=plgpu.InterpretGPUParams(detect_races=True))
    assert "RACE" not in "".join(capfd.readouterr())


# --- the list of items ----------------------------------------------------------------------------

# --- lowering, and the choice of the kernel -------------------------------------------------------


def lowered(rows, group, head, size, window, batch=2, kv_heads=2, stretches=8) -> str:
    """The program for CUDA, made on whatever this runs on."""

    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype)

    arrays = [
        shape(batch, kv_heads * group, rows, head),
        *[shape(batch, kv_heads, rows, head)] * 2,
        *[shape(1 + batch * stretches, kv_heads, size, head)] * 2,
        shape(batch, dtype=jnp.int32),
        shape(batch, rows, -(-rows // 32), dtype=jnp.uint32),
        shape(batch, stretches, dtype=jnp.int32),
    ]
    attend = functools.partial(dispatch.tree_attention, kernel="gpu", window=window, with_lse=True)
    return jax.jit(attend).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("head", sorted(gpu.TUNING))
@pytest.mark.parametrize("rows, group", [(1, 8), (64, 4)], ids=["one tile", "pairs of tiles"])
@pytest.mark.parametrize("window", [None, 512])
def test_it_lowers_for_cuda_at_every_shape_of_its_table(head, rows, group, window):
    assert "mosaic_gpu" in lowered(rows, group, head, 128, window)


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="SPECJAX_GPU_PYTHON names no Python with jax's plugin")
@pytest.mark.parametrize("card, calls", [
    ("h100", [f"{call}x{head}{more}" for head in gpu.TUNING for call, more in (
        ("1x1", ""), ("64x4", ":window,sinks,soft_cap"), ("150x16", ""),
    )]),
    ("h200", ["1x16x128", "5x4x128:window", "16x4x128", "64x16x64:soft_cap"]),
])  # fmt: skip
def test_it_compiles_without_spilled_registers(card, calls):
    """Three launches: the list of chunks, which layers share, the chunks, and their merge."""
    wanted = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    script = "gpu_attention_programs.py"
    found = other_python.programs(PYTHON, script, card, *calls, **wanted)
    assert set(found) == set(calls)
    for name, program in found.items():
        assert (program["mosaic"], program["triton"]) == (1, 2), name
        assert program["read"] and not program["spilled"], name


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="multiple of 64 positions on a GPU, got 48"):
        gpu.shape_of(1, 1, 1, HEAD, 48, 96, 1)
    half = change_dense(tiny_config(), head_dim=128).running(compute_dtype="bfloat16")
    chosen = choose("gpu", "NVIDIA H200", half, "gpu")
    assert chosen.name == "gpu" and not chosen.warn
    with pytest.raises(ValueError, match="the device is 'cpu'"):
        choose("cpu", "cpu", half, "gpu")
    with pytest.raises(ValueError, match="for Hopper .* the device is 'NVIDIA A100-SXM4-80GB'"):
        choose("gpu", "NVIDIA A100-SXM4-80GB", half, "gpu")
    with pytest.raises(ValueError, match="got float32 heads of 128"):
        choose("gpu", "NVIDIA H200", half.running(compute_dtype="float32"), "gpu")
