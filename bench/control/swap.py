"""`python -m bench.control swap`: the head is swapped for a random one in mid-run, and back.

It writes down what each controller chose, how many rounds it took until it was within 5% of the
best strategy again, and how many seconds it lost.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.command import user_errors
from bench.control import pictures
from bench.control.choices import (
    EVENTS,
    PHASES,
    TOLERANCE,
    WINDOW,
    Speeds,
    best_rate,
    recovery,
    regrets,
    spans_of,
    speed_of,
    to_text,
)
from bench.control.stream import (
    ADAPTIVE,
    Arm,
    Bench,
    Measured,
    Recorder,
    Stream,
    check_counts,
    in_turns,
    measure,
    stream_parser,
)
from bench.record import figure, median_interval, write_result
from specjax.control import OFF
from specjax.control.base import canonical
from specjax.models.transformer import Params

REPEATS = 28
CONTROLLERS = (*ADAPTIVE, "static")
VARIANTS = ("announced", "unannounced")
ROUNDS_WANTED = 50


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = stream_parser("swap", __doc__, "control_swap_<model>")
    add = parser.add_argument
    add("--batch", type=int, default=2, help="samples that run at once")
    add("--rounds", type=int, default=400, help="of each phase: good head, bad head, good head")
    add("--runs", type=int, default=7, help="of each controller")
    add("--repeats", type=int, default=REPEATS, help="measurements of each strategy with each head")
    add("--static", default="4_1_5", help="strategy of the static controller")
    add("--controllers", nargs="+", default=list(CONTROLLERS), choices=CONTROLLERS)
    add("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS,
        help="is the controller told of new weights?")  # fmt: skip
    args = parser.parse_args(argv)
    args.static = canonical(args.static)
    if args.static not in (OFF, *args.strategies):
        parser.error(f"--static {args.static} is none of --strategies {args.strategies}")
    check_counts(parser, args)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    with user_errors("control"):
        path = swap(args)
        print(path)
        print(pictures.draw(path))


def swap(args: argparse.Namespace) -> Path:
    """Measures the strategies with either head, then runs every controller through the swaps."""
    bench = Bench(args, args.batch)
    heads = {"good": bench.llm.head, "bad": bench.random_head()}
    measured = speeds_of(bench, heads)
    speeds = {head: {n: speed_of(m) for n, m in by.items()} for head, by in measured.items()}
    figures = speed_figures(measured, speeds)
    for head, by_name in speeds.items():
        rates = ", ".join(f"{name} {speed.rate:.0f}" for name, speed in by_name.items())
        print(f"{head} head: {rates} tok/s", flush=True)
    runs: dict[tuple[str, str], list[list[Measured]]] = {}
    for number in range(args.runs):
        bench.recalibrate()
        for variant, kind in itertools.product(args.variants, args.controllers):
            recorder = Recorder(bench.controller(kind), announce=variant == "announced")
            phases = one_run(bench, recorder, heads, number)
            runs.setdefault((variant, kind), []).append(phases)
            print(line(variant, kind, phases, speeds), flush=True)
    for (variant, kind), found in runs.items():
        figures |= run_figures(f"{variant}/{kind}", found, speeds)
    figures["compilations"] = figure(bench.engine.runner.compilations - bench.start_up.programs,
                                     "programs compiled after the start")  # fmt: skip
    return write_result(f"control_swap_{Path(args.model).name}", settings_of(args), figures,
                        args.out)  # fmt: skip


def settings_of(args: argparse.Namespace) -> dict:
    """The arguments, and what a reader must know of how they were used."""
    return vars(args) | {
        "heads": "good: the checkpoint's; bad: drawn at random",
        "oracle": "the strategy with the most tokens per second with the same head",
        "recovery": f"rounds after a swap until choices are within {TOLERANCE:.0%} of the oracle's "
        f"goodput, and stay there over the next {WINDOW} rounds and the rest of the phase; by the "
        "measured means of the strategies, not by the noise of single chunks",
        "calibration": "measured anew for each run, as if the engine were started again",
        "unannounced": "the controller is not told of new weights",
    }


def speeds_of(bench: Bench, heads: Mapping[str, Params]) -> dict[str, dict[str, list[Measured]]]:
    """Every strategy with every head, all in turns: a machine drifts from one head to the next."""
    args, llm = bench.args, bench.llm
    held = None

    def hold(head: str) -> None:
        nonlocal held
        if held != head:
            bench.engine.set_params(llm.params, heads[head])
            held = head

    def arm(head: str, recorder: Recorder) -> Arm:
        def run(repeat: int) -> Measured:
            hold(head)
            return measure(bench.engine, recorder, bench.jobs(repeat), args.batch, tokens)

        return run

    hold(next(iter(heads)))
    tokens = bench.budget(args.batch, args.seconds, args.tokens_per_slot)
    recorders = {name: Recorder(bench.static(name)) for name in bench.strategies}
    arms = {(head, name): arm(head, r) for head in heads for name, r in recorders.items()}
    found = in_turns(arms, args.repeats)
    return {head: {name: found[head, name] for name in recorders} for head in heads}


def one_run(
    bench: Bench, recorder: Recorder, heads: Mapping[str, Params], number: int
) -> list[Measured]:
    """Rounds with the good head, the bad one, and the good one again.

    The samples go on, their caches made anew by each head, as `Engine.set_params` does by itself:
    where the bad head has read a sample, the good one drafts badly to its end.
    """
    engine, args = bench.engine, bench.args
    engine.set_params(bench.llm.params, heads[PHASES[0]])
    stream = Stream(engine, recorder, bench.jobs(number), args.batch)
    stream.fill()
    phases = [stream.run(lambda _, rounds: rounds < args.rounds)]
    for head in PHASES[1:]:
        engine.set_params(bench.llm.params, heads[head])
        phases.append(stream.run(lambda _, rounds: rounds < args.rounds))
    stream.close()
    return phases


# --- figures ---------------------------------------------------------------------------------


def speed_figures(
    measured: Mapping[str, Mapping[str, Sequence[Measured]]], speeds: Mapping[str, Speeds]
) -> dict[str, dict]:
    """Every strategy with either head, and which is best."""
    figures = {}
    for head, by_name in speeds.items():
        for name, speed in by_name.items():
            rate, *interval = median_interval([m.rate for m in measured[head][name]])
            at = f"{head}_head/{name}"
            figures[f"tokens_per_sec/{at}"] = figure(rate, "tok/s", interval)
            figures[f"tokens_per_round/{at}"] = figure(speed.tokens, "tokens of all slots")
            figures[f"seconds_per_round/{at}"] = figure(speed.seconds, "s")
        best = max(by_name, key=lambda name, by=by_name: by[name].rate)
        figures[f"oracle/{head}_head"] = figure(best, "strategy with the most tokens per second")
    return figures


def run_figures(
    name: str, runs: Sequence[Sequence[Measured]], speeds: Mapping[str, Speeds]
) -> dict[str, dict]:
    """Of one controller: its choices in the first run, and recovery and regret of all runs.

    Args:
      name: of variant and controller. runs: each with its phases.
    """
    figures, totals = {}, [0.0] * len(runs)
    for at, (event, head) in enumerate(zip(EVENTS, PHASES, strict=True)):
        spans = [spans_of(phases[at].choices) for phases in runs]
        lost = [sum(regrets(s, speeds[head])) for s in spans]
        totals = [a + b for a, b in zip(totals, lost, strict=True)]
        key = f"{name}/{event}"
        found = [recovery(s, speeds[head]) for s in spans]
        figures[f"recovery_rounds/{key}"] = _recovered(found)
        middle, ends = statistics.median(lost), [min(lost), max(lost)]
        figures[f"regret_seconds/{key}"] = figure(middle, f"s, median of {len(runs)} runs", ends)
        best = best_rate(speeds[head])
        rates = [phases[at].rate / best for phases in runs]
        unit = "measured tok/s of the phase / oracle, with what learning cost"
        figures[f"measured_over_oracle/{key}"] = figure(
            statistics.median(rates), unit, [min(rates), max(rates)]
        )
        figures[f"choices/{key}"] = figure(to_text(spans[0]), "strategy*rounds, first run")
    ends = [min(totals), max(totals)]
    unit = f"s of the whole run, median of {len(runs)} runs"
    figures[f"regret_seconds/{name}"] = figure(statistics.median(totals), unit, ends)
    return figures


def _recovered(found: Sequence[int | None]) -> dict:
    """Rounds in the middle and at worst; null where a run did not recover."""
    ordered = sorted(math.inf if rounds is None else rounds for rounds in found)
    within = sum(rounds <= ROUNDS_WANTED for rounds in ordered)
    unit = f"rounds, median of {len(found)} runs; {within} within {ROUNDS_WANTED}"
    middle = ordered[len(ordered) // 2]
    ends = [None if math.isinf(x) else x for x in (ordered[0], ordered[-1])]
    return figure(None if math.isinf(middle) else middle, unit, ends)


def line(variant: str, kind: str, phases: Sequence[Measured], speeds: Mapping[str, Speeds]) -> str:
    """One run for people."""
    parts = [f"{variant:>11} {kind:>8}:"]
    for event, head, phase in zip(EVENTS, PHASES, phases, strict=True):
        spans = spans_of(phase.choices)
        rounds = recovery(spans, speeds[head])
        said = "never" if rounds is None else f"after {rounds}"
        parts.append(f"{event} {said}, regret {sum(regrets(spans, speeds[head])):.2f} s;")
    return " ".join(parts)
