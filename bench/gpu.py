"""`python -m bench.gpu --minutes 14`: measures on a Hopper GPU what is not measured yet.

The parts (`--status` lists them, the most important first) take at most three minutes each, those
with a user's model more, compilation included. Each runs in a process of its own, so that a kernel
that hangs or a driver that fails ends one part only, and writes one result file per card,
bench/results/gpu/<part>.<card>.json. A part that failed, hung or ran out of memory is recorded with
the reason and skipped from then on (--again runs it once more); one whose time was too short runs
again, after those that have not run. If a call is interrupted, the next one keeps what was measured
and runs the interrupted part once more.

    python -m bench.gpu --status               what is measured, on which card, against which target
    python -m bench.gpu --dry                  compile every program for GPUs, on a machine without
                                               one (`make gpu-check` has the environment for it)
    python -m bench.gpu --small                run every part on a CPU: sizes are tiny, numbers mean
                                               nothing, and go to runs/gpu-small
    python -m bench.gpu --minutes 14           measure, on a GPU machine
    python -m bench.gpu --again own_model --model DIR --rows FILE
                                               train a real model by RL: off, static, goodput
    python -m bench.gpu --pack FILE            put all results into one file, to bring them back
    python -m bench.gpu --merge FILE           add the records of such files, see docs/gpu.md

Compiled programs and what was tuned for them are kept in .cache/gpu/<card>. The exit status is 1 if
a part failed in this call (with --dry: if a program does not compile, or does not fit a card; 75 if
there were not minutes enough for all of them).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import fnmatch
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from bench import gpu_process as records
from bench.command import bench_parser, user_errors
from bench.gpu_parts import PARTS, TARGETS, Target
from bench.gpu_process import MODEL, ROWS, Part, Record
from bench.programs import short_name
from bench.record import RESULTS, figure, now, result_of, write_json
from specjax.chips import CARDS, SHARE

SMALL_OUT = "runs/gpu-small"
MINUTES, SMALL_MINUTES = 14.0, 60.0
RESERVE = 10.0  # seconds of a call that are not given to parts
REAP = 30.0  # seconds to wait for the end of a killed process
ATTEMPTS = 2  # runs of a part that is interrupted; afterwards it is skipped
CACHE_BYTES = 10_000_000  # bytes of compiled programs kept for the next call, for each card
PACKED = "packed results of bench.gpu"

# --- running -------------------------------------------------------------------------------------


class Call(NamedTuple):
    """The arguments of one call: directory of the records, minutes, parts to choose from, names of
    those that run although they have a record, tiny sizes for a CPU, seed of weights and prompts.
    """

    out: str
    minutes: float
    parts: Sequence[Part] = PARTS
    again: Sequence[str] = ()
    small: bool = False
    seed: int = 0


def card_here(small: bool) -> str:
    """Returns the short name of this machine's card.

    Raises:
      ValueError: there is no GPU, and sizes are not small.
    """
    if small:
        jax.config.update("jax_platforms", "cpu")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the parts need the memory
    backend = jax.default_backend()
    if backend not in ("gpu", "cuda") and not small:
        raise ValueError(
            f"expected a GPU, got platform {backend!r}; run it on a machine that has one, with "
            "jax[cuda13], or try it out on a CPU with --small, --dry or --status"
        )
    return short_name(jax.devices()[0].device_kind)


def run(call: Call) -> int:
    """Runs the parts; returns 1 if one failed, else 0.

    Raises:
      ValueError: there is no GPU; or another call runs on the same records.
    """
    end = time.monotonic() + 60 * call.minutes - RESERVE
    card, status = card_here(call.small), 0
    with _alone(records.directory(call.out)):
        # Parts that were short of time run after those that were not measured at all.
        again = [part for part in call.parts if _wants_time(call, part, card)]
        first = [part for part in call.parts if part not in again]
        for part in (*first, *again):
            attempt = 1 if part in again else _attempt(call, part, card)
            if attempt is None:
                continue
            left = end - time.monotonic()
            if part.seconds > left:
                need = f"it may take {part.seconds:.0f} s, and {max(left, 0):.0f} s are left"
                print(f"--- {part.name}: not started: {need}", flush=True)
                continue
            print(f"--- {part.name} on {card}: at most {part.seconds:.0f} s", flush=True)
            status |= not _run_part(call, part, card, attempt)
    return int(status)


def _wants_time(call: Call, part: Part, card: str) -> bool:
    """Returns whether the part was short of time and has no interrupted run."""
    if part.name in call.again or records.path_of(call.out, part.name, card, True).exists():
        return False
    record = records.read(records.path_of(call.out, part.name, card))
    return record is not None and records.wants_time(record)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Holds the lock of the records; SIGTERM ends the call, and with it the part that runs."""
    directory.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with open(directory / ".lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError:
        raise ValueError(
            f"another call of bench.gpu runs on the records in {directory}; wait for its end, or "
            "give this one another --out"
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _attempt(call: Call, part: Part, card: str) -> int | None:
    """Returns the number of a part's next attempt; None: it is skipped.

    A part whose run was interrupted by the end of the call runs once more.
    """
    if part.name in call.again:
        return 1
    running = records.read(records.path_of(call.out, part.name, card, running=True))
    if running is None:
        done = records.path_of(call.out, part.name, card).exists()
        return None if done else 1
    attempts = running["settings"]["attempt"]
    if attempts < ATTEMPTS:
        print(f"--- {part.name}: its run was interrupted; it runs once more", flush=True)
        return attempts + 1
    why = f"its run was interrupted {attempts} times; run it by --again {part.name}"
    records.finish(call.out, records.ended(running, "interrupted", why))
    print(f"--- {part.name}: skipped: {why}", flush=True)
    return None


def _environment(part: Part, card: str, small: bool) -> dict[str, str]:
    """Returns the environment variables of a part's process.

    Compiled programs and their tuning are cached for the next call, by card, up to a size that is
    small enough to transfer. A cache directory of the user's own is used without that limit, which
    would evict other programs from it.
    """
    env = dict(os.environ)
    env.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)  # set for this process only
    if part.shares_memory:
        env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if "JAX_COMPILATION_CACHE_DIR" not in env:
        env["JAX_COMPILATION_CACHE_DIR"] = str(Path(".cache/gpu", card).absolute())
        env["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(CACHE_BYTES)
    env.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    if small:
        return env | {"JAX_PLATFORMS": "cpu"}
    if env.get("JAX_PLATFORMS"):  # references are computed on the host
        env["JAX_PLATFORMS"] = ",".join(dict.fromkeys([*env["JAX_PLATFORMS"].split(","), "cpu"]))
    env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(SHARE))
    return env


def _run_part(call: Call, part: Part, card: str, attempt: int) -> bool:
    """Runs a part in a process of its own, which is killed after its time limit.

    Returns:
      whether it succeeded.
    """
    settings = {"part": part.name, "card": card, "attempt": attempt, "seconds": part.seconds}
    settings |= {"small": call.small, "seed": call.seed}
    running = records.path_of(call.out, part.name, card, running=True)
    begun = result_of(f"gpu/{part.name}", settings, {"outcome": figure(records.RUNNING, "")})
    write_json(begun, running)  # the attempt counts, however it ends
    task = settings | {"function": part.function, "settings": dict(part.settings), "out": call.out}
    place = records.path_of(call.out, part.name, card)
    before, code = records.read(place), None
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.gpu_process", json.dumps(task)],
        env=_environment(part, card, call.small),
        stdin=subprocess.PIPE,  # the part ends itself when this pipe is closed
        start_new_session=True,
    )
    try:
        code = process.wait(part.seconds)
        word, why = "failed", f"its process ended with exit status {code}"
        if code < 0:
            word, why = "failed", f"its process was ended by {signal.Signals(-code).name}"
    except subprocess.TimeoutExpired:
        word, why = "timed out", f"it was killed after its {part.seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its children too
        try:
            process.wait(REAP)
        except subprocess.TimeoutExpired:
            line = f"its process {process.pid} was killed and still exists after {REAP:.0f} s"
            print(f"--- {part.name}: {line}; the next part starts beside it", flush=True)
    left_behind = records.read(running)
    if left_behind is None:
        # The part ended, and its record has the outcome, even if the process failed afterwards. If
        # an older record was kept, only the exit status is known.
        after = records.read(place)
        return code == 0 if after == before else records.ok(after)
    records.finish(call.out, records.ended(left_behind, word, why))  # the part did not end itself
    print(f"--- {part.name}: {word}: {why}", flush=True)
    return False


