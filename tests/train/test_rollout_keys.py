"""How rollouts speculate is set by `rollout.*`, and why drafts fail is written beside the run."""

import json
from types import SimpleNamespace

import pytest
import tiny_run

from specjax import SpecConfig
from specjax.command_line import ConfigError, parse_config
from specjax.control import ControlConfig
from specjax.settings import require_same_settings
from train import rl
from train.rollout_schema import RolloutSection
from train.schema import RLConfig

pytestmark = pytest.mark.usefixtures("shared_programs")


def test_the_keys_of_a_rollout_are_those_of_spec_config():
    section = RolloutSection(
        strategy="6_4_16", aligned=False, tau=0.3, spec_verify_tokens=12, telemetry=True
    )
    assert section.spec() == SpecConfig(
        "6_4_16", aligned=False, tau=0.3, spec_verify_tokens=12, telemetry=True
    )


def cool_trainer(model, out, **changes) -> rl.Trainer:
    settings = {"draft.mode": "frozen", "rollout.temperature": 0.5}
    argv = tiny_run.arguments(model, out, **settings, **changes)
    return rl.Trainer(parse_config(RLConfig, argv)[0])


@pytest.mark.slow
def test_n_grams_draft_and_sample_the_same_tokens(thin_policy, tmp_path):
    silent = cool_trainer(thin_policy, tmp_path / "off", **{"rollout.strategy": "off"}).step()
    settings = {"rollout.draft": "ngram", "rollout.strategy": "2_1_3", "rollout.telemetry": "true"}
    drafting = cool_trainer(thin_policy, tmp_path, **settings)
    assert drafting.head is None and "draft" not in drafting.trees()
    spoken = drafting.step()
    assert spoken["rollout/tokens_sha"] == silent["rollout/tokens_sha"]
    assert "rollout/spec_accept_length" not in silent
    assert spoken["rollout/spec_accept_length"] > 1
    rounds = sum(r.stats.rounds for group in drafting.last_rollout for r in group.responses)
    tally = json.loads((tmp_path / "telemetry.jsonl").read_text().partition("\n")[0])
    assert tally["rounds"] == rounds
    assert drafting.engine.telemetry.records == []


@pytest.mark.parametrize("changed", ["rollout.control={}", "rollout.replicas=2"])
def test_a_run_says_where_the_last_bits_of_its_weights_depend_on_the_clock(changed):
    """They do where the loss is weighed by log-probabilities of rollouts."""

    def said(*argv, dtype="float32"):
        return rl.precision_warning(parse_config(RLConfig, [*argv])[0], dtype)

    assert "set rollout.invariant=true" in said("algo.tis=true", changed)
    assert said(changed) is None and "rollout.invariant=true" in said(changed, dtype="bfloat16")
    assert said("algo.tis=true", changed, "rollout.invariant=true") is None
    assert said("algo.tis=true") is None


def section(**settings):
    return parse_config(RLConfig, [f"rollout.{k}={v}" for k, v in settings.items()])[0].rollout


def names(roll) -> list[str]:
    return [arm.name for arm in roll.control_config().arms]


def test_a_control_section_is_goodput_unless_it_says_otherwise():
    assert section().control_config() is None
    assert section(control="{}").control_config() == ControlConfig()
    static = {"control.controller": "static", "strategy": "3_1_4"}
    assert names(section(**static)) == ["3_1_4"]
    assert names(section(**static, **{"acceptance": "block"})) == ["3_1_4"]
    listed = {"control.controller": "static", "control.strategies": "[off]"}
    assert names(section(**listed)) == ["off"]


def test_in_invariant_mode_one_replica_without_devices_of_its_own_is_another_program():
    def settings(*given) -> dict:
        cfg, _ = parse_config(RLConfig, ["model=m", "rollout.invariant=true", *given])
        return rl.Trainer.fingerprint(SimpleNamespace(cfg=cfg))

    one, two, three = settings(), *(settings(f"rollout.replicas={n}") for n in (2, 3))
    require_same_settings(two, three)
    for saved, current in ((one, two), (two, one)):
        with pytest.raises(ConfigError, match="made with other settings of rollout;"):
            require_same_settings(saved, current)
