"""The engine under load: whatever happens to a request, its tokens are those of plain decoding."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from engines import LONG, jobs_of, random_jobs, restless, tokens_of
from shared import weights

from specjax.control import Static
from specjax.engine.compare import first_difference


def chaos(tokens: int, seed=0):
    """Random arrivals, aborts, preemptions, strategies, suspensions and draft heads.

    A new head comes with the same policy, whose caches are then recomputed in mid-sample.

    Returns:
      tokens compared, unexplained differences, explained ones.
    """
    engine, rng = restless(), np.random.default_rng(seed)
    compared, explained, unexplained, aborted = 0, [], [], 0
    before, suspended, swaps = engine.preemptions, 0, 0
    while compared < tokens:
        waiting, added, samples = random_jobs(rng, 60), [], []
        while waiting or engine.has_work:
            for _ in range(int(rng.integers(0, 4))):
                if waiting:
                    added.append(engine.add(waiting.pop()))
            if added and rng.random() < 0.03:
                sequence = added[int(rng.integers(len(added)))]
                cut = engine.abort(sequence)
                if cut is not None:
                    assert cut.finish_reason == "abort"
                    samples.append((sequence.job, cut))
                    aborted += 1
            if rng.random() < 0.02:
                for sequence in engine.suspend():
                    added.append(engine.add(sequence.job, sequence.output()))
                    suspended += bool(sequence.tokens)
            if rng.random() < 0.02:
                swaps += 1
                engine.set_params(weights()[0], weights(seed=swaps % 2 * 5)[1])
            samples += [(event.sequence.job, event.sample) for event in engine.step()]
        assert engine.scheduler.pool.used == 0
        expected = tokens_of([job for job, _ in samples])
        for (job, sample), whole in zip(samples, expected, strict=True):
            compared += len(sample.token_ids)
            if sample.finish_reason == "abort":
                whole = whole[: len(sample.token_ids)]
            if sample.token_ids != whole:
                difference = first_difference(engine.runner, job, whole, sample.token_ids)
                (explained if difference.explained else unexplained).append(difference)
    engine.set_params(*weights())
    assert aborted and suspended and swaps and engine.preemptions > before
    return compared, unexplained, explained


def test_10_000_tokens_under_chaos_are_those_of_plain_decoding():
    compared, unexplained, _ = chaos(10_000)
    assert compared >= 10_000 and not unexplained, "\n".join(map(str, unexplained))


@pytest.mark.slow
def test_200_000_tokens_under_chaos_are_those_of_plain_decoding():
    compared, unexplained, _ = chaos(200_000, seed=1)
    assert compared >= 200_000 and not unexplained, "\n".join(map(str, unexplained))


@pytest.mark.slow
def test_chaos_would_notice_a_sequence_that_continues_with_another_ones_pages(monkeypatch):
    """Else the tests above would prove nothing."""
    from specjax.engine import engine as module

    right = module.admission_of

    def wrong(starts, count, runner):
        new = right(starts, count, runner)
        return new._replace(target=new.target * 0)  # the copied page is lost

    monkeypatch.setattr(module, "admission_of", wrong)
    assert chaos(4_000, seed=2)[1]


def test_where_nobody_speculates_the_plain_program_runs(monkeypatch):
    engine, ran = restless(), set()
    told = SimpleNamespace(news=lambda *_: None, chunk=lambda strategy, *_: ran.add(strategy))
    monkeypatch.setattr(engine, "watcher", told)
    monkeypatch.setattr(engine, "controller", Static("3_1_4"))
    plain = dataclasses.replace(LONG, speculative=False, max_tokens=12)
    jobs = jobs_of([3, 4], plain) + jobs_of([3, 5], plain)
    samples, _ = engine.generate(jobs)
    assert ran == {"off"} and [sample.token_ids for sample in samples] == tokens_of(jobs)
    engine.generate(jobs_of([3, 4], dataclasses.replace(LONG, max_tokens=12)) + jobs)
    assert ran == {"off", "3_1_4"}
