"""The program says so when speculation or draft training does nothing."""

import re

import jax
import pytest
import tiny_run

from specjax.checkpoint import huggingface as hf
from specjax.command_line import parse_config
from train import rl
from train.schema import RLConfig


def test_the_alarms_are_printed_by_the_program(thin_policy, tmp_path, capsys):
    model, params, head = hf.load_checkpoint(thin_policy, "float32")
    # A head that is sure of the wrong tokens, and a learning rate that leaves it so.
    wrong = jax.tree_util.tree_map_with_path(
        lambda path, a: -50 * a if path[-1].key == "norm" else a, head
    )
    hf.save_checkpoint(tmp_path / "wrong", model, params, wrong, tokenizer_dir=thin_policy)
    changes = {"steps": 4, "draft.optim.lr": 0, "checkpoint.export": "false"}
    rl.main(tiny_run.arguments(tmp_path / "wrong", tmp_path / "run", **changes))
    lines = capsys.readouterr().out.splitlines()
    assert any(re.match(r"rollouts: compiled \d+ programs in .* s .*temporaries", x) for x in lines)
    once = ["Speculative decoding enabled: True", "Using strategy: 1_1_2", "attention kernel: "]
    for begin in (*once, "Acceptance length: 1.0", "rollouts: compiling "):
        assert sum(x.startswith(begin) for x in lines) == 1, begin
    steps = [x for x in lines if x.startswith("step ")]
    assert steps and all("strategy 1_1_2  accept length 1.0" in x for x in steps[1:])
    lines = [x for x in lines if x.startswith("WARNING")]
    assert len([x for x in lines if "draft training changed nothing" in x]) == 4
    # Once, at the third step in a row.
    flat = [x for x in lines if "speculation only costs time" in x]
    assert len(flat) == 1 and flat[0].startswith("WARNING: step 3: accept length has been 1.0")


def test_a_healthy_head_raises_no_alarm():
    watch = rl.StepWarnings()
    fine = {
        "rollout/drafted_accept_length": 2.5, "train/mtp_tokens": 9, "train/mtp_update_norm": 0.1,
    }  # fmt: skip
    flat = {**fine, "rollout/drafted_accept_length": 1.0}
    for step, metrics in enumerate([fine, flat, flat, fine, flat, flat]):
        assert watch.check(step, metrics) == []
    assert watch.check(7, {}) == []  # no speculation: nothing to watch
    assert "no token" in watch.check(8, {**fine, "train/mtp_tokens": 0})[0]


class Begun(Exception):
    """All that is said before the first step has been said."""


def test_a_run_says_what_may_not_be_as_its_user_thinks(thin_policy, tmp_path, capsys, monkeypatch):
    """That its tokens may depend on the clock, and that its over-sampling can save no time."""

    def begun(*unused, **more):
        raise Begun

    monkeypatch.setattr(rl, "_steps", begun)
    monkeypatch.setattr(rl.Trainer, "warm_up", lambda self: None)  # nothing is run
    changes = {"dtype.compute": "bfloat16"}
    slots = {"rollout.prompts": "4", "rollout.n": "2", "rollout.max_batch": "8"}
    too_many = slots | {"rollout.over_sample": "1.5"}
    controlled = {"rollout.control.strategies": "[off,1_1_2]"}
    with pytest.raises(Begun):
        every = changes | controlled | too_many
        rl.main(tiny_run.arguments(thin_policy, tmp_path / "run", **every))
    lines = capsys.readouterr().out.splitlines()
    assert any(x.startswith("WARNING: in bfloat16") and "rollout.control" in x for x in lines)
    said = next(x for x in lines if x.startswith("WARNING: rollout.over_sample=1.5"))
    assert "12 samples of a step share 8 slots" in said and "rollout.max_batch=12" in said
    cfg = settings(thin_policy, **changes)
    assert rl.precision_warning(cfg, "bfloat16") is None, "one strategy, one replica"
    cfg = settings(thin_policy, **controlled)
    assert rl.precision_warning(cfg, "float32") is None
    assert rl.slots_warning(settings(thin_policy, **slots)) is None, "nothing is over-sampled"
    enough = too_many | {"rollout.max_batch": "12"}
    assert rl.slots_warning(settings(thin_policy, **enough)) is None


def settings(policy, **changes) -> RLConfig:
    return parse_config(RLConfig, tiny_run.arguments(policy, policy, **changes), "test", "")[0]
