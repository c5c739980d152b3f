"""A draft head saved alone, without its policy's tensors; test_rl has the runs that do it."""

import jax
import numpy as np
import pytest

from specjax.checked_json import CheckpointError
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.store import load_draft
from specjax.command_line import ConfigError
from specjax.config import SpecConfig
from specjax.drafts.mtp import MTPSource, init_head_params
from train.head_files import HeadCheckpoints, starting_head


def same(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


def test_a_policy_without_a_head_takes_one_with_its_switches(thin_policy, tmp_path):
    model, _, _ = hf.load_checkpoint(thin_policy)
    trained = model.replace(mtp_num_layers=2, mtp_concat="hidden_first", mtp_recycle="pre_norm")
    head = init_head_params(trained, 5)
    with HeadCheckpoints(tmp_path, trained, keep_last=1) as heads:
        heads.save(7, head)
    bare = model.replace(mtp_num_layers=0)
    got, loaded = starting_head(SpecConfig(draft=str(tmp_path / "7")), bare, None, None)
    assert got == trained and same(loaded.params, head)
    assert loaded.source == MTPSource(trained)


def test_a_head_of_another_policy_is_refused_by_the_name_of_its_array(thin_policy, tmp_path):
    model, _, _ = hf.load_checkpoint(thin_policy)
    wide = model.replace(hidden_size=32)
    with HeadCheckpoints(tmp_path, wide, keep_last=1) as heads:
        heads.save(1, init_head_params(wide, 0))
    with pytest.raises(CheckpointError, match="in the checkpoint and .* in the model"):
        starting_head(SpecConfig(draft=str(tmp_path / "1")), model, None, None)
    with pytest.raises(ConfigError, match="expected auto, checkpoint, random, ngram, the dir"):
        starting_head(SpecConfig(draft=str(tmp_path / "2")), model, None, None)


def test_a_run_gone_back_overwrites_the_heads_of_its_abandoned_future(thin_policy, tmp_path):
    model, _, _ = hf.load_checkpoint(thin_policy)
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()  # left by a kill
    with HeadCheckpoints(tmp_path, model, keep_last=3) as heads:
        for step in (1, 2, 3, 4):
            heads.save(step, init_head_params(model, step))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3", "4"]
    with HeadCheckpoints(tmp_path, model, keep_last=3) as heads:
        heads.save(3, init_head_params(model, 9))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]
    assert same(load_draft(tmp_path / "3")[0], init_head_params(model, 9))
