"""A simulated machine: true costs, true acceptance, chunks, and one chunk of lag."""

import dataclasses
from collections.abc import Mapping

import numpy as np
from scripted import chunk_of

from specjax.config.strategy import Strategy
from specjax.control import OFF, Controller, CostTable, Observation

ARMS = ("off", "1_1_2", "2_1_3", "4_1_5", "7_1_8")
GOOD = (0.85, 0.82, 0.8, 0.78, 0.76, 0.75, 0.74)
BAD = (0.02,) * 7


# Milliseconds of a round with so many rows [T] for so many slots [B], and of a draft step. Rows
# cost on a CPU; on a large GPU they are free until they fill it, and tokens in caches cost.
MACHINES = {
    "cpu": (lambda b, t: 0.55 + 0.17 * b if t == 1 else 0.9 + b * (0.15 + 0.05 * t),
            lambda b: 0.06 + 0.02 * b, 0.0),
    "h200_8b": (lambda b, t: max(3.18 + 0.031 * b, 0.016 * b * t), lambda b: 0.354 + 0.001 * b,
                3e-5),
}  # fmt: skip


def cost_table(name: str, arms=ARMS, times: Mapping[str, float] | None = None) -> CostTable:
    """Of one of `MACHINES`; `times`: factors of arms whose rounds cost otherwise."""
    batches, short = (1, 2, 4, 8, 16, 32, 64), 1024
    round_of, draft, per_token = MACHINES[name]

    def seconds(arm: str, batch: int) -> float:
        steps = Strategy.parse(arm).steps
        cost = round_of(batch, 1 + steps) + steps * draft(batch) + per_token * batch * short
        return (times or {}).get(arm, 1.0) * cost / 1000

    rows = {arm: [seconds(arm, b) for b in batches] for arm in arms}
    return CostTable(batches, rows, slope=per_token / 1000, short=short)


@dataclasses.dataclass
class Run:
    """Per chunk: rounds so far, strategy, true expected tokens, true seconds, and the least.

    The least is what the best strategy would have taken at that time for as many tokens.
    """

    at: list[int] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)
    tokens: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    least: list[float] = dataclasses.field(default_factory=list)

    @property
    def share(self) -> float:
        """Of the rate that the best strategy of each moment would have had."""
        return sum(self.least) / sum(self.seconds)

    def rate(self, after: int = 0, until: float = float("inf")) -> float:
        """Tokens per second of the chunks that began in [after, until)."""
        chosen = [i for i, at in enumerate(self.at) if after <= at < until]
        return sum(self.tokens[i] for i in chosen) / sum(self.seconds[i] for i in chosen)


class World:
    """Costs and acceptance as they truly are.

    Args:
      rates: acceptance per depth, given that the parent was accepted; may be swapped at any time.
      wide: how much a tree's rejections shrink, as a power (1: a chain's).
      slower: by what factor a strategy's rounds take longer than `costs` says, given its name and
        how many rounds have run; None: 1.
      catch_up: what a draft takes to read 128 tokens of plain decoding, in plain rounds.
      length: tokens in the cache of each slot, to which every chunk adds what it emits; None: costs
        do not depend on them, and nobody is told.
    """

    def __init__(self, costs: CostTable, rates=GOOD, noise=0.03, outliers=0.01, wide=1.6, seed=0,
                 slower=None, catch_up=0.0, length=None):  # fmt: skip
        self.length = length
        self.slower, self.at, self.catch_up, self.behind = slower, 0, catch_up, 0
        self.costs, self.rates, self.noise, self.outliers = costs, rates, noise, outliers
        self.wide = wide
        self.random = np.random.default_rng(seed)

    def steps(self, name: str) -> int:
        return Strategy.parse(name).steps

    def depth_rates(self, name: str) -> np.ndarray:
        if name == "off":
            return np.zeros(0)
        strategy = Strategy.parse(name)
        rates = np.array(self.rates)[: strategy.steps]
        return rates if strategy.is_chain else 1 - (1 - rates) ** self.wide

    def tokens(self, name: str) -> float:
        return 1 + float(np.cumprod(self.depth_rates(name)).sum())

    def context(self, batch: int) -> float | None:
        return None if self.length is None else batch * self.length

    def seconds(self, name: str, batch: int) -> float:
        seconds = self.costs.seconds(name, batch, context=self.context(batch))
        return seconds * self.slower(name, self.at) if self.slower else seconds

    def begin_seconds(self, name: str, batch: int) -> float:
        """Before the first round of a chunk that comes now; a draft reads 32 tokens at a time."""
        behind = min(self.behind, 128)
        rows = 0 if name == OFF or behind <= 1 + self.steps(name) else 32 * -(-behind // 32)
        return self.catch_up * rows / 128 * self.seconds(OFF, batch)

    def oracle(self, arms, batch: int) -> float:
        return max(batch * self.tokens(a) / self.seconds(a, batch) for a in arms)

    def chunk(self, name: str, batch: int, rounds: int) -> Observation:
        rates = self.depth_rates(name)
        accepted = self.random.random((rounds, batch, len(rates))) < rates
        accepted = np.cumprod(accepted, axis=-1).sum(axis=-1).astype(int)
        seconds = rounds * self.seconds(name, batch) + self.begin_seconds(name, batch)
        seconds += self.costs.beside(batch)
        seconds *= np.exp(self.random.normal(0, self.noise))
        behind = self.behind
        self.behind = self.behind + rounds if name == OFF else 0
        if self.random.random() < self.outliers:
            seconds *= 10
        self.at += rounds
        context = self.context(batch)
        if self.length is not None:
            self.length += rounds * self.tokens(name)
        return chunk_of(batch, name, accepted, float(seconds), catch_up=behind, context=context)


def drive(
    controller: Controller, world: World, batch: int, rounds: int, chunk: int = 16, lag: int = 1,
    swap_every: int | None = None, chunk_tokens: int | None = None,
) -> Run:  # fmt: skip
    """Runs `rounds` rounds; results arrive `lag` chunks after the choice that they could serve.

    Args:
      swap_every: rounds after which the controller is told of new weights, again and again.
      chunk_tokens: that a chunk has room for, in place of rounds.
    """
    run, waiting, at, told = Run(), [], 0, 0
    while at < rounds:
        if swap_every and at >= told:
            controller.weights_changed()
            told += swap_every
        name = controller.select(batch, world.context(batch))
        most = chunk if chunk_tokens is None else max(1, chunk_tokens // (1 + world.steps(name)))
        count = min(most, controller.rounds_hint or most)
        run.at.append(at)
        run.names.append(name)
        run.tokens.append(count * batch * world.tokens(name))
        more = world.begin_seconds(name, batch) + world.costs.beside(batch)
        run.seconds.append(count * world.seconds(name, batch) + more)
        run.least.append(run.tokens[-1] / world.oracle(controller.arms, batch))
        waiting.append(world.chunk(name, batch, count))
        at += count
        if len(waiting) > lag:
            controller.observe(waiting.pop(0))
    for seen in waiting:
        controller.observe(seen)
    return run
