"""What the directory of a run says of the run."""

import hashlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specjax.command_line import parse_config
from train import describe
from train.describe import PACKAGES, changed, code, describe_run, git_state, settings_of
from train.run_files import read_starts
from train.schema import RLConfig, SFTConfig

ROWS = '{"question": "1+1", "answer": "2"}\n'


def config(tmp_path, *more):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(ROWS)
    return parse_config(RLConfig, [f"data.path={rows}", "model=some/model", *more])[0]


def test_the_first_start_is_described_and_a_resumed_one_is_added(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    describe_run(out, config(tmp_path, "steps=5"), "train.rl", "some/model", 1, False)
    first_config = yaml.safe_load((out / "config.yaml").read_text())
    longer = config(tmp_path, "steps=9", "optim.lr=0.5")
    describe_run(out, longer, "train.rl", "some/model", 4, True)
    first, second = read_starts(out)
    assert first["command"] == [
        f"data.path={tmp_path / 'rows.jsonl'}",
        "model=some/model",
        "steps=5",
    ]
    assert (first["program"], first["first_step"], first["changed"]) == ("train.rl", 1, {})
    assert first["directory"] == str(tmp_path) and first["model"] == "some/model"
    assert {"python", "specjax", "jax", "jaxlib", "flax", "optax"} <= first["versions"].keys()
    assert {"tokenizers", "math-verify", "sympy", "pyarrow", "reasoning-gym"} <= {*PACKAGES}
    assert sum(first["machine"]["devices"].values()) >= 1
    assert first["data"] == [
        {
            "setting": "data.path",
            "file": str(tmp_path / "rows.jsonl"),
            "bytes": len(ROWS),
            "sha256": hashlib.sha256(ROWS.encode()).hexdigest(),
        }
    ]
    assert second["first_step"] == 4
    usual = first_config["optim"]["lr"]
    assert second["changed"] == {"steps": [5, 9], "optim.lr": [usual, 0.5]}
    assert yaml.safe_load((out / "config.yaml").read_text())["steps"] == 9
    describe_run(out, longer, "train.rl", "some/model", 1, False)
    assert len(read_starts(out)) == 1, "a new run in the directory replaces what is there"


@pytest.mark.parametrize(
    ("program", "argv"),
    [
        (RLConfig, []),
        (RLConfig, ["algo=dapo", "rollout.control.controller=goodput"]),
        (
            RLConfig,
            ["rollout.strategy=off", "data.path=[a.jsonl, b.jsonl]", "reward=[exact,format]"],
        ),
        (RLConfig, ["data.task=reasoning_gym", "data.dataset=x", "data.dataset_args={a: 2}"]),
        (SFTConfig, ["draft.mode=frozen"]),
    ],
)
def test_the_written_config_gives_the_same_settings_again(program, argv, tmp_path):
    cfg = parse_config(program, argv)[0]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings_of(cfg)))
    assert parse_config(program, ["--config", str(file)])[0] == cfg


def _none(*_) -> dict:
    return {}


TEXTS = st.text(st.sampled_from("$${{}}\\\\ab10e.'\"\n\t :,#[]-?~é"), max_size=12)


@given(text=TEXTS, inner=TEXTS)
@example(text="${question}$", inner="\\${")
@example(text="\\\\${a} ${b", inner="1e5")
@settings(max_examples=25, deadline=None)
def test_any_text_of_a_setting_is_read_back_from_the_files_of_a_run(text, inner):
    several, path = [inner + ".", text + "."], f"x{text}"
    shown = json.dumps(several, ensure_ascii=False)
    typed = {
        "out": json.dumps(path, ensure_ascii=False),
        "rollout.stop": shown,
        "data.dataset_args": f"{{a: {shown}}}",
        "eval.sets": f"{{x: {{path: {json.dumps(path, ensure_ascii=False)}}}}}",
        "data.prompt_template": "Solve ${question}$.",
        "data.task": "reasoning_gym",
        "data.dataset": "x",
    }
    cfg = parse_config(RLConfig, [f"{key}={value}" for key, value in typed.items()])[0]
    assert cfg.out == cfg.eval.sets["x"].path == path
    assert cfg.rollout.stop == cfg.data.dataset_args["a"] == several
    assert cfg.data.prompt_template == "Solve ${question}$."
    unasked = dict.fromkeys(("data_files", "versions", "machine", "code"), _none)
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(describe, **unasked):
        for resumed in (False, True):
            describe_run(Path(folder), cfg, "train.rl", None, 1, resumed)
        assert read_starts(Path(folder))[1]["changed"] == {}
        assert parse_config(RLConfig, ["--config", f"{folder}/config.yaml"])[0] == cfg


def test_changed_settings_are_named_by_their_keys():
    before = {"a": {"b": 1, "c": [1]}, "d": 2}
    assert changed(before, {"a": {"b": 1, "c": [2]}, "e": 3}) == {
        "a.c": [[1], [2]],
        "d": [2, None],
        "e": [None, 3],
    }


def git(directory, *arguments):
    who = ("-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *arguments], cwd=directory, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_state_of_the_code_is_commit_patch_and_new_files(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    repository = tmp_path / "code"
    (repository / "inner").mkdir(parents=True)
    assert "not a git repository" in git_state(repository)["problem"]
    git(repository, "init", "-b", "work")
    assert git_state(repository)["problem"], "there is no commit yet"
    (repository / "a.py").write_text("one = 1\n")
    git(repository, "add", "a.py")
    git(repository, "commit", "-m", "first")
    clean = git_state(repository / "inner")
    assert (clean["root"], clean["branch"]) == (str(repository), "work")
    assert len(clean["commit"]) == 40
    assert (clean["dirty"], clean["patch"], clean["untracked"]) == (False, None, [])
    (repository / "a.py").write_text("one = 2\n")
    (repository / "new.py").write_text("")
    dirty = git_state(repository / "inner")
    assert dirty["dirty"] and "+one = 2" in dirty["patch"]
    assert dirty["untracked"] == ["new.py"]
    (repository / "a.py").write_text("one = 2\n" * 50_000)
    large = git_state(repository)
    assert large["dirty"] and large["patch"] is None and large["patch_bytes"] > 200_000
    assert json.dumps(large)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert code(repository, repository / "inner") == {"code": large}
    outside = code(elsewhere, repository)
    assert "not a git repository" in outside["code"]["problem"] and outside["source"] == large
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(repository) == {"problem": "git is not installed"}
