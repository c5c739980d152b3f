"""GSM8K's rows: `question`, and `answer` with the working first and `#### n` last.

Without the mark the whole column is the answer, which may be a number. Demonstrations
have no annotations such as `<<48/2=24>>`.
"""

from typing import Any

from train.data.tasks import layout
from train.rewards.answers.extract import ANSWER_MARK


def _read(row: layout.Row) -> layout.Example:
    question, answer = layout.text_of(row, "question"), row.get("answer")
    response = layout.unless_unread(_worked, answer, "answer")
    gold = layout.gold_of(answer, "answer")
    return layout.Example(question, gold, response, layout.others(row, "question", "answer"))


def _worked(answer: Any, column: str) -> str:
    """The worked answer, or the first of several."""
    worked, *_ = layout.answers_of(answer, column)
    return worked if ANSWER_MARK in worked else f"{ANSWER_MARK} {worked}"


TASK = layout.Layout(
    name="gsm8k",
    columns="question, answer",
    recognises=lambda columns: {"question", "answer"} <= set(columns),
    read=_read,
    reward="number",
    template="Question: {question}\nAnswer:",
)
