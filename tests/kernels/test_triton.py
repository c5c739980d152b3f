"""The Triton kernel: its values by interpretation, its work, the choice, and that it lowers."""

import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import other_python
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_tpu import random_case
from tiny import tiny_config

from bench.programs import change_dense
from specjax.kernels import dispatch, reference, triton
from specjax.kernels.backend import choose
from tests.kernels import interpreted

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
ON_GPU = jax.default_backend() == "gpu"
PYTHON = os.environ.get("SPECJAX_GPU_PYTHON")


# --- values ---------------------------------------------------------------------------------------


def clean(case):
    """The case without the NaN behind its prefixes, which the reference multiplies by zero."""
    q, k, v, k_pages, v_pages, *rest = case
    return q, k, v, jnp.nan_to_num(k_pages), jnp.nan_to_num(v_pages), *rest


interpreted = functools.partial(
    triton.tree_attention, tuning=interpreted.TRITON_TUNING, interpret=True, with_lse=True
)
options = {"static_argnames": ("window", "soft_cap", "with_lse")}
expected = functools.partial(jax.jit(reference.tree_attention, **options), with_lse=True)


def check(attend, case, dtype, **named):
    out, lse = attend(*case, **named)
    wanted, wanted_lse = expected(*clean(case), **named)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    close = TOLERANCE[dtype]
    np.testing.assert_allclose(np.float32(out), np.float32(wanted), atol=close, rtol=close)
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-5, rtol=2e-5)


CASES = dict(
    seed=st.integers(0, 2**16),
    batch=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4) | st.just(16),
    rows=st.integers(1, 40),
    before=st.integers(0, 40),
    head=st.sampled_from([16, 24, 64]),
    size=st.sampled_from([16, 20, 48, 64]),
    stretches=st.integers(1, 6),
    window=st.none() | st.integers(1, 150),
    sinks=st.booleans(),
    soft_cap=st.none() | st.just(1.5),
    dtype=st.sampled_from(sorted(TOLERANCE)),
)


def compare(
    attend, seed, batch, kv_heads, group, rows, before, head, size, stretches, window, sinks,
    soft_cap, dtype,
):  # fmt: skip
    sizes = batch, kv_heads, group, rows, size, stretches
    case = random_case(seed, *sizes, dtype, before=before, head=head)
    rng = np.random.default_rng(seed + 1)
    sinks = jnp.asarray(rng.normal(size=kv_heads * group), jnp.float32) if sinks else None
    check(attend, case, dtype, window=window, sinks=sinks, soft_cap=soft_cap)


# Several tiles, and chunks that several programs share; a window leaves some slots fewer.
SPLIT = dict(
    seed=0, batch=3, kv_heads=2, group=2, rows=9, before=30, head=16, size=48, stretches=4,
    window=None, sinks=True, soft_cap=1.5, dtype="float32",
)  # fmt: skip


@settings(max_examples=2)
@given(**CASES)
@example(**SPLIT)
@example(**{**SPLIT, "window": 60, "dtype": "bfloat16"})
@example(**{**SPLIT, "rows": 1, "before": 0, "size": 20, "sinks": False, "head": 24})
@example(**{**SPLIT, "rows": 40, "dtype": "float16"})  # not split: the rows of a prompt's piece
def test_it_equals_the_reference(**case):
    compare(interpreted, **case)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: the kernel is compiled for it")
@settings(max_examples=60)
@given(**{**CASES, "head": st.sampled_from([64, 96, 128, 256])})
def test_it_equals_the_reference_on_a_gpu(**case):
    compare(functools.partial(triton.tree_attention, with_lse=True), **case)


def test_a_slots_bits_depend_neither_on_other_slots_nor_on_the_tables_width():
    case = random_case(8, 4, 2, 2, 7, 48, 4, "bfloat16", prefix=np.array([190, 0, 3, 111]), head=16)
    together = interpreted(*case)
    wider = [*case[:-1], np.pad(case[-1], ((0, 0), (0, 9)))]
    for found, same in zip(interpreted(*wider), together, strict=True):
        np.testing.assert_array_equal(found, same)
    for slot in range(4):
        here = slice(slot, slot + 1)
        q, k, v, k_pages, v_pages, prefix, bits, table = case
        alone = interpreted(
            q[here], k[here], v[here], k_pages, v_pages, prefix[here], bits[here], table[here]
        )
        for found, same in zip(alone, together, strict=True):
            np.testing.assert_array_equal(found[0], same[slot])


