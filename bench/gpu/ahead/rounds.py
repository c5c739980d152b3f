"""`python -m bench.gpu.ahead rounds SHAPE:STRATEGY:BATCH ...`: what a round launches and reads.

Chunks of models with the shapes of Qwen3-8B, Qwen3-1.7B and SmolLM2-135M in bfloat16, with a draft
head of one module, are compiled for a GPU that need not be there. To compile in seconds, models of
3 and of 2 layers are compiled; their difference is one layer, from which kernels, bytes and copies
of the whole model are computed. Loops, CUDA graphs, temporaries and seconds are those of 3 layers.

A program's name is a shape, a strategy, a batch, and options, separated by colons:

    8B:off:8                   plain decoding of 8 sequences, as XLA compiles it by itself
    8B:4_1_5:8:top_p:graph     a chain of four drafted tokens, with top-p, as one CUDA graph

The options are names of sampling options (`top_p`, `top_k`, ..), `graph`, `attention=KERNEL`, and
`draft_vocab=COUNT`. Without a name the programs are those of the table in docs/gpu.md.
A program's figure `sources` is the commit that was compiled. `--stale` compiles the programs of
which `--out` has no figures, or those of other sources.
Nothing is timed but tracing and compiling, which depend on the machine and its other work; the
number of layers that are traced depends on neither.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax

from bench.command import user_errors
from bench.gpu.chunks import DEFAULT, Chunk, Size, shape_of, whole_model
from bench.gpu.program import CARDS, Ahead
from bench.record import figure, figures_in, versions, write_json, write_result
from specjax.command_line import ArgumentParser
from specjax.config import Strategy
from specjax.decode.options import Features
from specjax.engine.graphs import ONE_GRAPH
from specjax.kernels import dispatch
from train.plan.copies import ENTRY, ROUND, copies
from train.plan.cycles import PARTS, REST
from train.plan.hlo import Module
from train.plan.launches import launches, thunks

ROOT = Path(__file__).resolve().parents[3]
SHAPES = ("135M", "1.7B", "8B")
LAYERS, CONTEXT = (3, 2), 4096
SETTINGS = ("card", "layers", "context")  # equal for all figures of a file
EVERY = (*PARTS, REST)
THUNKS = "*thunk_sequence_after_thunk_passes.txt"
# Programs of the table in docs/gpu.md.
PAGE = (
    "8B:off:8",
    "8B:4_1_5:8",
    "1.7B:off:8",
    "1.7B:4_1_5:8",
    "135M:off:8",
    "135M:4_1_5:8",
    "8B:off:8:top_p",
    "8B:4_1_5:8:top_p",
    "135M:4_1_5:8:top_p",
    "8B:off:8:graph",
    "8B:off:8:attention=library",
    "8B:off:1",
)
# Files, and folders of files, that decide a program's figures.
SOURCES = (
    "specjax",
    "bench/gpu/ahead/rounds.py",
    "bench/gpu/chunks.py",
    "bench/gpu/program.py",
    "bench/round/batch.py",
    "train/plan",
)
SETTING = re.compile(r"attention=[\w:]+|draft_vocab=[1-9]\d*")
# Figures that grow with the number of layers.
LINEAR = re.compile(r"(kernels|bytes|copied)/|(own_kernels|library|gathers|gathered|traced)$")


class Name(NamedTuple):
    """A program: shape, strategy, batch, and options."""

    shape: str
    strategy: str
    batch: int
    options: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return ":".join(map(str, (self.shape, self.strategy, self.batch, *self.options)))

    @property
    def graph(self) -> bool:
        return "graph" in self.options

    def _setting(self, name: str) -> str | None:
        found = dict(option.split("=", 1) for option in self.options if "=" in option)
        return found.get(name)

    @property
    def attention(self) -> str:
        return self._setting("attention") or "auto"

    @property
    def draft_vocab(self) -> int | None:
        count = self._setting("draft_vocab")
        return None if count is None else int(count)

    @property
    def features(self) -> Features:
        known = {field.name for field in dataclasses.fields(Features)}
        return Features(**{option: True for option in self.options if option in known})


def name_of(text: str) -> Name:
    """Checks a program's name; it is the argument's type for argparse."""
    shape, strategy, batch, *options = (text.split(":") + ["", ""])[: max(3, text.count(":") + 1)]
    if shape not in SHAPES or not batch.isdecimal() or not int(batch):
        raise argparse.ArgumentTypeError(
            f"expected a shape ({', '.join(SHAPES)}), a strategy and a batch, such as 8B:4_1_5:8, "
            f"got {text!r}"
        )
    try:
        Strategy.parse(strategy)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    known = ["graph", *(field.name for field in dataclasses.fields(Features))]
    for option in options:
        if option not in known and not SETTING.fullmatch(option):
            raise argparse.ArgumentTypeError(
                f"expected options among {', '.join(known)}, attention=KERNEL and "
                f"draft_vocab=COUNT, got {option!r}"
            )
    return Name(shape, strategy, int(batch), tuple(options))


def figures_of(text: str, sequence: str, whole: bool = False) -> dict[str, dict]:
    """Returns the figures of a chunk of so many layers as were compiled.

    Args:
      text: text of the compiled program.
      sequence: the sequence of its thunks.
      whole: whether to return those of the whole program, as of one that has no rounds.

    Raises:
      ValueError: the text has no loop over rounds.
    """
    module = Module(text)
    within = module.entry if whole else module.round
    if within is None:
        raise ValueError("expected the text of a chunk, with a loop over rounds")
    one, found = launches(module, within), {}
    found |= {f"kernels/{part}": figure(one.kernels[part], "launches") for part in EVERY}
    found |= {f"bytes/{part}": figure(one.bytes[part], "bytes") for part in EVERY}
    found["own_kernels"] = figure(one.own, "calls of Pallas kernels")
    found["library"] = figure(one.library, "calls of cuDNN and cuBLAS")
    found["gathers"] = figure(one.gathers.total(), "gathers of pages")
    found["gathered"] = figure(one.gathered, "bytes of gathered pages")
    loops = sorted(one.loops.elements())
    found["loops"] = figure(loops, "loops in a round, by part and how often they run")
    branches = sorted(one.branches.elements())
    found["branches"] = figure(branches, "conditionals in a round, by part")
    for place in (ROUND, ENTRY):
        here = [copy for copy in copies(module) if copy.place == place]
        names = {copy.what: copy.kind for copy in here if copy.kind in ("weights", "cache")}
        found[f"copied/{place}"] = figure(sum(c.total for c in here), "bytes of large arrays")
        found[f"copied_inputs/{place}"] = figure(names, "weights and caches that are copied")
    host = thunks(sequence)
    found["buffers"] = figure(host.buffers, "command buffers")
    found["decisions"] = figure(host.decisions, "loops and branches that the host reads")
    found["outside"] = figure(host.outside, "launches in no command buffer")
    return found


def whole(
    many: Mapping[str, Mapping], few: Mapping[str, Mapping], layers: tuple[int, int], total: int
) -> dict[str, dict]:
    """Returns the figures of the whole model.

    Args:
      many, few: figures of models with layers[0] and layers[1] layers, the larger number first.
      total: number of layers of the whole model.
    """
    found = dict(many)
    for key, entry in many.items():
        if LINEAR.match(key):
            values = [entry["value"]], [few[key]["value"]]
            [value] = whole_model(*values, layers, total)
            found[key] = figure(value, f"{entry['unit']}, of {total} layers")
    return found


def line(name: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns one line about a chunk."""
    value = {key: entry["value"] for key, entry in found.items()}
    kernels, sizes = ({p: value[f"{what}/{p}"] for p in EVERY} for what in ("kernels", "bytes"))
    parts = ", ".join(f"{part} {count:.0f}" for part, count in kernels.items() if count)
    words = [
        f"{name}: {sum(kernels.values()):.0f} kernels: {parts}",
        f"{sum(sizes.values()) / 1e6:.0f} MB",
        f"{value['gathers']:.0f} gathers of pages, {value['gathered'] / 1e6:.1f} MB",
        f"{value['own_kernels']:.0f} Pallas, {value['library']:.0f} cuDNN or cuBLAS",
        f"loops: {', '.join(value['loops']) or 'none'}",
        f"branches: {', '.join(value['branches']) or 'none'}",
        f"{value['buffers']} command buffers, {value['decisions']} decisions by the host, "
        f"{value['outside']} launches outside",
    ]
    if "temporaries" in value:
        words.append(f"temporaries {value['temporaries'] / 1e6:.1f} MB")
    if "traced" in value:
        words.append(
            f"{value['traced']:.0f} layers traced; lowered in {value['lowering']:.1f} s, compiled "
            f"in {value['compiling']:.1f} s"
        )
    for place in (ROUND, ENTRY):
        inputs = ", ".join(value[f"copied_inputs/{place}"]) or "no input"
        words.append(f"copies, {place}: {value[f'copied/{place}'] / 1e6:.1f} MB, {inputs}")
    return "; ".join(words)


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


