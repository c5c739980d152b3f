"""`train.rl` on several real processes, which meet over loopback, is the run of one process."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run
from test_mixtures import MIXTURE

from specjax.checkpoint.store import Checkpointer
from specjax.command_line import parse_config
from train import rl
from train.run.files import read_lines, read_metrics, read_starts
from train.run.start import restore
from train.schema import RLConfig

ROOT = Path(__file__).resolve().parents[2]
# Groups that are carried and drawn again, in two updates per step: a decision that two processes
# take differently would be seen.
CHANGES = {
    "steps": 5,
    "reward": "tiny_run:rare",
    "algo.max_num_gen_batches": 2,
    "rollout.over_sample": 1.5,
    "rollout.partial": "true",
    "optim.lr": 1e-3,
    "draft.optim.lr": 1e-3,
    "checkpoint.export": "false",
}


def start(
    model, out, count, *flags, devices=1, slow=0.0, last=(), module="train.rl", env=(), last_env=(),
    **changes,
) -> list[subprocess.Popen]:  # fmt: skip
    """`python -m train.rl` in each process of a job.

    Args:
      last: arguments of the last process alone. module: what runs in its place. env: variables.
      last_env: variables of the last process alone.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "TINY_RUN_REWARD_SECONDS": str(slow)}
    environment |= dict(env)
    forced = "--xla_force_host_platform_device_count"
    environment["XLA_FLAGS"] = re.sub(rf"{forced}=\d+", "", environment.get("XLA_FLAGS", ""))
    layout = {"mesh.data": count * devices, "rollout.replicas": count * devices}
    argv = tiny_run.arguments(model, out, **{**CHANGES, **layout, **changes})
    argv += [f"distributed.coordinator=127.0.0.1:{port}", f"distributed.num_processes={count}"]
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, *argv, f"distributed.process_id={i}", *flags]
            + (list(last) if i == count - 1 else []),
            env=environment | (dict(last_env) if i == count - 1 else {}),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        )
        for i in range(count)
    ]  # fmt: skip


def outputs(job: list[subprocess.Popen], seconds: float = 600) -> list[str]:
    """What each printed; none of them goes on after the test, whatever happens."""
    try:
        return [process.communicate(timeout=seconds)[0] for process in job]
    finally:
        for process in job:
            process.kill()


def finish(job: list[subprocess.Popen]) -> list[str]:
    printed = outputs(job)
    assert [process.returncode for process in job] == [0] * len(job), printed
    return printed


def trainer_of(model, out, **changes) -> rl.Trainer:
    argv = tiny_run.arguments(model, out, **{**CHANGES, **changes})
    return rl.Trainer(parse_config(RLConfig, argv)[0])


def learned(metrics: dict) -> dict:
    """What must be equal to the last bit."""
    names = ["tokens_sha", "carried_sha", "reward", "budget", "groups_selected", "groups_carried"]
    return {name: metrics.get(f"rollout/{name}") for name in names}


def assert_close(mine: dict, theirs: dict, rel: float = 1e-4) -> None:
    """Figures that programs of another layout have in other last bits."""
    for name in ("train/loss", "train/grad_norm", "train/mtp_loss", "train/entropy"):
        expected = theirs.get(name)
        assert (mine.get(name) is None) == (expected is None), name
        if expected is not None:
            assert mine[name] == pytest.approx(expected, rel=rel, abs=1e-5), name


# Each process trains the head for itself, while the other rolls out or after that.
SPOT = {"draft.spot.enabled": "true", "draft.spot.updates": 2, "rollout.telemetry": "true"}
NO_GAPS = {**SPOT, "draft.spot.gaps": "false"}
EXACT = {"rollout.exact_mode": "true"}


def rejections_in(run) -> tuple[list[dict], list[dict]]:
    """The sums, and the rejections, that a run wrote."""
    lines = map(json.loads, (Path(run) / "telemetry.jsonl").read_text().splitlines())
    lines = [*lines]
    return tuple([x for x in lines if x["kind"] == kind] for kind in ("tally", "rejection"))


