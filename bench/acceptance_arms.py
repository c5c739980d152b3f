"""What `bench.acceptance` compares: acceptance rules, trees and draft sources."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specjax import SpecConfig, Strategy

TAUS = (0.3, 0.6, 1.0)
DEFAULT_TAU = SpecConfig().tau

# Trees with as many drafted nodes as the key says. `bushy` is wide at the root, `spine` is a long
# chain of best children with a second choice beside its first nodes.
TREES: dict[int, dict[str, Any]] = {
    4: {
        "chain": "4_1_5",
        "spine": ((0,), (1,), (0, 0), (0, 0, 0)),
        "dynamic_wide": "3_2_5",
    },
    7: {
        "chain": "7_1_8",
        "bushy": ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)),
        "spine": ((0,), (1,), (0, 0), (0, 1), (0,) * 3, (0,) * 4, (0,) * 5),
        "dynamic_narrow": "4_2_8",
        "dynamic_wide": "4_4_8",
    },
    15: {
        "chain": "15_1_16",
        "spine": (
            *((0,) * depth for depth in range(1, 9)),
            *((0,) * depth + (1,) for depth in range(4)),
            (1, 0), (0, 1, 0), (1, 0, 0),
        ),
        "dynamic_wide": "6_4_16",
    },
}  # fmt: skip
MAIN_TREES = ("chain", "spine", "dynamic_wide")

# What is asked of the policy; the keys name figures.
SETTINGS = {
    "T_0": {"temperature": 0.0},
    "T_0.7": {"temperature": 0.7},
    "T_1": {"temperature": 1.0},
}
ALIGNED_SETTINGS = {
    "T_0.7_top_p_0.9": {"temperature": 0.7, "top_p": 0.9},
    "T_1_repetition_1.1_frequency_0.5": {
        "temperature": 1.0,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.5,
    },
}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to draft and accept; `nodes` are drafted tokens, `tree` a key of `TREES[nodes]`."""

    source: str
    mode: str
    nodes: int
    tree: str
    tau: float = DEFAULT_TAU
    aligned: bool = True

    @property
    def strategy(self) -> Strategy:
        return Strategy.parse(TREES[self.nodes][self.tree])

    @property
    def name(self) -> str:
        tau = f"_tau_{self.tau}" if self.strategy.is_dynamic else ""
        return f"{self.source}/{self.mode}/{self.tree}{tau}/nodes_{self.nodes}"

    def spec(self, drafts: Mapping[str, str]) -> SpecConfig:
        """Args: drafts: directory of each standalone model, by source."""
        common = {
            "strategy": self.strategy,
            "acceptance": self.mode,
            "tau": self.tau,
            "aligned": self.aligned,
        }
        if self.source in drafts:
            return SpecConfig(draft_model=drafts[self.source], **common)
        return SpecConfig(source=self.source, **common)


def arms(sources: Sequence[str]) -> Iterator[Arm]:
    """Every rule with every tree that it takes; of trees and tau the head sees more than others."""
    for source, nodes in itertools.product(sources, TREES):
        head = source == "head"
        if source == "itself":  # what a perfect draft would reach
            yield Arm(source, "coupled", nodes, "chain")
            continue
        for tree in TREES[nodes] if head else MAIN_TREES:
            dynamic = tree.startswith("dynamic")
            for tau in TAUS if head and tree == "dynamic_wide" else (DEFAULT_TAU,):
                yield Arm(source, "coupled", nodes, tree, tau)
            if tree == "chain":
                yield Arm(source, "block", nodes, tree)
            if not dynamic:
                yield Arm(source, "recursive", nodes, tree)


def aligned_arms() -> Iterator[Arm]:
    """Pairs that differ in `aligned` alone."""
    for mode, tree in (("coupled", "chain"), ("coupled", "dynamic_wide"), ("block", "chain")):
        for aligned in (True, False):
            yield Arm("head", mode, 7, tree, aligned=aligned)
