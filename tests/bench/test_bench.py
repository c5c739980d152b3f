"""The benches through their command lines, on a policy so small that nothing is worth measuring."""

import json
import shutil
import subprocess

import jax
import numpy as np
import pytest
import tiny_run

from bench import arms, arms_figures, costs, costs_measure, decode, predict
from bench.record import (
    RESULTS,
    alternate,
    median_ratio_interval,
    paired_ratio_interval,
    write_result,
)
from specjax.command_line import ConfigError
from train.draft import frozen_policy_parts, head_loss
from train.trainer import Trainer


def settings(policy, out, **changes):
    small = {"steps": 1, "untimed_steps": 0, "costs": "null", "rollout.max_batch": 1}
    small |= {"rollout.strategy": "2_1_3", "algo.dynamic_sampling": False}
    small |= {"draft.unroll_steps": 1}
    return tiny_run.arguments(policy, out, **small, **changes)


@pytest.fixture(scope="module")
def four_arms(thin_policy, table, tmp_path_factory):
    """Three steps of the four arms; the directory of the results."""
    out = tmp_path_factory.mktemp("arms")
    arms.main(
        settings(thin_policy, out, random__lr=0.02, random__epochs=2)
        + ["steps=3", f"costs={table.parent}"]
    )
    return out


def figures(out, name="arms.json"):
    return json.loads((out / name).read_text())["figures"]


def records(out):
    return [json.loads(line) for line in (out / "arms.jsonl").read_text().splitlines()]


# --- the four arms ---------------------------------------------------------------------------


@pytest.mark.slow  # a whole bench, of half a minute
def test_three_steps_of_four_arms_are_bit_identical_in_tokens_rewards_and_policy(four_arms):
    found = figures(four_arms)
    assert found["equality"]["value"] == "steps bit-identical: 3 of 3"
    by_step = {}
    for entry in records(four_arms):
        by_step.setdefault(entry["step"], []).append(entry["digests"])
    assert sorted(by_step) == [1, 2, 3]
    for digests in by_step.values():
        assert len(digests) == 4 and all(d == digests[0] for d in digests)
    # Not equal because nothing happened: the policy moved, and so did the trained heads.
    assert len({d[0]["parameters"] for d in by_step.values()}) == 3
    moved = [r["train/mtp_update_norm"] for r in records(four_arms) if "online" in r["arm"]]
    assert len(moved) == 6 and min(moved) > 0


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
        arms.main(settings(thin_policy, tmp_path) + ["arms=[none,frozen,online]"])
    found = figures(tmp_path)
    assert found["steps_bit_identical"]["value"] == 0
    assert found["steps_bit_identical/frozen"]["value"] == 1
    assert "parameters differ from none's though" in found["first_difference/online"]["value"]


@pytest.mark.slow  # a whole bench, of half a minute
def test_a_changed_token_is_found_and_not_explained_away(thin_policy, tmp_path, monkeypatch):
    honest = Trainer.step

    def changing(self):
        metrics = honest(self)
        if self.cfg.draft.mode == "frozen" and self.done_steps == 2:
            tokens = self.last_rollout.groups[1][2].token_ids
            tokens[0] = (tokens[0] + 1) % 256
        return metrics

    monkeypatch.setattr(Trainer, "step", changing)
    with pytest.raises(SystemExit, match="frozen"):
        arms.main(settings(thin_policy, tmp_path) + ["arms=[none,frozen]", "steps=3"])
    found = figures(tmp_path)
    assert found["equality"]["value"] == "steps bit-identical: 1 of 3"
    why = found["first_difference/frozen"]["value"]
    assert why.startswith("step 2: tokens differ from none's; NOT explained by floating point")
    assert "request 1 sample 2" in why
    assert [r["identical"] for r in records(tmp_path) if r["arm"] == "frozen"] == [
        True,
        False,
        False,
    ]


