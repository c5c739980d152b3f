"""A draft head saved alone, without its policy's tensors; test_rl has the runs that do it."""

import dataclasses

import jax
import numpy as np
import pytest

from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.store import load_draft
from specjax.checkpoint.weights import Head, describe_head
from specjax.command_line import ConfigError
from specjax.config import SpecConfig
from specjax.drafts.eagle3 import Eagle3Source
from specjax.drafts.mtp import MTPSource, init_head_params
from specjax.models.families.dense import dense_config
from train.heads.files import HeadCheckpoints, require_same_head, starting_head


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


def test_a_head_whose_files_say_something_else_since_is_not_gone_on_with():
    model = dense_config(64, 16, 24, 1, 4, 2, 8)
    source = Eagle3Source.of(model)
    cfg = dataclasses.replace(source.cfg, norm_before_residual=True)
    was, now = (
        describe_head(Head(one, source.init(0)))
        for one in (source, dataclasses.replace(source, cfg=cfg))
    )
    require_same_head(was, dict(was), model)
    with pytest.raises(ConfigError, match="files describe now: its cfg.norm_before_residual is F"):
        require_same_head(was, now, model)
    own = {"draft_source": {"kind": "my:Own"}}
    for saved, current in (({}, now), (was, None), (own, own)):
        require_same_head(saved, current, model)
