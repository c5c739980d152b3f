"""Goodput control on a simulated machine: near the best strategy, and never far below `off`."""

import itertools

import numpy as np
import pytest
from control_sim import ARMS, BAD, GOOD, Run, World, cost_table, drive
from scripted import chunk_of, observed

from specjax.control import (
    ControlConfig,
    CostTable,
    Goodput,
    GoodputConfig,
    make_controller,
)
from specjax.control.base import parse_arms
from specjax.control.goodput import Acceptance

BATCHES = (1, 2, 4, 8, 16, 32, 64)
TREES = ("off", "4_1_5", "8_1_9", "8_4_16", "8_4_32")


def tree_costs(row: float) -> CostTable:
    """Rows are free until they fill the machine; a draft step costs 8% of a plain round."""

    def seconds(name, batch):
        steps, rows = (0, 1) if name == "off" else (int(name.split("_")[i]) for i in (0, 2))
        return 1e-3 * (max(1.0, rows * batch * row) + 0.08 * steps)

    return CostTable(BATCHES, {n: [seconds(n, b) for b in BATCHES] for n in TREES})


# --- choices on the simulated machine ------------------------------------------------------------


@pytest.mark.parametrize("table", ["cpu", "h200_8b"])
@pytest.mark.parametrize("rates", [GOOD, (0.6,) * 7, (0.9, 0.5, 0.9, 0.5, 0.9, 0.5, 0.9), BAD])
def test_it_is_within_5_percent_of_the_best_static_strategy_after_200_rounds(table, rates):
    shares = []
    for batch in BATCHES:
        world = World(cost_table(table), rates, seed=batch)
        run = drive(Goodput(ARMS, cost_table(table)), world, batch, 1000)
        shares.append(run.rate(200) / world.oracle(ARMS, batch))
    assert np.mean(shares) >= 0.96 and min(shares) >= 0.95, shares


@pytest.mark.parametrize("table", ["cpu", "h200_8b"])
def test_a_useless_head_costs_at_most_3_percent_of_plain_decoding(table):
    """From the first chunk on, learning included."""
    for batch in BATCHES[::2]:
        world = World(cost_table(table), (0.0,) * 7, seed=batch)
        run = drive(Goodput(ARMS, cost_table(table)), world, batch, 3000)
        assert run.rate() >= 0.97 * batch / world.seconds("off", batch), batch


def test_new_weights_again_and_again_do_not_make_a_useless_head_dear():
    """Each asks for a probe, and before each probe the draft reads what it has missed."""
    shares = []
    for batch in BATCHES[::2]:
        world = World(cost_table("cpu"), (0.0,) * 7, seed=batch, catch_up=12.0)
        run = drive(Goodput(ARMS, cost_table("cpu")), world, batch, 4000, swap_every=200)
        plain = batch / world.seconds("off", batch)
        assert run.rate() >= 0.93 * plain, batch
        shares.append(run.rate(1000) / plain)
    assert np.mean(shares) >= 0.97, shares


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize(("table", "catch_up"), [("h200_8b", 0.0), ("cpu", 12.0)])
def test_a_swapped_head_is_followed_within_50_rounds(table, batch, catch_up):
    shares = []
    for seed in range(3):
        world = World(cost_table(table), seed=seed, catch_up=catch_up)
        controller = Goodput(ARMS, cost_table(table))
        for rates in (GOOD, BAD, GOOD, BAD, GOOD):
            world.rates = rates
            controller.weights_changed()
            run = drive(controller, world, batch, 500, chunk_tokens=32)
            shares.append(run.rate(50) / world.oracle(ARMS, batch))
    assert np.mean(shares) >= 0.95, shares


@pytest.mark.parametrize("table", ["cpu", "h200_8b"])
def test_acceptance_that_changes_midway_is_followed_unannounced(table):
    """A good head that turns bad shows at once; the way back waits for a probe to be paid for."""
    there, back = [], []
    for batch in (1, 4, 16):
        world, controller = World(cost_table(table), seed=batch), Goodput(ARMS, cost_table(table))
        drive(controller, world, batch, 600)
        world.rates = BAD
        there.append(drive(controller, world, batch, 600).rate(50) / world.oracle(ARMS, batch))
        world.rates = GOOD
        back.append(drive(controller, world, batch, 900).rate(400) / world.oracle(ARMS, batch))
    assert min(there) >= 0.95 and np.mean(back) >= 0.95, (there, back)


