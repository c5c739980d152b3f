"""The Triton kernel: its values by interpretation, its work, the choice, and that it lowers."""

import dataclasses
import functools
import os
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import other_python
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_tpu import random_case
from tiny import prompts_of, tiny_config, tiny_model

from bench.programs import shape_of as model_shape
from specjax import LLM, SamplingParams, SpecConfig
from specjax.drafts.model import ModelSource
from specjax.engine.runner import Runner
from specjax.engine.settings import EngineConfig
from specjax.kernels import dispatch, reference, triton
from specjax.kernels.backend import Reads, bytes_read, choose, typical
from specjax.models.families.dense import change_dense
from specjax.parallel import sharding
from specjax.parallel.sharding import MeshConfig, make_mesh

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
ON_GPU = jax.default_backend() == "gpu"
PYTHON = os.environ.get("SPECJAX_GPU_PYTHON")


# --- values ---------------------------------------------------------------------------------------


def clean(case):
    """The case without the NaN behind its prefixes, which the reference multiplies by zero."""
    q, k, v, k_pages, v_pages, *rest = case
    return q, k, v, jnp.nan_to_num(k_pages), jnp.nan_to_num(v_pages), *rest


interpreted = functools.partial(
    triton.tree_attention, tuning=triton.INTERPRETED, interpret=True, with_lse=True
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


@pytest.mark.slow
@settings(max_examples=80)
@given(**CASES)
def test_it_equals_the_reference_on_many_shapes(**case):
    compare(interpreted, **case)


@pytest.mark.parametrize("head, dtype", [(96, "bfloat16"), (128, "float32"), (256, "float16")])
def test_it_equals_the_reference_with_the_tuning_of_a_gpu(head, dtype):
    attend = functools.partial(interpreted, tuning=triton.TUNING)
    case = {**SPLIT, "head": head, "size": 64, "stretches": 10, "batch": 2, "kv_heads": 1}
    compare(attend, **{**case, "dtype": dtype})


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: the kernel is compiled for it")
@settings(max_examples=60)
@given(**{**CASES, "head": st.sampled_from([64, 96, 128, 256])})
def test_it_equals_the_reference_on_a_gpu(**case):
    compare(functools.partial(triton.tree_attention, with_lse=True), **case)


def test_slots_without_a_table_have_their_own_pages():
    case = clean(random_case(3, 2, 2, 2, 5, 64, 1, "float32", head=16))
    q, k, v, k_pages, v_pages, prefix, bits, table = case
    pages = k_pages[table[:, 0]], v_pages[table[:, 0]]
    out, _ = interpreted(q, k, v, *pages, prefix, bits)
    np.testing.assert_array_equal(out, interpreted(*case)[0])


def test_prefixes_do_not_go_on_past_a_slots_pages():
    """The kernel gets the table flat, where the next slot's pages follow those of a slot."""
    case = clean(random_case(3, 2, 1, 2, 2, 32, 2, "float32", head=16))
    long, full = ([*case[:5], jnp.array([n, -n + 64], jnp.int32), *case[6:]] for n in (100, 64))
    np.testing.assert_array_equal(interpreted(*long)[0], interpreted(*full)[0])


def test_all_slots_may_have_one_tree():
    case = list(random_case(3, 3, 1, 2, 5, 32, 2, "float32", head=16))
    case[6] = case[6][0]
    check(interpreted, case, "float32", window=9)


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


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_every_device_attends_to_its_own_heads_and_slots():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tp=2))
    case = clean(random_case(1, 4, 2, 2, 5, 48, 3, "float32", head=16))
    wanted, wanted_lse = expected(*case)
    attend = functools.partial(dispatch.tree_attention, with_lse=True)
    there = jax.device_put(case, jax.NamedSharding(mesh, jax.P()))
    attend = sharding.traced_on(mesh, functools.partial(attend, kernel="triton:interpret"))
    found, lse = jax.jit(attend)(*there)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)
    assert {shard.data.shape for shard in found.addressable_shards} == {(1, 2, 5, 16)}


def generated(kernel, spec) -> list[list[int]]:
    model = tiny_model(change_dense(tiny_config(), head_dim=16))
    config = EngineConfig(attention=kernel, page_size=16, prefill_chunk=48)
    llm = LLM(model, spec, max_batch=2, max_len=96, engine=config)
    asked = SamplingParams(max_tokens=6, temperature=0.9, seed=3, ignore_eos=True)
    prompts = prompts_of(2, 64, seed=2, longest=60)
    return [output.samples[0].token_ids for output in llm.generate(prompts, asked)]


@pytest.mark.slow
def test_an_engine_with_it_gives_the_tokens_of_the_reference():
    """Pieces of prompts, chunks of prefixes, and trees with their drafts."""
    wanted = generated("reference", None)
    assert generated("triton:interpret", SpecConfig("2_2_4")) == wanted


# --- work -----------------------------------------------------------------------------------------


