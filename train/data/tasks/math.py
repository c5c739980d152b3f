"""MATH's rows: `problem`, and `answer` or a worked `solution` with `\\boxed{}`, or both."""

from typing import Any

from train.data.tasks.layout import (
    Example,
    Layout,
    Row,
    Unread,
    answers_of,
    gold_of,
    others,
    text_of,
    unless_unread,
)
from train.rewards.answers.extract import ANSWER_MARK, boxed


def _read(row: Row) -> Example:
    problem, solution = text_of(row, "problem"), row.get("solution")
    if row.get("answer") is not None:
        gold = gold_of(row["answer"], "answer")
    elif isinstance(solution, str) and ANSWER_MARK not in solution and boxed(solution) is None:
        gold = Unread(
            solution,
            "column 'solution': expected an answer in \\boxed{} or after '####', for there is no "
            f"column 'answer', got text that ends in {solution[-40:]!r}",
        )
    else:
        gold = gold_of(solution, "solution")
    response = unless_unread(_worked, solution, "solution") if solution else None
    return Example(problem, gold, response, others(row, "problem", "answer"))


def _worked(solution: Any, column: str) -> str:
    """The worked solution, or the first of several."""
    return answers_of(solution, column)[0]


TASK = Layout(
    name="math",
    columns="problem, answer or solution",
    recognises=lambda columns: "problem" in columns and bool({"answer", "solution"} & {*columns}),
    read=_read,
    template="Problem: {question}\nSolution:",
)
