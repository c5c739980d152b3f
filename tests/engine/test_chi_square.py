"""The tokens that leave `LLM` have the target's joint distribution, in every mode, under every
transform.

A policy with five tokens, the joint of the first three, rounds that end anywhere within them: 125
cells and those of sequences that ended early, against probabilities from full forward passes. The
draft head is far from the target on purpose, so that every branch of a rule is taken. Samples are
independent because every one has a sample index and a seed of its own, and requests with different
transforms run side by side in one batch. Nothing is conditioned on the accept length.
"""

import functools

import joint
import numpy as np
import pytest
from joint import ALPHA, BATCH, PROMPT, SAMPLES, TOKENS, Counted, exact_joint, fit_of

from specjax import SamplingParams

TRANSFORMS = {
    "none": {},
    "temperature 0.7": dict(temperature=0.7),
    "temperature 1.3": dict(temperature=1.3),
    "top-k 2": dict(top_k=2),
    "top-k 3": dict(top_k=3),
    "top-p": dict(top_p=0.8),
    "min-p": dict(min_p=0.25),
    "repetition": dict(repetition_penalty=1.8),
    "presence": dict(presence_penalty=1.2),
    "frequency": dict(frequency_penalty=0.9),
    "logit bias": dict(logit_bias={0: 1.5, 2: -2.0}),
    "bad word of one": dict(bad_words=((2,),)),
    "bad words of two": dict(bad_words=((3, 0), (1, 1), (0, 2))),
    "allowed ids": dict(allowed_token_ids=(0, 1, 3)),
    "end of sequence": dict(ignore_eos=False),
    "min tokens": dict(ignore_eos=False, min_tokens=2),
    "all at once": dict(
        temperature=0.9,
        top_k=3,
        top_p=0.95,
        min_p=0.1,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.5,
        logit_bias={0: 0.5, 2: -0.5},
        bad_words=((1, 1),),
        allowed_token_ids=(0, 1, 2, 4),
        ignore_eos=False,
        min_tokens=1,
    ),
}
# Each other one is in these at once, and in `make test-full` by itself.
FAST = ("none", "repetition", "end of sequence", "all at once")
MODES = {
    "coupled chain": ("coupled", "2_1_3"),
    "coupled static tree": ("coupled", "2x2"),
    "coupled dynamic tree": ("coupled", "2_2_4"),
    "coupled deeper dynamic tree": ("coupled", "3_2_5"),
    "block chain": ("block", "2_1_3"),
    "recursive chain": ("recursive", "2_1_3"),
    "recursive static tree": ("recursive", "2x2"),
}


def params_of(transform: str) -> SamplingParams:
    return SamplingParams(
        **{"seed": 0, "ignore_eos": True, "max_tokens": TOKENS, **TRANSFORMS[transform]}
    )


PAIR = (0, 4.0)


@functools.cache
def llm_of(mode: str):
    """An engine whose one compiled program knows every option; none is compiled after it."""
    llm = joint.spec_llm(joint.pair(*PAIR), *MODES[mode], care=True)
    llm.generate([PROMPT], SamplingParams(max_tokens=TOKENS, n=BATCH, **TRANSFORMS["all at once"]))
    return llm


@functools.cache
def counted(mode: str, samples: int) -> tuple[Counted, dict[str, np.ndarray]]:
    """All, and the counts of each transform.

    Each mode has seeds of its own: coupled tokens are the same in every shape of tree.
    """
    first_seed = 1_000_000 * list(MODES).index(mode)
    transforms = FAST if samples == SAMPLES else tuple(TRANSFORMS)
    found = Counted(llm_of(mode), [params_of(t) for t in transforms], samples, first_seed)
    return found, dict(zip(transforms, found.counts, strict=True))


def check(mode: str, transform: str, samples: int):
    found, counts_of = counted(mode, samples)
    assert found.rounds >= 2
    assert (found.lengths[1 : TOKENS + 1] > 0).all(), "rounds of every length must occur"
    counts = counts_of[transform]
    assert counts.sum() >= samples
    fit = fit_of(counts, exact_joint(joint.next_logits(*PAIR), params_of(transform)))
    assert fit.p_value > ALPHA, fit


class EveryTransform:
    """One class per mode and shape, which workers take as a whole.

    Fast: the rules that are equal in distribution alone. Slow: other shapes, and coupled, whose
    tokens are compared with plain decoding's elsewhere.
    """

    mode: str

    @pytest.mark.parametrize("transform", FAST)
    def test_3_000_samples_have_the_targets_joint_distribution(self, transform):
        check(self.mode, transform, SAMPLES)

    @pytest.mark.slow
    @pytest.mark.parametrize("transform", TRANSFORMS)
    def test_30_000_samples_have_the_targets_joint_distribution(self, transform):
        check(self.mode, transform, 30_000)


class TestCoupledChain(EveryTransform):
    pytestmark = pytest.mark.slow
    mode = "coupled chain"


class TestCoupledStaticTree(EveryTransform):
    pytestmark = pytest.mark.slow
    mode = "coupled static tree"


class TestCoupledDynamicTree(EveryTransform):
    pytestmark = pytest.mark.slow
    mode = "coupled dynamic tree"


class TestCoupledDeeperDynamicTree(EveryTransform):
    pytestmark = pytest.mark.slow
    mode = "coupled deeper dynamic tree"


class TestBlockChain(EveryTransform):
    mode = "block chain"


class TestRecursiveChain(EveryTransform):
    pytestmark = pytest.mark.slow
    mode = "recursive chain"


class TestRecursiveStaticTree(EveryTransform):
    mode = "recursive static tree"


def test_every_mode_has_a_class():
    assert {c.mode for c in EveryTransform.__subclasses__()} == set(MODES)
