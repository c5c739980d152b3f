"""What `bench.gpu` is to reach, and whether its figures say that it did."""

from __future__ import annotations

from collections.abc import Mapping

from bench.common import figure

MET, MISSED, UNKNOWN = "met", "missed", "not measured"
LONG = 8192  # positions of a prefix from which on bandwidth counts
SHARE = 0.75
CEILINGS = {
    "draft_over_verify": (0.15, "drafting takes at most 15% of verification"),
    "verify_16_rows_over_1": (1.15, "verifying 16 rows takes at most 1.15 times one row"),
    "noise_and_accept_share": (0.05, "noise and acceptance take at most 5% of a round"),
}

Figures = Mapping[str, Mapping]


def verdicts(figures: Figures, long: int = LONG) -> dict[str, dict]:
    """`target/<name>`: met, missed or not measured, and what was measured.

    Args:
      long: positions from which on a prefix is long.
    """
    result = {}
    for name, found in _by_kernel(figures, "values").items():
        sentence = "every case equals the float32 reference"
        result[f"target/values/{name}"] = _verdict(sentence, found, max, lambda worst: worst <= 1)
    for name, found in _by_kernel(figures, "bandwidth_share", long).items():
        sentence = f"at least {SHARE:.0%} of the copy's bandwidth from a prefix of {long} on"
        result[f"target/bandwidth/{name}"] = _verdict(
            sentence, found, min, lambda least: least >= SHARE
        )
    for name, (most, sentence) in CEILINGS.items():
        found = [figures[name]["value"]] if name in figures else []
        result[f"target/{name}"] = _verdict(
            sentence, found, max, lambda value, most=most: value <= most
        )
    for name in ("values", "bandwidth"):
        if not any(key.startswith(f"target/{name}/") for key in result):
            result[f"target/{name}"] = figure(UNKNOWN, "no kernel was measured")
    return result


def _by_kernel(figures: Figures, kind: str, long: int = 0) -> dict[str, list]:
    """Values of `<kind>/<kernel>/<cell>` by kernel, of long prefixes only."""
    found: dict[str, list] = {}
    for name, entry in figures.items():
        first, *rest = name.split("/")
        if first != kind:
            continue
        prefix = [int(part.removeprefix("prefix_")) for part in rest if "prefix_" in part]
        if not prefix or prefix[0] >= long:
            found.setdefault(rest[0], []).append(entry["value"])
    return found


def _verdict(sentence: str, found: list, worst_of, reached) -> dict:
    """What misses counts whatever else is missing; what is met needs every figure."""
    known = [value for value in found if value is not None]
    if not known:
        return figure(UNKNOWN, sentence)
    worst = worst_of(known)
    missing = len(found) - len(known)
    said = f"{sentence}; measured {worst:.3g}" + (f", {missing} not measured" if missing else "")
    if not reached(worst):
        return figure(MISSED, said)
    return figure(UNKNOWN if missing else MET, said)
