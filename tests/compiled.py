"""`python tests/compiled.py WHAT PROGRAM ...`: what compilers make of programs, without a device.

    tpu off:8 4_1_5:64 ...      a round on four TPUs, of a strategy and a number of rows: cycles by
                                part, copies, collectives, temporaries
    gpu 8B:off:8:top_p ...      a round on a GPU: kernels by part, copies, CUDA graphs,
                                temporaries, layers that are traced
    update 8B:1x8320:remat=full ...    the policy's update on a GPU: temporaries, largest arrays,
                                kernels

`tpu` needs libtpu, as .venv-plan/bin/python has it (`make tpu-check` makes it). The others need
jax's CUDA plugin: `make gpu-check ARGS=--python` makes an environment, and prints its Python, which
needs JAX_PLATFORMS=cpu and JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1.

Programs of `tpu` have the widths of Qwen3-8B, split in four. XLA's estimates of cycles are added up
by part (`hlo.py`). Kernels, collectives, waits for copies and most gathers and scatters
have none: figures compare two versions of a program, and are no times. `cycles` scales the part
`layers` from those that are compiled to 36.

Programs of `gpu` have the shapes of Qwen3-8B, Qwen3-1.7B and SmolLM2-135M in bfloat16. Models of 3
and of 2 layers are compiled, and the whole model's kernels and copies are computed from
their difference. Options are names of sampling options (`top_p`, ..), `graph` (one CUDA graph),
`attention=KERNEL` and `draft_vocab=COUNT`.

Programs of `update` are a micro-batch of ROWSxLENGTH, by which `train.rl` adds gradients up, with
two layers in one loop. Options are `remat=POLICY`, `chunk=TOKENS`, `attention=KERNEL` and
`float32`. A mask is known by its sides: the length must be no width of the model.

Figures are named <program>/<figure>; `sources` is the commit that was compiled.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from hlo import ENTRY, PARTS, REST, ROUND, Cost, Module, Shape

from bench import programs
from bench.command import bench_parser, user_errors
from bench.programs import DEFAULT, Ahead, Chunk, Size, shape_of, whole_model
from bench.record import figure, figures_in, report, versions, write_result
from specjax.chips import CARDS
from specjax.decode.options import Features
from specjax.engine.programs import ONE_GRAPH
from specjax.interfaces import Denominators
from specjax.kernels import dispatch
from specjax.models.transformer import init_params
from train.loss.algo import algo
from train.loss.optim import OptimConfig
from train.loss.packing import empty_batch
from train.loss.policy import PolicyTrainer
from train.loss.terms import rl_loss

LAYERS = 36  # of Qwen3-8B
EVERY = (*PARTS, REST)
THUNKS = "*thunk_sequence_after_thunk_passes.txt"
# Figures of a GPU that grow with the number of layers.
LINEAR = re.compile(r"(kernels|copied)/|(kernels|own_kernels|library|gathers|gathered)$")


# --- what the host does to run a GPU's program ----------------------------------------------------

# It launches a compiled program's kernels one by one, or many at once as a CUDA graph, which XLA
# calls a command buffer. For a loop or a conditional outside of a command buffer it waits for the
# device, to read whether there is another iteration, or which branch it is.
_THUNK = re.compile(r"^(\s*)\d+: (k\w+)")
_DECISIONS = ("kWhile", "kConditional")
_BUFFER = "kCommandBuffer"


@dataclasses.dataclass(frozen=True)
class Thunks:
    """What the host does to run a program.

    Attributes:
      buffers: number of command buffers.
      decisions: number of loops and conditionals whose predicate the host reads.
      outside: number of launches that are in no command buffer, those of loops once.
    """

    buffers: int
    decisions: int
    outside: int


def thunks(text: str) -> Thunks:
    """Reads the sequence of thunks that XLA writes next to a program's text (`xla_dump_to`).

    Raises:
      ValueError: it is no such text.
    """
    buffers = decisions = outside = 0
    above: list[tuple[int, str]] = []  # indentation and kind of the thunks that contain the next
    for line in text.splitlines():
        if not (found := _THUNK.match(line)):
            continue
        depth, kind = len(found[1]), found[2]
        above = [(indent, what) for indent, what in above if indent < depth]
        within = any(what == _BUFFER for _, what in above)
        buffers += kind == _BUFFER
        if not within and kind in _DECISIONS:
            decisions += 1
        elif not within and kind not in (_BUFFER, "kSequential"):
            outside += 1
        above.append((depth, kind))
    if not above:
        raise ValueError("expected the thunk sequence of a program, got a text without thunks")
    return Thunks(buffers, decisions, outside)


# --- figures -------------------------------------------------------------------------------------


def figures_of(text: str, sequence: str | None = None, whole: bool = False) -> dict[str, dict]:
    """Returns the figures of a chunk's round.

    Args:
      text: text of the compiled program.
      sequence: of a GPU's program the sequence of its thunks; None: it is a TPU's.
      whole: whether to return those of the whole program, as of one that has no rounds.

    Raises:
      ValueError: the text has no loop over rounds; or no estimates, of a TPU's program.
    """
    module = Module(text)
    within = module.entry if whole else module.round
    if within is None:
        raise ValueError("expected the text of a chunk, with a loop over rounds")
    cost, found = module.cost_of(within), {}
    for place in (ROUND, ENTRY):
        here = [copy for copy in module.copies() if copy.place == place]
        names = {copy.what: copy.kind for copy in here if copy.kind in ("weights", "cache")}
        found[f"copied/{place}"] = figure(sum(c.bytes for c in here), "bytes of large arrays")
        found[f"copied_inputs/{place}"] = figure(names, "weights and caches that are copied")
    loops = [f"{op.part} x {module.trips(op) or '?'}" for op in module.loops(within)]
    found["loops"] = figure(sorted(loops), "loops in a round, by part and how often they run")
    if sequence is not None:
        return found | _on_gpu(cost, thunks(sequence))
    if not cost["cycles"]:
        raise ValueError("expected a program of a TPU compiler, with estimated cycles")
    outside = module.cost["cycles"].total() - cost["cycles"].total()
    found |= {f"cycles/{p}": figure(cost["cycles"][p], "cycles") for p in EVERY}
    found["counted_once"] = figure(sorted(cost.once), "parts with a loop of unknown length")
    found["cycles_outside"] = figure(outside, "cycles at a chunk's begin and end")
    found |= {f"unknown/{kind}": figure(n, "without cycles") for kind, n in cost["unknown"].items()}
    found["received"] = figure(cost["received"].total(), "bytes that collectives bring")
    found["kernels"] = figure(cost["kernels"].total(), "calls of Pallas kernels")
    return found | {f"calls/{kind}": figure(n, "of a round") for kind, n in cost["calls"].items()}


def _on_gpu(cost: Cost, host: Thunks) -> dict[str, dict]:
    found = {f"kernels/{part}": figure(cost["launched"][part], "launches") for part in EVERY}
    found["kernels"] = figure(cost["launched"].total(), "launches")
    found["own_kernels"] = figure(cost["kernels"].total(), "calls of Pallas kernels")
    found["library"] = figure(cost["library"].total(), "calls of cuDNN and cuBLAS")
    found["gathers"] = figure(cost["gathers"].total(), "gathers of pages")
    found["gathered"] = figure(cost["gathered"].total(), "bytes of gathered pages")
    found["buffers"] = figure(host.buffers, "command buffers")
    found["decisions"] = figure(host.decisions, "loops and branches that the host reads")
    found["outside"] = figure(host.outside, "launches in no command buffer")
    return found


@contextlib.contextmanager
def layers_traced() -> Iterator[list]:
    """Yields a list that gets an item for each layer that is traced."""
    traced, attend = [], dispatch.tree_attention

    def counted(*args, **kwargs):
        traced.append(1)
        return attend(*args, **kwargs)

    with mock.patch.object(dispatch, "tree_attention", counted):
        yield traced


def compiled_with_thunks(
    lowered: jax.stages.Lowered, options: Mapping[str, Any]
) -> tuple[jax.stages.Compiled, str, str]:
    """Compiles a program for a GPU; returns it, its text, and the sequence of its thunks."""
    with tempfile.TemporaryDirectory() as folder:
        told = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile({**options, **told})
        [sequence] = Path(folder).glob(THUNKS)
        return compiled, compiled.as_text(), sequence.read_text(encoding="utf-8")


def split(text: str, count: int) -> tuple[list[str], dict[str, str]]:
    """Splits a program's name into `count` words and its options, `top_p` standing for `top_p=`.

    Raises:
      ValueError: it has fewer words.
    """
    words = re.split(r"[:,]", text)
    if len(words) < count or not all(words):
        raise ValueError(f"expected {count} words between colons at least, got {text!r}")
    return words[:count], dict(word.partition("=")[::2] for word in words[count:])


# --- rounds --------------------------------------------------------------------------------------


def tpu(args: argparse.Namespace, text: str) -> dict[str, dict]:
    """Compiles a chunk for TPUs, and returns its figures."""
    (strategy, bucket), options = split(text, 2)
    jax.config.update("jax_platforms", "cpu")
    mesh = programs.mesh_over(programs.tpu_devices(args.topology))
    model = programs.change_dense(programs.WIDE, num_layers=args.layers).running(scan_layers=False)
    features = Features(sampled=True, **dict.fromkeys(options, True))
    runner = programs.wide_runner(mesh, strategy, model)
    compiled = programs.lowered_chunk(runner, strategy, int(bucket), features).compile()
    found = figures_of(compiled.as_text())
    cycles = {part: found[f"cycles/{part}"]["value"] for part in EVERY}
    cycles["layers"] *= LAYERS / args.layers
    found["cycles"] = figure(sum(cycles.values()), f"cycles at {LAYERS} layers")
    found["temporaries"] = figure(compiled.memory_analysis().temp_size_in_bytes, "bytes")
    return found


def gpu(args: argparse.Namespace, text: str) -> dict[str, dict]:
    """Compiles chunks for a GPU, and returns the whole model's figures."""
    (shape, strategy, batch), options = split(text, 3)
    place, pair = Ahead(args.card), []
    sampling = {"top_k", "top_p", "min_p", "repetition_penalty"} & options.keys()
    count = options.get("draft_vocab")
    for layers in (args.layers, args.layers - 1):
        size = Size(
            shape,
            int(batch),
            args.context,
            layers,
            strategy,
            attention=options.get("attention", "auto"),
            options={"temperature": 1.0, **dict.fromkeys(sampling, 0.9)},
            draft_vocab=count and int(count),
        )
        arms = {"": ONE_GRAPH} if "graph" in options else DEFAULT
        [program] = Chunk(place, size).programs("chunk", arms, as_engine=False)
        with layers_traced() as traced:
            lowered = program.lower()
        compiled, made, sequence = compiled_with_thunks(lowered, program.options)
        pair.append(figures_of(made, sequence))
        pair[-1]["traced"] = figure(len(traced), "layers that were traced")
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        pair[-1]["temporaries"] = figure(temporaries, "bytes")
        jax.clear_caches()
    return whole(pair, (args.layers, args.layers - 1), shape_of(shape).num_layers)


