"""One rejection as the host sees it, and the running sums over all of them."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

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
