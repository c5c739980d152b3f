"""Speculative rounds against plain ones, with scripted acceptance: true speed-ups.

Models of 12 and of 4 layers are measured in turns, so that large batches fit and programs compile
fast; their difference gives the time of one layer, and with it that of the whole model.

The drafts of a random head are hardly ever accepted, and the acceptance of a trained one depends on
the texts. So acceptance is scripted: drafting and verification run in full, and a script decides
for each position of each slot whether the token drafted for it is accepted.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from bench.gpu.chunks import OFF, Chunk, Size, figures_by_layers, milliseconds_per_round, shape_of
from bench.gpu.job import Job
from bench.gpu.program import Place, Program, build
from bench.record import figure, paired_ratio_interval
from specjax.decode.accept import Acceptance, accept
from specjax.decode.draft import DraftedTree
from specjax.decode.state import DecodeState, Plan
from specjax.indexing import take_along


class Sizes(NamedTuple):
    """Sizes of the measurement; `layers` are those of the two models, the larger number first."""

    shape: str = "8B"
    layers: tuple[int, int] = (12, 4)
    strategy: str = "4_1_5"
    context: int = 1024
    rounds: int = 24
    repeats: int = 9
    acceptance: tuple[float, ...] = (0.6, 0.8)


SMALL = Sizes("tiny", (2, 1), "2_1_3", 32, 3, 3)


def _chunks(
    place: Place, sizes: Sizes, batch: int, draft_vocab: int | None = None
) -> dict[str, Chunk]:
    """Makes chunks `<layers>/<arm>` of plain decoding, and of the strategy at each probability."""
    found = {}
    for layers in sizes.layers:
        size = Size(sizes.shape, batch, sizes.context, layers, rounds=sizes.rounds)
        found[f"{layers}/{OFF}"] = Chunk(place, size)
        for probability in sizes.acceptance:
            spec = size._replace(strategy=sizes.strategy, draft_vocab=draft_vocab)
            found[f"{layers}/{probability}"] = Chunk(place, spec, Scripted(probability))
    return found


def _programs(chunks: dict[str, Chunk]) -> list[Program]:
    # Chunks with the same number of layers share the policy's weights, see `load`.
    weights = {chunk.cfg.num_layers: chunk.weights for chunk in chunks.values()}
    every = sum(chunk.held - chunk.weights for chunk in chunks.values()) + sum(weights.values())
    return [
        program
        for name, chunk in chunks.items()
        for program in chunk.programs(name, beside=every - chunk.held)
    ]


def _drafted(small: bool, draft_vocab: int | None) -> int | None:
    return min(draft_vocab, 32) if draft_vocab and small else draft_vocab


def programs(
    place: Place, small: bool, batch: int, draft_vocab: int | None = None
) -> list[Program]:
    sizes = SMALL if small else Sizes()
    return _programs(_chunks(place, sizes, batch, _drafted(small, draft_vocab)))


def measure(job: Job, batch: int, draft_vocab: int | None = None) -> None:
    """Measures `ms/..` of a round, `round_over_plain`, `speedup/<acceptance>`, `accept_length/..`.

    The speed-up is computed from the measured time of a round and the expected accept length at the
    probability; the one in these few slots and rounds may differ, `script_length/..`.
    """
    sizes = SMALL if job.small else Sizes()
    job.tell(sizes=sizes._asdict(), batch=batch, draft_vocab=draft_vocab)
    chunks = _chunks(Place(), sizes, batch, _drafted(job.small, draft_vocab))
    built = build(_programs(chunks))
    for layers in sizes.layers:
        first = None
        for name, chunk in chunks.items():
            if name.startswith(f"{layers}/"):
                chunk.load(job.seed, first)
                first = first or chunk
                chunk.compiled = built
    job.tell(attention=first.cfg.run.attention)
    job.each([("round_over_plain", functools.partial(_figures, sizes, batch, chunks))])


def _figures(sizes: Sizes, batch: int, chunks: dict[str, Chunk]) -> dict:
    result, lengths = {}, {}
    more, less = sizes.layers
    for probability in sizes.acceptance:
        chunk = chunks[f"{less}/{probability}"]
        lengths[probability] = _script_length(sizes, chunk, f"{less}/{probability}", probability)
    arms = {name: (chunk, name) for name, chunk in chunks.items()}
    found = milliseconds_per_round(arms, sizes.repeats)
    total = shape_of(sizes.shape).num_layers
    whole = {}
    for arm in (OFF, *sizes.acceptance):
        of_arm = {n: found[f"{n}/{arm}"] for n in sizes.layers}
        whole[arm], figures = figures_by_layers(
            of_arm, f"{arm}", sizes.layers, total, "ms per round"
        )
        result |= figures
    for probability in sizes.acceptance:
        length = expected_length(probability, chunks[f"{more}/{probability}"].runner.steps)
        ratio, *ends = paired_ratio_interval(whole[OFF], [ms / length for ms in whole[probability]])
        unit = "tokens per second at the expected accept length, over plain decoding's"
        result[f"speedup/{probability}"] = figure(ratio, unit, ends)
        result[f"accept_length/{probability}"] = figure(length, "tokens per round, expected")
        unit = "tokens per round, as measured and by the script"
        result[f"script_length/{probability}"] = figure(lengths[probability], unit)
    # Acceptance changes no shape, so the rounds of all probabilities are equal work.
    rounds = [ms for probability in sizes.acceptance for ms in whole[probability]]
    ratio, *ends = paired_ratio_interval(rounds, whole[OFF] * len(sizes.acceptance))
    return result | {"round_over_plain": figure(ratio, "times a plain step", ends)}


def expected_length(probability: float, steps: int) -> float:
    """Returns tokens per round of a chain whose drafts are accepted with a probability."""
    return sum(probability**i for i in range(steps + 1))


def _script_length(sizes: Sizes, chunk: Chunk, name: str, probability: float) -> float:
    """Returns the tokens per round, after checking them against the script.

    Raises:
      RuntimeError: the tokens are not those of the script.
    """
    chunk.prepare()
    keys = np.asarray(chunk.runner.state.keys)[: chunk.size.batch]
    emitted = chunk.emitted(chunk.run(name))
    steps = chunk.runner.steps
    wanted = scripted_lengths(probability, keys, sizes.context, steps, sizes.rounds)
    if (emitted != wanted).any():
        raise RuntimeError(
            f"expected {wanted.tolist()} tokens by the script, got {emitted.tolist()}"
        )
    return float(emitted.mean() / sizes.rounds)


# --- scripted acceptance --------------------------------------------------------------------------

PRIME = 8191  # period of the script, in positions


@functools.cache
def script(probability: float) -> np.ndarray:
    """Returns [PRIME] booleans: whether the token drafted for a position is accepted."""
    return np.random.default_rng(0).random(PRIME) < probability


@dataclasses.dataclass(frozen=True)
class Scripted:
    """An acceptance rule for chains, see `Plan.rule`.

    The strategy's own rule runs as usual; the last token that it emits, which the target chose,
    follows the accepted tokens.
    """

    probability: float

    def __call__(
        self, plan: Plan, state: DecodeState, draft: DraftedTree, transformed
    ) -> Acceptance:
        """Accepts drafts by the script; raises ValueError if the strategy is no chain."""
        if not plan.tree.is_chain:
            raise ValueError(
                "expected a chain such as 4_1_5, because the script cannot choose a tree's branch"
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
    """Returns the tokens [B] that slots emit in `rounds` rounds of a chain, by the script."""
    accepted, length = script(probability), np.full(len(keys), begin, np.int64)
    for _ in range(rounds):
        places = (keys[:, :1].astype(np.int64) % PRIME + length[:, None] + np.arange(steps)) % PRIME
        length += 1 + np.cumprod(accepted[places], axis=1).sum(axis=1)
    return length - begin
