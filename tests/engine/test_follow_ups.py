"""A sample that ends makes room at once where another turn is to follow it, or where the batch can
shrink."""

import pytest

from bench.longtail import Watch
from specjax import LLM, SamplingParams
from specjax.engine.settings import EngineConfig


@pytest.mark.parametrize(
    ("follow_ups", "warm", "first"), [(True, False, 3), (False, True, 3), (False, False, 16)]
)
def test_a_chunk_ends_with_its_first_sample_only_if_that_is_worth_something(
    thin_policy, follow_ups, warm, first
):
    how = EngineConfig(chunk_tokens=16, stretch=1, follow_ups=follow_ups)
    llm = LLM(thin_policy, None, max_batch=2, max_len=64, engine=how)
    if warm:  # there is a program for one slot as well
        llm.warm_up()
    llm.engine.controller = watch = Watch(llm.engine.controller)
    params = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True) for n in (3, 20)]
    outputs = llm.generate([[5, 6, 7], [8, 9]], params)
    assert [len(output.samples[0].token_ids) for output in outputs] == [3, 20]
    assert watch.spans[0].rounds == first
