"""The workloads of `bench.protocol`, and prompts of natural text of any length."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from specjax import SamplingParams
from specjax.decode.options import Features
from specjax.engine.options import features_of
from specjax.engine.request import make_jobs
from train import data

CPU_SCALE = Fraction(1, 8)


class Workload(NamedTuple):
    """Lengths in tokens before they are scaled; how many samples at once; `SamplingParams`."""

    prompt: int
    output: int
    concurrency: tuple[int, ...]
    sampling: dict[str, float]


GREEDY = {"temperature": 0.0}
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.5}
WORKLOADS = {
    "greedy": Workload(2048, 128, (1, 4, 8), GREEDY),
    "sampled": Workload(2048, 128, (1, 4, 8), {"temperature": 0.7, "top_p": 0.9}),
    "penalties": Workload(2048, 128, (1,), GREEDY | PENALTIES),
    "long": Workload(16_384, 256, (1,), GREEDY),
}


class Point(NamedTuple):
    """A workload at its scaled size and one number of samples at once."""

    name: str
    prompt: int
    output: int
    batch: int
    workload: Workload

    def params(self, tokens: int, seed: int) -> SamplingParams:
        sampling = self.workload.sampling
        return SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True, **sampling)

    @property
    def options(self) -> dict[str, float]:
        """The same by the names of `Options`."""
        sampling = self.workload.sampling
        return {name.removesuffix("_penalty"): value for name, value in sampling.items()}

    def features(self, vocab: int) -> Features:
        """What the engine's program for such requests takes into account."""
        job = make_jobs([0], self.params(self.output, 0), ())[0]
        return features_of(job, vocab).widened()


def points(names: Sequence[str], scale: Fraction) -> list[Point]:
    """All that is measured, in order."""

    def scaled(tokens: int) -> int:
        return max(2, round(tokens * scale))

    return [
        Point(f"{name}/concurrency_{batch}", scaled(work.prompt), scaled(work.output), batch, work)
        for name, work in ((name, WORKLOADS[name]) for name in names)
        for batch in work.concurrency
    ]


def long_prompts(source: Sequence, tokenizer, length: int, count: int) -> list[list[int]]:
    """Token ids of `count` prompts of exactly `length`: demonstrations, and a problem at the end.

    Args:
      source: demonstrations; where there are too few they come again. No two prompts end alike as
        long as there are `count` of them.
    """
    encoded = []
    for index in range(min(len(source), 4096)):
        problem, answer = data.encode_demonstration(tokenizer, source[index])
        encoded.append((problem, problem + answer))
        if sum(len(whole) for _, whole in encoded) > length * count:
            break
    prompts = []
    for first in range(count):
        ids, index = encoded[first % len(encoded)][0], first
        while len(ids) < length:
            index += count
            ids = encoded[index % len(encoded)][1] + ids
        prompts.append(ids[-length:])
    return prompts
