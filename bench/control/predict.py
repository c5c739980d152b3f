"""`python -m bench.control predict`: what recorded acceptance would give on other chips.

`bench.train arms` records how many tokens each sample has, and how many rounds emitted how many of
them. This module replays those rollouts through a table of step costs: every sample of a rollout
starts at once (as many as the table's largest batch, or `--slots`; the rest are queued), each round
costs what the table says for the samples still running, and the batch shrinks to the tail.

    plain        a sample runs `length` steps       seconds(step) = plain[running]
    speculative  a sample runs `sum(histogram)`     seconds(round) = verify[rows][running]
                 rounds                                              + steps * draft[running]

A round costs the same however many tokens it emits, so the order of a sample's rounds does not
matter, and histograms lose nothing. Left out, for both sides alike: prefill, sampling, the host,
and that later steps read a longer cache than the table's (`bench.control replay` counts that).

A cost table is JSON: `name`, `source` ("measured: .." or "modelled: .."), `context` (tokens in the
cache of each sample), `batches` [N], and in seconds `plain` [N], `draft` [N] (one drafted token)
and `verify`, a map from rows per sample to [N]. `longer` may hold the same at a longer `context`,
with null for batches that do not fit the memory. Between entries costs are interpolated linearly,
and so they are over the tokens in the caches of all samples together.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.command import user_errors
from bench.record import write_result
from specjax.command_line import ArgumentParser

_LEAST_SHARE = 0.1  # smallest share of a cost that is left at a short context


class Parts(NamedTuple):
    """A figure of each part of a round: plain [N], draft [N], verify by rows [N]."""

    plain: np.ndarray
    draft: np.ndarray
    verify: dict[int, np.ndarray]

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Parts:
        """Reads seconds, null as NaN."""
        verify = {int(rows): np.array(row, float) for rows, row in raw["verify"].items()}
        return cls(np.array(raw["plain"], float), np.array(raw["draft"], float), verify)

    @property
    def lengths(self) -> set[int]:
        return {len(x) for x in (self.plain, self.draft, *self.verify.values())}

    def rises(self, longer: Parts, batches: np.ndarray, more: int) -> Parts:
        """Seconds per token of context, between these costs and those at `more` tokens per sample.

        They are carried over from the nearest batches where a cost is NaN.
        """

        def rise(short: np.ndarray, far: np.ndarray) -> np.ndarray:
            known = np.isfinite(far)
            per_token = np.maximum(far - short, 0.0)[known] / (more * batches[known])
            return np.interp(batches, batches[known], per_token)

        verify = {rows: rise(short, longer.verify[rows]) for rows, short in self.verify.items()}
        return Parts(rise(self.plain, longer.plain), rise(self.draft, longer.draft), verify)


@dataclasses.dataclass(frozen=True)
class PartCosts:
    """Seconds of the parts of a round, by running samples, rows per sample and context.

    Attributes:
      batches: [N] increasing. seconds: at `context` tokens per sample; None: the file does not say.
      source: starts with "measured" or "modelled" and says how.
      rises: seconds per token in the caches of all samples together; None: costs at other contexts
        are not known, and taken to be the same.
    """

    name: str
    source: str
    batches: np.ndarray
    seconds: Parts
    context: int | None = None
    rises: Parts | None = None

    @classmethod
    def load(cls, path: str | Path) -> PartCosts:
        """Reads a table.

        Raises:
          ValueError: a field is missing, or its length is not that of `batches`; names the file.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            raw = json.loads(text)
            batches, seconds = np.array(raw["batches"], float), Parts.read(raw)
            table = cls(raw["name"], raw["source"], batches, seconds, raw.get("context"))
            longer = raw.get("longer") and Parts.read(raw["longer"])
            more = longer and raw["longer"]["context"] - raw["context"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: not a cost table ({type(error).__name__}: {error}); expected name, "
                "source, batches, plain, draft and verify, as the files in bench/costs have them"
            ) from error
        lengths = seconds.lengths | (longer.lengths if longer else set())
        if lengths != {len(table.batches)} or np.any(np.diff(table.batches) <= 0):
            raise ValueError(
                f"{path}: expected increasing batches and as many costs in every list, got "
                f"{len(table.batches)} batches and lists of {sorted(lengths)}"
            )
        if not seconds.verify or not raw["source"].startswith(("measured", "modelled")):
            raise ValueError(
                f"{path}: expected a cost of at least one number of rows, and a source that starts "
                f"with 'measured' or 'modelled'; got {raw['source']!r}"
            )
        if longer is None:
            return table
        if more <= 0 or set(longer.verify) != set(seconds.verify):
            raise ValueError(
                f"{path}: expected in `longer` a context above {raw['context']} and verify costs "
                f"of {sorted(seconds.verify)} rows, got {raw['longer']['context']} and "
                f"{sorted(longer.verify)}"
            )
        if not all(
            np.isfinite(x).any() for x in (longer.plain, longer.draft, *longer.verify.values())
        ):
            raise ValueError(f"{path}: every list of `longer` needs a cost that is not null")
        return dataclasses.replace(table, rises=seconds.rises(longer, table.batches, more))

    @property
    def kind(self) -> str:
        return "measured" if self.source.startswith("measured") else "modelled"

    @property
    def largest_batch(self) -> int:
        return int(self.batches[-1])

    def plain_step(self, running: int, context: float | None = None) -> float:
        """Seconds of one plain decoding step of `running` samples.

        Args:
          context: tokens in their caches together; None: `self.context` each.
        """
        return self._sum(lambda parts: self._at(parts.plain, running), running, context)

    def spec_round(self, running: int, steps: int, context: float | None = None) -> float:
        """Seconds of one speculative round: a chain of `steps` drafts, then steps + 1 rows.

        Args:
          context: as in `plain_step`.
        """
        listed = sorted({1, *self.seconds.verify})
        if not listed[0] <= steps + 1 <= listed[-1]:
            raise ValueError(
                f"cost table {self.name!r} has verify costs up to {listed[-1]} rows, but the "
                f"recorded strategy verifies {steps + 1}; measure them "
                "with bench.control costs measure --rows"
            )

        def round_of(parts: Parts) -> float:
            costs = [self._at(parts.verify.get(rows, parts.plain), running) for rows in listed]
            verify = float(np.interp(steps + 1, listed, costs))
            return verify + steps * self._at(parts.draft, running)

        return self._sum(round_of, running, context)

    def _sum(self, of: Callable[[Parts], float], running: int, context: float | None) -> float:
        """A cost at the table's context, and its rise to another one."""
        seconds = of(self.seconds)
        if context is None or self.rises is None:
            return seconds
        rise = of(self.rises) * (context - running * self.context)
        return max(seconds + rise, _LEAST_SHARE * seconds)

    def _at(self, costs: np.ndarray, running: int) -> float:
        return float(np.interp(running, self.batches, costs))


