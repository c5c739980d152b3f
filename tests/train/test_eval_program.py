"""`python -m train.eval` without a model: settings that it takes from a run, and its files."""

from pathlib import Path

import pytest

from specjax.command_line import parse_config
from train import eval as program
from train import rl
from train.schema import RLConfig


def run_directory(path: Path, text: str) -> Path:
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(text)
    return path


def test_a_run_in_another_directory_than_the_typed_one_is_named_by_its_own(tmp_path, monkeypatch):
    (tmp_path / "rl" / "checkpoints" / "3").mkdir(parents=True)
    began = []
    monkeypatch.setattr(rl, "_train", lambda cfg, out, *_: began.append((cfg.out, out)))
    typed = RLConfig(out=str(tmp_path / "rl"))
    rl.run(typed)
    assert began == [(str(tmp_path / "rl-2"), tmp_path / "rl-2")]
    assert typed.out == str(tmp_path / "rl"), "the caller's settings stay as they are"


@pytest.mark.parametrize(("typed", "out"), [([], "runs/eval"), (["out=there"], "there")])
def test_results_are_not_written_to_the_directory_of_the_run(tmp_path, monkeypatch, typed, out):
    run = run_directory(tmp_path / "rl", f"out: {tmp_path}/rl\neval: {{problems: 7}}\n")
    monkeypatch.setattr(program, "run", lambda cfg: cfg)
    cfg = program.main([f"model={run}", *typed])
    assert (cfg.out, cfg.eval.problems) == (out, 7)


@pytest.mark.parametrize(
    ("filed", "typed", "is_run", "drafts"),
    [
        ("runs/head", [], True, "checkpoint"),
        ("random", [], True, "checkpoint"),
        ("random", [], False, "checkpoint"),
        ("runs/head", [], False, "runs/head"),
        ("runs/head", ["rollout.draft=runs/other"], True, "runs/other"),
        ("ngram", [], True, "ngram"),
    ],
)
def test_the_head_that_a_run_trained_drafts(tmp_path, filed, typed, is_run, drafts):
    file = tmp_path / "config.yaml"
    file.write_text(f"rollout: {{draft: {filed}}}\n")
    cfg, _ = parse_config(program.EvalConfig, ["--config", str(file), *typed])
    program._draft_with_trained_head(cfg, is_run)
    assert cfg.rollout.draft == drafts