def assert_exact(records: list[dict]) -> None:
    """Everything that was sampled is what plain decoding gives."""
    assert all(r["rollout/exact_compared"] > 0 for r in records)
    assert not any(r["rollout/exact_differences"] for r in records)


@pytest.fixture(scope="module")
def two(thin_policy, tmp_path_factory):
    """A run of five steps in two processes, and what they printed."""
    out = tmp_path_factory.mktemp("two") / "run"
    return out, finish(start(thin_policy, out, 2, **SPOT))


@pytest.fixture(scope="module")
def one(thin_policy, tmp_path_factory):
    """The same run, and one more step, in one process.

    Returns:
      (its trainer, metrics of each step, leaves of policy and head after step 5)
    """
    trainer = trainer_of(thin_policy, tmp_path_factory.mktemp("one"), **NO_GAPS)
    metrics = [trainer.step() for _ in range(5)]
    weights = leaves((trainer.params, trainer.head))
    return trainer, [*metrics, trainer.step()], weights


def leaves(tree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_two_processes_sample_and_learn_what_one_does(two, one):
    records = read_metrics(two[0])
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5]
    for mine, theirs in zip(records, one[1], strict=False):
        assert learned(mine) == learned(theirs)
        assert_close(mine, theirs)
    assert any(r["rollout/groups_carried"] for r in records), "decisions were taken"
    assert any("train/loss" in r for r in records)


@pytest.mark.slow
def test_two_processes_replay_the_routing_of_a_mixture_as_one_does(tmp_path):
    """Carried samples, whose records the processes tell each other, and divided experts."""
    policy = tiny_run.write_policy(tmp_path / "policy", raw=MIXTURE)
    layout = {"mesh.data": 1, "mesh.expert": 2, "mesh.tp": 2, "steps": 3, "packing.rows": 2}
    finish(start(policy, tmp_path / "two", 2, devices=2, **layout))
    trainer = trainer_of(policy, tmp_path / "one", **{"packing.rows": 2})
    for mine in read_metrics(tmp_path / "two"):
        theirs = trainer.step()
        assert learned(mine) == learned(theirs)
        assert_close(mine, theirs)
        if "train/loss" in mine:
            assert mine["train/train_rollout_logprob_abs_diff"] < 1e-4


@pytest.mark.slow
def test_two_processes_pack_the_weights_that_one_does(thin_policy, tmp_path):
    packed = {"rollout.products": "int8", "mesh.data": 1, "mesh.fsdp": 2, "packing.rows": 2}
    finish(start(thin_policy, tmp_path / "two", 2, **packed, steps=3))
    packed |= {"mesh.fsdp": 1}
    trainer = trainer_of(thin_policy, tmp_path / "one", **packed)
    for mine in read_metrics(tmp_path / "two"):
        theirs = trainer.step()
        assert learned(mine) == learned(theirs)
        name = "train/train_rollout_logprob_abs_diff"
        assert mine.get(name) == pytest.approx(theirs.get(name), rel=1e-2)


def test_the_head_learns_in_gaps_and_the_first_process_tells_of_all_replicas(two):
    records = read_metrics(two[0])
    assert [r["draft/updates"] for r in records] == [0, 2, 2, 2, 2]
    tallies, told = rejections_in(two[0])
    assert len({r["request"] for r in told}) > 2
    assert sum(sum(t["causes"].values()) for t in tallies) == len(told)
    assert sum(t["rejections"] for t in tallies) == len(told)


@pytest.mark.slow
def test_one_process_goes_on_from_the_checkpoint_of_two(two, one):
    trainer, metrics, weights = one  # it is a step further, and goes back
    with Checkpointer(two[0] / "checkpoints") as checkpoints:
        restore(trainer, checkpoints, None)
    assert trainer.done_steps == 5
    for mine, theirs in zip(leaves((trainer.params, trainer.head)), weights, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)
    assert learned(trainer.step()) == learned(metrics[5])