def compiled_of(place: Ahead, name: Name, size: Size) -> tuple[str, str, dict]:
    """Compiles a chunk.

    Returns:
      the program's text, the sequence of its thunks, and figures that neither has.
    """
    arms = {"": ONE_GRAPH} if name.graph else DEFAULT
    [program] = Chunk(place, size).programs("chunk", arms, as_engine=False)
    began = time.perf_counter()
    with layers_traced() as traced:
        lowered = program.lower()
    lowering, began = time.perf_counter() - began, time.perf_counter()
    compiled, text, sequence = compiled_with_thunks(lowered, program.options)
    compiling = time.perf_counter() - began
    found = {
        "temporaries": figure(compiled.memory_analysis().temp_size_in_bytes, "bytes"),
        "traced": figure(len(traced), "layers that were traced, those of the draft included"),
        "lowering": figure(lowering, "s, on a machine with other work"),
        "compiling": figure(compiling, "s, on a machine with other work"),
        "sources": figure(versions().get("specjax"), "commit that was compiled"),
    }
    return text, sequence, found


def measure(args: argparse.Namespace) -> dict[str, dict]:
    """Compiles every program and returns its figures, with the program's name before a slash.

    They are written after each program, because a compilation may take minutes.

    Raises:
      ValueError: the file has figures of other settings or versions, or the compiler is missing.
    """
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    jax.config.update("jax_platforms", "cpu")
    place = described(args.card)
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot read such programs
    settings = {key: getattr(args, key) for key in SETTINGS}
    result = {} if args.out is None else figures_in(args.out, settings)
    for name in args.programs:
        if args.stale and is_current(result.get(f"{name.text}/sources")):
            continue
        pair = []
        for count in args.layers:
            size = Size(
                name.shape,
                name.batch,
                args.context,
                count,
                name.strategy,
                attention=name.attention,
                features=name.features,
                draft_vocab=name.draft_vocab,
            )
            text, sequence, found = compiled_of(place, name, size)
            if args.text is not None:
                _keep(args.text, name, count, text, sequence)
            pair.append(figures_of(text, sequence) | found)
            jax.clear_caches()
        found = whole(*pair, args.layers, shape_of(name.shape).num_layers)
        print(line(name.text, found), flush=True)
        result = {k: entry for k, entry in result.items() if k.partition("/")[0] != name.text}
        result |= {f"{name.text}/{key}": entry for key, entry in found.items()}
        if args.out is not None:
            write_result(args.out.stem, settings, result, args.out)
    return result


