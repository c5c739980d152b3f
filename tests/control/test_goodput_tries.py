"""Tries of the goodput controller: what they cost, what they teach, and when they are repeated."""

import dataclasses

import numpy as np
import pytest
from control_sim import ARMS, BAD, GOOD, World, cost_table, drive

from specjax.control import OFF, CostTable, Goodput, GoodputConfig, Observation, beginnings
from specjax.control.tries import WAITING_ROUNDS
from specjax.drafts import ABSORBED
from specjax.drafts.mtp import WINDOW

GOOD_WHERE_SLIM = (0.85, 0.91, 0.92, 0.93, 0.9, 0.9, 0.9)


def slim_margins() -> CostTable:
    """Of a machine on which all that drafts lies within 5%, and plain decoding 11% below."""
    seconds = (1.12e-3, 1.86e-3, 2.72e-3, 4.06e-3, 5.89e-3)
    rows = {arm: [s] * 3 for arm, s in zip(ARMS, seconds, strict=True)}
    return CostTable((1, 2, 4), rows, [5e-4] * 3)


def asked(controller: Goodput, batch: int = 4) -> tuple[str, int | None]:
    return controller.select(batch), controller.rounds_hint


def finish(controller: Goodput, world: World, batch: int = 4) -> str:
    """Both chunks of the next try come back; its strategy."""
    for _ in range(2):
        while (wanted := asked(controller, batch))[1] is None:
            controller.observe(world.chunk(wanted[0], batch, 8))
        controller.observe(world.chunk(*wanted[:1], batch, wanted[1], is_try=True))
    return wanted[0]


@pytest.mark.parametrize(
    ("catch_up", "swap_every"),
    [
        (12.0, 200),
        (4.0, None),
        pytest.param(4.0, 200, marks=pytest.mark.slow),
        pytest.param(12.0, None, marks=pytest.mark.slow),
    ],
)
def test_catching_up_is_not_taken_for_a_cost_of_what_comes_after(catch_up, swap_every):
    for batch in (1, 8, 64):
        world = World(cost_table("cpu"), (0.0,) * 7, seed=batch, catch_up=catch_up)
        controller = Goodput(ARMS, cost_table("cpu"))
        drive(controller, world, batch, 4000, swap_every=swap_every)
        at = world.costs.index(batch)
        truth = catch_up * world.seconds("off", batch)
        assert controller.catch_up_seconds(batch, 1000) == pytest.approx(truth, rel=0.5), at
        for arm in ARMS:
            seconds = controller.costs.seconds(arm, batch)
            assert seconds == pytest.approx(world.seconds(arm, batch), rel=0.15), (arm, batch)
        world.rates = GOOD
        run = drive(controller, world, batch, 6000, swap_every=swap_every)
        assert run.rate(4500) >= 0.95 * world.oracle(ARMS, batch), batch


@pytest.mark.parametrize("batch", [4, 16])
def test_tries_are_paid_for_where_every_change_of_the_strategy_costs_something(batch):
    """Nor is it taken for a cost of the rounds that follow."""
    world = World(cost_table("cpu"), seed=batch, cold=1.0)
    run = drive(Goodput(ARMS, cost_table("cpu")), world, batch, 6000, chunk_tokens=32)
    assert run.rate(400) >= 0.97 * world.oracle(ARMS, batch)


def test_one_sample_alone_is_no_reason_to_give_up_a_good_head():
    """Four rounds tell little of drafts that gain an eighth, and one or two rejections in them are
    no sign of another head."""
    seconds = (1.3e-3, 2.9e-3, 4e-3, 4.8e-3, 6e-3)
    costs = CostTable([1], {arm: [s] for arm, s in zip(ARMS, seconds, strict=True)})
    shares = []
    for seed in range(16):  # one that begins with bad luck loses a sixth
        world = World(costs, (0.86, 0.88) + (0.9,) * 5, seed=seed, catch_up=8.0, cold=0.5)
        controller = Goodput(ARMS, costs)
        drive(controller, world, 1, 1500, chunk_tokens=32)
        run = drive(controller, world, 1, 1500, chunk_tokens=32)
        shares.append(run.rate() / world.oracle(ARMS, 1))
    assert sum(shares) / len(shares) >= 0.94, shares


