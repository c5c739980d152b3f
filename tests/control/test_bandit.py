"""The bandit: groups, scores, exploration, and the faults of its model."""

import math

import pytest
from scripted import observed

from specjax.control import Bandit, BanditConfig

ARMS = ("8_4_32", "8_4_16", "off")


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
