"""What to change in a config whose plan does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from train.plan_programs import CACHE, EVALUATION, EXACT, STATE, WEIGHTS

if TYPE_CHECKING:
    from train.plan_cost import Figures
    from train.plan_report import Plan

GB = 1e9


def advice(plan: Plan) -> Iterator[str]:
    """What to change, the largest share of the worst moment first; nothing if it fits."""
    over = plan.most - plan.topology.chip.memory
    if over > 0:
        worst = plan.worst
        shares = plan.held("roll out") if worst is None else plan.held_during(worst)
        shares["temporaries"] = plan.most - sum(shares.values())
        for kind, size in sorted(shares.items(), key=lambda item: -item[1]):
            if size >= over / 20:
                yield f"{gb(size)} {kind}: {_remedy(plan, kind)}"
    for program in plan.programs:
        if program.name in plan.refused:
            yield f"{program.name!r}: {_without_refused(plan, program)}"


def _remedy(plan: Plan, kind: str) -> str:
    cfg, runner = plan.shapes.cfg, plan.shapes.engine.runner
    if kind in (CACHE, STATE):
        fits = plan.largest_batch()
        change = f"rollout.max_batch={fits} fits" if fits else "fewer slots alone do not suffice"
        return f"{change}; or a larger rollout.tp, or rollout.cache_bytes below its present size"
    if kind == WEIGHTS:
        return f"a larger rollout.tp (now {cfg.rollout.tp}), or dtype.compute=bfloat16"
    if kind == "states for the head":
        return (
            f"draft.max_microbatches (now {cfg.draft.max_microbatches or 'all'}, up to "
            f"{plan.shapes.microbatches} of a step)"
        )
    if kind == EVALUATION:
        return "eval.problems=0, or a smaller eval.max_batch: its engine has a cache of its own"
    if kind == EXACT:
        return "rollout.exact_mode=false: it decodes with a cache of its own"
    if kind != "temporaries":
        return f"a larger mesh.fsdp (now {cfg.mesh.fsdp}) or mesh.tp (now {cfg.mesh.tp})"
    name, key = plan.worst.name, plan.worst.key
    if key[0] == "chunk" and key[2] < runner.batch:  # as large as it is whatever the largest batch
        return f"of {name!r}: {_without(plan, key[1])}a smaller rollout.cache_bytes or max_batch"
    if key[0] in ("chunk", "prefill", "place"):
        return f"of {name!r}: a smaller rollout.max_batch (now {runner.batch}), prefill_chunk or tp"
    if key[0] in ("reshard", "convert"):
        return f"of {name!r}: a larger rollout.tp (now {cfg.rollout.tp})"
    remat = "" if cfg.remat else "remat=true, "
    return (
        f"of {name!r}: {remat}fewer packing.rows (now {cfg.packing.rows}, at least mesh.data x "
        f"mesh.fsdp), a shorter packing.row_length (now {cfg.packing.row_length}), or a larger "
        "mesh.tp"
    )


def _without_refused(plan: Plan, program: Figures) -> str:
    if program.part == "train":
        return "another mesh or packing.rows; attention=reference, if a kernel is refused"
    instead = _without(plan, program.key[1]) if program.key[0] == "chunk" else ""
    return f"{instead}another rollout.tp; attention=reference, if a kernel is refused"


def _without(plan: Plan, strategy: str) -> str:
    """A list of strategies in which this one is missing, if there are others."""
    others = len(plan.shapes.engine.runner.programs) > 1
    return f"rollout.control.strategies without {strategy}, " if others else ""


def gb(size: float) -> str:
    return f"{size / GB:.3f} GB" if size >= GB / 1000 else f"{size / 1e6:.3f} MB"
