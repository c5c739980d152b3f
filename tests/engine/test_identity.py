"""Coupled decoding emits plain decoding's tokens, and a broken decoder is told from rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import apt, prompts_of, tiny_config, tiny_model

from specjax import LLM, SamplingParams, SpecConfig
from specjax.decode import round as decode_round
from specjax.decode.tree import chain_bits
from specjax.decode.verify import Verified
from specjax.engine.compare import first_difference
from specjax.engine.request import make_jobs

VOCAB, MAX_LEN, EOS = 64, 72, 7
UNEVEN = ((0,), (1,), (2,), (1, 0), (1, 1), (2, 0), (1, 1, 0), (1, 1, 0, 0))


@functools.cache
def model(mtp=1, head="apt", scan=False):
    cfg = tiny_config(VOCAB, mtp=mtp, eos_token_ids=(EOS,), scan_layers=scan)
    cfg, params, random_head = tiny_model(cfg, seed=mtp)
    return cfg, params, apt(random_head, cfg) if head == "apt" else random_head


def spec_llm(strategy, batch=2, **kind):
    return LLM(model(**kind), SpecConfig(strategy=strategy), max_batch=batch, max_len=MAX_LEN)


def mixed_requests(count, max_tokens=60, seed=0):
    """Prompts of 1 to 12 tokens; greedy and sampled, some with several samples, some to the end."""
    params = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.0)[i % 3],
            max_tokens=max_tokens - i % 5,
            seed=i % 4,
            n=1 + (i % 4 == 1),
            ignore_eos=i % 4 != 3,
        )
        for i in range(count)
    ]
    return prompts_of(count, VOCAB, seed), params


def assert_same_as_plain(llm, prompts, params):
    unexplained = [d for d in llm.compare_with_plain(prompts, params) if not d.explained]
    assert not unexplained, "\n".join(map(str, unexplained))


@pytest.mark.parametrize(
    ("strategy", "batch", "kind", "accept_length"),
    [
        ("1_1_2", 1, dict(mtp=1, head="random"), 1.02),
        ("4_1_5", 4, dict(mtp=2, head="apt"), 1.5),
        ("7_1_8", 2, dict(mtp=1, head="apt"), 1.5),
        ("2x2", 2, dict(mtp=1, head="random"), 1.05),
        ("4x2x1", 16, dict(mtp=2, head="apt"), 1.5),
        ("default", 4, dict(mtp=1, head="apt", scan=True), 1.5),
        (UNEVEN, 2, dict(mtp=3, head="apt"), 1.5),
    ],
    ids=lambda value: "uneven paths" if value is UNEVEN else str(value),
)
def test_coupled_decoding_emits_the_tokens_of_plain_decoding(strategy, batch, kind, accept_length):
    llm = spec_llm(strategy, batch, **kind)
    assert_same_as_plain(llm, *mixed_requests(20, seed=batch))
    assert llm.totals.tokens > 1000
    assert llm.totals.accept_length > accept_length, "too little was accepted to prove anything"


@pytest.fixture(scope="module")
def chain_llm():
    return spec_llm("4_1_5", batch=4)


@pytest.mark.parametrize("broken", ["nan", "infinite", "zero", "other"])
def test_no_draft_weights_whatever_they_are_change_a_token(chain_llm, broken):
    cfg, params, head = model()
    value = {"nan": np.nan, "infinite": np.inf, "zero": 0.0}.get(broken)
    if broken == "other":
        bad = tiny_model(cfg, seed=99)[2]
    else:
        bad = jax.tree.map(lambda x: jnp.full_like(x, value), head)
    requests = mixed_requests(6)
    before = chain_llm.generate(*requests)
    good_length = chain_llm.totals.accept_length
    chain_llm.update_weights(params, bad)
    try:
        assert_same_as_plain(chain_llm, *requests)
        assert chain_llm.totals.accept_length < 0.8 * good_length
    finally:
        chain_llm.update_weights(params, head)
    # Nothing of the broken head is left behind, in the caches least of all.
    assert [o.samples for o in chain_llm.generate(*requests)] == [o.samples for o in before]


def test_tokens_do_not_depend_on_the_order_of_the_prompts(chain_llm):
    prompts, params = mixed_requests(9)
    order = np.random.default_rng(0).permutation(9)
    straight = chain_llm.generate(prompts, params)
    mixed = chain_llm.generate([prompts[i] for i in order], [params[i] for i in order])
    for place, i in enumerate(order):
        for k, (a, b) in enumerate(zip(straight[i].samples, mixed[place].samples, strict=True)):
            if a.token_ids != b.token_ids:
                job = make_jobs(prompts[i], params[i], (EOS,))[k]
                runner = chain_llm.engine.runner
                found = first_difference(runner, int(i), k, job, a.token_ids, b.token_ids)
                assert found.explained, str(found)


def test_speculation_without_a_head_is_refused_before_anything_runs():
    cfg, params, _ = model()
    with pytest.raises(ValueError, match="no draft head.*head='random'"):
        LLM((cfg, params, None), SpecConfig(), max_batch=2, max_len=MAX_LEN)
    llm = LLM((cfg.replace(mtp_num_layers=0), params, None), SpecConfig(head="random"), max_len=32)
    assert llm.cfg.mtp_num_layers == 1 and llm.head is not None


# --- what the comparison says when something is wrong ---------------------------------------------


def verify_with(positions=None, bits=None):
    """`verify` with other RoPE positions or another visibility."""

    def broken(model, tree, state, tokens):
        root = state.length - 1
        depth = tree.depth if positions is None else positions(tree)
        visible = tree.visible_bits if bits is None else bits(tree)
        x, rows = model.decode(tokens, root[:, None] + depth, state.cache, root, visible)
        return Verified(model.logits(x), model.draft_hidden(x), rows)

    return broken


BROKEN_PARTS = {
    "rows see all rows before them": ("verify", verify_with(bits=lambda t: chain_bits(t.rows))),
    "RoPE by row index": ("verify", verify_with(positions=lambda t: np.arange(t.rows))),
    "the first rows are committed": (
        "take_rows",
        lambda rows, index: jax.tree.map(lambda x: x[..., : index.shape[1], :], rows),
    ),
}


@pytest.mark.parametrize("part", BROKEN_PARTS)
def test_a_broken_tree_decoder_differs_in_ways_that_floating_point_does_not_explain(
    part, monkeypatch
):
    name, replacement = BROKEN_PARTS[part]
    monkeypatch.setattr(decode_round, name, replacement)
    found = spec_llm("4x2x1").compare_with_plain(*mixed_requests(1))
    assert any(not d.explained for d in found)
    assert "NOT explained" in "".join(map(str, found))


def test_verify_as_rewritten_here_is_right_when_nothing_is_changed(monkeypatch):
    """Else the test above would prove nothing."""
    monkeypatch.setattr(decode_round, "verify", verify_with())
    assert_same_as_plain(spec_llm("4x2x1"), *mixed_requests(8))


def test_a_tie_is_explained_and_reported_with_its_position_and_gaps(chain_llm):
    """Tokens 5 and 6 always have the same logit here, and greedy decoding adds no noise."""
    cfg, params, head = model()
    twins = dict(params, lm_head=params["lm_head"].at[:, 6].set(params["lm_head"][:, 5]))
    prompt, greedy = [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4)
    job = make_jobs(prompt, greedy, ())[0]
    runner = chain_llm.engine.runner
    chain_llm.update_weights(twins, head)
    try:
        tie = first_difference(runner, 3, 1, job, [9, 5, 1], [9, 6, 2])
        other = first_difference(runner, 0, 0, job, [9, 5, 1], [9, 8, 2])
        short = first_difference(runner, 0, 0, job, [9, 5], [9])
    finally:
        chain_llm.update_weights(params, head)
    assert tie.explained and abs(tie.plain_gap) < 1e-4 and abs(tie.spec_gap) < 1e-4
    assert (tie.request, tie.sample, tie.position) == (3, 1, 4)
    assert (tie.plain_token, tie.spec_token) == (5, 6)
    assert "explained by floating point" in str(tie)
    assert not other.explained and abs(other.plain_gap) > other.logit_difference
    assert not short.explained and short.spec_token == -1
