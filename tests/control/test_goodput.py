"""Goodput control in a simulated world: near the oracle, never far below plain decoding."""

import math

import numpy as np
import pytest
from control_sim import ARMS, BAD, GOOD, World, cost_table, drive

from specjax.control import (
    ControlConfig,
    CostTable,
    Goodput,
    GoodputConfig,
    Observation,
    make_controller,
)
from specjax.control.acceptance import Acceptance, effective_widths
from specjax.control.base import parse_arms

BATCHES = (1, 2, 4, 8, 16, 32, 64)
every_batch_size = pytest.mark.parametrize(
    "batches",
    [BATCHES[::2], pytest.param(BATCHES[1::2], marks=pytest.mark.slow)],
    ids=["every other", "the others"],
)
TREES = ("off", "4_1_5", "8_1_9", "8_4_16", "8_4_32")


def tree_costs(row: float) -> CostTable:
    """Rows are free until they fill the machine; a draft step costs 8% of a plain round."""

    def seconds(name, batch):
        steps, rows = (0, 1) if name == "off" else (int(name.split("_")[i]) for i in (0, 2))
        return 1e-3 * (max(1.0, rows * batch * row) + 0.08 * steps)

    return CostTable(BATCHES, {n: [seconds(n, b) for b in BATCHES] for n in TREES})


def chunk(name: str, per_round, seconds: float = 0.01) -> Observation:
    return Observation.of_rounds(len(per_round[0]), name, per_round, seconds)


@pytest.mark.parametrize("table", ["cpu", "h200_8b"])
@pytest.mark.parametrize("rates", [GOOD, (0.6,) * 7, (0.9, 0.5, 0.9, 0.5, 0.9, 0.5, 0.9), BAD])
@every_batch_size
def test_goodput_is_within_3_percent_of_the_oracle_at_every_batch_size(table, rates, batches):
    """On average of two runs: in one of forty the second best is taken for the best to the end."""
    for batch in batches:
        shares = []
        for seed in (batch, 1000 + batch):
            world = World(cost_table(table), rates, seed=seed)
            run = drive(Goodput(ARMS, cost_table(table)), world, batch, 2000)
            shares.append(run.rate(400) / world.oracle(ARMS, batch))
        assert sum(shares) / 2 >= 0.97, (batch, shares)


@pytest.mark.parametrize("table", ["cpu", "h200_8b", "v5e_4_8b"])
@every_batch_size
def test_a_useless_head_costs_at_most_3_percent_of_plain_decoding(table, batches):
    """From the first chunk on, learning included."""
    for batch in batches:
        world = World(cost_table(table), (0.0,) * 7, seed=batch)
        run = drive(Goodput(ARMS, cost_table(table)), world, batch, 3000)
        plain = batch * world.tokens("off") / world.seconds("off", batch)
        assert run.rate() >= 0.97 * plain, batch


@pytest.mark.parametrize("catch_up", [4.0, 12.0])
@every_batch_size
def test_new_weights_again_and_again_do_not_make_a_useless_head_dear(catch_up, batches):
    """Every one of them asks for a try, and before each try the draft reads what it has missed."""
    for batch in batches:
        world = World(cost_table("cpu"), (0.0,) * 7, seed=batch, catch_up=catch_up)
        controller = Goodput(ARMS, cost_table("cpu"))
        run = drive(controller, world, batch, 4000, swap_every=200)
        plain = batch * world.tokens("off") / world.seconds("off", batch)
        assert run.rate() >= 0.93 * plain, batch
        assert run.rate(1000) >= 0.97 * plain, batch


def test_rounds_of_those_who_draft_nothing_are_rounds_too():
    """One sample drafts and ends at once, beside seven that opted out."""
    accepted = np.full((6, 8), -1)
    accepted[0, 0] = 1
    seen = Observation(8, "4_1_5", accepted, 0.06, rounds=6, opted_out=7)
    assert seen.seconds_per_round == pytest.approx(0.01)
    controller = Goodput(ARMS, CostTable([8], {arm: [0.01] for arm in ARMS}))
    controller.observe(seen)
    assert controller.costs.seconds("4_1_5", 8) == pytest.approx(0.01)


def test_who_drafts_nothing_counts_where_a_strategy_is_chosen():
    """A draft round that brings two samples four tokens each must not cost thirty others time."""
    costs = CostTable([32], {"off": [1e-3], "3_1_4": [2e-3]})
    for opted_out, best in ((0, "3_1_4"), (30, "off")):
        controller = Goodput(("off", "3_1_4"), costs)
        for _ in range(200):
            name = controller.select(32)
            accepted = np.full((8, 32), -1)
            accepted[:, : 32 - opted_out] = 3 if name == "3_1_4" else 0
            accepted[:, 32 - opted_out :] = -1 if name == "3_1_4" else 0
            seconds = 8 * costs.seconds(name, 32)
            controller.observe(
                Observation(32, name, accepted, seconds, rounds=8, opted_out=opted_out)
            )
        assert controller.current == best


