"""Whatever drafts, the tokens are the target's: every source passes these tests.

`SOURCES` has a row for each. In `coupled` acceptance the tokens are those of plain decoding, over
strategies that change with every chunk, batches of two sizes, caches too small for all, prompts
with several samples, weights that are no numbers. In `block` and `recursive` acceptance, which
divide by the probabilities of the draft, the joint distribution of three tokens is the target's.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import engines
import jax
import jax.numpy as jnp
import joint
import numpy as np
import pytest
from dflash_files import DFlash
from eagle3_files import Body, Eagle3
from engines import LONG, MAX_LEN, AtRandom, jobs_of, tokens_of
from joint import ALPHA, PROMPT, SAMPLES, TOKENS, Counted, exact_joint, fit_of
from shared import CFG, weights
from tiers import slow_but
from tiny import apt, tiny_model

from bench.programs import token_map
from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.config import ModelConfig
from specjax.control import ControlConfig
from specjax.engine.compare import first_differences
from specjax.engine.settings import EngineConfig

# --- the sources ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Target:
    """A policy to draft for.

    Attributes:
      head: makes an MTP head for the config.
      other: another model with the same tokens.
    """

    cfg: ModelConfig
    params: dict
    head: Callable[[ModelConfig], dict]
    other: Callable[[], tuple[ModelConfig, dict]]


def disturbed() -> tuple[ModelConfig, dict]:
    """A fair guess of the policy of `IDENTITY`: itself, with noise."""
    keys = iter(jax.random.split(jax.random.key(0), 99))
    policy = weights()[0]
    noisy = jax.tree.map(lambda x: x + 0.1 * x * jax.random.normal(next(keys), x.shape), policy)
    return CFG.replace(mtp_num_layers=0), noisy


def unrelated() -> tuple[ModelConfig, dict]:
    """A model that has nothing to do with the policy of `JOINT`, and is surer of itself."""
    cfg, params, _ = joint.pair(7, 1.0, 0.5)
    return cfg.replace(mtp_num_layers=0), params


PAIR = (0, 4.0)
# A policy whose drafts are accepted now and then.
IDENTITY = Target(CFG, weights()[0], lambda cfg: apt(tiny_model(cfg, 3)[2], cfg), disturbed)
# A policy of five tokens, with drafts that have nothing to do with it, and are surer of themselves.
JOINT = Target(
    *joint.pair(*PAIR)[:2],
    lambda cfg: joint.pair(*PAIR, modules=cfg.mtp_num_layers)[2],
    unrelated,
)


@dataclasses.dataclass(frozen=True)
class Source:
    """A row of the table: something that drafts.

    Attributes:
      draft: the setting that names it, or a function that writes files for a target to a directory.
      modules: number of modules of the MTP head in the policy's checkpoint.
      is_ngram: whether it drafts what followed the same tokens before, and has no weights.
      uses_q: whether it drafts in `block` and `recursive` acceptance.
    """

    draft: str | Callable[[Target, Path], Path]
    modules: int = 0
    is_ngram: bool = False
    uses_q: bool = True

    def model(self, target: Target) -> tuple[ModelConfig, dict, dict | None]:
        """The policy as `LLM` takes it."""
        cfg = target.cfg.replace(mtp_num_layers=self.modules)
        return cfg, target.params, target.head(cfg) if self.modules else None


def model_files(target: Target, path: Path) -> Path:
    hf.save_checkpoint(path, *target.other())
    return path


def body_of(target: Target) -> Body:
    return Body(target.cfg.hidden_size, target.cfg.num_layers, target.cfg.vocab_size)


def eagle3_files(layout: str, **switches):
    """Returns what writes an EAGLE-3 head, with random weights; any `vocab`: all tokens but one."""
    head = Eagle3(boundaries=(0, 1), **switches)

    def write(target: Target, path: Path) -> Path:
        fewer = dataclasses.replace(head, vocab=head.vocab and target.cfg.vocab_size - 1)
        return fewer.write(path, body_of(target), layout)

    return write


def dflash_files(target: Target, path: Path) -> Path:
    head = DFlash(boundaries=(0, 1), mask_token=3, block=4, layers=1)
    return head.write(path, body_of(target), "speculators")


SOURCES = {
    "MTP head": Source("checkpoint", modules=1),
    "MTP head of two modules": Source("checkpoint", modules=2),
    "random MTP head": Source("random"),
    "model": Source(model_files),
    "n-grams": Source("ngram", is_ngram=True),
    "EAGLE-3 head with some tokens": Source(eagle3_files("speculators", vocab=1)),
    "EAGLE-3 head of two layers, with all switches": Source(
        eagle3_files(
            "safeailab",
            layers=2,
            width=8,
            norm_before_residual=True,
            fc_norm="each",
            norm_output=True,
            backbone="qwen3",
            own_embedding=True,
        )  # fmt: skip
    ),
    "P-EAGLE head": Source(eagle3_files("speculators", mask_token=3)),
    "DFlash head": Source(dflash_files),
    "own class": Source("own_drafts:Successors"),
    "own class that is fed": Source("bigrams:Bigrams", is_ngram=True, uses_q=False),
}
# Of each kind one; the others when there is time.
FAST = (
    "MTP head", "model", "n-grams", "EAGLE-3 head with some tokens", "P-EAGLE head", "DFlash head",
    "own class that is fed",
)  # fmt: skip
WITH_WEIGHTS = [name for name, source in SOURCES.items() if not source.is_ngram]


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    """The setting that names a source, which writes its files once for each target."""
    made = {}

    def named(name: str, target: Target) -> str:
        key = name, id(target)
        if key not in made:
            path, draft = tmp_path_factory.mktemp("draft") / "files", SOURCES[name].draft
            made[key] = draft if isinstance(draft, str) else str(draft(target, path))
        return made[key]

    return named


# --- the tokens of plain decoding -----------------------------------------------------------------

# Plain decoding beside a dynamic tree; and, when there is time, all shapes in batches of two sizes.
MIXES = {"fast": ("off", "2_2_4"), "all": ("off", "2_1_3", "2_2_4", "2x2")}


def mixed_llm(name: str, draft: str, mix: str) -> LLM:
    """An engine that changes its strategy with every chunk, and has too few pages for all slots."""
    spec = SpecConfig("2_2_4", draft=draft)
    control = ControlConfig(controller="bandit", strategies=MIXES[mix])

    def llm(cache_bytes=None):
        how = EngineConfig(chunk_tokens=8, page_size=16, prefill_chunk=16, cache_bytes=cache_bytes)
        return LLM(SOURCES[name].model(IDENTITY), spec, 4, MAX_LEN, engine=how, control=control)

    made = llm(12 * llm().engine.runner.page_bytes)
    made.engine.buckets[:] = [4] if mix == "fast" else [1, 4]
    made.engine.controller = AtRandom(arms=MIXES[mix])
    return made


@pytest.fixture(scope="module")
def mixed(drafting):
    return functools.cache(lambda name, mix: mixed_llm(name, drafting(name, IDENTITY), mix))


@functools.cache
def random_jobs():
    return engines.random_jobs(np.random.default_rng(11), 24)


@functools.cache
def random_tokens():
    return tokens_of(random_jobs())


def check(llm: LLM, jobs, expected):
    """Generates; every difference from plain decoding is one of rounding. Returns the totals."""
    samples, totals = llm.engine.generate(jobs)
    tokens = [sample.token_ids for sample in samples]
    found = first_differences(llm.engine.runner, jobs, expected, tokens)
    assert all(d.explained for d in found), "\n".join(map(str, found))
    return totals


@pytest.mark.parametrize("mix", ["fast", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_but(SOURCES, *FAST))
class TestTokensOfPlainDecoding:
    def test_in_every_shape_and_batch(self, mixed, name, mix):
        llm = mixed(name, mix)
        totals = check(llm, random_jobs(), random_tokens())
        assert totals.accepted > 10, "too little was accepted to prove anything"
        assert 0 < totals.drafted_rounds < totals.rounds, "some rounds are plain, others are not"

    def test_with_a_cache_too_small_for_all(self, mixed, name, mix):
        llm = mixed(name, mix)
        before = llm.engine.preemptions
        jobs = [job for i in range(4) for job in jobs_of([i + 1], LONG)]
        check(llm, jobs, tokens_of(jobs))
        assert llm.engine.preemptions > before

    def test_with_samples_and_requests_that_share_a_prompt(self, mixed, name, mix):
        llm, prompt = mixed(name, mix), list(range(20, 60))
        params = SamplingParams(seed=0, max_tokens=20, n=2, ignore_eos=True)
        jobs = [
            *jobs_of(prompt, params),
            *jobs_of([*prompt[:33], 3], params, 1),
            *jobs_of(prompt, dataclasses.replace(params, temperature=0.0, seed=5, n=1), 2),
        ]
        check(llm, jobs, tokens_of(jobs))
        engine = llm.engine
        for job in jobs[:2]:
            engine.add(job)
        while len(engine.scheduler.running) < 2:
            engine.step()
        one, other = (sequence.pages for sequence in engine.scheduler.running.values())
        assert one[:2] == other[:2] and not set(one[2:]) & set(other[2:])
        engine.clear()


def spoilt(head, value):
    """Weights with other numbers; what is no number, such as token ids, stays."""

    def spoil(x):
        is_number = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.full_like(x, value) if is_number else x

    return jax.tree.map(spoil, head)


@pytest.mark.parametrize("name", slow_but(WITH_WEIGHTS, "MTP head", "DFlash head"))
def test_no_draft_weights_whatever_they_are_change_a_token(mixed, name):
    llm, jobs = mixed(name, "fast"), random_jobs()[:8]
    head, expected = llm.head, random_tokens()[:8]
    assert check(llm, jobs, expected).drafted_rounds
    try:
        for value in (np.nan, np.inf, 0.0):
            llm.update_weights(llm.params, spoilt(head, value))
            assert check(llm, jobs, expected).drafted_rounds
    finally:
        llm.update_weights(llm.params, head)
    check(llm, jobs, expected)  # nothing of them is left behind, in the caches least of all


# --- the joint distribution -----------------------------------------------------------------------

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


def requests(**options) -> list[SamplingParams]:
    usual = {"max_tokens": TOKENS, "ignore_eos": True, **options}
    return [SamplingParams(**{**usual, **request}) for request in REQUESTS.values()]


def check_joint(llm, params: list[SamplingParams], prompt=PROMPT) -> np.ndarray:
    """Every request has the exact joint. Returns the number of rounds by tokens emitted."""
    found = Counted(llm, params, SAMPLES, prompt=prompt)
    logits = joint.next_logits(*PAIR, prompt=tuple(prompt))
    for counts, request in zip(found.counts, params, strict=True):
        assert counts.sum() >= SAMPLES
        fit = fit_of(counts, exact_joint(logits, request, prompt))
        assert fit.p_value > ALPHA, (request, fit)
    return found.lengths


@pytest.fixture(scope="module")
def dividing(drafting):
    """Engines by source and rule. `recursive` drafts from a part of the vocabulary."""

    def made(name: str, acceptance: str):
        source = SOURCES[name]
        spec = {"draft": drafting(name, JOINT)}
        if acceptance == "recursive":
            spec["token_map"] = token_map(4)
        if source.is_ngram:
            spec["batch"] = 512  # every slot is compared with every other
        return joint.spec_llm(source.model(JOINT), acceptance, STRATEGIES[acceptance], **spec)

    return functools.cache(made)


# Two sources always, with the two rules, and each of the others when there is time.
ALWAYS = {"MTP head": "block", "EAGLE-3 head with some tokens": "recursive"}
CASES = [
    *ALWAYS.items(),
    *(
        pytest.param(name, "block", marks=pytest.mark.slow)
        for name, source in SOURCES.items()
        if source.uses_q and name not in ALWAYS
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "acceptance"), CASES)
def test_samples_have_the_targets_joint_distribution(dividing, name, acceptance):
    prompt = REPETITIVE if SOURCES[name].is_ngram else PROMPT
    assert (check_joint(dividing(name, acceptance), requests(), prompt)[1:] > 0).all()


@pytest.mark.slow
def test_a_head_that_went_to_nan_leaves_the_joint_distribution(dividing):
    llm = dividing("MTP head", "block")
    head = llm.head
    llm.update_weights(llm.params, spoilt(head, np.nan))
    try:
        check_joint(llm, requests())
    finally:
        llm.update_weights(llm.params, head)
