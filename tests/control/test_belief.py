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


def conditioned(slopes: np.ndarray, surprises: np.ndarray, size: float):
    """What moves the mean, and the covariance, after the last chunk: from the joint distribution of
    the states at all chunks and all observations. The plain way, without a filter.

    Args:
      slopes: [T, 1 + n], of each chunk's log seconds. surprises: [T], beside the prior mean.
    """
    count, n = slopes.shape[0], len(NAMES)
    strategies = np.append(0.0, np.ones(n))
    common = np.outer(strategies, strategies)
    prior = np.diag([module._BESIDE**2] + n * [module._CALIBRATED**2])
    prior += module._CALIBRATED_ALL**2 * common
    step = module._OWN_STEP**2 * np.eye(n + 1) + module._COMMON_STEP**2 * common
    at = [prior + (t + 1) * step for t in range(count)]  # of the state when chunk t came
    chunks = range(count)
    seen = np.array([[slopes[s] @ at[min(s, t)] @ slopes[t] for t in chunks] for s in chunks])
    shared = np.array([at[t] @ slopes[t] for t in chunks]).T
    gain = shared @ np.linalg.inv(seen + size**2 * np.eye(count))
    return gain @ surprises, at[-1] - gain @ shared.T


class Known(Noise):
    def saw(self, surprise, known, own):
        pass


@pytest.mark.parametrize("beside", [0.0, 6.0])
@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_posterior_of_all_chunks(seed, beside):
    """Exact without what lies beside the rounds, and with it as far as logs are straight."""
    rng, belief = np.random.default_rng(seed), start(beside)
    prior, slopes, surprises = belief.mean.copy(), [], []
    for i in rng.integers(0, len(NAMES), 25).tolist():
        rounds = int(rng.choice([8, 16, 32]))
        seconds = math.exp(belief.log(NAMES[i])) + belief.beside / rounds
        seconds *= math.exp(rng.uniform(-0.01, 0.01))  # little, as no outlier is
        before = math.exp(prior[1 + i]) + beside / rounds
        slope = np.zeros(1 + len(NAMES))
        slope[0], slope[1 + i] = beside / rounds / before, math.exp(prior[1 + i]) / before
        slopes.append(slope)
        surprises.append(math.log(seconds / before))
        belief.observe(NAMES[i], seconds, rounds, Known(0.1))
    moved, covariance = conditioned(np.array(slopes), np.array(surprises), 0.1)
    np.testing.assert_allclose(belief.mean[1:] - prior[1:], moved[1:], atol=1e-3)
    np.testing.assert_allclose(belief.covariance, covariance, atol=1e-3 if beside else 1e-5)
    if beside:
        assert belief.mean[0] - prior[0] == pytest.approx(moved[0], abs=1e-3)


@pytest.mark.parametrize("size", [0.05, 0.3])
@pytest.mark.parametrize("known", [0.0, 0.1])
def test_noise_is_learned_whatever_is_not_known_beside_it(size, known):
    rng, noise, found = np.random.default_rng(0), Noise(), []
    for at in range(4000):
        surprise = rng.normal(0, math.hypot(size, known))
        noise.saw(surprise, known**2, noise.size**2)
        found.append(noise.size if at > 500 else size)
    assert np.mean(found) == pytest.approx(size, rel=0.15)


def test_noise_is_not_learned_from_the_first_chunk_of_a_strategy():
    noise = Noise()
    for _ in range(30):
        belief = Belief()
        belief.guessed("off", 0.0)
        belief.observe("off", 1.0, ROUNDS, noise)
    assert noise.size > 0.12


def test_what_one_shows_moves_all_and_the_error_beside_it_shrinks():
    belief, noise = start(), Noise()
    before = belief.error("off", "4_1_5")
    for _ in range(10):
        belief.observe("off", 0.5, ROUNDS, noise)
        belief.observe("4_1_5", 0.5 * math.exp(0.4), ROUNDS, noise)
    assert belief.log("1_1_2") == pytest.approx(math.log(0.5) + 0.2, abs=0.05)
    assert belief.error("off", "4_1_5") < before / 3
    assert belief.error("off", "1_1_2") < before


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
        assert other.beside == one.beside and (one.beside > 0) == (beside > 0)
