"""Over-sampling, partial rollouts and exact mode with the real engine and the tiny policy."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from specjax.checkpoint.store import Checkpointer
from specjax.command_line import parse_config
from specjax.decode import round as decode_round
from specjax.interfaces import Denominators
from train import rl
from train.loss.algo import algo
from train.loss.packing import Sample, pack
from train.loss.terms import rl_loss
from train.rollout.groups import token_versions
from train.run.files import read_metrics
from train.run.start import restore, save
from train.schema import RLConfig

pytestmark = pytest.mark.usefixtures("shared_programs")

OVER = {
    "algo.dynamic_sampling": "false",
    "draft.mode": "frozen",
    "seed": 14,
    "rollout.prompts": 2,
    "rollout.over_sample": 2,
    "rollout.n": 2,
    "rollout.chunk_tokens": 4,
}
CONTROL = {
    "rollout.control.controller": "bandit",
    "rollout.control.strategies": "[off,1_1_2]",
    "rollout.control.bandit": "{epsilon: 0.5}",
}
STEPS = 6
PARTIAL = {**OVER, "rollout.partial": "true", "rollout.max_staleness": 2}


def make(model, out, /, **changes):
    return rl.Trainer(parse_config(RLConfig, tiny_run.arguments(model, out, **changes))[0])


def leaves(tree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def same(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


def learned(metrics: dict) -> dict:
    """Of a step's metrics those that must not depend on how the rollout was run."""
    names = [
        "tokens", "tokens_sha", "carried_sha", "reward", "budget", "groups_drawn",
        "groups_selected", "groups_carried", "groups_dropped_stale", "stale_token_share",
        "staleness_mean", "length_bias",
    ]  # fmt: skip
    trained = [f"train/{name}" for name in ("loss", "grad_norm", "entropy", "ratio", "tokens")]
    found = {name: metrics.get(name) for name in [f"rollout/{n}" for n in names] + trained}
    # The engine's log-probabilities are the same up to their last bits only.
    difference = metrics.get("train/train_rollout_logprob_abs_diff", 0.0)
    return found | {"engine and trainer agree": difference < 1e-4}


# --- over-sampling --------------------------------------------------------------------------------


@pytest.mark.slow
def test_over_sampling_takes_the_shortest_groups_and_stops_early(thin_policy, tmp_path):
    plain = {**OVER, "rollout.strategy": "off", "rollout.max_batch": 8, "rollout.chunk_tokens": 2}
    early = make(thin_policy, tmp_path, **plain)
    whole = make(thin_policy, tmp_path, **plain | {"rollout.over_sample": 1, "rollout.prompts": 4})
    stopped, full = early.step(), whole.step()
    samples = [group.responses for group in whole.last_rollout]
    needed = [max(len(s.token_ids) for s in group) for group in samples]
    shortest = sorted(range(4), key=lambda i: (needed[i], i))[:2]
    budget = needed[shortest[-1]]
    assert stopped["rollout/budget"] == budget < max(needed) == 20
    complete = [i for i in range(4) if needed[i] <= budget]
    for mine, i in zip(early.last_rollout, complete, strict=True):
        assert mine.position == whole.last_rollout[i].position
        assert [s.token_ids for s in mine.responses] == [s.token_ids for s in samples[i]]
    assert stopped["rollout/tokens"] + stopped["rollout/tokens_cut"] < full["rollout/tokens"]
    assert stopped["rollout/groups_drawn"] == 4 and stopped["rollout/groups_selected"] == 2
    assert stopped["rollout/groups_dropped"] == 2
    lengths = [len(s.token_ids) for i in shortest for s in samples[i]]
    assert stopped["rollout/selected_length_mean"] == pytest.approx(np.mean(lengths))
    assert stopped["rollout/length_bias"] < 0 == full["rollout/length_bias"]
    assert (
        early.rollouts.draws.position == whole.rollouts.draws.position
        and not early.rollouts.carried
    )


