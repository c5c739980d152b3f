"""The figure of `bench.longtail`: running slots against time, coloured by strategy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

from bench.trace import Trace  # noqa: E402

TITLES = {"plain": "plain decoding", "goodput": "goodput control"}


def draw(path: str | Path, trace: Trace, figures: Mapping[str, Mapping]) -> None:
    """One panel per arm, over one time axis."""
    names = list(trace.settings["strategies"])
    shades = plt.get_cmap("viridis")
    colours = {name: shades(i / max(len(names) - 1, 1)) for i, name in enumerate(names)}
    canvas, axes = plt.subplots(
        len(trace.spans), 1, figsize=(10, 3 * len(trace.spans)), sharex=True, sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for axis, (arm, spans) in zip(axes[:, 0], trace.spans.items(), strict=True):
        begin = 0.0
        for span in spans:
            axis.bar(
                begin, span.running, width=span.until - begin, align="edge",
                color=colours.get(span.strategy, "grey"), linewidth=0,
            )  # fmt: skip
            begin = span.until
        seconds = figures[f"seconds/{arm}"]["value"]
        axis.set_title(f"{TITLES.get(arm, arm)}: median {seconds:.2f} s", loc="left")
        axis.set_ylabel("running slots")
        axis.set_yscale("symlog", base=2, linthresh=1)
        axis.yaxis.set_major_formatter("{x:.0f}")
    used = {span.strategy for spans in trace.spans.values() for span in spans}
    handles = [Patch(color=colours[n], label=n) for n in names if n in used]
    axes[0, 0].legend(handles=handles, title="strategy", loc="upper right")
    axes[-1, 0].set_xlabel("seconds since the rollout began (last measured rollout)")
    settings = trace.settings
    canvas.suptitle(
        f"{Path(settings['model']).name}: {len(trace.lengths)} samples, {settings['slots']} slots, "
        f"longest {max(trace.lengths)} tokens"
    )
    canvas.savefig(path, dpi=110)
    plt.close(canvas)
