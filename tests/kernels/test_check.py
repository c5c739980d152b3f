"""A kernel that is wrong on the device is not used there, and a line says why."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import RunConfig
from specjax.decode.tree import pack_bits
from specjax.kernels import check, dispatch, reference
from specjax.kernels.backend import Kernels
from specjax.models.families.dense import change_dense, dense_config
from specjax.models.mixers.attention import Attention
from specjax.parallel import sharding
from specjax.registry import BACKENDS

CFG = dense_config(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, run=RunConfig(param_dtype="bfloat16", compute_dtype="bfloat16"),
)  # fmt: skip
CALLS = []


def _right(**given):
    CALLS.append((given["q"].shape, given["k_tree"].shape, given["window"]))
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


def _kernels(attend, rest="reference") -> Kernels:
    return Kernels({"tree_attention": attend}, line="a kernel of a test", rest=rest)


HERE = __name__
RIGHT, ONE_WRONG, NOT_FINITE, FAILS, FORGETS = (
    _kernels(f) for f in (_right, _one_wrong, _not_finite, _fails, _forgets_last_page)
)
FIRST = _kernels(_fails, rest=f"{HERE}:SECOND")
SECOND = dataclasses.replace(
    _kernels(_right, rest=f"{HERE}:THIRD"), refuses=lambda operation, device, cfg: "too old"
)
THIRD = _kernels(_right)
WITH_TRAINING = _kernels(_fails, rest=f"{HERE}:TRAINING")
TRAINING = Kernels({}, line="a kernel of a test, for training", rest=f"{HERE}:THIRD")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """CPUs are checked as GPUs are, and nothing is remembered."""
    monkeypatch.setattr(check, "GPUS", ("cpu",))
    monkeypatch.setattr(check.commit_kernel, "check", lambda device, sizes: None)
    check._why_wrong.cache_clear()
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


@pytest.mark.parametrize(
    ("kernel", "line"),
    [
        ("ONE_WRONG", "it is wrong here: it differs from the reference by"),
        ("FORGETS", "it is wrong here: it differs from the reference by"),
        ("NOT_FINITE", "its results are not finite here (1 of 1 rows, 4 heads of 16)"),
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
    assert "a piece of 96 rows" in found


def test_a_marked_key_changes_the_rows_that_see_it_and_no_others():
    for kernel in ("SPREADS", "LOST"):
        found = check.why_wrong(CFG, name_of(kernel), 5, 16)
        assert "its results are not finite here" in found


def test_one_page_per_sequence_takes_no_more_positions_than_many():
    [call] = set(check._calls(CFG, 1, 1, 1))
    _, _, _, k_pages, _, prefix, _, table = check._arrays(call, 4096, "bfloat16")
    assert prefix.max() == check.POSITIONS and table.shape == (check.SLOTS, 3)
    _, _, _, k_pages, _, prefix, _, table = check._arrays(call, 16384, "bfloat16")
    assert prefix.max() == check.POSITIONS and k_pages.shape[0] == 4 and (table[:, 1:] == 0).all()


def test_a_device_without_memory_says_nothing_about_a_kernel(caplog):
    messages = ["RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes", None]

    def attend(**given):
        if messages[0]:
            raise RuntimeError(messages[0])
        return _right(**given)

    kernel = globals()["FULL"] = _kernels(attend)
    assert BACKENDS.find(name_of("FULL")) is kernel
    assert settled("FULL") == name_of("FULL")
    assert "was not compared with the reference: RuntimeError: RESOURCE_EXHAUSTED" in caplog.text
    messages[0] = "RESOURCE_EXHAUSTED: Shared memory size limit exceeded"
    assert settled("FULL") == "reference", "the verdict was remembered"


def test_processes_of_a_mesh_use_a_kernel_only_if_all_of_them_do(monkeypatch, caplog):
    monkeypatch.setattr(check.sharding, "any_host", lambda mesh, mine: True)
    assert settled("RIGHT") == "reference"
    assert "it is wrong on a device of another process" in caplog.text


@pytest.mark.parametrize("mine", [True, False])
def test_what_one_process_says_all_hear(mine):
    mesh = sharding.make_mesh(sharding.MeshConfig(tp=2))
    assert sharding.any_host(None, mine) == sharding.any_host(mesh, mine) == mine
    assert sharding.any_host(mesh, mine, host_of=lambda device: device.id) == mine


def test_a_rest_that_the_device_refuses_is_passed_over(caplog):
    assert settled("FIRST") == name_of("THIRD")
    lines = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(lines) == 2 and "too old" in lines[1]


def test_a_rest_that_does_not_attend_is_passed_over_without_a_line(caplog):
    assert settled("WITH_TRAINING") == name_of("THIRD")
    [record] = [r for r in caplog.records if r.levelname == "WARNING"]
    wanted = f"not by {name_of('WITH_TRAINING')}, but by {name_of('THIRD')}: it fails"
    assert wanted in record.message


def test_windows_soft_caps_and_split_heads_are_those_of_the_model():
    layers = [
        dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **changes))
        for layer, changes in zip(CFG.layers, [{"window": 20}, {"soft_cap": 5.0}], strict=True)
    ]
    cfg = CFG.replace(layers=tuple(layers))
    assert check.why_wrong(cfg, name_of("RIGHT"), 1, 16, ways=2) is None
    assert [(q[1], window) for q, _, window in CALLS] == [(2, 20), (2, None)]
    CALLS.clear()
    assert check.why_wrong(cfg, name_of("RIGHT"), 1, 16, ways=4) is None
    assert {q[1] for q, _, _ in CALLS} == {4}, "two key/value heads are not split over four"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_librarys_attention_passes_in_every_dtype(dtype):
    cfg = CFG.running(compute_dtype=dtype)
    assert check.why_wrong(cfg, "library:xla", 7, 16) is None


def test_words_are_those_of_the_decode_loop():
    rng = np.random.default_rng(0)
    visible = rng.random((3, 70)) < 0.5
    assert (check._words(visible) == pack_bits(visible)).all()
    tree = check._random_tree(rng, 9)
    assert (np.triu(tree, 1) == 0).all() and tree[:, 0].all() and tree.diagonal().all()


def test_devices_that_are_only_compiled_for_are_not_checked(monkeypatch):
    described = types.SimpleNamespace(platform="cpu", device_kind="a card that is not here")
    with monkeypatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: [described])
        assert settled("FAILS") == name_of("FAILS")
    monkeypatch.setattr(check, "GPUS", ("gpu",))
    assert settled("FAILS") == name_of("FAILS")


def test_all_attention_of_the_library_is_of_one_class():
    """A class of another kind that calls tree attention must be checked, too."""
    assert {type(mixer) for mixer in CFG.mixers("attention")} == {Attention}
    assert BACKENDS.find(name_of("RIGHT")) is RIGHT and dispatch.has("tree_attention", "gpu")
