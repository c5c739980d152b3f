"""Decoding on a mesh: the vocabulary stays split, and the tokens are those of one device.

The slots are split over `data`, heads, feed-forward and vocabulary over `tp`.
"""

import functools
import re

import jax
import numpy as np
import pytest
from tiny import apt, tiny_config, tiny_model

from specjax import LLM, SamplingParams, SpecConfig
from specjax.decode import shards
from specjax.decode.options import Features
from specjax.engine.compare import first_difference
from specjax.engine.request import make_jobs
from specjax.sharding import MeshConfig, make_mesh
from specjax.verify.requests import random_requests

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

VOCAB, MAX_LEN, BATCH = 344, 48, 8  # a vocabulary that is the size of nothing else
LAYOUTS = [(data, 8 // data) for data in (1, 2, 4, 8)]


@functools.cache
def model(heads=8):
    """Eight heads of either kind, so that every layout splits them."""
    cfg = tiny_config(VOCAB, eos_token_ids=(7,)).replace(num_heads=heads, num_kv_heads=heads)
    cfg, params, head = tiny_model(cfg, seed=1)
    return cfg, params, apt(head, cfg)


def llm_on(data: int, tp: int, spec: SpecConfig | None) -> LLM:
    place = make_mesh(MeshConfig(data=data, tp=tp))
    return LLM(model(), spec, max_batch=BATCH, max_len=MAX_LEN, mesh=place)


# --- what the compiled program holds --------------------------------------------------------------


def chunk_text(llm: LLM, features: Features) -> str:
    """The optimised program of a chunk, as each device runs it."""
    runner = llm.engine.runner
    runner.reset() if runner.state is None else None
    [strategy] = runner.plans
    slots, table = np.arange(BATCH), np.zeros((BATCH, runner.table_width), np.int32)
    runner.chunk(strategy, features, slots, np.zeros(BATCH, bool), table, rounds=0)
    return runner.executables["chunk", strategy, BATCH, features].as_text()


def whole_rows(text: str) -> set[str]:
    """Arrays of a program whose last axis is the whole vocabulary."""
    return set(re.findall(rf"\w+\[(?:\d+,)*{VOCAB}\]", text))


def gathered_rows(text: str) -> list[str]:
    """The same, as far as they are made by exchanging parts."""
    exchange = re.compile(r"= (.*?) (?:all-gather|all-to-all|collective-permute)(?:-start)?\(")
    made = [match.group(1) for match in map(exchange.search, text.splitlines()) if match]
    return [shape for shape in made if whole_rows(shape)]


@pytest.mark.parametrize(
    ("tp", "strategy"),
    [(4, "4_1_5"), pytest.param(2, "6_4_16", marks=pytest.mark.slow)],
)
def test_no_device_ever_holds_a_row_of_logits_or_noise(tp, strategy):
    text = chunk_text(llm_on(1, tp, SpecConfig(strategy)), Features())
    assert f",{VOCAB // tp}]" in text
    assert not whole_rows(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mode"), [("off", "coupled"), ("4_1_5", "block"), ("4x2x1", "recursive")]
)
def test_no_option_and_no_rule_gathers_the_vocabulary(strategy, mode):
    spec = None if strategy == "off" else SpecConfig(strategy, acceptance=mode, telemetry=True)
    assert not gathered_rows(chunk_text(llm_on(2, 4, spec), Features.all()))


@pytest.mark.slow
def test_without_the_operations_on_shards_rows_are_gathered(monkeypatch):
    monkeypatch.setattr(shards, "ways", lambda vocab: 1)
    assert gathered_rows(chunk_text(llm_on(1, 4, SpecConfig("4_1_5")), Features()))


# --- tokens ---------------------------------------------------------------------------------------


@functools.cache
def requests():
    """Every sampling option, greedy and sampled; some end at a stop token."""
    prompts, params = random_requests(np.random.default_rng(5), model()[0], 16, 24)
    return [
        job
        for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True))
        for job in make_jobs(prompt, sampling, (7,), None, i)
    ]


@functools.cache
def expected():
    """By plain decoding on one device."""
    llm = LLM((*model()[:2], None), None, max_batch=BATCH, max_len=MAX_LEN)
    return [sample.token_ids for sample in llm.engine.generate(requests())[0]]


@pytest.mark.parametrize(
    ("data", "tp", "strategy"),
    [
        (2, 4, "4_1_5"),
        pytest.param(1, 8, "6_4_16", marks=pytest.mark.slow),
        *(
            pytest.param(data, tp, strategy, marks=pytest.mark.slow)
            for data, tp in LAYOUTS
            for strategy in ("off", "4_1_5", "4x2x1", "6_4_16")
            if (data, tp, strategy) not in [(2, 4, "4_1_5"), (1, 8, "6_4_16")]
        ),
    ],
)
def test_every_layout_emits_the_tokens_of_one_device(data, tp, strategy):
    llm = llm_on(data, tp, None if strategy == "off" else SpecConfig(strategy))
    samples, totals = llm.engine.generate(requests())
    found = [
        first_difference(llm.engine.runner, job.request, job.sample, job, one, several.token_ids)
        for job, one, several in zip(requests(), expected(), samples, strict=True)
        if one != several.token_ids
    ]
    assert all(d.explained for d in found), "\n".join(map(str, found))
    assert len(found) < 3, "so many ties are no accident"
    assert totals.tokens > 300 and (strategy == "off" or totals.accepted > 20)
    held = llm.engine.runner.params["lm_head"].addressable_shards[0].data.shape
    assert held == (16, VOCAB // tp)