def is_current(
    sources: Mapping[str, Any] | None, paths: Sequence[str] = SOURCES, root: Path = ROOT
) -> bool:
    """Whether figures of a program are those of this checkout.

    Args:
      sources: the program's figure `sources`; None: there is none.
      paths: files and folders that decide the figures.
      root: the checkout.

    Returns:
      whether the figure's commit is in this checkout's history, or this one, and none of `paths`
      has changed since.
    """
    commit = None if sources is None else sources["value"]
    if commit is None or commit.endswith("-dirty"):
        return False
    git = "git", "-C", str(root)
    commands = (
        (*git, "merge-base", "--is-ancestor", commit, "HEAD"),
        (*git, "diff", "--quiet", commit, "--", *paths),
    )
    return all(subprocess.run(one, stderr=subprocess.DEVNULL).returncode == 0 for one in commands)


def _keep(folder: Path, name: Name, layers: int, text: str, sequence: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, content in ((".txt", text), (".thunks", sequence)):
        path = folder / f"{name.text.replace(':', '_x_')}.{layers}{suffix}"
        path.write_text(content, encoding="utf-8")


def described(card: str) -> Ahead:
    """Returns a card to compile for.

    Raises:
      ValueError: XLA's compiler for GPUs is not installed.
    """
    try:
        return Ahead(card)
    except Exception as error:  # jax raises several types, depending on the missing package
        raise ValueError(
            "it needs XLA's compiler for GPUs, which comes with jax-cuda13-plugin[with-cuda] "
            "(`make gpu-check ARGS=--python` makes an environment with it and prints its Python); "
            f"got {type(error).__name__}: {error}"
        ) from None


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(
        prog="python -m bench.gpu.ahead rounds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    page = [name_of(text) for text in PAGE]
    more = "default: those of docs/gpu.md"
    metavar = "SHAPE:STRATEGY:BATCH[:OPTION]"
    add("programs", nargs="*", type=name_of, default=page, metavar=metavar, help=more)
    add("--card", default="h100", choices=CARDS, help="that is compiled for")
    more = "numbers of layers that are compiled, the larger one first"
    add("--layers", type=int, nargs=2, default=list(LAYERS), help=more)
    add("--context", type=int, default=CONTEXT, help="tokens that a slot has room for")
    add("--text", type=Path, metavar="DIR", help="also keep the compiled programs' texts there")
    add("--out", type=Path, metavar="FILE", help="also write, or add, the figures there")
    more = "only programs that --out does not have, or has of other sources"
    add("--stale", action="store_true", help=more)
    args = parser.parse_args(argv)
    with user_errors("gpu.ahead rounds"):
        measure(args)


def read(argv: Sequence[str] | None = None) -> None:
    """Prints the lines of `rounds` for texts that were kept, and compiles nothing."""
    parser = ArgumentParser(prog="python -m bench.gpu.ahead read", description=read.__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="directory of `rounds --text`")
    add("--out", type=Path, metavar="FILE", help="replace figures in this file of `rounds`, too")
    args = parser.parse_args(argv)
    with user_errors("gpu.ahead read"):
        known = None
        if args.out is not None:
            known = json.loads(args.out.read_text(encoding="utf-8"))
        pairs: dict[str, dict[int, Path]] = {}
        for path in sorted(args.folder.glob("*.txt")):
            name, _, count = path.stem.rpartition(".")
            pairs.setdefault(name.replace("_x_", ":"), {})[int(count)] = path
        for name, paths in pairs.items():
            layers = tuple(sorted(paths, reverse=True))
            found = [
                figures_of(
                    paths[count].read_text(encoding="utf-8"),
                    paths[count].with_suffix(".thunks").read_text(encoding="utf-8"),
                )
                for count in layers
            ]
            made = whole(*found, layers, shape_of(name.partition(":")[0]).num_layers)
            print(line(name, made))
            if known is not None:
                known["figures"] |= {f"{name}/{key}": entry for key, entry in made.items()}
                write_json(known, args.out)
