"""The picture of `bench.draft losses`."""

from __future__ import annotations

import json
from pathlib import Path

from bench.plots import plt, save, tidy

COLORS = {
    "ce": "#7a7a7a", "kl": "#1f5fa8", "lk_alpha": "#d9730d", "lk_lambda": "#2a8c4a",
    "tv": "#b8336a", "tv_e2e": "#6b4fa0",
}  # fmt: skip
TITLES = {"T_0": "temperature 0", "T_1": "temperature 1"}


def draw(path: Path) -> Path:
    """Draws accept length against training tokens, and acceptance against entropy.

    Returns:
      the path of the picture, beside the result file.
    """
    result = json.loads(path.read_text(encoding="utf-8"))
    figures, settings = result["figures"], result["settings"]
    figure, axes = plt.subplots(1, 3, figsize=(16, 5), layout="constrained")
    for axis, (name, title) in zip(axes, TITLES.items(), strict=False):
        for loss, color in COLORS.items():
            prefix = f"accept_length/{loss}/{name}/tokens_"
            found = {
                int(k.removeprefix(prefix)): v for k, v in figures.items() if k.startswith(prefix)
            }
            if not (points := sorted(found)):
                continue  # not measured yet
            axis.plot(
                points, [found[t]["value"] for t in points], "o-", color=color, label=loss,
                markersize=4,
            )  # fmt: skip
            low, high = found[points[-1]]["interval"]
            axis.plot([points[-1]] * 2, [low, high], color=color, alpha=0.35, linewidth=3)
        tidy(axis, f"Accept length at {title}")
        axis.set_xlabel("training tokens")
    axes[0].set_ylabel("tokens per round, chain of 4")
    axes[0].legend(frameon=False)
    for loss, color in COLORS.items():
        prefix = f"acceptance/{loss}/"
        keys = [k.removeprefix("acceptance/") for k in figures if k.startswith(prefix)]
        axes[2].plot(
            [figures[f"mean_entropy/{k}"]["value"] for k in keys],
            [figures[f"acceptance/{k}"]["value"] for k in keys],
            "o-", color=color, label=loss, markersize=4,
        )  # fmt: skip
    tidy(axes[2], "Acceptance of the first drafted token")
    axes[2].set_xlabel("entropy of the policy, nats (means of bins)")
    axes[2].set_ylabel("mean of sum min(p, q)")
    model = Path(settings["model"]).name
    figure.suptitle(
        f"{model}: heads trained at temperature 1 from one random start, {settings['updates']} "
        f"updates; bars at the last point: 95% over {settings['prompts']} prompts"
    )
    return save(figure, path.with_suffix(".png"))
