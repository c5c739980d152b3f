"""Settings of an EAGLE-3 head by hand, `draft_overrides`, and what a new head starts from."""

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import tiny_config, tiny_model

from serve.admin import read_weights
from serve.cli import generate
from serve.cli.arguments import build_parser
from serve.settings import ServeConfig, load_llm
from specjax import LLM, SpecConfig, verify
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.draft_files import save_draft_files
from specjax.checkpoint.weights import describe_head, save_model, source_in
from specjax.command_line import parse_config
from specjax.drafts.eagle3 import Eagle3Source
from specjax.engine.alarm import ROUNDS, AcceptanceAlarm
from specjax.engine.sources import head_shapes, load_head, load_source
from specjax.speculation import settings_of
from specjax.spelling import SettingError, dotted, flags, spelled
from specjax.verify.__main__ import _parser as verify_parser

RIGHT = {"norm_before_residual": True}


@pytest.fixture(scope="module")
def heads(thin_policy, tmp_path_factory):
    """The source of a head, its files, and the same with another value in config.json."""
    place = tmp_path_factory.mktemp("heads")
    target = hf.read_config(thin_policy).running(param_dtype="float32", compute_dtype="float32")
    source, params = Eagle3Source.new(target.replace(mtp_num_layers=0), seed=5)
    cfg = dataclasses.replace(source.cfg, **RIGHT)
    source = dataclasses.replace(source, cfg=cfg)
    save_draft_files(place / "right", source, params, "safeailab", "float32")
    shutil.copytree(place / "right", place / "wrong")
    file = place / "wrong" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"norm_before_residual": False}))
    return source, str(place / "right"), str(place / "wrong")


def loaded(entry: str, model: Path, head: str, overrides: dict | None) -> LLM:
    if entry == "LLM":
        spec = SpecConfig("1_1_2", draft=head, draft_overrides=overrides or {})
        return LLM(str(model), spec, max_batch=1, max_len=32)
    text = json.dumps(overrides)
    if entry == "serve":
        argv = [
            f"model={model}",
            f"speculation.draft={head}",
            "engine.max_batch=1",
            "engine.max_len=32",
        ]
        argv += ["speculation.strategy=1_1_2"]
        argv += [f"speculation.draft_overrides={text}"] if overrides else []
        return load_llm(parse_config(ServeConfig, argv)[0])
    argv = ["--model", str(model), "--draft", head, "--strategy", "1_1_2"]
    argv += ["--draft-overrides", text] if overrides else []
    if entry == "verify":
        return verify.load(model, settings_of(verify_parser("verify").parse_args(argv)).spec())
    args = build_parser().parse_args(argv)
    args.speculation = settings_of(args)
    return generate._load(args, 1)


@pytest.mark.parametrize("entry", ["LLM", "serve", "generate", "verify"])
def test_a_wrong_setting_in_the_files_is_set_right_by_hand(entry, heads, thin_policy):
    llm = loaded(entry, thin_policy, heads[2], RIGHT)
    assert llm.source.cfg.norm_before_residual
    if entry == "LLM":
        assert any("norm_before_residual true" in line for line in llm.notes)
        as_it_should_be, as_in_files = (loaded(entry, thin_policy, x, None) for x in heads[1:])
        assert llm.source == as_it_should_be.source != as_in_files.source
        for a, b in zip(*(jax.tree.leaves(x.head) for x in (llm, as_it_should_be)), strict=True):
            np.testing.assert_array_equal(a, b)


def test_shapes_and_a_mesh_free_load_read_the_same_switches(heads, thin_policy):
    _, right, wrong = heads
    target = hf.read_config(thin_policy)
    assert head_shapes(wrong, target, RIGHT)[1].source == load_head(right, target)[1].source
    assert head_shapes(wrong, target)[1].source != head_shapes(right, target)[1].source


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
        with pytest.raises(SettingError, match=refused) as ended:
            LLM((cfg, policy, None), spec, max_batch=1, max_len=32)
        typed = spelled(ended.value, flags)
        assert typed.startswith("--draft-overrides is about") and f"and --draft {path} is" in typed
        with pytest.raises(SettingError, match=refused):
            load_source(cfg, spec, None, None, None)


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
    assert (head.source.layout, saved.layout) == ("safeailab", "speculators")


def test_the_warning_names_the_key_as_it_is_typed(heads, caplog):
    alarm = AcceptanceAlarm(heads[0])
    alarm.spell = dotted({"draft_overrides": "speculation"})
    with caplog.at_level(logging.WARNING):
        alarm.add(ROUNDS, 0)
    assert "set those that differ in speculation.draft_overrides" in caplog.text


def test_a_new_head_starts_with_the_policys_language_model_head():
    cfg, policy, _ = tiny_model(tiny_config(32), 1)
    cfg = cfg.replace(mtp_num_layers=0)
    llm = LLM(
        (cfg, policy, None),
        SpecConfig("1_1_2", draft="random", draft_kind="eagle3", head_seed=4),
        max_batch=1,
        max_len=32,
    )
    expected = policy.get("lm_head", policy["embed"].T)
    np.testing.assert_array_equal(llm.head["lm_head"], expected)
    np.testing.assert_array_equal(llm.head["norm"], policy["norm"])
    drawn = llm.source.init(4)
    np.testing.assert_array_equal(llm.head["fc"], drawn["fc"])
    assert not np.array_equal(drawn["lm_head"], expected)


def test_a_new_mtp_head_starts_with_the_policys_last_layer():
    cfg, policy, _ = tiny_model(tiny_config(32), 1)
    cfg = cfg.replace(mtp_num_layers=0)
    spec = SpecConfig("1_1_2", draft="random", head_seed=4)
    _, source, head = load_source(cfg, spec, None, None, None, policy)
    drawn = source.init(4)
    assert jax.tree.map(np.shape, head) == jax.tree.map(np.shape, drawn)
    [module] = head["blocks"].values()
    for name, array in module["layer"].items():
        np.testing.assert_array_equal(array, policy["layers"][name][-1])
    np.testing.assert_array_equal(module["norm"], policy["norm"])
    jax.tree.map(np.testing.assert_array_equal, load_source(cfg, spec, *[None] * 4)[2], drawn)
