"""One speculative and one plain `LLM` for the tests of options, stop strings and logprobs.

Their first request asks for everything, so that one program serves all of these tests: compiling is
what they would spend their time on.
"""

import functools

import jax
from pieces import Pieces
from tiny import apt, prompts_of, tiny_config, tiny_model

from specjax import LLM, SamplingParams, SpecConfig
from specjax.decode.options import Features
from specjax.engine.request import features_of, make_jobs

VOCAB, MAX_LEN, EOS, BATCH = 64, 64, 7, 4
CFG = tiny_config(VOCAB, eos_token_ids=(EOS,))
PROMPTS = prompts_of(4, VOCAB, seed=2, shortest=2)
EVERYTHING = SamplingParams(
    max_tokens=3,
    min_tokens=2,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    logit_bias={3: 1.0},
    allowed_token_ids=range(60),
    bad_words=[(4, 5)],
    transformed_logprobs=True,
    logprobs=2,
    stop="never there",
)
NOTHING = SamplingParams(seed=0, max_tokens=24, ignore_eos=True)
ENGINES = {"speculative": SpecConfig("4x2x1"), "plain": None}


@functools.cache
def weights(seed=3):
    """Policy and a head that is often right, so that paths deep into the tree are walked."""
    _, params, head = tiny_model(CFG, seed)
    return params, apt(head, CFG)


@functools.cache
def shared_llm(name: str) -> LLM:
    """`speculative` or `plain`, with a program that covers every feature for the whole batch."""
    llm = LLM((CFG, *weights()), ENGINES[name], max_batch=BATCH, max_len=MAX_LEN)
    [job] = make_jobs([1], EVERYTHING, (EOS,), Pieces())
    assert features_of(job, VOCAB) == Features.all()
    llm.tokenizer = Pieces()
    llm.generate([[1, 2]] * BATCH, EVERYTHING)
    llm.generate([[1, 2]], EVERYTHING)  # starts one alone
    llm.tokenizer = None
    return llm


COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: COMPILED.append(event) if "backend_compile" in event else None
)


def compilations_of(work) -> int:
    """Programs that the backend compiled, or loaded from its cache, while `work` ran."""
    before = len(COMPILED)
    work()
    return len(COMPILED) - before
