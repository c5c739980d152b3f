"""Two environments for the embedded policies: a number to guess, and a calculator."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

from train.environments.calls import Messages
from train.rewards.builtin import EXACT


class Guess:
    """Hides a number from 0 to 9, which the row decides; a right guess has reward 1.

    The policy reads `>` if the number is larger than its guess, and `<` otherwise.
    """

    def reset(self, row: Mapping[str, Any]) -> Messages:
        """Begins, see `train.environments.calls`."""
        self.number = zlib.crc32(str(row["prompt"]).encode()) % 10
        return [{"role": "user", "content": "?####"}]

    def step(self, messages: Messages) -> tuple[Messages, float, bool]:
        """Reads a guess."""
        digits = re.search(r"\d+", messages[-1]["content"])
        guess = int(digits[0][:4]) if digits else 10
        if guess == self.number:
            return [], 1.0, True
        return [{"role": "user", "content": f"{'<>'[guess < self.number]}####"}], 0.0, False

    def restore(self, messages: Messages) -> None:
        """There is nothing to restore: the row says all."""


class Calculator:
    """Adds two numbers where the policy's message ends in `a+b=`, and judges any other message.

    Such messages end at `=`, with rollout.stop; the policy goes on behind the sum. A message that
    ends otherwise ends the sample, which has reward 1 if its answer is right.
    """

    def reset(self, row: Mapping[str, Any]) -> Messages:
        """Begins, see `train.environments.calls`."""
        self.answer, prompt = row["answer"], row["prompt"]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    def step(self, messages: Messages) -> tuple[Messages, float, bool]:
        """Adds, or judges the answer."""
        text = messages[-1]["content"]
        numbers = re.search(r"(\d{1,9})\+(\d{1,9})=$", text)
        if numbers is None:
            return [], EXACT(text, self.answer), True
        total = int(numbers[1]) + int(numbers[2])
        return [{"role": "tool", "content": str(total)}], 0.0, False

    def restore(self, messages: Messages) -> None:
        """There is nothing to restore: messages say all."""
