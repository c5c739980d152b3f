"""Decoding on a mesh: the vocabulary stays split, and the tokens are those of one device.

The slots are split over `data`, heads, feed-forward and vocabulary over `tp`.
"""

import functools
import re

import jax
import numpy as np
import pytest
from tiny import apt, tiny_config, tiny_model

from bench.programs import alone, change_dense
from specjax import LLM, SamplingParams, SpecConfig
from specjax.decode import shards
from specjax.decode.chunk import Until
from specjax.decode.options import Features
from specjax.decode.state import RowMap
from specjax.engine.compare import first_differences
from specjax.engine.request import make_jobs
from specjax.parallel.sharding import MeshConfig, make_mesh
from specjax.verify.identity import random_requests

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

VOCAB, MAX_LEN, BATCH = 344, 48, 8  # a vocabulary that is the size of nothing else
LAYOUTS = [(data, 8 // data) for data in (1, 2, 4, 8)]


@functools.cache
def model():
    """Eight heads of either kind, so that every layout splits them."""
    cfg = change_dense(tiny_config(VOCAB, eos_token_ids=(7,)), num_heads=8, num_kv_heads=8)
    cfg, params, head = tiny_model(cfg, seed=1)
    return cfg, params, apt(head, cfg)


def llm_on(data: int, tp: int, spec: SpecConfig | None) -> LLM:
    place = make_mesh(MeshConfig(data=data, tp=tp))
    return LLM(model(), spec, max_batch=BATCH, max_len=MAX_LEN, mesh=place)


@functools.cache
def chain_on_8() -> LLM:
    return llm_on(2, 4, SpecConfig("1_1_2"))


# --- what the compiled program holds --------------------------------------------------------------


def chunk_text(llm: LLM, features: Features) -> str:
    """The optimised program of a chunk, as each device runs it."""
    runner = llm.engine.runner
    if runner.state is None:
        runner.reset()
    [strategy] = runner.plans
    table = np.zeros((BATCH, runner.table_width), np.int32)
    rows = RowMap(np.arange(BATCH, dtype=np.int32), np.zeros(BATCH, bool), table)
    runner.chunk(strategy, features, alone(runner, rows), Until.of(0))
    return runner.executables.by_key["chunk", strategy, BATCH, features].as_text()


def rows_in(text: str, width: int = VOCAB) -> set[str]:
    """Arrays of a program with so many numbers along their last axis."""
    return set(re.findall(rf"\w+\[(?:\d+,)*{width}\]", text))


def gathered(text: str, width: int = VOCAB) -> list[str]:
    """The same, as far as they are put together from what several devices hold."""
    exchange = re.compile(r"= (.*?) (?:all-gather|all-to-all|collective-permute)(?:-start)?\(")
    made = [match.group(1) for match in map(exchange.search, text.splitlines()) if match]
    return [shape for shape in made if rows_in(shape, width)]


@pytest.mark.slow
def test_no_device_ever_holds_a_row_of_logits_or_of_noise():
    text = chunk_text(chain_on_8(), Features())
    assert rows_in(text, VOCAB // 4)
    assert not rows_in(text)


@pytest.mark.slow
def test_without_operations_on_shards_rows_are_gathered(monkeypatch):
    """The partitioner left alone gathers what it has to sort."""
    monkeypatch.setattr(shards, "ways", lambda vocab: 1)
    assert gathered(chunk_text(llm_on(1, 4, None), Features(top_logprobs=True)))


# --- tokens ---------------------------------------------------------------------------------------


@functools.cache
def requests(everything: bool):
    """Greedy and sampled; with `everything`, every option, and some end at a stop token."""
    rng = np.random.default_rng(5)
    prompts, params = random_requests(rng, model()[0], 16, 24)
    if not everything:
        params = [
            SamplingParams(temperature=p.temperature, seed=p.seed, max_tokens=24, ignore_eos=True)
            for p in params
        ]
    return [
        job
        for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True))
        for job in make_jobs(prompt, sampling, (7,), None, i)
    ]


@functools.cache
def expected(everything: bool):
    """By plain decoding on one device."""
    llm = LLM((*model()[:2], None), None, max_batch=BATCH, max_len=MAX_LEN)
    return [sample.token_ids for sample in llm.engine.generate(requests(everything))[0]]


def check(llm: LLM, everything: bool):
    """All samples, against one device; what they took."""
    samples, totals = llm.engine.generate(requests(everything))
    found = first_differences(
        llm.engine.runner,
        requests(everything),
        expected(everything),
        [sample.token_ids for sample in samples],
    )
    assert all(d.explained for d in found), "\n".join(map(str, found))
    assert len(found) < 3, "so many ties are no accident"
    assert totals.tokens > 300
    return totals


def test_a_chain_on_8_devices_emits_the_tokens_of_one():
    llm = chain_on_8()
    totals = check(llm, everything=False)
    assert totals.accepted > 20
    held = llm.engine.runner.weights.policy["lm_head"].addressable_shards[0].data.shape
    assert held == (16, VOCAB // 4)


@pytest.mark.slow
def test_plain_decoding_by_tp_8_emits_the_tokens_of_one_device():
    llm = LLM(model(), None, max_batch=BATCH, max_len=MAX_LEN, tp=8)
    check(llm, everything=False)
    text = chunk_text(llm, Features())
    assert rows_in(text, VOCAB // 8) and not rows_in(text)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["off", "4_1_5", "4x2x1", "6_4_16"])
@pytest.mark.parametrize(("data", "tp"), LAYOUTS)
def test_every_layout_emits_the_tokens_of_one_device(data, tp, strategy):
    spec = None if strategy == "off" else SpecConfig(strategy)
    totals = check(llm_on(data, tp, spec), everything=True)
    assert spec is None or totals.accepted > 20
