"""Settings of an EAGLE-3 head by hand, `draft_overrides`, and what a new head starts from."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from serve.admin import read_weights
from specjax import LLM, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.draft_files import save_draft_files
from specjax.checkpoint.weights import describe_head, save_model, source_in
from specjax.drafts.eagle3 import Eagle3Source
from specjax.engine.sources import load_head

RIGHT = {"norm_before_residual": True}


@pytest.fixture(scope="module")
def heads(thin_policy, tmp_path_factory):
    """The source of a head, its files, and the same with another value in config.json."""
    place = tmp_path_factory.mktemp("heads")
    target = hf.read_config(thin_policy).running(param_dtype="float32", compute_dtype="float32")
    source, params = Eagle3Source.new(target.replace(mtp_num_layers=0), seed=5)
    cfg = dataclasses.replace(source.cfg, **RIGHT)
    source = dataclasses.replace(source, cfg=cfg)
    save_draft_files(place / "right", source, params, "float32")
    shutil.copytree(place / "right", place / "wrong")
    file = place / "wrong" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"norm_before_residual": False}))
    return source, str(place / "right"), str(place / "wrong")


def loaded(model: Path, head: str, overrides: dict | None = None) -> LLM:
    spec = SpecConfig("1_1_2", draft=head, draft_overrides=overrides or {})
    return LLM(str(model), spec, max_batch=1, max_len=32)


def test_a_wrong_setting_in_the_files_is_set_right_by_hand(heads, thin_policy):
    llm = loaded(thin_policy, heads[2], RIGHT)
    assert llm.source.cfg.norm_before_residual
    assert any("norm_before_residual true" in line for line in llm.notes)
    as_it_should_be, as_in_files = (loaded(thin_policy, x) for x in heads[1:])
    assert llm.source == as_it_should_be.source != as_in_files.source
    for a, b in zip(*(jax.tree.leaves(x.head) for x in (llm, as_it_should_be)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_new_weights_of_a_server_are_read_with_the_same_switches(heads, thin_policy):
    target = hf.read_config(thin_policy)
    for overrides, expected in ((RIGHT, True), ({}, False)):
        _, head = read_weights(Path(heads[2]), target, True, None, overrides=overrides)
        assert head.source.cfg.norm_before_residual is expected


def test_what_is_no_head_in_files_takes_no_switches(heads, thin_policy, thin_model, tmp_path):
    cfg, policy, params = hf.load_checkpoint(thin_policy)
    hf.save_head(tmp_path / "head.safetensors", cfg, params)
    found = [
        (thin_policy, "an MTP head"),
        (tmp_path / "head.safetensors", "an MTP head"),
        (thin_model, "a model"),
    ]
    for path, what in found:
        spec = SpecConfig("1_1_2", draft=str(path), draft_overrides=RIGHT)
        refused = f"draft_overrides is about an EAGLE-3 head in files.* is {what}; leave it out"
        with pytest.raises(ValueError, match=refused):
            LLM((cfg, policy, None), spec, max_batch=1, max_len=32)


def test_a_setting_that_the_layout_has_no_key_for_is_saved_in_the_other_one(
    heads, thin_policy, tmp_path
):
    cfg, policy, _ = hf.load_checkpoint(thin_policy)
    cfg = cfg.replace(mtp_num_layers=0)
    _, head = load_head(heads[2], cfg, overrides={"norm_output": True})
    again = source_in("here", describe_head(head), cfg)
    assert again.cfg == head.source.cfg
    save_model(tmp_path / "saved", cfg, policy, head, None)
    saved = load_head(str(tmp_path / "saved" / "draft"), cfg)[1].source
    assert saved.cfg == head.source.cfg
