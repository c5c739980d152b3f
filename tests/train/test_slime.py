"""Rows as slime's users have them: what they mean, what rewards see, and what is refused."""

import json

import pytest

from train import data
from train.scoring import Scorer
from train.tasks import recognise

USER = [{"role": "user", "content": "How much is 30+4?"}]
SAYS = {"role": "assistant", "content": "34"}


def problems(tmp_path, *rows):
    """All of them, for training."""
    path, held = tmp_path / "rows.jsonl", tmp_path / "held.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    held.write_text(json.dumps({"prompt": "another", "label": "1"}))
    cfg = data.DataConfig(path=str(path), heldout_path=str(held))
    assert data.find_task(cfg).name == "slime" and data.default_reward(cfg) == "math_verify"
    return data.problems(cfg, "train")


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": "How much is 30+4?", "label": "34"}, "How much is 30+4?", "34"),
        ({"prompt": USER, "label": 34}, tuple(USER), "34"),
        ({"messages": USER, "label": "so\n#### 34", "metadata": None}, tuple(USER), "34"),
        ({"prompt": USER, "label": ["34", "34.0"], "metadata": {}}, tuple(USER), ("34", "34.0")),
        ({"prompt": "Write.", "label": None, "metadata": {"topic": "rain"}}, "Write.", ""),
    ],
)
def test_prompt_is_text_or_a_conversation_and_label_is_gold(tmp_path, row, prompt, answer):
    (problem,) = problems(tmp_path, row)
    assert (problem.prompt, problem.answer) == (prompt, answer)


def scored(completion, answer, metadata, level, label):
    assert (answer, label, metadata) == ("34", "34", {"level": 3, "label": "no"})
    return float(level)


def test_rewards_see_metadata_and_what_it_holds_by_name(tmp_path):
    row = {"prompt": USER, "label": "34", "metadata": {"level": 3, "label": "no"}}
    (problem,) = problems(tmp_path, row)
    scorer = Scorer("test_slime:scored")
    scorer.check(problem)
    assert scorer("x", problem) == (3.0, False)
    assert Scorer("math_verify")("\\boxed{34}", problem) == (1.0, False)


@pytest.mark.parametrize(
    ("columns", "task"),
    [
        ({"prompt", "label", "metadata"}, "slime"),
        ({"messages", "label"}, "slime"),
        ({"prompt", "label", "answer"}, "prompt"),  # a label of something else
        ({"prompt", "label", "completion"}, "prompt"),  # TRL's judged completions
        ({"prompt", "label", "reward_model"}, "verl"),
        ({"question", "label", "answer"}, "gsm8k"),
        ({"label"}, None),
    ],
)
def test_only_rows_whose_label_is_the_answer_are_slimes(columns, task):
    found = recognise(columns)
    assert (found and found.name) == task


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": USER, "label": True}, "column 'label': expected an answer"),
        (
            {"prompt": USER, "label": "1", "metadata": "x"},
            "'metadata': expected a mapping, got 'x'",
        ),
        ({"prompt": [*USER, SAYS], "label": "34"}, "ends before the assistant's turn"),
        ({"messages": [*USER, SAYS], "label": "34"}, "ends before the assistant's turn"),
        ({"prompt": None, "messages": None, "label": "34"}, "'messages': expected a list of"),
    ],
)
def test_a_row_that_is_not_as_slime_takes_it_is_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=message) as error:
        problems(tmp_path, row)
    assert "rows.jsonl:1: " in str(error.value) and "read as task slime" in str(error.value)
