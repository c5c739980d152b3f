"""Metadata of heads: each head that can be read from files is made again of its metadata."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from specjax.checked_json import CheckpointError
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.draft_files import load_draft_files
from specjax.checkpoint.store import Checkpointer
from specjax.checkpoint.weights import (
    Head,
    describe,
    describe_head,
    fitted,
    load_model,
    read_draft,
    read_head,
    save_model,
    source_in,
)
from specjax.engine.sources import require_same_draft
from specjax.interfaces import Draft

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "eagle3"
POLICY = hf.read_config(GOLDEN / "policy")


def described(source: Draft, params) -> Draft:
    """The source that is made of the metadata, which have passed through JSON."""
    meta = json.loads(json.dumps(describe_head(Head(source, params))))
    again = source_in("a run", meta, POLICY)
    require_same_draft(again, source)
    return again


def test_a_head_that_no_layout_can_express_is_described_and_not_written(tmp_path):
    source, params = read_draft(GOLDEN / "final_state", POLICY)
    assert described(source, params).cfg.taps == ("post_norm",)
    _, policy, _ = hf.load_checkpoint(GOLDEN / "policy", "float32")
    assert not save_model(tmp_path / "hf", POLICY, policy, Head(source, params), None)
    assert (tmp_path / "hf" / "config.json").exists()


@pytest.mark.parametrize("name", sorted(p.parent.name for p in GOLDEN.glob("*/model.safetensors")))
def test_every_golden_head_is_described(name):
    if name == "policy":
        pytest.skip("a model")
    source, params = load_draft_files(GOLDEN / name, POLICY)
    described(source, params)


class Own(Draft):
    """A class that no table has."""


def test_the_policy_of_a_run_with_a_head_of_an_own_class_is_loaded(tmp_path, caplog):
    cfg, policy, _ = hf.load_checkpoint(GOLDEN / "policy", "float32")
    head = {"mix": np.ones((2, 3), np.float32)}
    meta = {"step": 1, **describe(cfg, None, describe_head(Head(Own(), head)))}
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, {"policy": policy, "draft": head}, meta, block=True)
    found = load_model(tmp_path)
    assert found.head is None and found.cfg.mtp_num_layers == 0
    assert read_head(tmp_path, found.cfg) is None
    jax.tree.map(np.testing.assert_array_equal, found.policy, policy)
    said = [r.getMessage() for r in caplog.records if r.name == "specjax.checkpoint.weights"]
    assert len(said) == 1 and "test_about_head:Own'" in said[0], said
    assert said[0].endswith("module:attribute:PATH; only the policy is loaded")
    with pytest.raises(CheckpointError, match="which this version has not"):
        fitted(tmp_path, cfg, None, head, meta)
