"""The TPU kernel against the reference, in interpret mode: its copies and semaphores included."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from specjax.decode.tree import ancestors, pack_bits
from specjax.kernels import reference, tpu
from tests.kernels import interpreted

HEAD = 128
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def random_case(
    seed, batch, kv_heads, group, rows, size, stretches, dtype, prefix=None, before=0, head=HEAD
):
    """Arguments of `tree_attention`: trees that differ, pages in no order, the rest of them NaN;
    queries of all but the first `before` rows of a tree."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape)

    nodes = before + rows
    parents = [[0, *(rng.integers(0, r) for r in range(1, nodes))] for _ in range(batch)]
    bits = np.stack([pack_bits(ancestors(np.array(p))) for p in parents])[:, before:]
    table = rng.permutation(batch * stretches).reshape(batch, stretches) + 1
    if prefix is None:
        prefix = rng.integers(0, size * stretches + 1, batch)
        prefix[rng.integers(batch)] = rng.choice([0, size, size * stretches])
    pages = normal(2, 1 + batch * stretches, kv_heads, size, head)
    for row, length in zip(table, prefix, strict=True):
        for at, page in enumerate(row):
            pages[:, page, :, max(length - at * size, 0) :] = np.nan
    q = normal(batch, kv_heads * group, rows, head)
    k, v = normal(2, batch, kv_heads, nodes, head)
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v, *pages)]
    return *arrays, np.asarray(prefix, np.int32), bits, table.astype(np.int32)


@functools.partial(jax.jit, static_argnames="window")
def expected(q, k, v, k_pages, v_pages, *rest, window, sinks):
    # The reference multiplies what lies past a prefix by zero.
    clean = (jnp.nan_to_num(x) for x in (k_pages, v_pages))
    return reference.tree_attention(
        q, k, v, *clean, *rest, window=window, sinks=sinks, with_lse=True
    )


SIMULATED = pltpu.InterpretParams()
attend = functools.partial(tpu.tree_attention, tuning=interpreted.TPU_TUNING, interpret=SIMULATED)


def check(case, dtype, window=None, sinks=None, **more):
    out, lse = attend(*case, window=window, sinks=sinks, with_lse=True, **more)
    wanted, wanted_lse = expected(*case, window=window, sinks=sinks)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    close = TOLERANCE[dtype]
    np.testing.assert_allclose(np.float32(out), np.float32(wanted), atol=close, rtol=close)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5, rtol=1e-5)


CASES = dict(
    seed=st.integers(0, 2**16),
    batch=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    rows=st.integers(1, 64),
    before=st.integers(0, 40),
    size=st.sampled_from([16, 48, 64]),
    stretches=st.integers(1, 3),
    window=st.none() | st.integers(1, 80),
    sinks=st.booleans(),
    dtype=st.sampled_from(sorted(TOLERANCE)),
)


def compare(seed, batch, kv_heads, group, rows, before, size, stretches, window, sinks, dtype):
    sizes = batch, kv_heads, group, rows, size, stretches
    case = random_case(seed, *sizes, dtype, before=before)
    rng = np.random.default_rng(seed + 1)
    sinks = jnp.asarray(rng.normal(size=kv_heads * group), jnp.float32) if sinks else None
    check(case, dtype, window, sinks)


@pytest.mark.parametrize("rows, window, sinks, dtype", [
    (40, None, False, "float32"), (12, 20, True, "bfloat16"), (1, 20, True, "float32"),
])  # fmt: skip
def test_it_equals_the_reference(rows, window, sinks, dtype):
    """Three tiles of rows, of which the last is not full; a tree; plain decoding. Two pages."""
    compare(5, 2, 2, 3, rows, 0 if rows == 1 else 7, 48, 2, window, sinks, dtype)


@pytest.mark.slow
@settings(max_examples=60)
@given(**CASES)
@example(
    seed=0, batch=4, kv_heads=1, group=1, rows=1, before=0, size=16, stretches=1, window=None,
    sinks=False, dtype="float32",
)  # fmt: skip
def test_it_equals_the_reference_on_many_shapes(**case):
    compare(**case)


def test_prefixes_that_end_at_edges_of_parts_blocks_and_pages():
    """Copies for the next slot are sent over those that have nothing to copy."""
    sizes = tpu.Sizes(2, 3, 1, HEAD, 4, 32, 96)
    _, blocks = sizes.cut(interpreted.TPU_TUNING, 3)
    assert (blocks.piece, blocks.part, blocks.positions) == (32, 32, 64)
    for prefix in ((0, 0, 0), (0, 64, 0), (32, 33, 31), (0, 1, 96), (63, 65, 95), (96, 96, 96)):
        check(random_case(0, 3, 1, 2, 3, 32, 3, "float32", prefix), "float32")


RACE = "RACE DETECTED"  # jax 0.10 prints it, jax 0.12 raises it; there is no public flag
TWO_CORES = dataclasses.replace(SIMULATED, num_cores_or_threads=2)


@pytest.mark.parametrize("prefix, window", [
    ((20, -1, 50, 33), None), ((-5, 40, -1, 7), None), ((20, 64, 50, 33), 1), ((32, 7, 32, 40), 1),
])  # fmt: skip
def test_copies_are_sent_over_slots_of_which_no_block_is_read(prefix, window):
    """Negative lengths are empty prefixes. The root is a window of 1, and where a prefix ends with
    a part the window begins behind it."""
    case = random_case(0, 4, 1, 2, 3, 32, 3, "float32", np.array(prefix))
    check(case, "float32", window)
    check(case, "float32", window, interpret=TWO_CORES)


@pytest.mark.parametrize("rows, before", [(3, 0), (33, 31)])
def test_two_cores_share_the_programs_and_do_not_race(rows, before, capfd):
    """Each core has slots, or tiles of slots, of its own, and buffers for them."""
    case = random_case(1, 2, 1, 2, rows, 32, 3, "float32", (96, 33), before)
    cores = set()

    def record(token, _, core):
        cores.add(int(core))
        return token

    two = dataclasses.replace(TWO_CORES, detect_races=True, grid_point_recorder=record)
    check(case, "float32", interpret=two)
    assert cores == {0, 1}
    assert RACE not in capfd.readouterr().out


def test_a_block_that_is_not_waited_for_is_a_race(monkeypatch, capfd):
    """The simulator says so in the words that the test above does not find."""
    monkeypatch.setattr(tpu.Copies, "wait", lambda *_: None)
    case = random_case(1, 2, 1, 2, 3, 32, 3, "float32", (96, 33))
    eager = dataclasses.replace(TWO_CORES, detect_races=True, dma_execution_mode="eager")
    said = ""
    try:
        jax.block_until_ready(attend(*case, interpret=eager))
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert RACE in said + capfd.readouterr().out


@pytest.mark.parametrize("generation", sorted(tpu.TUNING))
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 5, 16, 64, 512])
def test_what_a_program_holds_fits_in_vmem(generation, kv_heads, rows):
    """Qwen3-8B has 8 key/value heads with 4 query heads each, of which tp leaves some."""
    tuning = tpu.TUNING[generation]
    sizes = tpu.Sizes(4, max(rows, 16), kv_heads, HEAD, 2, 128, 8192)
    tile, blocks = sizes.cut(tuning, rows)
    assert tile == min(rows, 64), "a verified tree is one program, a piece of a prompt a few"
    assert sizes.vmem_bytes(tile, blocks) <= tuning.vmem_bytes
    assert 2 * blocks.positions * kv_heads * HEAD * 2 == tuning.block_bytes
