"""How rollouts speculate is set by `rollout.*`, and why drafts fail is written beside the run."""

import pytest
import tiny_run

from specjax import SpecConfig
from specjax.telemetry import read_jsonl
from train import rl
from train.config import parse_config
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
