"""Killed at any point, a run resumes and gives what a run never killed gives."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run

from specjax.checkpoint import huggingface as hf
from train import rl
from train.run.files import read_metrics

pytestmark = pytest.mark.usefixtures("shared_programs")

ROOT = Path(__file__).resolve().parents[2]
# Everything that a checkpoint must hold matters here: schedules, a reference policy that has been
# updated, a data position that depends on rewards, groups that are carried, and a head that is
# trained online.
CHANGES = {
    "reward": "tiny_run:rare",
    "algo.max_num_gen_batches": 2,
    "rollout.over_sample": 1.5,
    "rollout.partial": "true",
    "algo.kl_loss_coef": 0.1,
    "optim.warmup_steps": 3,
    "optim.decay_steps": 9,
    "checkpoint.every": 1,
    "checkpoint.keep_last": 3,
}


def program(model, out, *flags, slow=0.0, **changes) -> subprocess.Popen:
    """`python -m train.rl` as a process of its own."""
    argv = tiny_run.arguments(model, out, **{**CHANGES, **changes})
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": paths, "TINY_RUN_REWARD_SECONDS": str(slow)}
    return subprocess.Popen(
        [sys.executable, "-m", "train.rl", *argv, *flags],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def finish(process: subprocess.Popen) -> str:
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return output


def kill_after(process: subprocess.Popen, out: Path, step: int, seconds: float) -> None:
    """SIGKILL some time after a step was recorded."""
    deadline = time.monotonic() + 300
    while not (out / "metrics.jsonl").exists() or not any(
        record["step"] >= step for record in read_metrics(out)
    ):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"


def learned(run: Path) -> list[dict]:
    """The records of a run without what the clock decides."""
    clock = ("wall_time", "time/", "tokens_per", "perf/")
    return [
        {name: value for name, value in record.items() if not any(c in name for c in clock)}
        for record in read_metrics(run)
    ]


def sampled(run: Path) -> list[dict]:
    """The samples that a run wrote; rounding in the draft head may change what is accepted."""
    rows = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
    return [{name: value for name, value in row.items() if name != "origins"} for row in rows]


def assert_same_run(run: Path, reference: Path) -> None:
    assert learned(run) == learned(reference)
    assert sampled(run) == sampled(reference), "a step is written twice, or not"
    mine, theirs = (hf.load_checkpoint(path / "hf")[1:] for path in (run, reference))
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def reference(thin_policy, tmp_path_factory):
    """A run of six steps that was not killed."""
    out = tmp_path_factory.mktemp("reference") / "run"
    rl.main(tiny_run.arguments(thin_policy, out, **CHANGES, steps=6))
    records = learned(out)
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert len({r["rollout/tokens_sha"] for r in records}) == 6
    assert any(r["train/loss"] for r in records if "train/loss" in r)
    assert any(r["rollout/groups_carried"] for r in records[2:5]), "a kill finds carried groups"
    return out


def test_a_killed_run_goes_on_as_if_nothing_had_happened(thin_policy, tmp_path, reference, capsys):
    out = tmp_path / "run"
    kill_after(program(thin_policy, out, steps=6, slow=0.02), out, 3, 0.15)
    rl.main([*tiny_run.arguments(thin_policy, out, **CHANGES, steps=6), "--resume"])
    output = capsys.readouterr().out
    assert any(f"steps {first} to 6" in output for first in (3, 4, 5, 6)), output
    assert_same_run(out, reference)


@pytest.mark.slow
def test_killed_at_five_random_points_a_run_ends_with_the_same_bits(thin_policy, tmp_path):
    dice = random.Random(5)
    whole, out = tmp_path / "whole", tmp_path / "run"
    finish(program(thin_policy, whole, steps=14))
    flags, reached = [], 1
    for _ in range(5):
        process = program(thin_policy, out, *flags, steps=14, slow=0.02)
        kill_after(process, out, reached + 1, dice.uniform(0, 0.8))
        flags = ["--resume"]
        reached = max(record["step"] for record in read_metrics(out))
    finish(program(thin_policy, out, *flags, steps=14))
    assert_same_run(out, whole)


def refusal(argv) -> str:
    with pytest.raises(SystemExit) as exit_info:
        rl.main(argv)
    assert isinstance(exit_info.value.code, str), exit_info.value.code
    return exit_info.value.code


def test_resuming_with_other_settings_names_them(thin_policy, reference):
    before = (reference / "metrics.jsonl").read_bytes()
    for changes, name in (
        ({"optim.lr": 1e-4}, "optim"),
        ({"rollout.n": 2}, "rollout"),
    ):
        argv = tiny_run.arguments(thin_policy, reference, **{**CHANGES, **changes}, steps=7)
        message = refusal([*argv, "--resume"])
        assert f"made with other settings of {name};" in message
    assert (reference / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("sent", "code", "line"),
    [
        ([signal.SIGINT], 130, "ended by Ctrl-C after step 2; step 2 is saved in"),
        ([signal.SIGINT] * 2, 130, "interrupted at step 2; nothing was saved yet"),
        ([signal.SIGTERM], 1, "ended by SIGTERM after step 2; step 2 is saved in"),
    ],
)
def test_a_signal_saves_the_step_in_progress_and_a_second_one_does_not_wait(
    thin_policy, tmp_path, monkeypatch, capsys, request, sent, code, line
):
    step = rl.Trainer.step

    def interrupted(self):
        for number in sent if self.done_steps == 1 else ():
            signal.raise_signal(number)
        return step(self)

    monkeypatch.setattr(rl.Trainer, "step", interrupted)
    changes = CHANGES | {"checkpoint.every": 0}
    # A suite that runs in the background of a shell ignores SIGINT, and a run ignores what it finds
    # ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with pytest.raises(SystemExit) as ended:
        rl.main(tiny_run.arguments(thin_policy, tmp_path / "run", **changes, steps=6))
    said = capsys.readouterr().err + str(ended.value.code)
    assert line in said and "Traceback" not in said
    assert ended.value.code == code or (code == 1 and isinstance(ended.value.code, str))


def test_a_damaged_checkpoint_names_the_one_to_use_and_that_one_works(
    thin_policy, tmp_path, reference
):
    out = Path(shutil.copytree(reference, tmp_path / "run"))
    files = [p for p in (out / "checkpoints" / "6").rglob("*") if p.is_file()]
    victim = max(files, key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1])
    argv = tiny_run.arguments(thin_policy, out, **CHANGES, steps=6)
    message = refusal([*argv, "--resume"])
    assert "is damaged" in message and message.endswith("use --resume_step 5")
    assert "holds no step 2, only [4, 5, 6]" in refusal([*argv, "--resume_step", "2"])
    shutil.rmtree(out / "hf")
    rl.main([*argv, "--resume", "--resume_step", "5"])
    assert_same_run(out, reference)
    assert hf.load_checkpoint(out / "hf")[2] is not None
