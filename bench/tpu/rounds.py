"""`python -m bench.tpu rounds STRATEGY:BUCKET ...`: cycles of a round by the compiler's own model.

Chunks with the widths of Qwen3-8B (vocabulary 152k, 32 heads, 8 of keys and values, bfloat16),
split in four, are compiled for TPUs that need not be there. The model has few layers so that a
chunk compiles in seconds; cycles of layers are scaled to 36 in what is printed and in tables, not
in the result file.

XLA's estimates of cycles (`train.plan.cycles`) are added up by part of a round. Kernels,
collectives, waits for copies and most gathers and scatters have none: figures compare two versions
of a program, and are no times. A plus marks a part that has a loop whose length data decide, of
which one iteration counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from bench.command import user_errors
from bench.record import figure, figures_in, result_of, versions, write_json, write_result
from bench.tpu.programs import BATCH, LAYERS, MODEL, chunk, mesh_over, tpu_devices, wide_runner
from specjax.command_line import ArgumentParser
from specjax.config import Strategy
from specjax.decode.options import Features
from specjax.models.families.dense import change_dense
from train.plan.copies import ENTRY, ROUND, copies
from train.plan.cycles import PARTS, REST, part_of
from train.plan.hlo import Module
from train.plan.report import cycles_text, millions, unknown_text

SETTINGS = ("topology", "layers", "scan", "features")  # equal for all figures of a file


def figures_of(text: str, whole: bool = False) -> dict[str, dict]:
    """Returns the figures of a chunk's text, as result files have them.

    Args:
      whole: whether to return those of the whole program, as of one that has no rounds.

    Raises:
      ValueError: the text has no loop over rounds, or no estimates.
    """
    module = Module(text)
    cost = module.cost if whole else module.turn
    if cost is None or not cost.cycles:
        raise ValueError(
            "expected the text of a chunk that a TPU compiler made, with a loop over rounds and "
            "estimated cycles"
        )
    outside = sum(module.cost.cycles.values()) - sum(cost.cycles.values())
    found = {f"cycles/{p}": figure(cost.cycles.get(p, 0), "cycles") for p in (*PARTS, REST)}
    found["counted_once"] = figure(sorted(cost.once), "parts with a loop of unknown length")
    within = module.entry if whole else module.round
    loops = [f"{part_of(op.text)} x {module.trips(op) or '?'}" for op in module.loops(within)]
    found["loops"] = figure(sorted(loops), "loops in a round, by part and how often they run")
    found["cycles_outside"] = figure(outside, "cycles at a chunk's begin and end")
    found |= {f"unknown/{kind}": figure(n, "without cycles") for kind, n in cost.unknown.items()}
    found["bytes"] = figure(cost.bytes, "bytes to and from HBM, without pages that kernels read")
    found["received"] = figure(cost.network, "bytes that collectives bring")
    found["kernels"] = figure(cost.kernels, "calls of Pallas kernels")
    found["flops"] = figure(cost.flops, "operations of products outside of kernels")
    found |= {f"calls/{kind}": figure(n, "of a round") for kind, n in cost.calls.items()}
    for place in (ROUND, ENTRY):
        here = [copy for copy in copies(module) if copy.place == place]
        names = {copy.what: copy.kind for copy in here if copy.kind in ("weights", "cache")}
        found[f"copied/{place}"] = figure(sum(c.total for c in here), "bytes of large arrays")
        found[f"copied_inputs/{place}"] = figure(names, "weights and caches that are copied")
    return found


def line(name: str, found: Mapping[str, Mapping[str, Any]], layers: int) -> str:
    """Returns one line about a chunk, with cycles of layers scaled to those of Qwen3-8B."""
    value = {key: entry["value"] for key, entry in found.items()}
    cycles = scaled(value, layers)
    calls = [f"{n:.0f} {key[6:]}" for key, n in value.items() if key.startswith("calls/")]
    unknown = {key[8:]: n for key, n in value.items() if key.startswith("unknown/")}
    words = [
        f"{name}: {millions(sum(cycles.values()))} at {LAYERS} layers: "
        + cycles_text(cycles, value["counted_once"]),
        f"outside {millions(value['cycles_outside'])}",
        f"no estimate of {unknown_text(unknown) or 'nothing'}",
        f"{value['bytes'] / 1e6:.0f} MB",
        ", ".join(calls),
    ]
    if "temporaries" in value:
        words.append(f"temporaries {value['temporaries'] / 1e6:.0f} MB")
    for place in (ROUND, ENTRY):
        inputs = ", ".join(value[f"copied_inputs/{place}"]) or "no input"
        words.append(f"copies, {place}: {value[f'copied/{place}'] / 1e6:.0f} MB, {inputs}")
    return "; ".join(words)


def scaled(value: Mapping[str, Any], layers: int) -> dict[str, float]:
    """Returns a round's cycles by part, with as many layers as Qwen3-8B has.

    Args:
      value: values of figures by name.
      layers: number of layers that were compiled.
    """
    cycles = {part: value[f"cycles/{part}"] for part in (*PARTS, REST)}
    return cycles | {"layers": cycles["layers"] * LAYERS / layers}


def measure(args: argparse.Namespace) -> dict[str, dict]:
    """Compiles every program and returns its figures, with the program's name before a slash.

    They are written after each program, because a compilation may take minutes.

    Raises:
      ValueError: the file has figures of other settings or versions.
    """
    jax.config.update("jax_platforms", "cpu")
    settings = {key: getattr(args, key) for key in SETTINGS}
    result = {} if args.out is None else figures_in(args.out, settings)
    mesh = mesh_over(tpu_devices(args.topology))
    model = change_dense(MODEL, num_layers=args.layers).running(scan_layers=args.scan)
    features = Features(sampled=True, **dict.fromkeys(args.features, True))
    for name in args.programs:
        strategy, _, bucket = name.rpartition(":")
        lowered = chunk(wide_runner(mesh, strategy, model), strategy, int(bucket), features)
        began = time.perf_counter()
        compiled = lowered.compile()
        seconds, text = time.perf_counter() - began, compiled.as_text()
        if args.text is not None:
            args.text.mkdir(parents=True, exist_ok=True)
            (args.text / f"{name.replace(':', '_x_')}.txt").write_text(text, encoding="utf-8")
        found = figures_of(text)
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        found["temporaries"] = figure(temporaries, "bytes")
        found["sources"] = figure(versions().get("specjax"), "commit that was measured")
        print(line(name, found, args.layers), f"; compiled in {seconds:.0f} s", sep="", flush=True)
        result |= {f"{name}/{key}": entry for key, entry in found.items()}
        if args.out is not None:
            write_result(args.out.stem, settings, result, args.out)
    return result


def program(text: str) -> str:
    """Checks a name of a program; it is the argument's type for argparse."""
    strategy, colon, bucket = text.rpartition(":")
    if not colon or not bucket.isdecimal() or not 1 <= int(bucket) <= BATCH:
        raise argparse.ArgumentTypeError(
            f"expected a strategy, a colon and a batch of 1 to {BATCH}, such as 4_1_5:8, got "
            f"{text!r}"
        )
    try:
        Strategy.parse(strategy)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _flag(text: str) -> str:
    known = [field.name for field in dataclasses.fields(Features)]
    if text not in known:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(known)}, got {text!r}")
    return text


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(
        prog="python -m bench.tpu rounds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("programs", nargs="+", type=program, metavar="STRATEGY:BUCKET")
    add("--topology", default="v5e:2x2", help="four chips, such as v5e:2x2 or v5p:2x2x1")
    add("--layers", type=int, default=MODEL.num_layers, help="layers that are compiled")
    add("--scan", action="store_true", help="scan over the layers: rollout.scan_layers=true")
    add("--features", nargs="*", default=[], type=_flag, help="sampling options: top_p, top_k, ..")
    add("--text", type=Path, metavar="DIR", help="also keep the compiled programs' texts there")
    add("--out", type=Path, metavar="FILE", help="also write, or add, the figures there")
    args = parser.parse_args(argv)
    with user_errors("tpu rounds"):
        measure(args)


def read(argv: Sequence[str] | None = None) -> None:
    """Prints the lines of `rounds` for texts that were kept, and compiles nothing."""
    parser = ArgumentParser(prog="python -m bench.tpu read", description=read.__doc__)
    add = parser.add_argument
    add("texts", nargs="+", type=Path, metavar="FILE", help="texts of `rounds --text`")
    add("--layers", type=int, default=MODEL.num_layers, help="layers of the text")
    add("--whole", action="store_true", help="of all layers: whole programs, such as an update")
    more = "bytes of each text's temporaries, which a text does not say"
    add("--temporaries", type=float, nargs="*", default=[], metavar="BYTES", help=more)
    add("--sources", metavar="COMMIT", help="commit that the texts were compiled from")
    add("--out", type=Path, metavar="FILE", help="replace figures in this file of `rounds`, too")
    args = parser.parse_args(argv)
    layers = LAYERS if args.whole else args.layers
    with user_errors("tpu read"):
        known = None
        if args.out is not None and args.out.exists():
            known = json.loads(args.out.read_text(encoding="utf-8"))
        elif args.out is not None:
            known = result_of(args.out.stem, {"layers": layers}, {})
        for path, size in itertools.zip_longest(args.texts, args.temporaries[: len(args.texts)]):
            found = figures_of(path.read_text(encoding="utf-8"), args.whole)
            if size is not None:
                found["temporaries"] = figure(size, "bytes")
            if args.sources is not None:
                found["sources"] = figure(args.sources, "commit that was measured")
            name = path.stem.replace("_x_", ":")
            print(line(name, found, layers))
            if known is not None:
                known["figures"] |= {f"{name}/{key}": entry for key, entry in found.items()}
                write_json(known, args.out)