def test_drafts_behind_the_end_of_a_sample_count_for_nothing():
    """Deep drafts are all accepted, and samples are three tokens long: a shallow chain wins."""
    costs = CostTable([4], {"2_1_3": [1.0], "7_1_8": [1.5]})
    for length, best in ((None, "7_1_8"), (3, "2_1_3")):
        controller = Goodput(("2_1_3", "7_1_8"), costs)
        for _ in range(40):
            name = controller.select(4)
            drafts = controller.drafts[name].steps
            emitted = drafts + 1 if length is None else min(drafts + 1, length)
            controller.observe(
                Observation(
                    4,
                    name,
                    np.full((2, 4), drafts),
                    2 * costs.seconds(name, 4),
                    tokens=8 * emitted,
                    ended=0 if length is None else 8,
                    is_try=controller.rounds_hint is not None,
                )
            )
        assert controller.select(4) == best
        scores = controller.scores(4)
        assert scores["2_1_3"] < 3.0
        again = Goodput(("2_1_3", "7_1_8"))
        again.load_state(controller.state())
        assert again.scores(4) == scores


@pytest.mark.parametrize("table", ["cpu", "h200_8b"])
@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_swapped_head_is_followed_within_50_rounds(table, batch, seed):
    world = World(cost_table(table), seed=seed)
    controller = Goodput(ARMS, cost_table(table))
    for rates in (GOOD, BAD, GOOD, BAD, GOOD):
        world.rates = rates
        controller.weights_changed()
        run = drive(controller, world, batch, 500)
        assert run.rate(50) >= 0.95 * world.oracle(ARMS, batch)


@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("catch_up", [4.0, 12.0])
def test_so_it_is_though_plain_chunks_are_long_and_the_head_must_catch_up(batch, catch_up):
    """As in the engine: two chunks of 32 plain rounds are under way while a try is awaited."""
    for seed in range(3):
        world = World(cost_table("cpu"), seed=seed, catch_up=catch_up)
        controller = Goodput(ARMS, cost_table("cpu"))
        for rates in (GOOD, BAD, GOOD, BAD, GOOD):
            world.rates = rates
            controller.weights_changed()
            run = drive(controller, world, batch, 500, chunk_tokens=32)
            share = 0.95 if batch > 1 else 0.9  # a try of one slot tells little
            assert run.rate(50) >= share * world.oracle(ARMS, batch), (seed, rates, run.names)


@pytest.mark.parametrize("table", ["cpu", "h200_8b"])
def test_a_head_that_changes_unannounced_is_followed_too(table):
    """A good head that turns bad shows at once; the way back waits for a try that can be paid."""
    world, controller = World(cost_table(table)), Goodput(ARMS, cost_table(table))
    drive(controller, world, 4, 600)
    world.rates = BAD
    assert drive(controller, world, 4, 600).rate(50) >= 0.93 * world.oracle(ARMS, 4)
    world.rates = GOOD
    assert drive(controller, world, 4, 900).rate(400) >= 0.97 * world.oracle(ARMS, 4)


@pytest.mark.parametrize("row", [0.002, 0.02])
@pytest.mark.parametrize("wide", [1.2, 2.2])
@every_batch_size
def test_trees_are_told_from_chains_whatever_they_gain(row, wide, batches):
    for batch in batches:
        world = World(tree_costs(row), (0.8,) * 8, seed=batch, wide=wide)
        run = drive(Goodput(TREES, tree_costs(row)), world, batch, 3000)
        assert run.rate(400) >= 0.96 * world.oracle(TREES, batch), batch


def test_a_deep_chain_is_found_from_a_shallow_one():
    costs = CostTable([1], {"off": [1.0], "1_1_2": [1.05], "7_1_8": [1.2]})
    world = World(costs, (0.9,) * 7)
    controller = Goodput(["off", "1_1_2", "7_1_8"], costs, GoodputConfig(prior=0.1))
    assert drive(controller, world, 1, 400).names[-1] == "7_1_8"


def test_miscalibrated_costs_are_corrected():
    true = cost_table("h200_8b")
    for batch in (1, 64):
        world = World(true, (0.7,) * 7)
        wrong = cost_table("h200_8b", times={"4_1_5": 1.25, "7_1_8": 0.8})
        controller = Goodput(ARMS, wrong)
        run = drive(controller, world, batch, 5000)
        assert run.rate(2500) >= 0.95 * world.oracle(ARMS, batch)


