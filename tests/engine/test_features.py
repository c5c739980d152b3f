"""Options are data: what the running requests ask for chooses a program; none is built twice."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from pieces import Pieces
from shared import CFG, EOS, NOTHING, PROMPTS, VOCAB, compilations_of, shared_llm, weights

from specjax import LLM, SamplingParams, SpecConfig
from specjax.decode import sampling
from specjax.decode.options import Features
from specjax.engine.engine import Engine
from specjax.engine.request import make_jobs


def any_options(rng) -> SamplingParams:
    """Every option on or off, with any value."""

    def maybe(settings):
        return settings if rng.random() < 0.5 else {}

    def ids(count):
        return [int(t) for t in rng.choice(np.arange(1, VOCAB), count, replace=False)]

    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 2.0])),
        max_tokens=int(rng.integers(6, 20)),
        seed=int(rng.integers(1 << 40)),
        n=int(rng.integers(1, 3)),
        **maybe({"top_k": int(rng.integers(1, VOCAB))}),
        **maybe({"top_p": float(rng.uniform(0.1, 1))}),
        **maybe({"min_p": float(rng.uniform(0, 0.5))}),
        **maybe({"repetition_penalty": float(rng.uniform(0.8, 1.5))}),
        **maybe({"presence_penalty": float(rng.uniform(-1, 1))}),
        **maybe({"frequency_penalty": float(rng.uniform(-1, 1))}),
        **maybe({"logit_bias": {t: float(rng.normal()) for t in ids(int(rng.integers(1, 30)))}}),
        **maybe({"allowed_token_ids": ids(int(rng.integers(20, 60)))}),
        **maybe({"bad_words": [ids(int(rng.integers(1, 4))) for _ in range(3)]}),
        **maybe({"stop_token_ids": ids(3), "min_tokens": int(rng.integers(0, 6))}),
        **maybe({"transformed_logprobs": True}),
        **maybe({"logprobs": int(rng.integers(1, 20))}),
        **maybe({"speculative": False}),
    )


@pytest.mark.parametrize("engine", ["speculative", pytest.param("plain", marks=pytest.mark.slow)])
def test_nothing_compiles_when_options_change(engine):
    llm, rng = shared_llm(engine), np.random.default_rng(0)
    llm.generate(PROMPTS, NOTHING)  # placements of 4
    built = llm.engine.runner.compilations

    def work():
        for _ in range(6):
            llm.generate(PROMPTS, [any_options(rng) for _ in PROMPTS])

    assert compilations_of(work) == 0
    assert llm.engine.runner.compilations == built
    assert compilations_of(lambda: jax.jit(lambda x: x * 5)(1.0).block_until_ready()) > 0


def small_engine(batch=2) -> Engine:
    engine = Engine(CFG, None, batch, 32, prompt_widths=[8])
    engine.set_params(weights()[0])
    return engine


def jobs(*params):
    return [job for i, p in enumerate(params) for job in make_jobs([1, 2], p, (EOS,), request=i)]


@pytest.fixture
def asked(monkeypatch):
    """(features asked for, features of the program that ran) of each chunk of an engine."""

    def watch(engine):
        runner, seen, chunk = engine.runner, [], engine.runner.chunk

        def observed(strategy, features, row_map, until, run):
            result, rows = chunk(strategy, features, row_map, until, run), len(row_map.slots)
            rows -= runner.extra_slots
            seen.append((features, runner.executables.covering(strategy, rows, features)))
            return result

        monkeypatch.setattr(runner, "chunk", observed)
        return seen

    return watch


def test_what_is_warmed_up_compiles_no_more_and_requests_that_need_less_take_the_cheaper_program(
    asked,
):
    engine = small_engine(batch=1)
    engine.warm_up([Features(), Features.all()])
    seen = asked(engine)
    options = SamplingParams(seed=0, max_tokens=20, top_p=0.5, frequency_penalty=0.1)
    bare = SamplingParams(seed=0, max_tokens=20)
    assert compilations_of(lambda: engine.generate(jobs(bare, bare))) == 0
    assert {ran for _, ran in seen} == {Features()}
    assert compilations_of(lambda: engine.generate(jobs(bare, options))) == 0
    assert seen[-1][1] == Features.all()


@pytest.mark.slow
def test_requests_like_those_that_an_llm_was_warmed_up_for_compile_nothing():
    llm = LLM((CFG, weights()[0], None), None, max_batch=1, max_len=16)
    llm.warm_up([SamplingParams(), SamplingParams(top_p=0.5)])
    for option in ({}, {"top_p": 0.7}, {"top_k": 3, "temperature": 0.4}):
        params = SamplingParams(max_tokens=4, **option)
        assert compilations_of(lambda params=params: llm.generate([[1, 2]], params)) == 0
    biased = SamplingParams(max_tokens=4, logit_bias={3: 1.0})
    assert compilations_of(lambda: llm.generate([[1, 2]], biased)) > 0


def test_a_call_compiles_one_program_for_all_its_requests_before_its_first_chunk(asked):
    engine = small_engine()
    engine.warm_up()
    seen, built = asked(engine), engine.runner.compilations
    short = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=2)]
    both = Features(top_p=True, penalties=True).widened()
    late = [
        SamplingParams(max_tokens=4, top_p=0.5),
        SamplingParams(max_tokens=4, frequency_penalty=0.1),
    ]
    engine.generate(jobs(*short, *late))
    assert engine.runner.compilations == built + 1
    assert seen[0] == (both, both), "the program that all requests need comes first"
    # Chunks in which no request asks for anything go back to the program that was there before.
    engine.generate(jobs(*short, *late))
    assert engine.runner.compilations == built + 1
    ran = [program for _, program in seen[2:]]
    assert Features() in ran and both in ran


def test_greedy_requests_ask_for_no_noise(asked):
    engine = small_engine()
    seen = asked(engine)
    engine.generate(jobs(SamplingParams(max_tokens=3, temperature=0.0, top_p=0.3)))
    assert seen == [(Features.none(), Features.none())]


@pytest.mark.slow  # so does test_rejections
def test_telemetry_is_collected_through_llm_when_on_and_absent_when_off():
    llm = LLM((CFG, *weights()), SpecConfig("1_1_2", telemetry=True), max_batch=2, max_len=40)
    llm.tokenizer = Pieces()
    base = SamplingParams(seed=0, max_tokens=20, ignore_eos=True, stop="never there")
    params = [
        dataclasses.replace(base, n=2),
        dataclasses.replace(base, frequency_penalty=0.5),
        dataclasses.replace(base, speculative=False),
    ]
    outs = llm.generate(PROMPTS[:3], params)
    summary = llm.telemetry.summary()
    assert summary.rounds == llm.totals.rounds - 20, "a request that opts out has no drafts"
    # Telemetry counts what the walk accepted, before the limit cuts a sample's last round.
    assert 0 <= summary.accepts[0] - sum(llm.totals.histogram[2:]) <= 3
    assert {(r.request, r.sample) for r in llm.telemetry.records} == {(0, 0), (0, 1), (1, 0)}
    for record in llm.telemetry.records:
        assert record.prompt_len == len(PROMPTS[record.request]) <= record.position
        assert ("penalties" in record.transforms) == (record.request == 1)
    text = outs[0].samples[0].text
    llm.telemetry.clear()
    stops = [dataclasses.replace(base, stop=text[i : i + 2]) for i in range(4, 12)]
    rounds = 0
    for params in stops:
        llm.generate([PROMPTS[0]], params)
        rounds += llm.totals.rounds
    assert llm.telemetry.summary().rounds == rounds, "rounds past the end were counted"
    assert shared_llm("speculative").telemetry is None and shared_llm("plain").telemetry is None


def test_options_asked_for_one_after_the_other_compile_a_few_programs_and_no_more():
    engine = small_engine()
    engine.generate(jobs(SamplingParams(max_tokens=2)))
    built = engine.runner.compilations
    for option in (
        {"top_p": 0.5},
        {"top_k": 3},
        {"min_p": 0.1},
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.3},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3, 4]},
        {"bad_words": [[3]]},
        {"transformed_logprobs": True},
        {"logprobs": 2},
    ):
        engine.generate(jobs(SamplingParams(max_tokens=2, **option)))
    assert engine.runner.compilations - built == 3  # filters; all of sampling; everything


def test_what_a_program_holds_and_nobody_asks_for_is_skipped_when_it_runs(monkeypatch):
    ran = set()
    for module, function, name in (
        *((sampling, f"{name}_threshold", name) for name in ("top_k", "top_p", "min_p")),
        (sampling, "_penalised", "frequency_penalty"),
        (sampling, "_biased", "logit_bias"),
        (sampling, "_allowed", "allowed_token_ids"),
        (sampling, "_among", "min_tokens"),
        (sampling, "_completing", "bad_words"),
    ):
        exact = getattr(module, function)

        def watched(*args, exact=exact, name=name, **settings):
            jax.debug.callback(functools.partial(ran.add, name))
            return exact(*args, **settings)

        monkeypatch.setattr(module, function, watched)
    engine = small_engine()
    for option in (
        {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"frequency_penalty": 0.3},
        {"logit_bias": {3: 1.0}}, {"allowed_token_ids": [3, 4]}, {"min_tokens": 2},
        {"bad_words": [[3]]},
    ):  # fmt: skip
        ran.clear()
        engine.generate(jobs(SamplingParams(max_tokens=2, **option)))
        jax.effects_barrier()
        assert ran == set(option)


def test_a_set_of_features_is_widened_to_one_that_covers_it():
    for names in ({}, {"sampled": True}, {"top_p": True}, {"bias": True}, {"top_logprobs": True}):
        features = dataclasses.replace(Features.none(), **names)
        assert features.widened().covers(features)
        assert features.widened().widened() == features.widened()
