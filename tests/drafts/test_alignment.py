"""A head is aligned with a packed policy: what is folded into it restores what packing changed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint.draft_files import save_draft_files
from specjax.checkpoint.weights import Head
from specjax.drafts.alignment import align
from specjax.drafts.eagle3 import Eagle3Source
from specjax.drafts.mtp import MTPSource, init_head_params
from specjax.engine.settings import EngineConfig
from specjax.engine.sources import load_head
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params, rounded

CFG = dense_config(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position=64,
    tie_embeddings=False,
    mtp_num_layers=1,
    rms_norm_eps=1e-9,
)
INT8 = CFG.running(products="int8")


def batch(seed: int = 0) -> dict:
    """Two rows of two segments, of which the first halves are prompts."""
    tokens = np.random.default_rng(seed).integers(0, CFG.vocab_size, (2, 32))
    positions = np.tile(np.arange(16), (2, 2))
    segments = np.tile(np.repeat([1, 2], 16), (2, 1))
    mask = (positions >= 8).astype(np.float32)
    whole = {"tokens": tokens, "positions": positions, "segment_ids": segments, "loss_mask": mask}
    return {name: jnp.asarray(array) for name, array in whole.items()}


@pytest.fixture(scope="module")
def policy():
    """A policy whose next token depends on the context."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x if "norm" in path[-1].key else 12 * x, init_params(CFG, 0)
    )


@pytest.fixture(scope="module")
def eagle(policy):
    """A head with its own embedding, so that it shares nothing with the policy but the states."""
    made, head = Eagle3Source.new(CFG, policy=policy)
    source = Eagle3Source(dataclasses.replace(made.cfg, own_embedding=True))
    return source, {**head, "embed": policy["embed"], "fc": 8 * head["fc"]}


def with_other_channels(params):
    """The same policy whose states are -4 or 4 times as large, by channel."""
    k = jnp.where(jnp.arange(CFG.hidden_size) % 3 == 0, -4.0, 4.0)
    layers = dict(params["layers"])
    for name in ("o", "down"):
        layers[name] = layers[name] * k
    for name in ("input_norm", "post_norm"):
        layers[name] = layers[name] * jnp.sign(k)
    norm = params["norm"] * jnp.sign(k)
    return {**params, "embed": params["embed"] * k, "norm": norm, "layers": layers}


def test_scales_restore_what_a_head_drafts_for_packed_weights_with_wrong_scales(policy, eagle):
    source, head = eagle
    wrong = with_other_channels(policy)
    how = SpecConfig("3_1_4", draft="checkpoint"), 2, 48
    prompts = [[i, i + 1, i + 2] for i in range(8)]
    asked = SamplingParams(temperature=1.0, max_tokens=40, seed=1, ignore_eos=True)

    def engine(params):
        model = CFG, params, Head(source, head)
        return LLM(model, *how, engine=EngineConfig(products="int8"))

    def decoded(llm):
        samples = [output.samples[0] for output in llm.generate(prompts, asked)]
        return [s.token_ids for s in samples], llm.totals.accept_length

    tokens, length = decoded(engine(policy))
    packed = engine(wrong)
    same, worse = decoded(packed)
    assert same == tokens and worse != length
    given = CFG, rounded(policy, INT8), rounded(wrong, INT8), [batch()]
    packed.update_head(Head(*align(source, head, *given, ["scales"])))
    assert decoded(packed) == (tokens, length)


def test_scales_of_states_behind_a_norm_are_folded_into_it(policy, eagle):
    source, head = eagle
    given = CFG, policy, with_other_channels(policy), [batch()]
    signs = np.where(np.arange(CFG.hidden_size) % 3 == 0, -1.0, 1.0)
    joined = Eagle3Source(dataclasses.replace(source.cfg, fc_norm="joined"))
    head = {**head, "input_norm": jnp.ones(joined.taps_width)}
    found = align(joined, head, *given, ["scales"])[1]["input_norm"]
    np.testing.assert_allclose(found, np.tile(signs, 2), rtol=1e-4)
    mtp, own = MTPSource(CFG), init_head_params(CFG)
    norm = align(mtp, own, *given, ["scales"])[1]["blocks"][0]["hidden_norm"]
    # The state is the one behind the policy's final norm, whose scale has the same signs.
    np.testing.assert_allclose(norm, np.ones(CFG.hidden_size), rtol=1e-4)