def whole(pair: Sequence[Mapping], layers: tuple[int, int], total: int) -> dict[str, dict]:
    """Returns the figures of the whole model, from those of two numbers of layers."""
    found = dict(pair[0])
    for key, entry in pair[0].items():
        if LINEAR.match(key):
            [value] = whole_model(*([of[key]["value"]] for of in pair), layers, total)
            found[key] = figure(value, f"{entry['unit']}, of {total} layers")
    return found


# --- updates -------------------------------------------------------------------------------------


def lowered_update(place: Ahead, name: str, layers: int) -> jax.stages.Lowered:
    """Lowers the program of a micro-batch, within `place.seen()`."""
    (shape, rows), options = split(name, 2)
    cfg = shape_of(shape)
    cfg = cfg.replace(layers=cfg.layers[:1] * layers).running(
        param_dtype="float32",
        compute_dtype="float32" if "float32" in options else "bfloat16",
        remat="remat" in options,
        remat_policy=options.get("remat", "full"),
    )
    chunk = options.get("chunk")
    trainer = PolicyTrainer(
        cfg,
        rl_loss(algo("grpo"), on_policy=True),
        OptimConfig().build(()),
        attention=options.get("attention", "auto"),
        chunk=chunk and int(chunk),
    )
    params = jax.eval_shape(lambda: init_params(trainer.cfg))
    batch, ones = empty_batch(*map(int, rows.split("x"))), Denominators(*np.float32([1, 1]))
    inputs = place.shapes((params, params, batch, ones))
    return trainer.programs["accumulate"].lower(*inputs)


