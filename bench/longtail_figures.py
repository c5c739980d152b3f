"""The figures of `bench.longtail`: what its measured rollouts come to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bench import chains
from bench.record import figure, paired_ratio_interval
from bench.trace import GOODPUT, PLAIN

if TYPE_CHECKING:
    from bench.longtail import Bench

NATURAL = (0.95, 1.05)  # accept length in chains over that of single turns


def figures_of(bench: Bench) -> dict[str, dict]:
    """Everything that the result file says of the measured rollouts."""
    of = {name: _column(bench, name) for name in next(iter(bench.records.values()))[0]}
    seconds = of["seconds"]
    names = [strategy.name for strategy in bench.control.strategies]
    best = min(names, key=lambda name: statistics.median(seconds[name]))
    result = {"best_static": figure(best, "strategy with the smallest median wall time")}
    result |= _wall_ratios(bench, seconds, best)
    spans = {name: bench.spans[name] for name in names}
    ideal, picks = ideal_seconds(spans, best, bench.spec.loop.buckets)
    result["ideal/best_static"] = figure(
        ideal / sum(seconds[best]),
        f"wall time of a controller that never errs, estimated, / {best}, over all turns: with the "
        f"strategy that was fastest at each size of the batch ({picks})",
    )
    for name, unit in (
        ("longest_rate", "tok/s of the longest sample since it got its slot, goodput / plain"),
        ("longest_rate_from_start", "the same since the rollout began, goodput / plain"),
        ("tail_seconds", f"seconds since {bench.tail} chains were left, goodput / plain"),
    ):
        result[f"{name}_ratio/goodput/plain"] = _ratio(of[name][GOODPUT], of[name][PLAIN], unit)
        against = unit.replace("plain", best)
        result[f"{name}_ratio/goodput/best_static"] = _ratio(
            of[name][GOODPUT], of[name][best], against
        )
    reading = bench.prompt_seconds()
    for arm in bench.arms:
        result |= _of_arm(bench, arm, of, reading[arm])
    work = bench.work
    result["tokens"] = figure(sum(work.lengths), "tokens of one rollout")
    result["length_median"] = figure(statistics.median(work.lengths), "tokens")
    result["length_p99"] = figure(float(np.quantile(work.lengths, 0.99, method="hazen")), "tokens")
    result["length_longest"] = figure(max(work.lengths), "tokens")
    result["calibration_seconds"] = figure(bench.calibration_seconds, "s, once per engine")
    result["compilations"] = figure(bench.compiled_meanwhile, "programs built while measuring")
    return result


def ideal_seconds(
    spans: Mapping[str, Sequence[Sequence[chains.Span]]], best: str, buckets: Sequence[int]
) -> tuple[float, str]:
    """Seconds of the rollouts of `best` if each bucket had run as fast as in the fastest arm.

    A little too few: what is fastest by chance counts as well.

    Args:
      spans: of each rollout, by static strategy. buckets: sizes of the batch, increasing.

    Returns:
      the seconds, and the strategy of each bucket for people.
    """
    work = {arm: _work_by_bucket(rollouts, buckets) for arm, rollouts in spans.items()}
    total, picks = 0.0, []
    for bucket, (tokens, _) in sorted(work[best].items()):
        each = {arm: found[bucket][1] / found[bucket][0] for arm, found in work.items()
                if bucket in found}  # fmt: skip
        fastest = min(each, key=each.__getitem__)
        total += tokens * each[fastest]
        picks.append(f"{bucket}: {fastest}")
    return total, ", ".join(picks)


def _work_by_bucket(
    rollouts: Sequence[Sequence[chains.Span]], buckets: Sequence[int]
) -> dict[int, tuple[int, float]]:
    """Tokens and seconds of all rollouts together, by bucket."""
    work: dict[int, tuple[int, float]] = {}
    for spans in rollouts:
        begin = 0.0
        for span in spans:
            bucket = next(b for b in buckets if b >= span.running)
            tokens, seconds = work.get(bucket, (0, 0.0))
            work[bucket] = (
                tokens + span.slot_rounds + span.accepted,
                seconds + span.until - begin,
            )
            begin = span.until
    return work


def _column(bench: Bench, name: str) -> dict[str, list[float]]:
    return {arm: [record[name] for record in bench.records[arm]] for arm in bench.arms}


def _ratio(a: Sequence[float], b: Sequence[float], unit: str) -> dict:
    value, low, high = paired_ratio_interval(a, b)
    return figure(value, unit, [low, high])


def _wall_ratios(bench: Bench, seconds: Mapping[str, list[float]], best: str) -> dict[str, dict]:
    """Goodput's wall time against plain decoding's and the best static strategy's."""
    whole = bench.calibration_seconds
    charges = {
        "": (whole, "its calibration charged to each rollout"),
        "_calibration_shared": (
            whole / len(seconds[GOODPUT]),
            f"its calibration charged once to {len(seconds[GOODPUT])} rollouts",
        ),
        "_calibration_apart": (0.0, "its calibration left out"),
    }
    result = {}
    for suffix, (charge, how) in charges.items():
        mine = [value + charge for value in seconds[GOODPUT]]
        for name, other in ((PLAIN, PLAIN), ("best_static", best)):
            result[f"wall_ratio/goodput/{name}{suffix}"] = _ratio(
                mine, seconds[other], f"wall time, goodput / {other}, median over turns, {how}"
            )
    return result


