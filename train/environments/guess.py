"""A number to guess: after each guess the environment says in which direction the number lies."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

from train.environments.calls import Messages

MOST = 9


class Guess:
    """Hides a number from 0 to 9, which the row decides; a right guess has reward 1.

    The policy reads `>` if the number is larger than its guess, and `<` otherwise.
    """

    def reset(self, row: Mapping[str, Any]) -> Messages:
        """Begins, see `train.environments.calls`."""
        self.number = zlib.crc32(str(row["prompt"]).encode()) % (MOST + 1)
        return [{"role": "user", "content": "?####"}]

    def step(self, messages: Messages) -> tuple[Messages, float, bool]:
        """Reads a guess."""
        digits = re.search(r"\d+", messages[-1]["content"])
        guess = int(digits[0][:4]) if digits else MOST + 1
        if guess == self.number:
            return [], 1.0, True
        return [{"role": "user", "content": f"{'<>'[guess < self.number]}####"}], 0.0, False

    def restore(self, messages: Messages) -> None:
        """There is nothing to restore: the row says all."""
