"""The GPU kernel: what can be known of it without a GPU, and its values on one."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_dispatch import finite
from test_tpu import HEAD, TOLERANCE, expected, random_case
from tiny import tiny_config

from specjax import SpecConfig
from specjax.engine.runner import Runner
from specjax.kernels import dispatch, gpu
from specjax.kernels.backend import choose
from specjax.kernels.reference import NEG_INF
from specjax.models.families.dense import change_dense

ON_GPU = jax.default_backend() == "gpu"


def emulated(shape, rows, k_tree, v_tree, words, lens, table, k_pages, v_pages):
    """`gpu._call` with arrays in place of copies and of the tensor cores' products."""
    scale = shape.head**-0.5 * gpu.LOG2E

    def spread(x, dims):
        return jax.lax.broadcast_in_dim(x, dims, [0])

    def program(split, slot, head, tile):
        def mine(x):
            return jax.lax.dynamic_slice_in_dim(x, tile * gpu.ROWS, gpu.ROWS)

        q = mine(rows[slot, head])
        low, high, depth = (mine(words[i, slot])[:, None] for i in range(gpu.WORDS + 1))
        begin, steps = gpu.share(shape, lens[slot], split)

        def add(running, keys, values, seen):
            def dot(a, b):
                return jnp.dot(a, b, precision="highest", preferred_element_type=jnp.float32)

            def weigh(acc, weights):
                return acc + dot(weights.astype(values.dtype), values)

            return gpu.absorb(running, dot(q, keys.T) * scale, seen, spread, weigh)

        def one_block(step, running):
            page = table[slot, (begin + step) // shape.per_page]
            start = (begin + step) % shape.per_page * shape.block
            keys, values = (
                jax.lax.dynamic_slice(x, (page, head, start, 0), (1, 1, shape.block, shape.head))
                for x in (k_pages, v_pages)
            )
            at = (begin + step) * shape.block + jnp.arange(shape.block)[None]
            seen = gpu.prefix_seen(shape, at, lens[slot], depth)
            return add(running, keys[0, 0], values[0, 0], seen)

        none = jnp.zeros(gpu.ROWS)
        running = none + NEG_INF, none, jnp.zeros((gpu.ROWS, shape.head))
        seen = gpu.tree_seen(low, high, jnp.arange(gpu.KEYS)[None], split)
        running = add(running, k_tree[slot, head], v_tree[slot, head], seen)
        peak, total, acc = jax.lax.fori_loop(0, steps, one_block, running)
        return acc / total[:, None], peak / gpu.LOG2E + jnp.log(total)

    batch, kv_heads = rows.shape[:2]
    every = program
    for axis in (3, 2, 1, 0):
        every = jax.vmap(every, [0 if i == axis else None for i in range(4)])
    out, lse = every(*map(jnp.arange, (shape.splits, batch, kv_heads, shape.tiles)))
    lse = lse.reshape(shape.splits, batch, kv_heads, -1)
    return out.reshape(*lse.shape, shape.head), lse


CASES = dict(
    seed=st.integers(0, 2**16),
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 4),
    rows=st.integers(1, 64),
    before=st.integers(0, 63),
    size=st.sampled_from([64, 128]),
    stretches=st.sampled_from([1, 6]),
    window=st.none() | st.integers(1, 300),
    sinks=st.booleans(),
    dtype=st.sampled_from(sorted(TOLERANCE)),
)