def _of_arm(bench: Bench, arm: str, of: Mapping[str, Mapping], reading: float) -> dict[str, dict]:
    rollout = bench.rollouts[arm]
    wall = statistics.median(of["seconds"][arm])
    units = {
        "seconds": "s of wall time",
        "tail_seconds": f"s since {bench.tail} chains were left",
        "longest_rate": "tok/s of the longest sample since it got its slot",
        "longest_rate_from_start": "tok/s of the longest sample since the rollout began",
    }
    result = {}
    for name, unit in units.items():
        values = of[name][arm]
        ends = [min(values), max(values)]
        result[f"{name}/{arm}"] = figure(statistics.median(values), unit, ends)
    result[f"tokens_per_sec/{arm}"] = figure(rollout.tokens / wall, "tok/s, all samples")
    result[f"accept_length/{arm}"] = figure(
        chains.accept_length(rollout.histograms), "tokens per slot and round"
    )
    result[f"prompt_reading_share/{arm}"] = figure(
        reading / wall, f"share of wall time, estimated ({reading:.3g} s)"
    )
    result[f"samples_different/{arm}"] = figure(
        len(bench.different[arm]), "samples with other tokens than plain decoding"
    )
    return result


def naturalness(chained: np.ndarray, single: np.ndarray, strategy: str) -> dict[str, dict]:
    """Accept length in chains against that of single turns; rows are resampled for the interval."""
    rng = np.random.default_rng(0)

    def resampled(rows: np.ndarray) -> list[float]:
        picks = rng.integers(len(rows), size=(1000, len(rows)))
        return [chains.accept_length(rows[pick]) for pick in picks]

    a, b = chains.accept_length(chained), chains.accept_length(single)
    ratios = np.array(resampled(chained)) / np.array(resampled(single))
    low, high = np.quantile(ratios, [0.025, 0.975])
    how = f"tokens per round of {strategy}"
    return {
        "accept_length_chained": figure(a, f"{how}, chains of tasks"),
        "accept_length_single": figure(b, f"{how}, tasks one by one"),
        "accept_length_ratio": figure(a / b, "chains / tasks one by one", [low, high]),
    }


def judge_naturalness(found: Mapping[str, Mapping]) -> str:
    """One line, and a plain one if the text is not natural."""
    ratio = found["accept_length_ratio"]["value"]
    text = (
        f"accept length {found['accept_length_chained']['value']:.2f} in chains, "
        f"{found['accept_length_single']['value']:.2f} in single turns: {ratio:.3f}x"
    )
    if NATURAL[0] <= ratio <= NATURAL[1]:
        return text
    return (
        f"WARNING: {text}, outside {NATURAL[0]} to {NATURAL[1]}: the chained text is not like "
        "natural text, and its speed says nothing of natural text; use --keep_turns 0, other "
        "tasks, or more of them"
    )


def report(figures: Mapping[str, Mapping], arms: Sequence[str]) -> str:
    """A table for people."""

    def value(name: str) -> float:
        return figures[name]["value"]

    lines = []
    for arm in arms:
        lines.append(
            f"{arm:>8}: {value(f'seconds/{arm}'):7.2f} s  tail {value(f'tail_seconds/{arm}'):6.2f} "
            f"s  longest {value(f'longest_rate/{arm}'):6.0f} tok/s  accept length "
            f"{value(f'accept_length/{arm}'):.2f}  prompts "
            f"{100 * value(f'prompt_reading_share/{arm}'):.0f}%  "
            f"{value(f'samples_different/{arm}')} samples differ"
        )
    lines.append(f"{'ideal/best_static':>52}: {value('ideal/best_static'):.3f}")
    for name, entry in figures.items():
        if "_ratio/" in name:
            low, high = entry["interval"]
            lines.append(f"{name:>52}: {entry['value']:.3f} [{low:.3f}, {high:.3f}]")
    return "\n".join(lines)
