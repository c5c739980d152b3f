"""The picture of `bench.spot`: a rollout of both arms as a time line, and the seconds of a step."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

COLORS = {
    "busy": "#4c78a8",
    "idle": "#e8e8e8",
    "draft_gap": "#f58518",
    "draft_after": "#b279a2",
}
LABELS = {
    "busy": "samples run",
    "idle": "nothing to do",
    "draft_gap": "trains the head, in a gap",
    "draft_after": "trains the head, after the rollout",
}
TITLES = {"after": "all updates after the rollout", "gaps": "updates in the gaps of the rollout"}

Events = Sequence[dict]


def draw(result: Path, untimed: int) -> Path:
    """Draws a picture beside a result file, from it and from the events beside it.

    Args:
      result: `<name>.json`, beside which `<name>.jsonl` lies.
      untimed: first steps that are left out.
    """
    lines = result.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    events = [e for e in map(json.loads, lines) if e["step"] > untimed]
    figures = json.loads(result.read_text(encoding="utf-8"))["figures"]
    step = typical_step(events)
    drawing, grid = plt.subplot_mosaic(
        [["after", "after", "bars"], ["gaps", "gaps", "bars"]], figsize=(12, 5)
    )
    end = max(e["end"] for e in events if e["step"] == step)
    for arm in TITLES:
        timeline(grid[arm], [e for e in events if e["arm"] == arm and e["step"] == step])
        grid[arm].set_xlim(0, end * 1.02)
        grid[arm].set_title(f"{TITLES[arm]} (step {step})", fontsize=10, loc="left")
    grid["gaps"].set_xlabel("seconds since the rollout began")
    seconds(grid["bars"], figures)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[name]) for name in COLORS]
    drawing.legend(handles, LABELS.values(), loc="lower center", ncols=4, frameon=False)
    delay, gained = figures["tail_delay"], figures["seconds_gained"]
    drawing.suptitle(
        f"{gained['value']:.2f} s gained per step; the rollout ends later by "
        f"{delay['value']:+.1%} of its tail [{delay['interval'][0]:+.1%}, "
        f"{delay['interval'][1]:+.1%}]"
    )
    drawing.tight_layout(rect=(0, 0.06, 1, 1))
    out = result.with_suffix(".png")
    drawing.savefig(out, dpi=90)
    plt.close(drawing)
    return out


def typical_step(events: Events) -> int:
    """The step whose training in gaps is the median of all steps."""
    spent = dict.fromkeys((e["step"] for e in events), 0.0)
    for event in events:
        if event["arm"] == "gaps" and event["event"] == "draft_gap":
            spent[event["step"]] += event["end"] - event["start"]
    middle = statistics.median_high(spent.values())
    return next(step for step, value in spent.items() if value == middle)


def timeline(axis: Axes, events: Events) -> None:
    """One bar per replica, and where the rollout ends."""
    replicas = sorted({e["replica"] for e in events} - {None})
    for name in COLORS:  # in this order: training is drawn over idle time
        for event in (e for e in events if e["event"] == name):
            height = 0.7 if name in ("busy", "idle") else 0.45
            axis.barh(
                replicas.index(event["replica"]),
                event["end"] - event["start"],
                left=event["start"],
                height=height,
                color=COLORS[name],
                edgecolor="white" if name.startswith("draft") else "none",
                linewidth=0.6,
            )
    end = next(e["end"] for e in events if e["event"] == "rollout")
    axis.axvline(end, color="black", linewidth=1)
    axis.set_yticks(range(len(replicas)), [f"replica {r}" for r in replicas])
    axis.set_ylim(len(replicas) - 0.5, -0.5)
    axis.spines[["top", "right"]].set_visible(False)


def seconds(axis: Axes, figures: dict) -> None:
    """Rollout and what is left of draft training, stacked, for both arms."""
    for place, arm in enumerate(TITLES):
        rollout = figures[f"rollout_seconds/{arm}"]["value"]
        draft = figures[f"draft_seconds/{arm}"]["value"]
        axis.bar(place, rollout, color=COLORS["busy"])
        axis.bar(place, draft, bottom=rollout, color=COLORS["draft_after"])
        axis.text(place, rollout + draft, f"{rollout + draft:.2f} s", ha="center", va="bottom")
    axis.set_xticks(range(len(TITLES)), list(TITLES))
    axis.set_title("median seconds of a step\n(without the policy update)", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