def test_a_chunk_that_was_under_way_is_not_the_try_of_its_strategy():
    """Two chunks are in flight: one may run what is tried after it, chosen for other reasons."""
    world = World(cost_table("cpu"), BAD)
    controller = Goodput(ARMS, cost_table("cpu"))
    drive(controller, world, 4, 600)
    while (name := controller.select(4)) == "off":
        controller.observe(world.chunk("off", 4, 8))
    assert controller.rounds_hint is not None
    tried = controller.state()["tries"]["running"]
    controller.observe(world.chunk(name, 4, 4))
    assert controller.state()["tries"]["running"] == tried, "the try has not come back yet"
    controller.observe(world.chunk(name, 4, 1, is_try=True))
    assert controller.state()["tries"]["running"] != tried


def test_a_try_that_new_weights_cut_short_tells_nothing_of_them():
    world = World(cost_table("cpu"), BAD, catch_up=4.0)
    controller = Goodput(ARMS, cost_table("cpu"))
    drive(controller, world, 4, 600)
    while controller.select(4) == "off":
        controller.observe(world.chunk("off", 4, 8))
    controller.observe(world.chunk(controller.current, 4, 1))
    controller.weights_changed()
    assert controller.state()["tries"]["running"] is None


def test_tries_lose_no_more_than_their_share_of_the_time():
    world = World(cost_table("cpu"), BAD, outliers=0.0)
    controller = Goodput(ARMS, cost_table("cpu"), GoodputConfig(probe_fraction=0.005))
    drive(controller, world, 4, 1000)
    before = (controller.seconds, controller.regret_seconds, controller.tries.count)
    drive(controller, world, 4, 8000)
    seconds, regret = controller.seconds - before[0], controller.regret_seconds - before[1]
    assert controller.tries.count > before[2]
    assert 0 < regret / seconds < 0.006


def test_that_chunks_of_tries_are_short_is_counted_and_paid_for():
    """Where much lies beside rounds: then a try loses more by its two chunks than by its drafts."""
    plain = cost_table("cpu").seconds("off", 4)
    costs = CostTable([4], {arm: [cost_table("cpu").seconds(arm, 4)] for arm in ARMS}, [8 * plain])
    world = World(costs, BAD, noise=0.0, outliers=0.0)
    controller = Goodput(ARMS, costs, GoodputConfig(probe_fraction=0.02))
    drive(controller, world, 4, 2000)
    regret, seconds, count = controller.regret_seconds, controller.seconds, controller.tries.count
    run = drive(controller, world, 4, 8000)
    lost = sum(run.seconds) - sum(run.tokens) / 4 * (plain + 8 * plain / 16)
    assert controller.tries.count > count + 4
    assert controller.regret_seconds - regret == pytest.approx(lost, rel=0.3)
    assert lost < 0.023 * (controller.seconds - seconds)


def test_tries_of_which_no_seconds_are_known_are_paid_for_too():
    """A machine that does much else, so that only long chunks can be timed."""
    world = World(cost_table("cpu"), GOOD, noise=0.0, outliers=0.0)
    controller = Goodput(ARMS, cost_table("cpu"))
    tried = 0
    for _ in range(1000):
        name, rounds = asked(controller)
        seen = world.chunk(name, 4, rounds or 16, is_try=rounds is not None)
        if rounds is not None:
            tried += rounds
            seen = dataclasses.replace(seen, seconds=float("nan"))
        controller.observe(seen)
    assert 0 < tried < 0.1 * world.at, "`off` is wanted all the time, for it was never timed"


