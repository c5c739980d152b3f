"""Telemetry of rejected drafts: collected on the host after each chunk, and summarised.

`SpecConfig(telemetry=True)` enables it; the device reports rejections by `specjax.decode.report`.
After a run `llm.telemetry.summary()` returns the figures, and
`llm.telemetry.write_jsonl("run.jsonl")` writes them to a file.

A file holds objects of two kinds, in the field `kind`: a `tally` with the sums over all rejections,
then a `rejection` for each record that was kept. Files may be concatenated: tallies are added.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

MAX_RECORDS = 100_000
# The cause of a rejection is the first of these that holds.
CAUSES = {
    "mask": "the draft token is masked: allowed ids, bad words, minimum length",
    "filter": "the draft token is cut by the target's top-k, top-p or min-p",
    "penalty": "without penalties the target would have chosen another token",
    "disagreement": "the draft and the target simply differ",
}


@dataclasses.dataclass(frozen=True, slots=True)
class SlotInfo:
    """The sample that runs in a slot.

    Attributes:
      request: number or name of the request.
      sample: number of the sample within the request, from 0.
      prompt_len: number of tokens in the prompt.
      transforms: names of the sampling transforms, see `active_transforms`.
    """

    request: int | str
    sample: int
    prompt_len: int
    transforms: tuple[str, ...] = ()


def active_transforms(features) -> tuple[str, ...]:
    """Returns the names of the sampling transforms in a `specjax.decode.options.Features`."""
    names = {"sampled": "temperature"}
    names |= dict.fromkeys(("top_logprobs", "transformed_logprobs"))
    found = (names.get(name, name) for name in features.names)
    return tuple(name for name in found if name is not None)


@dataclasses.dataclass(frozen=True, slots=True)
class Rejection:
    """One rejected draft token; `specjax.decode.report.Rejections` explains the other fields.

    Attributes:
      request, sample, prompt_len, transforms: as in `SlotInfo`.
      position: absolute position of the rejected token; the prompt starts at 0.
      emitted: False if the sample ended before this position, so that neither token was emitted.
    """

    request: int | str
    sample: int
    prompt_len: int
    transforms: tuple[str, ...]
    position: int
    depth: int
    draft_token: int
    target_token: int
    draft_logprob: float
    target_logprob: float
    draft_token_target_logprob: float
    entropy: float
    top_p_mass: float
    outside_mask: bool
    outside_filter: bool
    penalty_changed: bool
    emitted: bool

    @property
    def cause(self) -> str:
        """One of `CAUSES`."""
        return tuple(CAUSES)[int(_cause_numbers(self))]

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON object, in which null means a log-probability of -inf."""
        fields = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in fields
        }


# The fields of a `Rejection` that come from the device.
_FIELDS = tuple(
    f.name
    for f in dataclasses.fields(Rejection)
    if f.name not in {g.name for g in dataclasses.fields(SlotInfo)}
)


@dataclasses.dataclass
class Summary:
    """Sums over every round and rejection, whether or not its record was kept.

    Attributes:
      rounds: number of rounds of samples that speculate.
      rejections: number of rounds that ended in a rejection.
      attempts: per depth from 1, number of rounds whose accepted path reached a row with drafts of
        that depth below it.
      accepts: per depth from 1, number of those rounds that accepted one of these drafts. Both are
        counted before stop tokens and limits end a round, so that the end of a sample does not
        count as a rejection.
      causes: number of rejections by cause.
      dropped: number of records that were not kept.
    """

    rounds: int = 0
    rejections: int = 0
    attempts: Counter[int] = dataclasses.field(default_factory=Counter)
    accepts: Counter[int] = dataclasses.field(default_factory=Counter)
    causes: Counter[str] = dataclasses.field(default_factory=Counter)
    dropped: int = 0

    def add(self, rejections: Any, ran: np.ndarray) -> None:
        """Counts one chunk.

        Args:
          rejections: the chunk's rejections, see `Collector.add`.
          ran: which rounds to count [R B].
        """
        rejected = ran & rejections.valid
        self.rounds += int(ran.sum())
        for accepted, number in Counter(rejections.accepted[ran].tolist()).items():
            for depth in range(1, accepted + 1):
                self.attempts[depth] += number
                self.accepts[depth] += number
        for accepted, number in Counter(rejections.accepted[rejected].tolist()).items():
            self.attempts[accepted + 1] += number
        self.rejections += int(rejected.sum())
        names = tuple(CAUSES)
        self.causes.update(names[i] for i in _cause_numbers(rejections)[rejected].tolist())

    def share(self, cause: str) -> float:
        """The share of the rejections that have a cause; NaN without any."""
        return _share(self.causes[cause], self.rejections)

    @property
    def acceptance_per_depth(self) -> list[float]:
        """`accepts` / `attempts`, per depth from 1."""
        return [
            _share(self.accepts[depth], self.attempts[depth]) for depth in sorted(self.attempts)
        ]

    def __str__(self) -> str:
        """Returns acceptance per depth and causes of rejections, in a line each."""
        depths = enumerate(self.acceptance_per_depth, 1)
        lines = [f"{self.rounds} rounds, {self.rejections} ended in a rejection"]
        if self.dropped:
            lines.append(f"  {self.dropped} of their records were dropped: clear them in between")
        lines += [f"  depth {depth}: {share:.1%} accepted" for depth, share in depths]
        lines += [f"  {self.share(name):6.1%} {name}: {why}" for name, why in CAUSES.items()]
        return "\n".join(lines)

    def merge(self, other: Summary) -> None:
        """Adds the sums of other rejections."""
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, mine + theirs)

    def to_json(self) -> dict[str, Any]:
        # Not `asdict`: on Python 3.11 it turns a Counter's items into its keys.
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


