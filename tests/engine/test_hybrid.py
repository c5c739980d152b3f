"""A model with Gated DeltaNet layers under load: its tokens are those of plain decoding.

The state of such a layer moves with every token, and is nowhere else. What peers did wrong with it
is done here on purpose, and must be noticed.
"""

import functools

import engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import MAX_LEN, restless_of
from flax import nnx
from recurrent import VOCAB, engine_of, hybrid, jobs_of, plain, tokens, weights
from tiers import slow_but
from tiny import apt, tiny_model

from specjax import LLM, SpecConfig
from specjax.drafts.eagle3 import Eagle3Source
from specjax.engine.engine import Engine
from specjax.engine.prompt_scores import PromptScorer
from specjax.engine.runner import Runner
from specjax.memory import choose_slots
from specjax.models.mixers.gated_delta import GatedDelta
from specjax.models.transformer import graphdef

# Plain decoding, a chain, a dynamic tree, and a static one.
CFG, ARMS = hybrid(), ("off", "3_1_4", "3_2_6", "2x2")


@functools.cache
def restless() -> Engine:
    return restless_of(ARMS, buckets=[4], cfg=CFG, params=weights(CFG))


@functools.cache
def expected(*count) -> list[list[int]]:
    return tokens(plain(CFG), jobs_of(*count))