def test_new_weights_are_tried_by_what_drafts():
    """Plain decoding, which is to be measured once more by then, tells nothing of them."""
    costs = CostTable([4], {"off": [1.0], "4_1_5": [1.1]})
    world, controller = World(costs, noise=0.0, outliers=0.0), Goodput(["off", "4_1_5"], costs)
    controller.acceptance.learn("4_1_5", [0, 0, 0, 0, 0, 64], 16)
    controller.weights_changed()
    drive(controller, world, 4, 400)
    assert controller.current == "4_1_5"
    name, rounds = finish(controller, world), asked(controller)[1]
    assert name == "off" and rounds is None, "and is paid for, so it comes later"
    assert world.at > 400


def test_no_try_is_made_where_perfect_drafts_would_lose():
    costs = CostTable([64], {"off": [1.0], "4_1_5": [8.0]})
    world, controller = World(costs), Goodput(["off", "4_1_5"], costs)
    assert set(drive(controller, world, 64, 2000).names) == {"off"}
    assert controller.tries.count == 0


def test_without_probes_it_stays_off_for_ever():
    """The counter-test: it is the tries that find out that the head became good."""
    world = World(cost_table("cpu"), BAD)
    controller = Goodput(ARMS, cost_table("cpu"), GoodputConfig(probe_fraction=0.0))
    drive(controller, world, 4, 600)
    world.rates = GOOD
    assert set(drive(controller, world, 4, 1500).names) == {"off"}


def test_a_chunk_of_a_try_in_which_nothing_ran_is_asked_for_again():
    """All its slots had ended: it told nothing, and new weights are to be judged all the same."""
    world, controller = World(cost_table("cpu")), Goodput(ARMS, cost_table("cpu"))
    name, rounds = asked(controller)
    assert rounds == 1
    nothing = np.full((1, 4), -1)
    controller.observe(Observation(4, name, nothing, 0.001, rounds=0, is_try=True))
    assert asked(controller) == (name, 1), "the first chunk"
    controller.observe(world.chunk(name, 4, 1, is_try=True))
    second = asked(controller)
    assert second[0] == name and second[1] > 1
    controller.observe(Observation(4, name, nothing, 0.001, rounds=0, is_try=True))
    assert asked(controller) == second


def test_a_try_for_new_weights_that_never_comes_back_is_made_again():
    controller, made = Goodput(ARMS, cost_table("cpu")), []
    for _ in range(80):
        made.append(asked(controller))
    tries = [name for name, rounds in made if rounds in (1, 4)]
    assert len(tries) == 2 * 3 and len(set(tries)) == 1, "twice again, then it is given up"


def test_a_try_that_comes_close_is_repeated_with_the_same_strategy():
    """Drafts that are worth a little less than nothing, as far as a few rounds can tell."""
    costs = CostTable([4], {"off": [1.0], "1_1_2": [1.7], "4_1_5": [2.5]})
    world = World(costs, (0.5, 0.5, 0.5, 0.5), noise=0.0, outliers=0.0)
    controller = Goodput(("off", "1_1_2", "4_1_5"), costs)
    tried = [finish(controller, world) for _ in range(4)]
    assert len(set(tried)) == 1, tried
    assert controller.tries.count == 4 and world.at <= 64, "no account is asked"


def test_a_hiccup_in_a_try_makes_nothing_dear():
    """Ten times the seconds in its second chunk: what its first round took is believed."""
    world = World(cost_table("cpu"), noise=0.0, outliers=0.0)
    controller = Goodput(ARMS, cost_table("cpu"))
    name, rounds = asked(controller)
    controller.observe(world.chunk(name, 4, rounds, is_try=True))
    name, rounds = asked(controller)
    seen = world.chunk(name, 4, rounds, is_try=True)
    late = Observation(4, name, seen.accepted, 10 * seen.seconds, is_try=True)
    controller.observe(late)
    assert controller.costs.seconds(name, 4) < 1.1 * world.seconds(name, 4)


