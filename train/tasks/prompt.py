"""Rows of Open-R1 and TRL: `prompt`, text or a conversation, and any further columns.

The gold answer is the first of the columns `answer`, `ground_truth`, `solution` and `target` that
the row has; a row without one needs a reward of your own. `completion` is a demonstration. Rewards
get all columns by their names.
"""

from train.answers.extract import Gold
from train.tasks.layout import (
    Example,
    Layout,
    Message,
    Row,
    RowError,
    gold_of,
    messages_of,
    others,
    shown,
    text_of,
    up_to_answer,
)

GOLD_COLUMNS = ("answer", "ground_truth", "solution", "target")


def read_prompt(row: Row) -> str | tuple[Message, ...]:
    """The column `prompt`: text, which is not stripped, or a conversation."""
    if isinstance(row.get("prompt"), str):
        text_of(row, "prompt")  # raises if it is empty or all spaces
        return row["prompt"]
    return up_to_answer(messages_of(row.get("prompt"), "prompt"), "prompt")


def gold_of_row(row: Row) -> Gold | None:
    """The gold answer, or answers, in the row's columns; None if there is none."""
    column = next((name for name in GOLD_COLUMNS if row.get(name) is not None), None)
    return None if column is None else gold_of(row[column], column)


def _read(row: Row) -> Example:
    gold = gold_of_row(row) or ""
    completion, response = row.get("completion"), None
    if isinstance(completion, str):
        response = completion
    elif completion is not None:
        turns = messages_of(completion, "completion")
        if len(turns) != 1:
            raise RowError(
                "column 'completion': expected text or one message of the assistant, got "
                f"{shown(completion)}"
            )
        response = turns[0]["content"]
    return Example(read_prompt(row), gold, response, others(row, "prompt"))


TASK = Layout(
    name="prompt",
    columns="prompt (text or messages), and answer, ground_truth, solution or target",
    recognises=lambda columns: "prompt" in columns,
    read=_read,
)
