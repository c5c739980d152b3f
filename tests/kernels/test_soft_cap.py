"""Soft-caps: scores within a bound, by every attention, its gradient, and a whole rollout."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_windows import LENGTH, STEPS, attend_to_rows, bits_of, close, packed_case, tree_case
from tiny import prompts_of, tiny_config, tiny_model

from specjax import LLM, SamplingParams, SpecConfig
from specjax.checked_json import UnsupportedModelError
from specjax.engine.settings import EngineConfig
from specjax.kernels import dispatch
from specjax.models.families.dense import change_dense
from specjax.models.mixers.attention import Attention
from specjax.parallel import sharding
from specjax.parallel.context import context_of
from specjax.parallel.sharding import MeshConfig, make_mesh
from specjax.registry import FAMILIES

CAP = 1.5  # the scores of the cases have a standard deviation of 1


def softmax_over(q, keys, values, sees):
    """Attention [N T H] under a soft-cap, by its formula; `sees` [T S], or [N T S]."""
    scores = jnp.einsum("nth,nsh->nts", q, keys) * q.shape[-1] ** -0.5
    scores = CAP * jnp.tanh(scores / CAP)
    return jnp.einsum("nts,nsh->nth", jax.nn.softmax(jnp.where(sees, scores, -jnp.inf)), values)


def wanted_of_trees():
    """Trees over contiguous prefixes."""
    parents, (q, k, v, k_pages, v_pages, prefixes), table = tree_case()
    outs = []
    for b, prefix in enumerate(prefixes):
        keys, values = (
            jnp.concatenate([jnp.concatenate(list(pages[table[b]]), 1)[:, :prefix], tree[b]], 1)
            for pages, tree in ((k_pages, k), (v_pages, v))
        )
        keys, values = (jnp.repeat(x, q.shape[1] // x.shape[0], 0) for x in (keys, values))
        rows = len(parents[b])
        sees = np.zeros((rows, prefix + rows), bool)
        sees[:, :prefix] = True
        for row in range(rows):
            at = row
            sees[row, prefix + at] = True
            while at:
                at = parents[b][at]
                sees[row, prefix + at] = True
        outs.append(softmax_over(q[b], keys, values, sees))
    return np.stack(outs)


@pytest.mark.parametrize("kernel", ["reference", "triton:interpret", "cpu", "tpu:interpret"])
def test_rows_of_trees_have_bounded_scores(kernel, request, caplog):
    """A kernel that has no soft-cap declines, and the reference attends."""
    if kernel == "cpu":
        request.getfixturevalue("cpu_kernels")
    caplog.set_level(logging.INFO)
    dispatch._log_declined.cache_clear()
    parents, arrays, table = tree_case()
    attend = functools.partial(dispatch.tree_attention, kernel=kernel, soft_cap=CAP)
    found = jax.jit(attend)(*arrays, bits_of(parents), table)
    np.testing.assert_allclose(found, wanted_of_trees(), atol=1e-5)
    assert ("it supports no soft-cap" in caplog.text) == (kernel in ("cpu", "tpu:interpret"))
    uncapped = dispatch.tree_attention(*arrays, bits_of(parents), table, kernel="reference")
    assert np.abs(found - uncapped).max() > 1e-2


def test_rows_that_attend_by_position_have_bounded_scores():
    parents, arrays, table = tree_case()
    paths = np.zeros((len(parents), 7, 7), np.int32)
    depth = np.zeros((len(parents), 7), np.int32)
    for b, of in enumerate(parents):
        for row in range(7):
            path = [row]
            while path[0]:
                path.insert(0, of[path[0]])
            depth[b, row] = len(path) - 1
            paths[b, row, : len(path)] = path
    longer = np.concatenate([table, np.zeros((len(parents), 1), np.int32)], axis=1)
    attend = functools.partial(dispatch.tree_attention_by_position, soft_cap=CAP)
    found = jax.jit(attend)(*arrays, paths, depth, longer)
    np.testing.assert_allclose(found, wanted_of_trees(), atol=1e-5)


# --- training -------------------------------------------------------------------------------------


def wanted_of_rows(arrays, segments, steps):
    q, k, v, *own = arrays
    outs = []
    for b in range(len(segments)):
        causal = np.tril(segments[b][:, None] == segments[b][None])
        sees = np.concatenate([causal, *[np.eye(LENGTH, dtype=bool)] * steps], axis=1)
        keys = jnp.concatenate([k[b], *(x[b] for x in own[0 : 2 * steps : 2])], axis=1)
        values = jnp.concatenate([v[b], *(x[b] for x in own[1 : 2 * steps : 2])], axis=1)
        keys, values = (jnp.repeat(x, 2, axis=0) for x in (keys, values))
        outs.append(softmax_over(q[b], keys, values, sees))
    return jnp.stack(outs)


def value_and_gradients(attend, arrays, segments):
    def loss(arrays):
        out = jnp.where(segments[:, None, :, None] > 0, attend(arrays, segments), 0.0)
        return (jnp.sin(3 * out) * jnp.arange(out.shape[-1])).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return [out, *gradients]


@functools.cache
def wanted_gradients(steps):
    arrays, segments = packed_case()
    attend = functools.partial(wanted_of_rows, steps=steps)
    return value_and_gradients(lambda a, _: attend(a, segments), arrays, segments)


capped_rows = functools.partial(attend_to_rows, window=None, options={"soft_cap": CAP})


@pytest.mark.parametrize("kernel", ["reference", "library:xla", "tpu:interpret"])
@pytest.mark.parametrize("steps", [0, STEPS])
def test_packed_rows_have_bounded_scores_and_their_gradient(kernel, steps):
    attend = functools.partial(capped_rows, steps=steps, kernel=kernel)
    close(value_and_gradients(attend, *packed_case()), wanted_gradients(steps))


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("attention, order", [("ring", "zigzag"), ("all_gather", "contiguous")])
@pytest.mark.parametrize("kernel", ["reference", "tpu:interpret"])
def test_rows_that_are_split_over_devices_have_them_too(attention, order, kernel):
    config = MeshConfig(cp=4, cp_order=order, cp_attention=attention)
    context = context_of(config, make_mesh(config))
    arrays, segments = packed_case()
    places = context.places(LENGTH)
    there = tuple(x[:, :, places] for x in arrays)
    put = jax.device_put(context.permute(segments), sharding.rows_sharding(context.mesh))
    attend = functools.partial(capped_rows, steps=STEPS, context=context, kernel=kernel)
    found = value_and_gradients(attend, there, put)
    back = np.argsort(places)
    close([np.asarray(x)[:, :, back] for x in found], wanted_gradients(STEPS))


# --- a model --------------------------------------------------------------------------------------


def generated(cfg, spec, **settings) -> list[list[int]]:
    config = EngineConfig(page_size=16, prefill_chunk=16, **settings)
    llm = LLM(tiny_model(cfg), spec, max_batch=2, max_len=64, engine=config)
    asked = SamplingParams(max_tokens=16, temperature=0.9, seed=5, ignore_eos=True)
    prompts = prompts_of(3, 64, seed=4, longest=20)
    return [output.samples[0].token_ids for output in llm.generate(prompts, asked)]


def test_a_model_with_a_soft_cap_gives_the_same_tokens_with_and_without_speculation():
    cfg = change_dense(tiny_config(layers=2), soft_cap=0.8, head_dim=16)
    plain = generated(cfg, None)
    assert generated(cfg, SpecConfig("2_1_3")) == plain
    assert plain != generated(change_dense(cfg, soft_cap=None), None), "the cap does something"


def test_layers_of_one_call_are_refused_a_soft_cap(cpu_kernels):
    cfg = change_dense(tiny_config(), hidden_size=32, intermediate_size=32, head_dim=16)
    cfg = cfg.running(attention="cpu", products="panels", scan_layers=False)
    assert dispatch.runs_layers(cfg)
    reason = dispatch.refuses("layers", "cpu", None, change_dense(cfg, soft_cap=30.0))
    assert "a soft-cap of 30.0" in reason


def test_no_family_writes_a_soft_cap():
    with pytest.raises(UnsupportedModelError, match="a soft_cap of 30.0"):
        FAMILIES.find("qwen3").write(tiny_config(soft_cap=30.0))


def test_a_soft_cap_is_above_0():
    with pytest.raises(ValueError, match="soft_cap must be above 0 or None, got 0.0"):
        Attention(4, 2, 8, soft_cap=0.0)
