"""`python -m bench.gpu.ahead updates SHAPE:ROWSxLENGTH[:OPTIONS] ...`: an update on a GPU.

The program of a micro-batch, by which `train.rl` adds gradients up, is compiled for a GPU that need
not be there: temporaries, its largest arrays, arrays as large as a mask or as all logits, calls of
kernels, and operations of matrix products. Parameters are float32. A model of few layers is
compiled; the layers are one loop, so that each further layer adds what it keeps for the backward
pass and nothing else. A mask is known by its sides: the length must be no width of the model.

A program's name is a shape, the rows of a micro-batch and their length, and options:

    8B:1x4224                         layers are not recomputed
    8B:1x8320:remat=save_attention    they are, but not attention
    1.7B:4x4224:remat=full,chunk=512  and logits of 512 tokens at a time (`logprob_chunk_size`)

Further options are `float32` (arithmetic, else bfloat16) and `attention=KERNEL`. Without a name
the programs are those of the table in docs/training.md. A program's figure `sources` is the commit
that was compiled; `--stale` is that of `rounds`.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from bench.command import user_errors
from bench.gpu.ahead.rounds import described, is_current
from bench.gpu.chunks import shape_of
from bench.gpu.program import CARDS, Ahead
from bench.record import figure, figures_in, versions, write_result
from specjax.command_line import ArgumentParser
from specjax.config.model import REMAT_POLICIES
from specjax.interfaces import Denominators
from specjax.models.transformer import init_params
from train.algo import algo
from train.loss import rl_loss
from train.optim import OptimConfig
from train.packing import empty_batch
from train.plan.hlo import Module, Op, Shape
from train.policy import PolicyTrainer

SHAPES = ("135M", "0.6B", "1.7B", "8B")
LAYERS, LARGEST = 2, 5
REMAT = ("", ":remat=save_attention", ":remat=full")
# Programs of the table in docs/training.md.
PAGE = tuple(f"{shape}:1x8320{remat}" for shape in ("1.7B", "8B") for remat in REMAT)
# Files, and folders of files, that decide a program's figures.
SOURCES = (
    "specjax",
    "train",
    "bench/gpu/ahead/updates.py",
    "bench/gpu/chunks.py",
    "bench/gpu/program.py",
)


class Name(NamedTuple):
    """A program: shape, rows [R S] of a micro-batch, and options by name."""

    text: str
    shape: str
    rows: int
    length: int
    options: Mapping[str, str]

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def name_of(text: str) -> Name:
    """Checks a program's name; it is the argument's type for argparse."""
    found = re.fullmatch(r"([^:]+):(\d+)x(\d+)(?::(.+))?", text)
    if found is None or found[1] not in SHAPES:
        raise argparse.ArgumentTypeError(
            f"expected a shape ({', '.join(SHAPES)}), and rows x length, such as 8B:1x4224, got "
            f"{text!r}"
        )
    options = found[4].split(",") if found[4] else []
    known = dict(option.partition("=")[::2] for option in options)
    if unknown := known.keys() - {"remat", "chunk", "attention", "float32"}:
        raise argparse.ArgumentTypeError(
            f"expected remat=, chunk=, attention= or float32, got {', '.join(sorted(unknown))}"
        )
    if known.get("remat", "full") not in REMAT_POLICIES:
        raise argparse.ArgumentTypeError(
            f"expected remat= one of {', '.join(REMAT_POLICIES)}, got {known['remat']!r}"
        )
    if not known.get("chunk", "1").isdecimal():
        raise argparse.ArgumentTypeError(f"expected chunk= tokens, got {known['chunk']!r}")
    return Name(text, found[1], int(found[2]), int(found[3]), known)


def traced_of(place: Ahead, name: Name, layers: int) -> jax.stages.Traced:
    """Traces the program of a micro-batch, within `place.seen()`."""
    cfg, options = shape_of(name.shape), name.options
    cfg = cfg.replace(layers=cfg.layers[:1] * layers).running(
        param_dtype="float32",
        compute_dtype="float32" if "float32" in options else "bfloat16",
        remat="remat" in options,
        remat_policy=options.get("remat", "full"),
    )
    chunk = int(options["chunk"]) if "chunk" in options else None
    trainer = PolicyTrainer(
        cfg,
        rl_loss(algo("grpo"), on_policy=True),
        OptimConfig().build(),
        attention=options.get("attention", "auto"),
        chunk=chunk,
    )
    params = jax.eval_shape(lambda: init_params(trainer.cfg))
    batch = empty_batch(name.rows, name.length)
    ones = Denominators(np.float32(1), np.float32(1))
    inputs = place.shapes((params, params, batch, ones))
    return trainer.programs["accumulate"].trace(*inputs)


# --- what the program computes, before the compiler -----------------------------------------------


class Work(NamedTuple):
    """What a program computes.

    Attributes:
      operations: of matrix products outside of kernels.
      kernels: calls of Pallas kernels by name.
    """

    operations: int
    kernels: collections.Counter


def work_of(jaxpr) -> Work:
    """Counts a jaxpr, loops as often as they run; a loop of unknown length once."""
    operations, kernels = 0, collections.Counter()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (over, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            operations += 2 * eqn.outvars[0].aval.size * int(np.prod([left[i] for i in over]))
        elif eqn.primitive.name == "pallas_call":
            kernels[eqn.params["name"]] += 1
        else:
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            inner = [work_of(jaxpr) for jaxpr in _jaxprs_of(eqn.params)]
            if eqn.primitive.name == "cond":  # one branch runs, such as that of the platform
                inner = [max(inner, key=lambda work: (work.operations, work.kernels.total()))]
            for found in inner:
                operations += times * found.operations
                kernels.update({key: times * n for key, n in found.kernels.items()})
    return Work(operations, kernels)


def _jaxprs_of(params: Mapping[str, Any]) -> Iterator:
    """Yields the jaxprs among the parameters of an equation."""
    for value in params.values():
        for one in value if isinstance(value, list | tuple) else [value]:
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                yield one


# --- what the compiler makes of it ----------------------------------------------------------------


def arrays_of(module: Module) -> Iterator[tuple[Op, Shape]]:
    """Yields the arrays in memory that operations write: those within fusions are not."""
    waiting, known = [module.entry], set()
    while waiting:
        name = waiting.pop()
        if name in known:
            continue
        known.add(name)
        for op in module.computations[name].values():
            if op.opcode == "while":
                waiting += [op.body, op.attribute("condition").lstrip("%")]
            elif op.opcode in ("conditional", "call"):
                waiting += op.called()
            elif op.launches:
                yield from ((op, shape) for shape in op.shapes)


def of_pairs(shape: Shape, length: int) -> bool:
    """Whether an array has an entry for every pair of a row's tokens."""
    return shape.dims.count(length) >= 2


