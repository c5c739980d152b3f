"""Rows with a conversation in `messages`.

If the last message is the assistant's, it is a demonstration and no part of the prompt. The gold
answer is in a column (see `prompt.py`), or else in the demonstration (see
`train.rewards.answers.extract`); otherwise there is none.
"""

from train.data.tasks.layout import (
    Example,
    Layout,
    Row,
    others,
    split_response,
)
from train.data.tasks.prompt import gold_of_row


def _read(row: Row) -> Example:
    conversation, response = split_response(row.get("messages"), "messages")
    gold = gold_of_row(row, response)
    return Example(conversation, gold, response, others(row, "messages"))


TASK = Layout(
    name="messages",
    columns="messages",
    recognises=lambda columns: "messages" in columns,
    read=_read,
)
