"""What is counted in compiled programs: cycles by part, copies, collectives, loops."""

import pytest
from chunk_text import CHUNK
from hlo import Copy, Module


@pytest.fixture(scope="module")
def chunk() -> Module:
    return Module(CHUNK)


def test_a_round_is_the_loop_that_computes_logits_and_not_the_one_over_batches(chunk):
    assert chunk.round == "round"
    assert list(chunk.open_loops(chunk.entry)) == ["drawn", "round", "batch"]


def test_cycles_are_added_up_by_part_with_as_many_layers_as_there_are(chunk):
    cost = chunk.cost_of(chunk.round)
    assert cost["cycles"] == {"layers": 2000, "lm_head": 700, "noise": 40, "rest": 5}
    assert cost["calls"] == {"all-reduce": 2}
    assert cost["received"] == {"all-reduce": 2 * 2 * 2 * 8 * 128 * 3 / 4}
    assert chunk.cost["cycles"].total() - cost["cycles"].total() == 300 + 60


def test_copies_are_named_by_the_argument_that_they_copy_and_prefetches_are_none(chunk):
    weights, cache = 2 * 4096 * 1024, 2 * 2 * 64 * 128 * 128
    assert chunk.copies() == [
        Copy("entry", "params['layers']['q']", "weights", weights),
        Copy("round", "state.memory.pages[0].k", "cache", cache),
    ]
