"""Rows of slime: a prompt, `label` with the gold answer, and a mapping `metadata`.

The prompt is text or a conversation in `prompt`, or a conversation in `messages`. Rewards get the
entries of `metadata` by their names, too, unless a column has the same name.
"""

from collections.abc import Mapping

from train.data.tasks.layout import (
    Example,
    Layout,
    Row,
    RowError,
    gold_of,
    messages_of,
    others,
    shown,
    up_to_answer,
)
from train.data.tasks.prompt import GOLD_COLUMNS, read_prompt


def _recognises(columns) -> bool:
    """Whether rows have a `label` that is a gold answer, and no mark of a given completion."""
    columns = set(columns)
    return (
        "label" in columns
        and bool({"prompt", "messages"} & columns)
        and not {"completion", *GOLD_COLUMNS} & columns
    )


def _read(row: Row) -> Example:
    label, metadata = row.get("label"), row.get("metadata")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise RowError(f"column 'metadata': expected a mapping, got {shown(metadata)}")
    if row.get("prompt") is not None:
        prompt = read_prompt(row)
    else:
        prompt = up_to_answer(messages_of(row.get("messages"), "messages"), "messages")
    columns = {**(metadata or {}), **others(row, "prompt", "messages")}
    return Example(prompt, "" if label is None else gold_of(label, "label"), None, columns)


TASK = Layout(
    name="slime",
    columns="prompt or messages, label",
    recognises=_recognises,
    read=_read,
)
