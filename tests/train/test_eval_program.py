"""`python -m train.eval` without a model: settings that it takes from a run, and its files."""

import json
from pathlib import Path

import pytest

from specjax import interrupts
from specjax.command_line import ConfigError, parse_config
from train import data, rl
from train import eval as program
from train.eval_schema import EvalSection
from train.evaluation import Evaluated
from train.schema import RLConfig


def run_directory(path: Path, text: str) -> Path:
    (path / "checkpoints").mkdir(parents=True)
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


# --- results -------------------------------------------------------------------------------------

NOTHING = Evaluated({}, None, {None: [], "a": []})


def test_results_of_an_earlier_evaluation_are_moved_aside(tmp_path, capsys):
    for step in (40, 20, 10):
        program._write(tmp_path, {"step": step}, NOTHING)
    steps = [json.loads((tmp_path / name / "eval.json").read_text())["step"]
             for name in (".", "earlier-1", "earlier-2")]  # fmt: skip
    assert steps == [10, 40, 20]
    files = ["eval-a.jsonl", "eval-heldout.jsonl", "eval.json"]
    assert sorted(path.name for path in (tmp_path / "earlier-1").iterdir()) == files
    assert "moved to" in capsys.readouterr().out


def test_a_place_without_room_for_results_is_refused_before_sampling(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"out=.*file: expected a directory in which results"):
        program._require_writable(tmp_path / "file")
    program._require_writable(tmp_path / "new")
    assert not any((tmp_path / "new").iterdir())


def test_results_that_cannot_be_written_are_an_error_with_a_reason(tmp_path):
    (tmp_path / "eval-a.jsonl").mkdir(parents=True)
    (tmp_path / "earlier-1").symlink_to(tmp_path / "nowhere")  # is not there, and cannot be made
    with pytest.raises(ConfigError, match="metrics are in the table above: .*earlier-1"):
        program._write(tmp_path, {}, NOTHING)


def test_the_step_that_is_evaluated_is_known_before_it_is_loaded(tmp_path):
    for name in ("3", "20", "30.orbax-checkpoint-tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert program._newest(tmp_path) == program._newest(tmp_path / "checkpoints") == 20
    assert program._newest(tmp_path / "checkpoints" / "3") is None


def test_files_of_training_are_not_looked_for_where_sets_alone_are_evaluated(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1?", "answer": 1}\n')
    cfg = program.EvalConfig(eval=EvalSection(0, {"a": {"path": str(rows)}}))
    cfg.data.path = str(tmp_path / "gone.jsonl")
    assert [file["setting"] for file in program._files_read(cfg)] == ["eval.sets.a.path"]


# --- held-out problems ---------------------------------------------------------------------------


class Tokenizer:
    chat_template = None

    def encode(self, text, **_):
        return [*text.encode()]


def test_held_out_rows_are_checked_like_those_of_a_run(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{i}?", "answer": "{i} x y"}}\n' for i in range(20)))
    held = tmp_path / "held.jsonl"
    held.write_text('{"prompt": "1+1?", "answer": "no number"}\n')
    cfg = program.EvalConfig(reward="number")
    cfg.data.path, cfg.data.heldout_path = str(rows), str(held)
    found = program._read_heldout(cfg, Tokenizer(), "policy")
    assert any(note.startswith("WARNING: held out: ") for note in found.notes)
    question = next(q for q in map(str, range(99)) if data.split_of(q) == "train")
    held.write_text(json.dumps({"prompt": question, "answer": "1"}))
    cfg.data.heldout_path, cfg.data.path = None, str(held)
    found = program._read_heldout(cfg, Tokenizer(), "policy")
    assert found.heldout == [] and cfg.eval.problems == 0
    assert found.notes[0].startswith("WARNING: no held-out problem of the data is evaluated: ")