def replay(rounds: Sequence[int], slots: int, seconds: Callable[[int], float]) -> float:
    """Seconds in which `slots` slots finish jobs of these many rounds, started in order.

    Args:
      seconds: cost of one round, by the number of jobs running in it.
    """
    running, waiting = list(rounds[:slots]), iter(rounds[slots:])
    heapq.heapify(running)  # by the round at which each job ends
    now, total = 0, 0.0
    while running:
        until = running[0]
        total += (until - now) * seconds(len(running))
        now = until
        while running and running[0] == now:
            heapq.heappop(running)
            following = next(waiting, None)
            if following is not None:
                heapq.heappush(running, now + following)
    return total


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What one arm's rollouts would take on a chip; tokens per second over all of them.

    Attributes:
      table, kind: the cost table's name, and whether it was `measured` or is `modelled`.
    """

    table: str
    kind: str
    arm: str
    tokens: int
    plain_seconds: float
    spec_seconds: float

    @property
    def plain_rate(self) -> float:
        return self.tokens / self.plain_seconds

    @property
    def spec_rate(self) -> float:
        return self.tokens / self.spec_seconds

    @property
    def ratio(self) -> float:
        """Speculative over plain speed, the very same tokens."""
        return self.plain_seconds / self.spec_seconds


def predict(
    table: PartCosts, arm: str, rollouts: Iterable[dict], slots: int | None = None
) -> Prediction:
    """Replays recorded rollouts one after the other.

    Args:
      rollouts: records with `samples`: `histograms` (per sample, rounds by tokens emitted).
      slots: samples that run at once at most; None is the table's largest batch.
    """
    slots = min(slots or table.largest_batch, table.largest_batch)
    tokens, plain, spec = 0, 0.0, 0.0
    for record in rollouts:
        histograms = np.array(record["samples"]["histograms"], int)
        steps = histograms.shape[1] - 2
        lengths = histograms @ np.arange(histograms.shape[1])
        rounds = histograms.sum(axis=1)
        tokens += int(lengths.sum())
        plain += replay(lengths.tolist(), slots, table.plain_step)
        spec += replay(rounds.tolist(), slots, lambda n, k=steps: table.spec_round(n, k))
    if not tokens:
        raise ValueError(f"arm {arm!r} has no recorded tokens; run bench.train arms first")
    return Prediction(table.name, table.kind, arm, tokens, plain, spec)


def read_rollouts(path: str | Path) -> dict[str, list[dict]]:
    """The speculative arms' records, by arm, of `arms.jsonl` (or of the `arms.json` beside it).

    Raises:
      FileNotFoundError, ValueError: no such file, or no speculative rollout in it.
    """
    path = Path(path).with_suffix(".jsonl")
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: expected what `python -m bench.train arms` wrote")
    arms: dict[str, list[dict]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record.get("draft_steps"):
            arms.setdefault(record["arm"], []).append(record)
    if not arms:
        raise ValueError(f"{path} holds no speculative rollout")
    return arms


def is_chain_record(record: dict) -> bool:
    """Only chains can be replayed: tables have no cost for a level of a tree."""
    return record["rows"] == record["draft_steps"] + 1


def predict_all(
    arms: dict[str, list[dict]], tables: Iterable[str | Path], slots: int | None = None
) -> list[Prediction]:
    """Every arm through every table.

    Raises:
      ValueError: the rollouts were drafted as trees.
    """
    if not all(is_chain_record(r) for records in arms.values() for r in records):
        raise ValueError(
            "the recorded rollouts drafted trees; cost tables have costs of chains only: record "
            "with rollout.strategy such as 4_1_5"
        )
    loaded = [PartCosts.load(path) for path in tables]
    return [
        predict(table, arm, records, slots) for table in loaded for arm, records in arms.items()
    ]


def figures_of(predictions: Iterable[Prediction]) -> dict[str, dict]:
    """Figures for a result file; every name starts with `predicted`."""
    figures = {}
    for p in predictions:
        for name, value, unit in (
            ("ratio", p.ratio, f"speculative / plain, costs {p.kind}"),
            ("plain_tokens_per_sec", p.plain_rate, f"tok/s, costs {p.kind}"),
            ("spec_tokens_per_sec", p.spec_rate, f"tok/s, costs {p.kind}"),
        ):
            key = f"predicted_{name}/{p.table}/{p.arm}"
            figures[key] = {"value": value, "unit": unit, "interval": None}
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(
        prog="python -m bench.control predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--acceptance", default="bench/results/arms.jsonl", help="of train arms")
    parser.add_argument("--costs", nargs="+", metavar="JSON", help="default: bench/costs/*.json")
    parser.add_argument("--slots", type=int, help="samples at once; default: all, up to the table")
    parser.add_argument("--out", help="result file; default: bench/results/predict.json")
    args = parser.parse_args(argv)
    tables = args.costs or sorted(map(str, default_tables()))
    with user_errors("control predict"):
        predictions = predict_all(read_rollouts(args.acceptance), tables, args.slots)
    for p in predictions:
        print(
            f"{p.table:>24}  {p.arm:>14}: plain {p.plain_rate:9.0f} tok/s, speculative "
            f"{p.spec_rate:9.0f} tok/s, {p.ratio:.2f}x (predicted)"
        )
    settings = {"acceptance": args.acceptance, "costs": list(tables), "slots": args.slots}
    path = write_result("predict", settings, figures_of(predictions), args.out)
    print(path)


def default_tables() -> list[Path]:
    return sorted((Path(__file__).resolve().parents[1] / "costs").glob("*.json"))


if __name__ == "__main__":
    main()