def test_norm_gives_states_the_size_of_full_precision_and_is_read_back(policy, eagle, tmp_path):
    source, head = eagle
    larger = {**policy, "embed": 3 * policy["embed"]}
    normed, params = align(source, head, CFG, policy, larger, [batch()], ["norm"])
    unroll = [batch()[name] for name in ("positions", "segment_ids")]
    states = jax.random.normal(jax.random.key(0), (2, 32, normed.taps_width))
    tokens = [batch()["tokens"]]
    drafts = [normed.unroll(params, policy, k * states, tokens, *unroll)[0] for k in (1, 5)]
    np.testing.assert_allclose(*drafts, rtol=1e-3, atol=1e-4)
    assert all(float(np.ptp(scale)) == 0 < float(scale[0]) for scale in params["fc_norm"].values())
    save_draft_files(tmp_path / "head", normed, params, "float32")
    read = load_head(str(tmp_path / "head"), CFG)[1]
    assert read.source == normed
    jax.tree.map(np.testing.assert_array_equal, read.params, params)


@pytest.mark.parametrize("kind", ["own matrix", "the policy's matrix", "mtp"])
def test_temperature_undoes_a_wrong_factor_of_the_logits(policy, eagle, kind):
    """All states of the policy are alike, and the head passes them on."""
    policy = {**policy, "embed": jnp.tile(policy["embed"][:1], (CFG.vocab_size, 1))}
    source, head = eagle
    layer = {**head["layers"][0], "o": 0 * head["layers"][0]["o"]}
    layer["down"] = 0 * layer["down"]
    head = {**head, "layers": {0: layer}, "fc": jnp.eye(32, 16, -16)}
    if kind == "the policy's matrix":
        source = Eagle3Source(dataclasses.replace(source.cfg, own_head=False))
        del head["lm_head"]
    if kind == "mtp":
        source, head = MTPSource(CFG), init_head_params(CFG)
        module = head["blocks"][0]
        layer = {k: 0 * x if k in ("o", "down") else x for k, x in module["layer"].items()}
        head["blocks"][0] = {**module, "layer": layer, "proj": jnp.eye(32, 16, -16)}

    def scaled(factor):
        if kind == "mtp":
            module = head["blocks"][0]
            return {"blocks": {0: {**module, "norm": module["norm"] * factor}}}
        name = "lm_head" if "lm_head" in head else "norm"
        return {**head, name: head[name] * factor}

    for wrong in (2 ** (8 / 30), 2 ** (-11 / 30)):  # among the factors that are tried
        _, found = align(source, scaled(wrong), CFG, policy, policy, [batch()], ["temperature"])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, head)


@pytest.mark.parametrize(
    ("changes", "methods", "message"),
    [
        ({}, ["bias"], "expected some of norm, scales, temperature, got bias"),
        ({"fc_norm": "each"}, ["norm"], "norms the policy's states already"),
        ({"taps": ("post_norm",)}, ["norm"], "has no fc"),
        ({"taps": ("post_norm",)}, ["scales"], "a head of the final state lacks"),
        ({"own_head": False, "norm_output": True}, ["temperature"], "recycles normed states"),
        (None, ["norm"], "norms the policy's states already"),
        ({"mask_token": 0}, ["scales"], "do not apply to heads with mask_hidden"),
    ],
)
def test_what_cannot_be_aligned_is_refused_with_the_reason(
    policy, eagle, changes, methods, message
):
    source, head = MTPSource(CFG), init_head_params(CFG)
    if changes is not None:
        source = Eagle3Source(dataclasses.replace(eagle[0].cfg, **changes))
        head = source.init(0)
    with pytest.raises(ValueError, match=message):
        align(source, head, CFG, policy, policy, [batch()], methods)
