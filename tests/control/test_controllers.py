"""What holds of every controller, and how one is configured."""

import json
import math
import subprocess
import sys
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.config.strategy import Strategy
from specjax.control import (
    BanditConfig,
    ControlConfig,
    CostTable,
    EmaConfig,
    Gate,
    GoodputConfig,
    Observation,
    Static,
    make_controller,
)
from specjax.control.base import LOG_EVERY, parse_arms

CONFIGS = {
    "goodput": ControlConfig(strategies=("off", "1_1_2", "4_1_5", "8_4_16", "4x2x1")),
    "untabled": ControlConfig(strategies=("2_1_3", "4_1_5")),
    "bandit": ControlConfig("bandit", ("8_4_32", "off", "2_1_3"), bandit=BanditConfig(window=4)),
    "length": ControlConfig(
        "bandit", ("8_4_32", "off"), bandit=BanditConfig(reward="accept_length", score="mean")
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
        controller.observe(Observation(batch, arm, accepted, seconds))
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


def contents(thing):
    """Everything that an object holds, but what is computed anew, of one choice, or of the log."""
    if isinstance(thing, np.ndarray):
        return thing.tolist()
    if isinstance(thing, np.random.Generator):
        return thing.bit_generator.state
    if isinstance(thing, dict):
        passing = ("rounds_hint", "_rates", "config", "_logged", "_since_logged")
        return {key: contents(value) for key, value in thing.items() if key not in passing}
    if isinstance(thing, (list, tuple, deque)):
        return [contents(item) for item in thing]
    return contents(vars(thing)) if hasattr(thing, "__dict__") else thing


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_that_a_controller_holds_is_left_out_of_its_state(name):
    chunks = [(b, 5, r, 0.5, 0, b == 1) for b in (1, 2, 1, 9) for r in (0.9, 0.0, 0.0)] * 12
    one, other = build(name), build(name)
    advance(one, chunks)
    advance(one, [(1, 5, 0.0, 0.5, 0, False)] * 60)  # long after the last swap of weights
    one.select(1)
    other.load_state(json.loads(json.dumps(one.state())))
    assert contents(other) == contents(one)


@pytest.mark.parametrize("name", CONFIGS)
def test_saving_changes_nothing_and_later_chunks_do_not_reach_a_saved_state(name):
    controller = build(name)
    advance(controller, [(2, 4, 0.9, 1.0, 0, False)] * 5)
    saved = controller.state()
    text = json.dumps(saved)
    advance(controller, [(2, 4, 0.9, 1.0, 0, False)] * 5)
    assert json.dumps(saved) == text


@pytest.mark.parametrize("name", CONFIGS)
def test_an_empty_chunk_teaches_nothing(name):
    controller = build(name)
    arm = controller.select(2)
    before = controller.state()
    controller.observe(Observation(2, arm, np.zeros((0, 2), int), 1.0))
    controller.observe(Observation(2, arm, np.full((3, 2), -1), 1.0))
    assert controller.state() == before


def test_a_state_of_another_controller_is_refused():
    with pytest.raises(ValueError, match="expected the state of a 'static' controller over 4_1_5"):
        build("static").load_state(build("ema").state())
    with pytest.raises(ValueError, match="over off"):
        build("static").load_state(Static("off").state())


def test_the_gate_speculates_only_up_to_its_threshold():
    gate = Gate(Static("4_1_5"), 4)
    assert [gate.select(b) for b in (1, 4, 5, 64, 4)] == ["4_1_5", "4_1_5", "off", "off", "4_1_5"]
    assert gate.log_fields()["gated"] == 0.0


def test_a_closed_gate_does_not_ask_the_controller_behind_it():
    controller = build("gated bandit")
    controller.select(64)
    assert controller.inner.state()["chosen"] == [{"2_1_3": 0, "4_1_5": 0}] * 4
    assert controller.inner.arms == ("2_1_3", "4_1_5")
    assert controller.arms == ("2_1_3", "4_1_5", "off")


def test_what_must_be_compiled():
    assert arms(ControlConfig("ema")) == ["1_1_2", "3_1_4", "7_1_8"]
    assert arms(ControlConfig("ema", ema=EmaConfig((0, 2)), bs_threshold=8)) == ["off", "2_1_3"]
    assert arms(ControlConfig("ema", initial="8_4_32")) == ["8_4_32"]
    assert arms(ControlConfig("static", initial="4_1_5", bs_threshold=2)) == ["4_1_5", "off"]
    assert arms(ControlConfig("bandit", ("disable", "none", "2_1_3"))) == ["off", "2_1_3"]
    assert "off" in arms(ControlConfig())


def test_a_choice_that_is_not_compiled_is_refused():
    with pytest.raises(ValueError, match="may select 3_1_4, but only 1_1_2, 7_1_8 are compiled"):
        make_controller("ema", ["1_1_2", "7_1_8"])


def test_strategies_may_be_parsed_ones_path_tuples_included():
    tree = Strategy.from_paths([(0,), (1,), (0, 0)])
    controller = make_controller("goodput", [tree, Strategy.parse("2_1_3"), "off"])
    assert controller.arms == (tree.name, "2_1_3", "off")
    assert controller.select(1) in controller.arms


def test_maps_configure_as_dataclasses_do():
    config = ControlConfig.from_dict(
        {
            "controller": "bandit",
            "strategies": ["off", "4_1_5"],
            "bandit": {"epsilon": 0.2, "thresholds": [1, 4]},
            "goodput": {"hysteresis": 0.05},
            "ema": {"candidate_steps": [2]},
        }
    )
    assert config.bandit == BanditConfig(epsilon=0.2, thresholds=(1, 4))
    assert config.goodput == GoodputConfig(hysteresis=0.05)
    assert config.ema == EmaConfig((2,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"controller": "best"}, "controller must be one of goodput, static, ema, bandit"),
        ({"control": "ema"}, "unknown control setting 'control'; the keys are"),
        ({"bandit": {"eps": 0.1}}, "unknown setting 'eps' of bandit; the keys are"),
        ({"strategies": "4_1_5"}, "strategies must be a list"),
        ({"strategies": []}, "got none"),
        ({"strategies": ["4_1_9"]}, "use '4_1_5'"),
        ({"bs_threshold": -1}, "bs_threshold must be at least 0"),
        ({"ema": {"alpha": 1}}, "unknown adaptive setting 'alpha'"),
    ],
)
def test_a_wrong_configuration_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_controller(settings)


