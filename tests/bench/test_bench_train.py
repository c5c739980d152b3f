"""`bench.train`: its three commands on tiny runs, and figures from records made by hand."""

import json

import jax
import pytest
import tiny_run

from bench.control import predict
from bench.train import __main__ as command
from bench.train import arms, schedule, spot
from bench.train.spot import Step
from specjax.command_line import ConfigError
from train.heads import frozen_policy_parts, head_loss
from train.trainer import Trainer


def read(path):
    return json.loads(path.read_text())["figures"]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- arms ------------------------------------------------------------------------------------


def arms_settings(policy, out, **changes):
    small = {"steps": 1, "untimed_steps": 0, "costs": "null", "rollout.max_batch": 1}
    small |= {"rollout.strategy": "2_1_3", "algo.dynamic_sampling": False}
    small |= {"draft.unroll_steps": 1}
    return tiny_run.arguments(policy, out, **small, **changes)


@pytest.fixture(scope="module")
def four_arms(thin_policy, table, tmp_path_factory):
    """Three steps of the four arms; the directory of the results."""
    out = tmp_path_factory.mktemp("arms")
    own = arms_settings(thin_policy, out, random__lr=0.02, random__epochs=2)
    command.main(["arms", *own, "steps=3", f"costs={table.parent}"])
    return out


@pytest.mark.slow  # a whole measurement, of half a minute
def test_three_steps_of_four_arms_are_bit_identical_in_tokens_rewards_and_policy(four_arms):
    assert read(four_arms / "arms.json")["equality"]["value"] == "steps bit-identical: 3 of 3"
    records = lines(four_arms / "arms.jsonl")
    assert {(r["step"], r["arm"]) for r in records} == {
        (s, a) for s in (1, 2, 3) for a in arms.ARMS
    }
    assert [r["arm"] for r in records if r["place"] == 0] == [
        "none",
        "frozen",
        "online",
    ]  # rotating
    by_step = [[r["digests"] for r in records if r["step"] == step] for step in (1, 2, 3)]
    assert all(digests == [digests[0]] * 4 for digests in by_step)
    # Not equal because nothing happened: the policy moved, and so did the trained heads.
    assert len({digests[0]["parameters"] for digests in by_step}) == 3
    moved = [r["train/mtp_update_norm"] for r in records if "online" in r["arm"]]
    assert len(moved) == 6 and min(moved) > 0


@pytest.mark.slow  # a whole measurement, of half a minute
def test_records_account_for_all_tokens_and_figures_have_intervals(four_arms):
    for r in lines(four_arms / "arms.jsonl"):
        for name in ("tokens_per_sec", "longest_sample_tokens_per_sec", "reward"):
            assert r[f"rollout/{name}"] is not None
        assert ("train/mtp_loss" in r) == ("time/draft" in r) == ("online" in r["arm"])
        if r["arm"] != "none":
            counts = r["samples"]["histograms"]
            emitted = [sum(i * n for i, n in enumerate(h)) for h in counts]
            assert emitted == r["samples"]["lengths"]
    found = read(four_arms / "arms.json")
    for name in ("ratio/online/none", "ratio/online/frozen", "longest_ratio/online/none"):
        low, high = found[name]["interval"]
        assert 0 < low <= found[name]["value"] <= high
    assert found["draft_training_share/online"]["value"] > 0
    assert found["accept_length_last/online_random"]["value"] >= 1
    assert (four_arms / "arms.png").read_bytes().startswith(b"\x89PNG")
    settings = json.loads((four_arms / "arms.json").read_text())["settings"]
    assert settings["differences"]["online_random"]["draft"]["optim"]["lr"] == 0.02


@pytest.mark.slow  # a whole measurement, of half a minute
def test_predict_repeats_the_predictions_of_arms(four_arms, table, tmp_path):
    argv = ["--acceptance", str(four_arms / "arms.json"), "--costs", str(table)]
    predict.main([*argv, "--out", str(tmp_path / "again.json")])
    found, again = read(four_arms / "arms.json"), read(tmp_path / "again.json")
    for arm in ("frozen", "online", "online_random"):
        name = f"predicted_ratio/toy/{arm}"
        assert again[name] == found[name]
        assert found[name]["unit"].endswith("costs modelled")


@pytest.mark.slow
def test_a_draft_program_that_touches_the_policy_breaks_the_equality(
    thin_policy, tmp_path, monkeypatch
):
    honest = Trainer._update_draft

    def leaking(self, batches, states, metrics):
        honest(self, batches, states, metrics)

        def loss(parts):
            batch = {k: v for k, v in batches[0].items() if k != "advantages"}
            return head_loss(self.model, self.cfg.draft, 1.0, self.head, parts, batch, states[0])[0]

        parts = frozen_policy_parts(self.params)
        with monkeypatch.context() as attached:  # `head_loss` detaches the policy; here it may not
            attached.setattr(jax.lax, "stop_gradient", lambda x: x)
            gradients = jax.jit(jax.grad(loss))(parts)
        self.params |= jax.tree.map(lambda p, g: p - 1e-3 * g, parts, gradients)

    monkeypatch.setattr(Trainer, "_update_draft", leaking)
    with pytest.raises(SystemExit, match="online: not the same run as none's"):
        arms.main([*arms_settings(thin_policy, tmp_path), "arms=[none,frozen,online]"])
    found = read(tmp_path / "arms.json")
    assert found["steps_bit_identical"]["value"] == 0
    assert found["steps_bit_identical/frozen"]["value"] == 1
    assert "parameters differ from none's though" in found["first_difference/online"]["value"]


