"""Memory and operations of programs, from the compiler's report or counted from shapes."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import time
from collections.abc import Mapping
from typing import Any

import jax

from specjax import chips
from specjax.chips import Chip
from specjax.config import Layer, ModelConfig
from specjax.drafts.file_head import FileHead
from specjax.drafts.model import ModelSource
from specjax.drafts.mtp import MTPSource, head_layer
from specjax.error_text import shortened
from specjax.parallel.collectives import received
from specjax.parallel.sharding import device_bytes
from train.plan.copies import Copy, copies
from train.plan.hlo import Cost, Module
from train.plan.programs import Program, Shapes, caches
from train.plan.windows import Windows, products

log = logging.getLogger(__name__)

_RESIDENT = ("parameters", "optimizer", "cache", "state")  # kinds of `Shapes.resident`
# Errors in the program's own code, rather than of the compiler.
_MISTAKES = (TypeError, AttributeError, NameError, LookupError)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass
class Figures:
    """Memory and cost of one program, per device.

    Attributes:
      name: name of the program.
      part: part of the run, see `Program`.
      key: key of the program, see `Program`.
      given: bytes of its inputs by kind.
      extra: bytes allocated only while it runs: inputs that do not stay, results that are not
        written over inputs, temporaries.
      temporaries: bytes of temporaries, included in `extra`.
      cost: cost of one run; for a chunk, of one round.
      outside: the compiler's estimate of a chunk's cycles outside of its rounds; loops over batches
        count once.
      copies: copies of large arrays, of a chunk in a round and outside of rounds.
      windows: of a chunk the windows in which products are summed, see `train.plan.windows`.
      brought: bytes of weights that a device receives, if the program moves weights.
      kept: bytes of these weights that a device then holds.
      excess: names of weights of which a device receives more than its shard; None: unknown.
      seconds: seconds of compilation.
      failed: why the compiler refused the program.
      needs: bytes that the program needs by the compiler's message, inputs included; None: the
        message has none, or those of temporaries only.
    """

    name: str
    part: str
    key: tuple
    given: dict[str, float]
    extra: float = 0.0
    temporaries: float = 0.0
    cost: Cost = dataclasses.field(default_factory=Cost)
    outside: float = 0.0
    copies: list[Copy] = dataclasses.field(default_factory=list)
    windows: Windows = dataclasses.field(default_factory=dict)
    brought: float = 0.0
    kept: float = 0.0
    excess: list[str] | None = None
    seconds: float = 0.0
    failed: str | None = None
    needs: float | None = None

    @property
    def is_chunk(self) -> bool:
        """Whether the program is a chunk of rounds of a rollout, with a known cost."""
        return self.part == "roll out" and self.key[0] == "chunk" and self.failed is None

    def as_json(self) -> dict:
        """Returns the figures as JSON, from which `read` restores them."""
        return {
            "name": self.name,
            "failed": self.failed,
            "needs_bytes": self.needs,
            "given_bytes": self.given,
            "extra_bytes": self.extra,
            "temporary_bytes": self.temporaries,
            "flops": self.cost.flops,
            "bytes": self.cost.bytes,
            "received_bytes": self.cost.received,
            "kernels": self.cost.kernels,
            "collectives": self.cost.calls,
            "cycles": self.cost.cycles,
            "cycles_counted_once": sorted(self.cost.once),
            "without_estimate": self.cost.unknown,
            "cycles_outside": self.outside,
            "copies": [dataclasses.asdict(copy) for copy in self.copies],
            "windows": self.windows,
            "brought_bytes": self.brought,
            "kept_bytes": self.kept,
            "excess": self.excess,
            "compile_seconds": self.seconds,
        }

    @classmethod
    def read(cls, program: Program, saved: Mapping[str, Any]) -> Figures:
        """Restores the figures of a program from the result of `as_json`."""
        return cls(
            program.name,
            program.part,
            program.key,
            given=saved["given_bytes"],
            extra=saved["extra_bytes"],
            temporaries=saved["temporary_bytes"],
            cost=Cost(
                flops=saved["flops"],
                bytes=saved["bytes"],
                received=saved["received_bytes"],
                kernels=saved["kernels"],
                calls=saved["collectives"],
                cycles=saved["cycles"],
                unknown=saved["without_estimate"],
                once=frozenset(saved["cycles_counted_once"]),
            ),
            outside=saved["cycles_outside"],
            copies=[Copy(**copy) for copy in saved["copies"]],
            windows=saved["windows"],
            brought=saved["brought_bytes"],
            kept=saved["kept_bytes"],
            excess=saved["excess"],
            seconds=saved["compile_seconds"],
            failed=saved["failed"],
            needs=saved["needs_bytes"],
        )


def compiled(program: Program) -> Figures:
    """Compiles a program and reads the compiler's report, or the reason why it failed.

    Raises:
      TypeError, AttributeError, NameError, LookupError: the program's own code is wrong.
    """
    given = {kind: device_bytes(tree) for kind, tree in program.given.items()}
    passing = sum(size for kind, size in given.items() if kind not in (*_RESIDENT, "results"))
    found, started = Figures(program.name, program.part, program.key, given), time.perf_counter()
    try:
        executable = program.lower().compile()
    except _MISTAKES:
        raise
    except Exception as error:  # compilers of kernels have error types of their own
        log.debug("%s does not compile", program.name, exc_info=True)
        found.failed = _reason(error)
        found.needs, found.temporaries = _bytes_wanted(str(error))
        found.extra = found.temporaries + passing
        return found
    finally:
        found.seconds = time.perf_counter() - started
    memory = executable.memory_analysis()
    if memory is not None:
        results = max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
        found.temporaries = float(memory.temp_size_in_bytes)
        found.extra = found.temporaries + results + passing
    text = executable.as_text()
    if program.moves is not None:
        collectives = received(text)
        found.brought = float(sum(c.received for c in collectives))
        found.kept = float(sum(program.moves.shards.values()))
        found.excess = program.moves.excess(collectives)
    module = Module(text)
    found.cost, found.copies = module.cost, copies(module)
    if program.key[0] == "chunk" and module.turn is not None:
        found.cost = module.turn
        found.windows = products(module)
        found.outside = sum(module.cost.cycles.values()) - sum(module.turn.cycles.values())
    return found


def _reason(error: Exception) -> str:
    """Returns one line of a compiler's message."""
    line = next(filter(None, map(str.strip, str(error).splitlines())), "")
    kind = "" if isinstance(error, jax.errors.JaxRuntimeError) else f"{type(error).__name__}: "
    return shortened(kind + line).removesuffix(": ")


