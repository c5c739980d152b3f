"""The curve of a run of `train.draft`: held-out accept length against the tokens trained on."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.run.files import replace

FILE, PICTURE = "curve.json", "curve.png"


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
        """Writes `curve.json` and `curve.png` to a directory."""
        curve = {**self.about, **self.state()}
        replace(out / FILE, [json.dumps(curve, indent=2).encode() + b"\n"])
        draw(curve, out / PICTURE)


def draw(curve: dict[str, Any], path: Path) -> None:
    """Draws the content of a `curve.json`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.4))
    points = curve["points"]
    temperatures = list(points[0]["accept_length"]) if points else []
    for color, temperature in zip(("#1f5fa8", "#d9730d"), temperatures, strict=False):
        tokens = [point["tokens"] / 1e3 for point in points]
        lengths = [point["accept_length"][temperature] for point in points]
        label = f"{curve['kind']} head, temperature {temperature}"
        axes.plot(tokens, lengths, color=color, marker="o", markersize=4, label=label)
        ngram = curve["ngram"].get(temperature)
        if ngram is not None and math.isfinite(ngram):
            label = f"n-grams, temperature {temperature}"
            axes.axhline(ngram, color=color, linestyle=":", label=label)
    axes.set_xlabel("tokens trained on, thousands (each pass counted)")
    axes.set_ylabel("tokens emitted per round (1 = no gain)")
    title = f"Held-out accept length: {curve['model']}, strategy {curve['strategy']}"
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_ylim(bottom=1.0)
    axes.grid(alpha=0.25)
    if temperatures:
        axes.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