def update_figures(
    name: str, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled
) -> dict[str, dict]:
    """Returns the figures of a compiled update: arrays are those in memory, not within fusions."""
    module, memory = Module(compiled.as_text()), compiled.memory_analysis()
    kernels = collections.Counter(re.findall(r'name = "(\w+)"', lowered.as_text()))
    shape, size = split(name, 2)[0]
    rows, length = map(int, size.split("x"))
    vocab, arrays = shape_of(shape).vocab_size, list(_arrays(module))
    largest = sorted({_text(s): s.bytes for s in arrays}.items(), key=lambda item: -item[1])[:5]
    logits = {_text(s) for s in arrays if vocab in s.dims and s.size == rows * length * vocab}
    pairs = {_text(s) for s in arrays if s.dims.count(length) >= 2}
    return {
        "temporaries": figure(memory.temp_size_in_bytes, "bytes"),
        "arguments": figure(memory.argument_size_in_bytes, "bytes"),
        "largest": figure(dict(largest), "bytes of the largest arrays that are written"),
        "pairs": figure(sorted(pairs), "arrays with an entry for each pair of a row's tokens"),
        "logits": figure(sorted(logits), "arrays as large as the logits of all tokens"),
        "kernels": figure(dict(sorted(kernels.items())), "Pallas kernels, those of a loop once"),
    }


