"""What a TPU computes in another way than a CPU: run on the CPU, it gives the same tokens."""

import jax
import numpy as np
import pytest
from engines import engine_of, jobs_of, plain

from specjax import SamplingParams


def of_tpus(*arguments, default=None, **platforms):
    """`jax.lax.platform_dependent`, as on a TPU."""
    return platforms.get("tpu", default)(*arguments)


@pytest.mark.parametrize("spec", [None, "3_1_4", "3_2_6"])
def test_the_forms_of_a_tpu_give_the_tokens_of_a_cpu(monkeypatch, spec):
    """Noise, argmaxes and commits of plain decoding, of a chain and of a dynamic tree; over pages
    that rows cross; greedy and sampled sequences in one batch."""
    rng = np.random.default_rng(3)
    jobs = []
    for temperature in (0.0, 0.7, 1.0, 1.0):
        how = SamplingParams(
            temperature=temperature, max_tokens=24, seed=7, ignore_eos=True, top_p=0.9, top_k=40
        )
        jobs += jobs_of(rng.integers(0, 60, 11).tolist(), how, request=len(jobs))
    wanted, _ = plain().generate(jobs)
    monkeypatch.setattr(jax.lax, "platform_dependent", of_tpus)
    found, _ = engine_of(spec, batch=4, page_size=16).generate(jobs)
    assert [sample.token_ids for sample in found] == [sample.token_ids for sample in wanted]
