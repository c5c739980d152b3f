"""Collects what chunks report, sums it up, and keeps it as JSON lines.

A file holds objects of two kinds, told apart by `kind`: a `tally` of everything that was counted,
then a `rejection` per record that was kept. Files may be concatenated: tallies add up.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MAX_RECORDS = 100_000
# Exclusive: a rejection has the first of these that holds.
CAUSES = {
    "mask": "the draft token is masked: allowed ids, bad words, minimum length",
    "filter": "the draft token is cut by the target's top-k, top-p or min-p",
    "penalty": "without penalties the target would have chosen another token",
    "disagreement": "the draft and the target simply differ",
}
# Lower edges of the entropy bins in nats; the last bin is open.
ENTROPY_EDGES = tuple(i / 4 for i in range(25))


@dataclasses.dataclass(frozen=True, slots=True)
class SlotInfo:
    """Who runs in a slot.

    Attributes:
      request: the request's number or name. sample: which of its samples, from 0.
      prompt_len: tokens of its prompt. transforms: see `active_transforms`.
    """

    request: int | str
    sample: int
    prompt_len: int
    transforms: tuple[str, ...] = ()


def active_transforms(features) -> tuple[str, ...]:
    """The sampling transforms among a request's `Features`, by name."""
    names = {"sampled": "temperature"}
    names |= dict.fromkeys(("top_logprobs", "transformed_logprobs"))
    found = (names.get(name, name) for name in features.names)
    return tuple(name for name in found if name is not None)


