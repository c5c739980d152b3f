"""Goodput control where costs change while it runs: of one strategy, of all, or of none."""

import math

import numpy as np
import pytest
from control_sim import ARMS, BAD, GOOD, World, cost_table, drive

from specjax.control import CostTable, Goodput

PAIR = ("off", "4_1_5")  # well apart: nothing but a try tells that `off` has become the better one
NOISES = (0.0, 0.03, 0.1)
VERY_NOISY = 0.3
SEEDS = (0, 1, 2)


def pair_costs() -> CostTable:
    return CostTable([1], {"off": [1e-3], "4_1_5": [1.4e-3]})


def growth(factor: float, over: int, only: str | None = None, begin: int = 4000):
    """Costs that grow by a factor, at once or linearly."""

    def slower(name: str, at: int) -> float:
        if only not in (None, name) or at < begin:
            return 1.0
        return 1 + (factor - 1) * (min(1.0, (at - begin) / over) if over else 1.0)

    return slower


def both(costs, arms, batch, noise, slower, rates=GOOD, seed=0):
    """A world and its controller, after 4,000 rounds in which nothing changed."""
    world = World(costs, rates, noise=noise, slower=slower, seed=seed)
    controller = Goodput(arms, costs)
    drive(controller, world, batch, 4000)
    return world, controller


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(
    ("factor", "over"),
    [
        (3.0, 0),
        (4.0, 10_000),
        pytest.param(2.5, 4000, marks=pytest.mark.slow),
        pytest.param(4.0, 6000, marks=pytest.mark.slow),
    ],
)
def test_a_running_strategy_that_alone_grows_dearer_is_left(factor, over, noise):
    world, controller = both(pair_costs(), PAIR, 1, noise, growth(factor, over, "4_1_5"))
    assert controller.current == "4_1_5"
    assert drive(controller, world, 1, 10_000).share >= 0.93
    believed = controller.costs.seconds("off", 1)
    assert believed == pytest.approx(1e-3, rel=0.1 + noise), "it is known by having been seen"


@pytest.mark.parametrize(("table", "batch"), [("h200_8b", 4), ("cpu", 1)])
def test_it_is_left_for_the_best_of_several(table, batch):
    world, controller = both(cost_table(table), ARMS, batch, 0.03, None)
    world.slower = growth(3.0, 0, controller.current)
    assert drive(controller, world, batch, 10_000).share >= 0.95


def test_without_doubt_in_what_does_not_run_nobody_would_know(monkeypatch):
    """The counter-test: what ran is presumed to have grown dearer together with all others."""
    monkeypatch.setattr(CostTable, "slack", lambda *_: 0.1)
    monkeypatch.setattr(Goodput, "_is_overdue", lambda *_: False)
    world, controller = both(pair_costs(), PAIR, 1, 0.03, growth(3.0, 0, "4_1_5", begin=100))
    assert controller.current == "4_1_5" and controller.tries.count == 0
    assert controller.costs.seconds("off", 1) > 2e-3


@pytest.mark.parametrize(("noise", "least"), [(0.0, 0.98), (0.03, 0.98), (0.1, 0.96)])
@pytest.mark.parametrize(
    "factor",
    [pytest.param(1.0, marks=pytest.mark.slow), pytest.param(2.0, marks=pytest.mark.slow), 4.0],
)
def test_keeping_watch_costs_little_where_all_grow_alike_or_nothing_changes(factor, noise, least):
    for costs, arms in ((pair_costs(), PAIR), (cost_table("h200_8b"), ARMS)):
        for rates in (GOOD, BAD):
            shares = []
            for seed in SEEDS:  # near a tie one of them may be unlucky
                slower = growth(factor, 3000)
                world, controller = both(costs, arms, 1, noise, slower, rates, seed)
                shares.append(drive(controller, world, 1, 4000).share)
            assert sum(shares) / len(shares) >= least, (arms, rates, shares)


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "only"), [(1.0, None), (3.0, None), (3.0, "4_1_5")])
def test_where_times_are_very_noisy_it_still_does_so_on_average(factor, only):
    shares = []
    for seed in range(12 if only else 3):  # where none of them has to be left, all do alike
        slower = growth(factor, 0, only)
        world, controller = both(pair_costs(), PAIR, 1, VERY_NOISY, slower, seed=seed)
        shares.append(drive(controller, world, 1, 8000).share)
    assert sum(shares) / len(shares) >= 0.93


@pytest.mark.parametrize(("noise", "least"), [(0.1, 0.95), (VERY_NOISY, 0.9)])
def test_a_useless_head_costs_little_where_times_are_noisy(noise, least):
    shares = []
    for batch in (1, 8, 64):
        world = World(cost_table("h200_8b"), (0.0,) * 7, noise=noise, seed=batch)
        shares.append(drive(Goodput(ARMS, world.costs), world, batch, 5000).share)
    assert sum(shares) / len(shares) >= least


