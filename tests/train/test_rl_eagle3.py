"""EAGLE-3 heads in `train.rl`: trained online, frozen, saved and loaded again."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_run

from serve.admin import read_weights
from specjax import LLM, SpecConfig
from specjax.checkpoint.format import named_leaves
from specjax.checkpoint.weights import Head, load_model
from specjax.command_line import parse_config
from specjax.drafts.eagle3 import Eagle3Source
from specjax.drafts.mtp import MTPSource
from specjax.engine.sources import kind_of, load_head
from train import rl
from train.schema import RLConfig

pytestmark = pytest.mark.usefixtures("shared_programs")

EAGLE3 = {"rollout.draft": "random", "rollout.draft_kind": "eagle3"}


def trainer(model, out, **changes) -> rl.Trainer:
    return rl.Trainer(parse_config(RLConfig, tiny_run.arguments(model, out, **changes))[0])


def same(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


@pytest.fixture(scope="module")
def run(thin_model, tmp_path_factory):
    """Two steps of an online run, saved after each."""
    out = tmp_path_factory.mktemp("eagle3")
    argv = tiny_run.arguments(thin_model, out / "run", **EAGLE3, **{"checkpoint.every": 1})
    rl.main(argv)
    return out / "run"


@pytest.fixture(scope="module")
def modes(thin_model, tmp_path_factory):
    """Two steps with a frozen head and with one that is trained."""
    out = tmp_path_factory.mktemp("modes")
    found = {}
    for mode in ("frozen", "online"):
        one = trainer(thin_model, out / mode, **EAGLE3, **{"draft.mode": mode})
        start = jax.tree.map(np.asarray, one.head)
        found[mode] = one, start, [one.step() for _ in range(2)]
    return found


def test_the_head_is_trained_and_moves_no_bit_of_the_policy(modes):
    (frozen, _, plain), (online, start, steps) = modes["frozen"], modes["online"]
    assert isinstance(online.source, Eagle3Source) and frozen.draft is None
    assert same(frozen.params, online.params) and same(frozen.opt_state, online.opt_state)
    for a, b in zip(plain, steps, strict=True):
        assert a["rollout/tokens_sha"] == b["rollout/tokens_sha"]
    assert same(start, frozen.head) and "train/mtp_loss" not in plain[0]
    assert steps[0]["train/mtp_update_norm"] > 0
    before, after = named_leaves(start), named_leaves(online.head)
    still = {name for name in before if np.array_equal(before[name], after[name])}
    assert not still, f"{sorted(still)} are not trained"


@pytest.mark.slow
def test_what_was_saved_is_the_head_that_was_trained(run, modes, thin_model):
    cfg = load_model(thin_model, "float32").cfg
    online = modes["online"][0]
    assert kind_of(run) is Eagle3Source
    _, head = load_head(str(run), cfg)
    assert same(head.params, online.head)
    assert head.source.cfg.taps == online.source.cfg.taps
    whole = load_model(run, "float32")
    assert same(whole.head.params, online.head) and whole.cfg.mtp_num_layers == 0


@pytest.mark.slow
def test_the_saved_head_drafts_in_other_programs(run, thin_model, tmp_path):
    head = str(run)
    again = trainer(thin_model, tmp_path, **{"rollout.draft": head, "draft.mode": "frozen"})
    assert same(again.head, load_head(head, again.model)[1].params)
    assert any(line.startswith("draft: EAGLE-3 head") for line in again.notes)
    llm = LLM(thin_model, SpecConfig("1_1_2", draft=head), max_batch=1, max_len=32)
    assert llm.drafting.described().startswith(f"draft: the head {head}; always 1_1_2")
    # The directory of the run is the policy with its head.
    whole = LLM(run, SpecConfig("1_1_2"), max_batch=1, max_len=32)
    assert isinstance(whole.source, Eagle3Source) and same(whole.head, llm.head)


def test_a_head_of_another_kind_or_with_other_taps_does_not_take_its_place(run, thin_model):
    llm = LLM(thin_model, SpecConfig("1_1_2", draft=str(run)), 1, 32)
    before, source = llm.head, llm.source
    with pytest.raises(ValueError, match="a head for MTPSource, and Eagle3Source drafts"):
        llm.update_head(Head(MTPSource(llm.cfg), llm.head))
    other = dataclasses.replace(source.cfg, norm_before_residual=True)
    with pytest.raises(ValueError, match="norm_before_residual is True, that of the draft is Fal"):
        llm.update_head(Head(dataclasses.replace(source, cfg=other), llm.head))
    assert llm.head is before
    _, head = read_weights(run, llm.cfg, True, None)  # POST /update_weights, what=head
    llm.update_head(head)
    assert same(llm.head, before)
