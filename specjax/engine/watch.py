"""What a running engine tells whoever watches it, chunk by chunk."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class News(NamedTuple):
    """What a chunk brought one sample.

    Attributes:
      at: generated tokens before these. In `invariant` mode a preempted sample is generated anew,
        and then tokens come again, the same ones.
      tokens, logprobs: one entry per token, those beyond a stop string left out.
      top: likewise, see `SampleOutput.top_logprobs`; None unless asked for.
      rounds: tokens that each round brought. steps, rows: depth and drafted rows of their tree; 0
        where they drafted nothing for this sample.
      text: of the whole sample so far, in whole characters, where it is searched for stop strings;
        else None. What may be the beginning of one is left out, but the string that ends the sample
        may be there.
    """

    at: int
    tokens: list[int]
    logprobs: list[float]
    top: list[dict[int, float]] | None
    rounds: list[int]
    steps: int
    rows: int
    text: str | None = None

    def since(self, known: int) -> News:
        """What it says beyond the first `known` tokens of the sample."""
        drop = max(0, known - self.at)
        if not drop:
            return self
        rounds, skip = [], drop
        for count in self.rounds:
            rounds.append(count - min(skip, count))
            skip -= min(skip, count)
        return self._replace(
            at=self.at + drop,
            tokens=self.tokens[drop:],
            logprobs=self.logprobs[drop:],
            top=None if self.top is None else self.top[drop:],
            rounds=[count for count in rounds if count],
        )


class Watcher(Protocol):
    """Is called by the thread that steps the engine, and must not keep it waiting."""

    def chunk(self, strategy: str, bucket: int, rounds: int) -> None:
        """A chunk of so many rounds came in."""

    def news(self, ticket: int, news: News) -> None:
        """It brought this sample something; that it ended is what `step` returns."""