# --- packing and merging -------------------------------------------------------------------------


def merge(out: str | Path, paths: Sequence[Path]) -> list[str]:
    """Adds the records of packed files, where they rank higher than the existing ones.

    Records rank by `weight`, then by date, so merging again, or in another order, changes nothing.

    Returns:
      a line for each record, which says what was done.

    Raises:
      ValueError: a file was not written by --pack.
    """
    lines = []
    for path in paths:
        packed = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(packed, dict) or packed.get("name") != PACKED:
            raise ValueError(f"expected a file that --pack wrote, got {path}")
        for name, record in packed["records"].items():
            lines.append(f"{name}: {_take(records.directory(out) / Path(name).name, record)}")
    return lines


def _take(path: Path, new: Record) -> str:
    def rank(record: Mapping) -> tuple:  # at equal dates the content decides
        return records.weight(record), record["date"], json.dumps(record, sort_keys=True)

    ended = path.with_name(path.name.replace(".running.json", ".json"))
    running = ended.with_name(ended.name.removesuffix(".json") + ".running.json")
    old, final, cut_off = (records.read(one) for one in (path, ended, running))
    if path == running and final is not None and final["date"] >= new["date"]:
        return "kept the record of a later run"
    if old is not None and rank(old) >= rank(new):
        return f"kept {records.outcome(old)} of {old['date']}"
    write_json(new, path)
    if path == ended and cut_off is not None and cut_off["date"] <= new["date"]:
        running.unlink()
    return f"new, {records.outcome(new)} of {new['date']}"


