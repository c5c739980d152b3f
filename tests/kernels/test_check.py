"""A kernel that is wrong on the device is not used there, and a line says why."""

import dataclasses

import jax.numpy as jnp
import pytest

from bench.programs import change_dense
from specjax.config import RunConfig
from specjax.interfaces import Backend
from specjax.kernels import check, reference
from specjax.models.families.dense import dense_config

CFG = dense_config(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, run=RunConfig(param_dtype="bfloat16", compute_dtype="bfloat16"),
)  # fmt: skip
CALLS = []


def _right(**given):
    CALLS.append((given["q"].shape, given["k_tree"].shape, given.get("window")))
    return reference.tree_attention(**given)


def _one_wrong(**given):
    """Wrong in one row of one slot, and only for trees of several rows."""
    out = _right(**given)
    return out.at[2, 1, -1].multiply(1.5) if out.shape[2] > 1 else out


def _forgets_last_page(**given):
    most = 2 * given["k_pages"].shape[2]
    return _right(**given | {"prefix_len": jnp.minimum(given["prefix_len"], most)})


def _not_finite(**given):
    return _right(**given).at[0, 0, 0, 0].set(jnp.nan)


def _fails(**given):
    raise NotImplementedError("no such instruction\non this device")


def _kernels(attend, rest="reference") -> Backend:
    takes = {"tree_attention": ("window", "soft_cap")}
    return Backend({"tree_attention": attend}, line="a kernel of a test", rest=rest, takes=takes)


HERE = __name__
RIGHT, ONE_WRONG, NOT_FINITE, FAILS, FORGETS = (
    _kernels(f) for f in (_right, _one_wrong, _not_finite, _fails, _forgets_last_page)
)
FIRST = _kernels(_fails, rest=f"{HERE}:SECOND")
SECOND = dataclasses.replace(
    _kernels(_right, rest=f"{HERE}:THIRD"), refuses=lambda operation, device, cfg: "too old"
)
THIRD = _kernels(_right)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """CPUs are checked as GPUs are, and nothing is remembered."""
    monkeypatch.setattr(check, "GPUS", ("cpu",))
    monkeypatch.setattr(check, "cache_dir", lambda: tmp_path)
    check._remembered.cache_clear()
    CALLS.clear()


def name_of(kernel: str) -> str:
    return f"{HERE}:{kernel}"


def settled(kernel: str, cfg=CFG, rows=5):
    return check.settle(cfg, None, name_of(kernel), rows=rows, page_size=16).run.attention


def test_a_kernel_that_is_right_runs_and_is_checked_once(caplog):
    assert settled("RIGHT") == name_of("RIGHT") == settled("RIGHT")
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    heads = (check.SLOTS, 4)
    shapes = [(*heads, some, 16) for some in (1, 1, 5)]
    assert [q for q, _, _ in CALLS] == shapes, "one row, one of five, and five of five"
    assert [tree[2] for _, tree, _ in CALLS] == [1, 5, 5]


def test_what_was_right_is_not_compared_again_at_the_next_start(monkeypatch):
    monkeypatch.setitem(check.BACKENDS.rows, "mine", name_of("RIGHT"))
    for _ in range(2):
        check._remembered.cache_clear()
        assert check.why_wrong(CFG, "mine", 5, 16) is None
    assert len(CALLS) == 3


@pytest.mark.parametrize(
    ("kernel", "line"),
    [
        ("ONE_WRONG", "it is wrong here: it differs from the reference by"),
        ("FORGETS", "it is wrong here: it differs from the reference by"),
        ("NOT_FINITE", "its results are not finite here (_Call(heads=4"),
        ("FAILS", "it fails here: NotImplementedError: no such instruction;"),
    ],
)
def test_a_kernel_that_is_wrong_is_replaced_by_its_rest_with_one_line(kernel, line, caplog):
    assert settled(kernel) == "reference"
    [record] = [r for r in caplog.records if r.levelname == "WARNING"]
    assert f"attention: not by {name_of(kernel)}, but by reference: {line}" in record.message


def shifted(by: int):
    return lambda given: {"window": given["window"] + by}


def _read_another_page(given):
    """One stretch of 64 positions is read from another page, in every slot that has it."""
    table = given["table"]
    return {"table": table.at[:, 5].set(table[:, 6])}


def _without_the_last(count: int):
    def change(given):
        prefix = given["prefix_len"]
        return {"prefix_len": jnp.where(prefix > 1000, prefix - count, prefix)}

    return change


def _past_the_end(count: int):
    return lambda given: {"prefix_len": given["prefix_len"] + count * (given["prefix_len"] > 0)}


MISTAKES = {
    "another page": (_read_another_page, None),
    "last 64 of long ones": (_without_the_last(64), None),
    "last one of long ones": (_without_the_last(1), None),
    "one behind the end": (_past_the_end(1), None),
    "window + 16": (shifted(16), 1024),
    "window + 1": (shifted(1), 1024),
    "window - 1": (shifted(-1), 1024),
}


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_a_mistake_about_few_positions_of_many_is_found(mistake, monkeypatch):
    """Heads have their size in models, bfloat16, and slots up to 8,192 positions."""
    change, window = MISTAKES.get(mistake, (lambda given: {}, 1024))

    def attend(**given):
        given["table"] = jnp.asarray(given["table"])
        return reference.tree_attention(**given | change(given))

    kernel = _kernels(attend)
    monkeypatch.setitem(globals(), "MISTAKEN", kernel)
    cfg = change_dense(CFG, head_dim=128, num_heads=2, num_kv_heads=1, window=window)
    found = check.why_wrong(cfg, name_of("MISTAKEN"), 1, 64)
    assert (found is None) == (mistake is None), found


def _last_rows_of_many(**given):
    out = _right(**given)
    return out.at[:, :, 64:].multiply(1.1) if out.shape[2] > 64 else out


def _nan_spreads(**given):
    """Multiplies weights of zero with a key that nobody sees."""
    out = _right(**given)
    return out + 0 * given["k_pages"].sum().astype(out.dtype)


def _nan_is_lost(**given):
    return jnp.nan_to_num(_right(**given))


LAST_ROWS, SPREADS, LOST = map(_kernels, (_last_rows_of_many, _nan_spreads, _nan_is_lost))


def test_pieces_of_prompts_are_checked():
    assert check.why_wrong(CFG, name_of("RIGHT"), 5, 16, width=96) is None
    assert CALLS[-1][0] == (check.PIECE_SLOTS, 4, 96, 16)
    assert check.why_wrong(CFG, name_of("LAST_ROWS"), 5, 16) is None
    found = check.why_wrong(CFG, name_of("LAST_ROWS"), 5, 16, width=96)
    assert "rows=96, tree=96, piece=True" in found


def test_a_marked_key_changes_the_rows_that_see_it_and_no_others():
    for kernel in ("SPREADS", "LOST"):
        found = check.why_wrong(CFG, name_of(kernel), 5, 16)
        assert "its results are not finite here" in found
