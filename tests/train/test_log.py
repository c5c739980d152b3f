"""What a run writes down, what survives a resume, and that it can be drawn."""

import json
import math
import subprocess
import sys
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from train.log import MetricsLogger, read_metrics

ROOT = Path(__file__).resolve().parents[2]


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


def test_a_new_run_in_an_old_directory_keeps_the_old_metrics_aside(tmp_path):
    for run in (1, 2):
        with MetricsLogger(tmp_path) as logger:
            logger.log(0, {"run": run})
    assert [record["run"] for record in read_metrics(tmp_path)] == [2]
    assert json.loads((tmp_path / "metrics.1.jsonl").read_text())["run"] == 1


def test_only_process_0_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    with MetricsLogger(tmp_path / "run", wandb=True, tensorboard=True) as logger:
        logger.log(0, {"rollout/reward": 0.5})
        logger.summary_table([{"arm": "online"}])
    assert not (tmp_path / "run").exists() and not capsys.readouterr().out


@pytest.mark.parametrize(("sink", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_logging_package_is_named_before_old_metrics_are_touched(
    tmp_path, monkeypatch, sink, module
):
    monkeypatch.setitem(sys.modules, module, None)
    with MetricsLogger(tmp_path) as logger:
        logger.log(0, {})
    with pytest.raises(ModuleNotFoundError, match=rf"{module} is not installed.*specjax\[log\]"):
        MetricsLogger(tmp_path, **{sink: True})
    assert _steps(tmp_path) == [0]


def test_tensorboard_and_wandb_get_the_finite_numbers_under_the_same_names(tmp_path, monkeypatch):
    calls = []

    class Writer:
        def __init__(self, directory, purge_step):
            calls.append(("open", Path(directory).name, purge_step))

            self.file_writer = self

        def add_summary(self, summary, step):
            calls.append((summary.tag, summary.simple_value, step))

        def close(self):
            calls.append(("close",))

    runs = []

    def init(**settings):
        runs.append((settings["id"], settings["config"]))
        log = lambda numbers, step: calls.append((step, numbers))  # noqa: E731
        return types.SimpleNamespace(log=log, finish=lambda: calls.append(("finish",)))

    def summary(value):
        return value[0]

    summary.Value = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setitem(
        sys.modules, "tensorboardX.proto.summary_pb2", types.SimpleNamespace(Summary=summary)
    )
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    for resume_step in (None, 1):
        with MetricsLogger(tmp_path, True, True, resume_step, settings={"n": 4}) as logger:
            logger.log(resume_step or 0, {"eval/a b/avg@8": 1.5, "b": math.nan, "c": "text"})
    assert read_metrics(tmp_path)[0]["eval/a b/avg@8"] == 1.5
    assert runs[0][1] == {"n": 4}
    assert runs[0] == runs[1], "a resumed run must continue the same wandb run"
    assert calls[:5] == [
        ("open", "tensorboard", None),
        ("eval/a b/avg@8", 1.5, 0),
        (0, {"eval/a b/avg@8": 1.5}),
        ("close",),
        ("finish",),
    ]
    assert calls[5] == ("open", "tensorboard", 1)


def test_the_summary_table_shows_every_row_and_column(tmp_path, capsys):
    with MetricsLogger(tmp_path) as logger:
        rows = [{"arm": "none", "tok/s": 1219.0}, {"arm": "online", "accept": 3.456789}]
        logger.summary_table(rows, title="four arms")
    out = capsys.readouterr().out
    for text in ("four arms", "arm", "tok/s", "accept", "none", "1219", "online", "3.457", "-"):
        assert text in out


def test_the_damaged_line_of_a_metrics_file_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nnot json\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: not JSON"):
        read_metrics(tmp_path)


def _plot(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "train.plot", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )


def test_a_run_is_drawn_by_the_command(tmp_path):
    with MetricsLogger(tmp_path) as logger:
        for step in range(15):
            metrics = {"rollout/reward": 0.5 + 0.01 * step, "time/rollout": 1.0, "time/train": 2.0}
            metrics |= {f"rollout/accept_rate_depth_{i}": 0.9**i for i in (1, 2, 10)}
            metrics |= {"eval/reward": 0.5} if step in (0, 14) else {}
            metrics |= {"train/mtp_loss": math.nan if step == 3 else 2.0}
            logger.log(step, metrics)
    result = _plot(tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(tmp_path / "metrics.png")
    assert (tmp_path / "metrics.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_only_the_panels_with_data_are_drawn(tmp_path, monkeypatch):
    from train import plot

    drawn = []
    original = plot._draw_panel
    monkeypatch.setattr(
        plot, "_draw_panel", lambda axis, panel, r: (drawn.append(panel), original(axis, panel, r))
    )
    with MetricsLogger(tmp_path) as logger:
        record = {"train/entropy": 0.5, "rollout/accept_rate_depth_1": 0.5}
        logger.log(0, record | {"train/clip_fraction": 0.0})
    out = plot.draw(tmp_path, tmp_path / "some.png")
    assert out.stat().st_size > 1000
    assert [panel.title.split(":")[0] for panel in drawn] == [
        "Acceptance per draft depth",
        "Policy entropy",
    ]


def test_a_run_without_metrics_is_one_clear_message(tmp_path):
    from train import plot

    with pytest.raises(SystemExit, match="no metrics at"):
        plot.main([str(tmp_path)])