class Collector:
    """The rejections of a run.

    Args:
      max_records: largest number of records to keep; later ones are counted, and dropped.

    Attributes:
      records: the rejections that were kept, in the order in which they were collected.
    """

    def __init__(self, max_records: int = MAX_RECORDS):
        self.max_records = max_records
        self.clear()

    @classmethod
    def joined(cls, parts: Sequence[Collector]) -> Collector:
        """Joins the records and sums of several collectors.

        Records are sorted by request, sample and position, so the result does not depend on which
        collector has which.
        """
        whole = cls(sum(part.max_records for part in parts))
        for part in parts:
            whole._sums.merge(part._sums)
        records = [record for part in parts for record in part.records]
        whole.records = sorted(
            records, key=lambda r: (str(r.request).zfill(20), r.sample, r.position)
        )
        return whole

    def clear(self) -> None:
        """Removes all records and sums, for instance after `write_jsonl`."""
        self.records: list[Rejection] = []
        self._sums = Summary()

    def add(self, rejections: Any, slots: Sequence[SlotInfo | None]) -> None:
        """Adds the rejections of one chunk.

        Args:
          rejections: `specjax.decode.report.Rejections` as numpy arrays [R B].
          slots: the samples that ran in the B slots during the chunk; None for an empty slot.
        """
        ran = (rejections.accepted >= 0) & np.array([slot is not None for slot in slots])
        self._sums.add(rejections, ran)
        rounds, columns = np.nonzero(ran & rejections.valid)
        kept = max(0, min(len(rounds), self.max_records - len(self.records)))
        where = rounds[:kept], columns[:kept]
        values = [getattr(rejections, name)[where].tolist() for name in _FIELDS]
        for slot, *row in zip(where[1].tolist(), *values, strict=True):
            one = slots[slot]
            self.records.append(
                Rejection(one.request, one.sample, one.prompt_len, one.transforms, *row)
            )
        self._sums.dropped += len(rounds) - kept

    def summary(self) -> Summary:
        """Returns the sums so far, dropped records included."""
        return self._sums

    def write_jsonl(self, path: str | Path, append: bool = False) -> Path:
        """Writes the sums and the records.

        Args:
          append: whether to append to the file, after removing an unfinished last line that a
            kill left. Call `clear` afterwards, or the next call writes the same again.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if append:
            _cut_unfinished_line(path)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            _write_line(file, "tally", self._sums.to_json())
            for rejection in self.records:
                _write_line(file, "rejection", rejection.to_json())
        return path


def _cause_numbers(found: Any) -> np.ndarray:
    """Returns indices into `CAUSES`, for a `Rejection` or for arrays with its fields."""
    holds = [found.outside_mask, found.outside_filter, found.penalty_changed]
    return np.select(holds, [0, 1, 2], 3)


def _share(part: float, whole: int) -> float:
    return part / whole if whole else float("nan")


def _write_line(file, kind: str, record: dict[str, Any]) -> None:
    file.write(json.dumps({"kind": kind, **record}, allow_nan=False) + "\n")


def _cut_unfinished_line(path: Path) -> None:
    """Truncates the file after its last newline."""
    if not path.exists():
        return
    whole = path.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end < len(whole):
        os.truncate(path, end)