def _text(shape: Shape) -> str:
    return f"{shape.kind}[{','.join(map(str, shape.dims))}]"


def figures_of(name: Name, vocab: int, compiled: jax.stages.Compiled, work: Work) -> dict:
    """Returns the figures of a compiled update."""
    module, memory = Module(compiled.as_text()), compiled.memory_analysis()
    arrays = list(arrays_of(module))
    sizes = {_text(s): s.bytes for _, s in arrays}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:LARGEST]
    logits = {_text(s) for _, s in arrays if vocab in s.dims and s.size == name.tokens * vocab}
    pairs = {_text(s) for _, s in arrays if of_pairs(s, name.length)}
    return {
        "temporaries": figure(memory.temp_size_in_bytes, "bytes"),
        "arguments": figure(memory.argument_size_in_bytes, "bytes"),
        "largest": figure(dict(largest), "bytes of the largest arrays that are written"),
        "pairs": figure(sorted(pairs), "arrays with an entry for each pair of a row's tokens"),
        "logits": figure(sorted(logits), "arrays as large as the logits of all tokens"),
        "operations": figure(work.operations, "of matrix products outside of Pallas kernels"),
        "kernels": figure(dict(sorted(work.kernels.items())), "calls of Pallas kernels"),
    }


def line(text: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    value = {key: entry["value"] for key, entry in found.items()}
    kernels = ", ".join(f"{n} {name}" for name, n in value["kernels"].items()) or "no kernels"
    largest, count = next(iter(value["largest"].items()))
    return (
        f"{text}: temporaries {value['temporaries'] / 1e9:.2f} GB, largest array {largest} of "
        f"{count / 1e6:.0f} MB, {len(value['pairs'])} arrays of pairs of tokens, "
        f"{len(value['logits'])} of all logits, {value['operations'] / 1e12:.2f} T operations, "
        f"{kernels}; compiled in {value['compiling']:.0f} s"
    )


def measure(args: argparse.Namespace) -> dict[str, dict]:
    """Compiles every program and returns its figures, with the program's name before a slash.

    Raises:
      ValueError: the file has figures of other settings or versions, or the compiler is missing.
    """
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    jax.config.update("jax_platforms", "cpu")
    place = described(args.card)
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot read such programs
    settings = {"card": args.card, "layers": args.layers, "context": None}
    result = {} if args.out is None else figures_in(args.out, settings)
    for name in args.programs:
        text = name.text
        if args.stale and is_current(result.get(f"{text}/sources"), SOURCES):
            continue
        with place.seen():
            traced = traced_of(place, name, args.layers)
            lowered = traced.lower()
        began = time.perf_counter()
        compiled = lowered.compile()
        work = work_of(traced.jaxpr.jaxpr)
        found = figures_of(name, shape_of(name.shape).vocab_size, compiled, work)
        found["compiling"] = figure(time.perf_counter() - began, "s, on a machine with other work")
        found["sources"] = figure(versions().get("specjax"), "commit that was compiled")
        print(line(text, found), flush=True)
        if args.text is not None:
            args.text.mkdir(parents=True, exist_ok=True)
            path = args.text / f"{re.sub(r'[:,=]', '_', text)}.txt"
            path.write_text(compiled.as_text(), encoding="utf-8")
        result = {k: entry for k, entry in result.items() if k.partition("/")[0] != text}
        result |= {f"{text}/{key}": entry for key, entry in found.items()}
        if args.out is not None:
            write_result(args.out.stem, settings, result, args.out)
    return result


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(
        prog="python -m bench.gpu.ahead updates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    page = [name_of(text) for text in PAGE]
    more = "default: those of docs/training.md"
    metavar = "SHAPE:ROWSxLENGTH[:OPTIONS]"
    add("programs", nargs="*", type=name_of, default=page, metavar=metavar, help=more)
    add("--card", default="h100", choices=CARDS, help="that is compiled for")
    add("--layers", type=int, default=LAYERS, help="number of layers that are compiled")
    add("--text", type=Path, metavar="DIR", help="also keep the compiled programs' texts there")
    add("--out", type=Path, metavar="FILE", help="also write, or add, the figures there")
    more = "only programs that --out does not have, or has of other sources"
    add("--stale", action="store_true", help=more)
    args = parser.parse_args(argv)
    with user_errors("gpu.ahead updates"):
        measure(args)
