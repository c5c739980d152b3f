"""Whoever watches an engine hears of every token once, as chunks come in."""

import collections
import dataclasses

import numpy as np
import pytest
from engines import LONG, jobs_of, warm


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
