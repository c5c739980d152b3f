"""Rollouts on several replicas, the head trained in their gaps: what is learned stays the same."""

import copy

import jax
import numpy as np
import pytest
import tiny_run
from hypothesis import given
from hypothesis import strategies as st

from specjax.checkpoint.store import Checkpointer
from specjax.command_line import parse_config
from train import rl
from train.rewards.scoring import RewardsFailedError
from train.rollout.spot import ReplayBuffer, SpotTraining
from train.run.start import restore, save
from train.schema import RLConfig

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

    The first one was saved at its second step, and has noted in `gaps` whether the replica of each
    update in a gap was idle while the other one ran.
    """
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    out, found = tmp_path_factory.mktemp("spot"), []
    start, gaps = SpotTraining._start, []

    def noting(spot, replica, in_gap):
        if in_gap:
            gaps.append(found == [] and trainer.engine.drained == [replica])
        return start(spot, replica, in_gap)

    patch = pytest.MonkeyPatch()
    patch.setattr(SpotTraining, "_start", noting)
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
                    save(trainer, checkpoints, block=True)
        trainer.gaps = gaps
        found.append((trainer, steps))
    patch.undo()
    return *found, out


@pytest.mark.slow
def test_replicas_and_gaps_change_nothing_that_is_learned(pair):
    (gaps, some), (one, others), _ = pair
    assert [learned(m) for m in some] == [learned(m) for m in others]
    for name, tree in gaps.trees().items():
        assert same(tree, one.trees()[name]), name
    assert len({m["rollout/tokens_sha"] for m in some}) == STEPS
    assert all(m["train/mtp_update_norm"] > 0 for m in some[1:])


@pytest.mark.slow
def test_the_head_learns_in_gaps_while_other_replicas_run(pair):
    (gaps, some), (_, others), _ = pair
    assert sum(m["draft/updates_in_gaps"] for m in some) > 0
    assert [m["draft/updates"] for m in some] == [0, 5, 5, 5]  # nothing to learn from, at first
    assert not any(m["draft/updates_in_gaps"] for m in others)
    assert len(gaps.gaps) == sum(m["draft/updates_in_gaps"] for m in some)
    assert all(gaps.gaps), "on the replica that was idle while the other one ran"


def test_nothing_is_compiled_in_a_gap(pair):
    (gaps, _), _, _ = pair
    (program,) = {place.draft for place in gaps.spot.places}
    sizes = len(gaps.cfg.row_sizes)
    assert program._update._cache_size() == sizes * len(gaps.engines)


@pytest.mark.slow
def test_a_resumed_run_has_the_replay_buffer_and_ends_with_the_same_bits(pair):
    (gaps, some), (one, _), out = pair
    with Checkpointer(out / "checkpoints") as checkpoints:
        restore(one, checkpoints, 2)  # another number of replicas, and no gaps
    assert one.done_steps == 2 and {e.step for e in one.spot.buffer.entries} == {1, 2}
    assert [learned(one.step()) for _ in range(2)] == [learned(m) for m in some[2:]]
    for name, tree in gaps.trees().items():
        assert same(tree, one.trees()[name]), name


def test_a_step_whose_rewards_failed_leaves_nothing_and_can_be_made_again(pair, monkeypatch):
    (_, some), (trainer, _), out = pair
    with Checkpointer(out / "checkpoints") as checkpoints:
        restore(trainer, checkpoints, 2)
    before, state = trainer.trees(), trainer.rollouts.state()
    controllers = [copy.deepcopy(e.controller.state()) for e in trainer.engines]
    with monkeypatch.context() as patch:
        patch.setattr(trainer.cfg, "max_failed_rewards", -1.0)
        with pytest.raises(RewardsFailedError, match="of the rewards of step 3 failed"):
            trainer.step()
    assert trainer.spot.in_gaps + trainer.spot.after == 5, "the head was trained meanwhile"
    after = trainer.trees()
    assert before.keys() == after.keys() and all(same(before[n], after[n]) for n in after)
    assert trainer.rollouts.state() == state and trainer.done_steps == 2
    assert [e.controller.state() for e in trainer.engines] == controllers
    with Checkpointer(out / "saved") as checkpoints:  # as the program does before it ends
        save(trainer, checkpoints, block=True)
        assert learned(trainer.step()) == learned(some[2])
        restore(trainer, checkpoints, 2)
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
        save(trainer, checkpoints, block=True)
        steps += [trainer.step() for _ in range(STEPS - 1)]
        learnt = jax.device_get(trainer.trees())
        restore(trainer, checkpoints, 1)
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