def test_costs_that_all_grow_change_no_choice():
    world = World(cost_table("h200_8b"), outliers=0.0)
    controller = Goodput(ARMS, cost_table("h200_8b"))
    before = drive(controller, world, 4, 1000)
    world.costs = cost_table("h200_8b", times=dict.fromkeys(ARMS, 2.0))
    after = drive(controller, world, 4, 1000)
    assert after.rate() >= 0.5 * 0.98 * before.rate()


def test_chains_teach_each_other():
    model = Acceptance(parse_arms(["2_1_3", "4_1_5"]), half_life=100.0, prior=0.7)
    for _ in range(20):
        model.learn("4_1_5", [0, 0, 16 * 8], 16)  # always one draft, never two
    assert model.expected_tokens("2_1_3") == pytest.approx(2.0, abs=0.05)
    assert model.expected_tokens("4_1_5") == pytest.approx(2.0, abs=0.05)


def test_depths_beyond_a_chain_are_extrapolated():
    model = Acceptance(parse_arms(["2_1_3", "4_1_5"]), half_life=100.0, prior=0.7)
    for _ in range(200):
        model.learn("2_1_3", [0, 8, 8, 16], 4)
    rates = model.rates("chain")
    assert rates[:2] == pytest.approx([0.75, 2 / 3], abs=0.01)
    assert rates[2:] == pytest.approx([2 / 3, 2 / 3], abs=0.05)


def test_a_tree_is_expected_to_beat_the_chain_that_was_seen():
    model = Acceptance(parse_arms(["8_1_9", "8_4_9", "8_4_32"]), half_life=100.0, prior=0.7)
    rng = np.random.default_rng(0)
    for _ in range(20):
        drafted = np.cumprod(rng.random((16, 8, 8)) < 0.7, axis=-1)
        model.learn("8_1_9", np.bincount(1 + drafted.sum(axis=-1).ravel()).tolist(), 16)
    chain, narrow, wide = map(model.expected_tokens, ("8_1_9", "8_4_9", "8_4_32"))
    assert chain == pytest.approx(narrow, rel=0.02)
    assert wide > 1.2 * chain


def test_widths_follow_the_children():
    strategy = parse_arms(["4x2x1"])["4x2x1"]
    assert effective_widths(strategy) == pytest.approx((2.0, math.sqrt(2), 1.0))


def test_a_sudden_change_overrules_what_was_counted():
    model = Acceptance(parse_arms(["4_1_5"]), half_life=1e6, prior=0.7)
    for _ in range(100):
        model.learn("4_1_5", [0] * 5 + [16], 16)
    model.learn("4_1_5", [0, 16], 16)
    assert model.expected_tokens("4_1_5") < 1.5


def test_what_drafts_may_well_bring_comes_down_to_what_was_seen():
    model = Acceptance(parse_arms(["2_1_3"]), half_life=1e6, prior=0.7)
    above = []
    for _ in range(6):
        model.learn("2_1_3", (0, 12, 3, 1), 16)
        above.append(model.likely_tokens("2_1_3") - model.expected_tokens("2_1_3"))
    assert all(x > y > 0 for x, y in zip(above, above[1:], strict=False)), above
    rate = model.rates("chain")[0]
    first = math.sqrt(rate * (1 - rate) / (6 * 16 + 1))
    assert first < above[-1] < 3 * first
    assert model.likely_tokens("off") == 1.0


def test_an_outlier_hardly_moves_the_costs():
    table = CostTable([1], {"off": [1.0]})
    table.observe("off", 1, 1000.0, 16)
    assert table.seconds("off", 1) < 6.0, "a calibration may be off by much"
    for _ in range(20):
        table.observe("off", 1, 1.0, 16)
    table.observe("off", 1, 1000.0, 16)
    assert table.seconds("off", 1) < 1.05
    for _ in range(60):
        table.observe("off", 1, 2.0, 16)
    assert table.seconds("off", 1) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, None])
def test_costs_ignore_what_is_no_time(seconds):
    table = CostTable([1], {"off": [1.0]})
    table.observe("off", 1, seconds, 16)
    assert table.seconds("off", 1) == 1.0


def test_missing_costs_are_guessed_from_what_is_known():
    table = CostTable([1, 4, 16], {"off": [1.0, None, 4.0], "4_1_5": [None, None, None]})
    assert table.seconds("off", 2) == pytest.approx(2.0)
    assert 1.0 < table.seconds("4_1_5", 1) < 2.0
    assert table.known("off", 1)
    assert not table.known("4_1_5", 1)
    assert table.seconds("off", 1000) == pytest.approx(4.0)
    assert 0 < CostTable().seconds("8_4_32", 3) < 1