# --- the program ----------------------------------------------------------------------------------


def lowered(rows, keys, group, head, dtype, window=None, sinks=False, soft_cap=None) -> str:
    """The program for a GPU, made on whatever this runs on."""

    def shape(*dims, dtype=dtype):
        return jax.ShapeDtypeStruct(dims, dtype)

    arrays = [
        shape(2, 2 * group, rows, head),
        *[shape(2, 2, keys, head)] * 2,
        *[shape(33, 2, 64, head)] * 2,
        shape(2, dtype=jnp.int32),
        shape(2, rows, -(-keys // 32), dtype=jnp.uint32),
        shape(2, 16, dtype=jnp.int32),
        *([shape(2 * group, dtype=jnp.float32)] if sinks else []),
    ]

    def attend(*arrays):
        named = {"sinks": arrays[8]} if sinks else {}
        named |= {"window": window, "soft_cap": soft_cap, "with_lse": True}
        return dispatch.tree_attention(*arrays[:8], kernel="triton", **named)

    return jax.jit(attend).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


EVERYTHING = {"window": 100, "sinks": True, "soft_cap": 30.0}


@pytest.mark.parametrize("rows, keys, group, head, dtype, more, kernels", [
    (1, 1, 4, 96, "bfloat16", {}, 2),
    (5, 9, 8, 128, "float32", EVERYTHING, 2),
    (200, 290, 4, 256, "float16", EVERYTHING, 1),
])  # fmt: skip
def test_it_lowers_for_cuda_as_a_kernel_and_a_merge_and_gathers_nothing(
    rows, keys, group, head, dtype, more, kernels
):
    """Rows of a prompt need no merge."""
    text = lowered(rows, keys, group, head, dtype, **more)
    assert len(re.findall(r"custom_call @__gpu\$xla\.gpu\.triton", text)) == kernels
    assert "stablehlo.gather" not in text and "dynamic_slice" not in text


def shape_of(batch, kv_heads, rows, head, dtype, page, pages, window=None):
    def like(*dims):
        return jax.ShapeDtypeStruct(dims, dtype)

    tree = like(batch, kv_heads, rows, head)
    pool = like(pages, kv_heads, page, head)
    return triton.Shape.of(tree, tree, pool, pages, triton.TUNING, window, None)


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="SPECJAX_GPU_PYTHON names no Python with the plugin")
def test_it_compiles_for_gpus_from_ampere_on():
    """As two kernels, and nothing beside them, whose buffers fit into the shared memory of each."""
    sizes = {
        f"{card}:{dtype}:{head}:{rows}": (dtype, head, rows)
        for card, dtype, head, rows in [
            ("h100", "float32", 128, 5), ("a100", "bfloat16", 128, 1), ("a100", "float32", 64, 16),
            ("l40", "float32", 256, 1), ("l40", "bfloat16", 256, 64), ("l40", "float16", 96, 512),
            ("b200", "bfloat16", 128, 16),
        ]
    }  # fmt: skip
    wanted = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    found = other_python.programs(PYTHON, "triton_programs.py", *sizes, **wanted)
    for name, (dtype, head, rows) in sizes.items():
        shape = shape_of(8, 8, 4 * rows, head, dtype, 64, 64)
        program = found[name]
        assert program["kernels"] == (1 if shape.chunks == 1 else 2), name
        assert program["beside"] == 0, name
        results = 8 * 8 * shape.chunks * shape.rows * (head + 1) * 4 if shape.chunks > 1 else 0
        assert program["temporaries"] <= results + 4096, name


# --- the choice -----------------------------------------------------------------------------------

HALF = change_dense(tiny_config(mtp=1), head_dim=128).running(compute_dtype="bfloat16")
HOPPER = ("gpu", "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize("device, head, dtype, message", [
    (("cpu", "cpu"), 128, "float32", "compiled for NVIDIA GPUs, and the device is 'cpu'"),
    (("gpu", "AMD Instinct MI300X"), 128, "float32", "compiled for NVIDIA GPUs"),
    (("gpu", "Tesla T4"), 128, "float32", "from Ampere on, and the device is 'Tesla T4'"),
    (HOPPER, 512, "float32", "heads of up to 256, got float32 heads of 512"),
])  # fmt: skip
def test_what_it_cannot_do_is_refused(device, head, dtype, message):
    cfg = change_dense(HALF, head_dim=head).running(compute_dtype=dtype)
    with pytest.raises(ValueError, match=message):
        choose(*device, cfg, "triton")
