"""Pictures of result files: what all of them share."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402


def tidy(axis: Axes, title: str = "", grid: str = "both") -> None:
    """Sets a bold title on the left, a faint grid, and no frame above and on the right.

    Args:
      grid: `x`, `y` or `both`: which lines.
    """
    if title:
        axis.set_title(title, loc="left", fontsize=11, weight="bold")
    axis.grid(alpha=0.25, axis=grid)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: str | Path) -> Path:
    """Writes a picture, frees its memory, and returns its path."""
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return Path(path)
