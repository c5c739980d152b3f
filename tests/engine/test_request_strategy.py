"""A request may name the strategy that drafts for it."""

import dataclasses

import pytest
from engines import ARMS, LONG, jobs_of, restless, tokens_of

from specjax.control import make_controller
from specjax.engine.request import make_jobs


class Chunks:
    """Strategy and batch of every chunk, and its rounds."""

    def __init__(self):
        self.ran, self.rounds = [], []

    def chunk(self, strategy, bucket, rounds):
        self.ran.append((strategy, bucket))
        self.rounds.append(rounds)

    def news(self, sequence, news):
        pass


def plainly(jobs):
    """Tokens of plain decoding, whatever the jobs name."""
    return tokens_of(
        [dataclasses.replace(j, params=dataclasses.replace(j.params, strategy=None)) for j in jobs]
    )


@pytest.fixture
def watched():
    """(engine, what its chunks were); its controller always chooses the deepest."""
    engine, chunks = restless(), Chunks()
    at_random = engine.controller
    engine.controller, engine.watcher = make_controller("static", ("3_1_4",)), chunks
    yield engine, chunks
    engine.controller, engine.watcher = at_random, None


def test_each_sample_runs_by_the_strategy_that_it_asks_for_and_no_token_changes():
    """Four in a batch, of which two groups and a free one take turns."""
    engine, jobs = restless(), []
    for i, name in enumerate((*ARMS, None, "1_1_2", "3_1_4")):
        params = dataclasses.replace(LONG, strategy=name, seed=i, max_tokens=30)
        jobs += make_jobs([3, 1 + i], params, ())
    samples, _ = engine.generate(jobs)
    assert [sample.token_ids for sample in samples] == plainly(jobs)
    ran = [[d for d, rounds in enumerate(s.stats.depths) if rounds] for s in samples]
    assert ran[:3] == [[0], [1], [3]] and ran[4:] == [[1], [3]]


def test_a_strategy_that_was_not_compiled_is_refused():
    params = dataclasses.replace(LONG, strategy="5_1_6")
    with pytest.raises(ValueError, match="'5_1_6', and only off, 1_1_2, 3_1_4 were compiled"):
        restless().add(jobs_of([1, 2], params)[0])


def test_where_nobody_speculates_the_plain_program_runs(watched):
    engine, chunks = watched
    params = dataclasses.replace(LONG, speculative=False, max_tokens=12)
    jobs = jobs_of([3, 4], params) + jobs_of([3, 5], params)
    samples, _ = engine.generate(jobs)
    assert {strategy for strategy, _ in chunks.ran} == {"off"}
    assert [sample.token_ids for sample in samples] == plainly(jobs)
    engine.generate(jobs_of([3, 4], dataclasses.replace(LONG, max_tokens=12)) + jobs)
    assert {"off", "3_1_4"} == {strategy for strategy, _ in chunks.ran}