def _bytes_wanted(text: str) -> tuple[float | None, float]:
    """Reads the bytes of a program and of its temporaries from an out-of-memory message.

    A message has one of the two; the bytes of the program are otherwise None, of temporaries 0.
    """

    def size(pattern: str) -> float | None:
        found = re.search(pattern, text)
        return float(found[1]) * _UNITS[found[2]] if found else None

    used = size(r"Used ([\d.]+)([KMGT]?)i?B? of")
    temporaries = size(r"temporaries \(([\d.]+)([KMGT]?)i?B?\) exceeds")
    return used, temporaries or 0.0


# --- rooflines -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds at the chip's peaks; memory and arithmetic overlap, the network does not."""

    compute: float
    memory: float
    network: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory) + self.network

    @property
    def bound(self) -> str:
        return max(("compute", "memory", "network"), key=lambda name: getattr(self, name))


def roofline(chip: Chip, cost: Cost) -> Roofline:
    return Roofline(
        cost.flops / chip.peak, cost.bytes / chip.bandwidth, cost.network / chip.network
    )


def with_prefix(cost: Cost, shapes: Shapes, strategy: str, slots: int, context: int) -> Cost:
    """Adds to a round's cost that of attention to `context` cached positions per slot.

    Attention of the draft at each of its steps is included. The program does not hold the lengths
    of prefixes, so this part is always counted from shapes.
    """
    model, ways, pairs = shapes.model, split(shapes), context * slots
    _, drafting = drafter(shapes)
    read = chips.cache_values(model.layers, pairs) / ways
    read += steps_of(shapes, strategy) * chips.cache_values(drafting, pairs) / ways
    operations = chips.attention_operations(drafting, pairs * drafted_rows(shapes, strategy))
    operations += chips.attention_operations(model.layers, pairs * rows_of(shapes, strategy))
    total = Cost()
    total.add(cost)
    total.add(Cost(flops=operations / ways, bytes=_rolled_out(shapes) * read))
    return total