@pytest.mark.parametrize(("row", "wide"), [(0.002, 2.2), (0.02, 1.2)])
def test_trees_are_told_from_chains_whatever_they_gain(row, wide):
    for batch in BATCHES[::2]:
        world = World(tree_costs(row), (0.8,) * 8, seed=batch, wide=wide)
        run = drive(Goodput(TREES, tree_costs(row)), world, batch, 3000)
        assert run.rate(400) >= 0.96 * world.oracle(TREES, batch), batch


def test_wrong_and_missing_calibrations_are_put_right():
    true, shares = cost_table("h200_8b"), []
    wrong = cost_table("h200_8b", times={"4_1_5": 1.25, "7_1_8": 0.8})
    for batch in (1, 8, 64):
        for costs in (wrong, None):
            world = World(true, (0.7,) * 7, seed=batch)
            run = drive(Goodput(ARMS, costs), world, batch, 5000)
            shares.append(run.rate(2500) / world.oracle(ARMS, batch))
    assert np.mean(shares) >= 0.95 and min(shares) >= 0.9, shares


@pytest.mark.parametrize("only", ["drafting", "off"])
def test_a_change_of_some_costs_alone_is_found_by_probes(only):
    """What runs cannot tell it from one of all costs: off becomes worth it, or worth more."""

    def slower(name, at):
        factor = 1.0 if at < 1000 else 1.6 if only == "drafting" else 1 / 1.6
        return factor if (name == "off") == (only == "off") else 1.0

    shares = []
    for batch in (1, 4, 32):
        world = World(cost_table("cpu"), (0.75,) * 7, seed=batch, slower=slower)
        run = drive(Goodput(ARMS, cost_table("cpu")), world, batch, 6000)
        shares.append(run.rate(4000) / world.oracle(ARMS, batch))
    assert np.mean(shares) >= 0.95, shares


def share(runs: list[Run], strategy: str) -> float:
    """The share of the seconds that a strategy ran."""
    took = [pair for run in runs for pair in zip(run.names, run.seconds, strict=True)]
    return sum(s for name, s in took if name == strategy) / sum(s for _, s in took)


# Drafts of which half are accepted lose at short contexts, where rows count, and win at long ones,
# where a round takes what its caches take.
BY_CONTEXT = {
    batch: CostTable(
        [batch],
        {"off": [1e-3], "4_1_5": [2.6e-3]},
        slope=3e-3 / (batch * (4096 - 256)),
        short=256,
    )
    for batch in (1, 6)
}


@pytest.mark.parametrize("batch", [1, 6])
def test_the_strategy_changes_as_samples_grow_and_back_as_they_are_short_again(batch):
    """A rollout after the other, each of which begins with short samples."""
    costs, rates = CostTable.from_state(BY_CONTEXT[batch].state()), (0.5,) * 7
    world = World(costs, rates, seed=batch, length=256.0)
    controller = Goodput(("off", "4_1_5"), costs)
    for rollout in range(3):
        world.length, runs = 256.0, []
        while world.length < 4096:
            runs.append((world.length, drive(controller, world, batch, 64)))
        early = [run for length, run in runs if length < 600]
        late = [run for length, run in runs if length > 3000]
        assert share(early, "off") > (0.7 if rollout else 0.5) and share(late, "4_1_5") > 0.9
        least = sum(sum(run.least) for _, run in runs)
        assert least > 0.95 * sum(sum(run.seconds) for _, run in runs)
    now = controller.costs
    for name, length in itertools.product(("off", "4_1_5"), (256, 4096)):
        expected = BY_CONTEXT[batch].seconds(name, batch, context=batch * length)
        assert now.seconds(name, batch, context=batch * length) == pytest.approx(expected, rel=0.1)


