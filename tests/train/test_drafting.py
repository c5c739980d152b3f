"""What follows for the draft, its controller and its training from the policy's checkpoint."""

from pathlib import Path

import pytest

from specjax.command_line import ConfigError, parse_config
from specjax.drafts.dflash import DFlashSource
from specjax.drafts.mtp import MTPSource
from specjax.engine import sources
from train.programs import describe_drafting, settle_drafting
from train.schema import RLConfig


def arms_of(cfg) -> list[str]:
    return [arm.name for arm in cfg.rollout.control_config().arms]


def settled(*argv, has_head):
    cfg, _ = parse_config(RLConfig, argv)
    return cfg, describe_drafting(cfg, settle_drafting(cfg, MTPSource if has_head else None))


def test_a_head_is_trained_and_n_grams_are_not():
    cfg, said = settled(has_head=True)
    assert (cfg.rollout.draft, cfg.draft.mode) == ("checkpoint", "online")
    assert arms_of(cfg) == ["off", "4_1_5"]
    assert said.startswith("draft: the checkpoint's head; the controller goodput chooses among off")
    cfg, said = settled("rollout.strategy=4_1_5", has_head=True)
    assert cfg.rollout.control is None
    assert said.startswith("draft: the checkpoint's head; always 4_1_5")
    cfg, said = settled("rollout.strategy=3_1_4", has_head=False)
    assert (cfg.rollout.draft, cfg.draft.mode) == ("ngram", "frozen")
    assert arms_of(cfg) == ["off", "3_1_4"]
    assert said.startswith("draft: n-grams, for the checkpoint has no draft head; the controller")


def test_a_choice_of_the_user_is_followed():
    for has_head in (True, False):
        cfg, said = settled("rollout.draft=ngram", "rollout.strategy=4_1_5", has_head=has_head)
        assert (cfg.rollout.draft, cfg.draft.mode, cfg.rollout.control) == ("ngram", "frozen", None)
        assert said.startswith("draft: n-grams; always 4_1_5")
    cfg, said = settled("rollout.draft=random", has_head=False)
    assert (cfg.rollout.draft, cfg.draft.mode) == ("random", "online")
    assert said.startswith("draft: a random head; the controller goodput chooses among off, 4_1_5")
    cfg, _ = settled("rollout.draft=random", "rollout.acceptance=block", has_head=False)
    assert cfg.rollout.control is None, "tokens would depend on its choices"
    strategies = ["rollout.control.controller=bandit", "rollout.control.strategies=[off,2_1_3]"]
    cfg, said = settled(*strategies, has_head=False)
    assert cfg.rollout.control.controller == "bandit" and "bandit chooses among off, 2_1_3" in said


def test_a_head_whose_updates_are_scaled_to_nothing_stays_as_it_is():
    cfg, said = settled("draft.mtp_loss_scaling_factor=0", has_head=True)
    assert (cfg.rollout.draft != "ngram", cfg.draft.mode) == (True, "frozen")
    assert "draft.mode=frozen" in said


@pytest.mark.parametrize(
    ("argv", "steps"),
    [
        ([], 4),
        (["rollout.strategy=2_1_3"], 2),
        (["rollout.control.strategies=[off,2_1_3,3_1_4]"], 3),
        (["rollout.draft=random", "draft.unroll_steps=2"], 2),
        (["rollout.strategy=off"], 1),
    ],
)
def test_a_head_is_trained_on_the_steps_that_it_drafts_unless_told_otherwise(argv, steps):
    cfg, said = settled(*argv, has_head=True)
    assert cfg.draft.unroll_steps == steps
    line = f"(draft.mode=online, draft.unroll_steps={steps})"
    assert (line in said) == ("rollout.strategy=off" not in argv)


def test_a_decay_over_the_one_step_that_the_strategy_drafts_is_refused(capsys):
    with pytest.raises(SystemExit):
        settled("rollout.strategy=1_1_2", "draft.step_decay=0.8", has_head=True)
    assert "draft.step_decay=0.8 has no effect: it needs training" in capsys.readouterr().err
    settled("draft.step_decay=0.8", has_head=True)


def test_a_head_that_cannot_be_trained_is_a_head(monkeypatch):
    monkeypatch.setattr(sources, "kind_of", lambda path, target: DFlashSource)

    def drafting(*argv):
        cfg, _ = parse_config(RLConfig, ["rollout.draft=some/head", *argv])
        return describe_drafting(cfg, settle_drafting(cfg, None, None, Path))

    assert drafting().startswith("draft: the head some/head;")
    assert drafting().endswith("(draft.mode=frozen)")
    with pytest.raises(ConfigError, match="none that can be trained"):
        drafting("draft.mode=online")


@pytest.mark.parametrize("acceptance", ["block", "recursive"])
def test_where_tokens_must_not_depend_on_the_clock_nothing_is_chosen_by_it(acceptance):
    cfg, said = settled(f"rollout.acceptance={acceptance}", has_head=False)
    assert cfg.rollout.draft == "ngram" and not cfg.rollout.by_the_clock
    assert "always 4_1_5" in said and not cfg.rollout.ngram_siblings


@pytest.mark.parametrize("has_head", [False, True])
def test_where_bits_would_reach_the_weights_nothing_is_chosen_by_the_clock(has_head):
    cfg, said = settled("algo.tis=true", has_head=has_head)
    assert cfg.rollout.control is None and not cfg.rollout.by_the_clock and "always 4_1_5" in said
    cfg, said = settled("algo.tis=true", "rollout.control={}", has_head=has_head)
    assert cfg.rollout.by_the_clock, "asked for"
    cfg, said = settled("algo.tis=true", "rollout.invariant=true", has_head=has_head)
    assert arms_of(cfg) == ["off", "4_1_5"] and "goodput chooses" in said
    assert not cfg.rollout.by_the_clock and cfg.rollout.ngram_siblings


@pytest.mark.parametrize(
    ("argv", "has_head", "said"),
    [
        (["draft.mode=online"], False, "no draft head; set rollout.draft=random"),
        (["draft.optim.lr=0.1"], False, "draft.optim.lr=0.1 has no effect"),
        (
            ["rollout.ngram_max=6"],
            True,
            "rollout.ngram_max=6 has no effect: it needs rollout.draft",
        ),
    ],
)
def test_settings_that_the_checkpoint_leaves_without_effect_are_refused(argv, has_head, said):
    with pytest.raises(ConfigError) as refused:
        settled(*argv, has_head=has_head)
    assert said in str(refused.value)
