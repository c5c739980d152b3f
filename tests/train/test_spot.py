"""Rollouts on several replicas, the head trained in their gaps: what is learned stays the same."""

import copy
import types

import jax
import numpy as np
import pytest
import tiny_run
from hypothesis import given
from hypothesis import strategies as st

from specjax.checkpoint.store import Checkpointer
from specjax.command_line import ConfigError, parse_config
from specjax.engine import hosts
from specjax.engine.replicas import Replicas
from train import rl
from train.heads import DraftConfig, SpotConfig
from train.log import TRACE_FILE, Trace, read_lines
from train.schema import RLConfig
from train.scoring import RewardsFailedError
from train.spot import HeadDevices, ReplayBuffer, SpotTraining

# Groups are carried, steps end early, the head is trained: all that could depend on the clock does.
CHANGES = {
    "algo.dynamic_sampling": "false",
    "seed": 14,
    "rollout.prompts": 2,
    "rollout.over_sample": 2,
    "rollout.partial": "true",
    "rollout.n": 2,
    "rollout.scan_layers": "true",
    "rollout.chunk_tokens": 4,
    "packing.row_length": 32,  # a sample each, and micro-batches of four rows and of one
    "packing.rows": "null",
    "draft.spot.enabled": "true",
    "draft.spot.updates": 5,
}
GAPS = {"rollout.replicas": 2}
ONE = {"draft.spot.gaps": "false"}
STEPS = 4


def config(model, out, /, **changes) -> RLConfig:
    return parse_config(RLConfig, tiny_run.arguments(model, out, **CHANGES | changes))[0]