@dataclasses.dataclass(frozen=True, slots=True)
class Rejection:
    """One rejected draft token; the figures are explained at `specjax.decode.report.Rejections`.

    Attributes:
      request, sample, prompt_len, transforms: as in `SlotInfo`.
      position: absolute, of the rejected token; the prompt starts at 0.
      emitted: False where the sample ended before this position, so that its text shows neither
        token.
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
    def offset(self) -> int:
        """Generated tokens before the rejected one."""
        return self.position - self.prompt_len

    @property
    def cause(self) -> str:
        """One of `CAUSES`."""
        if self.outside_mask:
            return "mask"
        if self.outside_filter:
            return "filter"
        return "penalty" if self.penalty_changed else "disagreement"

    def to_json(self) -> dict[str, Any]:
        """A JSON object; the log-probability of what cannot happen, -inf, becomes null."""
        fields = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in fields
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Rejection:
        """The inverse of `to_json`.

        Raises:
          KeyError: a field is missing.
        """
        values = {f.name: record[f.name] for f in dataclasses.fields(cls)}
        values = {name: -math.inf if value is None else value for name, value in values.items()}
        values["transforms"] = tuple(values["transforms"])
        return cls(**values)


@dataclasses.dataclass
class Tally:
    """Sums over every round and rejection seen, whether or not its record was kept.

    Attributes:
      rounds: in which a slot ran and speculated. rejections: rounds that ended in one.
      attempts, accepts: per depth from 1, rounds whose walk came to a row with drafts of that
        depth below it, and those in which one of them was taken. Counted before stop tokens and
        limits cut a round, so that the end of a sample does not look like a rejection.
      position_sum: of absolute positions. causes: rejections by cause. offsets: by offset from the
        prompt. entropies: by bin of ENTROPY_EDGES. dropped: records that were not kept.
    """

    rounds: int = 0
    rejections: int = 0
    attempts: Counter[int] = dataclasses.field(default_factory=Counter)
    accepts: Counter[int] = dataclasses.field(default_factory=Counter)
    position_sum: int = 0
    causes: Counter[str] = dataclasses.field(default_factory=Counter)
    offsets: Counter[int] = dataclasses.field(default_factory=Counter)
    entropies: Counter[int] = dataclasses.field(default_factory=Counter)
    dropped: int = 0

    def add_round(self, accepted: int, rejected: bool, number: int = 1) -> None:
        """Counts `number` rounds whose walk accepted this many drafts."""
        self.rounds += number
        for depth in range(1, accepted + 1):
            self.attempts[depth] += number
            self.accepts[depth] += number
        if rejected:
            self.attempts[accepted + 1] += number

    def add_rejection(self, rejection: Rejection) -> None:
        self.rejections += 1
        self.position_sum += rejection.position
        self.causes[rejection.cause] += 1
        self.offsets[rejection.offset] += 1
        self.entropies[bisect.bisect_right(ENTROPY_EDGES, max(rejection.entropy, 0.0)) - 1] += 1

    def add_rejections(
        self,
        position: np.ndarray,
        offset: np.ndarray,
        entropy: np.ndarray,
        outside_mask: np.ndarray,
        outside_filter: np.ndarray,
        penalty_changed: np.ndarray,
    ) -> None:
        """`add_rejection` for many that nobody keeps: figures [N], see `Rejection`."""
        self.rejections += len(position)
        self.dropped += len(position)
        self.position_sum += int(position.sum())
        cause = np.select([outside_mask, outside_filter, penalty_changed], [0, 1, 2], 3)
        bins = np.searchsorted(ENTROPY_EDGES, np.maximum(entropy, 0.0), side="right") - 1
        names = tuple(CAUSES)
        self.causes.update({names[i]: n for i, n in _counted(cause)})
        self.offsets.update(dict(_counted(offset)))
        self.entropies.update(dict(_counted(bins)))

    def merge(self, other: Tally) -> None:
        """Adds what another tally counted."""
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, mine + theirs)

    def to_json(self) -> dict[str, Any]:
        # Not `asdict`: on Python 3.11 it turns a Counter's items into its keys.
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Tally:
        """The inverse of `to_json`; JSON has turned integer keys into strings.

        Raises:
          KeyError: a field is missing.
        """
        values = {f.name: record[f.name] for f in dataclasses.fields(cls)}
        for name in ("attempts", "accepts", "offsets", "entropies"):
            values[name] = Counter({int(key): count for key, count in values[name].items()})
        values["causes"] = Counter(values["causes"])
        return cls(**values)


def _counted(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """Each value with its number."""
    found, numbers = np.unique(values, return_counts=True)
    return zip(found.tolist(), numbers.tolist(), strict=True)


# What a record takes over from the device as it is.
_FIELDS = tuple(
    f.name
    for f in dataclasses.fields(Rejection)
    if f.name not in {g.name for g in dataclasses.fields(SlotInfo)}
)


def _fields_of(slot: SlotInfo) -> dict[str, Any]:
    """`dataclasses.asdict` without its deep copies."""
    return {field.name: getattr(slot, field.name) for field in dataclasses.fields(slot)}


@dataclasses.dataclass(frozen=True)
class Summary:
    """The figures of a run. Shares and means are NaN where there is nothing to divide by.

    Attributes:
      rounds: rounds of samples that speculate. rejections: rounds that ended in one.
      attempts, accepts: per depth from 1, see `Tally`. acceptance_per_depth: their quotient.
      mean_position: absolute, of the rejected tokens. mean_offset: the same from the prompt's end.
      causes: share of the rejections per cause (`CAUSES`); they sum to 1.
      entropy_histogram: (low, high, rejections) per bin of the target's entropy in nats.
      offset_histogram: (offset from the prompt, rejections), ascending.
      records: kept. dropped: records beyond the limit; they count in all figures above.
    """

    rounds: int
    rejections: int
    attempts: tuple[int, ...]
    accepts: tuple[int, ...]
    acceptance_per_depth: tuple[float, ...]
    mean_position: float
    mean_offset: float
    causes: dict[str, float]
    entropy_histogram: tuple[tuple[float, float, int], ...]
    offset_histogram: tuple[tuple[int, int], ...]
    records: int
    dropped: int


class Collector:
    """Rejections of a run.

    Args:
      max_records: records to keep at most; later ones are counted, warned of once, and dropped. 0
        counts them all, and takes a fraction of the time.

    Attributes:
      records: the rejections that were kept, in the order in which they were collected.
    """

    def __init__(self, max_records: int = MAX_RECORDS):
        if max_records < 0:
            raise ValueError(f"max_records must be at least 0, got {max_records}")
        self.max_records = max_records
        self.clear()

    @classmethod
    def joined(cls, parts: Sequence[Collector]) -> Collector:
        """What several collected. Records are in the order of requests, samples and positions, so
        that it does not matter who collected which."""
        whole = cls(sum(part.max_records for part in parts))
        for part in parts:
            whole._tally.merge(part._tally)
        records = [record for part in parts for record in part.records]
        whole.records = sorted(
            records, key=lambda r: (str(r.request).zfill(20), r.sample, r.position)
        )
        return whole

    def clear(self) -> None:
        """Forgets everything, for instance after `write_jsonl`."""
        self.records: list[Rejection] = []
        self._tally = Tally()

    def add(self, rejections: Any, slots: Sequence[SlotInfo | None]) -> None:
        """Takes in one chunk.

        Args:
          rejections: `specjax.decode.report.Rejections` as numpy arrays [R B].
          slots: who ran in each of the B slots during the chunk; None where nobody did.

        Raises:
          ValueError: there are not B slots.
        """
        accepted, valid = np.asarray(rejections.accepted), np.asarray(rejections.valid)
        if len(slots) != accepted.shape[1]:
            raise ValueError(
                f"got {len(slots)} slots for rejections of {accepted.shape[1]}; give one SlotInfo "
                "or None per slot of the batch"
            )
        ran = (accepted >= 0) & np.array([slot is not None for slot in slots])
        pairs = np.stack([accepted[ran], valid[ran]], axis=1)
        for (depth, rejected), number in zip(
            *np.unique(pairs, axis=0, return_counts=True), strict=True
        ):
            self._tally.add_round(int(depth), bool(rejected), int(number))
        where = np.nonzero(ran & valid)
        if not self.max_records:
            self._count(rejections, slots, where)
            return
        columns = [np.asarray(getattr(rejections, name))[where].tolist() for name in _FIELDS]
        who = {slot: _fields_of(slots[slot]) for slot in set(where[1].tolist())}
        for slot, *values in zip(where[1].tolist(), *columns, strict=True):
            self._keep(Rejection(**who[slot], **dict(zip(_FIELDS, values, strict=True))))

    def _count(
        self, rejections: Any, slots: Sequence[SlotInfo | None], where: tuple[np.ndarray, ...]
    ) -> None:
        """Adds up the rejections at `where`, and keeps none."""
        lengths = np.array([slot.prompt_len if slot else 0 for slot in slots])
        position = np.asarray(rejections.position)[where]
        self._tally.add_rejections(
            position,
            position - lengths[where[1]],
            np.asarray(rejections.entropy)[where],
            np.asarray(rejections.outside_mask)[where],
            np.asarray(rejections.outside_filter)[where],
            np.asarray(rejections.penalty_changed)[where],
        )

    @property
    def causes(self) -> dict[str, int]:
        """Rejections so far by cause, see `CAUSES`."""
        return {name: self._tally.causes[name] for name in CAUSES}

    def _keep(self, rejection: Rejection) -> None:
        self._tally.add_rejection(rejection)
        if len(self.records) < self.max_records:
            self.records.append(rejection)
            return
        self._tally.dropped += 1
        if self._tally.dropped == 1:
            warnings.warn(
                f"telemetry keeps {self.max_records} rejections and drops the records of further "
                "ones (sums still count them); write_jsonl and clear it now and then, or raise "
                "max_records",
                stacklevel=3,
            )

    def summary(self) -> Summary:
        """The figures so far, dropped records included."""
        tally, count = self._tally, self._tally.rejections
        depths = range(1, max(tally.attempts, default=0) + 1)
        attempts = tuple(tally.attempts[d] for d in depths)
        accepts = tuple(tally.accepts[d] for d in depths)
        offset_sum = sum(offset * number for offset, number in tally.offsets.items())
        edges = (*ENTROPY_EDGES, float("inf"))
        return Summary(
            rounds=tally.rounds,
            rejections=count,
            attempts=attempts,
            accepts=accepts,
            acceptance_per_depth=tuple(map(_share, accepts, attempts)),
            mean_position=_share(tally.position_sum, count),
            mean_offset=_share(offset_sum, count),
            causes={name: _share(tally.causes[name], count) for name in CAUSES},
            entropy_histogram=tuple(
                (low, high, tally.entropies[i])
                for i, (low, high) in enumerate(zip(edges[:-1], edges[1:], strict=True))
            ),
            offset_histogram=tuple(sorted(tally.offsets.items())),
            records=len(self.records),
            dropped=tally.dropped,
        )

    def write_jsonl(self, path: str | Path, append: bool = False) -> Path:
        """Writes the sums and the records.

        Args:
          append: add to the file, after cutting off a last line that a kill left unfinished; then
            `clear()`, lest the next call writes the same again.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if append:
            _cut_unfinished_line(path)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            _write_line(file, "tally", self._tally.to_json())
            for rejection in self.records:
                _write_line(file, "rejection", rejection.to_json())
        return path


