"""How rollouts speculate is set by `rollout.*`, and why drafts fail is written beside the run."""

import pytest
import tiny_run

from specjax import SpecConfig
from specjax.checkpoint import CheckpointError
from specjax.telemetry import read_jsonl
from train import rl
from train.config import ConfigError, parse_config
from train.schema import RLConfig, RolloutSection


def test_the_keys_of_a_rollout_are_those_of_spec_config():
    section = RolloutSection(
        strategy="6_4_16", aligned=False, tau=0.3, spec_verify_tokens=12, telemetry=True
    )
    assert section.spec() == SpecConfig(
        "6_4_16", aligned=False, tau=0.3, spec_verify_tokens=12, telemetry=True
    )
    assert RolloutSection().spec() == SpecConfig()
    assert RolloutSection(strategy="4x2x1", acceptance="recursive").spec().resolve().rows == 21


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": "6_4_16", "acceptance": "recursive"}, "'coupled'"),
        ({"strategy": "4x4x4"}, "spec_verify_tokens = 48"),
        ({"tau": 0.0}, "tau must be a finite number greater than 0"),
    ],
)
def test_a_combination_that_cannot_be_is_refused_with_the_section(settings, said):
    with pytest.raises(ValueError, match=said):
        RolloutSection(**settings)


def test_a_run_with_telemetry_writes_its_rejections_and_may_resume_without(
    tiny_policy, tmp_path, monkeypatch
):
    monkeypatch.delenv("SPECJAX_TELEMETRY", raising=False)

    def trainer(**changes):
        argv = tiny_run.arguments(tiny_policy, tmp_path, **changes)
        return rl.Trainer(parse_config(RLConfig, argv)[0])

    watched = trainer(**{"rollout.telemetry": "true"})
    rounds = 0
    for _ in range(2):
        watched.step()
        rounds += sum(s.stats.rounds for g in watched.last_rollout.groups for s in g)
    summary = read_jsonl(tmp_path / "telemetry.jsonl").summary()
    assert summary.rounds == rounds and summary.rejections > 0
    assert watched.engine.telemetry.records == []
    assert trainer().fingerprint() == watched.fingerprint()
    assert trainer().engine.telemetry is None


@pytest.mark.parametrize("source", ["ngram", "model"])
def test_other_sources_than_the_head_draft_and_sample_the_same_tokens(
    source, tiny_policy, tmp_path
):
    def trainer(**changes):
        argv = tiny_run.arguments(tiny_policy, tmp_path, draft__mode="frozen", **changes)
        return rl.Trainer(parse_config(RLConfig, argv)[0])

    settings = {"rollout.source": "ngram", "rollout.strategy": "3_2_6"}
    if source == "model":  # the policy drafts for itself: nothing is rejected
        settings = {"rollout.draft_model": tiny_policy, "rollout.temperature": 0.5}
    drafting, plain = trainer(**settings), trainer(**settings | {"rollout.strategy": "off"})
    assert drafting.head is None and "draft" not in drafting.trees()
    spoken, silent = drafting.step(), plain.step()
    assert spoken["rollout/tokens_sha"] == silent["rollout/tokens_sha"]
    assert "rollout/spec_accept_length" not in silent
    least = 1.0 if source == "ngram" else 2.0
    assert spoken["rollout/spec_accept_length"] > least


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rollout.source": "ngram"}, "draft.mode=online trains the draft head"),
        (
            {"rollout.draft_model": "no/such/dir", "draft.mode": "frozen"},
            "no/such/dir/config.json does",
        ),
        ({"rollout.source": "model", "draft.mode": "frozen"}, "needs draft_model"),
    ],
)
def test_a_source_that_cannot_draft_is_refused_with_the_remedy(
    settings, said, tiny_policy, tmp_path, capsys
):
    argv = tiny_run.arguments(tiny_policy, tmp_path, **settings)
    with pytest.raises((ConfigError, CheckpointError, SystemExit)) as stopped:
        rl.Trainer(parse_config(RLConfig, argv)[0])
    assert said in f"{stopped.value} {capsys.readouterr().err}"
