"""Mixtures of experts decode as plain decoding does, and read the experts that rows choose."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import apt, prompts_of, sharpened

from specjax import LLM, SamplingParams, SpecConfig
from specjax.config import ModelConfig
from specjax.config.model import Layer
from specjax.decode.tree import chain_bits
from specjax.drafts.mtp import init_head_params
from specjax.engine.compare import first_difference
from specjax.engine.request import make_jobs
from specjax.engine.settings import EngineConfig
from specjax.interfaces import Room, Where
from specjax.memory import empty
from specjax.models.mixers.attention import Attention
from specjax.models.mlps.dense import Dense
from specjax.models.mlps.moe import Mixture
from specjax.models.transformer import graphdef, init_params, unroll_layers
from specjax.verify.identity import random_requests

VOCAB, MAX_LEN = 64, 96


def config(experts=8, width=24):
    layer = Layer(Attention(4, 2, 8, qk_norm=True), Mixture(experts, 2, width))
    return ModelConfig(
        vocab_size=VOCAB, hidden_size=16, layers=(layer,) * 2, tie_embeddings=False,
        model_type="qwen3_moe", max_position=512, mtp_num_layers=1,
    )  # fmt: skip


@functools.cache
def model():
    cfg = config()
    params = sharpened(init_params(cfg, 3), 10.0, 0.7)
    return cfg, params, apt(sharpened(init_head_params(cfg, 4), 10.0, 0.7), cfg)


def llm_of(spec=None, **engine):
    return LLM(model(), spec, max_batch=8, max_len=MAX_LEN, engine=EngineConfig(**engine))


def compared(spec: SpecConfig, count: int, **engine) -> int:
    """Asserts that samples are those of plain decoding; returns the number of their tokens."""
    llm = llm_of(spec, **engine)
    prompts, params = random_requests(np.random.default_rng(5), model()[0], count, 40)
    outputs = llm.generate(prompts, params)  # of several samples, which share their prompts' pages
    jobs = [
        job
        for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True))
        for job in make_jobs(prompt, sampling, (), None, i)
    ]
    samples = [sample for output in outputs for sample in output.samples]
    differences = llm.compare_samples(jobs, samples)
    wrong = [d for d in differences if spec.invariant or not d.explained]
    assert not wrong, "\n".join(map(str, wrong))
    assert sum(sample.stats.accepted for sample in samples) > count
    if "cache_bytes" in engine:
        assert llm.engine.preemptions > 0
    return sum(len(sample.token_ids) for sample in samples)


SMALL = {
    "cache_bytes": 50_000,
    "page_size": 16,
    "chunk_tokens": 8,
    "stretch": 1,
}  # samples are preempted


@pytest.mark.parametrize(
    ("strategy", "invariant", "engine"),
    [("2x2", False, SMALL), ("3_2_6", True, {}), ("4_1_5", False, {})],
)
def test_tokens_of_a_mixture_are_those_of_plain_decoding(strategy, invariant, engine):
    compared(SpecConfig(strategy, invariant=invariant), 20, **engine)


@pytest.mark.slow
def test_50_000_tokens_of_a_mixture_are_those_of_plain_decoding():
    assert compared(SpecConfig("2x2"), 1500) > 50_000


# --- verdicts ------------------------------------------------------------------------------------


def changed_routers(change):
    cfg, params, head = model()

    def one(path, array):
        return jnp.asarray(change(np.array(array))) if path[-1].key == "router" else array

    return cfg, jax.tree_util.tree_map_with_path(one, params), head


def twins(router):
    """Four experts each have one router: ties, which the first two of them win."""
    return np.repeat(router[..., ::4], 4, axis=-1)


def nudged(router, by=1e-6):
    """The last two of four experts win."""
    router = twins(router)
    router[..., np.arange(8) % 4 < 2] *= 1 - by
    return router


@pytest.mark.parametrize("by", [1e-6, 0.1])
def test_an_expert_that_flips_at_a_near_tie_is_told_from_a_wrong_rule(by):
    spec = SpecConfig("2x2")
    plain, drafted = (
        LLM(changed_routers(change), spec, max_batch=8, max_len=MAX_LEN)
        for change in (functools.partial(nudged, by=by), twins)
    )
    asked = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
    prompt = prompts_of(1, VOCAB, seed=2, shortest=5)[0]
    [job] = make_jobs(prompt, asked, (), None, 0)
    one, other = (llm.generate([prompt], asked)[0].samples[0] for llm in (plain, drafted))
    assert one.token_ids != other.token_ids
    runner = plain.engine.runner
    difference = first_difference(runner, job, one, other)
    assert difference.flip is not None and difference.explained == (by < 1e-3)
    assert "near-tie" in str(difference) if by < 1e-3 else "no tie" in str(difference)
    unknown = dataclasses.replace(one, records=None)
    assert not first_difference(runner, job, unknown, other).explained


# --- what is read --------------------------------------------------------------------------------


def test_a_round_of_few_rows_reads_the_experts_that_they_choose_and_no_others():
    """Bytes of the compiled program, with 16 times as many experts."""

    def program(experts):
        cfg = config(experts, width=512).running(scan_layers=False)
        params = jax.eval_shape(lambda: unroll_layers(init_params(cfg), cfg))
        memory = jax.eval_shape(lambda: empty(cfg, Room(slots=1, pages=1, page_size=32)))

        def round_of_5(params, tokens, memory):
            where = Where(
                "tree", jnp.arange(5)[None], prefix=jnp.zeros(1, int), visible=chain_bits(5)
            )
            return nnx.merge(graphdef(cfg, "unrolled"), params).decode(tokens, where, memory).x

        shape = jax.ShapeDtypeStruct((1, 5), jnp.int32)
        return jax.jit(round_of_5).lower(params, shape, memory).compile()

    few, many = program(16), program(256)
    expert = 3 * 16 * 512 * 4  # bytes of all matrices of one
    read = [one.cost_analysis()["bytes accessed"] for one in (few, many)]
    kept = [one.memory_analysis().temp_size_in_bytes for one in (few, many)]
    assert read[1] - read[0] < 4 * expert and read[0] < 10 * 2 * 2 * expert
    assert kept[1] - kept[0] < expert


def test_a_shared_expert_is_added_as_much_as_its_gate_says():
    gated = Mixture(8, 2, 24, shared_size=16, shared_gate=True)
    rng, rows = np.random.default_rng(3), gated.params(16)
    w = {name: jnp.asarray(rng.normal(size=row.shape), jnp.float32) for name, row in rows.items()}
    x, where = (
        jnp.asarray(rng.normal(size=(1, 6, 16)), jnp.float32),
        Where("tree", jnp.arange(6)[None]),
    )
    alone = dataclasses.replace(gated, shared_size=0, shared_gate=False).run(w, x, where)[0]
    shared = Dense(16).run({name: w[f"shared_{name}"] for name in ("gate", "up", "down")}, x)[0]
    wanted = alone + jax.nn.sigmoid(x @ w["shared_weight"]) * shared
    np.testing.assert_allclose(gated.run(w, x, where)[0], wanted, rtol=1e-4, atol=1e-4)
