"""Rows with a conversation in `messages`.

If the last message is the assistant's, it is a demonstration and no part of the prompt. The gold
answer is in a column (see `prompt.py`), or else in the demonstration (see
`train.rewards.answers.extract`); otherwise there is none.
"""

from train.data.tasks.layout import Layout
from train.data.tasks.prompt import keyed

TASK = Layout(
    name="messages",
    columns="messages",
    recognises=lambda columns: "messages" in columns,
    read=keyed("messages", None).read,
)