# --- probes --------------------------------------------------------------------------------------


def test_probes_lose_no_more_than_their_share_of_the_time():
    world = World(cost_table("cpu"), BAD, outliers=0.0)
    controller = Goodput(ARMS, cost_table("cpu"), GoodputConfig(probe_fraction=0.005))
    drive(controller, world, 4, 1000)
    seconds, regret, probes = controller.seconds, controller.regret_seconds, controller.probes
    drive(controller, world, 4, 8000)
    assert controller.probes > probes
    lost = (controller.regret_seconds - regret) / (controller.seconds - seconds)
    assert 0 < lost < 0.008


def test_nothing_is_probed_that_would_lose_with_perfect_drafts():
    costs = CostTable([64], {"off": [1.0], "4_1_5": [8.0]})
    controller = Goodput(["off", "4_1_5"], costs)
    assert set(drive(controller, World(costs), 64, 2000).names) == {"off"}
    assert controller.probes == 0


def test_a_probe_whose_chunks_are_never_observed_is_given_up():
    controller = Goodput(("off", "4_1_5"), CostTable([4], {"off": [1.0], "4_1_5": [4.5]}))
    chosen = [controller.select(4) for _ in range(20)]
    assert chosen[:5] == ["4_1_5", "4_1_5", "off", "off", "4_1_5"]


# --- what is learned of drafts -------------------------------------------------------------------


def test_a_sudden_change_overrules_what_was_counted():
    model = Acceptance(parse_arms(["4_1_5"]), half_life=1e6, prior=0.7)
    for _ in range(100):
        model.learn("4_1_5", [0] * 5 + [16], 16)
    model.learn("4_1_5", [0, 16], 16)
    assert model.expected_tokens("4_1_5") < 1.6


# --- what is observed ----------------------------------------------------------------------------


def test_drafts_behind_the_end_of_a_sample_count_for_nothing():
    """Deep drafts are all accepted, and samples are three tokens long: a shallow chain wins."""
    costs = CostTable([4], {"2_1_3": [1.0], "7_1_8": [1.5]})
    for length, best in ((None, "7_1_8"), (3, "2_1_3")):
        controller, chosen = Goodput(("2_1_3", "7_1_8"), costs), []
        for _ in range(60):
            chosen.append(name := controller.select(4))
            drafts = controller.strategies[name].steps
            emitted = drafts + 1 if length is None else min(drafts + 1, length)
            controller.observe(
                chunk_of(
                    4,
                    name,
                    np.full((2, 4), drafts),
                    2 * costs.seconds(name, 4),
                    tokens=8 * emitted,
                    ended=0 if length is None else 8,
                )
            )
        assert chosen[20:].count(best) > 30
        assert controller.scores(4)["2_1_3"] < 3.0


def test_gains_are_told_only_where_costs_and_acceptance_were_measured():
    controller = Goodput(["off", "4_1_5"], CostTable((1, 8), {"off": (1.0, 1.0)}))
    assert controller.gains(8) == {"off": 1.0}, "what 4_1_5 costs is a guess"
    all_accepted = [[4] * 8] * 8
    controller.observe(observed(8, "4_1_5", all_accepted, seconds=8 * 2.0))
    assert 2.2 < controller.gains(8)["4_1_5"] <= 2.5, "5 tokens in twice the time"
    controller.weights_changed()
    assert controller.gains(8) == {"off": 1.0}, "of the new weights nothing was seen"
    gated = make_controller(ControlConfig(strategies=("off", "4_1_5"), bs_threshold=4))
    assert gated.gains(1) == {}, "what plain decoding costs is a guess"
    gated.calibrated(CostTable((1, 8), {"off": (1.0, 1.0), "4_1_5": (2.0, 2.0)}))
    gated.observe(observed(1, "4_1_5", [[4]] * 64, seconds=64 * 2.0))
    assert gated.gains(1)["4_1_5"] == pytest.approx(2.4, abs=0.1)
    assert make_controller("bandit").gains(1) == {}


# --- settings, metrics, state --------------------------------------------------------------------
