"""What `bench.longtail` keeps of its rollouts, and `bench.replay` reads: JSON lines.

The first line holds `settings`: `model`, `task`, `slots`, `chunk_tokens`, `stretch`, `groups`,
`samples`, `lengths` (tokens of every chain) and `strategies`. Then one line per static strategy
with the chains' `histograms` (rounds by tokens emitted), and one per drawn arm with its `spans`:
[seconds, running slots, strategy, rounds, slot rounds, accepted drafts] (see `bench.chains.Span`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.chains import Span

SUFFIX = ".trace.jsonl"
PLAIN, GOODPUT = "plain", "goodput"  # arms beside the static strategies


@dataclasses.dataclass(frozen=True)
class Trace:
    """What was recorded.

    Attributes:
      settings: of the rollouts. histograms: by strategy, [chains, steps + 2]. spans: by arm.
    """

    settings: Mapping[str, Any]
    histograms: Mapping[str, np.ndarray]
    spans: Mapping[str, Sequence[Span]]

    @property
    def lengths(self) -> list[int]:
        return list(self.settings["lengths"])

    def write(self, path: str | Path) -> None:
        rows: list[dict] = [{"settings": self.settings}]
        for name, values in self.histograms.items():
            rows.append({"strategy": name, "histograms": np.asarray(values).tolist()})
        for name, spans in self.spans.items():
            listed = [[round(s.until, 4), *dataclasses.astuple(s)[1:]] for s in spans]
            rows.append({"arm": name, "spans": listed})
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Reads a trace; the result file beside it may be named instead.

        Raises:
          FileNotFoundError, ValueError: there is none, or it is something else.
        """
        path = Path(path)
        if path.suffix == ".json":
            path = path.with_suffix(SUFFIX)
        if not path.is_file():
            raise FileNotFoundError(f"no {path}: expected what `python -m bench.longtail` wrote")
        histograms, spans = {}, {}
        try:
            first, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            settings = first["settings"]
            for row in rows:
                if "strategy" in row:
                    histograms[row["strategy"]] = np.array(row["histograms"], int)
                else:
                    spans[row["arm"]] = [Span(*values) for values in row["spans"]]
            chains = len(settings["lengths"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: not a trace of bench.longtail ({type(error).__name__}: {error})"
            ) from error
        if not histograms or any(len(h) != chains for h in histograms.values()):
            raise ValueError(f"{path}: expected histograms of {chains} chains for each strategy")
        return cls(settings, histograms, spans)
