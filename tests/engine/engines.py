"""Engines of one tiny policy, and plain decoding to compare them with."""

import functools

import numpy as np
from shared import CFG, weights

from specjax import SamplingParams, SpecConfig
from specjax.control import ControlConfig
from specjax.control.base import Controller
from specjax.engine.engine import Engine
from specjax.engine.request import make_jobs
from specjax.engine.settings import EngineConfig

VOCAB, MAX_LEN = CFG.vocab_size, 96
ARMS = ("off", "1_1_2", "3_1_4")
ONE = SamplingParams(seed=0, max_tokens=40, ignore_eos=True)
LONG = SamplingParams(seed=0, max_tokens=80, ignore_eos=True)


class AtRandom(Controller):
    """Any strategy, every chunk."""

    kind = "random"

    def __init__(self, seed=0, arms=ARMS):
        super().__init__(arms)
        self._random = np.random.default_rng(seed)

    def choose(self, batch_size):
        return str(self._random.choice(self.arms))

    def learn(self, seen):
        pass


def engine_of(spec="3_1_4", batch=4, control=None, stretch=1, cfg=CFG, **config) -> Engine:
    """Samples are short here, and so are chunks, unless a test wants to `stretch` those of few."""
    spec = SpecConfig(spec) if isinstance(spec, str) else spec
    how = EngineConfig(stretch=stretch, **config)
    engine = Engine(cfg, spec, batch, MAX_LEN, config=how, control=control)
    engine.set_params(*weights() if spec else weights()[:1])
    return engine


@functools.cache
def plain() -> Engine:
    """One slot: one sample after the other."""
    return engine_of(None, batch=1)


@functools.cache
def restless() -> Engine:
    """Small pages, a pool too small for four long samples, another strategy every chunk."""
    control = ControlConfig(controller="bandit", strategies=ARMS)
    probe = engine_of(batch=4, page_size=16, control=control)
    engine = engine_of(
        batch=4,
        page_size=16,
        chunk_tokens=8,
        stretch=8,
        prefill_chunk=16,
        cache_bytes=12 * probe.runner.page_bytes,
        control=control,
    )
    engine.buckets[:] = [1, 4]  # of each strategy one program less
    engine.warm_up()
    engine.controller = AtRandom()
    return engine


def tokens_of(jobs) -> list[list[int]]:
    samples, _ = plain().generate(jobs)
    return [sample.token_ids for sample in samples]


@functools.cache
def warm() -> Engine:
    """Everything compiled, batches of up to 4."""
    engine = engine_of(batch=4, page_size=16, prefill_chunk=16)
    engine.warm_up()
    return engine


def jobs_of(prompt, params, request=0):
    return make_jobs(prompt, params, (), request=request)


def random_jobs(rng, count):
    jobs = []
    while len(jobs) < count:
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 40))).tolist()
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            max_tokens=int(rng.integers(1, MAX_LEN - len(prompt) + 1)),
            seed=int(rng.integers(1 << 30)),
            n=int(rng.integers(1, 4)),
            ignore_eos=bool(rng.integers(2)),
        )
        jobs += make_jobs(prompt, params, CFG.eos_token_ids, request=len(jobs))
    return jobs
