"""The curve of a run of `train.draft`: held-out accept length against the tokens trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.run.files import replace

FILE = "curve.json"


@dataclass
class Curve:
    """Accept lengths of the head as it is trained, beside those of n-grams on the same prompts.

    Attributes:
      about: what was measured: model, kind, strategy, seed, loss, number of prompts.
      ngram: accept length of n-grams by temperature, written as text.
      points: for each evaluation {"step", "tokens", "accept_length": {temperature: value}}, where
        tokens are those that the loss has seen, each as often as it was trained on.
    """

    about: dict[str, Any]
    ngram: dict[str, float] = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint's metadata has."""
        return {"ngram": self.ngram, "points": self.points}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes the points of a checkpoint."""
        self.ngram, self.points = dict(state["ngram"]), list(state["points"])

    def write(self, out: Path) -> None:
        """Writes `curve.json` to a directory."""
        curve = {**self.about, **self.state()}
        replace(out / FILE, [json.dumps(curve, indent=2).encode() + b"\n"])