def same(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


def learned(metrics: dict) -> dict:
    """What must not depend on where and when things ran."""
    names = ("tokens", "tokens_sha", "carried_sha", "reward", "budget", "groups_carried")
    names = [f"rollout/{name}" for name in names]
    names += ["train/loss", "train/grad_norm", "train/mtp_loss", "train/mtp_update_norm"]
    return {name: metrics.get(name) for name in [*names, "draft/updates", "draft/buffer_tokens"]}


@pytest.fixture(scope="module")
def pair(thin_policy, tmp_path_factory):
    """((trainer, metrics of four steps) with two replicas and gaps, the same with one engine).

    The first one was saved at its second step.
    """
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    out, found = tmp_path_factory.mktemp("spot"), []
    for name, changes in (("gaps", GAPS), ("one", ONE)):
        trainer, steps = rl.Trainer(config(thin_policy, out / name, **changes)), []
        if found:  # the first of the two replicas alone; and nothing is compiled a second time
            first = found[0][0]
            trainer.policy, trainer.spot.places = first.policy, first.spot.places[:1]
            trainer.engine, trainer.engines = first.engines[0], first.engines[:1]
            trainer.sync_weights()
        trainer.warm_up()
        for _ in range(STEPS):
            steps.append(trainer.step())
            if name == "gaps" and trainer.done_steps == 2:
                with Checkpointer(out / "checkpoints") as checkpoints:
                    trainer.save(checkpoints, block=True)
        found.append((trainer, steps))
    return *found, out


@pytest.mark.slow
def test_replicas_and_gaps_change_nothing_that_is_learned(pair):
    (gaps, some), (one, others), _ = pair
    assert [learned(m) for m in some] == [learned(m) for m in others]
    for name, tree in gaps.trees().items():
        assert same(tree, one.trees()[name]), name
    assert len({m["rollout/tokens_sha"] for m in some}) == STEPS
    assert all(m["train/mtp_update_norm"] > 0 for m in some[1:])


def test_the_head_learns_in_gaps_while_other_replicas_run(pair):
    (gaps, some), (_, others), out = pair
    assert sum(m["draft/updates_in_gaps"] for m in some) > 0
    assert [m["draft/updates"] for m in some] == [0, 5, 5, 5]  # nothing to learn from, at first
    assert not any(m["draft/updates_in_gaps"] for m in others)
    assert {some[0][f"control/{of}strategy"] for of in ("", "replica_1/")} == {
        gaps.engine.spec.resolve().name
    }
    assert "control/replica_1/strategy" not in others[0]
    events = read_lines(out / "gaps" / TRACE_FILE)
    assert {e["step"] for e in events} == set(range(1, STEPS + 1))
    pieces = [e for e in events if e["event"] == "draft_gap"]
    assert len(pieces) == sum(m["draft/updates_in_gaps"] for m in some)
    for piece in pieces:
        here = [e for e in events if e["step"] == piece["step"]]
        within = [
            (e["replica"], e["event"]) for e in here if e["start"] <= piece["start"] <= e["end"]
        ]
        assert (piece["replica"], "idle") in within
        assert any(event == "busy" for replica, event in within if replica != piece["replica"])


def test_nothing_is_compiled_in_a_gap(pair):
    (gaps, _), _, _ = pair
    (program,) = {place.draft for place in gaps.spot.places}
    sizes = len(gaps.cfg.row_sizes)
    assert program._update._cache_size() == sizes * len(gaps.engines)


def test_a_resumed_run_has_the_replay_buffer_and_ends_with_the_same_bits(pair):
    (gaps, some), (one, _), out = pair
    with Checkpointer(out / "checkpoints") as checkpoints:
        one.restore(checkpoints, 2)  # another number of replicas, and no gaps
    assert one.done_steps == 2 and {e.step for e in one.spot.buffer.entries} == {1, 2}
    assert [learned(one.step()) for _ in range(2)] == [learned(m) for m in some[2:]]
    for name, tree in gaps.trees().items():
        assert same(tree, one.trees()[name]), name


def test_a_step_whose_rewards_failed_leaves_nothing_and_can_be_made_again(pair, monkeypatch):
    (_, some), (trainer, _), out = pair
    with Checkpointer(out / "checkpoints") as checkpoints:
        trainer.restore(checkpoints, 2)
    before, state = trainer.trees(), trainer.rollouts.state()
    controllers = [copy.deepcopy(e.controller.state()) for e in trainer.engines]
    told = (out / "one" / TRACE_FILE).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(trainer.cfg, "max_failed_rewards", -1.0)
        with pytest.raises(RewardsFailedError, match="of the rewards of step 3 failed"):
            trainer.step()
    assert trainer.spot.in_gaps + trainer.spot.after == 5, "the head was trained meanwhile"
    after = trainer.trees()
    assert before.keys() == after.keys() and all(same(before[n], after[n]) for n in after)
    assert trainer.rollouts.state() == state and trainer.done_steps == 2
    assert [e.controller.state() for e in trainer.engines] == controllers
    assert (out / "one" / TRACE_FILE).read_bytes() == told
    with Checkpointer(out / "saved") as checkpoints:  # as the program does before it ends
        trainer.save(checkpoints, block=True)
        assert learned(trainer.step()) == learned(some[2])
        trainer.restore(checkpoints, 2)
    assert learned(trainer.step()) == learned(some[2])


@pytest.mark.slow  # programs for two more meshes; test_processes has them in a job
def test_a_mesh_and_replicas_of_several_devices_learn_what_one_device_does(
    pair, thin_policy, tmp_path
):
    """Rows are split over two devices, which are in another order there, and weights over two."""
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    _, (_, expected), _ = pair
    more = {"mesh.cp": 2, "mesh.tp": 2, "rollout.tp": 2}
    trainer = rl.Trainer(config(thin_policy, tmp_path, **GAPS, **more))
    assert trainer.notes[-1].endswith("after them, on the 2 devices of a replica")
    trainer.warm_up()
    steps = [trainer.step()]
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        trainer.save(checkpoints, block=True)
        steps += [trainer.step() for _ in range(STEPS - 1)]
        learnt = jax.device_get(trainer.trees())
        trainer.restore(checkpoints, 1)
    assert sum(m["draft/updates_in_gaps"] for m in steps) > 0
    for mine, theirs in zip(steps, expected, strict=True):
        for name, value in learned(theirs).items():
            rounded = name.startswith("train/") and value is not None
            assert mine.get(name) == (pytest.approx(value, rel=2e-3) if rounded else value), name
    trainer.spot.in_rollouts = False
    again = [trainer.step() for _ in range(STEPS - 1)]
    assert [learned(m) for m in again] == [learned(m) for m in steps[1:]]
    assert not any(m["draft/updates_in_gaps"] for m in again)
    for name, tree in trainer.trees().items():
        assert same(tree, learnt[name]), name


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "rollout.replicas=1"),
        ({**GAPS, "draft.mode": "frozen"}, "there is none to train"),
        ({**GAPS, "rollout.strategy": "off"}, "there is none to train"),
        ({**GAPS, "draft.spot.buffer_tokens": 63}, "row_length = 512 positions, got 63"),
        ({**GAPS, "draft.spot.updates": -1}, "draft.spot.updates: expected at least 0"),
        ({"rollout.replicas": 0}, "rollout.replicas: expected at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(capsys, tmp_path, changes, expected):
    with pytest.raises(SystemExit):
        config(tmp_path, tmp_path, **changes)
    assert expected in capsys.readouterr().err


def test_more_replicas_than_devices_are_refused(thin_policy, tmp_path):
    with pytest.raises(ConfigError, match="64 replicas of 1 devices need 64"):
        rl.Trainer(config(thin_policy, tmp_path, **{"rollout.replicas": 64}))


# --- the replay buffer ----------------------------------------------------------------------------


def microbatches(step: int, count: int):
    """(batches, states) of 8 positions each, that can be told apart."""
    names = ("tokens", "positions", "segment_ids", "loss_mask")
    batches = [{n: np.full((2, 4), 100 * step + i) for n in names} for i in range(count)]
    return batches, [np.full((2, 4, 3), 100.0 * step + i) for i in range(count)]


def marks(entries) -> list[int]:
    return [int(e.batch["tokens"][0, 0]) for e in entries]


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(8, 100), st.integers(0, 9))
def test_a_plan_never_holds_the_step_itself_and_the_buffer_is_bounded(counts, tokens, updates):
    buffer = ReplayBuffer(tokens)
    for step, count in enumerate(counts, start=1):
        known = marks(buffer.entries)
        plan = marks(buffer.plan(step, updates, 2))
        assert set(plan) <= set(known) and all(mark < 100 * step for mark in plan)
        if updates:
            assert len(plan) == (updates if known else 0)
            once = plan[: len(known)]
            assert [m // 100 for m in once] == sorted((m // 100 for m in once), reverse=True)
        else:
            assert plan == [m for m in known if m // 100 == step - 1] * 2
        buffer.add(step, *microbatches(step, count))
        assert buffer.size == 8 * len(buffer.entries) <= tokens
        assert marks(buffer.plan(step, updates, 2)) == marks(
            e for e in buffer.plan(step, updates, 2) if e.step < step
        )
    everything = [100 * s + i for s, count in enumerate(counts, start=1) for i in range(count)]
    assert marks(buffer.entries) == everything[max(0, len(everything) - tokens // 8) :]


def test_a_buffer_comes_back_from_its_state_and_arrays():
    buffer, other = ReplayBuffer(100), ReplayBuffer(100)
    buffer.add(3, *microbatches(3, 2))
    buffer.add(4, *microbatches(4, 1))
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), buffer.tree())
    abstract = jax.tree.map(lambda a: (a.shape, a.dtype), ReplayBuffer.abstract(buffer.state()))
    assert shapes == abstract
    other.add(9, *microbatches(9, 1))
    other.load(buffer.state(), buffer.tree())
    assert [e.step for e in other.entries] == [3, 3, 4]
    assert same([tuple(e) for e in other.entries], [tuple(e) for e in buffer.entries])


# --- pieces ---------------------------------------------------------------------------------------


class Later:
    """A result that is there when the test says so."""

    def __init__(self):
        self.ready = False

    def is_ready(self) -> bool:
        return self.ready

    def __array__(self, *unused, **more):
        return np.float32(1)

    def block_until_ready(self):
        self.ready = True
        return self


def spot_of(gaps: bool = True):
    """(spot training of three micro-batches for three replicas, the pieces it sent off)."""
    sent = []

    def start_update(head, opt_state, policy, batch, states):
        sent.append((int(batch["tokens"][0, 0]), list(head.devices())[0].id, Later()))
        return head + 1, opt_state, {"count": sent[-1][2]}

    draft = types.SimpleNamespace(start_update=start_update, mesh=None, context=None)
    places = [HeadDevices(draft, jax.devices()[i % jax.device_count()]) for i in range(3)]
    spot = SpotConfig(enabled=True, gaps=gaps, buffer_tokens=100)
    cfg = DraftConfig(spot=spot, max_microbatches=3)
    spot = SpotTraining(places, cfg, Trace(3))
    spot.store(1, *microbatches(1, 5))
    head = jax.numpy.zeros(())
    spot.begin(2, head, jax.numpy.zeros(()), {"embed": head, "norm": head})
    return spot, sent


def test_one_piece_at_a_time_is_sent_off_and_only_to_a_drained_replica():
    spot, sent = spot_of()
    spot.use_idle([])
    assert not sent
    rows = len(spot.buffer.entries[0].states)
    spot.seconds = {rows: 2.0}
    assert not spot.use_idle([2], 1.0) and spot.seconds_needed == 2  # it would not be done by then
    assert not sent
    assert spot.use_idle([2], 3.0)
    spot.use_idle([1, 2])
    assert [s[:2] for s in sent] == [(100, jax.devices()[2].id)]
    sent[0][2].ready = True
    spot.use_idle([])  # all replicas have work again
    # It is not known how long an update takes without moving the head.
    assert len(sent) == 1 and spot.in_gaps == 1 and spot.seconds == {rows: 2}
    spot.use_idle([1, 2])  # the head stays where it is
    assert [s[:2] for s in sent[1:]] == [(101, jax.devices()[2].id)]
    head, _, sums = spot.finish()
    assert [s[0] for s in sent] == [100, 101, 102] and float(head) == 3
    assert (spot.in_gaps, spot.after, float(sums["count"])) == (2, 1, 3)
    assert head.devices() == {jax.devices()[0]}


class Noted:
    """Work of four seconds a piece that does nothing, and records its calls."""

    seconds_needed = 4.0

    def __init__(self):
        self.asked, self.waited = [], 0

    def use_idle(self, replicas, seconds) -> bool:
        self.asked.append((list(replicas), round(seconds)))
        return len(self.asked) == 1  # it is done at the second call

    def wait(self) -> None:
        self.waited += 1


def test_processes_tell_each_other_less_often_while_a_gap_is_used():
    """A process whose own samples have ended, while another's run."""
    told, agreement = [], types.SimpleNamespace(now=0.0)
    own = types.SimpleNamespace(
        has_work=False, clear=lambda: None, runner=types.SimpleNamespace(agreement=agreement)
    )
    own.spec = own.limits = own.telemetry = own.unfinished = None
    own.engines, own.drained = (own,), [0]

    def tell(mine, place):
        told.append(mine)
        return [mine, ([], 0.0)]

    host = hosts.Hosts(own, None, group=hosts.ProcessGroup(0, 2, reports=True), exchange=tell)
    host.idle_work = noted = Noted()
    host._load = [0, 3]
    host.step()
    assert noted.asked == [([0], hosts.EXCHANGE), ([0], hosts.EXCHANGE)] and noted.waited == 1
    host.step()
    assert noted.asked[2:] == [([0], 5)]  # an update has room until the next exchange
    host._load = [0, 0]
    host.step()
    assert noted.asked[3:] == [([], 5)]  # no replica runs: the rollout is over
    assert [needed for _, needed in told] == [4.0, 4.0, 0.0] and host._interval == hosts.EXCHANGE


def test_switched_off_all_pieces_come_after_the_rollout():
    spot, sent = spot_of(gaps=False)
    spot.use_idle([1])
    assert not sent
    assert spot.seconds_needed == 0
    spot.finish()
    assert [s[0] for s in sent] == [100, 101, 102] and (spot.in_gaps, spot.after) == (0, 3)


def test_a_replica_is_in_a_gap_only_while_others_run():
    busy, idle = (types.SimpleNamespace(has_work=work) for work in (True, False))
    for engines, expected in (([busy, idle, idle], [1, 2]), ([idle, idle], []), ([busy], [])):
        replicas = object.__new__(Replicas)
        replicas._unfed, replicas.engines = {}, engines
        assert replicas.idle_replicas == expected


# --- the trace ------------------------------------------------------------------------------------


def test_a_run_that_goes_back_drops_the_events_of_steps_that_it_runs_again(tmp_path):
    path = tmp_path / TRACE_FILE
    for steps in ((1, 2, 3), (2, 3)):
        trace = Trace(2)
        for step in steps:
            trace.begin(step)
            trace.record_idle([1])
            trace.record_idle([])
            trace.end()
            trace.write(path)
        with path.open("a") as stream:
            stream.write('{"step": 3, "repl')  # killed while it wrote
    events = read_lines(path)
    assert [e["step"] for e in events if e["event"] == "rollout"] == [1, 2, 3]
    mine = [e for e in events if e["step"] == 2 and e["replica"] == 1]
    assert [e["event"] for e in mine] == ["busy", "idle", "busy"]
    assert all(a["end"] == b["start"] for a, b in zip(mine, mine[1:], strict=False))