def test_each_slot_has_the_chunks_of_its_own_length_and_only_valid_rows_are_written(monkeypatch):
    kept = {}
    attend = triton._attend

    def recorded(shape, dtype, arrays, *rest):
        kept["shape"], kept["parts"] = shape, attend(shape, dtype, arrays, *rest)
        return kept["parts"]

    monkeypatch.setattr(triton, "_attend", recorded)
    prefix = np.array([190, 0, 33, 64], np.int32)
    case = random_case(8, 4, 2, 2, 7, 48, 5, "float32", prefix=prefix, head=24)
    triton.tree_attention.__wrapped__(*case, tuning=triton.INTERPRETED, interpret=True)
    shape, (out, lse) = kept["shape"], kept["parts"]
    assert shape.per_chunk * shape.block == 32 and shape.chunks == 8 and shape.rows == 14
    # Interpretation begins with NaN in all outputs.
    lse = np.asarray(lse).reshape(4, 2, shape.chunks, 14)
    assert out.shape == (lse.size, 24)
    written = np.isfinite(lse).all(axis=(1, 3))
    assert written.sum(1).tolist() == [6, 1, 2, 2] and (np.diff(written.astype(int)) <= 0).all()
    assert (np.isfinite(lse) == written[:, None, :, None]).all()
    assert (np.isfinite(np.asarray(out)).all(1) == np.isfinite(lse.reshape(-1))).all()


def shape_of(batch, kv_heads, rows, head, dtype, page, pages, window=None):
    def like(*dims):
        return jax.ShapeDtypeStruct(dims, dtype)

    tree = like(batch, kv_heads, rows, head)
    pool = like(pages, kv_heads, page, head)
    return triton.Shape.of(tree, tree, pool, pages, triton.TUNING, window, None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head", [64, 96, 128, 256])
@pytest.mark.parametrize("page", [16, 64, 100, 192])
def test_a_block_lies_in_one_page_and_a_chunk_is_whole_blocks(head, dtype, page):
    shape = shape_of(8, 8, 16, head, dtype, page, 64)
    assert shape.block >= triton.LEAST and shape.block * shape.per_page >= page
    assert page % shape.block == 0 or page == 100
    size = max(triton.TUNING.block_bytes, triton.LEAST * shape.width * jnp.dtype(dtype).itemsize)
    assert shape.block * shape.width * jnp.dtype(dtype).itemsize <= size
    assert shape.chunks * shape.per_chunk >= shape.per_page * 64
    assert shape.programs * 8 * shape.tiles >= min(triton.TUNING.programs, 8 * 8 * shape.chunks)


def test_windows_leave_out_the_chunks_before_them():
    shape = shape_of(1, 1, 1, 64, "bfloat16", 64, 64, window=100)
    lengths = np.array([-1, 0, 5, 99, 356, 1000, 4096])
    first, count = map(np.asarray, triton.chunks_of(shape, jnp.asarray(lengths, jnp.int32)))
    for length, begin, chunks in zip(np.maximum(lengths, 0), first * 256, count, strict=True):
        seen = max(length - 99, 0)
        assert begin <= seen and begin + 256 * chunks >= length
        assert chunks == 1 or begin + 256 > seen


def test_rows_of_a_prompt_are_not_split():
    assert shape_of(4, 8, 512, 128, "bfloat16", 64, 256).chunks == 1
    assert shape_of(4, 8, 4, 128, "bfloat16", 64, 256).chunks == 64


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


def test_float32_is_multiplied_as_float32():
    def precisions(dtype):
        case = clean(random_case(0, 1, 1, 1, 3, 32, 2, dtype, head=16))
        return set(re.findall(r"precision=(.*)", str(jax.make_jaxpr(interpreted)(*case))))

    [exact] = precisions("float32")
    assert "HIGHEST" in exact
    assert "HIGHEST" not in "".join(precisions("bfloat16"))


# --- the choice -----------------------------------------------------------------------------------

HALF = change_dense(tiny_config(mtp=1), head_dim=128).running(compute_dtype="bfloat16")
HOPPER, AMPERE = ("gpu", "NVIDIA H100 80GB HBM3"), ("gpu", "NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize("device, head, dtype, name", [
    (HOPPER, 128, "bfloat16", "gpu"),
    (HOPPER, 80, "bfloat16", "triton"),
    (HOPPER, 128, "float32", "triton"),
    (HOPPER, 128, "float16", "triton"),
    (AMPERE, 128, "bfloat16", "triton"),
    (("cuda", "NVIDIA L40S"), 64, "bfloat16", "triton"),
    (("gpu", "NVIDIA B200"), 256, "bfloat16", "triton"),
    (HOPPER, 512, "bfloat16", "library:xla"),
    (("gpu", "Tesla V100-SXM2-16GB"), 64, "float16", "library:cudnn"),
])  # fmt: skip
def test_it_attends_where_the_kernel_for_hopper_does_not(device, head, dtype, name):
    choice = choose(*device, change_dense(HALF, head_dim=head).running(compute_dtype=dtype))
    assert (choice.name, choice.warn) == (name, name.startswith("library"))


