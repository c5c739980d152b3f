"""The bench of spot training through its command line, and its figures from steps made by hand."""

import json

import jax
import pytest
import tiny_run

from bench import spot
from bench.spot import Step, figures_of


def step(rollout, draft, tail, in_gaps, idle=1.0):
    events = [{"replica": r, "event": "busy", "start": 0.0, "end": rollout} for r in (0, 1)]
    return Step(rollout, draft, tail, idle, 0.5 * in_gaps, 4, in_gaps, "", events)


def test_the_figures_are_those_of_pairs():
    after = [step(2.0, 1.0, 0.5, 0), step(3.0, 1.0, 1.0, 0), step(4.0, 1.0, 1.5, 0)]
    gaps = [step(2.1, 0.2, 0.6, 3), step(3.1, 0.4, 1.1, 3), step(4.0, 0.3, 1.5, 3)]
    found = {
        name: entry["value"] for name, entry in figures_of({"after": after, "gaps": gaps}).items()
    }
    assert found["seconds_gained"] == pytest.approx(0.7)
    assert found["tail_delay"] == pytest.approx(0.1)
    assert found["rollout_ratio"] == pytest.approx(3.1 / 3)
    assert found["step_ratio"] == pytest.approx(4.3 / 5)  # the pair in the middle
    assert found["updates_in_gaps"] == 0.75 and found["updates_per_step"] == 4
    assert found["idle_share"] == pytest.approx(3 / 18) and found["idle_used"] == 1.5
    assert found["tail_seconds/after"] == 1.0 and found["draft_seconds/gaps"] == 0.3


def test_the_tail_begins_when_the_first_replica_is_drained_for_good():
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


def test_rollouts_without_a_tail_are_said_to_show_nothing():
    arms = {"after": [step(1.0, 1.0, 0.0, 0)], "gaps": [step(1.0, 1.0, 0.0, 0)]}
    with pytest.raises(ValueError, match="no rollout left a replica idle"):
        figures_of(arms)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"draft.spot.gaps": "false"}, "the bench itself"), ({"untimed_steps": 4}, "untimed_steps")],
)
def test_settings_that_show_nothing_are_refused(capsys, tmp_path, changes, expected):
    with pytest.raises(SystemExit):
        argv = tiny_run.arguments(tmp_path, tmp_path, steps=4)
        spot.main([*argv, *(f"{key}={value}" for key, value in changes.items())])
    assert expected in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_compares_both_arms_and_draws_the_gaps(thin_policy, tmp_path):
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    changes = {
        "steps": 4, "untimed_steps": 1, "rollout.max_batch": 1, "rollout.scan_layers": "true",
        "rollout.strategy": "1_1_2", "rollout.chunk_tokens": 4, "packing.rows": 1,
        "draft.spot.updates": 6, "algo.dynamic_sampling": "false",
    }  # fmt: skip
    spot.main(tiny_run.arguments(thin_policy, tmp_path, **changes))
    result = json.loads((tmp_path / "spot.json").read_text())
    assert result["figures"]["steps_identical"]["value"] == 4
    assert result["figures"]["updates_per_step"]["value"] == 6
    events = [json.loads(line) for line in (tmp_path / "spot.jsonl").read_text().splitlines()]
    assert not [e for e in events if e["arm"] == "after" and e["event"] == "draft_gap"]
    assert [e for e in events if e["arm"] == "gaps" and e["event"] == "draft_gap"]
    assert (tmp_path / "spot.png").read_bytes().startswith(b"\x89PNG")
