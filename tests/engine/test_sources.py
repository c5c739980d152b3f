"""Draft sources as configurations name them; draft models from directories."""

import jax
import numpy as np
import pytest
from tiny import tiny_config, tiny_model

from specjax import SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.drafts.mtp import MTPSource
from specjax.drafts.ngram import NgramSource
from specjax.engine.runner import Runner
from specjax.engine.sources import check_vocabulary, load_draft_model
from specjax.models.transformer import to_decode_layout
from specjax.parallel import sharding
from specjax.tokenizer import load_tokenizer

VOCAB = 32
DRAFT = tiny_config(VOCAB, mtp=0, layers=2)


def test_a_runner_drafts_with_what_the_settings_name():
    def source(**settings):
        spec = SpecConfig("2_1_3", **settings)
        return Runner(tiny_config(VOCAB), spec, 1, 8, products="xla").plan.source

    assert source() == MTPSource(tiny_config(VOCAB))
    assert source(source="ngram", ngram_max=3) == NgramSource(vocab=VOCAB, longest=3)
    with pytest.raises(ValueError, match="weights of its own; load it with"):
        source(draft_model="somewhere")


def test_vocabularies_are_compared_by_what_ids_mean():
    padded = DRAFT.replace(vocab_size=48)
    ids = {f"t{i}": i for i in range(VOCAB)}
    check_vocabulary(DRAFT, DRAFT, None, None)
    check_vocabulary(padded, DRAFT, ids, ids)
    check_vocabulary(padded, DRAFT, ids | {"<extra>": VOCAB}, ids)
    with pytest.raises(ValueError, match="vocabulary of 48, the target of 32"):
        check_vocabulary(padded, DRAFT, ids, None)
    swapped = ids | {"t3": 4, "t4": 3}
    with pytest.raises(ValueError, match="differs from the target's in 2 ids: id 3 is 't4'"):
        check_vocabulary(DRAFT, DRAFT, swapped, ids)


def test_a_directory_becomes_a_source_whose_vocabulary_was_checked(tmp_path):
    cfg = tiny_config(VOCAB, mtp=1)
    _, params, head = tiny_model(cfg)
    hf.save_checkpoint(tmp_path / "draft", cfg, params, head)
    source, layout = load_draft_model(tmp_path / "draft", DRAFT)
    assert source.vocab == VOCAB and source.cfg.num_layers == cfg.num_layers
    jax.tree.map(np.testing.assert_array_equal, layout, to_decode_layout(params, cfg))
    with pytest.raises(ValueError, match="vocabulary of 32, the target of 64"):
        load_draft_model(tmp_path / "draft", tiny_config(64))


def test_a_draft_model_is_split_over_the_targets_mesh(tmp_path):
    """And stacked, because fused weights cannot be split."""
    cfg, params, _ = tiny_model(tiny_config(VOCAB))
    hf.save_checkpoint(tmp_path / "draft", cfg, params)
    mesh = sharding.make_mesh(sharding.MeshConfig(tp=2))
    source, layout = load_draft_model(tmp_path / "draft", DRAFT, mesh=mesh)
    assert source.cfg.run.scan_layers
    q = layout["layers"]["q"]
    assert q.sharding.mesh == mesh and q.addressable_shards[0].data.shape[-1] * 2 == q.shape[-1]


def test_tokenizers_of_both_directories_are_compared(tiny_policy):
    cfg, tokenizer = hf.read_config(tiny_policy), load_tokenizer(tiny_policy)
    assert load_draft_model(tiny_policy, cfg, tokenizer)[0].vocab == cfg.vocab_size

    class Shuffled:
        def get_vocab(self):
            ids = tokenizer.get_vocab()
            first, second = sorted(ids, key=ids.get)[:2]
            return ids | {first: ids[second], second: ids[first]}

    with pytest.raises(ValueError, match="differs from the target's in 2 ids"):
        load_draft_model(tiny_policy, cfg, Shuffled())
