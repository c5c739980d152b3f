"""`bench.train draft` trains a head by `train.draft`, and records its curve."""

import json
from pathlib import Path

import pytest

from bench.train import draft as bench
from train import draft
from train.draft_curve import Curve

ARGUMENTS = ["result=head", "model=dir/policy.gguf", "kind=mtp", "eval.problems=9"]


def trained(cfg, resume=False) -> Path:
    """What `train.draft` leaves in its directory, without a run."""
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    curve = Curve({"model": "policy.gguf", "kind": cfg.kind, "strategy": "4_1_5", "prompts": 9})
    curve.ngram = {"1": 1.2, "0": 1.4}
    curve.points = [
        {"step": 0, "tokens": 0, "accept_length": {"1": 1.1, "0": 1.15}},
        {"step": 5, "tokens": 640, "accept_length": {"1": 1.9, "0": 2.0}},
    ]
    curve.write(out)
    record = {"step": 5, "train/mtp_loss": 1.0, "train/tokens_per_sec": 50.0, "resumed": resume}
    (out / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    return out


def test_the_result_has_the_curve_and_n_grams_beside_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(draft, "train", trained)
    bench.main([*ARGUMENTS, f"out={tmp_path / 'run'}", f"results={tmp_path}"])
    result = json.loads((tmp_path / "head.json").read_text())
    figures = {name: entry["value"] for name, entry in result["figures"].items()}
    assert figures["accept_length/temperature_1"] == 1.9
    assert figures["ngram/temperature_0"] == 1.4
    assert figures["before_training/temperature_1"] == 1.1
    assert figures["curve/temperature_0"] == [[0, 1.15], [640, 2.0]]
    assert (figures["tokens"], figures["updates"], figures["training_rate"]) == (640, 5, 50.0)
    assert result["settings"]["model"] == "policy.gguf" and result["settings"]["kind"] == "mtp"
    assert (tmp_path / "head.png").stat().st_size > 1000
    assert "accept_length/temperature_1" in capsys.readouterr().out


def test_a_run_that_is_there_is_continued(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(draft, "train", lambda cfg, resume: seen.append(resume) or trained(cfg))
    argv = [*ARGUMENTS, f"out={tmp_path / 'run'}", f"results={tmp_path}"]
    bench.main(argv)
    (tmp_path / "run" / "samples").mkdir()
    bench.main(argv)
    assert seen == [False, True]


def test_a_result_needs_a_name(capsys):
    with pytest.raises(SystemExit):
        bench.main(ARGUMENTS[1:])
    assert "result" in capsys.readouterr().err
