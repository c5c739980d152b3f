"""A calculator: where the policy's message ends in `a+b=`, the environment writes the sum.

Such messages end at `=`, with rollout.stop_token_ids or rollout.stop; the policy goes on behind the
sum. A message that ends otherwise ends the sample, which has reward 1 if its answer is right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from train.environments.calls import Messages
from train.rewards.builtin import EXACT


class Calculator:
    """Adds two numbers for the policy."""

    def reset(self, row: Mapping[str, Any]) -> Messages:
        """Begins, see `train.environments.calls`."""
        self.answer = row["answer"]
        prompt = row["prompt"]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    def step(self, messages: Messages) -> tuple[Messages, float, bool]:
        """Adds, or judges the answer."""
        text = messages[-1]["content"]
        numbers = re.search(r"(\d{1,9})\+(\d{1,9})=$", text)
        if numbers is not None:
            total = int(numbers[1]) + int(numbers[2])
            return [{"role": "tool", "content": str(total)}], 0.0, False
        return [], EXACT(text, self.answer), True

    def restore(self, messages: Messages) -> None:
        """There is nothing to restore: messages say all."""
