"""`python -m bench.control replay TRACE --costs bench/costs`: a long-tailed rollout on other chips.

It predicts. `bench.rollout longtail` leaves a trace: the length of each sample, and for each static
strategy how many rounds of each sample emitted how many tokens. This module runs samples of these
lengths chunk by chunk as the engine does (rows that those who wait take over, results that the
host learns one chunk late, batches padded to powers of two) while a table of costs says how long
each round takes:

    plain        every round is a step of plain decoding
    off, ...     each strategy for ever
    goodput      the real controller, which sees simulated chunks and simulated seconds

How many drafts a round accepts is drawn depth by depth from what the trace recorded of the same
strategy in the same sample (`rates`); the figures compare the drawn accept lengths with those that
were recorded. Rounds cost more as samples grow where the table says by how much (`longer`). Left
out, for all alike: reading prompts, sampling, and the host. With --stretch every sample is that
much longer, as responses on such chips are, and with --prompt_tokens it begins with as many.

`measured` or `roofline` in a figure's unit is where its costs come from, see `bench.control costs`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.command import user_errors
from bench.control.predict import PartCosts, default_tables
from bench.record import figure, paired_ratio_interval, write_result
from bench.rollout.chains import GOODPUT, PLAIN, Trace
from specjax.command_line import ArgumentParser
from specjax.control import OFF, ControlConfig, Controller, CostTable, Observation, make_controller
from specjax.decode.chunk import TAKE_OVER_SHARE, Until
from specjax.drafts.mtp import WINDOW
from specjax.engine.chunks import until
from specjax.engine.runner import EXTRA_SLOTS
from specjax.engine.settings import powers, stretched
from specjax.engine.start_up import (
    LONG_SHARE,
    calibration_contexts,
    calibration_rounds,
    lengthened,
)

_OWN_ROUNDS = 8.0  # rounds of a sample's own evidence that count as much as all samples'


def draft_steps(strategy: str) -> int:
    """Steps of a chain; 0 is plain decoding.

    Raises:
      ValueError: it is a tree, and cost tables have costs of chains only.
    """
    if strategy == OFF:
        return 0
    match = re.fullmatch(r"(\d+)_1_(\d+)", strategy)
    if match is None:
        raise ValueError(
            f"the trace has strategy {strategy!r}, and cost tables have costs of chains only; "
            "record with --strategies such as off 4_1_5"
        )
    return int(match[1])


def rates(histograms: np.ndarray, steps: int) -> np.ndarray:
    """[samples, steps] how often the draft of each depth was accepted, given that its parent was.

    Args:
      histograms: [samples, n] rounds by tokens emitted. A sample with few rounds is thought to be
        like all the others together.
    """
    reached = np.cumsum(histograms[:, ::-1], axis=1)[:, ::-1]  # [i, k]: rounds of k tokens or more
    drafted, accepts = reached[:, 1 : steps + 1], reached[:, 2 : steps + 2]
    everyone = accepts.sum(axis=0) / np.maximum(drafted.sum(axis=0), 1)
    return (accepts + _OWN_ROUNDS * everyone) / (drafted + _OWN_ROUNDS)


@dataclasses.dataclass
class Simulated:
    """What one arm came to.

    Attributes:
      seconds: until the last sample ended. tokens: emitted. slot_rounds: (slot, round) pairs.
      choices: seconds by strategy.
    """

    seconds: float = 0.0
    tokens: int = 0
    slot_rounds: int = 0
    choices: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def accept_length(self) -> float:
        return self.tokens / self.slot_rounds


class Replay:
    """Rollouts of one trace on one chip.

    Args:
      slots: that run at once; at most the table's largest batch.
      stretch: factor on all lengths.
      prompt: tokens in the cache of each sample when it begins.

    Attributes:
      costs: seconds per round by strategy and bucket, as a calibration would measure them.
    """

    def __init__(
        self, trace: Trace, table: PartCosts, slots: int, stretch: float = 1.0, prompt: int = 0
    ):
        self.strategies = list(trace.settings["strategies"])
        self.steps = {name: draft_steps(name) for name in self.strategies}
        self.chunk_tokens = int(trace.settings["chunk_tokens"])
        self.chunk_stretch = int(trace.settings.get("stretch", 1))
        if not 1 <= slots <= table.largest_batch:
            raise ValueError(
                f"expected 1 to {table.largest_batch} slots, which is what cost table "
                f"{table.name!r} covers, got {slots}; lower --slots"
            )
        self.slots = slots
        self.lengths = [max(1, round(n * stretch)) for n in trace.lengths]
        self.rates = {
            name: rates(trace.histograms[name], steps)
            for name, steps in self.steps.items()
            if steps
        }
        self.buckets = powers(slots, 2)
        self.prompt, self._contexts = prompt, None
        if table.rises is not None:  # the costs at any two contexts give a line
            self._contexts = table.context, 2 * table.context
        self.costs = CostTable(
            self.buckets,
            self._seconds(table, 0),
            contexts=self._contexts,
            long=self._contexts and self._seconds(table, 1),
        )

    def _seconds(self, table: PartCosts, which: int) -> dict[str, list[float]]:
        """Seconds per round by strategy and bucket, at the shorter or the longer context."""

        def seconds(steps: int, batch: int) -> float:
            context = self._contexts and batch * self._contexts[which]
            if steps:
                return table.spec_round(batch, steps, context)
            return table.plain_step(batch, context)

        return {
            name: [seconds(steps, batch) for batch in self.buckets]
            for name, steps in self.steps.items()
        }

    def rounds(self, strategy: str, rows: int) -> int:
        """Of one chunk at most, as the engine has it."""
        steps = self.steps[strategy]
        window = 0 if steps else WINDOW
        tokens = stretched(self.chunk_tokens, self.chunk_stretch, rows, window)
        return max(1, tokens // (steps + 1))

    @property
    def calibration_seconds(self) -> float:
        """What the engine's calibration takes on this chip, where samples have room for it."""
        short, long = calibration_contexts(self.prompt + max(self.lengths))

        def measuring(name: str, bucket: int, length: int) -> float:
            seconds = self.costs.seconds(name, bucket, context=bucket * length)
            return calibration_rounds(seconds, self.rounds(name, bucket)) * seconds

        every = itertools.product(self.strategies, self.buckets)
        total = sum(measuring(name, bucket, short) for name, bucket in every)
        if self._contexts is None or long is None:
            return total
        limit = (1 + LONG_SHARE) * total
        of_bucket = dict.fromkeys(self.buckets, self.strategies)
        for name, bucket in lengthened(self.strategies, of_bucket):
            if total < limit:
                total += measuring(name, bucket, long)
        return total

    def controller(self, arm: str) -> Controller:
        if arm != GOODPUT:
            return make_controller("static", (OFF if arm == PLAIN else arm,))
        config = ControlConfig(strategies=tuple(self.strategies))
        return make_controller(config, costs=self.costs)

    def run(self, controller: Controller, seed: int = 0) -> Simulated:
        """One rollout under a controller."""
        rng, result = np.random.default_rng(seed), Simulated()
        left = np.array(self.lengths)
        queue, slots = deque(range(len(left))), []
        most = self.slots + EXTRA_SLOTS
        unread: Observation | None = None
        gone: set[int] = set()  # ended in the chunk whose results the host does not have yet
        while True:
            while queue and len(slots) < most:
                slots.append(queue.popleft())
            if not (left[slots] > 0).any() and not queue:
                return result
            seen, early = self._chunk(controller, slots, bool(queue), left, rng, result)
            # The chunk before arrives while this one runs.
            if unread is not None:
                controller.observe(unread)
            slots = [i for i in slots if i not in gone]
            unread, gone = seen, {i for i in slots if left[i] == 0}
            if early and not queue:  # the host waits for it before it enqueues another
                controller.observe(seen)
                slots = [i for i in slots if i not in gone]
                unread, gone = None, set()

    def _chunk(self, controller, slots, waiting, left, rng, result: Simulated):
        """Runs the chunk that the host would enqueue, and takes its tokens from `left`.

        Returns:
          what the controller will see of it, and whether it ended early while others still ran.
        """
        rows = slots[: self.slots]
        lengths = self.prompt + np.array(self.lengths) - left  # tokens in the caches
        strategy = controller.select(len(rows), float(lengths[rows].sum()))
        steps = self.steps.get(strategy, 0)
        most = self.rounds(strategy, len(rows))
        most = min(most, controller.rounds_hint or most)
        bucket = next(b for b in self.buckets if b >= len(rows))
        smaller = max((b for b in self.buckets if b < bucket), default=0)
        ends = until(most, len(rows), len(slots) - len(rows), waiting, smaller)
        if controller.rounds_hint is not None:
            ends = Until.of(most)
        here, report, before = np.array(slots), [], result.tokens
        began, has_row = left[here] > 0, np.arange(len(here)) < len(rows)
        few, seconds, contexts = max(1, bucket // TAKE_OVER_SHARE), 0.0, []
        has_row = _take_over(left[here] > 0, has_row, 1)
        while len(report) < most:
            has_row = _take_over(left[here] > 0, has_row, few)
            runs = has_row & (left[here] > 0)
            alone = not (~has_row & (left[here] > 0)).any()
            ended = (began & (left[here] == 0)).sum()
            if ended >= ends.ended or (alone and runs.sum() <= ends.leave_at):
                break
            accepted = np.zeros(len(here), int)
            if steps:
                lucky = rng.random((len(here), steps)) < self.rates[strategy][here]
                accepted = np.cumprod(lucky, axis=1).sum(axis=1)
            emitted = np.where(runs, np.minimum(accepted + 1, left[here]), 0)
            contexts.append(float((self.prompt + np.array(self.lengths) - left)[here[runs]].sum()))
            seconds += self.costs.seconds(strategy, len(rows), context=contexts[-1])
            left[here] -= emitted
            result.tokens += int(emitted.sum())
            result.slot_rounds += int(runs.sum())
            report.append(np.where(runs, accepted, -1))
        result.seconds += seconds
        result.choices[strategy] = result.choices.get(strategy, 0.0) + seconds
        rounds = np.array(report, int).reshape(len(report), len(here))
        early = len(report) < most and bool((left[here] > 0).any())
        seen = Observation(
            len(rows),
            strategy,
            rounds,
            seconds,
            tokens=result.tokens - before,
            ended=int((began & (left[here] == 0)).sum()),
            context=float(np.mean(contexts)) if contexts else None,
        )
        return seen, early


def _take_over(alive: np.ndarray, has_row: np.ndarray, few: int) -> np.ndarray:
    """Who has a row once so `few` of those that have one have ended; see `run_chunk`."""
    ended, waits = np.flatnonzero(has_row & ~alive), np.flatnonzero(alive & ~has_row)
    count = min(len(ended), len(waits))
    if len(ended) < few or not count:
        return has_row
    changed = has_row.copy()
    changed[ended[:count]], changed[waits[:count]] = False, True
    return changed


@dataclasses.dataclass(frozen=True)
class Predicted:
    """All arms of one trace on one chip.

    Attributes:
      recorded: accept lengths of the static strategies. seconds: by arm, one entry per replay.
      last: the last replay of each arm.
    """

    table: PartCosts
    replay: Replay
    recorded: Mapping[str, float]
    seconds: Mapping[str, list[float]]
    last: Mapping[str, Simulated]

    @property
    def label(self) -> str:
        """Where the costs come from."""
        return "measured" if self.table.kind == "measured" else "roofline"

    @property
    def best_static(self) -> str:
        return min(self.replay.strategies, key=lambda name: np.median(self.seconds[name]))


def predict(
    trace: Trace,
    table: PartCosts,
    slots: int | None,
    stretch: float,
    repeats: int,
    seed: int,
    prompt: int = 0,
) -> Predicted:
    """Replays every arm `repeats` times, each time with other luck."""
    most = min(len(trace.lengths), table.largest_batch)
    replay = Replay(trace, table, slots or most, stretch, prompt)
    arms = (PLAIN, *replay.strategies, GOODPUT)
    if OFF not in replay.steps:
        raise ValueError("the trace has no strategy 'off', which plain decoding's costs are under")
    runs = {
        arm: [replay.run(replay.controller(arm), seed + i) for i in range(repeats)] for arm in arms
    }
    recorded = {}
    for name, steps in replay.steps.items():
        counts = np.asarray(trace.histograms[name]).sum(axis=0)
        recorded[name] = float(counts @ np.arange(len(counts)) / counts.sum()) if steps else 1.0
    seconds = {arm: [run.seconds for run in found] for arm, found in runs.items()}
    return Predicted(table, replay, recorded, seconds, {a: found[-1] for a, found in runs.items()})


def figures_of(found: Predicted) -> dict[str, dict]:
    """Figures for a result file; every name starts with `predicted`."""
    at, label, best = found.table.name, found.label, found.best_static
    result = {f"predicted_best_static/{at}": figure(best, f"strategy, costs {label}")}
    whole = found.replay.calibration_seconds
    for suffix, charge, how in (
        ("", whole, "its calibration charged to the rollout"),
        ("_calibration_apart", 0.0, "its calibration left out"),
    ):
        mine = [value + charge for value in found.seconds[GOODPUT]]
        for name, other in ((PLAIN, PLAIN), ("best_static", best)):
            value, low, high = paired_ratio_interval(mine, found.seconds[other])
            unit = f"wall time, goodput / {other}, predicted, costs {label}, {how}"
            key = f"predicted_wall_ratio{suffix}/{at}/goodput/{name}"
            result[key] = figure(value, unit, [low, high])
    for arm, values in found.seconds.items():
        unit = f"s of decoding, costs {label}"
        ends = [min(values), max(values)]
        result[f"predicted_seconds/{at}/{arm}"] = figure(float(np.median(values)), unit, ends)
    for name, recorded in found.recorded.items():
        unit = f"tokens per round in the replay; {recorded:.3f} were recorded"
        key = f"predicted_accept_length/{at}/{name}"
        result[key] = figure(found.last[name].accept_length, unit)
    choices, total = found.last[GOODPUT].choices, found.last[GOODPUT].seconds
    for name, seconds in choices.items():
        unit = f"share of goodput's seconds, costs {label}"
        result[f"predicted_choice/{at}/{name}"] = figure(seconds / total, unit)
    unit = f"s, as the engine would calibrate {found.replay.slots} slots, costs {label}"
    result[f"predicted_calibration_seconds/{at}"] = figure(whole, unit)
    result[f"predicted_slots/{at}"] = figure(found.replay.slots, "samples that run at once")
    return result


def report(found: Predicted) -> str:
    """One line for people."""
    figures, at = figures_of(found), found.table.name

    def ratio(suffix: str, name: str) -> float:
        return figures[f"predicted_wall_ratio{suffix}/{at}/goodput/{name}"]["value"]

    return (
        f"{at} ({found.label}), {found.replay.slots} slots: goodput / plain "
        f"{ratio('_calibration_apart', PLAIN):.3f} ({ratio('', PLAIN):.3f} with calibration), "
        f"goodput / {found.best_static} {ratio('_calibration_apart', 'best_static'):.3f}; plain "
        f"{np.median(found.seconds[PLAIN]):.2f} s (predicted)"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        prog="python -m bench.control replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("trace", help="of bench.rollout longtail: the trace, or the result file beside it")
    add("--costs", nargs="+", help="cost tables, or directories of them; default: bench/costs")
    add("--slots", type=int, help="samples at once; default: all, up to the table's largest batch")
    add("--stretch", type=float, default=1.0, help="factor on the lengths of all samples")
    add("--prompt_tokens", type=int, default=0, help="tokens of every prompt in the caches")
    add("--repeats", type=int, default=7, help="replays with different luck")
    add("--seed", type=int, default=0)
    add("--out", help="default: bench/results/replay_<model>.json")
    args = parser.parse_args(argv)
    if args.stretch <= 0 or args.repeats < 1 or args.prompt_tokens < 0:
        parser.error(
            "expected --stretch above 0, --repeats of at least 1 and --prompt_tokens of at least 0"
        )
    return args


def tables_of(paths: Sequence[str] | None) -> list[PartCosts]:
    """The tables of files and directories."""
    if not paths:
        return [PartCosts.load(path) for path in sorted(default_tables())]
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"no cost tables in {', '.join(paths)}; see bench.control costs")
    return [PartCosts.load(path) for path in files]


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    figures: dict[str, dict] = {}
    with user_errors("control replay"):
        trace = Trace.read(args.trace)
        for table in tables_of(args.costs):
            slots = args.slots and min(args.slots, table.largest_batch)
            found = predict(
                trace, table, slots, args.stretch, args.repeats, args.seed, args.prompt_tokens
            )
            figures |= figures_of(found)
            print(report(found), flush=True)
    name = f"replay_{Path(trace.settings['model']).name}"
    settings = {**vars(args), "longtail": dict(trace.settings)}
    print(write_result(name, settings, figures, args.out))


if __name__ == "__main__":
    main()
