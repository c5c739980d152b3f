"""Who attends: the choice for a platform, and that what is chosen is what runs."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_tpu import expected, random_case
from tiny import prompts_of, tiny_config, tiny_model

from bench.programs import change_dense
from specjax import LLM, SamplingParams, SpecConfig
from specjax.drafts.mtp import weight_axes
from specjax.engine.settings import EngineConfig
from specjax.kernels import dispatch, reference
from specjax.kernels.backend import choose
from specjax.parallel import sharding
from specjax.parallel.sharding import MeshConfig, make_mesh
from tests.kernels import interpreted
from train.heads.training import DraftConfig, DraftTrainer
from train.loss.optim import OptimConfig
from train.loss.packing import Sample, pack
from train.loss.policy import PolicyTrainer
from train.loss.terms import count_denominators, sft_loss

WIDE = change_dense(tiny_config(), head_dim=128)
HALF = WIDE.running(compute_dtype="bfloat16")
NARROW, HUGE = change_dense(HALF, head_dim=64), change_dense(WIDE, head_dim=512)
V5E, H100 = ("tpu", "TPU v5 lite"), ("gpu", "NVIDIA H100")


# --- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device, cfg, asked, name, warn, says",
    [
        (V5E, HALF, "auto", "tpu:v5e", False, "Pallas tree attention for v5e"),
        (("tpu", "TPU v5"), HALF, "auto", "tpu:v5p", False, "splash attention"),
        (("tpu", "TPU v6 lite"), HALF, "auto", "tpu:v6e", False, "v6e"),
        (("tpu", "TPU v9"), HALF, "auto", "reference", True, "no kernel for 'TPU v9'"),
        (("tpu", "TPU v9"), HALF, "tpu:v5e", "tpu:v5e", False, "v5e"),
        (V5E, tiny_config(), "auto", "reference", True, "reference; not tpu:v5e: head_dim must"),
        (V5E, HALF, "reference", "reference", False, "as asked for"),
        (H100, HALF, "auto", "gpu", False, "Pallas Mosaic GPU tree attention"),
        (("gpu", "NVIDIA H200"), NARROW, "auto", "gpu", False, "Mosaic GPU tree attention"),
        (("gpu", "NVIDIA A100-SXM4-80GB"), HALF, "auto", "triton", False, "for Hopper"),
        (H100, HALF, "library:cudnn", "library:cudnn", False, "by cuDNN"),
        (H100, WIDE, "auto", "triton", False, "got float32 heads of 128"),
        (H100, HUGE, "auto", "library:xla", True, "cuDNN supports no float32 heads of 512"),
        (("cpu", "cpu"), tiny_config(), "auto", "reference", False, "multiple of 16, got 8"),
        (("cpu", "cpu"), HALF, "auto", "reference", False, "reference; not cpu: it computes in"),
        (("cpu", "cpu"), WIDE, "library:xla", "library:xla", False, "dot_product_attention"),
        (("neuron", "trn1"), WIDE, "auto", "reference", True, "no kernel for 'trn1'"),
        (("rocm", "MI300"), HALF, "auto", "library:xla", True, "device is 'rocm'"),
    ],
)
def test_each_platform_gets_its_kernel_and_a_missing_one_is_warned_of(
    device, cfg, asked, name, warn, says
):
    choice = choose(*device, cfg, asked)
    assert (choice.name, choice.warn) == (name, warn)
    assert says in choice.line


@pytest.mark.parametrize(
    "device, cfg, asked, message",
    [
        (("cpu", "cpu"), WIDE, "tpu:v5e", "compiled for TPUs, and the device is 'cpu'"),
        (("cpu", "cpu"), WIDE, "library:cudnn", "cuDNN attends on GPUs, and the device is 'cpu'"),
        (V5E, tiny_config(), "tpu:v5e", "multiple of 128, got 8"),
        (V5E, HALF, "tpu:v3", "must be one of .* tpu:v5e, tpu:v5p, tpu:v6e"),
        (V5E, HALF, "no_such.kernels:MINE", "cannot load kernel backend 'no_such.kernels:MINE'"),
        (V5E, HALF, "flash", "must be one of auto, cpu"),
    ],
)
def test_a_kernel_that_cannot_be_used_is_refused(device, cfg, asked, message):
    with pytest.raises(ValueError, match=message):
        choose(*device, cfg, asked)


# --- values ---------------------------------------------------------------------------------------


def finite(case):
    """Without the NaN behind the prefixes, which the reference and jax's attention multiply."""
    q, k, v, k_pages, v_pages, *rest = case
    return q, k, v, jnp.nan_to_num(k_pages), jnp.nan_to_num(v_pages), *map(jnp.asarray, rest)