# --- partial rollouts -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def partial(thin_policy, tmp_path_factory):
    """(trainer, metrics of six steps, weights that sampled each, rollouts, saved at the third).

    Its strategy is chosen by the clock, and everything is decoded again plainly.
    """
    out = tmp_path_factory.mktemp("partial")
    exact = {"rollout.exact_mode": "true"}
    trainer, steps, weights = make(thin_policy, out, **PARTIAL, **CONTROL, **exact), [], {}
    trainer.warm_up()
    taken = []
    for step in range(1, STEPS + 1):
        weights[step] = jax.tree.map(jnp.copy, trainer.params)
        steps.append(trainer.step())
        taken.append(trainer.last_rollout)
        if step == 3:
            with Checkpointer(out / "checkpoints") as checkpoints:
                save(trainer, checkpoints, block=True)
    return trainer, steps, weights, taken, out / "checkpoints"


def test_unfinished_groups_are_carried_and_finished_later(partial):
    _, steps, _, taken, _ = partial
    assert all(s["rollout/groups_selected"] == 2 for s in steps)
    assert steps[0]["rollout/groups_carried"] >= 2 and steps[0]["rollout/stale_token_share"] == 0
    assert any(s["rollout/stale_token_share"] > 0 for s in steps)
    for before, after in zip(steps, steps[1:], strict=False):
        kept = before["rollout/groups_carried"] - after["rollout/groups_dropped_stale"]
        assert after["rollout/groups_drawn"] == 4 - kept
    ages = [
        token_versions(s.weight_versions, len(s.token_ids))
        for rollout in taken for group in rollout for s in group.responses
    ]  # fmt: skip
    assert any(len(set(a)) > 1 for a in ages) and all((np.diff(a) >= 0).all() for a in ages)
    assert all(s["train/train_rollout_logprob_abs_diff"] < 1e-4 for s in steps)


def test_every_tokens_logprobs_are_those_of_the_weights_that_sampled_it(partial):
    trainer, _, weights, taken, _ = partial
    mixed = 0
    for rollout in taken:
        for group in rollout:
            for sample in group.responses:
                old = sample.old_logprobs
                versions = token_versions(sample.weight_versions, len(sample.token_ids))
                if len(set(versions.tolist())) < 2:
                    continue
                mixed += 1
                batch = pack([Sample(0, group.prompt, sample.token_ids)], 64, 2)[0]
                for version in set(versions.tolist()):
                    scored = trainer.policy.logprobs(weights[version], trainer.policy.place(batch))
                    scored = np.asarray(scored)[batch["loss_mask"] > 0]
                    mine = versions == version
                    engine = np.array(sample.logprobs)
                    np.testing.assert_allclose(engine[mine], scored[mine], atol=1e-4)
                    assert abs(engine[mine].sum() - scored[mine].sum()) < 1e-4
                    assert not np.allclose(engine[~mine], scored[~mine], atol=1e-4)
                    stale = np.flatnonzero(mine[: len(old)])
                    np.testing.assert_allclose(np.array(old)[stale], scored[stale], atol=1e-5)
    assert mixed > 0


def test_a_run_with_carried_groups_resumes_with_the_same_tokens_and_parameters(
    partial, thin_policy, tmp_path
):
    trainer, steps, _, _, directory = partial
    resumed = make(thin_policy, tmp_path, **PARTIAL, **CONTROL)
    with Checkpointer(directory) as checkpoints:
        restore(resumed, checkpoints, 3)
        saved = checkpoints.restore(3, {})[1]
    assert [resumed.engine.controller.state()] == saved["controllers"]
    assert json.dumps(resumed.rollouts.state()) == json.dumps(saved["rollouts"])
    assert resumed.done_steps == 3 and any(r.token_ids for r in responses(resumed))
    for expected in steps[3:]:
        assert learned(resumed.step()) == learned(expected)
    assert same(resumed.params, trainer.params) and same(resumed.opt_state, trainer.opt_state)
    for a, b in zip(responses(resumed), responses(trainer), strict=True):
        assert (a.token_ids, a.old_logprobs, a.weight_versions) == (
            b.token_ids, b.old_logprobs, b.weight_versions
        )  # fmt: skip
        assert a.finish_reason == b.finish_reason


def responses(trainer):
    return [r for group in trainer.rollouts.carried for r in group.responses]


