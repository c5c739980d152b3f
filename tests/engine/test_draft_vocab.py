"""A part of the vocabulary to draft from: which tokens it has.

That no token depends on it is part of `test_identity` and `test_every_source`.
"""

import json

import numpy as np
import pytest
from shared import BATCH, CFG, MAX_LEN, PROMPTS, shared_llm, weights

from specjax import LLM, SamplingParams, SpecConfig
from specjax.drafts.eagle3 import Eagle3Source
from specjax.drafts.vocabulary import draft_ids, read_token_map
from specjax.engine.engine import Engine
from specjax.engine.sources import source_of
from specjax.models.transformer import to_decode_layout
from specjax.weights.matrix import unpack
from specjax.weights.panels import Panels


def written(tmp_path, listed):
    path = tmp_path / "map.json"
    path.write_text(listed if isinstance(listed, str) else json.dumps(listed), encoding="utf-8")
    return str(path)


def test_they_are_those_of_a_file(tmp_path):
    assert draft_ids(CFG, SpecConfig()) is None
    name = written(tmp_path, [9, 4, 30, 2])  # the most frequent first
    assert draft_ids(CFG, SpecConfig(token_map=name)).tolist() == [2, 4, 9, 30]
    assert draft_ids(CFG, SpecConfig(token_map=name, draft_vocab=2)).tolist() == [4, 9]
    with pytest.raises(ValueError, match="draft_vocab: expected at most 4, .*map.json, got 5"):
        draft_ids(CFG, SpecConfig(token_map=name, draft_vocab=5))
    for wrong in ({"draft_vocab": 4}, {"draft_vocab": 0, "token_map": name}):
        with pytest.raises(ValueError, match="draft_vocab: got .*; it is 1 or more of token_map"):
            SpecConfig(**wrong)


def test_tokens_that_the_head_does_not_draft_stand_for_none(tmp_path):
    cfg, name = CFG.replace(mtp_num_layers=0), written(tmp_path, [0, 7, *range(40, 45)])
    source, head = Eagle3Source.new(cfg, range(40, 50), weights()[0])
    engine = Engine(cfg, SpecConfig("2_1_3", token_map=name), 2, MAX_LEN, source=source)
    engine.set_params(weights()[0], head)
    used = np.asarray(engine.runner.weights.vocabulary["ids"])
    assert used[used < 64].tolist() == list(range(40, 45))


@pytest.mark.parametrize("listed", ["not a list", [1, 64], [1, 2.0], {"1": 2}, [], [1, 2, 1]])
def test_a_file_with_anything_else_is_refused(tmp_path, listed):
    with pytest.raises(ValueError, match="token_map: expected a file with .* below 64"):
        read_token_map(written(tmp_path, listed), 64)


def test_a_part_that_is_never_emitted_changes_no_token(tmp_path):
    """A bias towards tokens that are not in the file: nothing is accepted."""
    name = written(tmp_path, list(range(16)))
    llm = LLM((CFG, *weights()), SpecConfig("4x2x1", token_map=name), BATCH, MAX_LEN)
    above = {token: 30.0 for token in range(40, 48)}
    params = SamplingParams(seed=0, max_tokens=24, ignore_eos=True, logit_bias=above)
    expected = [o.samples[0].token_ids for o in shared_llm("plain").generate(PROMPTS, params)]
    assert [o.samples[0].token_ids for o in llm.generate(PROMPTS, params)] == expected
    assert llm.totals.accept_length < 1.2


def test_ngrams_have_no_language_model_head():
    source = source_of(CFG.replace(mtp_num_layers=0), SpecConfig())
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