def test_only_the_first_process_writes_and_prints(two):
    out, (first, second) = two
    assert "step    5" in first and "plot:" in first
    # What one machine of a job lacks, or is slow at, its own process says; nothing else.
    allowed = "Gloo", "no C++ compiler", "programs are ready after", "and samples wait for it"
    lines = [line for line in second.splitlines() if not any(word in line for word in allowed)]
    assert not lines, second
    assert (out / "metrics.png").exists() and not list(out.parent.glob("run-*"))
    [start] = read_starts(out)
    assert start["machine"]["processes"] == 2
    samples = read_lines(out / "samples.jsonl")
    assert sorted({row["step"] for row in samples}) == [1, 2, 3, 4, 5]
    places = [(row["step"], row["problem"], row["sample"]) for row in samples]
    assert len(set(places)) == len(places)
    # The origins of the other process's tokens come with the tokens.
    assert all(row["completion"] and set(row["origins"]) <= {"d", "b", "p"} for row in samples)


# --- devices and processes without work -----------------------------------------------------------


@pytest.mark.slow
def test_a_process_with_no_part_in_training_or_rollouts_goes_along(thin_policy, tmp_path, one):
    """2 x 2 devices, of which one trains and one rolls out: weights, checkpoints and figures reach
    the process that has none."""
    out = tmp_path / "run"
    layout = {"mesh.data": 1, "rollout.replicas": 1, **NO_GAPS}
    more = {"eval.problems": 3, "checkpoint.export": "true"}
    more |= EXACT
    finish(start(thin_policy, out, 2, devices=2, **layout, **more, steps=2))
    finish(start(thin_policy, out, 2, "--resume", devices=2, **layout, **more, steps=3))
    records = [r for r in read_metrics(out) if r["step"]]
    assert [learned(r) for r in records] == [learned(r) for r in one[1][:3]]
    for mine, theirs in zip(records, one[1], strict=False):
        assert_close(mine, theirs)
    assert_exact(records)
    assert "eval/reward" in records[-1] and (out / "hf" / "config.json").exists()


# --- all of it together ---------------------------------------------------------------------------

TOGETHER = {
    "steps": 3,
    "checkpoint.every": 2,
    "algo.tis": "true",
    "rollout.invariant": "true",
    "rollout.control.controller": "bandit",
    "rollout.control.strategies": "[off,1_1_2]",
}


@pytest.mark.slow
def test_a_pod_job_with_everything_repeats_exactly_and_samples_what_one_device_does(
    thin_policy, tmp_path
):
    """A mesh over two processes, two replicas in each, spot training, TIS, control, telemetry, and
    everything decoded again plainly."""
    out = tmp_path / "run"
    layout = {"mesh.data": 1, "mesh.fsdp": 2, "mesh.tp": 2, "rollout.replicas": 4}
    changes = {**TOGETHER, **SPOT, **layout, **EXACT}
    finish(start(thin_policy, out, 2, devices=2, **changes))
    once = read_metrics(out)
    _, counted = rejections_in(out)
    trainer = trainer_of(thin_policy, tmp_path / "one", **TOGETHER, **NO_GAPS)
    alone = [trainer.step() for _ in range(3)]
    for mine, theirs in zip(once, alone, strict=True):
        assert learned(mine) == learned(theirs)
        assert_close(mine, theirs, 1e-3)
    assert "control/replica_3/strategy" in once[-1] and counted
    assert_exact(once)
    assert any("train/tis" in r for r in once)
    finish(start(thin_policy, out, 2, "--resume", "--resume_step", "2", devices=2, **changes))
    (again,) = (r for r in read_metrics(out) if r["step"] == 3)
    assert learned(again) == learned(once[-1])
    for name in ("train/loss", "train/grad_norm", "train/mtp_loss", "train/mtp_update_norm"):
        assert again[name] == once[-1][name], name


# --- one replica over several processes -----------------------------------------------------------