@pytest.mark.parametrize("window, with_sinks, dtype, close", [
    (None, False, "bfloat16", 2e-2),
    (20, True, "float32", 1e-5),
    pytest.param(None, False, "float32", 1e-5, marks=pytest.mark.slow),
    pytest.param(20, True, "bfloat16", 2e-2, marks=pytest.mark.slow),
])  # fmt: skip
def test_tree_attention_of_the_library_equals_the_reference(window, with_sinks, dtype, close):
    case = finite(random_case(5, 3, 2, 2, 7, 48, 2, dtype))
    sinks = jnp.linspace(-1, 2, 4) if with_sinks else None
    wanted, wanted_lse = expected(*case, window=window, sinks=sinks)
    attend = functools.partial(dispatch.tree_attention, kernel="library:xla", window=window)
    found, lse = jax.jit(functools.partial(attend, with_lse=True))(*case, sinks=sinks)
    plain = jax.jit(attend)(*case, sinks=sinks)
    assert found.dtype == plain.dtype == dtype
    for out in (found, plain):
        np.testing.assert_allclose(np.float32(out), np.float32(wanted), atol=close, rtol=close)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5, rtol=1e-5)


@functools.cache
def packed_rows(length, steps, batch=2, seed=0, head=128):
    """q, k, v, own rows of later steps, and segments with padding behind them."""
    rng = np.random.default_rng(seed)

    def normal(heads):
        return jnp.asarray(rng.normal(size=(batch, heads, length, head)), jnp.float32)

    own = [(normal(2), normal(2)) for _ in range(steps)]
    ids = np.zeros((batch, length), np.int32)
    for row, end in zip(ids, (length, length - 7), strict=False):
        row[:end] = 1 + np.searchsorted(np.sort(rng.integers(1, end, 3)), np.arange(end), "right")
    return normal(4), normal(2), normal(2), own, jnp.asarray(ids)


def value_and_gradients(attend, q, k, v, own, ids):
    def loss(q, k, v, own):
        out = attend(q, k, v, own, ids)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(q, k, v, own)


@pytest.mark.parametrize("kernel, length, steps, head", [
    ("library:xla", 128, 0, 128),
    ("tests.kernels.interpreted:TPU", 150, 2, 64),
    pytest.param("library:xla", 150, 2, 128, marks=pytest.mark.slow),
    pytest.param("tests.kernels.interpreted:TPU", 128, 0, 128, marks=pytest.mark.slow),
])  # fmt: skip
def test_training_attention_and_its_gradient_equal_the_reference(kernel, length, steps, head):
    arrays = packed_rows(length, steps, head=head)

    def by_reference(q, k, v, own, ids):
        if not own:
            return reference.causal_attention(q, k, v, ids)
        return reference.causal_attention_with_own(q, k, v, own, ids)

    def by_kernel(q, k, v, own, ids):
        if not own:
            return dispatch.causal_attention(q, k, v, ids, kernel=kernel)
        return dispatch.causal_attention_with_own(q, k, v, own, ids, kernel=kernel)

    found = value_and_gradients(by_kernel, *arrays)
    wanted = value_and_gradients(by_reference, *arrays)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)


# --- over a mesh ----------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """Shapes of the queries that each kernel was traced with."""
    seen, operations = {"tree": [], "causal": []}, interpreted.TPU.operations
    attend, splash = operations["tree_attention"], operations["causal_attention"]

    def tree(q, *args, **kwargs):
        seen["tree"].append(q.shape)
        return attend(q, *args, **kwargs)

    def causal(q, *args, **kwargs):
        seen["causal"].append(q.shape)
        return splash(q, *args, **kwargs)

    monkeypatch.setitem(operations, "tree_attention", tree)
    monkeypatch.setitem(operations, "causal_attention", causal)
    return seen


