"""Windows, sinks and soft-caps: every attention against a softmax over keys listed one by one."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import prompts_of, tiny_config, tiny_model

from bench.programs import change_dense
from specjax import LLM, SamplingParams, SpecConfig
from specjax.decode.tree import ancestors, pack_bits
from specjax.engine.settings import EngineConfig
from specjax.kernels import dispatch
from specjax.parallel import sharding
from specjax.parallel.context import context_of
from specjax.parallel.sharding import MeshConfig, make_mesh

HEAD = 128  # that splash attention takes, and every kernel
WINDOWS = [1, 30, 1000]
CAP = 1.5  # the scores of the cases have a standard deviation of 1
KERNELS = [
    "reference",
    "library:xla",
    "tests.kernels.interpreted:TPU",
    "tests.kernels.interpreted:TRITON",
]  # not the CPU's


def softmax_over(q, keys, values, sees, sinks=None, cap=None, xp=np):
    """Attention [N T H] of queries over keys [N S H]; `sees` [T S] says which. By numpy, or jax."""
    scores = xp.einsum("nth,nsh->nts", q, keys) * q.shape[-1] ** -0.5
    if cap is not None:
        scores = cap * xp.tanh(scores / cap)
    weights = xp.where(sees, xp.exp(scores), 0.0)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + xp.exp(sinks)[:, None, None]
    return xp.einsum("nts,nsh->nth", weights / total, values)


# --- decoding -------------------------------------------------------------------------------------

BATCH, KV_HEADS, GROUP, ROWS, SIZE, PREFIXES = 3, 2, 2, 7, 16, (0, 21, 40)
SINKS = np.linspace(-1, 2, KV_HEADS * GROUP, dtype=np.float32)


@functools.cache
def tree_case(before=0):
    """Trees that differ, behind prefixes in pages; queries of all but the first `before` rows."""
    rng = np.random.default_rng(4)
    nodes = before + ROWS
    parents = [[0, *(int(rng.integers(max(r - 3, 0), r)) for r in range(1, nodes))] for _ in "abc"]
    table = (rng.permutation(BATCH * 3).reshape(BATCH, 3) + 1).astype(np.int32)
    pages = rng.normal(size=(2, 1 + BATCH * 3, KV_HEADS, SIZE, HEAD)).astype(np.float32)
    q = rng.normal(size=(BATCH, KV_HEADS * GROUP, ROWS, HEAD)).astype(np.float32)
    k, v = rng.normal(size=(2, BATCH, KV_HEADS, nodes, HEAD)).astype(np.float32)
    return parents, (*map(jnp.asarray, (q, k, v, *pages)), np.array(PREFIXES, np.int32)), table


@functools.cache
def wanted_of_trees(window, before=0, with_sinks=False, cap=None):
    """Each row by itself: its position is the prefix and its depth, and so is an ancestor's."""
    parents, arrays, table = tree_case(before)
    q, k, v, k_pages, v_pages, prefixes = map(np.asarray, arrays)
    sinks = SINKS if with_sinks else None
    out = np.zeros(q.shape, np.float32)
    for b, prefix in enumerate(prefixes):
        for t in range(ROWS):
            path = [before + t]
            while path[-1] != 0:
                path.append(parents[b][path[-1]])
            own = prefix + len(path) - 1
            cached = [p for p in range(prefix) if p > own - window]
            drafted = [row for up, row in enumerate(path) if up < window]
            keys, values = (
                np.concatenate(
                    [
                        *(pages[table[b, p // SIZE], :, [p % SIZE]] for p in cached),
                        *(tree[b, :, [row]] for row in drafted),
                    ]
                ).swapaxes(0, 1)
                for pages, tree in ((k_pages, k), (v_pages, v))
            )
            keys, values = (np.repeat(x, GROUP, axis=0) for x in (keys, values))
            sees = np.ones((1, keys.shape[1]), bool)
            query = q[b, :, [t]].swapaxes(0, 1)
            out[b, :, t] = softmax_over(query, keys, values, sees, sinks, cap)[:, 0]
    return out


def bits_of(parents, before=0):
    return np.stack([pack_bits(ancestors(np.array(p))) for p in parents])[:, before:]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window, before, sinks, cap", [
    *((window, 0, False, None) for window in WINDOWS),
    (2, 4, False, None),
    (3, 0, True, None),
    (1000, 0, False, CAP),
])  # fmt: skip
def test_rows_of_trees_see_what_they_should(kernel, window, before, sinks, cap):
    """Where a kernel has no soft-cap the reference attends."""
    parents, arrays, table = tree_case(before)
    attend = functools.partial(
        dispatch.tree_attention, kernel=kernel, window=window, soft_cap=cap,
        sinks=SINKS if sinks else None,
    )  # fmt: skip
    found = jax.jit(attend)(*arrays, bits_of(parents, before), table)
    np.testing.assert_allclose(found, wanted_of_trees(window, before, sinks, cap), atol=1e-5)


@pytest.mark.parametrize("window, sinks, cap", [
    *((window, False, None) for window in WINDOWS),
    (3, True, None),
    (1000, False, CAP),
])  # fmt: skip
def test_rows_that_attend_by_position_see_the_same(window, sinks, cap):
    parents, (q, k, v, k_pages, v_pages, prefix), table = tree_case()
    depth = np.zeros((BATCH, ROWS), np.int32)
    path_rows = np.zeros((BATCH, ROWS, ROWS), np.int32)
    for b, of in enumerate(parents):
        for row in range(ROWS):
            path = [row]
            while path[0] != 0:
                path.insert(0, of[path[0]])
            depth[b, row] = len(path) - 1
            path_rows[b, row, : len(path)] = path
    # Room for a path behind every prefix: one more page each, of the pool's first.
    longer = np.concatenate([table, np.zeros((BATCH, 1), np.int32)], axis=1)
    arrays = q, k, v, k_pages, v_pages, prefix, path_rows, depth, longer
    attend = functools.partial(
        dispatch.tree_attention_by_position, window=window, soft_cap=cap,
        sinks=SINKS if sinks else None,
    )  # fmt: skip
    wanted = wanted_of_trees(window, 0, sinks, cap)
    np.testing.assert_allclose(jax.jit(attend)(*arrays), wanted, atol=1e-5)


def test_a_kernel_without_windows_says_so_once_and_the_reference_attends(caplog, cpu_kernels):
    caplog.set_level(logging.INFO)
    dispatch._log_declined.cache_clear()
    parents, arrays, table = tree_case()
    for _ in range(2):
        dispatch.tree_attention(*arrays, bits_of(parents), table, window=5, kernel="cpu")
    dispatch.tree_attention(*arrays, bits_of(parents), table, kernel="cpu")
    said = [r.getMessage() for r in caplog.records if "tree_attention" in r.getMessage()]
    assert said == ["tree_attention by reference, not by cpu: it has no window"]


# --- training -------------------------------------------------------------------------------------

LENGTH, STEPS = 32, 2


@functools.cache
def packed_case(sinks=False):
    """Queries, keys, values, own rows of two later steps, and segments with padding."""
    rng = np.random.default_rng(1)
    q = rng.normal(size=(2, 4, LENGTH, HEAD)).astype(np.float32)
    rest = rng.normal(size=(2 + 2 * STEPS, 2, 2, LENGTH, HEAD)).astype(np.float32)
    segments = np.zeros((2, LENGTH), np.int32)
    for row, lengths in zip(segments, [(3, 17, 7), (1, 30)], strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return (q, *rest, jnp.asarray(SINKS) if sinks else None), segments


def wanted_of_rows(arrays, segments, window, steps, cap):
    """A query of step s at place t is at position t + s, its own row of step j at t + j."""
    q, k, v, *own, sinks = arrays
    outs = []
    for b in range(len(segments)):
        sees = np.zeros((LENGTH, LENGTH * (1 + steps)), bool)
        for t in range(LENGTH):
            for u in range(t + 1):
                near = t + steps - u < window
                sees[t, u] = near and segments[b, u] == segments[b, t]
            for j in range(1, steps + 1):
                sees[t, j * LENGTH + t] = steps - j < window
        keys = jnp.concatenate([k[b], *(x[b] for x in own[0 : 2 * steps : 2])], axis=1)
        values = jnp.concatenate([v[b], *(x[b] for x in own[1 : 2 * steps : 2])], axis=1)
        keys, values = (jnp.repeat(x, 2, axis=0) for x in (keys, values))
        outs.append(softmax_over(q[b], keys, values, sees, sinks, cap, xp=jnp))
    return jnp.stack(outs)


def attend_to_rows(arrays, segments, window, steps, cap, context=None, kernel="reference"):
    q, k, v, *own, sinks = arrays
    options = {"window": window, "kernel": kernel, "soft_cap": cap, "sinks": sinks}
    if not steps:
        return dispatch.causal_attention(q, k, v, segments, context, **options)
    pairs = list(zip(own[0 : 2 * steps : 2], own[1 : 2 * steps : 2], strict=True))
    return dispatch.causal_attention_with_own(q, k, v, pairs, segments, context, **options)


def value_and_gradients(attend, arrays, segments):
    """Of what stands at tokens: padding may attend to anything."""

    def loss(arrays):
        out = jnp.where(segments[:, None, :, None] > 0, attend(arrays, segments), 0.0)
        return (jnp.sin(3 * out) * jnp.arange(HEAD)).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return [out, *gradients]


@functools.cache
def wanted_gradients(window, steps, cap, sinks):
    attend = functools.partial(wanted_of_rows, window=window, steps=steps, cap=cap)
    arrays, segments = packed_case(sinks)
    return value_and_gradients(lambda a, _: attend(a, segments), arrays, segments)


def close(found, wanted):
    found, wanted = ([x for x in arrays if x is not None] for arrays in (found, wanted))
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-3)


# Steps of own rows beside it: a window of 1 leaves nothing of the base rows.
ROW_CASES = [
    (1, 0, None, False), (4, 0, None, False), (1, 2, None, False), (5, 2, None, False),
    (1000, 2, CAP, False), (4, 0, None, True), (5, 2, None, True),
]  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window, steps, cap, sinks", ROW_CASES)
def test_packed_rows_and_their_gradients_see_what_they_should(kernel, window, steps, cap, sinks):
    attend = functools.partial(attend_to_rows, window=window, steps=steps, cap=cap, kernel=kernel)
    found = value_and_gradients(attend, *packed_case(sinks))
    close(found, wanted_gradients(window, steps, cap, sinks))


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("window, steps, cap, sinks", ROW_CASES)
def test_rows_that_are_split_over_devices_see_the_same(window, steps, cap, sinks):
    config = MeshConfig(cp=4)
    context = context_of(config, make_mesh(config))
    (*arrays, of_heads), segments = packed_case(sinks)
    places = context.places(LENGTH)
    there = (*(x[:, :, places] for x in arrays), of_heads)
    put = jax.device_put(context.permute(segments), sharding.rows_sharding(context.mesh))
    attend = functools.partial(attend_to_rows, window=window, steps=steps, cap=cap, context=context)
    found = value_and_gradients(attend, there, put)
    back = np.argsort(places)
    found = [x if x is None or x.ndim == 1 else np.asarray(x)[:, :, back] for x in found]
    close(found, wanted_gradients(window, steps, cap, sinks))


# --- a model --------------------------------------------------------------------------------------


def generated(cfg, spec) -> list[list[int]]:
    config = EngineConfig(page_size=16, prefill_chunk=16)
    llm = LLM(tiny_model(cfg), spec, max_batch=2, max_len=64, engine=config)
    asked = SamplingParams(max_tokens=16, temperature=0.9, seed=5, ignore_eos=True)
    prompts = prompts_of(3, 64, seed=4, longest=20)
    return [output.samples[0].token_ids for output in llm.generate(prompts, asked)]


@pytest.mark.slow
def test_a_model_with_a_soft_cap_gives_the_same_tokens_with_and_without_speculation():
    cfg = change_dense(tiny_config(layers=2), soft_cap=0.8, head_dim=16)
    plain = generated(cfg, None)
    assert generated(cfg, SpecConfig("2_1_3")) == plain
    assert plain != generated(change_dense(cfg, soft_cap=None), None), "the cap does something"
