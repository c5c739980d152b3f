"""Rows with a conversation in `messages`.

If the last message is the assistant's, it is a demonstration and no part of the prompt. The gold
answer is in a column (see `prompt.py`), or else in the demonstration (see `train.answers.extract`);
otherwise there is none.
"""

from train.answers.extract import final_answer
from train.tasks.layout import (
    Example,
    Layout,
    Row,
    RowError,
    messages_of,
    others,
)
from train.tasks.prompt import gold_of_row


def _read(row: Row) -> Example:
    conversation, response = messages_of(row.get("messages"), "messages"), None
    if conversation[-1]["role"] == "assistant":
        *conversation, last = conversation
        response = last["content"]
    if not conversation:
        raise RowError("column 'messages': expected a message before the assistant's, got none")
    gold = gold_of_row(row)
    if gold is None:
        gold = final_answer(response or "") or ""
    return Example(tuple(conversation), gold, response, others(row, "messages"))


TASK = Layout(
    name="messages",
    columns="messages",
    recognises=lambda columns: "messages" in columns,
    read=_read,
)