def _arrays(module: Module) -> Iterator[Shape]:
    """Yields the arrays in memory that operations write."""
    waiting, known = [module.entry], set()
    while waiting:
        name = waiting.pop()
        for op in module.computations[name].values() if name not in known else ():
            if op.opcode == "while":
                waiting += [op.body, op.attribute("condition")]
            elif op.opcode in ("conditional", "call"):
                waiting += op.called()
            elif op.launches:
                yield from op.shapes
        known.add(name)


def _text(shape: Shape) -> str:
    return f"{shape.kind}[{','.join(map(str, shape.dims))}]"


def update(args: argparse.Namespace, text: str) -> dict[str, dict]:
    """Compiles an update for a GPU, and returns its figures."""
    place = Ahead(args.card)
    with place.seen():
        lowered = lowered_update(place, text, args.layers)
    return update_figures(text, lowered, lowered.compile())


# --- command line --------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    parser = bench_parser("compiled", __doc__)
    whats = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, measure, layers in (("tpu", tpu, 4), ("gpu", gpu, 3), ("update", update, 2)):
        one = whats.add_parser(name, description=measure.__doc__)
        add = one.add_argument
        one.set_defaults(measure=measure)
        add("programs", nargs="+", metavar="PROGRAM", help="see --help")
        add("--layers", type=int, default=layers, help="number of layers that are compiled")
        add("--out", type=Path, metavar="FILE", help="also write, or add, the figures there")
        if name == "tpu":
            add("--topology", default="v5e:2x2", help="four chips: v5e:2x2, v5p:2x2x1, ..")
        else:
            add("--card", default="h100", choices=CARDS, help="that is compiled for")
        if name == "gpu":
            add("--context", type=int, default=4096, help="tokens that a slot has room for")
    args = parser.parse_args(argv)
    other = ("programs", "out", "measure", "what")
    settings = {key: value for key, value in vars(args).items() if key not in other}
    with user_errors(f"compiled {args.what}"):
        result = {} if args.out is None else figures_in(args.out, settings)
        for name in args.programs:
            found = args.measure(args, name)
            found["sources"] = figure(versions().get("specjax"), "commit that was compiled")
            print(f"{name}\n{report(found)}", flush=True)
            result |= {f"{name}/{key}": entry for key, entry in found.items()}
            if args.out is not None:  # after each program, because a compilation may take minutes
                write_result(args.out.stem, settings, result, args.out)


if __name__ == "__main__":
    main()