@pytest.mark.slow  # a whole measurement, of half a minute
def test_a_changed_token_is_found_and_not_explained_away(thin_policy, tmp_path, monkeypatch):
    honest = Trainer.step

    def changing(self):
        metrics = honest(self)
        if self.cfg.draft.mode == "frozen" and self.done_steps == 2:
            tokens = self.last_rollout[1].responses[2].token_ids
            tokens[0] = (tokens[0] + 1) % 256
        return metrics

    monkeypatch.setattr(Trainer, "step", changing)
    with pytest.raises(SystemExit, match="frozen"):
        arms.main([*arms_settings(thin_policy, tmp_path), "arms=[none,frozen]", "steps=3"])
    found = read(tmp_path / "arms.json")
    assert found["equality"]["value"] == "steps bit-identical: 1 of 3"
    why = found["first_difference/frozen"]["value"]
    assert why.startswith("step 2: tokens differ from none's; NOT explained by floating point")
    assert "request 1 sample 2" in why
    mine = [r["identical"] for r in lines(tmp_path / "arms.jsonl") if r["arm"] == "frozen"]
    assert mine == [True, False, False]


def test_arms_that_cannot_be_equal_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match="'none' among them"):
        arms.ArmsConfig(arms=["online"])
    cfg = arms.ArmsConfig()
    cfg.algo.tis = True
    with pytest.raises(ConfigError, match=r"algo\.tis=false"):
        cfg.__post_init__()


# --- schedule --------------------------------------------------------------------------------


def record(seed, arm, step, reward=None, seconds=None):
    found = {"seed": seed, "arm": arm, "step": step}
    if reward is not None:
        found |= {"eval/reward": reward, "eval/response_length_mean": 20.0}
    if seconds is not None:
        found["time/rollout"] = seconds
    return found


def test_rewards_are_compared_seed_by_seed_and_seconds_step_by_step():
    records = []
    for seed, (plain, partial) in enumerate([(0.5, 0.52), (0.7, 0.68), (0.6, 0.63)]):
        for arm, end, seconds in (("plain", plain, 4.0), ("partial", partial, 3.0)):
            slow = 1.0 + seed
            records += [record(seed, arm, 0, 0.4), record(seed, arm, 1, seconds=seconds * slow)]
            records += [record(seed, arm, 2, end, seconds * slow)]
    found = schedule.figures_of(records, 2)
    assert found["heldout_reward_difference"]["value"] == pytest.approx(0.01)
    low, high = found["heldout_reward_difference"]["interval"]
    assert low < 0 < 0.02 < high
    assert found["heldout_reward/start"]["value"] == pytest.approx(0.4)
    assert found["heldout_reward/plain"]["interval"] == [0.5, 0.7]
    ratio = found["rollout_ratio"]
    assert ratio["value"] == 0.75 and ratio["interval"] == [0.75, 0.75]


def schedule_settings(policy, out, **changes):
    few = {"steps": 2, "seeds": 1, "eval.problems": 4, "rollout.strategy": "1_1_2"}
    few |= {"rollout.over_sample": 1.5, "rollout.partial": True, "algo.dynamic_sampling": False}
    return tiny_run.arguments(policy, out, **{**few, **changes})


@pytest.mark.slow
def test_both_schedules_run_and_are_written(thin_policy, tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "WITHIN", 1.0)  # four problems decide nothing
    command.main(["schedule", *schedule_settings(thin_policy, tmp_path)])
    records = lines(tmp_path / "schedule.jsonl")
    assert [(r["arm"], r["step"]) for r in records] == [
        ("plain", 0), ("partial", 0), ("plain", 1), ("partial", 1), ("partial", 2), ("plain", 2),
    ]  # fmt: skip
    started = {r["arm"]: r["rollout/groups_drawn"] for r in records if r["step"] == 1}
    assert started == {"plain": 4, "partial": 6}
    figures = read(tmp_path / "schedule.json")
    assert figures["rollout_ratio"]["value"] > 0
    assert set(figures) >= {"length_bias", "stale_token_share", "heldout_reward/partial"}


