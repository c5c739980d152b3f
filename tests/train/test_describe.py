"""What the directory of a run says of the run."""

import hashlib

import pytest
import yaml

from specjax.command_line import parse_config
from train.run.describe import PACKAGES, describe_run
from train.run.files import read_starts
from train.schema import RLConfig

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
    "argv",
    [
        ["algo=dapo", "rollout.control.controller=goodput", "data.prompt_template=${question}$."],
        ["rollout.strategy=off", "reward=[exact,format]", r"rollout.stop=['${a}', '\\n']"],
        ["data.task=reasoning_gym", "data.dataset=x", "data.dataset_args={a: 2}"],
    ],
)
def test_the_written_config_gives_the_same_settings_again(argv, tmp_path):
    cfg = parse_config(RLConfig, argv)[0]
    describe_run(tmp_path, cfg, "train.rl", None, 1, False)
    assert parse_config(RLConfig, ["--config", str(tmp_path / "config.yaml")])[0] == cfg
