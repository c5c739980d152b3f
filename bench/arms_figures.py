"""Figures of `bench.arms`: medians, ratios with intervals, and a table for the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.equality import Equality
from bench.record import figure, median_ratio_interval

RATE = "rollout/tokens_per_sec"
LONGEST = "rollout/longest_sample_tokens_per_sec"
ACCEPT = "rollout/spec_accept_length"

# Arms compared: the faster one expected first.
PAIRS = (
    ("online", "none"),
    ("online", "frozen"),
    ("frozen", "none"),
    ("online_random", "none"),
)

Records = Sequence[Mapping]


def series(records: Records, arm: str, metric: str, after: int = 0) -> list[float]:
    """A metric of one arm over the steps that have it, step `after` and earlier ones left out."""
    mine = sorted((r for r in records if r["arm"] == arm), key=lambda r: r["step"])
    return [r[metric] for r in mine if r["step"] > after and r.get(metric) is not None]


def spread(values: Sequence[float], unit: str) -> dict:
    """The median, with the quartiles as interval."""
    if not values:
        return figure(None, unit)
    quartiles = [float(np.quantile(values, q)) for q in (0.25, 0.75)]
    return figure(float(np.median(values)), unit, quartiles)


def figures(records: Records, arms: Sequence[str], untimed: int, equality: Equality) -> dict:
    """Everything that arms.json holds but the predictions.

    Args:
      untimed: first steps that are left out of timings.
    """
    result = equality_figures(equality)
    result["untimed_steps"] = figure(untimed, "first steps left out of timings")
    for arm in arms:
        result |= arm_figures(records, arm, untimed)
    last = max(r["step"] for r in records)
    late = last - max(1, (last - untimed) // 3)
    for one, other in PAIRS:
        if one not in arms or other not in arms:
            continue
        for name, metric, after in (
            ("ratio", RATE, untimed),
            ("late_ratio", RATE, late),
            ("longest_ratio", LONGEST, untimed),
        ):
            value, low, high = ratio(records, one, other, metric, after)
            unit = "ratio of medians"
            result[f"{name}/{one}/{other}"] = figure(value, unit, [low, high])
    return result


def equality_figures(equality: Equality) -> dict:
    verdict = f"steps bit-identical: {equality.bit_identical} of {equality.steps}"
    result = {"steps_bit_identical": figure(equality.bit_identical, f"of {equality.steps} steps")}
    result["equality"] = figure(verdict, "verdict")
    for arm, steps in equality.identical.items():
        result[f"steps_bit_identical/{arm}"] = figure(steps, f"of {equality.steps} steps")
        if arm in equality.ended:
            result[f"first_difference/{arm}"] = figure(equality.ended[arm], "verdict")
    return result


def arm_figures(records: Records, arm: str, untimed: int) -> dict:
    """Speed, seconds, acceptance, entropy and reward of one arm."""
    result = {
        f"tokens_per_sec/{arm}": spread(series(records, arm, RATE, untimed), "tok/s"),
        f"longest_tokens_per_sec/{arm}": spread(series(records, arm, LONGEST, untimed), "tok/s"),
    }
    for part in ("rollout", "train", "draft"):
        values = series(records, arm, f"time/{part}", untimed)
        if values:
            result[f"seconds_{part}/{arm}"] = spread(values, "s per step")
    for name, metric, unit in (
        ("accept_length", ACCEPT, "tokens per round"),
        ("mtp_loss", "train/mtp_loss", "nats per token"),
        ("entropy", "train/entropy", "nats per token"),
        ("reward", "rollout/reward", "mean per answer"),
    ):
        values = series(records, arm, metric)
        if values:
            result[f"{name}_first/{arm}"] = figure(values[0], unit)
            result[f"{name}_last/{arm}"] = figure(values[-1], unit)
    shares = draft_shares(records, arm, untimed)
    if shares:
        result[f"draft_training_share/{arm}"] = spread(shares, "% of the policy update")
    return result


def draft_shares(records: Records, arm: str, untimed: int) -> list[float]:
    """Per step, draft training in percent of the policy update that it comes on top of."""
    return [
        100 * r["time/draft"] / r["time/train"]
        for r in records
        if r["arm"] == arm and r["step"] > untimed and r.get("time/draft") and r["time/train"]
    ]


def ratio(
    records: Records, one: str, other: str, metric: str, after: int
) -> tuple[float, float, float]:
    """How many times `one` is `other` in a metric: of medians, with an interval."""
    return median_ratio_interval(
        series(records, one, metric, after), series(records, other, metric, after)
    )


def print_table(figures: Mapping[str, Mapping], arms: Sequence[str]) -> None:
    """One row per arm."""
    table = Table(title="medians over the timed steps", title_justify="left")
    columns = {
        "tok/s": "tokens_per_sec",
        "longest tok/s": "longest_tokens_per_sec",
        "rollout s": "seconds_rollout",
        "policy s": "seconds_train",
        "draft s": "seconds_draft",
        "accept": "accept_length_first",
        "to": "accept_length_last",
        "reward": "reward_last",
    }
    table.add_column("arm")
    for label in columns:
        table.add_column(label, justify="right")
    for arm in arms:
        cells = [figures.get(f"{name}/{arm}", {}).get("value") for name in columns.values()]
        table.add_row(arm, *("-" if v is None else f"{v:.4g}" for v in cells))
    console = Console(soft_wrap=True)
    console.print(table, soft_wrap=False)
    for one, other in PAIRS:
        entry = figures.get(f"ratio/{one}/{other}")
        if entry:
            low, high = entry["interval"]
            console.print(
                f"{one} / {other}: {entry['value']:.2f}x [{low:.2f}, {high:.2f}]", markup=False
            )
