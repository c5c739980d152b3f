"""Plans: whether a run fits, their figures as JSON, their table, and advice if it does not fit."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
from collections.abc import Iterator
from pathlib import Path

from specjax.engine.pages import pages_for
from specjax.parallel.sharding import device_bytes
from specjax.versions import installed
from train.plan.programs import (
    CACHE,
    EVALUATION,
    EXACT,
    GONE,
    HEAD_STATES,
    STATE,
    WEIGHTS,
    Program,
    Shapes,
    mesh_text,
)
from train.plan.topology import Topology
from train.run.files import replace

GB = 1e9


@dataclasses.dataclass
class Plan:
    """The figures of a run on a topology, per device unless they say otherwise.

    Attributes:
      config: name of the config file.
      topology: the chips.
      shapes: trainers and engines of the run.
      programs: the programs so far, with their figures.
      left_out: number of programs that were left out.
      command: the command line.
    """

    config: str
    topology: Topology
    shapes: Shapes
    programs: list[Program]
    left_out: int = 0
    command: str = ""

    @functools.cached_property
    def resident(self) -> dict[str, float]:
        return self.shapes.resident()

    @property
    def memory(self) -> float:
        return self.topology.chip.memory

    def held(self, part: str) -> dict[str, float]:
        """Returns the bytes that are allocated while programs of a part run, by kind."""
        return {kind: size for kind, size in self.resident.items() if kind not in GONE[part]}

    def held_during(self, program: Program) -> dict[str, float]:
        """Returns the bytes, by kind, that are allocated while a program runs, inputs or not."""
        gaps = self.shapes.built.replica_drafts and self.shapes.cfg.draft.spot.gaps
        in_gaps = program.key == ("draft",) and bool(gaps)
        held = self.held("roll out" if in_gaps else program.part)
        if program.key == ("reshard", "draft"):  # includes the policy's new weights
            held[WEIGHTS] = self.resident.get(WEIGHTS, 0.0) - device_bytes(program.results)
        return held

    def peak(self, program: Program) -> float:
        """Returns the bytes in use while a program runs."""
        held = sum(self.held_during(program).values())
        if program.needs is not None:  # the compiler's number includes the inputs
            return program.needs + max(held - device_bytes(program.inputs), 0.0)
        return held + program.extra

    @property
    def worst(self) -> Program:
        return max(self.programs, key=self.peak)

    @property
    def most(self) -> float:
        """Bytes in use at the worst moment."""
        held = [sum(self.held(part).values()) for part in GONE]
        return max([*held, *map(self.peak, self.programs)])

    @property
    def too_large(self) -> dict[str, float]:
        """Returns the missing bytes of programs that do not fit, the largest first."""
        programs = sorted(self.programs, key=self.peak, reverse=True)
        over = {program.name: self.peak(program) - self.memory for program in programs}
        return {name: size for name, size in over.items() if size > 0}

    @property
    def refused(self) -> dict[str, str]:
        """Returns the programs that the compiler refuses although they fit, and why."""
        large = self.too_large
        return {p.name: p.failed for p in self.programs if p.failed and p.name not in large}

    @property
    def fits(self) -> bool:
        """Whether every program fits and compiles."""
        return self.most <= self.memory and not any(program.failed for program in self.programs)

    def largest_batch(self) -> int:
        """Number of a replica's slots that fit, if cache, state and temporaries grow in proportion.

        A cache of fixed size is divided by half of the longest sample, and its share of the
        recurrent states.
        """
        runner, roll = self.shapes.engine.runner, self.shapes.cfg.rollout
        programs = [program for program in self.programs if program.part == "roll out"]
        growing = [self.resident[STATE], max((p.extra for p in programs), default=0.0)]
        if roll.cache_bytes is None:
            growing.append(self.resident.get(CACHE, 0.0))
        used = max([sum(self.held("roll out").values()), *map(self.peak, programs)])
        slots = max(int(runner.batch * (1 + (self.memory - used) / sum(growing))), 0)
        if roll.cache_bytes is None:
            return slots
        context = (roll.max_prompt_tokens + roll.max_tokens) // 2
        pages = pages_for(context, runner.page_size) * runner.page_bytes
        of_each = pages + runner.slot_bytes // runner.batch
        return min(slots, (roll.cache_bytes - runner.page_bytes) // of_each)

    def write(self, path: Path) -> None:
        """Writes every figure as JSON."""
        names = "name", "part", "extra", "temporaries", "failed", "needs"
        programs = [
            {name: getattr(program, name) for name in names}
            | {"inputs": device_bytes(program.inputs), "peak_bytes": self.peak(program)}
            for program in self.programs
        ]
        figures = {
            "config": self.config,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": self.command,
            "versions": installed(("specjax", "jax", "jaxlib", "libtpu")),
            "topology": self.topology.name,
            "chips": len(self.topology.devices),
            "compiler": self.topology.compiler,
            "hbm_bytes": self.memory,
            "resident_bytes": self.resident,
            "held_bytes": {part: sum(self.held(part).values()) for part in GONE},
            "most_bytes": self.most,
            "worst": self.worst.name,
            "fits": self.fits,
            "too_large_bytes": self.too_large,
            "refused": self.refused,
            "largest_batch": self.largest_batch(),
            "left_out": self.left_out,
            "programs": programs,
            "advice": list(advice(self)),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, [json.dumps(figures, indent=1).encode(), b"\n"])


# --- text ----------------------------------------------------------------------------------------


def gb(size: float) -> str:
    return f"{size / GB:.3f} GB" if size >= GB / 1000 else f"{size / 1e6:.3f} MB"


def lines(plan: Plan) -> Iterator[str]:
    """Yields the lines of the whole table."""
    shapes, topology, model = plan.shapes, plan.topology, plan.shapes.model
    chip, runner = topology.chip, shapes.engine.runner
    how = f"compiled for {topology.compiler}" if topology.compiler else "counted from shapes"
    yield f"plan of {plan.config} on {topology.name}, {how}"
    yield (
        f"model   {model.model_type}, parameters {model.run.param_dtype}, arithmetic "
        f"{model.run.compute_dtype}; shapes from {shapes.read_from}"
    )
    yield f"chip    {len(topology.devices)} x {chip.title}: {chip.memory / GB:.4g} GB HBM"
    yield (
        f"layout  training {mesh_text(shapes.mesh)}; rollouts on {len(shapes.built.engines)} x "
        f"({mesh_text(runner.mesh)}), {runner.batch} slots of {runner.max_len} positions each"
    )
    used = max(shapes.cfg.mesh.size, shapes.cfg.rollout_devices)
    if used < len(topology.devices):
        yield f"NOTE    {len(topology.devices) - used} chips of {topology.name} are idle"
    yield "\nbytes per device, besides what programs need for themselves"
    for kind, size in plan.resident.items():
        gone = "  (not while it trains)" if kind in GONE["train"] else ""
        yield f"  {kind:<24}{gb(size):>12}{gone}"
    for part, name in (("roll out", "while it rolls out"), ("train", "while it trains")):
        yield f"  {name:<24}{gb(sum(plan.held(part).values())):>12}"
    yield f"  {'at the worst moment':<24}{gb(plan.most):>12}  in {plan.worst.name!r}"
    yield f"  {'HBM':<24}{gb(plan.memory):>12}"
    yield "\nprograms: GB per device of their inputs, their temporaries, and in all while they run"
    yield f"{'program':<26}" + "".join(f"{c:>12}" for c in ("inputs", "temporaries", "in all"))
    for program in plan.programs:
        sizes = device_bytes(program.inputs), program.temporaries, plan.peak(program)
        yield f"{program.name:<26}" + "".join(f"{size / GB:>12.4g}" for size in sizes)
        if program.failed:
            yield f"    REFUSED by the compiler: {program.failed}"
    if plan.left_out:
        yield f"{plan.left_out} programs were left out by --only"
    most = plan.largest_batch()
    yield f"\nlargest batch that fits: {most} slots per replica (now {runner.batch})"
    yield f"{'FITS' if plan.fits else 'DOES NOT FIT'}: {gb(plan.most)} of {gb(plan.memory)}"
    if plan.fits:
        return
    for name, size in plan.too_large.items():
        yield f"  {name}: {gb(size)} too many"
    for name, reason in plan.refused.items():
        yield f"  {name}: refused by the compiler, {reason}"
    yield "What to change:"
    for line in advice(plan):
        yield f"  - {line}"


# --- what to change ------------------------------------------------------------------------------


def advice(plan: Plan) -> Iterator[str]:
    """Yields changes to make, the largest share of the worst moment first; none if it fits."""
    over = plan.most - plan.memory
    if over > 0:
        shares = plan.held_during(plan.worst)
        shares["temporaries"] = plan.most - sum(shares.values())
        for kind, size in sorted(shares.items(), key=lambda item: -item[1]):
            if size >= over / 20:
                yield f"{gb(size)} {kind}: {_remedy(plan, kind)}"
    for program in plan.programs:
        if program.name in plan.refused:
            change = "mesh or packing.rows" if program.part == "train" else "rollout.tp or strategy"
            yield f"{program.name!r}: another {change}; attention=reference, if a kernel is refused"


def _remedy(plan: Plan, kind: str) -> str:
    cfg = plan.shapes.cfg
    if kind == "temporaries":
        return _remedy_of_temporaries(plan)
    slots = f"rollout.max_batch={plan.largest_batch()}, a larger rollout.tp (now {cfg.rollout.tp})"
    return {
        CACHE: f"{slots}, or a smaller rollout.cache_bytes",
        STATE: slots,
        WEIGHTS: f"a larger rollout.tp (now {cfg.rollout.tp}), or dtype.compute=bfloat16",
        HEAD_STATES: "a smaller draft.max_microbatches (now "
        f"{cfg.draft.max_microbatches or 'all'} of {plan.shapes.microbatches})",
        EVALUATION: "eval.problems=0, or a smaller eval.max_batch: it has a cache of its own",
        EXACT: "rollout.exact_mode=false: it decodes with a cache of its own",
    }.get(kind, f"a larger mesh.fsdp (now {cfg.mesh.fsdp}) or mesh.tp (now {cfg.mesh.tp})")


def _remedy_of_temporaries(plan: Plan) -> str:
    cfg, program = plan.shapes.cfg, plan.worst
    if program.key[0] in ("chunk", "prefill", "place"):
        batch = plan.shapes.engine.runner.batch
        change = f"a smaller rollout.max_batch (now {batch}), cache_bytes or prefill_chunk"
    elif program.key[0] in ("reshard", "convert"):
        change = f"a larger rollout.tp (now {cfg.rollout.tp})"
    else:
        change = (
            f"{'' if cfg.remat else 'remat=true, '}fewer packing.rows (now {max(cfg.row_sizes)}), "
            f"a shorter packing.row_length (now {cfg.packing.row_length}), or a larger mesh.tp"
        )
    return f"of {program.name!r}: {change}"
