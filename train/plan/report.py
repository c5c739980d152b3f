"""Plans: their figures as JSON, their table as text, and advice if a run does not fit."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import jax

from specjax.chips import layer_weights
from specjax.engine.pages import pages_for
from specjax.parallel.sharding import device_bytes
from specjax.versions import installed
from train.plan.figures import Figures
from train.plan.programs import (
    CACHE,
    EVALUATION,
    EXACT,
    GONE,
    STATE,
    WEIGHTS,
    Shapes,
    caches,
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
      programs: figures of the programs so far.
      left_out: number of programs that were left out.
      command: the command line.
    """

    config: str
    topology: Topology
    shapes: Shapes
    programs: list[Figures]
    left_out: int = 0
    command: str = ""

    @functools.cached_property
    def resident(self) -> dict[str, float]:
        return self.shapes.resident()

    def held(self, part: str) -> dict[str, float]:
        """Returns the bytes that are allocated while programs of a part run, by kind."""
        return {kind: size for kind, size in self.resident.items() if kind not in GONE[part]}

    def held_during(self, program: Figures) -> dict[str, float]:
        """Returns the bytes, by kind, that are allocated while a program runs, inputs or not."""
        gaps = self.shapes.built.replica_drafts and self.shapes.cfg.draft.spot.gaps
        in_gaps = program.key == ("draft",) and bool(gaps)
        held = self.held("roll out" if in_gaps else program.part)
        if program.key == ("reshard", "draft"):  # includes the policy's new weights
            held[WEIGHTS] = self.resident.get(WEIGHTS, 0.0) - program.given["results"]
        return held

    def peak(self, program: Figures) -> float:
        """Returns the bytes in use while a program runs."""
        held = sum(self.held_during(program).values())
        if program.needs is not None:  # the compiler's number includes the inputs
            passing = ("gradients", "batch", "results", "copies")
            inputs = sum(size for kind, size in program.given.items() if kind not in passing)
            return program.needs + max(held - inputs, 0.0)
        return held + program.extra

    @property
    def worst(self) -> Figures | None:
        return max(self.programs, key=self.peak, default=None)

    @property
    def most(self) -> float:
        """Bytes in use at the worst moment."""
        held = max(sum(self.held(part).values()) for part in GONE)
        return max(held, self.peak(self.worst)) if self.programs else held

    @property
    def fits(self) -> bool:
        """Whether every program fits and compiles."""
        refused = any(program.failed for program in self.programs)
        return self.most <= self.topology.chip.memory and not refused

    @property
    def too_large(self) -> dict[str, float]:
        """Returns the missing bytes of programs that do not fit, the largest first."""
        over = {p.name: self.peak(p) - self.topology.chip.memory for p in self.programs}
        order = sorted(over, key=over.get, reverse=True)
        return {name: over[name] for name in order if over[name] > 0}

    @property
    def refused(self) -> dict[str, str]:
        """Returns the programs that the compiler refuses although they fit, and why."""
        large = self.too_large
        return {p.name: p.failed for p in self.programs if p.failed and p.name not in large}

    @property
    def context(self) -> int:
        """Average number of positions in a slot's cache: half of the longest sample."""
        roll = self.shapes.cfg.rollout
        return (roll.max_prompt_tokens + roll.max_tokens) // 2

    def largest_batch(self) -> int:
        """Number of a replica's slots that fit, if cache, state and temporaries grow in proportion.

        A cache of fixed size is divided by the average context.
        """
        runner = self.shapes.engine.runner
        if self.shapes.cfg.rollout.cache_bytes is None:
            return self._slots(pages_for(runner.max_len, runner.page_size) * self._page)
        # A cache of fixed size has pages for this many samples.
        most = self._slots(0.0)
        return min(most, (runner.pages - 1) // pages_for(self.context, runner.page_size))

    def largest_cache(self) -> tuple[int, int]:
        """Returns the slots that fit at the average context with the largest possible cache.

        The second value is that cache's rollout.cache_bytes.
        """
        runner = self.shapes.engine.runner
        each = pages_for(self.context, runner.page_size) * self._page
        slots = self._slots(each, self.resident[CACHE])
        leaf = jax.tree.leaves(caches(runner.state)[0])[0]
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        devices = leaf.size // math.prod(shape)  # that split a sequence's keys and values
        return slots, int((slots * each + self._page) * devices)

    @property
    def _page(self) -> float:
        """Returns the bytes of a page of all layers on a device."""
        runner = self.shapes.engine.runner
        return device_bytes(caches(runner.state)[0]) / runner.pages

    def _slots(self, pages: float, instead: float = 0.0) -> int:
        """Returns the number of slots that fit.

        Args:
          pages: bytes of each slot's pages.
          instead: bytes of the cache that these pages replace; 0: they are added to it.
        """
        runner, memory = self.shapes.engine.runner, self.topology.chip.memory + instead
        each = pages + device_bytes(caches(runner.state)[1]) / runner.slots
        taken = runner.batch * pages if instead else 0.0  # bytes of the present slots' pages
        chunks = [p for p in self.programs if p.is_chunk]
        widest = max(chunks, key=lambda p: (p.key[2], p.extra), default=None)
        others = (p for p in self.programs if p.part == "roll out" and p is not widest)
        most = max([sum(self.held("roll out").values()), *map(self.peak, others)])
        more = (memory - taken - most) / each
        if widest is not None:
            slope = each + widest.extra / widest.key[2]
            more = min(more, (memory - taken - self.peak(widest)) / slope)
        return max(int(runner.batch + more), 0)

    def as_json(self) -> dict:
        """Returns every figure, for files; the module's `Figures.read` reads those of programs."""
        return {
            "config": self.config,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": self.command,
            "versions": {"sources": _sources(), **installed(("jax", "jaxlib", "libtpu"))},
            "topology": self.topology.name,
            "chips": len(self.topology.devices),
            "compiler": self.topology.compiler,
            "hbm_bytes": self.topology.chip.memory,
            "resident_bytes": self.resident,
            "held_bytes": {part: sum(self.held(part).values()) for part in GONE},
            "most_bytes": self.most,
            "worst": self.worst.name if self.worst else None,
            "fits": self.fits,
            "too_large_bytes": self.too_large,
            "refused": self.refused,
            "largest_batch": self.largest_batch(),
            "settings": hashlib.sha256(repr(self.shapes.cfg).encode()).hexdigest()[:16],
            "replicas": len(self.shapes.built.engines),
            "left_out": self.left_out,
            "programs": [
                {**dataclasses.asdict(p), "peak_bytes": self.peak(p)} for p in self.programs
            ],
            "advice": list(advice(self)),
        }

    def write(self, path: Path) -> None:
        """Writes the figures atomically, so that a plan can be resumed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, [json.dumps(self.as_json(), indent=1).encode(), b"\n"])


def _sources() -> str:
    """Returns a digest of all Python files of specjax and train."""
    digest, root = hashlib.sha256(), Path(__file__).resolve().parents[2]
    for folder in ("specjax", "train"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# --- text ----------------------------------------------------------------------------------------


def gb(size: float) -> str:
    return f"{size / GB:.3f} GB" if size >= GB / 1000 else f"{size / 1e6:.3f} MB"


def lines(plan: Plan) -> Iterator[str]:
    """Yields the lines of the whole table."""
    yield from _head(plan)
    yield from _memory(plan)
    yield from _programs(plan)
    yield from _verdict(plan)


def _head(plan: Plan) -> Iterator[str]:
    shapes, topology, model = plan.shapes, plan.topology, plan.shapes.model
    outside = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    weights = layer_weights(model.layers, model.hidden_size) + outside
    yield f"plan of {plan.config} on {topology.name}: {topology.source}"
    yield (
        f"model   {model.model_type}, {weights / 1e9:.2f} G weights, parameters "
        f"{model.run.param_dtype}, arithmetic {model.run.compute_dtype}; shapes from "
        f"{shapes.read_from}"
    )
    chip, runner = topology.chip, shapes.engine.runner
    yield f"chip    {len(topology.devices)} x {chip.title}: {chip.memory / GB:.4g} GB HBM"
    yield (
        f"layout  training {mesh_text(shapes.mesh)}; rollouts on {len(shapes.built.engines)} x "
        f"({mesh_text(runner.mesh)}), {runner.batch} slots of {runner.max_len} positions each"
    )
    if shapes.apart:
        yield (
            "NOTE    a replica's programs are compiled as if its chips were a slice of their own, "
            "because this compiler does not compile for a part of some slices"
        )
    if topology.compiler is None:
        yield "NOTE    only logits and inputs of layers are counted as temporaries"
    used = max(shapes.cfg.mesh.size, shapes.cfg.rollout_devices)
    if used < len(topology.devices):
        yield f"NOTE    {len(topology.devices) - used} chips of {topology.name} are idle"


def _memory(plan: Plan) -> Iterator[str]:
    yield ""
    yield "bytes per device, besides what programs need for themselves"
    for kind, size in plan.resident.items():
        gone = "  (not while it trains)" if kind in GONE["train"] else ""
        yield f"  {kind:<24}{gb(size):>12}{gone}"
    for part, name in (("roll out", "while it rolls out"), ("train", "while it trains")):
        yield f"  {name:<24}{gb(sum(plan.held(part).values())):>12}"
    worst = plan.worst
    if worst is not None:
        yield f"  {'temporaries, at most':<24}{gb(max(p.temporaries for p in plan.programs)):>12}"
        yield f"  {'at the worst moment':<24}{gb(plan.most):>12}  in {worst.name!r}"
    yield f"  {'HBM':<24}{gb(plan.topology.chip.memory):>12}"


def _programs(plan: Plan) -> Iterator[str]:
    kinds = ("parameters", "optimizer", "cache")
    yield ""
    yield "programs: GB per device of their inputs, their temporaries, and in all while they run"
    columns = (*kinds, "other", "temporaries", "in all")
    yield f"{'program':<26}" + "".join(f"{name:>12}" for name in columns)
    for program in plan.programs:
        other = sum(size for kind, size in program.given.items() if kind not in kinds)
        sizes = [program.given.get(kind, 0.0) for kind in kinds]
        sizes += [other, program.temporaries, plan.peak(program)]
        yield f"{program.name:<26}" + "".join(f"{size / GB:>12.4g}" for size in sizes)
        if program.failed:
            yield f"    REFUSED by the compiler: {program.failed}"
        elif program.excess:
            yield f"    BRINGS MORE THAN DEVICES KEEP of {', '.join(program.excess)}"
        elif program.excess is not None:
            yield (
                f"    a device receives {gb(program.brought)} of the {gb(program.kept)} that it "
                "keeps; of no weight, at no moment, more than its shard"
            )
    if plan.left_out:
        yield f"{plan.left_out} programs were left out by --only"


def _verdict(plan: Plan) -> Iterator[str]:
    chip, runner = plan.topology.chip, plan.shapes.engine.runner
    yield ""
    yield f"largest batch that fits: {plan.largest_batch()} slots per replica (now {runner.batch})"
    if plan.shapes.cfg.rollout.cache_bytes is not None:
        slots, size = plan.largest_cache()
        yield (
            f"  with {plan.context} positions in each; {slots} with all memory, "
            f"rollout.cache_bytes={size}"
        )
    which = f", without the {plan.left_out} programs left out" if plan.left_out else ""
    if plan.fits:
        yield f"FITS: {gb(plan.most)} of {gb(chip.memory)}{which}"
        return
    yield f"DOES NOT FIT: {gb(plan.most)} of {gb(chip.memory)}{which}"
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
    if key[0] == "chunk" and key[2] < runner.batch:  # its size does not depend on the largest batch
        return f"of {name!r}: {_without(plan, key[1])}a smaller rollout.cache_bytes or max_batch"
    if key[0] in ("chunk", "prefill", "place"):
        return f"of {name!r}: a smaller rollout.max_batch (now {runner.batch}), prefill_chunk or tp"
    if key[0] in ("reshard", "convert"):
        return f"of {name!r}: a larger rollout.tp (now {cfg.rollout.tp})"
    remat = "" if cfg.remat else "remat=true, "
    return (
        f"of {name!r}: {remat}fewer packing.rows (now {max(cfg.row_sizes)}, at least mesh.data x "
        f"mesh.fsdp), a shorter packing.row_length (now {cfg.packing.row_length}), or a larger "
        "mesh.tp"
    )


def _without_refused(plan: Plan, program: Figures) -> str:
    if program.part == "train":
        return "another mesh or packing.rows; attention=reference, if a kernel is refused"
    instead = _without(plan, program.key[1]) if program.key[0] == "chunk" else ""
    return f"{instead}another rollout.tp; attention=reference, if a kernel is refused"


def _without(plan: Plan, strategy: str) -> str:
    """Returns advice to leave a strategy out, if there are others."""
    others = len(plan.shapes.engine.runner.programs) > 1
    return f"rollout.control.strategies without {strategy}, " if others else ""
