"""The bandit: groups, scores, exploration, the faults of its model, and FastRL's section."""

import json
import math

import pytest
from scripted import observed

from specjax.control import (
    Bandit,
    BanditConfig,
    ControlConfig,
    fastrl,
    from_fastrl,
    make_controller,
)
from specjax.control import read_fastrl as read

ARMS = ("8_4_32", "8_4_16", "off")


def names(control: dict) -> list[str]:
    return [strategy.name for strategy in control["strategies"]]


SECTION = {
    "enable": True,
    "spec_strategy": "eagle",
    "bs_threshold": 32,
    "eagle": {
        "spec_model_path": None,
        "spec_steps": 8,
        "spec_topk": 4,
        "spec_verify_tokens": 48,
        "tune_algorithm": "BEG",
        "mab_configs": ["8_4_32", "8_4_16", "8_4_8"],
        "mab_bs_threshold": [1, 2, 5, 21],
    },
}


def greedy(**settings) -> Bandit:
    return Bandit(ARMS, BanditConfig(epsilon=0.0, **settings))


def chunk(name: str, accepted: int, seconds: float, batch: int = 1, rounds: int = 4):
    return observed(batch, name, [[accepted] * batch] * rounds, seconds)


def test_groups_of_batch_sizes():
    bandit = greedy()
    sizes = {1: 0, 2: 1, 4: 1, 5: 2, 20: 2, 21: 3, 500: 3}
    assert {size: bandit.group(size) for size in sizes} == sizes


def test_untried_arms_come_first_and_each_once_although_rewards_come_late():
    bandit = greedy()
    assert [bandit.select(1) for _ in range(3)] == list(ARMS)  # nothing observed in between


def test_the_first_pull_counts_what_it_earned():
    """A peer recorded the first pull as reward 0, which buried the arm."""
    bandit = greedy()
    for name, seconds in zip(ARMS, (1.0, 2.0, 4.0), strict=True):
        assert bandit.select(1) == name
        bandit.observe(chunk(name, 2, seconds))
    assert bandit.scores(0)["8_4_32"] == 12.0
    assert bandit.select(1) == "8_4_32"


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_chunk_without_a_time_is_no_reward_of_zero(seconds):
    bandit = greedy()
    bandit.observe(chunk("off", 0, seconds))
    assert bandit.scores(0)["off"] == math.inf


def test_the_reward_is_throughput_by_default_and_accept_length_when_asked():
    assert BanditConfig().reward == "throughput"
    by_rate, by_length = greedy(), greedy(reward="accept_length")
    for bandit in (by_rate, by_length):
        bandit.observe(chunk("8_4_32", 3, 8.0, batch=2))
        bandit.observe(chunk("8_4_16", 2, 4.0, batch=2))
        bandit.observe(chunk("off", 0, 1.0, batch=2))
    assert by_rate.scores(1) == {"8_4_32": 4.0, "8_4_16": 6.0, "off": 8.0}
    assert by_length.scores(1) == {"8_4_32": 4.0, "8_4_16": 3.0, "off": 1.0}
    assert (by_rate.select(2), by_length.select(2)) == ("off", "8_4_32")


def test_off_is_an_arm_that_can_be_left_again():
    """In a peer, plain decoding was a latch outside of the bandit."""
    bandit = greedy(window=1)
    for name in ARMS:
        bandit.observe(chunk(name, 0, 1.0 if name == "off" else 2.0))
    assert bandit.select(1) == "off"
    bandit.observe(chunk("8_4_16", 4, 2.0))
    assert bandit.select(1) == "8_4_16"


def test_it_explores_every_arm_about_epsilon_of_the_time():
    """A peer's default had one arm per group, so that it never explored."""
    bandit = Bandit(ARMS, BanditConfig(epsilon=0.3))
    names = []
    for _ in range(3000):
        names.append(bandit.select(1))
        bandit.observe(chunk(names[-1], 0, 1.0 if names[-1] == "off" else 2.0))
    assert names.count("off") / 3000 == pytest.approx(0.8, abs=0.03)
    assert names.count("8_4_32") / 3000 == pytest.approx(0.1, abs=0.03)


def test_a_state_of_other_groups_is_refused():
    state = greedy().state()
    with pytest.raises(ValueError, match="'thresholds': \\[1, 8\\]"):
        Bandit(ARMS, BanditConfig(thresholds=(1, 8))).load_state(state)


def test_fastrls_section_is_read_as_it_stands(caplog, tmp_path):
    fastrl._arm.cache_clear()  # earlier tests may have read such a strategy, too
    spec, control = read({"speculative": SECTION})
    assert (spec, control) == read(SECTION)
    file = tmp_path / "fastrl.yaml"
    file.write_text(json.dumps({"speculative": SECTION}))
    assert read(str(file)) == (spec, control)
    assert caplog.text.count("8_4_8 runs as 7_4_8") == 1, "however often it is read"
    assert control["controller"] == "bandit"
    assert names(control) == ["8_4_32", "8_4_16", "7_4_8", "off"]
    assert (spec["draft"], spec["spec_verify_tokens"]) == ("auto", 48)
    config = ControlConfig(fastrl=SECTION, bandit={"reward": "accept_length"})
    assert config.bandit == BanditConfig((1, 2, 5, 21), 0.1, 1000, "accept_length", "median", 0)
    controller = make_controller(from_fastrl(SECTION)[1])
    assert (controller.kind, controller.bs_threshold) == ("bandit", 32)
    assert controller.select(33) == "off"
    assert controller.select(32) == "8_4_32"


def changed(**eagle) -> dict:
    top = {k: eagle.pop(k) for k in ("enable", "bs_threshold", "spec_strategy") if k in eagle}
    return {**SECTION, **top, "eagle": {**SECTION["eagle"], **eagle}}


def test_every_key_of_the_section_has_an_effect():
    def control(**eagle):
        return read(changed(**eagle))[1]

    assert from_fastrl(changed(enable=False)) == (None, None)
    assert control(bs_threshold=None)["bs_threshold"] is None
    assert read(changed(spec_model_path="/head"))[0]["draft"] == "/head"
    assert control(tune_algorithm="EG")["bandit"] == {"thresholds": (1,)}
    assert control(mab_bs_threshold=[1, 9])["bandit"] == {"thresholds": (1, 9)}
    assert names(control(mab_configs=["disable", "3_1_4"])) == ["off", "3_1_4"]
    assert names(control(spec_verify_tokens=20)) == ["8_4_20", "8_4_16", "7_4_8", "off"]
    fixed = control(tune_algorithm=None)
    assert (fixed["controller"], names(fixed)) == ("static", ["8_4_48"])
    assert names(control(tune_algorithm=None, spec_steps=6, spec_topk=1)) == ["6_1_7"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (changed(spec_strategy="medusa"), "spec_strategy must be one of 'eagle'"),
        (changed(tune_algorithm="UCB"), "tune_algorithm must be one of 'BEG'"),
        (changed(mab_configs=[]), "mab_configs lists no strategy"),
        (changed(mab_config=["8_4_32"]), "speculative.eagle has unknown keys mab_config"),
        ({**SECTION, "bs": 3}, "speculative has unknown keys bs"),
        (changed(mab_configs=["fast"]), "is not understood"),
    ],
)
def test_what_the_section_cannot_mean_is_refused(section, message):
    with pytest.raises(ValueError, match=message):
        read(section)
