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
from specjax.models.families.dense import dense_config
from specjax.models.mixers.attention import Attention
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
    monkeypatch.setattr(check.commit_kernel, "check", lambda device: None)
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
