"""What the figures of the queue are to reach, and whether they do."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bench.gpu.table import PARTS, Part

MET, MISSED, UNKNOWN = "met", "missed", "not measured"


class Target(NamedTuple):
    """One row.

    Attributes:
      part, figures: whose figures count, and which, as shell patterns; the worst of them does.
        Every part of the table that matches has such figures.
      bounds: by card. most: whether the bound is the most that is allowed, or the least.
      unit: of the bound.
    """

    name: str
    part: str
    figures: str
    bounds: Mapping[str, float]
    most: bool
    unit: str


def _both(bound: float) -> dict[str, float]:
    return {"h100": bound, "h200": bound}


def _rows() -> tuple[Target, ...]:
    def most(name, part, figures, bounds, unit) -> Target:
        return Target(name, part, figures, bounds, True, unit)

    def least(name, part, figures, bounds, unit) -> Target:
        return Target(name, part, figures, bounds, False, unit)

    times, share = "times", "of a copy's bytes/s"
    graph, ms = "samples whose tokens differ", "ms"
    return (
        most("one graph per chunk changes no token", "one_graph", "differ/*", _both(0), graph),
        most(
            "kernels equal the float32 reference",
            "values*",
            "values/*",
            _both(1),
            "of the difference that is allowed",
        ),
        least(
            "attention, prefix of 8k",
            "attention/[0-9]*",
            "share/best/*/8192/8192",
            _both(0.8),
            share,
        ),
        most(
            "plain 8B step, batch 1",
            "plain/1",
            "ms/36_layers/1024/best",
            {"h100": 5.9, "h200": 4.1},
            ms,
        ),
        least("share of a plain step, 8B", "plain/1", "share/36_layers/*/best", _both(0.85), share),
        least(
            "share of a plain step, 1.7B",
            "plain_1.7B/1",
            "share/28_layers/*/best",
            _both(0.7),
            share,
        ),
        most("135M plain step", "launches/off", "ms/batch_1/best", _both(1.0), ms),
        most("verify 16 rows / 1, batch 1", "rows/1", "rows_over_1/16", _both(1.05), times),
        most(
            "verify 16 rows / 1, batch 8",
            "rows/8",
            "rows_over_1/16",
            {"h100": 1.12, "h200": 1.15},
            times,
        ),
        most(
            "verify 16 rows / 1, batch 32",
            "rows/32",
            "rows_over_1/16",
            {"h100": 1.9, "h200": 2.3},
            times,
        ),
        most(
            "4 draft steps / verification, whole vocabulary",
            "round_parts",
            "draft_over_verify",
            _both(0.48),
            times,
        ),
        most(
            "round 4_1_5 / plain step, batch 1", "round/1", "round_over_plain", _both(1.55), times
        ),
        most(
            "round 4_1_5 / plain step, batch 8", "round/8", "round_over_plain", _both(1.55), times
        ),
        most("a round beside its parts", "round_parts", "us_beside_parts", _both(50), "us"),
    )


TARGETS: tuple[Target, ...] = _rows()


class Verdict(NamedTuple):
    """word: met, missed or not measured. value: the worst figure, None if there is none.
    missing: figures that were not measured; a part without any counts as one."""

    target: Target
    card: str
    word: str
    value: float | None = None
    missing: int = 0


def verdict(
    target: Target, card: str, found: Mapping[str, Mapping], table: Sequence[Part] = PARTS
) -> Verdict:
    """What misses counts whatever else is missing; what is met needs every figure of every part.

    A figure is judged however its part ended: a part fails because a result is wrong.

    Args:
      found: records of this card, by part.
    """
    values = list(_values(target, found, table))
    known = [value for value in values if value is not None]
    bound = target.bounds.get(card)
    if not known or bound is None:
        return Verdict(target, card, UNKNOWN, None, len(values))
    worst = max(known) if target.most else min(known)
    missing = len(values) - len(known)
    if worst > bound if target.most else worst < bound:
        return Verdict(target, card, MISSED, worst, missing)
    return Verdict(target, card, UNKNOWN if missing else MET, worst, missing)


def _values(
    target: Target, found: Mapping[str, Mapping], table: Sequence[Part]
) -> Iterator[float | None]:
    """None for each figure that is missing, and for each part that has none."""
    for part in table:
        if fnmatch.fnmatchcase(part.name, target.part):
            figures = found[part.name]["figures"] if part.name in found else {}
            names = fnmatch.filter(figures, target.figures)
            yield from (figures[name]["value"] for name in names)
            if not names:
                yield None


def verdicts(card: str, found: Mapping[str, Mapping]) -> list[Verdict]:
    """Of all targets, from one card's records."""
    return [verdict(target, card, found) for target in TARGETS]
