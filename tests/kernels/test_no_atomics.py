"""Which operations of decoding GPUs could compile to sums of floats by atomics, in changing order.

Programs are lowered for GPUs, and not compiled: there a scatter says whether it adds.
"""

import functools
import re
from unittest import mock

import gpu_programs
import jax
import jax.numpy as jnp
import pytest
from gpu_programs import CHAIN, PROGRAMS, engine_of, traced

from specjax import SpecConfig
from specjax.decode.options import Features

SCATTER = re.compile(r'"stablehlo\.(?:select_and_)?scatter"\(.*?\n\s*\}\) : [^\n]*', re.DOTALL)
RULE = re.compile(r"stablehlo\.add[^\n]*: tensor<(?:f|bf)\d+")
EVERY = Features(sampled=True, penalties=True, top_p=True, top_k=True, min_p=True)


def sums_by_scatters(text: str) -> list[str]:
    """The shapes of scatters that add floats to what they write to."""
    found = SCATTER.findall(text)
    assert len(found) == len(re.findall(r'"stablehlo\.(?:select_and_)?scatter"', text))
    return [one.rpartition("-> ")[2] for one in found if RULE.search(one)]


def chunk_for_gpus(what: str, features: Features = EVERY, draft_vocab=None, **spec) -> str:
    """Attention is by XLA: in Pallas kernels, which lower slowly, nothing scatters."""
    options = {"features": features, "draft_vocab": draft_vocab, "attention": "library:xla"}
    wanted = PROGRAMS["plain"]._replace(what=what, **options)
    with mock.patch.object(gpu_programs, "SpecConfig", functools.partial(SpecConfig, **spec)):
        runner = engine_of(jax.devices()[0], wanted)
    program = traced(runner, jax.devices()[0], wanted)
    return program.lower(lowering_platforms=("cuda",)).as_text()


def test_a_sum_by_a_scatter_is_found():
    def program(x, at, new):
        return x.at[at].add(new), x.at[at].set(new)

    x, at = jnp.zeros((8, 2)), jnp.zeros(3, int)
    lowered = jax.jit(program).trace(x, at, jnp.ones((3, 2))).lower(lowering_platforms=("cuda",))
    assert sums_by_scatters(lowered.as_text()) == ["tensor<8x2xf32>"]


@pytest.mark.parametrize("what", ["off", CHAIN])
def test_chunks_add_no_floats_by_scatters(what):
    """Counts of tokens, for penalties, are added: integers, whose sum does not depend on order."""
    text = chunk_for_gpus(what)
    assert '"stablehlo.scatter"' in text and not sums_by_scatters(text)


def test_rules_that_divide_by_q_add_it_once_per_token():
    """With a draft vocabulary q is written to the whole one, to places that are all different."""
    text = chunk_for_gpus(CHAIN, Features(), draft_vocab=256, acceptance="block")
    vocab = PROGRAMS["plain"].model.vocab_size
    assert {shape.split("x")[-2] for shape in sums_by_scatters(text)} == {str(vocab)}
