"""The curve of a run of `train.draft`: held-out accept length against the tokens trained on."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specjax.command_line import ConfigError

FILE, PICTURE = "curve.json", "curve.png"
# What a point depends on apart from the head -> the setting, or the words, for messages. What else
# `about` has cannot change while a run goes on.
MEASURED = {"strategy": "eval.strategy", "seed": "eval.seed", "prompts": "number of prompts"}


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

    def at(self, step: int) -> dict[str, Any] | None:
        """The point of a step; None: it was not evaluated."""
        return next((point for point in self.points if point["step"] == step), None)

    def state(self) -> dict[str, Any]:
        """For a checkpoint's metadata."""
        return {"about": self.about, **self._lengths()}

    def _lengths(self) -> dict[str, Any]:
        return {"ngram": self.ngram, "points": self.points}

    def load_state(self, state: dict[str, Any], grows: bool = True) -> None:
        """Takes the points of a checkpoint.

        Args:
          state: result of `state`; versions before it was compared have no `about` in it.
          grows: whether further points are measured.

        Raises:
          ConfigError: these would be measured under other settings.
        """
        about = state.get("about", {})
        other = [name for name in MEASURED if about.get(name, self.about[name]) != self.about[name]]
        if other and grows and state["points"]:
            was, now = (
                ", ".join(f"{MEASURED[name]}={of[name]}" for name in other)
                for of in (about, self.about)
            )
            raise ConfigError(
                f"the points of the curve in the checkpoint were measured with {was}, further ones "
                f"would be with {now}, and one curve has points that can be compared; resume with "
                "the same settings of eval"
            )
        if not grows and state["points"]:
            self.about = self.about | about
        self.ngram, self.points = dict(state["ngram"]), list(state["points"])

    def write(self, out: Path) -> None:
        """Writes `curve.json` and `curve.png` to a directory; a file there is replaced at once."""
        text = json.dumps({**self.about, **self._lengths()}, indent=2) + "\n"
        partial = out / f"{FILE}.partial"
        partial.write_text(text)
        partial.replace(out / FILE)
        draw(json.loads(text), out / PICTURE)


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
