"""`bench.train run` and `objectives` run `train.rl`, and record what the runs learned."""

import json
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from bench.train import objectives, run, verl_rows
from train import describe, rl
from train.objectives.shared import Denominators
from train.presets import PRESETS
from train.tasks import verl

ARGUMENTS = ["model=assets/sums", "steps=2"]


@pytest.fixture
def runs(monkeypatch):
    """What `train.rl` leaves in its directory, without a run; the list of what was asked for."""
    asked = []

    def trained(cfg, resume=False):
        asked.append((cfg, resume))
        out = Path(cfg.out)
        (out / "checkpoints" / "2").mkdir(parents=True, exist_ok=True)
        gain = {"grpo": 0.5, "gspo": 0.4}.get(cfg.algo.preset, 0.3) + cfg.seed / 10
        records = [
            {"step": 0, "eval/reward": 0.1},
            {
                "step": 1,
                "rollout/reward": 0.2,
                "train/entropy": None,
                "nonfinite": ["train/entropy"],
            },
            {"step": 2, "rollout/reward": 0.3, "eval/reward": gain},
        ]
        text = "".join(json.dumps(record) + "\n" for record in records)
        (out / "metrics.jsonl").write_text(text)
        (out / "metrics.png").write_bytes(b"png")
        OmegaConf.save(describe.settings_of(cfg), out / describe.CONFIG_FILE)
        return out / "metrics.png"

    monkeypatch.setattr(rl, "run", trained)
    return asked


def figures(path):
    result = json.loads(path.read_text())
    return {name: entry["value"] for name, entry in result["figures"].items()}


def test_a_run_is_recorded_with_its_curves_and_continued_where_it_is(runs, tmp_path, capsys):
    argv = [*ARGUMENTS, "result=sums", f"out={tmp_path / 'run'}", f"results={tmp_path}"]
    run.main(argv)
    found = figures(tmp_path / "sums.json")
    assert (found["steps"], found["first/held_out_reward"]) == (2, 0.1)
    assert (found["last/held_out_reward"], found["last/reward"]) == (0.3, 0.3)
    assert found["curve/reward"] == [[1, 0.2], [2, 0.3]]
    assert found["not_finite"] == ["train/entropy"]
    assert (tmp_path / "sums.png").read_bytes() == b"png"
    assert len((tmp_path / "sums.jsonl").read_text().splitlines()) == 3
    assert "held_out_reward" in capsys.readouterr().out
    run.main(argv)
    assert [resume for _, resume in runs] == [False, True]


def test_objectives_are_compared_with_the_first_over_seeds(runs, tmp_path):
    argv = [
        *ARGUMENTS, "objectives=[grpo,gspo]", "seeds=[0,1]", "algo.updates_per_rollout=2",
        f"out={tmp_path / 'runs'}", f"results={tmp_path}",
    ]  # fmt: skip
    objectives.main(argv)
    found = figures(tmp_path / "objectives.json")
    assert found["held_out_reward/grpo"] == pytest.approx(0.55)
    assert found["difference/gspo"] == pytest.approx(-0.1)
    assert found["curves/gspo"] == [[[0, 0.1], [2, 0.4]], [[0, 0.1], [2, 0.5]]]
    assert (tmp_path / "objectives.png").stat().st_size > 1000
    assert [(cfg.algo.objective, cfg.seed) for cfg, _ in runs] == [
        ("grpo", 0), ("grpo", 1), ("gspo", 0), ("gspo", 1),
    ]  # fmt: skip
    assert all(cfg.algo.updates_per_rollout == 2 for cfg, _ in runs)
    objectives.main(argv)
    assert len(runs) == 4, "runs that have ended are read"
    with pytest.raises(SystemExit) as ended:
        objectives.main([*argv, "optim.lr=0.5"])
    assert "optim.lr" in str(ended.value) and "0.5 now" in str(ended.value)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_objective_can_be_compared(preset):
    cfg = objectives.ObjectivesConfig(model="assets/sums", objectives=[preset]).of(preset, 3)
    assert (cfg.algo.preset, cfg.seed) == (preset, 3)
    masks, segments = np.ones((2, 4), np.float32), np.ones((2, 4), np.int32)
    weights = cfg.algo.build().weights(masks, segments, Denominators(tokens=8.0, samples=2.0))
    assert (np.asarray(weights) > 0).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("objectives=[ppo]", "objectives: expected"),
        ("seeds=[1,1]", "seeds: expected"),
        ("seed=5", "leave out seed=5"),
        ("algo.kl_loss_coef=0.04", "of algo only updates_per_rollout"),
    ],
)
def test_wrong_comparisons_are_refused(wrong, message, capsys):
    with pytest.raises(SystemExit):
        objectives.main([*ARGUMENTS, wrong])
    assert message in capsys.readouterr().err


def test_rows_of_gsm8k_are_written_as_verl_has_them(tmp_path, capsys):
    row = {"question": "What is 40 + 2?", "answer": "40 + 2 = <<40+2=42>>42.\n#### 42"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    verl_rows.main([str(tmp_path / "train.jsonl"), str(tmp_path / "verl.jsonl")])
    [written] = [json.loads(line) for line in (tmp_path / "verl.jsonl").read_text().splitlines()]
    assert verl.TASK.recognises(written)
    example = verl.TASK.read(written)
    assert example.answer == "42" and "What is 40 + 2?" in str(example.prompt)
    assert written["extra_info"] == {"split": "train", "index": 0, **row}
    assert "1 rows" in capsys.readouterr().out
    verl_rows.main(["--text", str(tmp_path / "train.jsonl"), str(tmp_path / "text.jsonl")])
    as_text = json.loads((tmp_path / "text.jsonl").read_text())
    assert as_text == written | {"prompt": written["prompt"][0]["content"]}
