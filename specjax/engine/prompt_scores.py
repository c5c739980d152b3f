"""Log-probabilities of the tokens of prompts, as servers report them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.admit import Scores, score
from specjax.engine.base import BaseEngine
from specjax.engine.pages import pages_for
from specjax.engine.request import InvalidLogitsError, why_invalid
from specjax.engine.runner import Runner
from specjax.engine.settings import powers
from specjax.interfaces import Memory, Room
from specjax.memory import empty
from specjax.parallel import sharding

WARM = 2048  # tokens of the longest prompt whose program is compiled ahead
SHORTEST = 64  # the smallest number of positions that prompts are padded to


class PromptScores(NamedTuple):
    """Log-probabilities of a prompt's tokens under the raw logits, one entry per token.

    The entries of the first token, which has no context, are None.

    Attributes:
      logprobs: log-probability of each token.
      ranks: rank of each token; the most likely token has rank 1.
      top: token id -> logprob of the most likely tokens, best first, and of the token itself, at
        the end if it is none of them.
    """

    logprobs: list[float | None]
    ranks: list[int | None]
    top: list[dict[int, float] | None]


# Prompts, each with the scores of its pieces, which the device is computing.
Started = list[tuple[Sequence[int], list[Scores]]]


class PromptScorer:
    """Scores prompts with the present weights of an engine.

    Prompts are read one by one, in pieces as for sampling, into pages that are dropped afterwards.
    Each goes to the replica that has read the fewest positions so far.

    Args:
      engine: the engine, which is used only within `start` and `warm_up`.
      max_len: the most tokens of a prompt.

    Attributes:
      spans: lengths that prompts are padded to, ascending, each with a program of its own.
    """

    def __init__(self, engine: BaseEngine, max_len: int):
        self._runners = [one.runner for one in engine.engines]
        self._read = [0] * len(self._runners)  # number of positions read, by replica
        spans = powers(max_len, 2, SHORTEST)
        self.spans = [self._width(x) * math.ceil(x / self._width(x)) for x in spans]

    def _width(self, span: int) -> int:
        """The number of positions of a piece of a prompt that is padded to `span`."""
        return min(self._runners[0].stride, 16 * math.ceil(span / 16))

    def warm_up(self, background: bool = False) -> None:
        """Compiles and runs programs for every replica, in the thread that calls `start`.

        Those of prompts of more than `WARM` tokens are compiled when such a prompt comes.

        Args:
          background: whether threads compile them instead, and nothing runs.
        """
        for span in (span for span in self.spans if span <= max(WARM, self.spans[0])):
            for runner in self._runners:
                store = runner.executables
                behind = store.ahead(store.background)
                with behind if background else contextlib.nullcontext():
                    self._start_prompt(runner, [0] * min(span, runner.max_len), span)

    def start(self, prompts: Sequence[Sequence[int]]) -> Started:
        """Starts scoring prompts on the device, without waiting for the scores.

        Only the thread that steps the engine may call this, between two steps.
        """
        started = []
        for prompt in prompts:
            span = next(span for span in self.spans if span >= len(prompt))
            replica = self._read.index(min(self._read))
            self._read[replica] += span
            started.append((prompt, self._start_prompt(self._runners[replica], prompt, span)))
        return started

    def _start_prompt(self, runner: Runner, prompt: Sequence[int], span: int) -> list[Scores]:
        width, pages = self._width(span), pages_for(span, runner.page_size)
        tokens = np.zeros((1, span + 1), np.int32)
        tokens[0, : len(prompt)] = prompt
        table = 1 + np.arange(pages, dtype=np.int32)[None]
        room = Room(slots=1, pages=1 + pages, page_size=runner.page_size)
        scratch, pieces = _empty_memory(runner, room), []
        for first in range(0, len(prompt), width):
            piece = tokens[:, first : first + width + 1]
            scratch, scores = _score(runner, scratch, piece, np.full(1, first, np.int32), table)
            pieces.append(scores)
        return pieces

    def read(self, started: Started, top: int) -> list[PromptScores]:
        """Waits for the scores; any thread may call this.

        Args:
          started: what `start` returned.
          top: number of most likely tokens to return at each position, at most 20.

        Raises:
          InvalidLogitsError: the logits somewhere in a prompt are no distribution.
        """
        prompts = []
        for index, (prompt, pieces) in enumerate(started):
            whole = (np.concatenate(parts, axis=1)[0] for parts in zip(*pieces, strict=True))
            # The scores from the last token on are those of padding.
            scores = Scores(*(x[: len(prompt) - 1] for x in whole))
            if not scores.valid.all():
                place = f"token {int(scores.valid.argmin()) + 1} of prompt {index}"
                raise InvalidLogitsError(why_invalid(place, "it has no log-probability"))
            prompts.append(_scores_of(prompt, scores, top))
        return prompts


def _empty_memory(runner: Runner, room: Room) -> Memory:
    """Makes empty pages, zeroed on their devices."""
    shapes = jax.eval_shape(lambda: empty(runner.cfg, room))
    shapes = sharding.shapes(shapes, runner.mesh, sharding.state_shardings)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)


def _score(
    runner: Runner, scratch: Memory, tokens: np.ndarray, start: np.ndarray, table: np.ndarray
) -> tuple[Memory, Scores]:
    """Computes log-probabilities of pieces of prompts; one executable per shape."""

    def program(params, scratch, tokens, start, table):
        scratch, scores = score(runner.model(params), scratch, tokens, start, table)
        if runner.mesh is not None:
            scores = jax.lax.with_sharding_constraint(scores, sharding.replicated(runner.mesh))
        return scratch, scores

    inputs = (runner.weights.policy, scratch, tokens, start, table)
    key = ("score", tokens.shape, table.shape)
    scratch, scores = runner.run(key, program, inputs, (1,), inputs[2:])
    if scores is not None:  # else it is being compiled
        runner.mark = scores.ranks
    return scratch, scores


def _scores_of(prompt: Sequence[int], scores: Scores, top: int) -> PromptScores:
    ids, best = scores.top_ids[:, :top].tolist(), scores.top_logprobs[:, :top].tolist()
    result = PromptScores([None], [None, *scores.ranks.tolist()], [None])
    for i, (token, logprob) in enumerate(zip(prompt[1:], scores.logprobs.tolist(), strict=True)):
        entries = dict(zip(ids[i], best[i], strict=True))
        # `logprobs` and `top_logprobs` may differ in their last bits. Clients look for the token's
        # value among the best by equality.
        logprob = entries.get(token, logprob)
        result.logprobs.append(logprob)
        result.top.append(entries | {token: logprob})
    return result
