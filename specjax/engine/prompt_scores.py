"""Log-probabilities of prompts, by programs of a few lengths that are padded to."""

from __future__ import annotations

import math
from collections.abc import Sequence as Several
from typing import NamedTuple

import numpy as np

from specjax.decode.score import Scores
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
    """

    rows: list[tuple[Several[int], int, int]]
    batches: list[Scores]


class PromptScorer:
    """Scores prompts with the weights that a runner holds at the time.

    Args:
      runner: the device side of an engine; used only within `start` and `warm_up`.
      max_len: tokens of a prompt at most.
    """

    def __init__(self, runner: Runner, max_len: int):
        self._runner = runner
        widths = [SHORTEST]
        while widths[-1] < max_len:
            widths.append(2 * widths[-1])
        widths[-1] = max(16 * math.ceil(max_len / 16), 16)
        self.widths = widths

    def warm_up(self) -> None:
        """Compiles every program; to be called where `start` may be."""
        for width in self.widths:
            self.start([[0] * min(width, self._runner.max_len)])

    def start(self, prompts: Several[Several[int]]) -> Started:
        """Asks the device for the scores of prompts; does not wait for it.

        Only the thread that steps the engine may call this, between two steps.
        """
        rows, batches, by_width = [None] * len(prompts), [], {}
        for index, prompt in enumerate(prompts):
            width = next(width for width in self.widths if width >= len(prompt))
            by_width.setdefault(width, []).append(index)
        for width, indices in by_width.items():
            count = max(1, TOKENS // width)
            for at in range(0, len(indices), count):
                tokens, lengths = np.zeros((count, width), np.int32), np.ones(count, np.int32)
                for row, index in enumerate(indices[at : at + count]):
                    prompt = prompts[index]
                    tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
                    rows[index] = prompt, len(batches), row
                batches.append(self._runner.score(tokens, lengths))
        return Started(rows, batches)

    def read(self, started: Started, top: int) -> list[PromptScores]:
        """Waits for the device; any thread may.

        Args:
          top: most likely tokens to give at each position, at most 20.

        Raises:
          FloatingPointError: a log-probability is not a number.
        """
        batches = [Scores(*map(np.asarray, batch)) for batch in started.batches]
        return [_scores_of(prompt, batches[at], row, top) for prompt, at, row in started.rows]


def _scores_of(prompt: Several[int], batch: Scores, row: int, top: int) -> PromptScores:
    count = len(prompt) - 1
    logprobs, ranks, ids, best = (x[row, :count] for x in batch)
    if np.isnan(logprobs).any():
        raise FloatingPointError(
            f"the log-probability of the token at {int(np.isnan(logprobs).argmax()) + 1} of a "
            "prompt is not a number: the policy's weights, or what it makes of this prompt, "
            "are not finite"
        )
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