def _width(model: ModelConfig) -> int:
    """Returns the bytes of a number of the compute dtype."""
    return 2 if model.run.compute_dtype in ("bfloat16", "float16") else 4


def _rolled_out(shapes: Shapes) -> int:
    """Returns the bytes of a number of the rollouts' compute dtype."""
    return _width(shapes.engine.runner.cfg)


def split(shapes: Shapes) -> int:
    """Returns the number of devices that split a sequence's keys and values."""
    pages, _ = caches(shapes.engine.runner.state)
    leaf = jax.tree.leaves(pages)[0]
    if getattr(leaf, "sharding", None) is None:
        return 1
    return leaf.size // math.prod(leaf.sharding.shard_shape(leaf.shape))


# --- without a compiler ---------------------------------------------------------------------------


def counted(program: Program, shapes: Shapes) -> Figures:
    """Computes the figures of a program from its shapes, without collectives."""
    given = {kind: device_bytes(tree) for kind, tree in program.given.items()}
    passing = sum(size for kind, size in given.items() if kind not in _RESIDENT)
    least = least_temporaries(shapes) if program.key[0] == "accumulate" else 0.0
    cost = _count(program, given, shapes)
    return Figures(program.name, program.part, program.key, given, passing + least, least, cost)


def least_temporaries(shapes: Shapes) -> float:
    """Returns the least temporaries of a micro-batch of the policy, in bytes.

    These are the logits that exist at once, and the inputs of every layer.
    """
    model, trainer = shapes.model, shapes.built.policy
    head = trainer.head(shapes.params, shapes.batch())
    return 4 * head.most_logits + head.tokens * _width(model) * model.num_layers * model.hidden_size


def _count(program: Program, given: Mapping[str, float], shapes: Shapes) -> Cost:
    """Counts operations and bytes of a program by its kind; every input is read once."""
    cfg, model, kind = shapes.cfg, shapes.model, program.key[0]
    weights = chips.layer_weights(model.layers, model.hidden_size)
    weights += model.vocab_size * model.hidden_size
    read = sum(size for name, size in given.items() if name not in ("cache", "state"))
    devices = shapes.mesh.size if shapes.mesh is not None else 1
    if kind in ("accumulate", "score"):
        tokens = max(cfg.row_sizes) * cfg.packing.row_length
        passes = 1 if kind == "score" else 4 if cfg.remat else 3
        # The most pairs of positions: each row is one causal sequence.
        pairs = max(cfg.row_sizes) * cfg.packing.row_length**2 // 2
        attention = chips.attention_operations(model.layers, pairs)
        return Cost(passes * (2 * weights * tokens + attention) / devices, passes * read)
    if kind == "draft":
        outputs = model.vocab_size * model.hidden_size  # for the policy's distributions
        tokens = max(cfg.row_sizes) * cfg.packing.row_length
        each = cfg.draft.unroll_steps * draft_weights(shapes) + fused_weights(shapes) + outputs
        return Cost(3 * 2 * each * tokens / devices, read)
    if kind in ("apply", "convert", "reshard", "place"):
        return Cost(0.0, 2 * read)
    ways = shapes.engine.runner.mesh.size if shapes.engine.runner.mesh is not None else 1
    if kind == "prefill":
        rows, width = program.key[1]
        return Cost(2 * weights * rows * width / ways, read)
    _, strategy, slots, _ = program.key
    rows, steps = rows_of(shapes, strategy), steps_of(shapes, strategy)
    drafting = drafted_rows(shapes, strategy) * draft_weights(shapes)
    drafting += (steps + 1) * fused_weights(shapes)  # of the tokens that a round emits, at most
    # The program's inputs hold the first step's weights, except the output matrix if it is the
    # policy's.
    again = _rolled_out(shapes) * max(steps - 1, 0) * draft_weights(shapes)
    outputs = _rolled_out(shapes) * min(steps, 1) * model.vocab_size * model.hidden_size
    outputs *= drafter(shapes)[0] is model
    operations = 2 * slots * (weights * rows + drafting)
    return Cost(operations / ways, read + (again + outputs) / ways)


