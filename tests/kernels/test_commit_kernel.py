"""One kernel writes to all layers' pages what one scatter per array writes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels import commit_kernel
from specjax.kernels.commit import by_scatter
from specjax.kernels.commit_kernel import by_kernel


def a_case(seed, pages, kv_heads, head, size, count, batch, dtype, number=5, width=None):
    """Pages, new rows, starts that let rows cross pages, and a table; None: no table."""
    rng = np.random.default_rng(seed)

    def arrays(kind, *dims):
        return [jnp.asarray(rng.normal(size=dims), kind) for _ in range(number)]

    table = None
    if width:
        table = 1 + rng.permutation(pages - 1)[: batch * width].reshape(batch, width)
        table = jnp.asarray(table, jnp.int32)
    start = rng.integers(0, size * (width or 1) - count + 1, batch)
    before, new = (
        arrays(dtype, pages, kv_heads, size, head),
        arrays("float32", batch, kv_heads, count, head),
    )
    return before, new, jnp.asarray(start, jnp.int32), table


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("sizes", [
    dict(pages=40, kv_heads=3, head=64, size=16, count=5, batch=3, dtype="bfloat16", width=4),
    dict(pages=30, kv_heads=2, head=24, size=4, count=9, batch=4, dtype="float32", width=6),
    dict(pages=3, kv_heads=1, head=16, size=32, count=4, batch=3, dtype="float32"),
])  # fmt: skip
@pytest.mark.parametrize("seed", range(3))
def test_the_kernel_writes_what_scatters_write(seed, sizes):
    """Heads and widths that are no powers of two, rows that cross pages, pages of a sequence."""
    case = a_case(seed, **sizes)
    got, want = by_kernel(*case, interpret=True), by_scatter(*case)
    same(got, want)
    assert all((a != b).any() for a, b in zip(got, case[0], strict=True)), "nothing was written"


@pytest.mark.parametrize("past", [0, 5])
def test_rows_past_a_table_or_before_it_are_not_written(past):
    """A GPU does not stop at the end of a row of the table: the next sequence's pages come there.

    The kernel gets the table flat, so that interpretation reads them, too.
    """
    before, rows, _, table = a_case(0, 40, 2, 16, 8, 6, 4, "float32", width=3)
    end = 3 * 8
    start = jnp.array([end - 2, end + past, 4, -4], jnp.int32)
    got = by_kernel(before, rows, start, table, interpret=True)
    for old, new, row in zip(before, got, rows, strict=True):
        want, row = np.array(old), np.array(row)
        want[table[0, 2], :, 6:] = row[0, :, :2]
        want[table[2, 0], :, 4:] = row[2, :, :4]
        want[table[2, 1], :, :2] = row[2, :, 4:]
        want[table[3, 0], :, :2] = row[3, :, 4:]
        np.testing.assert_array_equal(new, want)
    before, rows, *_ = a_case(0, 4, 2, 16, 8, 6, 4, "float32")
    start = jnp.array([0, 4, 8, -3], jnp.int32)
    got = by_kernel(before, rows, start, interpret=True)
    for old, new, row in zip(before, got, rows, strict=True):
        want, row = np.array(old), np.array(row)
        want[0, :, :6], want[1, :, 4:], want[3, :, :3] = row[0], row[1, :, :4], row[3, :, 3:]
        np.testing.assert_array_equal(new, want)


@pytest.mark.parametrize("layers", [2, 36])
def test_it_lowers_for_cuda_as_one_kernel_whose_results_are_its_arguments(monkeypatch, layers):
    def shape(*dims, kind=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, kind)

    pages, rows = [shape(33, 8, 64, 128)] * 2 * layers, [shape(4, 8, 5, 128)] * 2 * layers
    inputs = pages, rows, shape(4, kind=jnp.int32), shape(4, 8, kind=jnp.int32)
    device = jax.sharding.AbstractDevice("NVIDIA H100", None, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    monkeypatch.setattr(commit_kernel.Choice, "on", True)
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(by_kernel).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r'@"?(?:__gpu\$xla\.gpu\.triton|triton_kernel_call)"?', text)) == 1
    assert text.count("output_operand_alias<") == 2 * layers, "pages are copied"
    assert "stablehlo.scatter" not in text