@pytest.mark.parametrize("noise", [0.1, VERY_NOISY])
def test_a_swapped_head_is_followed_within_50_rounds_where_times_are_noisy(noise):
    world = World(cost_table("h200_8b"), noise=noise)
    controller = Goodput(ARMS, world.costs)
    shares = []
    for rates in (GOOD, BAD) * 3:
        world.rates = rates
        controller.weights_changed()
        run = drive(controller, world, 4, 500)
        shares.append(run.rate(50) / world.oracle(ARMS, 4))
    assert sum(shares) / len(shares) >= 0.95


def test_plain_decoding_is_measured_now_and_then_however_dear_it_seems():
    """It was calibrated, and tried once, while the machine did something else."""
    costs = CostTable([1], {"off": [1e-3], "4_1_5": [3e-3]})
    world = World(
        costs,
        (0.5,) * 7,
        slower=lambda name, at: 6.0 if (name, at < 3000) == ("off", True) else 1.0,
    )
    controller = Goodput(PAIR, CostTable([1], {"off": [6e-3], "4_1_5": [3e-3]}))
    early = drive(controller, world, 1, 3000)
    assert "off" in early.names and early.names[-1] == "4_1_5"
    assert drive(controller, world, 1, 10_000).names[-1] == "off"


def wrongly_calibrated(seed: int, own: float) -> tuple[CostTable, CostTable]:
    """True costs, and what was measured on a machine that was twice as slow, more or less."""
    true = dict(zip(ARMS, (0.43, 0.72, 0.82, 1.3, 1.45), strict=True))
    off_by = 2 * np.random.default_rng(seed).lognormal(0, own, len(ARMS))
    found = {name: [s * f] for (name, s), f in zip(true.items(), off_by, strict=True)}
    return CostTable([1], {name: [s] for name, s in true.items()}), CostTable([1], found)


@pytest.mark.parametrize(("rates", "own", "least"), [(BAD, 0.3, 0.96), (GOOD, 0.15, 0.97)])
def test_a_wrong_calibration_does_not_decide_for_long(rates, own, least):
    shares = []
    for seed in range(12):
        true, calibrated = wrongly_calibrated(seed, own)
        world = World(true, rates, noise=0.08, seed=seed, catch_up=4.0, cold=1.0)
        run = drive(Goodput(ARMS, calibrated), world, 1, 8000, chunk_tokens=64)
        shares.append(run.share)
    assert sum(shares) / len(shares) >= least, shares


def test_what_did_not_run_is_as_wrongly_calibrated_as_what_ran():
    """Else what ran first would seem the cheapest, and stay."""
    table = CostTable([1], {"off": [2.0], "2_1_3": [3.0], "4_1_5": [5.0], "7_1_8": [8.0]})
    assert table.slack("off", 1, "2_1_3") > 0.2
    table.observe("4_1_5", 1, 2.5, 16)
    assert table.seconds("off", 1) == pytest.approx(1.0, rel=0.3), "most of it is believed at once"
    seen(table, "4_1_5", 2.5, 20)
    for name, seconds in (("off", 1.0), ("2_1_3", 1.5), ("7_1_8", 4.0)):
        assert table.seconds(name, 1) == pytest.approx(seconds, rel=0.08)
    seen(table, "2_1_3", 1.5, 20)
    seen(table, "off", 0.6, 20)
    assert table.seconds("off", 1) == pytest.approx(0.6, rel=0.03)
    assert table.seconds("7_1_8", 1) == pytest.approx(4.0, rel=0.2), (
        "as those that ran, more or less"
    )
    assert CostTable.from_state(table.state()).seconds("7_1_8", 1) == table.seconds("7_1_8", 1)


