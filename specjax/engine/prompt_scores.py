"""Log-probabilities of prompts, by programs of a few lengths that are padded to."""

from __future__ import annotations

import math
from collections.abc import Sequence as Several
from typing import NamedTuple

import numpy as np

from specjax.decode.score import Scores
from specjax.engine.engine import Engine
from specjax.engine.replicas import Replicas
from specjax.engine.request import InvalidLogitsError, why_invalid
from specjax.engine.runner import Runner

SHORTEST = 64  # positions that a prompt is padded to, at least
TOKENS = 256  # that one program reads, at least


class PromptScores(NamedTuple):
    """How likely the policy found the tokens of a prompt; one entry per token.

    The first token follows nothing: its entries are None.

    Attributes:
      logprobs: of each token under the raw logits. ranks: of each, 1 for the most likely token.
      top: token id -> logprob of the most likely tokens, best first, and of the token itself, at
        the end if it is none of them.
    """

    logprobs: list[float | None]
    ranks: list[int | None]
    top: list[dict[int, float] | None]


class Started(NamedTuple):
    """Prompts whose scores the device has been asked for.

    Attributes:
      rows: of each prompt, its token ids, and its batch and row among `batches`.
      batches: pieces of prompts that were read side by side, in order.
    """

    rows: list[tuple[Several[int], int, int]]
    batches: list[list[Scores]]


class PromptScorer:
    """Scores prompts with the weights that an engine holds at the time.

    Prompts are read in pieces, as before they are sampled, into pages of their own that are dropped
    afterwards. Replicas share the work: what is read side by side goes to the one that has read
    the least so far, and its scores are those of any other.

    Args:
      engine: used only within `start` and `warm_up`.
      max_len: tokens of a prompt at most.

    Attributes:
      spans: lengths that prompts are padded to, one program each.
    """

    def __init__(self, engine: Engine | Replicas, max_len: int):
        self._runners = [one.runner for one in engine.engines]
        self._read = [0] * len(self._runners)  # positions, by replica
        self.spans = [SHORTEST]
        while self.spans[-1] < max_len:
            self.spans.append(2 * self.spans[-1])
        self.spans[-1] = max_len
        self.spans = [
            self._width(span) * math.ceil(span / self._width(span)) for span in self.spans
        ]

    def _width(self, span: int) -> int:
        """Positions that are read at a time of prompts of such a length."""
        return min(self._runners[0].stride, 16 * math.ceil(span / 16))

    def warm_up(self) -> None:
        """Compiles every program for every replica; to be called where `start` may be."""
        for span in self.spans:
            for runner in self._runners:
                prompt = [0] * min(span, runner.max_len)
                self._start_batch(runner, [prompt], self._rows(span), span)

    def start(self, prompts: Several[Several[int]]) -> Started:
        """Asks the device for the scores of prompts; does not wait for it.

        Only the thread that steps the engine may call this, between two steps.
        """
        rows, batches, by_span = [None] * len(prompts), [], {}
        for index, prompt in enumerate(prompts):
            span = next(span for span in self.spans if span >= len(prompt))
            by_span.setdefault(span, []).append(index)
        for span, indices in by_span.items():
            count = self._rows(span)
            for at in range(0, len(indices), count):
                batch = indices[at : at + count]
                for row, index in enumerate(batch):
                    rows[index] = prompts[index], len(batches), row
                replica = self._read.index(min(self._read))
                self._read[replica] += count * span
                read = [prompts[i] for i in batch]
                batches.append(self._start_batch(self._runners[replica], read, count, span))
        return Started(rows, batches)

    @staticmethod
    def _rows(span: int) -> int:
        """Prompts that one program reads side by side."""
        return max(1, TOKENS // span)

    def _start_batch(
        self, runner: Runner, prompts: Several[Several[int]], count: int, span: int
    ) -> list[Scores]:
        width, longest = self._width(span), max(map(len, prompts))
        tokens = np.zeros((count, span + 1), np.int32)
        for row, prompt in zip(tokens, prompts, strict=False):
            row[: len(prompt)] = prompt
        scratch, table = runner.empty_scratch(count, span)
        pieces = []
        for first in range(0, longest, width):
            start = np.full(count, first, np.int32)
            piece = tokens[:, first : first + width + 1]
            scratch, scores = runner.score(scratch, piece, start, table)
            pieces.append(scores)
        return pieces

    def read(self, started: Started, top: int) -> list[PromptScores]:
        """Waits for the device; any thread may.

        Args:
          top: most likely tokens to give at each position, at most 20.

        Raises:
          InvalidLogitsError: the logits somewhere in a prompt are no distribution.
        """
        batches = [
            Scores(*(np.concatenate(parts, axis=1) for parts in zip(*pieces, strict=True)))
            for pieces in started.batches
        ]
        found = []
        for index, (prompt, at, row) in enumerate(started.rows):
            # What follows the last token was not given, and what lies beyond it is arbitrary.
            scores = Scores(*(x[row, : len(prompt) - 1] for x in batches[at]))
            if not scores.valid.all():
                place = f"token {int(scores.valid.argmin()) + 1} of prompt {index}"
                raise InvalidLogitsError(why_invalid(place, "it has no log-probability"))
            found.append(_scores_of(prompt, scores, top))
        return found


def _scores_of(prompt: Several[int], scores: Scores, top: int) -> PromptScores:
    logprobs, ranks, ids, best, _ = scores
    count = len(logprobs)
    given = [
        dict(zip(ids[i, :top].tolist(), best[i, :top].tolist(), strict=True)) for i in range(count)
    ]
    # A token that is among the best has one value: clients look for it by equality.
    chosen = [
        found.get(token, value)
        for token, value, found in zip(prompt[1:], logprobs.tolist(), given, strict=True)
    ]
    with_chosen = [
        found | {token: value}
        for token, value, found in zip(prompt[1:], chosen, given, strict=True)
    ]
    return PromptScores([None, *chosen], [None, *ranks.tolist()], [None, *with_chosen])