def test_observations_count_what_was_emitted():
    seen = Observation.of_rounds(3, "disable", [[0, 2], [], [1]], 0.3)
    assert seen.strategy == "off"
    assert (seen.rounds, seen.slot_rounds, seen.tokens) == (2, 3, 6)
    assert seen.histogram == [3, 1, 1, 1]
    assert seen.accept_length == 2.0
    assert seen.seconds_per_round == pytest.approx(0.15)


@pytest.mark.parametrize("accepted", [[1, 2], [[0.5]], [[-2]], [[math.nan]]])
def test_observations_that_make_no_sense_are_refused(accepted):
    with pytest.raises(ValueError, match="accepted must be integers"):
        Observation(1, "off", np.array(accepted), 1.0)


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        build("static").select(0)


def test_it_imports_without_jax():
    code = "import sys, specjax.control; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_strategies_that_change_all_the_time_are_named_now_and_then_and_one_that_stays_soon(caplog):
    caplog.set_level("INFO", "specjax.control")
    controller = build("bandit")
    controller.strategies = parse_arms(["off", "1_1_2"])

    def named(choices):
        caplog.clear()
        for choice in choices:
            controller.choose = lambda batch_size, choice=choice: choice
            controller.select(1)
        return [record.message.split()[2] for record in caplog.records]

    assert named(["off", "1_1_2"] * 500)[0] == "off", "the first at once"
    assert 5 <= len(named(["off", "1_1_2"] * 500)) <= 1000 // LOG_EVERY + 1
    named(["off"] * LOG_EVERY)
    assert named(["1_1_2"] * LOG_EVERY) == ["1_1_2"]
    assert named(["1_1_2"] * 3 * LOG_EVERY) == []