def drafter(shapes: Shapes) -> tuple[ModelConfig, tuple[Layer, ...]]:
    """Returns config and layers of the draft.

    These are the policy's config and the layers of its MTP head's modules, or those of the network
    that drafts.
    """
    if isinstance(shapes.source, ModelSource):
        return shapes.source.cfg, shapes.source.cfg.layers
    if shapes.source is not None and shapes.head is not None:
        if not isinstance(shapes.source, MTPSource):
            return shapes.source.network, shapes.source.network.layers
    modules = shapes.model.mtp_num_layers
    return shapes.model, (head_layer(shapes.model),) * modules if modules else ()


def draft_weights(shapes: Shapes) -> int:
    """Returns the number of weights in one draft step, the output matrix included."""
    cfg, layers = drafter(shapes)
    outputs = cfg.vocab_size * cfg.hidden_size
    if isinstance(shapes.source, FileHead):  # whose first layer may take states and embeddings
        return _matrix_weights(shapes.source.rows()["layers"]) + outputs
    # An MTP head projects state and embedding together.
    inputs = 2 * cfg.hidden_size**2 if cfg is shapes.model else 0
    return chips.layer_weights(layers, cfg.hidden_size) + inputs + outputs


def fused_weights(shapes: Shapes) -> int:
    """Returns the number of weights that a head multiplies with the target's states of a token."""
    if not isinstance(shapes.source, FileHead):
        return 0
    rows = shapes.source.rows()
    return math.prod(rows["fc"].shape) if "fc" in rows else 0


def _matrix_weights(rows: Mapping[Any, Any]) -> int:
    """Returns the number of weights of the matrices in a tree of rows, see `Draft.rows`."""
    parts = (
        _matrix_weights(row) if isinstance(row, Mapping) else row.matrix * math.prod(row.shape)
        for row in rows.values()
    )
    return sum(parts)


def rows_of(shapes: Shapes, strategy: str) -> int:
    """Returns the number of rows per slot that a round of the strategy verifies."""
    tree = shapes.engine.runner.programs[strategy].tree
    return tree.rows if tree is not None else 1


def steps_of(shapes: Shapes, strategy: str) -> int:
    """Returns the number of runs of head or draft model in a round; 0 if there is neither."""
    return shapes.engine.runner.programs[strategy].steps if shapes.head is not None else 0


def drafted_rows(shapes: Shapes, strategy: str) -> int:
    """Returns the rows per slot that head or draft model compute in a round, in all steps."""
    if not steps_of(shapes, strategy):
        return 0
    tree = shapes.engine.runner.programs[strategy].tree
    return 1 + tree.topk * (tree.steps - 1) if tree.is_dynamic else len(tree.expanded_rows)


def model_text(model: ModelConfig) -> str:
    """Returns a model's size, for the head of the table."""
    outside = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    weights = chips.layer_weights(model.layers, model.hidden_size) + outside
    return (
        f"{model.model_type}, {weights / 1e9:.2f} G weights: {model.num_layers} layers of width "
        f"{model.hidden_size}, parameters {model.run.param_dtype}, arithmetic "
        f"{model.run.compute_dtype}"
    )
