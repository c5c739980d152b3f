"""What a draft says that its memory costs is what its memory takes."""

import jax
import pytest
from tiny import tiny_config

from specjax.config import SpecConfig
from specjax.drafts.model import ModelSource
from specjax.engine.sources import source_of
from specjax.interfaces import Room

CFG = tiny_config(24, mtp=2, layers=3)
SOURCES = [
    source_of(CFG, SpecConfig()),
    source_of(CFG, SpecConfig(draft="ngram")),
    ModelSource(CFG, 24),
    ModelSource(CFG.running(scan_layers=True, compute_dtype="bfloat16"), 24),
]


@pytest.mark.parametrize("source", SOURCES, ids=["head", "ngram", "model", "scanned model"])
def test_cost_is_what_the_memory_takes(source):
    room = Room(slots=3, pages=5, page_size=8)
    memory = jax.eval_shape(lambda: source.empty(room, 4))
    took = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(part)) for part in memory]
    cost = source.cost(room.page_size)
    assert took == [5 * cost.page, 3 * cost.slot]
