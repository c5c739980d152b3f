"""`python -m train.eval` without a model: settings that it takes from a run."""

from pathlib import Path

import pytest

from specjax import interrupts
from specjax.command_line import parse_config
from train import eval as program


def run_directory(path: Path, text: str) -> Path:
    (path / "checkpoints").mkdir(parents=True)
    (path / "config.yaml").write_text(text)
    return path


@pytest.mark.parametrize(("typed", "out"), [([], "runs/eval"), (["out=there"], "there")])
def test_results_are_not_written_to_the_directory_of_the_run(tmp_path, monkeypatch, typed, out):
    run = run_directory(tmp_path / "rl", f"out: {tmp_path}/rl\neval: {{problems: 7}}\n")
    given = []
    monkeypatch.setattr(program, "run", lambda cfg: given.append(cfg) or {"sets": {}})
    with pytest.raises(SystemExit) as ended:
        interrupts.run(lambda: program.main([f"model={run}", *typed]))
    assert not ended.value.code, "what a program returns is its exit status"
    assert [(cfg.out, cfg.eval.problems) for cfg in given] == [(out, 7)]


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
