"""`bench.rl` compares arms bit by bit, and sees an arm that is another run."""

import json

import jax
import pytest
import tiny_run

from bench import rl
from train.heads.training import frozen_policy_parts, head_loss
from train.trainer import Trainer


def compare(policy, out, *arms):
    """Runs one step of arms of `drafts`; returns the figures."""
    small = {"steps": 1, "rollout.max_batch": 1, "rollout.strategy": "2_1_3"}
    small |= {"algo.dynamic_sampling": False, "draft.unroll_steps": 1}
    words = tiny_run.arguments(policy, out, **small)
    try:
        rl.main(["drafts", "--arms", *arms, "--untimed", "0", "--results", str(out), *words])
    finally:
        found = json.loads((out / "rl_drafts.json").read_text())["figures"]
    return found


@pytest.mark.parametrize("name", rl.COMPARISONS)
def test_all_arms_have_settings_with_effect(name, tmp_path):
    found = rl.COMPARISONS[name]
    rl.runs_of(found, found.config, found.settings, 0, tmp_path)


@pytest.mark.slow
def test_arms_have_the_same_tokens_rewards_and_policy(thin_policy, tmp_path):
    found = compare(thin_policy, tmp_path, "none", "online")
    assert found["steps_identical"]["value"] == 1
    low, high = found["ratio/rate/online/none"]["interval"]
    assert 0 < low <= high and (tmp_path / "rl_drafts.png").exists()


@pytest.mark.slow
def test_a_draft_program_that_touches_the_policy_breaks_the_equality(
    thin_policy, tmp_path, monkeypatch
):
    honest = Trainer._update_draft

    def leaking(self, batches, states):
        metrics = honest(self, batches, states)

        def loss(parts):
            batch = {k: v for k, v in batches[0].items() if k != "advantages"}
            return head_loss(self.model, self.cfg.draft, 1.0, self.head, parts, batch, states[0])[0]

        parts = frozen_policy_parts(self.params)
        with monkeypatch.context() as attached:  # `head_loss` detaches the policy; here it may not
            attached.setattr(jax.lax, "stop_gradient", lambda x: x)
            gradients = jax.jit(jax.grad(loss))(parts)
        self.params |= jax.tree.map(lambda p, g: p - 1e-3 * g, parts, gradients)
        return metrics

    monkeypatch.setattr(Trainer, "_update_draft", leaking)
    with pytest.raises(SystemExit, match="not the same run"):
        compare(thin_policy, tmp_path, "none", "frozen", "online")
