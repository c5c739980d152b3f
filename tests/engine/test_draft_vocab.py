"""A part of the vocabulary to draft from: which tokens it has, and that others compile nothing.

That no token depends on it is part of `test_identity` and `test_every_source`.
"""

import json

import numpy as np
import pytest
from shared import BATCH, CFG, MAX_LEN, PROMPTS, shared_llm, weights

from specjax import LLM, SamplingParams, SpecConfig
from specjax.drafts.eagle3 import Eagle3Source
from specjax.engine import vocabulary
from specjax.engine.engine import Engine
from specjax.engine.sources import source_of
from specjax.engine.vocabulary import TokenCounts, draft_ids, read_token_map
from specjax.models.transformer import to_decode_layout
from specjax.weights.matrix import unpack
from specjax.weights.panels import Panels


def written(tmp_path, listed):
    path = tmp_path / "map.json"
    path.write_text(listed if isinstance(listed, str) else json.dumps(listed), encoding="utf-8")
    return str(path)


def test_they_are_those_of_a_file_or_the_lowest_ids_and_what_ends_a_sequence(tmp_path):
    assert draft_ids(CFG, SpecConfig()) is None
    assert draft_ids(CFG, SpecConfig(draft_vocab=4)).tolist() == [0, 1, 2, 7]
    name = written(tmp_path, [9, 4, 30, 2])  # the most frequent first
    assert draft_ids(CFG, SpecConfig(token_map=name)).tolist() == [2, 4, 9, 30]
    assert draft_ids(CFG, SpecConfig(token_map=name, draft_vocab=2)).tolist() == [4, 9]
    for refused in (SpecConfig(draft_vocab=65), SpecConfig(token_map=name, draft_vocab=5)):
        with pytest.raises(ValueError, match=r"draft_vocab: expected 1 to "):
            draft_ids(CFG, refused)


def test_tokens_that_the_head_drafts_come_before_others(tmp_path):
    own, spec = np.arange(40, 50), SpecConfig(draft_vocab=4)
    assert draft_ids(CFG, spec, own).tolist() == [40, 41, 42, 43]
    assert draft_ids(CFG, spec, np.array([7, 41])).tolist() == [0, 1, 7, 41]
    name = written(tmp_path, [9, 4, 45])
    assert draft_ids(CFG, SpecConfig(token_map=name), own).tolist() == [4, 9, 45]
    disjoint = SpecConfig(token_map=name, draft_vocab=2)
    with pytest.raises(ValueError, match="drafts 10 of 64 tokens, and none of the 2 ids in .*map"):
        draft_ids(CFG, disjoint, own)
    counts = TokenCounts(64, np.arange(40, 44), (7,), own)
    counts.add([3] * 9 + [45] * 5)
    assert counts.choose().tolist() == [40, 41, 42, 45]
    counts.begin_with(np.arange(4), np.array([3, 7]))
    assert counts.choose().tolist() == [0, 3, 7, 45]
    assert counts.drafted.tolist() == [3, 7]


def test_an_engine_drafts_from_tokens_that_its_head_has():
    cfg = CFG.replace(mtp_num_layers=0)
    source, head = Eagle3Source.new(cfg, range(40, 50), weights()[0])
    engine = Engine(cfg, SpecConfig("2_1_3", draft_vocab=12), 2, MAX_LEN, source=source)
    engine.set_params(weights()[0], head)
    assert engine.runner.weights.ids.tolist() == [0, 7, *range(40, 50)]
    used = np.asarray(engine.runner.weights.vocabulary["ids"])
    assert used[used < 64].tolist() == list(range(40, 50))
    engine.set_draft_ids(range(12))
    engine.set_head({**head})
    assert engine.runner.weights.ids.tolist() == list(range(12)), "those that are given stay"


@pytest.mark.parametrize("listed", ["not a list", [1, 64], [1, 2.0], {"1": 2}, [], [1, 2, 1]])
def test_a_file_with_anything_else_is_refused(tmp_path, listed):
    with pytest.raises(ValueError, match="token_map: expected a file with .* below 64"):
        read_token_map(written(tmp_path, listed), 64)


