"""The warning that hardly a drafted token is accepted."""

import logging

import jax
import pytest

from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf


def warned(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.slow
@pytest.mark.usefixtures("logging_as_it_was")
def test_a_call_warns_once_of_a_head_that_is_wrong(thin_policy, caplog):
    cfg, params, head = hf.load_checkpoint(thin_policy, "float32")
    wrong = jax.tree_util.tree_map_with_path(
        lambda path, a: -50 * a if path[-1].key == "norm" else a, head
    )
    llm = LLM((cfg, params, wrong), SpecConfig("1_1_2"), max_batch=8, max_len=64)
    many = SamplingParams(seed=0, n=8, max_tokens=48, ignore_eos=True, temperature=0.5)
    for _ in range(2):
        llm.generate([5, 6, 7], many)
    assert len([x for x in warned(caplog) if "speculation only costs time" in x]) == 1