def read_jsonl(path: str | Path) -> Collector:
    """The collector that `write_jsonl` wrote, or several, one after the other.

    A damaged last line, as a kill leaves it, is skipped with a warning.

    Raises:
      FileNotFoundError: no such file.
      ValueError: it is empty, not a telemetry file, or damaged before its last line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected what Collector.write_jsonl wrote")
    lines = path.read_bytes().splitlines()
    if not any(line.strip() for line in lines):
        raise ValueError(f"{path}: empty; expected JSON lines as Collector.write_jsonl writes them")
    rejections, tally, tallies = [], Tally(), 0
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            kind = record["kind"]
            if kind == "tally":
                tally.merge(Tally.from_json(record))
                tallies += 1
            elif kind == "rejection":
                rejections.append(Rejection.from_json(record))
            else:
                raise ValueError(f"kind {kind!r}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number < len(lines) or number == 1:
                raise ValueError(
                    f"{path}, line {number}: expected a telemetry record (an object whose kind is "
                    f"'tally' or 'rejection'), got {line[:60].decode(errors='replace')!r}"
                ) from error
            warnings.warn(f"{path}: skipped its damaged last line, {number}", stacklevel=2)
    if not tallies:
        raise ValueError(f"{path}: no tally among its {len(lines)} lines; its beginning is missing")
    collector = Collector(max(MAX_RECORDS, len(rejections)))
    collector.records, collector._tally = rejections, tally
    return collector


def _share(part: float, whole: int) -> float:
    return part / whole if whole else float("nan")


def _write_line(file, kind: str, record: dict[str, Any]) -> None:
    file.write(json.dumps({"kind": kind, **record}, allow_nan=False) + "\n")


def _cut_unfinished_line(path: Path) -> None:
    """Shortens the file to its last newline, if it has bytes after it."""
    if not path.exists():
        return
    whole = path.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end < len(whole):
        warnings.warn(f"{path}: cut off its unfinished last line", stacklevel=3)
        os.truncate(path, end)