def test_without_calibration_it_still_finds_its_way():
    for batch in (1, 8, 64):
        world = World(cost_table("cpu"), seed=batch)
        run = drive(Goodput(ARMS), world, batch, 3000)
        assert run.rate(400) >= 0.95 * world.oracle(ARMS, batch)


def test_gains_are_said_of_what_was_measured_alone():
    controller = Goodput(["off", "4_1_5"], CostTable((1, 8), {"off": (1.0, 1.0)}))
    assert controller.gains(8) == {"off": 1.0}, "what 4_1_5 costs is a guess"
    all_accepted = [[4] * 8] * 8
    controller.observe(Observation.of_rounds(8, "4_1_5", all_accepted, seconds=8 * 2.0))
    assert 2.2 < controller.gains(8)["4_1_5"] <= 2.5, "5 tokens in twice the time"
    controller.weights_changed()
    assert controller.gains(8) == {"off": 1.0}, "of the new weights nothing was seen"
    gated = make_controller(ControlConfig(strategies=("off", "4_1_5"), bs_threshold=4))
    assert gated.gains(1) == {}, "what plain decoding costs is a guess"
    gated.calibrated(CostTable((1, 8), {"off": (1.0, 1.0), "4_1_5": (2.0, 2.0)}))
    gated.observe(Observation.of_rounds(1, "4_1_5", [[4]] * 64, seconds=64 * 2.0))
    assert gated.gains(1)["4_1_5"] == pytest.approx(2.4, abs=0.1)
    assert make_controller("bandit").gains(1) == {}


def test_gains_are_what_a_round_brings_over_what_it_takes():
    """With its share of what lies beside the rounds; so the server's page explains them."""
    rounds_take = {"off": [1.0], "4_1_5": [2.0]}
    controller = Goodput(["off", "4_1_5"], CostTable((1,), rounds_take, beside=[6.0]))
    controller.observe(Observation.of_rounds(1, "4_1_5", [[3]] * 64, seconds=64 * 2.0 + 6.0))
    takes = {arm: controller.round_seconds(arm, 1) for arm in controller.arms}
    assert takes["off"] > 1.03 and takes["4_1_5"] > 2.15, "five rounds to one, of a full chunk"
    brings = controller.acceptance.expected_tokens("4_1_5")
    assert controller.gains(1)["4_1_5"] == pytest.approx(brings * takes["off"] / takes["4_1_5"])
    assert controller.slack("off", 1) < controller.costs.slack("off", 1), "of the rounds alone"


@pytest.mark.parametrize(
    ("buckets", "seconds"),
    [
        ([], {}),
        ([4, 2], {}),
        ([0, 2], {}),
        ([1, 2], {"off": [1.0]}),
        ([1], {"off": [0.0]}),
        ([1], {"off": [math.inf]}),
    ],
)
def test_tables_that_make_no_sense_are_refused(buckets, seconds):
    with pytest.raises(ValueError):
        CostTable(buckets, seconds)


def test_of_several_measurements_the_least_counts_by_whatever_name():
    table = CostTable.from_samples({("off", 1): [3.0, 2.0, 4.0], ("disable", 2): [4.0]})
    assert table.seconds("off", 1) == pytest.approx(2.0)
    assert table.seconds("off", 2) == pytest.approx(4.0)


def test_a_controller_does_not_change_the_table_it_was_given():
    table = cost_table("cpu")
    before = table.state()
    drive(Goodput(ARMS, table), World(cost_table("cpu")), 2, 200)
    assert table.state() == before


def test_regret_and_choices_are_in_the_log_fields():
    controller = Goodput(["off", "4_1_5"], CostTable([1], {"off": [1.0], "4_1_5": [1.2]}))
    name = controller.select(1)
    controller.observe(chunk(name, [[4]] * 8))
    fields = controller.log_fields()
    assert fields["strategy"] == name
    assert fields["accept_length"] == 5.0
    assert 0 <= fields["regret_share"] < 1
    assert {"regret_seconds", "probes", "acceptance_depth_1"} <= set(fields)


def test_it_is_the_default():
    assert make_controller().kind == "goodput"


@pytest.mark.parametrize(
    "wrong",
    [
        {"hysteresis": -0.1},
        {"probe_fraction": 1.0},
        {"probe_slot_rounds": 0},
        {"half_life": 0.0},
        {"prior": 1.5},
        {"prior": math.nan},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GoodputConfig(**wrong)
