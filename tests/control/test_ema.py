"""EMA tiers: the reference's test vectors, the rules one by one, and life with chunks."""

import pytest
from scripted import observed

from specjax.control import EmaConfig, EmaTiers

EAGER = {"ema_alpha": 1.0, "warmup_batches": 0, "update_interval": 1}


def tiers(initial: int = 3, **settings) -> EmaTiers:
    return EmaTiers(EmaConfig(**settings), initial)


def feed(controller: EmaTiers, *rounds: list[int]) -> list[int]:
    """One chunk per round, each made under the tier that was selected; the tier after each."""
    steps = []
    for accepted in rounds:
        name = controller.select(max(1, len(accepted)))
        controller.observe(observed(max(1, len(accepted)), name, [accepted], 1.0))
        steps.append(controller.steps)
    return steps


# (initial tier, changed settings, rounds of accepted drafts, tier after each round)
VECTORS = [
    (1, {}, [[1, 1], [3, 3]], [3, 7]),
    (7, {}, [[0, 0]], [1]),
    (3, {}, [[2, 3], [3, 3]], [3, 7]),
    (3, {"down_hysteresis": 0.0, "up_hysteresis": 0.5}, [[0, 1]], [1]),
    (3, {"up_hysteresis": 0.75}, [[3, 3], [4, 4]], [3, 7]),
    (7, {"down_hysteresis": -0.75}, [[2, 2], [1, 1]], [7, 3]),
    (3, {"ema_alpha": 0.5, "down_hysteresis": 0.0}, [[4, 4], [0, 0], [0, 0], [0, 0]], [7, 3, 3, 1]),
    (3, {"warmup_batches": 1, "update_interval": 2}, [[3, 3]] * 3, [3, 3, 7]),
]


@pytest.mark.parametrize(("initial", "settings", "rounds", "expected"), VECTORS)
def test_reference_vectors(initial, settings, rounds, expected):
    assert feed(tiers(initial, **{**EAGER, **settings}), *rounds) == expected


@pytest.mark.parametrize(("accepted", "ema", "tier"), [(0, 0.070, 1), (3, 2.965, 7)])
def test_defaults_decide_first_at_batch_15(accepted, ema, tier):
    controller = tiers(3)
    assert feed(controller, *[[accepted] * 4] * 14) == [3] * 14
    assert feed(controller, [accepted] * 4) == [tier]
    assert controller.ema == pytest.approx(ema, abs=5e-4)


def test_an_empty_round_is_ignored_and_uses_no_warm_up():
    controller = tiers(3, **{**EAGER, "warmup_batches": 1})
    assert feed(controller, [], [], [3, 3]) == [3, 3, 3]
    assert controller.count == 1


@pytest.mark.parametrize(("initial", "snapped"), [(0, 1), (4, 3), (6, 7), (99, 7), (2, 3), (5, 7)])
def test_an_initial_value_off_the_list_snaps_to_the_nearest(initial, snapped):
    assert tiers(initial).steps == snapped


def test_equality_drops_but_does_not_rise():
    assert feed(tiers(3, **EAGER, down_hysteresis=0.5), [1, 1]) == [1]
    assert feed(tiers(1, **EAGER, up_hysteresis=0.5), [1, 1]) == [1]


def test_tier_zero_freezes_the_average_and_tries_the_smallest_tier_again():
    controller = tiers(1, **{**EAGER, "update_interval": 2}, candidate_steps=(0, 1, 3))
    assert feed(controller, [0, 0], [0, 0]) == [1, 0]
    assert controller.select(2) == "off"
    frozen = controller.ema
    assert feed(controller, [0, 0]) == [0]
    assert controller.ema == frozen
    assert feed(controller, [0, 0]) == [1]
    assert controller.ema == frozen
    assert feed(controller, [1, 1], [1, 1]) == [1, 3]  # the head has become good


def test_a_chunk_changes_the_tier_once_at_most():
    controller = tiers(1, **EAGER)
    controller.observe(observed(2, "1_1_2", [[1, 1]] * 8, 1.0))
    assert controller.steps == 3  # one round at a time, [1, 1] then [3, 3] would reach 7
    assert controller.count == 8


def test_a_chunk_of_another_tier_is_not_counted():
    """Averaging in what was under way when the tier changed made a peer flap."""
    controller = tiers(7, **EAGER)
    assert feed(controller, [2, 2]) == [3]
    controller.observe(observed(2, "7_1_8", [[0, 0]], 1.0))
    assert (controller.steps, controller.count) == (3, 1)