class Tail(World):
    """Rollouts whose batch shrinks while the contexts of those that still run grow."""

    PLAN = ((64, 320), (32, 192), (16, 192), (8, 288), (4, 384), (2, 480), (1, 800))  # rounds

    def __init__(self, *args, per_token: float, **kwargs):
        super().__init__(*args, **kwargs)
        self.per_token, self.context = per_token, 0

    def seconds(self, name, batch):
        """What attention reads is added, to a plain round much as to one that verifies."""
        drafted = 0 if name == "off" else int(name.split("_")[0])
        read = self.per_token * batch * self.context * (1 + 0.02 * drafted)
        return super().seconds(name, batch) + read

    def roll_out(self, controller) -> float:
        """Share of the best strategy's rate at each moment."""
        self.context, runs = 0, []
        for batch, rounds in self.PLAN:
            for _ in range(rounds // 16):
                runs.append(drive(controller, self, batch, 16, lag=0))
                self.context += 48
        return sum(sum(r.least) for r in runs) / sum(sum(r.seconds) for r in runs)


@pytest.mark.parametrize(("read", "least"), [(0.5, 0.97), (2.5, 0.93)])
def test_contexts_that_grow_while_the_batch_shrinks_lose_little(read, least):
    """`read`: what 1,000 tokens of context add to a plain round of 64, in units of it."""
    costs = cost_table("h200_8b")
    per_token = read * costs.seconds("off", 64) / (64 * 1000)
    world = Tail(costs, (0.75, 0.7, 0.65, 0.6, 0.6, 0.6, 0.6), per_token=per_token)
    controller = Goodput(ARMS, costs)
    assert min(world.roll_out(controller) for _ in range(3)) >= least


def seen(table: CostTable, name: str, seconds: float, times: int = 1, batch: int = 1) -> None:
    for _ in range(times):
        table.observe(name, batch, seconds, 16)


def table_in_use() -> CostTable:
    """Three strategies, each seen to cost what was calibrated; `4_1_5` runs."""
    table = CostTable([1], {"off": [1.0], "2_1_3": [1.2], "4_1_5": [1.5]})
    for name, seconds in (("off", 1.0), ("2_1_3", 1.2), ("4_1_5", 1.5)):
        seen(table, name, seconds, 200)
    return table


def mean_error(presumed: float) -> tuple[float, float]:
    """By what share costs are off, and what is taken to lie beside rounds; 2.0 truly does.

    Plain decoding runs in long chunks, and what is tried in short ones.
    """
    rounds_take, random, errors = {"off": 1.0, "2_1_3": 1.8}, np.random.default_rng(0), []
    table = CostTable([1], {name: [s] for name, s in rounds_take.items()}, [presumed])
    chunks = [("off", 64), ("off", 64), ("2_1_3", 4), ("2_1_3", 4), ("2_1_3", 20)]
    for lap in range(60):
        for name, count in chunks:
            seconds = (count * rounds_take[name] + 2.0) * random.lognormal(0, 0.03)
            table.observe(name, 1, seconds / count, count)
        for name, seconds in rounds_take.items() if lap >= 30 else ():
            true = seconds + 2.0 / 20
            errors.append(abs(table.seconds(name, 1, rounds=20) / true - 1))
    assert CostTable.from_state(table.state()).state() == table.state()
    return sum(errors) / len(errors), table.beside(1)


@pytest.mark.parametrize("presumed", [1.0, 2.0, 6.0])
def test_what_lies_beside_the_rounds_is_told_from_them_by_chunks_of_different_length(presumed):
    error, beside = mean_error(presumed)
    assert error < 0.05
    assert abs(beside - 2.0) <= max(0.9 * abs(presumed - 2.0), 0.2), "it comes nearer the truth"


def test_costs_are_wrong_where_nothing_is_thought_to_lie_beside_the_rounds():
    assert mean_error(0.0)[0] > 0.07


@pytest.mark.parametrize("presumed", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("rates", [BAD, GOOD, (0.6, 0.5, 0.4, 0.4, 0.4, 0.4, 0.4)])
def test_choices_are_good_whatever_is_thought_to_lie_beside_the_rounds(presumed, rates):
    """In units of a plain round; it truly takes one, and chunks are as long as 64 of those."""
    true = {arm: [1.0 + 0.45 * i] for i, arm in enumerate(ARMS)}
    world = World(CostTable([1], true, [1.0]), rates, noise=0.03)
    controller = Goodput(ARMS, CostTable([1], true, [presumed]))
    run = drive(controller, world, 1, 6000, chunk_tokens=64)
    full = {arm: 64 // (1 + world.steps(arm)) for arm in ARMS}
    best = max(world.tokens(a) / (world.seconds(a, 1) + 1.0 / full[a]) for a in ARMS)
    assert run.rate(1000) >= 0.96 * best


@pytest.mark.parametrize("beside", [[1.0], [0.0, -1.0], [0.0, math.nan], [0.0, math.inf]])
def test_what_cannot_lie_beside_rounds_is_refused(beside):
    with pytest.raises(ValueError, match="beside must have seconds of at least 0 for each of 2"):
        CostTable([1, 2], beside=beside)


def test_the_others_may_cost_little_more_than_before_one_grew_dearer():
    table = table_in_use()
    seen(table, "4_1_5", 4.5, 60)
    assert table.seconds("4_1_5", 1) == pytest.approx(4.5, rel=0.02)
    assert table.seconds("off", 1) > 2.0, "all are presumed to have grown"
    for name, before in (("off", 1.0), ("2_1_3", 1.2)):
        assert table.seconds(name, 1) * (1 - table.slack(name, 1)) <= 1.25 * before


def test_one_that_was_not_slowed_down_acquits_the_others_too():
    table = table_in_use()
    seen(table, "4_1_5", 4.5, 60)
    seen(table, "off", 1.0)
    assert table.seconds("off", 1) == pytest.approx(1.0, rel=0.05)
    assert table.seconds("2_1_3", 1) == pytest.approx(1.2, rel=0.1)
    assert table.seconds("4_1_5", 1) == pytest.approx(4.5, rel=0.05), "it was seen to cost that"


@pytest.mark.parametrize("rounds", [4, 16])
def test_a_short_chunk_acquits_too_though_little_of_it_are_its_rounds(rounds):
    table = CostTable([1], {"off": [1.0], "2_1_3": [1.8]}, beside=[4.0])
    for name, seconds in (("off", 1.0), ("2_1_3", 1.8)):
        for _ in range(100):
            table.observe(name, 1, seconds + 4.0 / 64, 64)
    for seconds in [1.0] * 10 + [2.0] * 60:
        table.observe("off", 1, seconds + 4.0 / 64, 64)
    assert table.seconds("2_1_3", 1) > 2.7, "both are presumed to have grown"
    table.observe("2_1_3", 1, 1.8 + 4.0 / rounds, rounds)
    assert table.seconds("2_1_3", 1) == pytest.approx(1.8, rel=0.2)
    assert table.seconds("off", 1) == pytest.approx(2.0, rel=0.1), "it was seen to cost that"


@pytest.mark.parametrize("rounds", [1, 2, 4, 16, 64])
def test_a_residual_is_followed_as_far_whatever_the_chunk_consists_of(rounds):
    """By what lies beside the rounds, by these, or by both."""
    table, alone = (CostTable([1], {"off": [1.0]}, beside=[b]) for b in (4.0, 0.0))
    for each in (table, alone):
        before = each.seconds("off", 1, rounds)
        for _ in range(2):
            each.observe("off", 1, 1.1 * before, rounds)
    followed = [t.seconds("off", 1, rounds) for t in (table, alone)]
    assert followed[0] / (1.0 + 4.0 / rounds) == pytest.approx(followed[1], rel=0.02)


def test_one_that_was_slowed_down_as_well_confirms_that_all_were():
    table = table_in_use()
    seen(table, "4_1_5", 4.5, 100)
    before = table.seconds("2_1_3", 1)
    assert table.slack("2_1_3", 1) > 0.5
    seen(table, "off", table.seconds("off", 1))
    assert table.seconds("2_1_3", 1) == pytest.approx(before, rel=1e-6)
    assert table.slack("2_1_3", 1) < 0.2 and table.slack("off", 1, "4_1_5") < 0.1


def test_one_that_grew_dearer_unseen_says_little_of_the_others():
    table = table_in_use()
    seen(table, "off", 3.0)
    assert table.seconds("off", 1) > 1.02
    assert table.seconds("4_1_5", 1) == pytest.approx(1.5, rel=0.1)


def test_fresh_costs_replace_learned_ones_and_acceptance_is_kept():
    world, controller = both(pair_costs(), PAIR, 1, 0.03, growth(3.0, 0, begin=0))
    accepted = controller.acceptance.state()
    assert controller.costs.seconds("off", 1) > 1.5e-3
    fresh = CostTable([1, 2], {"off": [1e-3, 1e-3], "4_1_5": [9e-3, 9e-3]})
    controller.calibrated(fresh)
    assert controller.acceptance.state() == accepted
    assert controller.costs.state() == fresh.state() and controller.costs is not fresh
    assert controller.select(2) == "off"
    assert all(math.isfinite(score) for score in controller.scores(2).values())


def test_a_noisy_try_says_little_of_a_cost_that_is_known_and_a_lasting_change_much():
    table = CostTable([1], {"off": [1.0], "1_1_2": [2.0]})
    noise = np.random.default_rng(0)
    for at in range(60):
        name, seconds = (("off", 1.0), ("1_1_2", 2.0))[at // 3 % 2]
        table.observe(name, 1, seconds * float(np.exp(noise.normal(0, 0.15))), 16)
    known = table.seconds("1_1_2", 1) / table.seconds("off", 1)
    assert known == pytest.approx(2.0, rel=0.1)
    table.observe("off", 1, table.seconds("off", 1), 16)
    table.observe("1_1_2", 1, 1.25 * table.seconds("1_1_2", 1), 16)
    after = table.seconds("1_1_2", 1) / table.seconds("off", 1)
    assert after == pytest.approx(known, rel=0.03)
    for _ in range(8):
        table.observe("off", 1, 1.0, 16)
        table.observe("1_1_2", 1, 5.0, 16)
    assert table.seconds("1_1_2", 1) / table.seconds("off", 1) > 1.5 * known
