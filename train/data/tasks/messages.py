"""Rows with a conversation in `messages`.

If the last message is the assistant's, it is a demonstration and no part of the prompt. The gold
answer is in a column (see `prompt.py`), or else in the demonstration (see
`train.rewards.answers.extract`); otherwise there is none.
"""

from train.data.tasks import layout
from train.data.tasks.prompt import gold_of_row


def _read(row: layout.Row) -> layout.Example:
    conversation, response = layout.split_response(row.get("messages"), "messages")
    gold = gold_of_row(row, response)
    return layout.Example(conversation, gold, response, layout.others(row, "messages"))


TASK = layout.Layout(
    name="messages",
    columns="messages",
    recognises=lambda columns: "messages" in columns,
    read=_read,
)
