"""The belief in costs is the exact one where it can be worked out, and robust where it cannot."""

import json
import math

import numpy as np
import pytest

from specjax.control import belief as module
from specjax.control.belief import Belief, Noise

NAMES = ("off", "1_1_2", "4_1_5")
ROUNDS = 16


def start(beside: float = 0.0) -> Belief:
    belief = Belief(beside)
    for i, name in enumerate(NAMES):
        belief.calibrated(name, 0.2 * i)
    return belief


def conditioned(order: list[int], logs: list[float], size: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of all strategies after the last chunk, from their joint distribution
    with all observations: the plain way, without a filter."""
    n, count = len(NAMES), len(order)
    prior = module._CALIBRATED**2 * np.eye(n) + module._CALIBRATED_ALL**2
    step = module._COMMON_STEP**2 + module._OWN_STEP**2 * np.eye(n)
    at = [prior + (t + 1) * step for t in range(count)]  # of the state when chunk t came
    seen = np.array(
        [[at[min(s, t)][order[s], order[t]] for t in range(count)] for s in range(count)]
    )
    shared = np.array([at[t][:, order[t]] for t in range(count)]).T  # [n count]
    gain = shared @ np.linalg.inv(seen + size**2 * np.eye(count))
    mean = 0.2 * np.arange(n)
    return mean + gain @ (np.array(logs) - mean[order]), at[-1] - gain @ shared.T


class Known(Noise):
    def saw(self, surprise, expected):
        pass


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_posterior_of_all_chunks(seed):
    rng, belief, logs = np.random.default_rng(seed), start(), []
    order = rng.integers(0, len(NAMES), 25).tolist()
    for i in order:
        logs.append(belief.log(NAMES[i]) + rng.uniform(-0.02, 0.02))  # little, as no outlier is
        belief.observe(NAMES[i], math.exp(logs[-1]), ROUNDS, Known(0.1))
    mean, covariance = conditioned(order, logs, 0.1)
    np.testing.assert_allclose(belief.mean[1:], mean, atol=1e-4)
    np.testing.assert_allclose(belief.covariance[1:, 1:], covariance, atol=1e-5)


def test_what_one_shows_moves_all_and_the_error_beside_it_shrinks():
    belief, noise = start(), Noise()
    before = belief.error("off", "4_1_5")
    for _ in range(10):
        belief.observe("off", 0.5, ROUNDS, noise)
        belief.observe("4_1_5", 0.5 * math.exp(0.4), ROUNDS, noise)
    assert belief.log("1_1_2") == pytest.approx(math.log(0.5) + 0.2, abs=0.05)
    assert belief.error("off", "4_1_5") < before / 3
    assert belief.error("off", "1_1_2") < before
    assert belief.error("off", "off") == 0.0


@pytest.mark.parametrize(("times", "chunks"), [(10.0, 2), (0.1, 1)])
def test_some_outliers_are_hiccups_and_one_more_is_a_change(times, chunks):
    belief, noise = start(), Noise()
    for _ in range(50):
        belief.observe("off", 1.0, ROUNDS, noise)
    for _ in range(chunks):
        belief.observe("off", times, ROUNDS, noise)
    assert belief.log("off") == pytest.approx(0, abs=0.3)
    belief.observe("off", times, ROUNDS, noise)
    assert belief.log("off") == pytest.approx(math.log(times), abs=0.3)
    assert belief.log("4_1_5") - 0.4 == pytest.approx(math.log(times), abs=0.3), "presumably all"


def test_outliers_of_one_among_others_are_its_own():
    belief, noise = start(), Noise()
    for at in range(30):
        belief.observe("off", 1.0, ROUNDS, noise)
        belief.observe("4_1_5", 1.5 if at < 20 else 15.0, ROUNDS, noise)
    assert belief.log("off") == pytest.approx(0, abs=0.1)
    assert belief.log("4_1_5") == pytest.approx(math.log(15.0), abs=0.3)


def test_a_state_is_json_and_goes_on_the_same():
    for beside in (0.0, 2.0):
        one, noise = start(beside), Noise()
        for seconds in (1.0, 1.1, 30.0, 1.0, 30.0):
            one.observe("off", seconds, ROUNDS, noise)
        other = Belief.from_state(json.loads(json.dumps(one.state(), allow_nan=False)))
        for belief, own in ((one, Noise(0.1)), (other, Noise(0.1))):
            belief.observe("off", 30.0, ROUNDS, own)
            belief.observe("1_1_2", 1.0, 2, own)
        assert one.state() == other.state()
        assert one.beside == pytest.approx(beside, rel=2.0) and (one.beside > 0) == (beside > 0)