# --- status --------------------------------------------------------------------------------------

MET, MISSED, UNKNOWN = "met", "missed", "not measured"
ByCard = Mapping[str, Mapping[str, Record]]


def by_card(out: str | Path) -> ByCard:
    """Card -> part -> record; the cards that targets are for are there without any."""
    found: dict[str, dict] = {card: {} for card in CARDS}
    for path, record in records.every(out):
        of_card = found.setdefault(record["settings"]["card"], {})
        if not path.name.endswith(".running.json") or record["settings"]["part"] not in of_card:
            of_card[record["settings"]["part"]] = record
    return found


def verdict(target: Target, card: str, of_card: Mapping[str, Record]) -> tuple[str, float | None]:
    """Returns whether a target is met on a card, and the worst figure.

    One figure beyond the bound misses the target; to meet it, every figure of every part must be
    there. Figures of failed parts count too.
    """
    values: list[float | None] = []
    for part in PARTS:
        if fnmatch.fnmatchcase(part.name, target.part):
            figures = of_card[part.name]["figures"] if part.name in of_card else {}
            names = fnmatch.filter(figures, target.figures)
            values += [figures[name]["value"] for name in names] or [None]
    known, bound = [value for value in values if value is not None], target.bounds[card]
    if not known:
        return UNKNOWN, None
    worst = max(known) if target.most else min(known)
    if worst > bound if target.most else worst < bound:
        return MISSED, worst
    return UNKNOWN if None in values else MET, worst


