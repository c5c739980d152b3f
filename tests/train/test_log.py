"""What a run writes down, what survives a resume, and that it can be drawn."""

import json
import math
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from train.run import log, picture
from train.run.files import read_metrics
from train.run.log import MetricsLogger


def _steps(run: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run)]


def test_every_step_is_one_json_line_on_disk_at_once(tmp_path, capsys):
    with MetricsLogger(tmp_path) as logger:
        logger.log(0, {"rollout/reward": np.float32(0.5), "train/loss": jnp.float32(-0.25)})
        logger.log(1, {"arm": "online", "rounds": [3, 4], "rollout/reward": 1})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close
    first, second = map(json.loads, lines)
    assert first["step"] == 0 and first["rollout/reward"] == 0.5 and first["train/loss"] == -0.25
    assert second["arm"] == "online" and second["rounds"] == [3, 4]
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 and "step    0" in out[0] and "reward 0.500" in out[0]


def test_values_that_are_not_finite_are_null_named_and_warned_about(tmp_path, capsys):
    with MetricsLogger(tmp_path) as logger:
        logger.log(3, {"train/loss": math.nan, "train/kl": jnp.inf, "train/entropy": 0.5})
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["train/loss"] is None and record["train/kl"] is None
    assert record["nonfinite"] == ["train/loss", "train/kl"] and record["train/entropy"] == 0.5
    assert "WARNING: step 3: not finite: train/loss, train/kl" in capsys.readouterr().out


def test_a_long_step_prints_what_it_does(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(log, "QUIET", 0.02)
    first, second = threading.Event(), threading.Event()

    def progress() -> str:
        (second if first.is_set() else first).set()
        return "step 1 of 2: rollout, 3 of 8 samples have ended"

    with MetricsLogger(tmp_path, progress=progress) as logger:
        assert second.wait(60)  # so that the first line is printed
        logger.log(1, {"train/loss": 0.5})
    lines = capsys.readouterr().out.splitlines()
    assert "3 of 8 samples have ended" in lines[0] and any("step    1" in x for x in lines[1:])


def test_a_resumed_run_has_every_step_once(tmp_path):
    with MetricsLogger(tmp_path) as logger:
        for step in range(6):
            logger.log(step, {"run": 1})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 6, "ru')  # killed in the middle of a line
    assert _steps(tmp_path) == [0, 1, 2, 3, 4, 5]
    with MetricsLogger(tmp_path, resume_step=4) as logger:
        for step in range(4, 7):
            logger.log(step, {"run": 2})
    assert _steps(tmp_path) == list(range(7))
    assert [record["run"] for record in read_metrics(tmp_path)] == [1, 1, 1, 1, 2, 2, 2]


def test_a_run_is_drawn(tmp_path):
    with MetricsLogger(tmp_path) as logger:
        for step in range(15):
            metrics = {"rollout/reward": 0.5 + 0.01 * step, "time/rollout": 1.0, "time/train": 2.0}
            metrics |= {f"rollout/accept_rate_depth_{i}": 0.9**i for i in (1, 2, 10)}
            metrics |= {"eval/reward": 0.5} if step in (0, 14) else {}
            metrics |= {"train/mtp_loss": math.nan if step == 3 else 2.0}
            logger.log(step, metrics)
    picture.draw(tmp_path)
    assert (tmp_path / "metrics.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
