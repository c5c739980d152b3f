"""Scripted acceptance: drafting and verification run in full, what is accepted is known before.

A draft head of random weights guesses nothing, and a trained one guesses as its texts allow; a true
speed-up at a given acceptance is measured with a script that says, of each position of each slot,
whether the token drafted for it is accepted. Drafted tokens that the script accepts are emitted,
then one that the target chose. (SGLang has the like for its benchmarks.)
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from specjax.decode.accept import Acceptance, accept
from specjax.decode.draft import DraftedTree
from specjax.decode.state import DecodeState, Plan
from specjax.indexing import take_along

PRIME = 8191  # positions after which the script comes again


@functools.cache
def script(probability: float) -> np.ndarray:
    """[PRIME] whether the token drafted for a position is accepted."""
    return np.random.default_rng(0).random(PRIME) < probability


@dataclasses.dataclass(frozen=True)
class Scripted:
    """An acceptance rule, see `Plan.rule`, for chains.

    The strategy's own rule runs as it does without a script; the token that it emits last, which
    the target chose, follows those that are accepted.
    """

    probability: float

    def __call__(
        self, plan: Plan, state: DecodeState, draft: DraftedTree, transformed
    ) -> Acceptance:
        """Raises ValueError where the strategy is no chain."""
        if not plan.tree.is_chain:
            raise ValueError(
                "expected a chain such as 4_1_5: of a tree, a script would have to say which branch"
                " is accepted as well"
            )
        own = accept(dataclasses.replace(plan, rule=None), state, draft, transformed)
        steps = plan.steps
        positions = (state.length[:, None] + np.arange(steps)).astype(state.keys.dtype)
        places = (state.keys[:, :1] % PRIME + positions) % PRIME
        taken = jnp.asarray(script(self.probability))[places]
        count = 1 + jnp.cumprod(taken.astype(jnp.int32), axis=1).sum(axis=1)
        rows = np.arange(steps + 1)
        drafted = jnp.pad(draft.tokens[:, 1:], ((0, 0), (0, 1)))
        last = take_along(own.tokens, (own.count - 1)[:, None], axis=1)
        tokens = jnp.where(rows < (count - 1)[:, None], drafted, last)
        path = jnp.broadcast_to(rows.astype(own.path.dtype), own.path.shape)
        return Acceptance(tokens.astype(own.tokens.dtype), path, count.astype(own.count.dtype))


def scripted_lengths(
    probability: float, keys: np.ndarray, begin: int, steps: int, rounds: int
) -> np.ndarray:
    """[B] tokens that slots with these keys emit in so many rounds of a chain, by the script."""
    accepted, length = script(probability), np.full(len(keys), begin, np.int64)
    for _ in range(rounds):
        places = (keys[:, :1].astype(np.int64) % PRIME + length[:, None] + np.arange(steps)) % PRIME
        length += 1 + np.cumprod(accepted[places], axis=1).sum(axis=1)
    return length - begin