@pytest.mark.parametrize("count", [5_000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_tokens_under_chaos_are_those_of_plain_decoding(count):
    policy, head = weights(CFG)
    heads = head, apt(tiny_model(CFG, 6)[2], CFG)
    compared, unexplained, _ = engines.chaos(restless(), plain(CFG), [policy], heads, count)
    assert compared >= count and not unexplained, "\n".join(map(str, unexplained))


def test_a_head_forgets_everything_at_some_tokens_and_nothing_at_others():
    """So do siblings in these trees, whose decays then differ by a factor of exp(-100)."""
    policy = weights(CFG)[0]
    w, x = policy["layers"]["0_0"], policy["embed"]
    x = x / np.sqrt((x * x).mean(-1, keepdims=True))
    g = -np.exp(w["A_log"][0]) * np.logaddexp(0, x @ w["delta_a"][0] + w["dt_bias"][0])
    assert (((g < -100).sum(0) > 10) & ((g > -0.1).sum(0) > 10)).any()


# --- what peers did wrong -------------------------------------------------------------------------


def with_slots(state, slots):
    return state._replace(memory=state.memory._replace(slots=jax.device_put(slots)))


def stale_in_plain_rounds(patch):
    """A chunk that drafts nothing reads the states before the last chunk that drafted."""
    right, before = Runner.chunk, []

    def chunk(runner, strategy, *args):
        now = jax.device_get((runner.state.keys, runner.state.memory.slots))
        if strategy != "off":
            before[:] = now
        elif before:
            is_same = (now[0] == before[0]).all(-1)  # it has not ended meanwhile
            runner.state = with_slots(runner.state, choose_slots(is_same, before[1], now[1]))
        return right(runner, strategy, *args)

    patch.setattr(Runner, "chunk", chunk)


def placed(patch, change):
    """Sequences start wrongly.

    Args:
      change: function of what is placed, of the arrays that were kept of prompts, which it may
        change, and of the arrays of slots; returns which slots keep what they hold, or None.
    """
    right = Runner.place

    def place(runner, new):
        memory = jax.device_get((runner.kept.slots, runner.state.memory.slots))
        kept, slots = jax.tree.map(np.array, memory)
        stays = change(new, jax.tree.leaves(kept), jax.tree.leaves(slots))
        runner.kept = runner.kept._replace(slots=jax.device_put(kept))
        right(runner, new)
        if stays is not None:
            slots = choose_slots(stays, slots, runner.state.memory.slots)
            runner.state = with_slots(runner.state, slots)

    patch.setattr(Runner, "place", place)


def shared_after_it_moved(patch):
    """Later samples of a prompt begin with the state that its first one has reached."""
    first = {}

    def change(new, kept, slots):
        known = [tuple(row[:n]) for row, n in zip(new.tokens, new.lengths, strict=True)]
        for prompt, row in zip(known, new.prompts, strict=True):
            for to, array in zip(kept, slots, strict=True):
                to[row] = array[first[prompt]] if prompt in first else to[row]
        for prompt, slot in zip(known, new.slots, strict=True):
            first.setdefault(prompt, slot)

    placed(patch, change)


def evicted_without_saving(patch):
    """A preempted sample continues without the state that it had."""

    def change(new, kept, slots):
        for array in kept:
            array[new.prompts[new.lengths > new.options.prompt_len]] = 0

    placed(patch, change)


def of_the_sequence_before(patch):
    used = set()

    def change(new, kept, slots):
        again = used & {*new.slots.tolist()}
        used.update(new.slots.tolist())
        return np.isin(np.arange(len(slots[0])), [*again])

    placed(patch, change)


PEERS = {
    "vLLM 52942, a step without drafts reads a stale state": stale_in_plain_rounds,
    "vLLM 43559, a shared state is one that moves": shared_after_it_moved,
    "SGLang 36537, a preempted sample lost its state": evicted_without_saving,
    "a slot keeps the state of the sequence before": of_the_sequence_before,
}


@pytest.mark.parametrize("broken", PEERS.values(), ids=PEERS)
def test_a_state_that_the_engine_mistakes_changes_tokens(broken, monkeypatch):
    engine, jobs, right = restless(), jobs_of(3, 6), expected(3, 6)
    with monkeypatch.context() as patch:
        broken(patch)
        assert tokens(engine, jobs) != right
    before = engine.preemptions
    assert tokens(engine, jobs) == right and engine.preemptions > before


def all_rows(count):
    return jnp.where(count > 0, 3, 0)


def one_more(count):
    return jnp.minimum(count + 1, all_rows(count))


# Over how many of its three rows a round advances the convolution and the matrix.
ADVANCES = {
    "as it is": lambda count: (count, count),
    "vLLM 53912, over all rows": lambda count: (all_rows(count), all_rows(count)),
    "one row more for the convolution": lambda count: (one_more(count), count),
    "one row more for the matrix": lambda count: (count, one_more(count)),
}


@pytest.mark.parametrize("name", slow_but(ADVANCES, "vLLM 53912, over all rows"))
def test_a_state_that_advances_wrongly_after_a_round_changes_tokens(name, monkeypatch):
    advance, right = GatedDelta.advance, expected(3)

    def advanced(mixer, slots, rows, count):
        is_round = rows.k.shape[1] == 3  # pieces of prompts are longer
        counts = ADVANCES[name if is_round else "as it is"](count)
        convolved, whole = (advance(mixer, slots, rows, number) for number in counts)
        return convolved._replace(s=whole.s)

    monkeypatch.setattr(GatedDelta, "advance", advanced)
    engine = engine_of(CFG, SpecConfig("2x2"), 2, page_size=16)
    assert (tokens(engine, jobs_of(3)) == right) == (name == "as it is")


# --- other drafts, replicas, scores ---------------------------------------------------------------


def eagle3():
    """A new head, which takes the states behind a layer of each kind."""
    policy = weights(CFG)[0]
    source, head = Eagle3Source.new(CFG, policy=policy)
    assert {*source.cfg.taps} == {1, 2}
    engine = Engine(CFG, SpecConfig("2_2_4"), 4, MAX_LEN, source=source)
    engine.set_params(policy, head)
    return engine


def ngrams_of_replicas():
    spec, model = SpecConfig("2x2", draft="ngram"), (CFG, weights(CFG)[0], None)
    return LLM(model, spec, 2, MAX_LEN, replicas=2).engine


@pytest.mark.parametrize("of", [eagle3, ngrams_of_replicas])
def test_other_drafts_and_replicas_emit_the_tokens_of_plain_decoding(of):
    if of is ngrams_of_replicas and jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    samples, totals = of().generate(jobs_of())
    assert [sample.token_ids for sample in samples] == expected() and totals.accepted


def test_scores_of_a_prompt_are_those_of_the_training_forward():
    """Training reads it in blocks of 64 tokens, and the engine in pieces of 16."""
    ids = np.random.default_rng(0).integers(0, VOCAB, (1, 90))

    @jax.jit
    def logprobs(params):
        model = nnx.merge(graphdef(CFG), params)
        x = model.hidden(ids, np.arange(90)[None], np.ones_like(ids)).x
        return jax.nn.log_softmax(model.logits(x))[0]

    right = np.asarray(logprobs(weights(CFG)[0]))[np.arange(89), ids[0, 1:]]
    scorer = PromptScorer(restless(), MAX_LEN)
    [scores] = scorer.read(scorer.start(ids.tolist()), top=0)
    np.testing.assert_allclose(scores.logprobs[1:], right, atol=1e-3)
