"""What a user may name as the draft: files, directories, words and classes, right and wrong."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from serve.admin import read_weights
from specjax import SpecConfig
from specjax.checked_json import CheckpointError
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.convert import convert
from specjax.checkpoint.draft_files import find_draft, load_draft_files
from specjax.checkpoint.weights import Head, load_model, read_head, save_model
from specjax.drafts.eagle3 import Eagle3Source
from specjax.drafts.model import ModelSource
from specjax.engine.sources import (
    kind_of,
    load_head,
    own_class,
    settle_draft,
)
from specjax.interfaces import Draft

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "eagle3"
POLICY = hf.read_config(GOLDEN / "policy")


def same(a, b) -> None:
    import jax

    jax.tree.map(np.testing.assert_array_equal, a, b)


# --- a head in the directory of its policy --------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(directory that `train.rl` exports, its head)."""
    path = tmp_path_factory.mktemp("exported") / "hf"
    cfg, policy, _ = hf.load_checkpoint(GOLDEN / "policy", "float32")
    head = Head(*load_draft_files(GOLDEN / "plain", cfg))
    assert save_model(path, cfg, policy, head, None)
    return path, head


def test_an_exported_policy_is_loaded_with_its_head(exported):
    path, head = exported
    found = load_model(path, "float32")
    assert found.head.source == head.source and found.cfg.mtp_num_layers == 0
    same(found.head.params, head.params)
    assert read_head(path, found.cfg) == head.source  # what train.plan plans with
    policy, read = read_weights(path, found.cfg, False, None)
    same(read.params, head.params)
    same(policy, found.policy)


def test_an_exported_policy_is_a_head_for_others(exported):
    path, head = exported
    assert kind_of(path) is kind_of(path, POLICY) is Eagle3Source
    assert kind_of(path, POLICY.replace(hidden_size=2 * POLICY.hidden_size)) is ModelSource
    _, found = load_head(str(path), POLICY.running(param_dtype="float32"))
    same(found.params, head.params)
    assert load_head(str(path), POLICY, weights=False)[1].source.cfg.taps == head.source.cfg.taps
    drafting = settle_draft(SpecConfig("2_1_3", draft=str(path)), None, None, target=POLICY)
    assert drafting.kind is Eagle3Source and drafting.with_head


def test_conversion_takes_the_head_along(exported, tmp_path):
    path, head = exported
    convert(path, tmp_path / "orbax", to="orbax")
    found = load_model(tmp_path / "orbax")
    assert isinstance(found.head.source, Eagle3Source)
    same(found.head.params, head.params)


# --- wrong places ---------------------------------------------------------------------------------


def test_a_file_bare_weights_and_an_empty_directory_are_no_head(tmp_path):
    (tmp_path / "weights").mkdir()
    shutil.copy(GOLDEN / "plain" / "model.safetensors", tmp_path / "weights")
    for place, said in (
        (GOLDEN / "plain" / "model.safetensors", f"name the directory {GOLDEN / 'plain'}$"),
        (tmp_path / "weights", "no config.json"),
        (tmp_path, "found neither"),
    ):
        with pytest.raises(CheckpointError, match=said):
            load_head(str(place), POLICY)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("", "expected auto, checkpoint"),
        ("NGRAM", "did you mean 'ngram'?"),
        ("none", "strategy=off drafts nothing"),
        ("eagle3", "draft=random with draft_kind"),
        ("zzz", "got 'zzz'"),
    ],
)
def test_a_wrong_word_has_a_hint_and_is_no_directory(word, hint):
    with pytest.raises(ValueError) as raised:
        settle_draft(SpecConfig("2_1_3", draft=word), None, None)
    assert hint in str(raised.value)


# --- classes of one's own -------------------------------------------------------------------------


class Own(Draft):
    pass


@pytest.mark.parametrize("name", ["os:getcwd", "os:PathLike", "os:nothing", "no_one:x"])
def test_what_is_no_class_of_drafts_is_an_error_of_the_setting(name):
    with pytest.raises(ValueError, match=f"draft={name}.*: (expected a class|cannot load)"):
        settle_draft(SpecConfig("2_1_3", draft=name), None, None)


def test_a_class_of_drafts_is_one():
    assert own_class(f"{__name__}:Own") is Own


def test_models_with_the_word_eagle_in_their_class_are_no_heads(tmp_path):
    shutil.copytree(GOLDEN / "policy", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    raw = json.loads(file.read_text())
    for name in ("Eagle2_5_VLForConditionalGeneration", "EagleChatModel"):
        file.write_text(json.dumps(raw | {"architectures": [name]}))
        assert find_draft(tmp_path / "model") is None
    tensors = load_file(GOLDEN / "plain" / "model.safetensors")
    tensors = {k.replace("midlayer.", "odd."): np.array(x) for k, x in tensors.items()}
    tensors = {k: x for k, x in tensors.items() if k not in ("d2t", "t2d")}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    for name in ("LlamaForCausalLMEagle3", "Eagle3Speculator", "EagleLlamaModel3"):
        file.write_text(json.dumps(raw | {"architectures": [name]}))
        is_head = name != "EagleLlamaModel3"
        assert (find_draft(tmp_path / "model") is Eagle3Source) == is_head, name