def test_what_was_emitted_most_comes_first_and_then_what_there_was():
    counts = TokenCounts(10, np.array([0, 1, 2, 7]))
    assert not counts.is_due and counts.choose().tolist() == [0, 1, 2, 7]
    counts.add([5, 5, 9, 9, 9, 1])
    assert counts.choose().tolist() == [0, 1, 5, 9]
    counts.add([8] * 5 + [5])
    assert counts.choose().tolist() == [1, 5, 8, 9]


def test_what_is_drafted_follows_what_is_emitted_and_nothing_is_compiled(monkeypatch):
    """A bias towards tokens that are not among the first ones: nothing is accepted, until it is."""
    monkeypatch.setattr(vocabulary, "FIRST_COUNT", 60)
    spec = SpecConfig("4x2x1", draft_vocab=16)
    llm = LLM((CFG, *weights()), spec, max_batch=BATCH, max_len=MAX_LEN)
    above = {token: 30.0 for token in range(40, 48)}
    params = SamplingParams(seed=0, max_tokens=24, ignore_eos=True, logit_bias=above)
    expected = [o.samples[0].token_ids for o in shared_llm("plain").generate(PROMPTS, params)]
    lengths = []
    for _ in range(2):
        before = llm.engine.runner.compilations
        found = [o.samples[0].token_ids for o in llm.generate(PROMPTS, params)]
        assert found == expected
        lengths.append(llm.totals.accept_length)
    assert llm.engine.runner.compilations == before
    assert set(np.unique(expected)) <= set(llm.engine.runner.weights.ids.tolist())
    assert lengths[0] < 1.2 < lengths[1]
    # Those that are given stay, and change neither tokens nor programs.
    llm.update_draft_vocab(range(63, 47, -1))
    for _ in range(2):
        assert [o.samples[0].token_ids for o in llm.generate(PROMPTS, params)] == expected
        assert llm.engine.runner.weights.ids.tolist() == list(range(48, 64))
    assert llm.engine.runner.compilations == before
    with pytest.raises(ValueError, match="were given .*; give ids"):
        llm.update_draft_vocab()
    for wrong in ([1] * 16, range(60, 76)):
        with pytest.raises(ValueError, match="expected .*token ids"):
            llm.update_draft_vocab(wrong)


def test_ids_cannot_be_changed_where_all_are_drafted_from_or_the_rule_needs_them():
    with pytest.raises(ValueError, match=r"of the whole vocabulary; give SpecConfig\(draft_vocab"):
        shared_llm("speculative").update_draft_vocab(range(16))
    block = SpecConfig("1_1_2", acceptance="block", draft_vocab=16)
    with pytest.raises(ValueError, match="acceptance 'block' is exact only with"):
        LLM((CFG, *weights()), block, 1, MAX_LEN).update_draft_vocab(range(16))


def test_rules_that_divide_by_q_keep_the_tokens_that_they_began_with():
    for acceptance, strategy in (("block", "1_1_2"), ("recursive", "2x1")):
        spec = SpecConfig(strategy, acceptance=acceptance, draft_vocab=16)
        assert LLM((CFG, *weights()), spec, 1, MAX_LEN).engine.drafted.counts is None


def test_ngrams_have_no_language_model_head():
    source = source_of(CFG.replace(mtp_num_layers=0), SpecConfig(draft_vocab=8))
    with pytest.raises(ValueError, match="NgramSource cannot draft from a part of the vocabulary"):
        source.columns({}, {}, np.arange(3))


@pytest.mark.parametrize("products", ["xla", "panels"])
def test_the_columns_are_those_of_the_policys_head(products, request):
    if products == "panels":
        request.getfixturevalue("cpu_kernels")
    cfg = CFG.running(products=products)
    policy, ids = weights()[0], np.arange(1, 33, 2)
    some = source_of(cfg, SpecConfig()).columns({}, to_decode_layout(policy, cfg), ids)
    assert some["ids"].tolist() == ids.tolist()
    assert isinstance(some["lm_head"], Panels) == (products == "panels")
    np.testing.assert_array_equal(unpack(some["lm_head"]), policy["lm_head"][:, ids])
