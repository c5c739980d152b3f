"""The settings `data.*`: where problems and demonstrations come from, and how they are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specjax.schema import option
from train.registry import TASKS

SUMS = "sums"  # the task that is generated


@dataclass
class DataConfig:
    """Where problems and demonstrations come from.

    Attributes:
      path: training file: JSON lines, a JSON array or parquet, each perhaps gzipped.
      heldout_path: held-out file; None holds out a sixteenth of `path`, chosen by hash.
      seed: decides generated problems, the demonstrator's whims and the order of training.
      prompt_template: format string with `{question}` for prompts that are text; None takes the
        task's own, or the question alone where a chat template is applied.
      chat: whether a prompt that is text becomes one message of the user: auto, when the tokenizer
        has a chat template; on; off. Conversations always go through the template.
      chat_template_kwargs: given to the chat template, such as {enable_thinking: false}.
      overlong_prompts: what happens to prompts of more than rollout.max_prompt_tokens tokens: drop
        (verl: filter_overlong_prompts), truncate (on the left, as verl's truncation=left), error.
      duplicates: keep, or drop rows whose prompt and answer an earlier row has.
      unwinnable: what happens to rows whose gold answer scores less than 1 by a built-in reward:
        error ends the run at start, drop passes over them, keep only says so.
      strip_calculator: drop GSM8K's `<<48/2=24>>` annotations from demonstrations.
      train_size: number of generated training problems of `sums`.
      heldout_size: number of held-out problems at most.
      min_terms, max_terms: how many numbers `sums` adds.
      max_number: the largest of them; the smallest is 1.
      slip: probability that a step of the working is wrong.
      impatience: probability that the demonstrator guesses.
    """

    task: str = option(
        "auto",
        "what rows mean: auto, by their columns (and the generated `sums` without a path); sums; "
        f"{', '.join(TASKS.names)}; or module:attribute, a task of your own (docs/extend.md)",
    )
    path: str | None = None
    heldout_path: str | None = None
    seed: int = 0
    prompt_template: str | None = None
    chat: str = "auto"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    overlong_prompts: str = "drop"
    duplicates: str = "keep"
    unwinnable: str = "error"
    strip_calculator: bool = True
    train_size: int = 1_000_000
    heldout_size: int = 512
    min_terms: int = 2
    max_terms: int = 12
    max_number: int = 99
    slip: float = 0.08
    impatience: float = 0.3

    def __post_init__(self) -> None:
        try:
            check_task(self.task)
        except ValueError as error:
            raise ValueError(f"data.task: {error}") from error
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"data.{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        if self.task == SUMS and self.path:
            raise ValueError(
                f"data.task={SUMS} is generated and reads no file, but data.path="
                f"{self.path} is set; leave out data.task to read the file"
            )
        for name in ("slip", "impatience"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"data.{name} is a probability, got {getattr(self, name)}")
        if not 2 <= self.min_terms <= self.max_terms:
            raise ValueError(
                "expected 2 <= data.min_terms <= data.max_terms, "
                f"got {self.min_terms} and {self.max_terms}"
            )
        if self.max_number < 9 or self.seed < 0 or self.train_size < 1 or self.heldout_size < 1:
            raise ValueError(
                "expected data.max_number >= 9, data.seed >= 0 and sizes >= 1, got "
                f"{self.max_number}, {self.seed}, {self.train_size}, {self.heldout_size}"
            )
        if self.prompt_template is not None:
            fill_template(self.prompt_template, "")

    def require_path(self) -> None:
        """Raises ValueError where the task reads a file and none is named."""
        if self.task not in ("auto", SUMS) and not self.path:
            raise ValueError(f"task {self.task} reads a file: set data.path=/path/to/train.jsonl")


_CHOICES = {
    "chat": ("auto", "on", "off"),
    "overlong_prompts": ("drop", "truncate", "error"),
    "duplicates": ("keep", "drop"),
    "unwinnable": ("error", "drop", "keep"),
}


def check_task(name: str) -> None:
    """Raises ValueError unless it can be `data.task`; imports nothing."""
    if name in ("auto", SUMS):
        return
    try:
        TASKS.check(name)
    except ValueError as error:
        raise ValueError(f"{error}; or auto, or {SUMS}") from error


def fill_template(template: str, question: str) -> str:
    """The prompt that a question becomes.

    Raises:
      ValueError: the template has no `{question}`, or other fields.
    """
    try:
        if "{question}" not in template:
            raise KeyError("question")
        return template.format(question=question)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            "data.prompt_template must be a format string whose only field is {question} "
            f"(literal braces doubled), got {template!r}"
        ) from error
