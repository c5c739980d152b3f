"""Rows of slime: a prompt, `label` with the gold answer, and a mapping `metadata`.

The prompt is text or a conversation in `prompt`, or a conversation in `messages`. Rewards get the
entries of `metadata` by their names, too, unless a column has the same name.
"""

from collections.abc import Mapping

from train.data.tasks import layout
from train.data.tasks.prompt import GOLD_COLUMNS, read_prompt


def _read(row: layout.Row) -> layout.Example:
    label, metadata = row.get("label"), row.get("metadata")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise layout.RowError(
            f"column 'metadata': expected a mapping, got {layout.shown(metadata)}"
        )
    prompt = read_prompt(row, "messages" if row.get("prompt") is None else "prompt")
    columns = {**(metadata or {}), **layout.others(row, "prompt", "messages")}
    gold = "" if label is None else layout.gold_of(label, "label")
    return layout.Example(prompt, gold, None, columns)


# A gold answer, and no mark of a given completion.
TASK = layout.Layout(
    name="slime",
    columns="prompt or messages, label",
    recognises=lambda columns: (
        "label" in columns
        and not {"prompt", "messages"}.isdisjoint(columns)
        and {"completion", *GOLD_COLUMNS}.isdisjoint(columns)
    ),
    read=_read,
)
