"""`invariant=True`: a request gives the same bits with speculation and without it, by whichever
strategy a controller chooses, on whichever replica, and however often it is interrupted."""

import dataclasses
import functools

import numpy as np
import pytest
from scripted import Flips
from tiny import apt, tiny_config, tiny_model

from bench.programs import change_dense
from specjax import LLM, RunConfig, SamplingParams, SpecConfig
from specjax.control import ControlConfig
from specjax.decode.options import Features
from specjax.engine import runner
from specjax.engine.programs import Program
from specjax.engine.settings import EngineConfig
from specjax.verify.identity import random_requests

VOCAB, MAX_LEN, EOS = 64, 56, 7


@functools.cache
def model(dtype: str, layers: int):
    """Wide enough for rounding to bfloat16 to go the other way now and then."""
    cfg = tiny_config(
        VOCAB,
        mtp=layers,
        layers=layers,
        eos_token_ids=(EOS,),
        run=RunConfig(param_dtype=dtype, compute_dtype=dtype),
    )
    cfg = change_dense(cfg, hidden_size=96, intermediate_size=128, head_dim=32)
    cfg, params, head = tiny_model(cfg, seed=2, factor=4.0, embed_std=0.3)
    return cfg, params, apt(head, cfg)


def make_llm(dtype: str, strategy: str, layers=1, arms=(), config=None, **spec) -> LLM:
    spec = SpecConfig(strategy=strategy, **spec)
    # By XLA, whose bits depend on what stands beside: specjax's kernels for CPUs would hide it.
    by_xla = EngineConfig(products="xla", attention="reference", **(config or {}))
    control = ControlConfig(strategies=arms) if arms else None
    size = {"max_batch": 4, "max_len": MAX_LEN}
    return LLM(model(dtype, layers), spec, **size, engine=by_xla, control=control)


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
SLOW = [("bfloat16", "2x2", 2), ("float32", "3_1_4", 2), ("bfloat16", "6_4_16", 2)]


@pytest.mark.parametrize(
    ("dtype", "strategy", "layers"),
    FAST + [pytest.param(*s, marks=pytest.mark.slow) for s in SLOW],
)
def test_not_a_bit_depends_on_speculation_in_invariant_mode(dtype, strategy, layers):
    """`layers` of the policy, and modules of the head."""
    count = 8 if layers == 1 else 16
    assert differing(make_llm(dtype, strategy, layers, invariant=True), count) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "count", "layers"), [("float32", 8, 1), ("bfloat16", 48, 2)])
def test_bits_do_depend_on_it_without_invariant_mode(dtype, count, layers):
    """Else the test above would prove nothing. In bfloat16 rounding hides most of it."""
    assert differing(make_llm(dtype, "2x2", layers), count)[1] > 0


# --- several strategies ----------------------------------------------------------------------


def told_by(llm: LLM, order, **changes) -> dict:
    """Tokens and both kinds of log-probabilities of the samples of some requests, by number."""
    prompts, params = requests(8)
    for i in range(0, 8, 3):  # they are read in several pieces
        prompts[i] = (prompts[i] * 20)[:20]
        params[i] = dataclasses.replace(params[i], max_tokens=36, min_tokens=0)
    outputs = llm.generate(
        [prompts[i] for i in order], [dataclasses.replace(params[i], **changes) for i in order]
    )
    return {
        i: [(s.token_ids, s.logprobs, s.transformed_logprobs) for s in output.samples]
        for i, output in zip(order, outputs, strict=True)
    }


def restless_llm(dtype: str, layers: int, arms) -> LLM:
    """In `invariant` mode, with small pages and too few of them for four long samples."""
    drafting = [arm for arm in arms if arm != "off"]
    small = {"page_size": 16, "chunk_tokens": 8, "stretch": 1, "prefill_chunk": 64}
    page = make_llm(dtype, drafting[-1], layers, arms, small).engine.runner.page_bytes
    small["cache_bytes"] = 10 * page
    llm = make_llm(dtype, drafting[-1], layers, arms, small, invariant=True)
    llm.engine.warm_up([Features.all()])
    return llm


FEW = ("off", "1_1_2", "3_2_6")


@pytest.mark.parametrize(
    ("dtype", "arms", "layers"),
    [
        ("float32", FEW, 1),
        pytest.param("bfloat16", ("2x2", "4x2x1", "off"), 2, marks=pytest.mark.slow),
    ],
)
def test_not_a_bit_depends_on_who_chooses_which_strategy_in_invariant_mode(dtype, arms, layers):
    """Nor on who is preempted, on how many prompts are read at once, or on who runs beside whom."""
    llm = restless_llm(dtype, layers, arms)
    everything, accepted = range(8), []

    def ran(names, order=everything, **more) -> dict:
        llm.engine.controller = Flips(arms, names)
        found = told_by(llm, order, **more)
        accepted.append(llm.totals.accepted)
        return found

    first = ran(arms)
    assert llm.engine.preemptions > 0
    assert ran(arms[::-1], order=everything[::-1]) == first
    for arm in arms:
        assert ran([arm]) == first, arm
    of_arm = dict(zip(arms, accepted[2:], strict=True))
    assert of_arm.pop("off") == 0 and min(of_arm.values()) > 30 and len(set(accepted)) > len(arms)
    assert told_by(llm, everything[::-1], speculative=False) == first
    before = llm.engine.preemptions
    for i in everything:
        assert ran(arms, order=[i]) == {i: first[i]}
    assert llm.engine.preemptions == before
    chunks = [key for key in llm.engine.runner.executables.by_key if key[0] == "chunk"]
    assert len(chunks) == 1


@pytest.mark.slow
def test_bits_do_depend_on_the_strategy_where_each_runs_its_own_program(monkeypatch):
    """Else the test above would prove nothing."""

    def apart(plans, most_rows):
        return {name: Program(name, plan) for name, plan in plans.items()}

    monkeypatch.setattr(runner, "programs_of", apart)
    arms = ("off", "2x2")
    llm = make_llm("float32", "2x2", 1, arms, invariant=True)
    found = []
    for arm in arms:
        llm.engine.controller = Flips(arms, [arm])
        found.append(told_by(llm, range(8)))
    tokens = [[[s[0] for s in request] for request in run.values()] for run in found]
    assert tokens[0] == tokens[1]
    assert found[0] != found[1]


@pytest.mark.slow
def test_not_a_bit_of_plain_decoding_depends_on_who_runs_beside_whom_in_invariant_mode():
    llm = make_llm("float32", "off", invariant=True)
    assert llm.engine.spec is None and llm.engine.buckets == [4]
    together = told_by(llm, range(8))
    assert together == told_by(llm, range(8)[::-1])
    assert together == {i: told_by(llm, [i])[i] for i in range(8)}
