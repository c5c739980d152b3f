"""GSM8K's rows: `question`, and `answer` with the working first and `#### n` last.

Without the mark the whole column is the answer, which may be a number. `data.strip_calculator`
removes annotations such as `<<48/2=24>>` from demonstrations.
"""

from train.answers.extract import ANSWER_MARK
from train.tasks.layout import Example, Layout, Row, answers_of, gold_of, others, text_of


def _read(row: Row) -> Example:
    question = text_of(row, "question")
    worked, *_ = answers_of(row.get("answer"), "answer")
    response = worked if ANSWER_MARK in worked else f"{ANSWER_MARK} {worked}"
    gold = gold_of(row["answer"], "answer")
    return Example(question, gold, response, others(row, "question", "answer"))


TASK = Layout(
    name="gsm8k",
    columns="question, answer",
    recognises=lambda columns: {"question", "answer"} <= set(columns),
    read=_read,
    reward="number",
    template="Question: {question}\nAnswer:",
)
