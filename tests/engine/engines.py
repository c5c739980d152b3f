"""Engines of one tiny policy, and plain decoding to compare them with."""

import functools

import numpy as np
from shared import CFG, weights

from specjax import SamplingParams, SpecConfig
from specjax.control import ControlConfig
from specjax.control.base import Controller
from specjax.engine.compare import first_difference
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


def engine_of(
    spec="3_1_4", batch=4, control=None, stretch=1, cfg=CFG, params=None, **config
) -> Engine:
    """Samples are short here, and so are chunks, unless a test wants to `stretch` those of few.

    Args:
      params: parameters of the policy and the head; None: those of `CFG`.
    """
    spec, params = SpecConfig(spec) if isinstance(spec, str) else spec, params or weights()
    how = EngineConfig(stretch=stretch, **config)
    engine = Engine(cfg, spec, batch, MAX_LEN, config=how, control=control)
    engine.set_params(*params if spec else params[:1])
    return engine


@functools.cache
def plain() -> Engine:
    """One slot: one sample after the other."""
    return engine_of(None, batch=1)


def restless_of(arms, buckets=(1, 4), spec=None, **more) -> Engine:
    """Small pages, a pool too small for four long samples, another strategy every chunk.

    Args:
      buckets: sizes of batches that have programs.
      spec: how to speculate; None: by the last one of the strategies `arms`.
    """
    control = ControlConfig(controller="bandit", strategies=arms)
    made = functools.partial(
        engine_of, spec or arms[-1], page_size=16, chunk_tokens=8, stretch=8, prefill_chunk=16,
        control=control, enable_prefix_caching=True, **more,
    )  # fmt: skip
    runner = made().runner
    engine = made(cache_bytes=runner.slot_bytes + 12 * runner.page_bytes)
    engine.buckets[:] = buckets
    engine.warm_up()
    engine.controller = AtRandom(arms=arms)
    return engine


@functools.cache
def restless() -> Engine:
    return restless_of(ARMS)


def chaos(engine, plain, policies, heads, tokens, seed=0):
    """Random arrivals, aborts, preemptions, strategies, suspensions, weights and draft heads.

    A new head comes with the same policy, whose caches are then recomputed in mid-sample. Some
    prompts continue earlier samples, whose pages the engine may have kept. Now and then the next
    policy comes while nothing runs.

    Args:
      engine: a `restless_of` engine; `plain` is one that decodes plainly.
      policies: parameters of one policy, or of several.
      heads: parameters of two heads.
      tokens: number of tokens to compare.

    Returns:
      tokens compared, unexplained differences, explained ones.
    """
    rng = np.random.default_rng(seed)
    compared, explained, unexplained, aborted = 0, [], [], 0
    before, suspended, swaps, turn, earlier = engine.preemptions, 0, 0, 0, []
    while compared < tokens:
        policy = policies[turn // 2 % len(policies)]
        if len(policies) > 1:
            engine.set_params(policy, heads[turn % 2])
            plain.set_params(policy)
        turn += 1
        waiting, added, samples = random_jobs(rng, 60, earlier), [], []
        while waiting or engine.has_work:
            for _ in range(int(rng.integers(0, 4))):
                if waiting:
                    added.append(engine.add(waiting.pop()))
            if added and rng.random() < 0.03:
                sequence = added[int(rng.integers(len(added)))]
                cut = engine.abort(sequence)
                if cut is not None:
                    assert cut.finish_reason == "abort"
                    samples.append((sequence.job, cut))
                    aborted += 1
            if rng.random() < 0.02:
                for sequence in engine.suspend():
                    added.append(engine.add(sequence.job, sequence.output()))
                    suspended += bool(sequence.tokens)
            if rng.random() < 0.02:
                swaps += 1
                engine.set_params(policy, heads[swaps % 2])
            samples += [(event.sequence.job, event.sample) for event in engine.step()]
        assert engine.scheduler.pool.used == 0
        earlier = [[*job.prompt, *sample.token_ids] for job, sample in samples]
        expected, _ = plain.generate([job for job, _ in samples])
        for (job, sample), one in zip(samples, expected, strict=True):
            compared += len(sample.token_ids)
            whole = one.token_ids
            if sample.finish_reason == "abort":
                whole = whole[: len(sample.token_ids)]
            if sample.token_ids != whole:
                difference = first_difference(engine.runner, job, whole, sample.token_ids)
                (explained if difference.explained else unexplained).append(difference)
    engine.set_params(policies[0], heads[0])
    plain.set_params(policies[0])
    assert aborted and suspended and swaps and engine.preemptions > before
    return compared, unexplained, explained


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


def random_jobs(rng, count, earlier=()):
    jobs = []
    while len(jobs) < count:
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 40))).tolist()
        if earlier and rng.random() < 0.5:
            prompt = (earlier[int(rng.integers(len(earlier)))] + prompt)[: MAX_LEN - 8]
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            max_tokens=int(rng.integers(1, MAX_LEN - len(prompt) + 1)),
            seed=int(rng.integers(1 << 30)),
            n=int(rng.integers(1, 4)),
            ignore_eos=bool(rng.integers(2)),
        )
        jobs += make_jobs(prompt, params, CFG.eos_token_ids, request=len(jobs))
    return jobs
