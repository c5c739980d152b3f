"""The engine under load: whatever happens to a request, its tokens are those of plain decoding."""

import dataclasses
from types import SimpleNamespace

import engines
import pytest
from engines import LONG, jobs_of, plain, restless, tokens_of
from shared import weights

from specjax.control import Static
from specjax.engine.pages import PagePool


def chaos(tokens, seed=0):
    heads = [weights(seed=number)[1] for number in (3, 5)]
    policies = [weights(seed=number)[0] for number in (3, 4)]
    return engines.chaos(restless(), plain(), policies, heads, tokens, seed)


def test_10_000_tokens_under_chaos_are_those_of_plain_decoding():
    compared, unexplained, _ = chaos(10_000)
    assert compared >= 10_000 and not unexplained, "\n".join(map(str, unexplained))
    assert restless().scheduler.hits > 1_000, "prompts must begin with pages that are kept"


def test_chaos_would_notice_a_page_that_is_kept_over_a_change_of_weights(monkeypatch):
    monkeypatch.setattr(PagePool, "forget", lambda pool: None)
    assert chaos(6_000, seed=2)[1]


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
