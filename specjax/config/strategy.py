"""What one round drafts: a chain, a static tree, or a dynamic tree."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import ClassVar

OFF_NAMES = ("off", "disable", "none")

# Wide near the root, narrower later: four children, two below the best two, one each after.
DEFAULT_TREE_PATHS = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (1, 0), (1, 1),
    (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Strategy:
    """What one round drafts; `Strategy.OFF`, plain decoding, drafts nothing.

    Settings and flags name a strategy by text, which `parse` reads once. The name is used in
    messages and files, and identifies the strategy in an engine's plans, its controller and its
    requests.

    A chain or static tree is a prefix-closed set of paths below the root: `(i, j)` is the j-th best
    child of the i-th best child of the root. Paths are ordered by depth, then lexicographically.

    A dynamic tree (EAGLE-2, arXiv 2406.16858) has no paths: each of `depth` steps expands the
    `topk` best nodes of a level into `topk` children each, and the `max_rows` - 1 nodes of the best
    paths become rows.

    Attributes:
      name: the text that `parse` reads as this strategy.
      paths: the paths of a chain or static tree; empty for a dynamic tree and for plain decoding.
      dynamic: (steps, topk, rows) of a dynamic tree, else None.
    """

    name: str
    paths: tuple[tuple[int, ...], ...] = ()
    dynamic: tuple[int, int, int] | None = None
    OFF: ClassVar[Strategy]

    def __str__(self) -> str:
        return self.name

    @property
    def is_off(self) -> bool:
        """Whether it is plain decoding: a chain of no steps, whose only row is the root."""
        return not (self.paths or self.dynamic)

    @property
    def rows(self) -> int:
        """Tree rows T, root included."""
        return self.dynamic[2] if self.dynamic else len(self.paths) + 1

    @property
    def steps(self) -> int:
        """Draft steps: the depth of the deepest path."""
        return self.dynamic[0] if self.dynamic else max(map(len, self.paths), default=0)

    @property
    def is_chain(self) -> bool:
        return not self.dynamic and all(not any(path) for path in self.paths)

    @property
    def is_dynamic(self) -> bool:
        return self.dynamic is not None

    @classmethod
    def parse(cls, spec: str | Sequence[Sequence[int]] | Strategy) -> Strategy:
        """Reads `"off"`, `"4_1_5"`, `"8_4_32"`, `"4x2x1"`, `"default"` (twelve paths), path tuples,
        or their name, such as `"paths:0,1,0.0"`.

        Raises:
          ValueError: the text is no strategy, or its numbers contradict each other.
        """
        if isinstance(spec, Strategy):
            return spec
        if not isinstance(spec, str):
            return cls.from_paths(spec)
        if spec.lower() in OFF_NAMES:
            return cls.OFF
        if spec == "default":
            return dataclasses.replace(cls.from_paths(DEFAULT_TREE_PATHS), name="default")
        if re.fullmatch(r"\d+_\d+_\d+", spec):
            return cls.of_sizes(*map(int, spec.split("_")))
        if re.fullmatch(r"paths:\d+([.,]\d+)*", spec):
            paths = spec.removeprefix("paths:").split(",")
            return cls.from_paths([tuple(map(int, path.split("."))) for path in paths])
        if re.fullmatch(r"\d+(x\d+)*", spec):
            return _parse_children(spec, [int(c) for c in spec.split("x")])
        raise ValueError(
            f"strategy {spec!r} is not understood; expected 'steps_topk_rows' such as '4_1_5' (a "
            "chain) or '6_4_16' (a dynamic tree), children per level such as '4x2x1', 'default', "
            "path tuples, or 'off'"
        )

    @classmethod
    def chain(cls, steps: int) -> Strategy:
        """The chain of `steps` drafted tokens; 0 is plain decoding."""
        return cls.of_sizes(steps, 1, steps + 1) if steps else cls.OFF

    @classmethod
    def of_sizes(cls, steps: int, topk: int, rows: int) -> Strategy:
        """A chain (`topk` 1) or a dynamic tree, by its sizes; `rows` counts the root.

        Raises:
          ValueError: the numbers contradict each other.
        """
        name = f"{steps}_{topk}_{rows}"
        if topk == 1:
            if steps < 1 or rows != steps + 1:
                raise ValueError(
                    f"chain {name!r} needs steps >= 1 and rows = steps + 1 (the root counts); use "
                    f"'{max(steps, 1)}_1_{max(steps, 1) + 1}'"
                )
            return cls(name, tuple((0,) * d for d in range(1, steps + 1)))
        if steps < 1 or topk < 1:
            raise ValueError(f"strategy {name!r} needs steps >= 1 and topk >= 1")
        most = 1 + topk + (steps - 1) * topk**2
        if not steps + 1 <= rows <= most:
            raise ValueError(
                f"dynamic tree {name!r} needs between steps + 1 = {steps + 1} and 1 + topk + "
                f"(steps - 1) * topk^2 = {most} rows (the root counts), got {rows}"
            )
        return cls(name, (), (steps, topk, rows))

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> Strategy:
        """A static tree from path tuples; every prefix and every better sibling must be listed."""
        tuples = sorted({tuple(int(i) for i in p) for p in paths}, key=lambda p: (len(p), p))
        if not tuples:
            raise ValueError("a static tree needs at least one path, got none; use 'off' instead")
        known = set(tuples)
        for path in tuples:
            if not path or min(path) < 0:
                raise ValueError(f"tree path {path} must hold child ranks >= 0")
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(f"tree path {path} has no parent: add {path[:-1]}")
            if path[-1] and (*path[:-1], path[-1] - 1) not in known:
                raise ValueError(
                    f"tree path {path} skips a better sibling: add {(*path[:-1], path[-1] - 1)}"
                )
        return cls("paths:" + ",".join(".".join(map(str, p)) for p in tuples), tuple(tuples))

    def capped(self, rows: int) -> Strategy:
        """The strategy with at most `rows` rows.

        Raises:
          ValueError: a chain or static tree has more rows; only dynamic trees can be cut.
        """
        if self.rows <= rows:
            return self
        if not self.dynamic:
            raise ValueError(
                f"strategy {self.name!r} has {self.rows} rows, more than spec_verify_tokens={rows};"
                " raise it, or use a smaller or a dynamic tree"
            )
        if rows <= self.steps:
            raise ValueError(
                f"strategy {self.name!r} needs a row for the root and for each of its {self.steps} "
                f"steps, and spec_verify_tokens={rows} cuts it below that; raise it to "
                f"{self.steps + 1} or more, or take fewer steps"
            )
        return Strategy.of_sizes(*self.dynamic[:2], rows)


Strategy.OFF = Strategy("off")


def _parse_children(name: str, children: list[int]) -> Strategy:
    if min(children) < 1:
        raise ValueError(f"static tree {name!r} needs at least one child per level")
    paths, level = [], [()]
    for count in children:
        level = [(*path, i) for path in level for i in range(count)]
        paths += level
    return Strategy(name, tuple(paths))