@pytest.mark.parametrize("device, head, dtype, message", [
    (("cpu", "cpu"), 128, "float32", "compiled for NVIDIA GPUs, and the device is 'cpu'"),
    (("rocm", "MI300"), 128, "float32", "compiled for NVIDIA GPUs, and the device is 'MI300'"),
    (("gpu", "AMD Instinct MI300X"), 128, "float32", "compiled for NVIDIA GPUs"),
    (("gpu", "Tesla T4"), 128, "float32", "from Ampere on, and the device is 'Tesla T4'"),
    (("gpu", "Quadro RTX 6000"), 128, "float32", "from Ampere on"),
    (("gpu", "NVIDIA T1000"), 128, "float32", "from Ampere on"),
    (("gpu", "NVIDIA T4G"), 128, "float32", "from Ampere on"),
    (HOPPER, 512, "float32", "heads of up to 256, got float32 heads of 512"),
])  # fmt: skip
def test_what_it_cannot_do_is_refused(device, head, dtype, message):
    cfg = change_dense(HALF, head_dim=head).running(compute_dtype=dtype)
    with pytest.raises(ValueError, match=message):
        choose(*device, cfg, "triton")


def test_bytes_that_backends_read_follow_the_prefix_or_the_table():
    """8B: 8 key/value heads of 128, four query heads each, bfloat16: 4 KiB a position."""
    sizes = Reads(8, 1, 4, 8, 128, 2, prefix=2048, table=16384)
    found = bytes_read(["triton", "library:cudnn", "library:xla", "reference"], sizes)
    results = 2 * 8 * 4 * 8 * 129 * 4 * 8  # of 8 chunks of 256, written and read
    assert found["triton"] == 8 * 2048 * 4096 + results
    assert found["library:cudnn"] == found["library:xla"] == 3 * 8 * 16384 * 4096
    assert "reference" not in found
    # A prompt's piece is not split.
    assert bytes_read(["triton"], sizes._replace(rows=128))["triton"] == 8 * 2048 * 4096


def test_the_bytes_of_an_8b_model_in_float32_are_those_of_the_page():
    cfg = model_shape("8B").running(compute_dtype="float32")
    found = bytes_read(["triton", "library:xla"], typical(cfg))
    said = [f"{count / 2**20:.0f} MiB" for count in found.values()]
    page = (Path(__file__).parents[2] / "docs/kernels.md").read_text(encoding="utf-8")
    assert f"{said[0]} per layer by Triton and {said[1]} by XLA" in " ".join(page.split())


def test_results_of_chunks_are_as_many_as_the_kernel_writes():
    sizes = Reads(3, 5, 4, 2, 64, 2, prefix=1000, table=1024)
    shape = triton.Shape.of(
        jax.ShapeDtypeStruct((3, 8, 5, 64), "bfloat16"),
        jax.ShapeDtypeStruct((3, 2, 5, 64), "bfloat16"),
        jax.ShapeDtypeStruct((99, 2, 64, 64), "bfloat16"), 16, triton.TUNING, None, None,
    )  # fmt: skip
    written = 3 * 2 * shape.chunks * shape.rows * (64 + 1) * 4
    assert bytes_read(["triton"], sizes)["triton"] - 3 * 1000 * sizes.position == 2 * written


def test_the_backend_that_reads_less_is_chosen_and_the_line_says_how_much(monkeypatch):
    half = change_dense(HALF, head_dim=80)
    line = choose(*HOPPER, half).line
    read = bytes_read(["triton", "library:cudnn"], typical(half))
    for count in read.values():
        assert f"{count / 2**20:.0f} MiB" in line
    assert "not gpu: it supports bfloat16 heads of" in line and "got bfloat16 heads of 80" in line
    greedy = dataclasses.replace(triton.BACKEND, reads=lambda sizes: 4 * sizes.gathered())
    monkeypatch.setattr(triton, "BACKEND", greedy)
    choice = choose(*HOPPER, half)
    assert choice.name == "library:cudnn" and "by triton" in choice.line


@pytest.mark.parametrize("kind, head, dtype, policy", [
    ("NVIDIA H100 80GB HBM3", 128, "bfloat16", "gpu"),
    ("NVIDIA H100 80GB HBM3", 80, "bfloat16", "triton"),
    ("NVIDIA H100 80GB HBM3", 64, "float32", "triton"),
    ("NVIDIA A100-SXM4-80GB", 64, "bfloat16", "triton"),
])  # fmt: skip
def test_a_drafts_cache_gets_the_kernel_that_its_own_heads_and_dtype_need(
    kind, head, dtype, policy, monkeypatch
):
    """A draft model with heads of 80, whatever the policy has; both are in pages of one size."""
    cfg = change_dense(tiny_config(mtp=0), head_dim=head).running(compute_dtype=dtype)
    drafts = change_dense(cfg, head_dim=80)
    source = ModelSource(drafts, cfg.vocab_size)
    named = types.SimpleNamespace(platform="gpu", device_kind=kind)
    monkeypatch.setattr(dispatch.jax, "devices", lambda *_: [named])
    spec = SpecConfig("2_1_3", draft="small")
    runner = Runner(cfg, spec, 2, 100, source=source, page_size=20)
    monkeypatch.undo()
    assert runner.cfg.run.attention == policy
    assert runner.plan.source.network.run.attention == "triton"
    assert runner.page_size % 64 == 0
