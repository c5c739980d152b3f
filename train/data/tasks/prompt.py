"""Rows of Open-R1 and TRL: `prompt`, text or a conversation, and any further columns.

The gold answer is the first of the columns `answer`, `ground_truth`, `solution` and `target` that
the row has; a row without one, or with one that is neither text nor a number, needs a reward of
your own. `completion` is a demonstration. Rewards get all columns by their names.

`data.prompt_key` and `data.answer_key` name other columns (`keyed`).
"""

import functools
from collections.abc import Mapping
from typing import Any

from train.data.tasks import layout
from train.rewards.answers.extract import Gold, final_answer

GOLD_COLUMNS = ("answer", "ground_truth", "solution", "target")


def read_prompt(row: layout.Row, column: str = "prompt") -> str | tuple[layout.Message, ...]:
    """The column of the prompt: text, which is not stripped, or a conversation."""
    if isinstance(row.get(column), str):
        layout.text_of(row, column)  # raises if it is empty or all spaces
        return row[column]
    return layout.up_to_answer(layout.messages_of(row.get(column), column), column)


def gold_of_row(
    row: layout.Row, response: layout.Response | layout.Unread | None = None
) -> Gold | layout.Unread:
    """The gold answer, or answers, in the row's columns; "" if there is none.

    Without any of `GOLD_COLUMNS` it is that of verl's rows, in `reward_model`, or else that which a
    demonstration ends with.
    """
    column = next((name for name in GOLD_COLUMNS if row.get(name) is not None), None)
    if column is not None:
        return layout.gold_of(row[column], column)
    if _truth(row) is not None:
        return gold_in_rule(row["reward_model"])
    if response is None or isinstance(response, layout.Unread):
        return ""
    return final_answer(layout.text_of_response(response)) or ""


def gold_in_rule(rule: Any) -> Gold | layout.Unread:
    """The gold answer, or answers, in the column `reward_model` of verl's rows."""
    if not isinstance(rule, Mapping):
        why = f"column 'reward_model': expected {{'ground_truth': ...}}, got {layout.shown(rule)}"
        return layout.Unread(rule, why)
    return layout.gold_of(rule.get("ground_truth"), "reward_model.ground_truth")


def _truth(row: layout.Row) -> Any:
    """What verl's rows have as gold answer, in `reward_model`; None without it."""
    rule = row.get("reward_model")
    return rule.get("ground_truth") if isinstance(rule, Mapping) else None


def _read(row: layout.Row) -> layout.Example:
    return layout.Example(
        read_prompt(row), gold_of_row(row), _completion(row), layout.others(row, "prompt")
    )


def _completion(row: layout.Row) -> layout.Response | layout.Unread | None:
    """The demonstration in the column `completion`; None without one."""
    completion = row.get("completion")
    if completion is None or isinstance(completion, str):
        return completion
    return layout.unless_unread(_one_turn, completion, "completion")


def _one_turn(completion: Any, column: str) -> layout.Response:
    """The message of a conversation of one message."""
    if not isinstance(completion, (list, tuple)) or len(completion) != 1:
        raise layout.RowError(
            f"column {column!r}: expected text or one message of the assistant, got "
            f"{layout.shown(completion)}"
        )
    return layout.response_in(completion[0], f"{column}[0]")


TASK = layout.Layout(
    name="prompt",
    columns="prompt (text or messages), and answer, ground_truth, solution or target",
    recognises=lambda columns: "prompt" in columns,
    read=_read,
)

# Columns that may hold the prompt where `data.answer_key` alone is set.
PROMPT_COLUMNS = ("prompt", "messages", "question", "problem")


@functools.cache
def keyed(prompt_key: str | None, answer_key: str | None) -> layout.Layout:
    """The layout of rows whose prompt and gold answer are in columns of the user's choice.

    Args:
      prompt_key: column of the prompt, text or a conversation; None for the first of
        `PROMPT_COLUMNS` that the row has.
      answer_key: column of the gold answer, or of several; None for what `gold_of_row` finds.

    A name with dots leads into mappings: `reward_model.ground_truth`. The demonstration is the
    column `completion`, else the assistant's message that ends the conversation, else the text in
    the column that `answer_key` names.
    """

    def read(row: layout.Row) -> layout.Example:
        key = prompt_key or next((name for name in PROMPT_COLUMNS if row.get(name) is not None), "")
        key = key or PROMPT_COLUMNS[0]
        prompt, response = _value_of(row, key, "data.prompt_key"), None
        if not isinstance(prompt, str):
            prompt, response = layout.split_response(prompt, key)
        prompt = read_prompt({key: prompt}, key)
        if answer_key is not None:
            answer = _value_of(row, answer_key, "data.answer_key")
            gold = layout.gold_of(answer, answer_key)
            if response is None and isinstance(answer, str):
                response = answer
        else:
            gold = gold_of_row(layout.others(row, key), response)
        completion = _completion(row)
        response = response if completion is None else completion
        columns, truth = layout.others(row, key), _truth(row)
        if truth is not None:
            columns.setdefault("ground_truth", truth)
        return layout.Example(prompt, gold, response, columns)

    return layout.Layout(
        name="prompt",
        columns=f"{prompt_key or ', '.join(PROMPT_COLUMNS)}: the prompt; "
        f"{answer_key or ', '.join(GOLD_COLUMNS)}: the answer",
        recognises=lambda columns: True,
        read=read,
    )


def _value_of(row: layout.Row, key: str, setting: str):
    """The value of a column, or of an entry of mappings in it.

    Raises:
      RowError: there is no such column or entry.
    """
    if key in row:
        return row[key]
    value = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise layout.RowError(f"expected a column {key!r} ({setting}), got a row without it")
        value = value[part]
    return value
