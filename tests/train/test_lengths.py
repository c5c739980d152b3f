"""Lengths of prompts, responses and rows that were not set follow the model and each other."""

import json

import jax
import pytest
import tiny_run

from specjax.command_line import parse_config
from train import rl, sft
from train.plan import __main__ as plan
from train.plan.programs import Shapes
from train.schema import RLConfig
from train.trainer import Trainer

UNSET = ("rollout.max_prompt_tokens", "rollout.max_tokens", "packing.row_length")


def arguments(model, out, *more: str) -> list[str]:
    """Of a tiny run that leaves every length at its default."""
    given = tiny_run.arguments(model, out, steps=1, rollout__chunk_tokens=8)
    return [a for a in given if a.partition("=")[0] not in UNSET] + list(more)


def policy(folder, positions: int):
    return tiny_run.write_policy(folder / "policy", num_layers=1, max_position=positions)


@pytest.mark.parametrize(
    ("positions", "asked", "prompt", "response"),
    [
        (48, [], 24, 24),
        (48, ["rollout.max_tokens=36"], 12, 36),
        (48, ["rollout.max_prompt_tokens=40"], 40, 8),
    ],
)
def test_default_lengths_are_fitted_to_a_model_of_few_positions(
    tmp_path, positions, asked, prompt, response
):
    argv = arguments(policy(tmp_path, positions), tmp_path / "run", *asked)
    said = f"rollout.max_prompt_tokens={prompt} and rollout.max_tokens={response} in place of"
    trainer = Trainer(parse_config(RLConfig, argv)[0])
    shapes = Shapes(parse_config(RLConfig, argv)[0], jax.devices())
    assert trainer.notes[0] == shapes.fitted and said in shapes.fitted
    for cfg in (trainer.cfg, shapes.cfg):
        assert (cfg.rollout.max_prompt_tokens, cfg.rollout.max_tokens) == (prompt, response)
    assert trainer.prompts.longest == prompt


def test_lengths_that_were_asked_for_are_refused(tmp_path):
    argv = arguments(policy(tmp_path, 48), tmp_path / "run", "rollout.max_tokens=160")
    for program in (rl.main, lambda argv: plan.main([*argv, "--topology", "cpu:8"])):
        with pytest.raises(SystemExit, match="must be at most 48, the longest sequence of"):
            program([*argv, "mesh.fsdp=2", "mesh.tp=1"])


@pytest.mark.parametrize(
    ("argv", "length"),
    [
        ([], 1024),
        (["rollout.max_prompt_tokens=64", "rollout.max_tokens=192"], 256),
        (["rollout.max_prompt_tokens=64", "rollout.max_tokens=193"], 384),
        (["mesh.cp=3"], 1152),
    ],
)
def test_rows_that_were_not_asked_for_have_room_for_a_sample(argv, length):
    assert parse_config(RLConfig, argv)[0].packing.row_length == length


@pytest.mark.slow
def test_nothing_longer_than_the_positions_of_a_model_is_imitated(tmp_path, capsys):
    """Half of the rows are longer, and none of those that are checked at start."""
    model, rows = policy(tmp_path, 32), tmp_path / "rows.jsonl"
    pairs = [{"prompt": f"{i:04d}", "completion": "1" * (40 if i % 2 else 4)} for i in range(4000)]
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"prompt": "one", "completion": "2"}) + "\n")
    short = ["steps=1", "packing.row_length=256", "packing.rows=1"]
    argv = [f"init={model}", f"data.path={rows}", f"data.heldout_path={held}", "draft_steps=0"]
    sft.main([f"out={tmp_path / 'sft'}", *argv, *short])
    said = capsys.readouterr().out
    assert "exceed the model's longest sequence of 32 tokens are left out" in said
