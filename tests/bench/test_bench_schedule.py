"""The bench of early ends through its command line, and its figures from records made by hand."""

import json

import pytest
import tiny_run

from bench import schedule
from bench.schedule import figures_of


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
    found = figures_of(records, 2)
    assert found["heldout_reward_difference"]["value"] == pytest.approx(0.01)
    low, high = found["heldout_reward_difference"]["interval"]
    assert low < 0 < 0.02 < high
    assert found["heldout_reward/start"]["value"] == pytest.approx(0.4)
    assert found["heldout_reward/plain"]["interval"] == [0.5, 0.7]
    ratio = found["rollout_ratio"]
    assert ratio["value"] == 0.75 and ratio["interval"] == [0.75, 0.75]


def settings(policy, out, **changes):
    few = {"steps": 2, "seeds": 1, "eval.problems": 4, "rollout.strategy": "1_1_2"}
    few |= {"rollout.over_sample": 1.5, "rollout.partial": True, "algo.dynamic_sampling": False}
    return tiny_run.arguments(policy, out, **{**few, **changes})


@pytest.mark.slow
def test_both_schedules_run_and_are_written(thin_policy, tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "WITHIN", 1.0)  # four problems decide nothing
    schedule.main(settings(thin_policy, tmp_path))
    records = [json.loads(x) for x in (tmp_path / "schedule.jsonl").read_text().splitlines()]
    assert [(r["arm"], r["step"]) for r in records] == [
        ("plain", 0), ("partial", 0), ("plain", 1), ("partial", 1), ("partial", 2), ("plain", 2),
    ]  # fmt: skip
    started = {r["arm"]: r["rollout/groups_drawn"] for r in records if r["step"] == 1}
    assert started == {"plain": 4, "partial": 6}
    figures = json.loads((tmp_path / "schedule.json").read_text())["figures"]
    assert figures["rollout_ratio"]["value"] > 0
    assert set(figures) >= {"length_bias", "stale_token_share", "heldout_reward/partial"}


def test_a_loss_of_reward_ends_the_bench_with_an_error(thin_policy, tmp_path, monkeypatch):
    ends = {"plain": 0.7, "partial": 0.6}
    made = [record(0, arm, step, 0.5 if step == 0 else end, 1.0)
            for arm, end in ends.items() for step in (0, 2)]  # fmt: skip
    monkeypatch.setattr(schedule, "run_pair", lambda *_: made)
    with pytest.raises(SystemExit, match="lose 0.100"):
        schedule.main(settings(thin_policy, tmp_path))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rollout.partial": False, "rollout.over_sample": 1.0}, "rollout.partial must be true"),
        ({"eval.problems": 0}, "eval.problems"),
        ({"seeds": 0}, "seeds"),
    ],
)
def test_settings_that_compare_nothing_fail(thin_policy, tmp_path, capsys, changes, expected):
    with pytest.raises(SystemExit):
        schedule.main(settings(thin_policy, tmp_path, **changes))
    assert expected in capsys.readouterr().err
