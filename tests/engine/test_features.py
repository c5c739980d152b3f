"""Options are data: what the running requests ask for chooses a program; none is built twice."""

import jax
import numpy as np
import pytest
from shared import CFG, EOS, NOTHING, PROMPTS, VOCAB, compilations_of, shared_llm, weights

from specjax import EngineConfig, SamplingParams, SpecConfig
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


def small_engine(batch=2, **config) -> Engine:
    how = EngineConfig(**config)
    engine = Engine(CFG, SpecConfig("1_1_2"), batch, 32, prompt_widths=[8], config=how)
    engine.set_params(*weights())
    return engine


def jobs(*params):
    return [job for i, p in enumerate(params) for job in make_jobs([1, 2], p, (EOS,), request=i)]


@pytest.fixture
def asked(monkeypatch):
    """(features asked for, features of the program that ran) of each chunk of an engine."""

    def watch(engine):
        runner, seen, chunk = engine.runner, [], engine.runner.chunk

        def observed(strategy, features, row_map, until):
            result, rows = chunk(strategy, features, row_map, until), len(row_map.slots)
            rows -= runner.extra_slots
            if runner.executables.compiler is None:  # it runs, and is not only to be compiled
                seen.append((features, dict(reversed(runner.chunks(strategy, features)))[rows]))
            return result

        monkeypatch.setattr(runner, "chunk", observed)
        return seen

    return watch


@pytest.mark.slow
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
def test_a_call_compiles_one_program_for_all_its_requests_before_its_first_chunk(asked):
    engine = small_engine(stand_in=False)
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


@pytest.mark.slow
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
