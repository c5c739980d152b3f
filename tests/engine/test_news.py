"""Whoever watches an engine hears of every token once, as chunks come in."""

import collections
import dataclasses

import numpy as np
import pytest
from engines import LONG, jobs_of, warm
from hypothesis import given
from hypothesis import strategies as st

from specjax.engine.sequence import News


class Watcher:
    def __init__(self):
        self.heard, self.rounds = collections.defaultdict(list), 0

    def chunk(self, strategy, bucket, rounds):
        self.rounds += rounds

    def news(self, sequence, news):
        self.heard[sequence].append(news)


@pytest.fixture
def watched():
    """(engine, watcher)."""
    engine, watcher = warm(), Watcher()
    engine.watcher = watcher
    yield engine, watcher
    engine.watcher = None


def test_news_add_up_to_the_sample(watched):
    engine, watcher = watched
    jobs = [job for i in range(3) for job in jobs_of([1, 2 + i], LONG)]
    jobs.append(jobs_of([5], dataclasses.replace(LONG, speculative=False))[0])
    added, samples = [engine.add(job) for job in jobs], {}
    while engine.has_work:
        samples |= {event.sequence: event.sample for event in engine.step()}
    for sequence in added:
        heard, sample = watcher.heard[sequence], samples[sequence]
        assert [t for news in heard for t in news.tokens] == sample.token_ids
        assert [v for news in heard for v in news.logprobs] == sample.logprobs
        assert len(heard) > 1 and all(sum(n.rounds) == len(n.tokens) for n in heard)
        rounds = np.bincount([c for n in heard for c in n.rounds], minlength=5)
        assert rounds.tolist() == list(sample.stats.histogram)
        assert sum(len(n.rounds) * n.rows for n in heard) == sample.stats.drafted
    assert {news.steps for news in watcher.heard[added[-1]]} == {0}
    assert watcher.rounds >= max(sample.stats.rounds for sample in samples.values())


def test_a_look_comes_when_the_device_has_work_and_what_came_before_is_known(watched):
    """Else the device would wait while the host tells others what it has brought."""
    engine, watcher = watched
    [job], seen = jobs_of([1, 2], LONG), []

    def look():
        heard = sum(map(len, watcher.heard.values()))
        seen.append((len(engine._in_flight), heard))

    engine.on_poll = look
    try:
        sequence = engine.add(job)
        while engine.has_work:
            engine.step()
    finally:
        engine.on_poll = None
    chunks = len(watcher.heard[sequence])
    assert chunks > 2 and {heard for _, heard in seen} >= set(range(chunks))
    assert all(in_flight for in_flight, heard in seen if heard < chunks - 1)


@given(st.lists(st.integers(1, 5), max_size=6), st.integers(0, 40), st.integers(0, 60))
def test_what_is_known_already_is_left_out(rounds, at, known):
    tokens = list(range(at, at + sum(rounds)))
    news = News(at, tokens, [float(t) for t in tokens], None, rounds, 4, 4).since(known)
    assert news.tokens == [t for t in tokens if t >= known] and sum(news.rounds) == len(news.tokens)
    assert news.logprobs == news.tokens and 0 not in news.rounds
    assert news.at == max(at, known) or not news.tokens