def compare_emulated(**case):
    """The whole call, but for what only the GPU does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "_call", emulated)
        compare(**case)


def compare(seed, batch, kv_heads, group, rows, before, size, stretches, window, sinks, dtype):
    sizes, before = (batch, kv_heads, group, rows, size, stretches), min(before, 64 - rows)
    case = finite(random_case(seed, *sizes, dtype, before=before))
    rng = np.random.default_rng(seed + 1)
    sinks = jnp.asarray(rng.normal(size=kv_heads * group), jnp.float32) if sinks else None
    attend = functools.partial(gpu.tree_attention, window=window, sinks=sinks, with_lse=True)
    out, lse = jax.jit(attend)(*case)
    wanted, wanted_lse = expected(*case, window=window, sinks=sinks)
    close = TOLERANCE[dtype]
    np.testing.assert_allclose(np.float32(out), np.float32(wanted), atol=close, rtol=close)
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-5, rtol=2e-5)


# Several tiles and splits, of which the window leaves some nothing.
SPLIT = dict(
    seed=0, batch=2, kv_heads=1, group=4, rows=33, before=5, size=128, stretches=6, window=200,
    sinks=True, dtype="float32",
)  # fmt: skip


@settings(max_examples=4)
@given(**CASES)
@example(**SPLIT)
@example(**{**SPLIT, "window": None, "dtype": "bfloat16"})
def test_its_shares_masks_softmax_and_merge_equal_the_reference(**case):
    compare_emulated(**case)


@pytest.mark.slow
@settings(max_examples=60)
@given(**CASES)
def test_they_do_on_many_shapes(**case):
    compare_emulated(**case)


@pytest.mark.skipif(not ON_GPU, reason="needs a Hopper GPU: the kernel is compiled for it")
@settings(max_examples=60)
@given(**{**CASES, "dtype": st.just("bfloat16")})
def test_it_equals_the_reference_on_a_gpu(**case):
    compare(**case)


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
    return jax.export.export(jax.jit(attend), platforms=["cuda"])(*arrays).mlir_module()


@pytest.mark.parametrize("head", sorted(gpu.TUNING))
@pytest.mark.parametrize("rows, group", [(1, 8), (64, 4)], ids=["one tile", "pairs of tiles"])
@pytest.mark.parametrize("window", [None, 512])
def test_it_lowers_for_cuda_at_every_shape_of_its_table(head, rows, group, window):
    assert "mosaic_gpu" in lowered(rows, group, head, 128, window)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("head", sorted(gpu.TUNING))
def test_it_lowers_for_cuda_at_many_trees(rows, group, head):
    assert "mosaic_gpu" in lowered(rows, group, head, 64, None, batch=8, kv_heads=8)


def test_a_few_slots_are_split_over_the_whole_gpu_and_many_are_not():
    long = 32 * 1024
    assert gpu.shape_of(1, 8, 64, HEAD, 128, long).splits == 33
    assert gpu.shape_of(64, 8, 64, HEAD, 128, long).splits == 1
    assert gpu.shape_of(1, 8, 64, HEAD, 128, 256).splits == 1


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="multiple of 64 positions on a GPU, got 48"):
        gpu.shape_of(1, 1, 1, HEAD, 48, 96)
    half = change_dense(tiny_config(), head_dim=128).running(compute_dtype="bfloat16")
    chosen = choose("gpu", "NVIDIA H200", half, "gpu")
    assert chosen.name == "gpu" and not chosen.warn
    with pytest.raises(ValueError, match="the device is 'cpu'"):
        choose("cpu", "cpu", half, "gpu")
    with pytest.raises(ValueError, match="for Hopper .* the device is 'NVIDIA A100-SXM4-80GB'"):
        choose("gpu", "NVIDIA A100-SXM4-80GB", half, "gpu")
    with pytest.raises(ValueError, match="bfloat16 heads of 64 or 128, got float32 heads of 128"):
        choose("gpu", "NVIDIA H200", half.running(compute_dtype="float32"), "gpu")


@pytest.mark.parametrize("asked, max_len, size", [
    (None, 100, 128), (48, 300, 64), (100, 300, 128), (0, 130, 192), (None, 1024, 128),
])  # fmt: skip
def test_pages_are_rounded_up_to_what_it_reads(asked, max_len, size, monkeypatch):
    cfg = change_dense(tiny_config(mtp=1), head_dim=HEAD).running(compute_dtype="bfloat16")
    named = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    monkeypatch.setattr(dispatch.jax, "devices", lambda *_: [named])
    runner = Runner(cfg, SpecConfig("2_1_3"), 2, max_len, page_size=asked)
    monkeypatch.undo()
    assert runner.cfg.run.attention == "gpu" and runner.page_size == size
    wide = gpu.shape_of(2, cfg.layers[0].mixer.num_kv_heads, 3, HEAD, runner.page_size, max_len)
    assert wide.per_page * wide.block == size
