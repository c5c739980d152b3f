"""The result of the checks: a table for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

PASSED, FAILED = "passed", "FAILED"
ENOUGH_ACCEPTED = 100  # accepted drafts below which the acceptance rule was not really tested


class InputError(ValueError):
    """The input cannot be checked; the model may be right or wrong."""


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
      name: name of the check.
      status: `PASSED` or `FAILED`.
      summary: one line of figures.
      details: further lines, such as each unexplained difference.
      figures: the numbers behind the summary.
    """

    name: str
    status: str
    summary: str
    details: tuple[str, ...] = ()
    figures: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """All checks of one model; true iff none failed.

    Attributes:
      model, strategy, acceptance, source, dtype: the model and the settings that were checked.
      checks: the checks, in the order in which they ran.
    """

    model: str
    strategy: str
    acceptance: str
    source: str
    dtype: str
    checks: tuple[Check, ...]

    def __bool__(self) -> bool:
        return all(check.status != FAILED for check in self.checks)

    @property
    def accepted(self) -> int:
        """Number of drafts that were accepted in all checks together."""
        return sum(check.figures.get("accepted", 0) for check in self.checks)

    @property
    def conclusive(self) -> bool:
        """Whether enough drafts were accepted to test the acceptance rule."""
        return not self or self.accepted >= ENOUGH_ACCEPTED

    def __str__(self) -> str:
        """Returns a table with one line per check, and the verdict."""
        width = max(len(check.name) for check in self.checks)
        lines = [
            f"model {self.model}, strategy {self.strategy}, acceptance {self.acceptance}, draft "
            f"source {self.source}, {self.dtype}"
        ]
        for check in self.checks:
            lines.append(f"  {check.status:6}  {check.name:{width}}  {check.summary}")
            lines += [f"          {line}" for line in check.details]
        verdict = "lossless as far as these checks can see" if self else "NOT lossless"
        if not self.conclusive:
            verdict = (
                f"INCONCLUSIVE: no check failed, but {self.accepted} accepted drafts (expected "
                f"{ENOUGH_ACCEPTED} or more) are too few to test the acceptance rule; check the "
                "draft's weights, use more samples, or try --draft ngram"
            )
        lines.append(f"verdict: {verdict}")
        if biases := [
            c.figures["visible_bias"] for c in self.checks if "visible_bias" in c.figures
        ]:
            lines.append(
                f"a bias of {max(biases):.3f} (total variation of three tokens) shows about every "
                "second time, half of it with four times the --samples"
            )
        return "\n".join(lines)

    def write(self, path: str | Path) -> None:
        """Writes JSON, in which null stands for an infinite statistic."""
        record = {"ok": bool(self), "conclusive": self.conclusive, **dataclasses.asdict(self)}
        for check in record["checks"]:
            for name, value in check["figures"].items():
                if isinstance(value, float) and not math.isfinite(value):
                    check["figures"][name] = None
        Path(path).write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
