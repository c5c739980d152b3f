"""Tables of the parts, in the order in which they run, and of the targets of their figures."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple


class Part(NamedTuple):
    """One part of the queue.

    Attributes:
      name: name of the part.
      decides: purpose of its figures.
      module: module with `measure(job, **settings)` and `programs(place, small, **settings)`, which
        `--dry` compiles; a module without `programs` says why in `NOT_AHEAD`.
      settings: arguments of both functions.
      seconds: time limit, compilation included; the part is killed after it.
      environment: environment variables of its process; XLA_FLAGS are added to the user's.
    """

    name: str
    decides: str
    module: str
    settings: Mapping[str, Any] = MappingProxyType({})
    seconds: float = 180.0
    environment: Mapping[str, str] = MappingProxyType({})

    def load(self):
        """Imports the module."""
        return importlib.import_module(self.module)


# For parts that share the memory with another process or framework.
SHARED = MappingProxyType({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def _row(name: str, decides: str, module: str, seconds=180.0, environment=None, **settings) -> Part:
    module = f"bench.gpu.parts.{module}"
    return Part(name, decides, module, settings, seconds, environment or {})


def _rows() -> tuple[Part, ...]:
    row = _row
    return (
        row("ceilings", "denominators of all shares", "ceilings", 60),
        row("one_graph", "whether WHILE in a graph is safe", "one_graph"),
        row("launches/off", "one graph per chunk", "launches", strategy="off"),
        row("launches/4_1_5", "one graph per chunk", "launches", strategy="4_1_5"),
        row("values", "whether kernels are right", "values"),
        row("values/own", "whether the Pallas kernel is right", "values", 120, kernels=("gpu",)),
        row(
            "values/triton", "whether Triton's kernel is right", "values", 180, kernels=("triton",)
        ),
        row("values/training", "whether kernels of training are right", "causal_values"),
        *(
            row(f"attention/{size}", "default kernel", "attention", batch=size)
            for size in (8, 1, 64, "mixed")
        ),
        *(
            row(f"plain/{size}", "share of the roofline", "plain", batch=size)
            for size in (1, 8, 32, 128)
        ),
        row("plain_1.7B/1", "share of the roofline at 1.7B", "plain", batch=1, shape="1.7B"),
        *(
            row(f"rows/{size}", "cost curve of strategies", "rows", batch=size)
            for size in (1, 8, 32)
        ),
        *(row(f"round/{size}", "true speed-ups", "rounds", batch=size) for size in (1, 8, 32, 128)),
        *(
            row(f"round_32k/{size}", "draft vocabulary", "rounds", batch=size, draft_vocab=32_768)
            for size in (1, 8)
        ),
        row("round_parts", "parts of a round and of a draft step", "round_parts"),
        row("round_parts_32k", "draft vocabulary", "round_parts", draft_vocab=32_768),
        row("top_p/8", "how thresholds are found", "top_p", batch=8),
        row("identity/1.7B", "whether bfloat16 is lossless in invariant mode", "identity"),
        row("identity/8B", "the same", "identity", batches=(1, 8), shape="8B"),
        row("long_tail", "the controller", "long_tail"),
        row("train_step/1.7B", "MFU of training", "train_step"),
        row("transformers", "comparison with a peer", "transformers", 180, SHARED),
        row("jax_sampler", "comparison with a plain JAX sampler", "jax_sampler"),
        row("start", "an engine's start, and its own checks", "start"),
        row("train.rl", "end to end", "rl", 150, SHARED),
        row("own_model/head", "a head for a real model", "own_model", 330, SHARED, what="head"),
        row(
            "own_model/rl",
            "a real model, off, static, goodput",
            "own_model",
            480,
            SHARED,
            what="rl",
        ),
        row("protocol", "four workloads at full size", "protocol", 480),
    )


PARTS: tuple[Part, ...] = _rows()


def named(names: Sequence[str], table: Sequence[Part] = PARTS) -> list[Part]:
    """Returns the parts with these names, in the table's order.

    A name also stands for all parts below it: `plain` for `plain/1`.

    Raises:
      ValueError: there is no such part.
    """
    found = []
    for name in names:
        below = [part for part in table if part.name == name or part.name.startswith(f"{name}/")]
        if not below:
            known = ", ".join(part.name for part in table)
            raise ValueError(f"there is no part {name!r}; the parts are {known}")
        found += below
    return [part for part in table if part in found]


# --- targets --------------------------------------------------------------------------------------

MET, MISSED, UNKNOWN = "met", "missed", "not measured"


class Target(NamedTuple):
    """A bound that the figures of some parts must meet; the worst figure is compared.

    Attributes:
      name: name of the target.
      part: pattern, as of a shell, for names of parts; each of them must have such figures.
      figures: pattern for names of figures.
      bounds: the bound for each card.
      most: True if the bound is an upper one, False if it is a lower one.
      unit: unit of the bound.
    """

    name: str
    part: str
    figures: str
    bounds: Mapping[str, float]
    most: bool
    unit: str


def _both(bound: float) -> dict[str, float]:
    return {"h100": bound, "h200": bound}


def _targets() -> tuple[Target, ...]:
    def most(name, part, figures, bounds, unit) -> Target:
        return Target(name, part, figures, bounds, True, unit)

    def least(name, part, figures, bounds, unit) -> Target:
        return Target(name, part, figures, bounds, False, unit)

    times, share = "times", "of a copy's bytes/s"
    graph, ms = "samples whose tokens differ", "ms"
    return (
        most("one graph per chunk changes no token", "one_graph", "differ/*", _both(0), graph),
        most(
            "kernels equal the float32 reference",
            "values*",
            "values/*",
            _both(1),
            "of the difference that is allowed",
        ),
        least(
            "attention, prefix of 8k",
            "attention/[0-9]*",
            "share/best/*/8192/8192",
            _both(0.8),
            share,
        ),
        most(
            "plain 8B step, batch 1",
            "plain/1",
            "ms/36_layers/1024/best",
            {"h100": 5.9, "h200": 4.1},
            ms,
        ),
        least("share of a plain step, 8B", "plain/1", "share/36_layers/*/best", _both(0.85), share),
        least(
            "share of a plain step, 1.7B",
            "plain_1.7B/1",
            "share/28_layers/*/best",
            _both(0.7),
            share,
        ),
        most("135M plain step", "launches/off", "ms/batch_1/best", _both(1.0), ms),
        most("verify 16 rows / 1, batch 1", "rows/1", "rows_over_1/16", _both(1.05), times),
        most(
            "verify 16 rows / 1, batch 8",
            "rows/8",
            "rows_over_1/16",
            {"h100": 1.12, "h200": 1.15},
            times,
        ),
        most(
            "verify 16 rows / 1, batch 32",
            "rows/32",
            "rows_over_1/16",
            {"h100": 1.9, "h200": 2.3},
            times,
        ),
        most(
            "4 draft steps / verification, whole vocabulary",
            "round_parts",
            "draft_over_verify",
            _both(0.48),
            times,
        ),
        most(
            "4 draft steps / verification, 32k",
            "round_parts_32k",
            "draft_over_verify",
            _both(0.22),
            times,
        ),
        most(
            "round 4_1_5 / plain step, 32k",
            "round_32k/*",
            "round_over_plain",
            _both(1.30),
            times,
        ),
        most(
            "bfloat16 in invariant mode",
            "identity/*",
            "*differ/invariant/*",
            _both(0),
            "samples that differ",
        ),
        most("top-p by digits / by halvings", "top_p/*", "digits_over_halvings/*", _both(1), times),
        least("goodput against plain decoding", "long_tail", "off_over/goodput", _both(1), times),
        most(
            "round 4_1_5 / plain step, batch 1", "round/1", "round_over_plain", _both(1.55), times
        ),
        most(
            "round 4_1_5 / plain step, batch 8", "round/8", "round_over_plain", _both(1.55), times
        ),
        most("start of an 8B engine, 3 strategies", "start", "start/seconds", _both(90), "s"),
        least("chunks are CUDA graphs", "start", "start/graphs", _both(1), "of 1"),
        most("a round beside its parts", "round_parts", "us_beside_parts", _both(50), "us"),
    )


TARGETS: tuple[Target, ...] = _targets()


class Verdict(NamedTuple):
    """Whether a target is met on a card.

    Attributes:
      target: the target.
      card: short name of the card.
      word: `MET`, `MISSED` or `UNKNOWN`.
      value: the worst figure; None: there is none.
      missing: number of figures that were not measured; a part without any counts as one.
    """

    target: Target
    card: str
    word: str
    value: float | None = None
    missing: int = 0


def verdict(
    target: Target, card: str, found: Mapping[str, Mapping], table: Sequence[Part] = PARTS
) -> Verdict:
    """Returns the verdict on a target.

    One figure beyond the bound misses the target; to meet it, every figure of every part must be
    there. Figures of failed parts count too.

    Args:
      found: records of this card, by part.
    """
    values = list(_values(target, found, table))
    known = [value for value in values if value is not None]
    bound = target.bounds.get(card)
    if not known or bound is None:
        return Verdict(target, card, UNKNOWN, None, len(values))
    worst = max(known) if target.most else min(known)
    missing = len(values) - len(known)
    if worst > bound if target.most else worst < bound:
        return Verdict(target, card, MISSED, worst, missing)
    return Verdict(target, card, UNKNOWN if missing else MET, worst, missing)


def _values(
    target: Target, found: Mapping[str, Mapping], table: Sequence[Part]
) -> Iterator[float | None]:
    """Yields a target's figures; None for each missing one, and for each part without figures."""
    for part in table:
        if fnmatch.fnmatchcase(part.name, target.part):
            figures = found[part.name]["figures"] if part.name in found else {}
            names = fnmatch.filter(figures, target.figures)
            yield from (figures[name]["value"] for name in names)
            if not names:
                yield None


def verdicts(card: str, found: Mapping[str, Mapping]) -> list[Verdict]:
    """Returns the verdicts on all targets, from one card's records."""
    return [verdict(target, card, found) for target in TARGETS]