@pytest.mark.parametrize("batch", [1, 4])
def test_new_weights_again_and_again_cost_a_good_head_little(batch):
    """Each asks for a try of the deepest drafts, and none makes the controller leave good ones."""
    for seed in range(2):
        world = World(cost_table("cpu"), seed=seed, catch_up=8.0, cold=0.5)
        controller = Goodput(ARMS, cost_table("cpu"))
        run = drive(controller, world, batch, 4000, chunk_tokens=32, swap_every=128)
        assert run.rate() >= 0.965 * world.oracle(ARMS, batch), seed


def test_it_is_curious_until_new_weights_were_tried_and_while_a_try_is_under_way():
    """Chunks are short then, see `EngineConfig.stretch`: what it learns it learns soon."""
    world, controller = World(cost_table("cpu"), GOOD, seed=0), Goodput(ARMS, cost_table("cpu"))
    assert controller.is_curious
    finish(controller, world)
    assert not controller.is_curious
    drive(controller, world, 4, 200)
    controller.weights_changed()
    assert controller.is_curious
    finish(controller, world)
    assert not controller.is_curious


def test_while_new_weights_are_judged_chunks_are_short_and_no_measure_of_a_full_one():
    """The result of a try arrives a chunk later: a full one would run what the head may beat."""
    costs = slim_margins()
    world, controller = World(costs, BAD, seed=0), Goodput(ARMS, costs)
    drive(controller, world, 4, 400, chunk_tokens=32)
    full = controller._full_rounds(OFF)
    controller.weights_changed()
    chunks = [asked(controller) for _ in range(3)]
    assert [rounds for _, rounds in chunks] == [1, 4, WAITING_ROUNDS]
    assert chunks[2][0] == OFF
    for name, rounds in chunks:
        controller.observe(world.chunk(name, 4, rounds, is_try=True))
    assert controller._full_rounds(OFF) == full


def test_while_a_try_is_paid_for_others_go_on_in_full_chunks():
    world, controller = World(cost_table("cpu"), BAD, seed=0), Goodput(ARMS, cost_table("cpu"))
    drive(controller, world, 4, 4000)
    while (wanted := asked(controller))[1] is None:
        controller.observe(world.chunk(wanted[0], 4, 16))
    assert not controller.tries.running.free
    assert asked(controller)[1] == 4
    assert asked(controller)[1] is None


def test_a_good_head_that_comes_back_is_used_within_50_rounds():
    """Learning included; with full chunks while it is judged no run of these is that quick."""
    costs, within = slim_margins(), 0
    for seed in range(20):
        world = World(costs, GOOD_WHERE_SLIM, seed=seed)
        controller = Goodput(ARMS, costs)
        for rates in (GOOD_WHERE_SLIM, BAD):
            world.rates = rates
            controller.weights_changed()
            drive(controller, world, 4, 400, chunk_tokens=32)
        world.rates = GOOD_WHERE_SLIM
        controller.weights_changed()
        run = drive(controller, world, 4, 50, chunk_tokens=32)
        within += run.rate() >= 0.94 * world.oracle(ARMS, 4)
    assert within >= 12


def test_a_bad_head_is_given_up_soon_where_a_shallow_chain_loses_little():
    """In a batch of one: a few rejections decide it, and further tries would only lose time."""
    seconds = (0.6e-3, 0.95e-3, 1.1e-3, 1.55e-3, 2.2e-3)
    costs = CostTable([1], {arm: [s] for arm, s in zip(ARMS, seconds, strict=True)})
    tries = []
    for seed in range(20):
        world = World(costs, GOOD, noise=0.15, seed=seed, catch_up=4.0, cold=0.5)
        controller = Goodput(ARMS, costs)
        drive(controller, world, 1, 400, chunk_tokens=32)
        world.rates, before = (0.03,) * 7, controller.tries.count
        controller.weights_changed()
        drive(controller, world, 1, 120, chunk_tokens=32)
        tries.append(controller.tries.count - before)
    assert np.mean(tries) <= 3.8, tries


def test_catching_up_is_modelled_by_what_sources_read_and_remember():
    """Controllers import no JAX, so they have copies of both."""
    assert (beginnings._AT_ONCE, beginnings._CATCH_UP_ROWS) == (ABSORBED, WINDOW)
