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
    """Every rule with every tree for 7 nodes of the head; elsewhere the main ones."""
    for source, nodes in itertools.product(sources, TREES):
        if source != "head" and nodes != 7:
            continue
        if source == "itself":
            yield Arm(source, "coupled", nodes, "chain")
            continue
        everything = source == "head" and nodes == 7
        for tree in TREES[nodes] if everything else ("chain", "spine", "dynamic_wide"):
            dynamic = tree.startswith("dynamic")
            for tau in TAUS if tree == "dynamic_wide" and source == "head" else (DEFAULT_TAU,):
                yield Arm(source, "coupled", nodes, tree, tau)
            if tree == "chain":
                yield Arm(source, "block", nodes, tree)
            if everything and not dynamic or tree == "spine":
                yield Arm(source, "recursive", nodes, tree)


def aligned_arms() -> Iterator[Arm]:
    """Pairs that differ in `aligned` alone."""
    for mode, tree in (("coupled", "chain"), ("coupled", "dynamic_wide"), ("block", "chain")):
        for aligned in (True, False):
            yield Arm("head", mode, 7, tree, aligned=aligned)