def test_a_loss_of_reward_ends_the_command_with_an_error(thin_policy, tmp_path, monkeypatch):
    ends = {"plain": 0.7, "partial": 0.6}
    made = [record(0, arm, step, 0.5 if step == 0 else end, 1.0)
            for arm, end in ends.items() for step in (0, 2)]  # fmt: skip
    monkeypatch.setattr(schedule, "run_pair", lambda *_: made)
    with pytest.raises(SystemExit, match="lose 0.100"):
        schedule.main(schedule_settings(thin_policy, tmp_path))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rollout.partial": False, "rollout.over_sample": 1.0}, "rollout.partial must be true"),
        ({"eval.problems": 0}, "eval.problems"),
        ({"seeds": 0}, "seeds"),
    ],
)
def test_schedules_that_compare_nothing_fail(thin_policy, tmp_path, capsys, changes, expected):
    with pytest.raises(SystemExit):
        schedule.main(schedule_settings(thin_policy, tmp_path, **changes))
    assert expected in capsys.readouterr().err


# --- spot ------------------------------------------------------------------------------------


def step(rollout, draft, tail, in_gaps, idle=1.0):
    events = [{"replica": r, "event": "busy", "start": 0.0, "end": rollout} for r in (0, 1)]
    return Step(rollout, draft, tail, idle, 0.5 * in_gaps, 4, in_gaps, "", events)


def test_the_figures_of_gaps_are_those_of_pairs():
    after = [step(2.0, 1.0, 0.5, 0), step(3.0, 1.0, 1.0, 0), step(4.0, 1.0, 1.5, 0)]
    gaps = [step(2.1, 0.2, 0.6, 3), step(3.1, 0.4, 1.1, 3), step(4.0, 0.3, 1.5, 3)]
    found = spot.figures_of({"after": after, "gaps": gaps})
    found = {name: entry["value"] for name, entry in found.items()}
    assert found["seconds_gained"] == pytest.approx(0.7)
    assert found["tail_delay"] == pytest.approx(0.1)
    assert found["rollout_ratio"] == pytest.approx(3.1 / 3)
    assert found["step_ratio"] == pytest.approx(4.3 / 5)  # the pair in the middle
    assert found["updates_in_gaps"] == 0.75 and found["updates_per_step"] == 4
    assert found["idle_share"] == pytest.approx(3 / 18) and found["idle_used"] == 1.5
    assert found["tail_seconds/after"] == 1.0 and found["draft_seconds/gaps"] == 0.3


def test_the_tail_begins_when_the_first_replica_has_finished():
    def event(replica, name, start, end):
        return {"replica": replica, "event": name, "start": start, "end": end}

    events = [
        event(0, "busy", 0, 9.9), event(0, "idle", 9.9, 10),
        event(1, "busy", 0, 2), event(1, "idle", 2, 4), event(1, "busy", 4, 6),
        event(1, "idle", 6, 10), event(1, "draft_gap", 6, 9), event(None, "rollout", 0, 10),
    ]  # fmt: skip
    metrics = {
        "time/rollout": 10, "time/draft": 1, "draft/updates": 4, "draft/updates_in_gaps": 3,
        "rollout/tokens_sha": "a",
    }  # fmt: skip
    found = Step.of(metrics, events)
    assert (found.tail, found.trained, found.both) == (4, 3, 11)
    assert found.idle == pytest.approx(6.1)


def test_rollouts_without_a_tail_are_refused():
    arms = {"after": [step(1.0, 1.0, 0.0, 0)], "gaps": [step(1.0, 1.0, 0.0, 0)]}
    with pytest.raises(ValueError, match="no rollout left a replica idle"):
        spot.figures_of(arms)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"draft.spot.gaps": "false"}, "the bench itself"), ({"untimed_steps": 4}, "untimed_steps")],
)
def test_settings_that_show_no_gaps_are_refused(capsys, tmp_path, changes, expected):
    with pytest.raises(SystemExit):
        argv = tiny_run.arguments(tmp_path, tmp_path, steps=4)
        spot.main([*argv, *(f"{key}={value}" for key, value in changes.items())])
    assert expected in capsys.readouterr().err


@pytest.mark.slow
def test_spot_compares_both_arms_and_draws_the_gaps(thin_policy, tmp_path):
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    changes = {
        "steps": 4, "untimed_steps": 1, "rollout.max_batch": 1, "rollout.scan_layers": "true",
        "rollout.strategy": "1_1_2", "rollout.chunk_tokens": 4, "packing.rows": 1,
        "draft.spot.updates": 6, "algo.dynamic_sampling": "false",
    }  # fmt: skip
    command.main(["spot", *tiny_run.arguments(thin_policy, tmp_path, **changes)])
    figures = read(tmp_path / "spot.json")
    assert figures["steps_identical"]["value"] == 4
    assert figures["updates_per_step"]["value"] == 6
    events = lines(tmp_path / "spot.jsonl")
    assert not [e for e in events if e["arm"] == "after" and e["event"] == "draft_gap"]
    assert [e for e in events if e["arm"] == "gaps" and e["event"] == "draft_gap"]
    assert (tmp_path / "spot.png").read_bytes().startswith(b"\x89PNG")