@pytest.mark.slow  # a whole bench, of half a minute
def test_arms_record_every_step_and_figures_have_value_unit_and_interval(four_arms):
    lines = records(four_arms)
    assert {(r["step"], r["arm"]) for r in lines} == {(s, a) for s in (1, 2, 3) for a in arms.ARMS}
    assert [r["arm"] for r in lines if r["place"] == 0] == ["none", "frozen", "online"]  # rotating
    for r in lines:
        for name in ("tokens_per_sec", "longest_sample_tokens_per_sec", "reward"):
            assert r[f"rollout/{name}"] is not None
        assert r["time/train"] > 0 and r["train/entropy"] > 0
        assert ("rollout/accept_rate_depth_2" in r) == (r["arm"] != "none")
        assert ("train/mtp_loss" in r) == ("time/draft" in r) == ("online" in r["arm"])
    found = figures(four_arms)
    assert all(set(f) == {"value", "unit", "interval"} for f in found.values())
    for name in ("ratio/online/none", "ratio/online/frozen", "longest_ratio/online/none"):
        low, high = found[name]["interval"]
        assert 0 < low <= found[name]["value"] <= high
    assert found["draft_training_share/online"]["value"] > 0
    assert found["accept_length_last/online_random"]["value"] >= 1
    assert (four_arms / "arms.png").read_bytes().startswith(b"\x89PNG")
    settings = json.loads((four_arms / "arms.json").read_text())["settings"]
    assert settings["differences"]["online_random"]["draft"]["optim"]["lr"] == 0.02
    assert settings["differences"]["online"]["draft"]["epochs"] == 1


@pytest.mark.slow  # a whole bench, of half a minute
def test_the_histograms_of_a_record_account_for_all_its_tokens(four_arms):
    for r in records(four_arms):
        if r["arm"] == "none":
            continue
        lengths = [sum(i * n for i, n in enumerate(h)) for h in r["samples"]["histograms"]]
        assert lengths == r["samples"]["lengths"]


def test_arms_that_cannot_be_equal_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match="'none' among them"):
        arms.ArmsConfig(arms=["online"])
    cfg = arms.ArmsConfig()
    cfg.algo.tis = True
    with pytest.raises(ConfigError, match=r"algo\.tis=false"):
        cfg.__post_init__()


# --- predictions -----------------------------------------------------------------------------

# Two samples: 6 tokens in rounds of 1, 2 and 3, and 2 tokens in one round.
ROLLOUT = {"rows": 3, "draft_steps": 2, "samples": {"histograms": [[0, 1, 1, 1], [0, 0, 1, 0]]}}


def test_a_prediction_is_what_one_computes_by_hand(table):
    found = predict.predict(predict.PartCosts.load(table), "online", [ROLLOUT])
    assert found.tokens == 8
    assert found.plain_seconds == pytest.approx(2 * 1.5 + 4 * 1.0)
    assert found.spec_seconds == pytest.approx((2.0 + 2 * 0.2) + 2 * (1.2 + 2 * 0.1))
    assert found.ratio == pytest.approx(7.0 / 5.2)


def test_samples_beyond_the_slots_wait_their_turn(table):
    found = predict.predict(predict.PartCosts.load(table), "online", [ROLLOUT, ROLLOUT], slots=1)
    assert found.plain_seconds == pytest.approx(2 * 8 * 1.0)
    assert found.spec_seconds == pytest.approx(2 * 4 * 1.4)
    # Jobs of 5, 1 and 2 rounds on two slots: two run until round 3, one until round 5.
    assert predict.replay([5, 1, 2], 2, lambda n: 10.0 if n == 2 else 1.0) == pytest.approx(32.0)


@pytest.mark.slow  # a whole bench, of half a minute
def test_arms_predicts_by_the_tables_it_is_given_and_predict_repeats_it(four_arms, table, tmp_path):
    found = figures(four_arms)
    argv = ["--acceptance", str(four_arms / "arms.json"), "--costs", str(table)]
    predict.main([*argv, "--out", str(tmp_path / "again.json")])
    again = figures(tmp_path, "again.json")
    for arm in ("frozen", "online", "online_random"):
        name = f"predicted_ratio/toy/{arm}"
        assert again[name] == found[name]
        assert found[name]["unit"].endswith("costs modelled")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plain": [1.0]}, "as many costs in every list"),
        ({"source": "somewhere"}, "'measured' or 'modelled'"),
        ({"verify": None}, "not a cost table"),
    ],
)
def test_a_table_that_is_none_is_refused_by_name(table, tmp_path, change, message):
    spoilt = tmp_path / "spoilt.json"
    spoilt.write_text(json.dumps(json.loads(table.read_text()) | change))
    with pytest.raises(ValueError, match=message) as error:
        predict.PartCosts.load(spoilt)
    assert "spoilt.json" in str(error.value)


def test_more_rows_than_a_table_has_are_an_error_that_says_how_to_measure_them(table):
    deeper = {"samples": {"histograms": [[0, 0, 0, 0, 0, 1]]}}
    with pytest.raises(ValueError, match="bench.costs"):
        predict.predict(predict.PartCosts.load(table), "online", [deeper])


