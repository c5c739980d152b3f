"""Rows of slime: a prompt, `label` with the gold answer, and a mapping `metadata`.

The prompt is text or a conversation in `prompt`, or a conversation in `messages`. Rewards get the
entries of `metadata` by their names, too, unless a column has the same name.
"""

from collections.abc import Mapping

from train.data.tasks import layout
from train.data.tasks.prompt import GOLD_COLUMNS, read_prompt


def _recognises(columns) -> bool:
    """Whether rows have a `label` that is a gold answer, and no mark of a given completion."""
    columns = set(columns)
    return (
        "label" in columns
        and bool({"prompt", "messages"} & columns)
        and not {"completion", *GOLD_COLUMNS} & columns
    )


def _read(row: layout.Row) -> layout.Example:
    label, metadata = row.get("label"), row.get("metadata")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise layout.RowError(
            f"column 'metadata': expected a mapping, got {layout.shown(metadata)}"
        )
    if row.get("prompt") is not None:
        prompt = read_prompt(row)
    else:
        prompt = layout.up_to_answer(
            layout.messages_of(row.get("messages"), "messages"), "messages"
        )
    columns = {**(metadata or {}), **layout.others(row, "prompt", "messages")}
    return layout.Example(
        prompt, "" if label is None else layout.gold_of(label, "label"), None, columns
    )


TASK = layout.Layout(
    name="slime",
    columns="prompt or messages, label",
    recognises=_recognises,
    read=_read,
)