def tables(out: str | Path, table: Sequence[Part] = PARTS) -> None:
    """Prints what became of the parts on each card, and which targets are met."""
    found, console = by_card(out), Console(width=150)
    shown = Table(title="parts", title_justify="left")
    for column in ("part", "decides", "limit", "card", "outcome", "date"):
        shown.add_column(column, overflow="fold")
    for part in table:
        cards = [card for card, of_card in found.items() if part.name in of_card]
        for card in cards or ["-"]:
            record = found.get(card, {}).get(part.name)
            about = (UNKNOWN, "-") if record is None else _about(record)
            shown.add_row(part.name, part.decides, f"{part.seconds:.0f} s", card, *about)
    names = {part.name for part in table}
    for card, of_card in found.items():
        for name in of_card.keys() - names:
            shown.add_row(name, "(no longer a part)", "-", card, *_about(of_card[name]))
    console.print(shown)
    shown = Table(title="targets", title_justify="left")
    for column in ("target", "part", "bound", "card", "measured", "verdict"):
        shown.add_column(column, overflow="fold")
    for card in CARDS:
        for target in TARGETS:
            word, value = verdict(target, card, found[card])
            sign = "at most" if target.most else "at least"
            bound = f"{sign} {target.bounds[card]:g} {target.unit}"
            measured = "-" if value is None else f"{value:.4g}"
            shown.add_row(target.name, target.part, bound, card, measured, word)
    console.print(shown)


def _about(record: Record) -> tuple[str, str]:
    word, why = records.outcome(record), records.reason(record)
    if word == records.RUNNING:
        word, why = "cut off", f"attempt {record['settings']['attempt']}"
    missing = [name for name, entry in record["figures"].items() if entry["value"] is None]
    more = [why] * bool(why) + [f"{len(missing)} figures left out"] * bool(missing)
    return word + (f" ({'; '.join(more)})" if more else ""), record["date"]


# --- command line --------------------------------------------------------------------------------


def named(names: Sequence[str], table: Sequence[Part] = PARTS) -> list[Part]:
    """Returns the parts with these names, in the table's order; a name also stands for all parts
    below it: `plain` for `plain/1`.

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


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("gpu", __doc__, "gpu/<part>.<card>")
    add = parser.add_argument
    add("--minutes", type=float, help=f"for the call; default: {MINUTES:g}, with --dry no limit")
    add("--parts", nargs="+", metavar="PART", default=[], help="not all of them")
    add("--again", nargs="+", metavar="PART", default=[], help="these although they were run")
    what = "of a Hugging Face model, for the part own_model; so is --rows, a file for data.path"
    add("--model", metavar="DIR", help=what)
    add("--rows", metavar="FILE", help="rows with prompts and answers, see --model")
    add("--small", action="store_true", help="tiny sizes, on a CPU")
    add("--cards", nargs="+", default=list(CARDS), choices=CARDS, help="that --dry compiles for")
    act = parser.add_mutually_exclusive_group().add_argument
    act("--status", action="store_true", help="print what is measured, and measure nothing")
    act("--dry", action="store_true", help="compile ahead of time, and measure nothing")
    act("--pack", metavar="FILE", type=Path, help="write all results into one file")
    act("--merge", metavar="FILE", type=Path, nargs="+", help="add what --pack wrote")
    args = parser.parse_args(argv)
    if args.out is None:
        args.out = SMALL_OUT if args.small else str(RESULTS)
    if args.minutes is None and not args.dry:
        args.minutes = SMALL_MINUTES if args.small else MINUTES
    return args


def act(args: argparse.Namespace) -> int:
    """Does what was asked for, and returns the exit status."""
    for name, value in ((MODEL, args.model), (ROWS, args.rows)):
        if value is not None:
            os.environ[name] = str(Path(value).absolute())  # the parts are other processes
    again = [part.name for part in named(args.again)]
    parts = named([*args.parts, *again]) if args.parts or again else list(PARTS)
    if args.pack:
        found = {path.name: record for path, record in records.every(args.out)}
        write_json({"name": PACKED, "date": now(), "records": found}, args.pack)
        print(f"{len(found)} records in {args.pack}")
    elif args.merge:
        print(*merge(args.out, args.merge), sep="\n")
    elif args.dry:
        return records.dry(parts, args.cards, args.small, args.minutes)
    else:
        status = 0
        if not args.status:
            status = run(Call(args.out, args.minutes, parts, again, args.small, args.seed))
        tables(args.out)
        return status
    return 0


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    with user_errors("gpu"):
        sys.exit(act(args))


if __name__ == "__main__":
    main()
