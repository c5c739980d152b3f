"""P-EAGLE heads in an engine; `test_eagle3` has their equations and their files."""

import dataclasses

import jax
import numpy as np
from scripted import Flips
from test_eagle3 import MAX_LEN, POLICY, params_of, policy_of, source_of
from test_mtp import prompts_of

from specjax import SamplingParams, SpecConfig
from specjax.control import ControlConfig
from specjax.drafts.eagle3 import Eagle3Source
from specjax.engine.engine import Engine
from specjax.engine.request import make_jobs
from specjax.engine.settings import EngineConfig


def test_tokens_are_those_of_plain_decoding_with_random_weights_and_with_nan():
    """Its chains, its trees and its own plain rounds change places."""
    policy = policy_of(POLICY)
    source = source_of(width=8, columns=10, taps=(0, 2), own_embedding=True, mask_token=3)
    source = Eagle3Source(dataclasses.replace(source.cfg, target_width=POLICY.hidden_size))
    heads = [params_of(source)]
    heads.append(jax.tree.map(lambda x: x * np.nan if x.dtype == np.float32 else x, heads[0]))
    jobs = [
        job
        for i, prompt in enumerate(prompts_of(np.random.default_rng(5), 1, 7, 12))
        for job in make_jobs(
            prompt, SamplingParams(temperature=(1.0, 0.0, 0.8)[i], max_tokens=20, n=2, seed=i),
            (), None,
        )
    ]  # fmt: skip
    plainly = Engine(POLICY, None, 2, MAX_LEN, config=EngineConfig(stretch=1))
    plainly.set_params(policy, None)
    want = [sample.token_ids for sample in plainly.generate(jobs)[0]]
    names = ("off", "3_1_4", "2_2_5")
    control = ControlConfig(controller="bandit", strategies=names)
    engine = Engine(
        POLICY, SpecConfig("3_1_4"), 2, MAX_LEN, source=source,
        config=EngineConfig(stretch=1, chunk_tokens=6), control=control,
    )  # fmt: skip
    engine.controller = Flips(engine.controller.arms, ["3_1_4", "off", "2_2_5"])
    for head in heads:
        engine.set_params(policy, head)
        assert [sample.token_ids for sample in engine.generate(jobs)[0]] == want