@pytest.mark.slow
def test_chunks_orders_speculation_and_controllers_change_nothing_that_is_learned(
    partial, thin_policy, tmp_path
):
    trainer, steps, *_ = partial
    changes = {"rollout.strategy": "off", "rollout.chunk_tokens": 7}
    changes["rollout.order"] = "longest_first"
    other = make(thin_policy, tmp_path, **{**PARTIAL, **changes})
    found = [other.step() for _ in range(STEPS)]
    assert [learned(m) for m in found] == [learned(m) for m in steps]
    assert same(other.params, trainer.params) and same(other.opt_state, trainer.opt_state)


# --- exact mode -----------------------------------------------------------------------------------


def test_exact_mode_decodes_all_that_a_step_began_again_and_finds_no_difference(partial):
    trainer, steps, *_ = partial
    for metrics in steps:  # every carried sample has tokens of the step that drew its group
        assert metrics["rollout/exact_compared"] == 2 * metrics["rollout/groups_drawn"]
        assert metrics["rollout/exact_differences"] == metrics["rollout/exact_unexplained"] == 0
    assert steps[0]["rollout/groups_carried"] and steps[0]["rollout/exact_compared"] == 8
    assert sum(s["rollout/exact_compared"] for s in steps) < 6 * 8, "some groups were carried"


@pytest.mark.slow
def test_exact_mode_warns_of_each_difference_with_its_step(
    thin_policy, tmp_path, monkeypatch, capsys
):
    """Where a draft is accepted the neighbours of its tokens are emitted."""
    accept = decode_round.accept

    def broken(*args):
        found = accept(*args)
        return found._replace(tokens=(found.tokens + (found.count == 2)[:, None]) % 272)

    monkeypatch.setattr(decode_round, "accept", broken)
    own_programs = {"rollout.stretch": 3}  # else those of another run here would be taken
    changes = {"rollout.exact_mode": "true", "steps": 1, "checkpoint.export": "false"}
    rl.main(tiny_run.arguments(thin_policy, tmp_path, **{**OVER, **own_programs, **changes}))
    said = capsys.readouterr().out.splitlines()
    said = [line for line in said if "plain decoding differ" in line]
    [metrics] = [r for r in read_metrics(tmp_path) if r["step"] == 1]
    assert 0 < metrics["rollout/exact_differences"] <= metrics["rollout/exact_compared"]
    assert metrics["rollout/exact_differences"] == metrics["rollout/exact_unexplained"] == len(said)
    assert all(line.startswith("WARNING: step 1: ") for line in said)
    assert all("sample" in line and line.endswith("NOT explained: a bug") for line in said)


def test_stale_tokens_are_weighed_against_the_policy_that_sampled_them():
    rng = np.random.default_rng(0)
    samples = [
        Sample(i, [1], [2, 3, 4], [-1.0] * 3, [-0.5, -0.25, 0.0], advantage=a, staleness=[2, 1, 0])
        for i, a in enumerate((1.0, -1.0))
    ]
    batch = {k: jnp.asarray(v) for k, v in pack(samples, 16, 1)[0].items()}
    logprobs = jnp.asarray(-rng.uniform(0, 1, (1, 16)), jnp.float32)
    cfg, counts = algo(clip_ratio=0.99, clip_ratio_high=99.0), Denominators(6, 2)

    def ratio(on_policy, stale, **more):
        loss = rl_loss(cfg, on_policy, stale)
        return float(loss(logprobs, logprobs, {**batch, **more}, counts)[1]["ratio"])

    at = np.asarray(batch["loss_mask"]) > 0
    old = np.asarray(batch["old_logprobs"])
    is_stale = np.asarray(batch["staleness"]) > 0
    ratios = np.exp(np.asarray(logprobs) - old)
    assert is_stale.sum() == 4
    expected = np.where(is_stale, ratios, 1.0)[at].sum()
    assert ratio(True, True) == pytest.approx(expected, rel=1e-5)
    assert ratio(True, False) == 6
    fresh = np.exp(np.asarray(logprobs) + 0.125)
    expected = np.where(is_stale, ratios, fresh)[at].sum()
    scored = jnp.full((1, 16), -0.125)
    assert ratio(False, True, fresh_logprobs=scored) == pytest.approx(expected, rel=1e-5)
