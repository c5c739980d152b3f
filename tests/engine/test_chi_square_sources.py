"""The joint distribution is the target's whatever drafts: draft models, n-grams, heads gone wrong.

As `test_chi_square`, for the rules that divide by q. There the q of the head is what varies; here
it is where the drafts come from, whether they are transformed as the target is, and which requests
have any.
"""

import functools

import jax
import joint
import numpy as np
import pytest
from joint import ALPHA, PROMPT, SAMPLES, TOKENS, Counted, exact_joint, fit_of

from specjax import SamplingParams
from specjax.checkpoint import huggingface as hf

PAIR = (0, 4.0)
REPETITIVE = (1, 3, 0, 1, 3)  # n-grams find a chain of two in the prompt
STRATEGIES = {"block": "2_1_3", "recursive": "2x2"}
REQUESTS = {
    "none": {},
    "several": dict(
        temperature=0.8,
        top_k=4,
        top_p=0.95,
        repetition_penalty=1.5,
        frequency_penalty=0.4,
        bad_words=((3, 0), (1, 1)),
        ignore_eos=False,
    ),
}


def rules(fast: str) -> list:
    """One rule, and the others when there is time."""
    return [a if a == fast else pytest.param(a, marks=pytest.mark.slow) for a in STRATEGIES]


def requests(**options) -> list[SamplingParams]:
    usual = {"max_tokens": TOKENS, "ignore_eos": True, **options}
    return [SamplingParams(**{**usual, **request}) for request in REQUESTS.values()]


def check(llm, params: list[SamplingParams], prompt=PROMPT) -> np.ndarray:
    """Every request has the exact joint; rounds by tokens emitted."""
    found = Counted(llm, params, SAMPLES, prompt=prompt)
    logits = joint.next_logits(*PAIR, prompt=tuple(prompt))
    for counts, request in zip(found.counts, params, strict=True):
        assert counts.sum() >= SAMPLES
        fit = fit_of(counts, exact_joint(logits, request, prompt))
        assert fit.p_value > ALPHA, (request, fit)
    return found.lengths


@functools.cache
def with_head(acceptance: str):
    return joint.spec_llm(joint.pair(*PAIR), acceptance, STRATEGIES[acceptance])


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory):
    """A directory with a model that has nothing to do with the target, and is surer of itself."""
    path = tmp_path_factory.mktemp("draft") / "model"
    hf.save_checkpoint(path, *joint.pair(7, 1.0, 0.5))
    return path


@pytest.mark.parametrize("acceptance", rules(fast="recursive"))
def test_with_a_draft_model(acceptance, draft_model):
    settings = {"draft": draft_model, "draft_vocab": 4}
    llm = joint.spec_llm(joint.pair(*PAIR), acceptance, STRATEGIES[acceptance], **settings)
    assert (check(llm, requests())[1:] > 0).all()


@pytest.mark.parametrize("acceptance", rules(fast="block"))
def test_with_ngrams(acceptance):
    """Rows with and without a draft, by what was drawn above them and by what siblings hold."""
    settings = {"draft": "ngram", "batch": 512}  # every slot is compared with every other
    llm = joint.spec_llm(joint.pair(*PAIR), acceptance, STRATEGIES[acceptance], **settings)
    assert (check(llm, requests(), REPETITIVE)[1:] > 0).all()


@pytest.mark.slow  # `test_with_a_draft_model` has such drafts, too
@pytest.mark.parametrize("acceptance", STRATEGIES)
def test_with_drafts_from_a_part_of_the_vocabulary(acceptance):
    """Two of five tokens are never drafted."""
    llm = joint.spec_llm(joint.pair(*PAIR), acceptance, STRATEGIES[acceptance], draft_vocab=3)
    assert (check(llm, requests())[1:] > 0).all()


@pytest.mark.slow
def test_with_drafts_that_are_not_transformed_as_the_target_is():
    """q has tokens that the target cannot emit."""
    llm = joint.spec_llm(joint.pair(*PAIR), "block", STRATEGIES["block"], aligned=False)
    assert (check(llm, requests())[1:] > 0).all()


@pytest.mark.parametrize("acceptance", rules(fast="block"))
def test_with_a_head_that_went_to_nan(acceptance):
    llm, (_, params, head) = with_head(acceptance), joint.pair(*PAIR)
    llm.update_weights(params, jax.tree.map(lambda x: np.full_like(x, np.nan), head))
    try:
        check(llm, requests())
    finally:
        llm.update_weights(params, head)


def test_a_request_without_drafts_beside_neighbours_with_drafts():
    """In both places: the plain request is first of the batch, and last."""
    llm = with_head("block")
    params = [requests(speculative=False)[0], requests()[1], requests(speculative=False)[1]]
    assert (check(llm, params)[1:] > 0).all()
    plain, drafting, _ = llm.generate([PROMPT] * 3, params)
    assert plain.samples[0].stats.drafted == 0 and plain.samples[0].stats.rounds == TOKENS
    assert drafting.samples[0].stats.drafted > 0
