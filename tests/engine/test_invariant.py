"""`invariant=True`: a request gives the same bits with speculation and without it."""

import dataclasses
import functools

import numpy as np
import pytest
from tiny import apt, tiny_config, tiny_model

from specjax import LLM, SamplingParams, SpecConfig
from specjax.engine.settings import EngineConfig
from specjax.verify.requests import random_requests

VOCAB, MAX_LEN, EOS = 64, 56, 7


@functools.cache
def model(dtype: str, layers: int):
    """Wide enough for rounding to bfloat16 to go the other way now and then."""
    cfg = tiny_config(
        VOCAB,
        mtp=layers,
        layers=layers,
        eos_token_ids=(EOS,),
        param_dtype=dtype,
        compute_dtype=dtype,
    )
    cfg = cfg.replace(hidden_size=96, intermediate_size=128, head_dim=32)
    cfg, params, head = tiny_model(cfg, seed=2, factor=4.0, embed_std=0.3)
    return cfg, params, apt(head, cfg)


def make_llm(dtype: str, strategy: str, layers=1, **spec) -> LLM:
    spec = SpecConfig(strategy=strategy, **spec)
    # By XLA, whose bits depend on what stands beside: specjax's kernels for CPUs would hide it.
    by_xla = EngineConfig(products="xla", attention="reference")
    return LLM(model(dtype, layers), spec, max_batch=4, max_len=MAX_LEN, engine=by_xla)


def requests(count: int):
    rng = np.random.default_rng(5)
    prompts, params = random_requests(rng, model("float32", 1)[0], count, max_tokens=40)
    for i in range(0, count, 2):  # every other one asks for nothing
        params[i] = SamplingParams(max_tokens=40, ignore_eos=True, seed=i)
    return prompts, [dataclasses.replace(p, transformed_logprobs=True) for p in params]


def differing(llm: LLM, count: int = 16) -> tuple[int, int]:
    """Samples that differ in a token, and in the last bit of a logprob, when nothing is drafted.

    The two runs see their requests in another order, and so in other slots beside others.
    """
    prompts, params = requests(count)
    drafted = llm.generate(prompts, params)
    accepted = llm.totals.accepted
    order = np.random.default_rng(0).permutation(count)
    plainly = llm.generate(
        [prompts[i] for i in order],
        [dataclasses.replace(params[i], speculative=False) for i in order],
    )
    assert accepted > 50, "too little was accepted to prove anything"
    assert llm.totals.accepted == 0, "speculative=False must accept nothing"
    tokens = bits = 0
    for place, i in enumerate(order):
        for a, b in zip(drafted[i].samples, plainly[place].samples, strict=True):
            tokens += a.token_ids != b.token_ids
            bits += a.logprobs != b.logprobs or a.transformed_logprobs != b.transformed_logprobs
    return tokens, bits


FAST = [("float32", "2x2", 1)]
SLOW = [
    ("bfloat16", "2x2", 2), ("bfloat16", "3_2_5", 2), ("float32", "2x2", 2),
    ("bfloat16", "3_1_4", 2), ("float32", "3_1_4", 2), ("float32", "3_2_5", 2),
    ("bfloat16", "4x2x1", 2), ("bfloat16", "7_1_8", 2), ("bfloat16", "6_4_16", 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "strategy", "layers"),
    FAST + [pytest.param(*s, marks=pytest.mark.slow) for s in SLOW],
)
def test_not_a_bit_depends_on_speculation_in_invariant_mode(dtype, strategy, layers):
    """`layers` of the policy, and modules of the head."""
    count = 8 if layers == 1 else 16
    assert differing(make_llm(dtype, strategy, layers, invariant=True), count) == (0, 0)


@pytest.mark.parametrize(
    ("dtype", "count", "layers"),
    [("float32", 8, 1)]
    + [pytest.param(*c, marks=pytest.mark.slow) for c in [("float32", 16, 2), ("bfloat16", 48, 2)]],
)
def test_bits_do_depend_on_it_without_invariant_mode(dtype, count, layers):
    """Else the test above would prove nothing. In bfloat16 rounding hides most of it."""
    assert differing(make_llm(dtype, "2x2", layers), count)[1] > 0