# The controller decides by time, and in these processes time does not pass alike.
SHARED = {
    "steps": 1,
    "mesh.data": 1,
    "mesh.fsdp": 2,
    "mesh.tp": 2,
    "rollout.replicas": 1,
    "rollout.tp": 4,
    "rollout.max_batch": 2,
    "rollout.control.controller": "goodput",
    "rollout.control.strategies": "[off,1_1_2]",
    "rollout.chunk_tokens": 10,
}


def choices(out: Path, count: int) -> list[list[str]]:
    return [json.loads((out / f"choices-{i}.json").read_text()) for i in range(count)]


@pytest.mark.slow
def test_processes_that_share_a_replica_choose_alike_and_one_goes_on(thin_policy, tmp_path, one):
    out, changes = tmp_path / "run", {**SHARED, "steps": 3}
    finish(start(thin_policy, out, 2, devices=2, module="uneven_hosts", **changes))
    first, second = choices(out, 2)
    assert first == second and {"off", "1_1_2"} == set(first)
    changes = {**CHANGES, **SHARED, "mesh.fsdp": 1, "mesh.tp": 1, "rollout.tp": 1, "steps": 4}
    rl.main([*tiny_run.arguments(thin_policy, out, **changes), "--resume"])
    assert [learned(r) for r in read_metrics(out)] == [learned(r) for r in one[1][:4]]


# --- how it ends before its time ------------------------------------------------------------------


def run_until(job: list[subprocess.Popen], out: Path, step: int) -> None:
    """Waits until a step is recorded."""
    until = time.monotonic() + 300
    while not (out / "metrics.jsonl").exists() or len(read_metrics(out)) < step:
        assert all(process.poll() is None for process in job), outputs(job)
        assert time.monotonic() < until, outputs(job, 1)
        time.sleep(0.05)


LONG = {
    "steps": 500,
    "distributed.lost_after": 3,
    "checkpoint.every": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_process_ends_the_job_with_its_name(thin_policy, tmp_path, victim):
    out = tmp_path / "run"
    job = start(thin_policy, out, 2, slow=0.02, **LONG)
    run_until(job, out, 4)
    job[victim].kill()
    begun = time.monotonic()
    printed = outputs(job, 60)
    assert time.monotonic() - begun < 30
    survivor, said = job[1 - victim], printed[1 - victim]
    assert survivor.returncode != 0
    assert "with --resume" in said and "the last checkpoint in" in said, said
    if victim == 1:
        assert "tasks are unhealthy (stopped sending heartbeats):\n1\n" in said, said
    else:  # jax ends whoever loses its coordinator
        assert "coordination service" in said, said
    # One process goes on where two were.
    with Checkpointer(out / "checkpoints") as checkpoints:
        saved = checkpoints.all_steps()[-1]
    changes = {**CHANGES, "steps": saved + 1}
    rl.main([*tiny_run.arguments(thin_policy, out, **changes), "--resume"])
    assert [r["step"] for r in read_metrics(out)] == list(range(1, saved + 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"last": ["seed=4"]}, "seed"),
        ({"last_env": {"JAX_DEFAULT_MATMUL_PRECISION": "high"}}, "JAX_DEFAULT_MATMUL_PRECISION"),
    ],
)
def test_processes_with_other_settings_do_not_begin(thin_policy, tmp_path, given, name):
    job = start(thin_policy, tmp_path / "run", 2, **given)
    printed = outputs(job, 120)
    assert all(process.returncode == 1 for process in job), printed
    assert any(f"was started with another value of {name} than" in said for said in printed)


@pytest.mark.slow
def test_sigterm_saves_and_ends_all_processes_together(thin_policy, tmp_path):
    out = tmp_path / "run"
    job = start(thin_policy, out, 2, slow=0.02, **{**LONG, "checkpoint.every": 0})
    run_until(job, out, 2)
    job[1].send_signal(signal.SIGTERM)
    printed = outputs(job, 60)
    assert [process.returncode for process in job] == [1, 1]
    assert all("error: ended by SIGTERM after step" in said for said in printed), printed
    last = read_metrics(out)[-1]["step"]
    assert [p.name for p in (out / "checkpoints").iterdir() if p.name.isdigit()] == [str(last)]
