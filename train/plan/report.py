"""Plans: their figures as JSON, their table as text, and advice if a run does not fit."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from specjax.engine.pages import pages_for
from specjax.parallel.sharding import device_bytes
from specjax.versions import installed
from train.plan import windows
from train.plan.copies import ENTRY, ROUND, Copy
from train.plan.cost import Figures, model_text, roofline, split, with_prefix
from train.plan.cycles import PARTS, REST
from train.plan.hlo import COLLECTIVES
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

    # --- memory ----------------------------------------------------------------------------------

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
            rest = held - sum(
                size
                for kind, size in program.given.items()
                if kind not in ("gradients", "batch", "results", "copies")
            )
            return program.needs + max(rest, 0.0)
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
        return slots, int((slots * each + self._page) * split(self.shapes))

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

    # --- speed -----------------------------------------------------------------------------------

    @property
    def context(self) -> int:
        """Average number of positions in a slot's cache: half of the longest sample."""
        roll = self.shapes.cfg.rollout
        return (roll.max_prompt_tokens + roll.max_tokens) // 2

    def context_of(self, chunk: Figures) -> int:
        """Returns the positions in a slot's cache in a chunk; fewer if pages do not suffice."""
        runner = self.shapes.engine.runner
        return min(self.context, (runner.pages - 1) * runner.page_size // chunk.key[2])

    def round_seconds(self, chunk: Figures) -> float:
        """Returns the seconds of one round at this context, by the roofline."""
        _, strategy, slots, _ = chunk.key
        cost = with_prefix(chunk.cost, self.shapes, strategy, slots, self.context_of(chunk))
        return roofline(self.topology.chip, cost).seconds

    def tokens_per_second(self, chunk: Figures, accept_length: float) -> float:
        """Returns the tokens per second of all replicas together, by the roofline."""
        replicas = len(self.shapes.built.engines)
        return replicas * chunk.key[2] * accept_length / self.round_seconds(chunk)

    def as_json(self) -> dict:
        """Returns every figure, for files."""
        chip = self.topology.chip
        return {
            "config": self.config,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": self.command,
            "versions": versions(),
            "topology": self.topology.name,
            "chips": len(self.topology.devices),
            "source": self.topology.source,
            "compiler": self.topology.compiler,
            "hbm_bytes": chip.memory,
            "resident_bytes": self.resident,
            "held_bytes": {part: sum(self.held(part).values()) for part in GONE},
            "most_bytes": self.most,
            "worst": self.worst.name if self.worst else None,
            "fits": self.fits,
            "too_large_bytes": self.too_large,
            "refused": self.refused,
            "largest_batch": self.largest_batch(),
            "largest_cache": self.largest_cache(),
            "context": self.context,
            "settings": hashlib.sha256(repr(self.shapes.cfg).encode()).hexdigest()[:16],
            "replicas": len(self.shapes.built.engines),
            "left_out": self.left_out,
            "programs": [self._program_json(p) for p in self.programs],
            "advice": list(advice(self)),
        }

    def _program_json(self, program: Figures) -> dict:
        speed = roofline(self.topology.chip, program.cost)
        out = program.as_json() | {
            "peak_bytes": self.peak(program),
            "roofline_seconds": speed.seconds,
            "network_seconds": speed.network,
            "bound": speed.bound,
        }
        if program.is_chunk:
            out["context"] = self.context_of(program)
            out["round_seconds"] = self.round_seconds(program)
            out["tokens_per_second"] = {
                f"{a:g}": self.tokens_per_second(program, a) for a in _accept_lengths(self, program)
            }
        return out

    def write(self, path: Path) -> None:
        """Writes the figures atomically, so that a plan can be resumed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def versions() -> dict[str, str]:
    """Returns the versions of Python, of the sources, and of installed compiler packages."""
    return {"sources": _sources(), **installed(("jax", "jaxlib", "libtpu"))}


def _sources() -> str:
    """Returns a digest of all Python files of specjax and train."""
    digest, root = hashlib.sha256(), Path(__file__).resolve().parents[2]
    for folder in ("specjax", "train"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _accept_lengths(plan: Plan, chunk: Figures) -> list[float]:
    """Returns the accept lengths to show for a strategy: 1 and some up to its largest."""
    longest = 1 + plan.shapes.engine.runner.programs[chunk.key[1]].steps
    return [1.0] + [a for a in (1.5, 2.0, 3.0, 4.0, 6.0, 8.0) if a <= longest]


# --- text ----------------------------------------------------------------------------------------


def lines(plan: Plan) -> Iterator[str]:
    """Yields the lines of the whole table."""
    yield from _head(plan)
    yield from _memory(plan)
    yield from _programs(plan)
    yield from _speed(plan)
    yield from _verdict(plan)


def gb(size: float) -> str:
    return f"{size / GB:.3f} GB" if size >= GB / 1000 else f"{size / 1e6:.3f} MB"


def _head(plan: Plan) -> Iterator[str]:
    shapes, topology = plan.shapes, plan.topology
    chip, engines = topology.chip, shapes.built.engines
    yield f"plan of {plan.config} on {topology.name}: {topology.source}"
    yield f"model   {model_text(shapes.model)}; shapes from {shapes.read_from}"
    yield (
        f"chip    {len(topology.devices)} x {chip.title}: {chip.memory / GB:.4g} GB HBM, "
        f"{chip.bandwidth / GB:.0f} GB/s, {chip.peak / 1e12:.0f} TFLOP/s bfloat16, network "
        f"{chip.network / GB:.0f} GB/s"
    )
    runner = engines[0].runner
    yield (
        f"layout  training {mesh_text(shapes.mesh)}; rollouts on {len(engines)} x "
        f"({mesh_text(runner.mesh)}), {runner.batch} slots of {runner.max_len} positions each"
    )
    if shapes.apart:
        yield (
            "NOTE    a replica's programs are compiled as if its chips were a slice of their own, "
            "because this compiler does not compile for a part of some slices"
        )
    if topology.compiler is None:
        yield (
            "NOTE    only logits and inputs of layers are counted as temporaries, and attention as "
            "if it read the cache in place; a GPU's library gathers it first"
        )
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


_COLUMNS = (
    ("program", 26), ("params", 10), ("optim", 10), ("cache", 10), ("other in", 10),
    ("tempor.", 10), ("peak", 11), ("TFLOP", 10), ("HBM GB", 10), *((name, 11) for name in (
        "gather", "reduce", "scatter", "all-to-all", "permute")),
    ("compute ms", 11), ("memory ms", 11), ("network ms", 11), ("bound", 9),
)  # fmt: skip


def _programs(plan: Plan) -> Iterator[str]:
    yield ""
    yield (
        "programs: bytes in GB per device; operations, HBM traffic and bytes received by "
        "collectives (MB) of one run, of chunks of one round with empty prefixes; times at the "
        "chip's peaks"
    )
    if any(program.cost.cycles for program in plan.programs):
        yield (
            "cycles: the compiler's own estimates, in which kernels, collectives and waits count "
            "0; they compare programs and are no times; + marks a part with a loop of unknown "
            "length, counted once"
        )
    yield "".join(
        f"{name:<{width}}" if i == 0 else f"{name:>{width}}"
        for i, (name, width) in enumerate(_COLUMNS)
    )
    for program in plan.programs:
        yield _row(plan, program)
        if program.failed:
            yield f"    REFUSED by the compiler: {program.failed}"
            continue
        yield from _details(program)
        if program.excess is not None:
            yield _brings(program)
    if plan.left_out:
        yield f"{plan.left_out} programs were left out by --only"
    chunks = {p.name.removeprefix("chunk "): p.windows for p in plan.programs if p.is_chunk}
    yield from windows.lines(chunks, plan.shapes.engine.runner.cfg.run.compute_dtype)


def _row(plan: Plan, program: Figures) -> str:
    given, cost = program.given, program.cost
    speed = roofline(plan.topology.chip, cost)
    other = sum(v for k, v in given.items() if k not in ("parameters", "optimizer", "cache"))
    cells = [
        *(f"{given.get(kind, 0.0) / GB:.3g}" for kind in ("parameters", "optimizer", "cache")),
        f"{other / GB:.3g}",
        f"{program.temporaries / GB:.3g}" if program.temporaries or not program.failed else "?",
        f"{plan.peak(program) / GB:.4g}",
    ]
    of_what_compiled = [
        f"{cost.flops / 1e12:.3g}",
        f"{cost.bytes / GB:.3g}",
        *(f"{cost.received.get(kind, 0.0) / 1e6:.3g}" for kind in COLLECTIVES),
        *(f"{1e3 * x:.3g}" for x in (speed.compute, speed.memory, speed.network)),
        speed.bound,
    ]
    cells += [""] * len(of_what_compiled) if program.failed else of_what_compiled
    widths = [width for _, width in _COLUMNS]
    return f"{program.name:<{widths[0]}}" + "".join(
        f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)
    )


def _details(program: Figures) -> Iterator[str]:
    """Yields lines with what a program does, beside its row."""
    cost = program.cost
    if cost.cycles:
        total, parts = sum(cost.cycles.values()), cycles_text(cost.cycles, cost.once)
        outside = f"; outside of rounds {millions(program.outside)}" if program.is_chunk else ""
        yield f"    cycles {millions(total)}: {parts}{outside}"
        if cost.unknown:
            yield f"    without an estimate: {unknown_text(cost.unknown)}"
    for place in (ROUND, ENTRY):
        found = [copy for copy in program.copies if copy.place == place]
        if found:
            yield f"    copies {_WHERE[place] if program.is_chunk else ''}{_copies_text(found)}"
    if cost.calls:
        calls = ", ".join(f"{count:.0f} {kind}" for kind, count in cost.calls.items())
        yield f"    collectives: {calls}"
    if cost.kernels:
        yield f"    calls {cost.kernels:.0f} Pallas kernels"


_WHERE = {ROUND: "in a round: ", ENTRY: "at entry and end: "}
_NAMED = 4  # copies that are named in the table; the file of --json has all


def millions(count: float) -> str:
    return f"{count / 1e6:.3g}M"


def cycles_text(cycles: Mapping[str, float], once: Collection[str]) -> str:
    """Returns cycles by part in words; a plus marks parts with a loop that is counted once."""
    shown = (part for part in (*PARTS, REST) if cycles.get(part))
    return ", ".join(f"{p} {millions(cycles[p])}{'+' * (p in once)}" for p in shown)


def unknown_text(counts: Mapping[str, float]) -> str:
    """Returns in words the operations that have no estimate; "" if there are none."""
    return ", ".join(f"{count:.0f} {kind}s" for kind, count in sorted(counts.items()))


def _copies_text(found: list[Copy]) -> str:
    named = (f"{copy.count} x {copy.shape} of {copy.what} ({copy.kind})" for copy in found[:_NAMED])
    more = f", {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    total = gb(sum(copy.total for copy in found))
    return f"{sum(copy.count for copy in found)}, {total}: {', '.join(named)}{more}"


def _brings(program: Figures) -> str:
    if program.excess:
        return f"    BRINGS MORE THAN DEVICES KEEP of {', '.join(program.excess)}"
    return (
        f"    a device receives {gb(program.brought)} of the {gb(program.kept)} that it keeps; "
        "of no weight, at no moment, more than its shard"
    )


def _speed(plan: Plan) -> Iterator[str]:
    chunks = [p for p in plan.programs if p.is_chunk]
    if not chunks:
        return
    yield ""
    yield (
        f"predicted tok/s of {len(plan.shapes.built.engines)} replicas with {plan.context} "
        "positions per slot, or as many as the cache has, by accept length (rooflines: an upper "
        "bound; no host, no launches)"
    )
    columns = sorted({a for chunk in chunks for a in _accept_lengths(plan, chunk)})
    yield f"{'strategy x slots':<26}{'round ms':>12}" + "".join(f"{a:>12g}" for a in columns)
    for chunk in chunks:
        shown = _accept_lengths(plan, chunk)
        cells = (f"{plan.tokens_per_second(chunk, a):.0f}" if a in shown else "" for a in columns)
        seconds = f"{1e3 * plan.round_seconds(chunk):.3g}"
        yield f"{chunk.name:<26}{seconds:>12}" + "".join(f"{cell:>12}" for cell in cells)


def _verdict(plan: Plan) -> Iterator[str]:
    chip, runner = plan.topology.chip, plan.shapes.engine.runner
    yield ""
    yield f"largest batch that fits: {plan.largest_batch()} slots per replica (now {runner.batch})"
    if plan.shapes.cfg.rollout.cache_bytes is not None:
        slots, size = plan.largest_cache()
        yield f"  of this context; {slots} with all memory, rollout.cache_bytes={size}"
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
