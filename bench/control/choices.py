"""How good a run of choices was: rounds until it recovered from a change, and seconds lost."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.control.stream import Choice, Measured

LEAST = 0.97  # of the best strategy, or of plain decoding, that goodput control must reach
PHASES = ("good", "bad", "good")  # heads
EVENTS = ("start", "swapped_for_a_bad_one", "swapped_back")  # that begin the phases
TOLERANCE = 0.05  # below the oracle that counts as being there
WINDOW = 50  # rounds over which a recovery must hold


class Speed(NamedTuple):
    """A strategy with one head, as measured: tokens per round of all slots, seconds per round."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Span(NamedTuple):
    """Consecutive rounds of one strategy."""

    strategy: str
    rounds: int


Speeds = Mapping[str, Speed]  # by strategy


def speed_of(measured: Sequence[Measured]) -> Speed:
    """Medians over repeats."""
    return Speed(
        statistics.median(m.tokens / m.rounds for m in measured),
        statistics.median(m.seconds / m.rounds for m in measured),
    )


def best_rate(speeds: Speeds) -> float:
    return max(speed.rate for speed in speeds.values())


def expected_rate(spans: Sequence[Span], speeds: Speeds) -> float:
    """Tokens per second of these choices, by what their strategies do on average."""
    tokens = sum(s.rounds * speeds[s.strategy].tokens for s in spans)
    return tokens / sum(s.rounds * speeds[s.strategy].seconds for s in spans)


def regrets(spans: Sequence[Span], speeds: Speeds) -> list[float]:
    """Per span, seconds that the best strategy would have saved for as many tokens."""
    best = best_rate(speeds)
    return [
        s.rounds * speeds[s.strategy].seconds * (1 - speeds[s.strategy].rate / best) for s in spans
    ]


def recovery(spans: Sequence[Span], speeds: Speeds) -> int | None:
    """Rounds until the choices are within `TOLERANCE` of the best strategy's goodput again.

    That is the beginning of the first choice that is, from which the next `WINDOW` rounds are, and
    all rounds to the end: one lucky probe is no recovery, and a single later probe no relapse. None
    if there is no such choice.
    """
    least = (1 - TOLERANCE) * best_rate(speeds)
    begin = 0
    for at, span in enumerate(spans):
        rest = spans[at:]
        near = (speeds[span.strategy].rate, expected_rate(first_rounds(rest, WINDOW), speeds))
        if min(*near, expected_rate(rest, speeds)) >= least:
            return begin
        begin += span.rounds
    return None


def first_rounds(spans: Sequence[Span], rounds: int) -> list[Span]:
    """The spans cut after so many rounds."""
    found = []
    for span in spans:
        if rounds <= 0:
            break
        found.append(span._replace(rounds=min(span.rounds, rounds)))
        rounds -= span.rounds
    return found


def spans_of(choices: Sequence[Choice]) -> list[Span]:
    """The chunks of a run, neighbours of one strategy not joined."""
    return [Span(c.strategy, c.rounds) for c in choices if c.rounds]


def to_text(spans: Sequence[Span]) -> str:
    """As in a result file: `4_1_5*36 off*32`; joins neighbours."""
    joined = itertools.groupby(spans, key=lambda span: span.strategy)
    return " ".join(f"{name}*{sum(s.rounds for s in group)}" for name, group in joined)


def from_text(text: str) -> list[Span]:
    """What `to_text` wrote."""
    parts = (part.rpartition("*") for part in text.split())
    return [Span(name, int(rounds)) for name, _, rounds in parts]