def test_the_shipped_tables_load_and_the_modelled_ones_are_what_costs_writes(tmp_path):
    costs.main(["model", "--out", str(tmp_path)])
    for path in predict.default_tables():
        table = predict.PartCosts.load(path)
        assert (table.plain > 0).all()
        if table.kind == "modelled":
            assert (tmp_path / path.name).read_text() == path.read_text()


def test_measured_costs_are_a_table_that_predict_takes(thin_policy, tmp_path, monkeypatch):
    monkeypatch.setattr(costs_measure, "DRAFT_CHAIN", 2)
    out = tmp_path / "here.json"
    argv = "measure --batches 1 2 --rows 2 3 --context 8 --rounds 2 --repeats 1 --random".split()
    costs.main([*argv, "--model", str(thin_policy), "--out", str(out)])
    table = predict.PartCosts.load(out)
    assert table.kind == "measured" and table.name == "here"
    assert (table.plain > 0).all() and (table.draft > 0).all()
    assert predict.predict(table, "online", [ROLLOUT]).ratio > 0


# --- decoding --------------------------------------------------------------------------------


def test_bench_decode_writes_ratios_and_finds_the_same_tokens(thin_policy, tmp_path):
    out = tmp_path / "decode.json"
    # The sizes of test_bench_control's engines: their programs are compiled once for both.
    argv = "--batches 2 --repeats 2 --max_tokens 12 --max_prompt_tokens 12".split()
    argv += ["--strategy", "1_1_2"]
    decode.main([*argv, "--model", str(thin_policy), "--out", str(out)])
    found = figures(tmp_path, "decode.json")
    assert found["samples_different/batch_2"]["value"] == 0
    assert found["rows_per_round/batch_2"]["value"] == 2 * 2
    assert found["accept_length/batch_2"]["value"] >= 1
    low, high = found["speedup/batch_2"]["interval"]
    assert low <= found["speedup/batch_2"]["value"] <= high


# --- what all share --------------------------------------------------------------------------


def test_the_ratio_of_medians_lies_in_its_interval_and_needs_measurements():
    value, low, high = median_ratio_interval([2.0, 2.1, 1.9, 2.0, 9.0], [1.0, 1.1, 0.9, 1.0, 1.0])
    assert value == pytest.approx(2.0) and low <= value <= high
    with pytest.raises(ValueError, match="at least one measurement"):
        median_ratio_interval([], [1.0])


def test_pairs_that_were_slowed_down_together_leave_no_trace_in_their_ratio():
    slow = np.linspace(1.0, 3.0, 9)
    value, low, high = paired_ratio_interval(2.0 * slow, slow)
    assert value == low == high == 2.0
    _, low, high = median_ratio_interval(2.0 * slow, slow)
    assert high - low > 0.5, "the other way does not see it"
    value, low, high = paired_ratio_interval([2.0, 4.2, 6.0], [1.0, 2.0, 3.0])
    assert value == pytest.approx(2.0) and low <= value <= high
    with pytest.raises(ValueError, match="got 2 and 1"):
        paired_ratio_interval([1.0, 2.0], [1.0])


def test_functions_take_turns_in_alternating_order():
    calls = []
    jobs = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    seconds = alternate(jobs, 3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert all(len(values) == 3 for values in seconds.values())


def test_a_result_file_names_machine_versions_and_command_and_refuses_bare_figures(tmp_path):
    entry = arms_figures.figure(float("nan"), "s")
    path = write_result("x", {"path": tmp_path}, {"f": entry}, tmp_path / "x.json")
    result = json.loads(path.read_text())
    assert {"name", "date", "machine", "versions", "command", "settings", "figures"} <= set(result)
    assert result["figures"]["f"] == {"value": None, "unit": "s", "interval": None}
    if shutil.which("git"):
        command = ["git", "-C", str(RESULTS), "rev-parse", "HEAD"]
        head = subprocess.run(command, capture_output=True, text=True)
        if head.returncode == 0:  # else it is no checkout, or not ours to ask
            named = result["versions"]["specjax"].removesuffix("-dirty")
            assert len(named) >= 12 and head.stdout.startswith(named)
    with pytest.raises(ValueError, match="value, unit and interval"):
        write_result("x", {}, {"f": {"value": 1}}, tmp_path / "x.json")
