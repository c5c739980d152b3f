"""What holds of every controller, and how one is configured."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import chunk_of, observed

from specjax.config.strategy import Strategy
from specjax.control import (
    BanditConfig,
    ControlConfig,
    CostTable,
    EmaConfig,
    GoodputConfig,
    Static,
    make_controller,
)

CONFIGS = {
    "goodput": ControlConfig(strategies=("off", "1_1_2", "4_1_5", "8_4_16", "4x2x1")),
    "untabled": ControlConfig(strategies=("2_1_3", "4_1_5")),
    "bandit": ControlConfig("bandit", ("8_4_32", "off", "2_1_3"), bandit=BanditConfig(window=4)),
    "length": ControlConfig(
        "bandit", ("8_4_32", "off"), bandit=BanditConfig(reward="accept_length")
    ),
    "ema": ControlConfig("ema", ema=EmaConfig((0, 1, 3, 7), 0.5, 1, 2)),
    "static": ControlConfig("static", ("4_1_5",)),
    "gated": ControlConfig("goodput", ("off", "4_1_5"), bs_threshold=4),
    "gated bandit": ControlConfig("bandit", ("2_1_3", "4_1_5"), bs_threshold=4),
}


def arms(config: ControlConfig) -> list[str]:
    return [arm.name for arm in config.arms]


def build(name: str):
    config = CONFIGS[name]
    costs = None
    if name in ("goodput", "gated"):
        seconds = {arm: [1.0 + i, 2.0 + i] for i, arm in enumerate(arms(config))}
        costs = CostTable([1, 8], seconds)
    return make_controller(config, costs=costs)


# A chunk: running slots, rounds, how good the head is, seconds, and whether the tag is the arm
# that was selected last or any.
CHUNKS = st.tuples(
    st.integers(1, 70),
    st.integers(0, 6),
    st.sampled_from((0.0, 0.3, 0.9, 1.0)),
    st.sampled_from((0.0, -1.0, math.nan, math.inf, 1e-9, 0.01, 1.0, 1e9)),
    st.integers(0, 20),
    st.booleans(),
)


def advance(controller, chunks, seed: int = 0) -> list[str]:
    random, names = np.random.default_rng(seed), []
    for batch, rounds, rate, seconds, tag, weights in chunks:
        name = controller.select(batch)
        names.append(name)
        arm = name if tag < 10 else (*controller.arms, "9_1_10")[tag % (len(controller.arms) + 1)]
        steps = Strategy.parse(arm).steps
        drafted = random.random((rounds, min(batch, 3), steps)) < rate
        accepted = np.cumprod(drafted, axis=-1).sum(axis=-1).astype(int)
        accepted[random.random(accepted.shape) < 0.2] = -1
        controller.observe(chunk_of(batch, arm, accepted, seconds))
        if weights:
            controller.weights_changed()
    return names


@pytest.mark.parametrize("name", CONFIGS)
@given(chunks=st.lists(CHUNKS, max_size=40))
def test_never_an_invalid_strategy_and_never_nan(name, chunks):
    controller = build(name)
    chosen = advance(controller, chunks)
    assert set(chosen) <= set(arms(CONFIGS[name]))
    fields = controller.log_fields()
    assert all(isinstance(v, str) or math.isfinite(v) for v in fields.values()), fields
    json.dumps([controller.state(), fields], allow_nan=False)


@pytest.mark.parametrize("name", CONFIGS)
@given(before=st.lists(CHUNKS, max_size=25), after=st.lists(CHUNKS, max_size=25))
def test_a_restored_controller_continues_identically(name, before, after):
    one, other = build(name), build(name)
    advance(one, before)
    other.load_state(json.loads(json.dumps(one.state())))
    assert other.state() == one.state()
    assert advance(one, after, seed=1) == advance(other, after, seed=1)
    assert other.state() == one.state()
    assert other.log_fields() == one.log_fields()


@pytest.mark.parametrize("name", CONFIGS)
def test_an_empty_chunk_teaches_nothing(name):
    controller = build(name)
    arm = controller.select(2)
    before = controller.state()
    controller.observe(chunk_of(2, arm, np.zeros((0, 2), int), 1.0))
    controller.observe(chunk_of(2, arm, np.full((3, 2), -1), 1.0))
    assert controller.state() == before


def test_a_state_of_another_controller_is_refused():
    with pytest.raises(ValueError, match="'arms': \\['4_1_5'\\]}, got that of {'kind': 'ema'"):
        build("static").load_state(build("ema").state())
    with pytest.raises(ValueError, match="'off'"):
        build("static").load_state(Static("off").state())


def test_above_its_threshold_a_controller_does_not_speculate():
    controller = make_controller(ControlConfig("static", ("4_1_5",), bs_threshold=4))
    chosen = [controller.select(b) for b in (1, 4, 5, 64, 4)]
    assert chosen == ["4_1_5", "4_1_5", "off", "off", "4_1_5"]
    assert controller.log_fields()["gated"] == 0.0


def test_what_must_be_compiled():
    assert arms(ControlConfig("ema")) == ["1_1_2", "3_1_4", "7_1_8"]
    assert arms(ControlConfig("ema", ema=EmaConfig((0, 2)), bs_threshold=8)) == ["off", "2_1_3"]
    assert arms(ControlConfig("static", initial="4_1_5", bs_threshold=2)) == ["4_1_5", "off"]
    assert arms(ControlConfig("bandit", ("disable", "none", "2_1_3"))) == ["off", "2_1_3"]
    assert "off" in arms(ControlConfig())


def test_maps_configure_as_dataclasses_do():
    config = ControlConfig(
        controller="bandit",
        strategies=["off", "4_1_5"],
        bandit={"epsilon": 0.2, "thresholds": [1, 4]},
        goodput={"hysteresis": 0.05},
        ema={"candidate_steps": [2]},
    )
    assert config.bandit == BanditConfig(epsilon=0.2, thresholds=(1, 4))
    assert config.goodput == GoodputConfig(hysteresis=0.05)
    assert config.ema == EmaConfig((2,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"controller": "best"}, "controller must be one of goodput, static, ema, bandit"),
        ({"control": "ema"}, "unexpected keyword argument 'control'"),
        ({"bandit": {"eps": 0.1}}, "unexpected keyword argument 'eps'"),
        ({"strategies": "4_1_5"}, "strategies must be a list"),
        ({"strategies": ["4_1_9"]}, "use '4_1_5'"),
        ({"bs_threshold": -1}, "bs_threshold must be at least 0"),
        ({"controller": "ema", "initial": "8_4_32"}, "chooses among chains"),
        ({"ema": {"alpha": 1}}, "unexpected keyword argument 'alpha'"),
    ],
)
def test_a_wrong_configuration_is_refused(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make_controller(settings)


@pytest.mark.parametrize(
    ("config", "setting", "values"),
    [
        (GoodputConfig, "hysteresis", [-0.1]),
        (GoodputConfig, "probe_fraction", [1.0, math.nan]),
        (BanditConfig, "thresholds", [(), (2, 2), (0, 2)]),
        (BanditConfig, "epsilon", [1.5]),
        (BanditConfig, "reward", ["speed"]),
        (EmaConfig, "candidate_steps", [(), (-1, 3), (1.5,)]),
        (EmaConfig, "ema_alpha", [0.0, math.nan]),
        (EmaConfig, "update_interval", [0]),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(config, setting, values):
    for value in values:
        with pytest.raises(ValueError, match=setting):
            config(**{setting: value})


def test_observations_count_what_was_emitted():
    seen = observed(3, "off", [[0, 2], [], [1]], 0.3)
    assert (seen.rounds, seen.slot_rounds, seen.tokens) == (2, 3, 6)
    assert seen.histogram == [3, 1, 1, 1]
    assert seen.accept_length == 2.0
    assert seen.seconds_per_round == pytest.approx(0.15)


def test_it_imports_without_jax():
    code = "import sys, specjax.control; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
