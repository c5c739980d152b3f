"""Defaults, and what a run of one's own is told before it is lost or has learnt nothing."""

import json
import re
from pathlib import Path

import pytest
import tiny_run
import yaml

from specjax.settings import keys_of
from train import draft, rl, sft
from train import eval as evaluation
from train.draft_schema import DraftRunConfig
from train.run.files import read_metrics
from train.schema import RLConfig, SFTConfig

pytestmark = pytest.mark.usefixtures("shared_programs")

DOCS = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
SFT = {"steps": 3, "draft_steps": 0, "packing.row_length": 64, "packing.rows": 2, "log_every": 50,
       "data.max_terms": 3}  # fmt: skip
DRAFT = {
    "kind": "mtp", "epochs": 3, "rollout.prompts": 8, "rollout.max_tokens": 20, "log_every": 50,
    "rollout.max_prompt_tokens": 12, "rollout.max_batch": 1, "eval.problems": 0,
    "packing.row_length": 64, "packing.rows": 1, "data.max_terms": 3,
}  # fmt: skip


def arguments(name: str, model: Path, out: Path, **changes) -> list[str]:
    """`key=value` arguments of a short run of a program."""
    if name == "eval":
        settings = {"model": model, "out": out, "rollout.max_prompt_tokens": 12, **changes}
        return [f"{key}={value}" for key, value in settings.items()]
    if name == "rl":
        return tiny_run.arguments(model, out, **{"steps": 1, **changes})
    config, settings = (SFTConfig, SFT) if name == "sft" else (DraftRunConfig, DRAFT)
    source = {"init" if name == "sft" else "model": model, "out": out}
    return tiny_run.with_effect(config, {**settings, **source, **changes})


PROGRAMS = {"rl": rl.main, "eval": evaluation.main, "sft": sft.main, "draft": draft.main}


def test_the_defaults_are_those_of_the_table_beside_other_frameworks():
    programs = {"heads": DraftRunConfig, "train.rl": RLConfig, "train.sft": SFTConfig}
    compared, keys = 0, {}
    for line in DOCS.read_text().partition("## Defaults of training")[2].splitlines():
        if line.startswith("## "):
            break
        first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells and cells[0] == "here":
            program = next(p for name, p in programs.items() if name in first)
            keys = {key.name: key.default for key in keys_of(program)}
        names = re.findall(r"`([a-z_.0-9]+)`", first)
        if not names or cells[0] == "here" or "what is drafted" in cells[0]:
            continue
        values = [
            yaml.safe_load(text.partition(":")[0]) for text in cells[0].split(", ")[: len(names)]
        ]
        for name, value in zip(names, values, strict=True):
            value = float(value) if isinstance(value, str) and "e-" in value else value
            assert keys[name] == value, name
            compared += 1
    assert compared > 30


@pytest.mark.parametrize(
    ("program", "setting", "keep"),
    [
        ("rl", "rollout.max_prompt_tokens", {}),
        ("draft", "rollout.max_prompt_tokens", {}),
        ("sft", "packing.row_length", {}),
        ("draft", "packing.row_length", {"data.texts": "rows"}),
    ],
)
def test_rows_are_not_lost_to_their_length_without_being_asked_for(
    thin_policy, tmp_path, program, setting, keep
):
    """A fifth of the rows is too long: the program ends, and says what would keep them."""
    rows, long = tmp_path / "rows.jsonl", 20 if "prompt" in setting else 90
    lines = [
        {"prompt": f"{i:02d}" + "1" * (long if i % 5 == 0 else 2), "completion": "1", "answer": i}
        for i in range(60)
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changes = {"data.path": rows, **keep}
    changes |= {name: rows for name, value in keep.items() if value == "rows"}
    if program == "rl":
        changes |= {"reward": "tiny_run:coin", "eval.problems": 0}
    without = ("data.max_terms=", *["data.path="] * ("data.texts" in keep))
    argv = arguments(program, thin_policy, tmp_path / "run", **changes)
    argv = [each for each in argv if not each.startswith(without)]
    with pytest.raises(SystemExit) as end:
        PROGRAMS[program](argv)
    said = str(end.value)
    assert f"raise {setting} (" in said and "keeps 100%" in said and "overlong_prompts=drop" in said


@pytest.mark.parametrize(
    ("program", "whose", "changes"),
    [
        ("rl", "policy", {"optim.lr": 1e25, "algo.updates_per_rollout": 2}),
        ("rl", "draft head", {"draft.optim.lr": 1e25}),
        pytest.param(
            "sft", "policy", {"optim.lr": 1e25, "checkpoint.every": 1}, marks=pytest.mark.slow
        ),
        pytest.param("draft", "draft head", {"draft.optim.lr": 1e25}, marks=pytest.mark.slow),
    ],
)
def test_weights_that_are_lost_end_a_run_and_are_not_its_result(
    thin_policy, tmp_path, program, whose, changes
):
    with pytest.raises(SystemExit) as end:
        PROGRAMS[program](arguments(program, thin_policy, tmp_path, **changes))
    said = str(end.value)
    step = int(re.search(rf"step (\d+): the update of the {whose} is not finite", said)[1])
    assert f"a smaller {'draft.' if whose == 'draft head' else ''}optim.lr" in said
    assert not (tmp_path / "hf").exists() and not (tmp_path / "head").exists()
    saved = [int(p.name) for p in (tmp_path / "checkpoints").glob("[0-9]*")]
    assert all(each < step for each in saved)
    assert bool(saved) == ("checkpoint.every" in changes or changes.get("draft_steps", 0) > 0)
    assert read_metrics(tmp_path)[-1]["nonfinite"]


@pytest.mark.slow
def test_rows_that_follow_a_step_have_the_same_loss_with_less_padding(thin_policy, tmp_path):
    found = {}
    for rows in ("null", 16):
        rl.main(arguments("rl", thin_policy, tmp_path / str(rows), **{"packing.rows": rows}))
        found[rows] = read_metrics(tmp_path / str(rows))[-1]
    fitted, fixed = found["null"], found[16]
    assert fitted["rollout/tokens_sha"] == fixed["rollout/tokens_sha"]
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert fitted[name] == pytest.approx(fixed[name], rel=1e-4, abs=1e-6)
    assert fitted["train/padding_share"] < 0.5 < fixed["train/padding_share"] < 1
    # The head has one update in both, here on the largest of the micro-batches.
    assert fitted["train/microbatches"] > fixed["train/microbatches"] == 1
    assert 0 < fitted["train/mtp_tokens"] < fixed["train/mtp_tokens"]
    assert fitted["train/mtp_update_norm"] < 1.5 * fixed["train/mtp_update_norm"]


@pytest.mark.parametrize(
    ("changes", "start", "step"),
    [
        ({"rollout.temperature": 0}, "rollout.temperature=0", "no group has differing rewards"),
        ({"optim.lr": 0}, "optim.lr", None),
    ],
)
def test_a_run_that_cannot_learn_says_so(thin_policy, tmp_path, capsys, changes, start, step):
    changes = {"algo.dynamic_sampling": "false", **changes}
    rl.main(arguments("rl", thin_policy, tmp_path, **changes))
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("WARNING")]
    assert any("learns nothing" in x and start in x for x in lines)
    assert step is None or any(f"step 1: {step}" in x for x in lines)