@pytest.fixture(scope="module")
def mesh():
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    return make_mesh(MeshConfig(data=2, fsdp=2, tp=2))


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_every_device_attends_to_its_own_heads_and_slots(mesh, calls, kv_heads):
    """Heads that do not divide by tp are everybody's."""
    case = finite(random_case(1, 4, kv_heads, 2, 5, 32, 2, "float32"))
    wanted, wanted_lse = expected(*case, window=None, sinks=None)
    attend = functools.partial(
        dispatch.tree_attention, kernel="tests.kernels.interpreted:TPU", with_lse=True
    )
    found, lse = jax.jit(sharding.traced_on(mesh, attend))(
        *jax.device_put(case, jax.NamedSharding(mesh, jax.P()))
    )
    assert calls["tree"] == [(1, 2, 5, 128)]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)


# --- from the outside -----------------------------------------------------------------------------

PROMPTS = prompts_of(2, 64, seed=2, longest=30)
ASKED = SamplingParams(max_tokens=5, temperature=0.8, seed=3, ignore_eos=True)


def generated(kernel, **settings) -> list[list[int]]:
    config = EngineConfig(attention=kernel, page_size=16, prefill_chunk=16)
    model = tiny_model(WIDE)
    llm = LLM(model, SpecConfig("1_1_2"), max_batch=2, max_len=64, engine=config, **settings)
    return [output.samples[0].token_ids for output in llm.generate(PROMPTS, ASKED)]


@pytest.mark.slow
def test_a_rollout_runs_the_kernel_that_is_asked_for_and_gives_the_same_tokens(calls, caplog):
    wanted = generated("reference")
    # Products have a warning of their own where there is no C++ compiler.
    said = [record for record in caplog.records if record.name != "specjax.weights.matrix"]
    assert not calls["tree"] and not said
    with caplog.at_level(logging.INFO):
        assert generated("tests.kernels.interpreted:TPU") == wanted
    rows = {shape[2] for shape in calls["tree"]}
    assert {16, 2} <= rows, "pieces of prompts and trees"
    assert "attention: the TPU kernel in interpret mode" in caplog.text
    assert "the draft's attention" in caplog.text


def losses(kernel, mesh) -> list[float]:
    """Of the policy and of its head, and their gradients' norms."""
    rng = np.random.default_rng(0)
    samples = [
        Sample(i, rng.integers(0, 64, 9), rng.integers(0, 64, 30), np.zeros(30), np.zeros(30), 1.0)
        for i in range(8)
    ]
    batches = pack(samples, 128, 4)
    cfg, params, head = jax.tree.map(lambda x: x, tiny_model(WIDE))
    if mesh is not None:
        params, head = (
            jax.device_put(x, sharding.param_shardings(mesh, x, weight_axes(cfg)))
            for x in (params, head)
        )
    policy = PolicyTrainer(cfg, sft_loss, OptimConfig().build(()), mesh, attention=kernel)
    settings = DraftConfig(unroll_steps=2, optim=OptimConfig(lr=1e-4))
    draft = DraftTrainer(cfg, settings, mesh=mesh, attention=kernel)
    opt, draft_opt = policy.init_opt_state(params), draft.init_opt_state(head)
    placed = [policy.place(b) for b in batches]
    params, _, states, sums = policy.update(params, opt, placed, count_denominators(batches))
    _, _, draft_sums = draft.update(head, draft_opt, params, placed, states)
    return [sums["loss"], sums["grad_norm"], *draft_sums["mtp_loss_sum"]]


@pytest.mark.slow
def test_training_runs_the_kernel_that_is_asked_for_and_gives_the_same_losses(mesh, calls):
    wanted = losses("reference", None)
    assert not calls["causal"]
    np.testing.assert_allclose(losses("tests.kernels.interpreted:TPU", mesh), wanted, rtol=1e-4)
    assert set(calls["causal"]) == {(1, 2, 128, 128)}
