"""MATH's rows: `problem`, and `answer` or a worked `solution` with `\\boxed{}`, or both."""

from typing import Any

from train.data.tasks import layout
from train.rewards.answers.extract import ANSWER_MARK, boxed


def _read(row: layout.Row) -> layout.Example:
    problem, solution = layout.text_of(row, "problem"), row.get("solution")
    if row.get("answer") is not None:
        gold = layout.gold_of(row["answer"], "answer")
    elif isinstance(solution, str) and ANSWER_MARK not in solution and boxed(solution) is None:
        gold = layout.Unread(
            solution,
            "column 'solution': expected an answer in \\boxed{} or after '####', for there is no "
            f"column 'answer', got text that ends in {solution[-40:]!r}",
        )
    else:
        gold = layout.gold_of(solution, "solution")
    response = layout.unless_unread(_worked, solution, "solution") if solution else None
    return layout.Example(problem, gold, response, layout.others(row, "problem", "answer"))


def _worked(solution: Any, column: str) -> str:
    """The worked solution, or the first of several."""
    return layout.answers_of(solution, column)[0]


TASK = layout.Layout(
    name="math",
    columns="problem, answer or solution",
    recognises=lambda columns: "problem" in columns and bool({"answer", "solution"} & {*columns}),
    read=_read,
    template="Problem: {question}\nSolution:",
)
