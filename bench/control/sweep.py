"""`python -m bench.control sweep`: every strategy and every controller at each size of the batch.

It measures tokens per second of every compiled strategy, `off` among them, and of every controller;
then, with a head that was drawn at random, goodput control against an engine that cannot speculate.
The oracle is the strategy that is best at that batch size. Measurements are short and many: a
machine that others use changes its speed for seconds at a time, and what is compared has to lie
close together. All arms run on one engine and differ in what is chosen alone. Samples end where
the policy ends them, and others take their slots: the number that run stays near the batch size.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.command import add_timing_arguments, user_errors
from bench.control import pictures
from bench.control.choices import LEAST
from bench.control.stream import (
    ADAPTIVE,
    Arm,
    Bench,
    Measured,
    Recorder,
    check_counts,
    in_turns,
    measure,
    share_of_rounds,
    stream_parser,
)
from bench.record import figure, median_interval, paired_ratio_interval, write_result
from specjax.control import OFF
from specjax.engine.engine import Engine

BATCHES = (1, 2, 4, 8, 16, 32, 64)
REPEATS = 28
Rates = Mapping[str, Sequence[float]]  # tokens per second of each repeat, by arm


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = stream_parser("sweep", __doc__, "control_<model>")
    add_timing_arguments(parser, BATCHES)
    parser.set_defaults(repeats=REPEATS)
    parser.add_argument("--no_useless_head", action="store_true", help="leave the random head out")
    args = parser.parse_args(argv)
    check_counts(parser, args)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    with user_errors("control"):
        path = sweep(args)
        print(path)
        print(pictures.draw(path))


def sweep(args: argparse.Namespace) -> Path:
    """Measures every batch size, then again with a useless head, and writes the result file."""
    bench = Bench(args, max(args.batches))
    budgets = {b: bench.budget(b, args.seconds, args.tokens_per_slot) for b in args.batches}
    figures = start_up_figures(bench)
    found = with_the_head(bench, budgets, figures)
    figures |= calibration_figures(found, budgets, args.repeats, bench.start_up.calibration_seconds)
    figures |= summary(figures, "over_best", "goodput")
    if not args.no_useless_head:
        figures |= useless_head(bench, budgets)
        figures |= summary(figures, "useless_head", "goodput_over_plain")
    figures["compilations"] = figure(bench.engine.runner.compilations - bench.start_up.programs,
                                     "programs compiled after the start")  # fmt: skip
    return write_result(f"control_{Path(args.model).name}", settings_of(args), figures, args.out)


def settings_of(args: argparse.Namespace) -> dict:
    """The arguments, and what a reader must know of how they were used."""
    return vars(args) | {
        "controllers": "one of each for the whole sweep, from small batches to large: what it "
        "learned it keeps, and each batch size begins with a run of it that does not count",
        "clock": "starts when the slots are full; reading the prompts of later samples is in it, "
        "compiling and calibrating are not",
        "oracle": "the strategy with the best median at this batch size",
    }


def with_the_head(bench: Bench, budgets: Mapping[int, int], figures: dict) -> dict[int, Rates]:
    """All arms at all batch sizes; adds their figures and returns their rates."""
    arms = {f"strategy/{name}": Recorder(bench.static(name)) for name in bench.strategies}
    arms |= {f"controller/{kind}": Recorder(bench.controller(kind)) for kind in ADAPTIVE}
    found = {}
    for slots, tokens in budgets.items():
        runs = {name: _arm(bench, arm, slots, tokens, bench.engine) for name, arm in arms.items()}
        for kind in ADAPTIVE:
            runs[f"controller/{kind}"](bench.args.repeats)  # on samples that are not measured
        measured = in_turns(runs, bench.args.repeats)
        found[slots] = {name: [m.rate for m in values] for name, values in measured.items()}
        here = rate_figures(slots, found[slots]) | choice_figures(slots, measured)
        figures |= here
        print(line(slots, here), flush=True)
    return found


def _arm(bench: Bench, recorder: Recorder, slots: int, tokens: int, engine: Engine) -> Arm:
    """An arm to run."""
    return lambda repeat: measure(engine, recorder, bench.jobs(repeat), slots, tokens)


def useless_head(bench: Bench, budgets: Mapping[int, int]) -> dict[str, dict]:
    """Goodput control over a random head against an engine that cannot speculate.

    `off` in the engine that can is measured beside them: what it loses is not the controller's.
    """
    plain = bench.plain()
    bench.engine.set_params(bench.llm.params, bench.random_head())
    arms = {
        "goodput": (Recorder(bench.controller("goodput")), bench.engine),
        "plain": (Recorder(bench.static(OFF)), plain),
        "off": (Recorder(bench.static(OFF)), bench.engine),
    }
    figures = {}
    for slots, tokens in budgets.items():
        runs = {name: _arm(bench, arm, slots, tokens, at) for name, (arm, at) in arms.items()}
        for run in runs.values():
            run(bench.args.repeats)
        measured = in_turns(runs, bench.args.repeats)
        here = useless_figures(slots, measured)
        figures |= here
        print(useless_line(slots, here), flush=True)
    return figures


# --- arithmetic ------------------------------------------------------------------------------


def oracle_of(rates: Rates) -> str:
    """The arm of the strategy with the best median."""
    strategies = [name for name in rates if name.startswith("strategy/")]
    return max(strategies, key=lambda name: statistics.median(rates[name]))


def rate_figures(slots: int, rates: Rates) -> dict[str, dict]:
    """Rates of all arms at one batch size, and what controllers reach of the best and of `off`."""
    best = oracle_of(rates)
    figures = {f"tokens_per_sec/batch_{slots}/{n}": _rate(values) for n, values in rates.items()}
    figures[f"oracle/batch_{slots}"] = _rate(rates[best], f"tok/s of {_last(best)}")
    for name in rates:
        if not name.startswith("controller/"):
            continue
        for over, other in (("best", best), ("off", f"strategy/{OFF}")):
            value, *interval = paired_ratio_interval(rates[name], rates[other])
            unit = f"tok/s / that of {_last(other)}, median over turns"
            figures[f"over_{over}/batch_{slots}/{_last(name)}"] = figure(value, unit, interval)
    return figures


def choice_figures(slots: int, measured: Mapping[str, Sequence[Measured]]) -> dict[str, dict]:
    """What controllers chose, how full the batch was, and how often seconds were known."""
    figures = {}
    for name, values in measured.items():
        kind = _last(name)
        if name.startswith("controller/"):
            text = _percent(share_of_rounds(values))
            figures[f"choices/batch_{slots}/{kind}"] = figure(text, "share of rounds")
    off = measured[f"strategy/{OFF}"]
    running = statistics.mean(m.running for m in off)
    figures[f"running/batch_{slots}"] = figure(running, "slots that ran, mean over off's rounds")
    known = statistics.mean(m.known for m in off)
    unit = "share of off's chunks of which a controller is told the seconds"
    figures[f"known_seconds/batch_{slots}"] = figure(known, unit)
    tokens = statistics.mean(m.tokens for m in off)
    figures[f"tokens/batch_{slots}"] = figure(tokens, "tokens per measurement")
    return figures


def useless_figures(slots: int, measured: Mapping[str, Sequence[Measured]]) -> dict[str, dict]:
    """What is left of plain decoding under a head that is never right."""
    at = f"useless_head/batch_{slots}"
    rates = {name: [m.rate for m in values] for name, values in measured.items()}
    figures = {f"{at}/{name}": _rate(values) for name, values in rates.items()}
    for name in ("goodput", "off"):
        value, *interval = paired_ratio_interval(rates[name], rates["plain"])
        unit = "tok/s / that of an engine that cannot speculate, median over turns"
        figures[f"{at}/{name}_over_plain"] = figure(value, unit, interval)
    shares = _percent(share_of_rounds(measured["goodput"]))
    return figures | {f"{at}/choices": figure(shares, "share of rounds")}


def calibration_figures(
    found: Mapping[int, Rates], budgets: Mapping[int, int], repeats: int, seconds: float
) -> dict[str, dict]:
    """The oracle's seconds for the whole sweep over those of goodput with its calibration.

    An engine calibrates once, when it starts: what that costs of a run depends on the run's length.

    Args:
      found: rates by batch size. budgets: tokens of a measurement. seconds: of calibration.
    """
    work = {slots: repeats * tokens for slots, tokens in budgets.items()}

    def total(arm) -> float:
        return sum(w / statistics.median(found[b][arm(found[b])]) for b, w in work.items())

    best, goodput = total(oracle_of), total(lambda _: "controller/goodput")
    unit = f"oracle / goodput, seconds of the sweep ({goodput:.0f} s of decoding)"
    return {
        "whole_sweep/goodput_over_best": figure(best / goodput, unit),
        "whole_sweep/goodput_over_best/calibration_charged": figure(
            best / (goodput + seconds), f"{unit}, {seconds:.1f} s of calibration charged"
        ),
        "calibration_below_1_percent_after": figure(99 * seconds, "seconds of decoding"),
    }


def start_up_figures(bench: Bench) -> dict[str, dict]:
    """What compiling and calibrating took."""
    took = bench.start_up
    return {
        "programs": figure(took.programs, "programs compiled at the start"),
        "compile_seconds": figure(took.seconds, "s"),
        "calibration_seconds": figure(took.calibration_seconds, "s"),
    }


def summary(figures: Mapping[str, Mapping], kind: str, name: str) -> dict[str, dict]:
    """The lowest ratio of all batch sizes, and whether any lies below `LEAST` for sure."""
    ratios = {
        key: entry
        for key, entry in figures.items()
        if key.startswith(f"{kind}/batch_") and key.endswith(f"/{name}")
    }
    lowest = min(ratios, key=lambda key: ratios[key]["value"])
    fine = sum(entry["interval"][1] >= LEAST for entry in ratios.values())
    where = lowest.split("/")[1].replace("_", " ")
    return {
        f"{kind}/lowest/{name}": figure(
            ratios[lowest]["value"], f"at {where}", ratios[lowest]["interval"]
        ),
        f"{kind}/within_interval/{name}": figure(
            f"{fine} of {len(ratios)}", f"batch sizes whose interval reaches {LEAST}"
        ),
    }


def _rate(values: Sequence[float], unit: str = "tok/s") -> dict:
    value, *interval = median_interval(values)
    return figure(value, unit, interval)


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _percent(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items())


def _between(interval: Sequence[float]) -> str:
    return f"[{interval[0]:.3f}, {interval[1]:.3f}]"


def useless_line(slots: int, figures: Mapping[str, Mapping]) -> str:
    """One batch size with the useless head, for people."""
    at, parts = f"useless_head/batch_{slots}", [f"batch {slots:>3}: useless head:"]
    for name in ("goodput", "off"):
        ratio = figures[f"{at}/{name}_over_plain"]
        parts.append(f"{name} / plain {ratio['value']:.3f} {_between(ratio['interval'])}")
    return "  ".join([*parts, f"[{figures[f'{at}/choices']['value']}]"])


def line(slots: int, figures: Mapping[str, Mapping]) -> str:
    """One batch size for people."""
    best = figures[f"oracle/batch_{slots}"]
    parts = [f"batch {slots:>3}: best {best['unit'].rpartition(' ')[2]} {best['value']:.0f} tok/s"]
    for kind in ADAPTIVE:
        ratio = figures[f"over_best/batch_{slots}/{kind}"]
        parts.append(f"{kind} {ratio['value']:.3f} {_between(ratio['interval'])}")
    parts.append(f"goodput / off {figures[f'over_off/batch_{slots}/goodput']['value']:.3f}")
    parts.append(f"[{figures[f'choices/batch_{slots}/goodput']['value']}]")
    return "  ".join(parts)
