"""One kernel writes to all layers' pages what one scatter per array writes."""

import functools
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


def test_scatters_write_until_the_kernel_was_compared_with_them(monkeypatch, caplog):
    case = a_case(3, 20, 2, 16, 8, 3, 2, "float32", width=4)

    def kernels():
        return str(jax.make_jaxpr(lambda *case: by_kernel(*case))(*case)).count("pallas_call[")

    monkeypatch.setattr(commit_kernel._Choice, "on", False)
    assert kernels() == 0
    monkeypatch.setattr(commit_kernel._Choice, "wrong", False)
    here, true = jax.devices()[0], commit_kernel._written
    sizes = commit_kernel.Sizes(4, 3, 16, 24, "bfloat16", (1, 9, 40))
    assert commit_kernel.why_wrong(here, sizes, interpret=True) is None

    def wrong(arrays, *rest, **named):
        first, *others = true(arrays, *rest, **named)
        return first.at[2, 0, 0].add(1), *others

    def past_the_table(arrays, rows, start, table, *rest, **named):
        table = jnp.pad(table, ((0, 0), (0, 1))).at[:-1, -1].set(table[1:, 0])
        return true(arrays, rows, start, table, *rest, **named)

    interpreted = functools.partial(commit_kernel.why_wrong.__wrapped__, interpret=True)
    monkeypatch.setattr(commit_kernel, "why_wrong", interpreted)
    check = functools.partial(commit_kernel.check, here, sizes)
    for written in (wrong, past_the_table):
        monkeypatch.setattr(commit_kernel, "_written", written)
        monkeypatch.setattr(commit_kernel._Choice, "wrong", False)
        check()
        assert kernels() == 0 and " rows of 4 bfloat16 arrays of 3 heads of 24" in caplog.text
        caplog.clear()
    monkeypatch.setattr(commit_kernel, "_written", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(commit_kernel._Choice, "wrong", False)
    check()
    assert kernels() == 0 and "it fails here: ZeroDivisionError" in caplog.text
    monkeypatch.setattr(commit_kernel, "_written", true)
    check()
    assert kernels() == 0, "it was wrong for another model"
    monkeypatch.setattr(commit_kernel._Choice, "wrong", False)
    check()
    assert kernels() == 1


@pytest.mark.parametrize("layers", [2, 36])
def test_it_lowers_for_cuda_as_one_kernel_whose_results_are_its_arguments(layers):
    def shape(*dims, kind=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, kind)

    pages, rows = [shape(33, 8, 64, 128)] * 2 * layers, [shape(4, 8, 5, 128)] * 2 * layers
    inputs = pages, rows, shape(4, kind=jnp.int32), shape(4, 8, kind=jnp.int32)
    device = jax.sharding.AbstractDevice("NVIDIA H100", None, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh), commit_kernel.unchecked():
        text = jax.jit(by_kernel).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r'@"?(?:__gpu\$xla\.gpu\.triton|triton_kernel_call)"?', text)) == 1
    assert text.count("output_operand_alias<") == 2 * layers, "pages are copied"
    assert "stablehlo.scatter" not in text
