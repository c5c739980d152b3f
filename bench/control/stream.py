"""A stream of samples on one engine, and a recorder of the choices that a controller makes.

All arms run on one engine and share what was compiled: an arm is a controller that is put in place,
and one that always says the same is a static strategy.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from bench.command import add_prompt_arguments, bench_parser, heldout_prompts
from bench.record import T, turns
from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.control import (
    OFF,
    ControlConfig,
    Controller,
    EmaConfig,
    Observation,
    Static,
    make_controller,
)
from specjax.control.base import parse_arms
from specjax.control.config import DEFAULT_STRATEGIES
from specjax.decode.options import Features
from specjax.drafts.mtp import init_head_params
from specjax.engine.engine import Engine
from specjax.engine.request import Job, make_jobs
from specjax.engine.start_up import StartUp, calibrate
from specjax.models.transformer import Params
from specjax.tokenizer import load_tokenizer

ADAPTIVE = ("goodput", "bandit", "ema")


@dataclasses.dataclass(frozen=True)
class Choice:
    """One chunk.

    Attributes:
      running: slots that it was chosen for. rounds: that it had.
      slot_rounds: (slot, round) pairs in which a slot ran. accepted: drafts in all of them.
      seconds: as the controller was told; not finite where the engine did not know them.
    """

    strategy: str
    running: int
    rounds: int
    slot_rounds: int
    accepted: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """What an arm did in a while: tokens after stops and limits, wall seconds, and its chunks."""

    tokens: int
    seconds: float
    choices: tuple[Choice, ...]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def rounds(self) -> int:
        return sum(c.rounds for c in self.choices)

    @property
    def running(self) -> float:
        """Slots that ran, on average over the rounds."""
        return sum(c.slot_rounds for c in self.choices) / max(self.rounds, 1)

    @property
    def known(self) -> float:
        """Share of chunks of which the controller was told the seconds."""
        return sum(math.isfinite(c.seconds) for c in self.choices) / max(len(self.choices), 1)


class Recorder:
    """A controller for the engine to ask; passes everything on and keeps what it saw.

    Args:
      inner: who chooses.
      announce: whether new weights are announced to it.

    Attributes:
      choices: every chunk that `inner` chose, as it came back.
      idle: the next chunks are plain, one round long and not counted: they fill the slots before a
        measurement and end it, and `inner` does not hear of them.
    """

    def __init__(self, inner: Controller, announce: bool = True):
        self.inner, self.announce = inner, announce
        self.choices: list[Choice] = []
        self.idle = False
        self.rounds_hint: int | None = None
        self._idle_chunks: deque[bool] = deque()

    def select(self, batch_size: int, context: float | None = None) -> str:
        self._idle_chunks.append(self.idle)
        if self.idle:
            self.rounds_hint = 1
            return OFF
        name = self.inner.select(batch_size, context)
        self.rounds_hint = self.inner.rounds_hint
        return name

    def observe(self, seen: Observation) -> None:
        if self._idle_chunks.popleft():
            return
        ran = seen.accepted >= 0
        self.choices.append(
            Choice(
                strategy=seen.strategy,
                running=seen.batch_size,
                rounds=seen.rounds,
                slot_rounds=int(ran.sum()),
                accepted=int(seen.accepted[ran].sum()),
                seconds=float(seen.seconds),
            )
        )
        self.inner.observe(seen)

    def weights_changed(self) -> None:
        if self.announce:
            self.inner.weights_changed()

    @property
    def under_way(self) -> int:
        """Chunks that were selected and have not come back."""
        return len(self._idle_chunks)

    def clear(self) -> None:
        """Forgets the choices; `inner` forgets nothing."""
        self.choices = []
        self._idle_chunks.clear()


class Stream:
    """Samples without end, so many at a time: who finishes is replaced.

    Args:
      recorder: the arm; it becomes the engine's controller.
      jobs: the samples, by prompt. slots: that run at once.
    """

    def __init__(self, engine: Engine, recorder: Recorder, jobs: Iterator[list[Job]], slots: int):
        self.engine, self.recorder, self._jobs, self._slots = engine, recorder, jobs, slots
        engine.clear(slots)
        recorder.clear()
        engine.controller = recorder
        self._open = set()
        self._finished = 0

    def step(self) -> None:
        """One step of the engine; a sample always waits, as in a rollout before its tail."""
        while self.engine.outstanding < 2 * self._slots + 1:
            self._open.update(self.engine.add(job) for job in next(self._jobs))
        for event in self.engine.step():
            self._open.remove(event.sequence)
            self._finished += len(event.sample.token_ids)

    @property
    def tokens(self) -> int:
        """Emitted so far, by samples that ended and by those that run."""
        return self._finished + sum(len(sequence.tokens) for sequence in self._open)

    def fill(self) -> None:
        """Enqueues the start of as many samples as there are slots."""
        self.recorder.idle = True
        self.step()

    def run(self, goes_on: Callable[[int, int], bool]) -> Measured:
        """Lets the recorder's controller choose for a while, give or take a chunk.

        The clock starts when nothing is under way but its first chunk, and stops when its last one
        has come back.

        Args:
          goes_on: of the tokens and rounds so far, the latest chunk counted twice: it stands for
            the one that is under way.
        """
        recorder = self.recorder
        recorder.idle, begun, started = False, len(recorder.choices), time.perf_counter()
        filling = recorder.under_way
        self.step()
        if filling:  # what filled the slots has come back only now
            started = time.perf_counter()
        before = tokens = self.tokens
        rounds = late_tokens = late_rounds = 0
        while goes_on(tokens - before + late_tokens, rounds + late_rounds):
            self.step()
            seen = sum(choice.rounds for choice in recorder.choices[begun:])
            late_tokens, tokens = self.tokens - tokens, self.tokens
            late_rounds, rounds = seen - rounds, seen
        recorder.idle = True
        if recorder.under_way:
            self.step()
        seconds = time.perf_counter() - started
        return Measured(self.tokens - before, seconds, tuple(recorder.choices[begun:]))

    def close(self) -> None:
        """Waits for what is under way and takes everything out of the engine."""
        self.engine.suspend()
        while self.engine.has_work:
            self.engine.step()
        self.engine.clear()


def measure(
    engine: Engine, recorder: Recorder, jobs: Iterator[list[Job]], slots: int, tokens: int
) -> Measured:
    """Runs an arm for about so many tokens, `slots` samples at a time.

    The slots are filled before the clock starts.
    """
    stream = Stream(engine, recorder, jobs, slots)
    stream.fill()
    measured = stream.run(lambda emitted, _: emitted < tokens)
    stream.close()
    return measured


class Bench:
    """One policy with everything that its arms share.

    Attributes:
      llm: with all strategies compiled for all sizes of the batch. start_up: what that took.
      costs: as calibrated, before any controller learned.
      strategies: names of what was compiled, `off` first.
    """

    def __init__(self, args: argparse.Namespace, most: int):
        self.args = args
        cfg, weights, head = hf.load_checkpoint(args.model, args.dtype)
        cfg = cfg.running(compute_dtype=args.dtype)
        self._model = cfg, weights
        self._tokenizer = load_tokenizer(args.model)
        self.most = most
        self.max_len = min(args.max_prompt_tokens + args.max_tokens, cfg.max_position)
        self.drafts = parse_arms([OFF, *args.strategies])
        self.strategies = tuple(self.drafts)
        if len(self.strategies) < 2:
            raise ValueError("--strategies must list at least one that drafts, such as 4_1_5")
        self.params = SamplingParams(
            temperature=args.temperature, max_tokens=args.max_tokens, n=args.samples_per_prompt
        )
        self._prompts = heldout_prompts(
            self._tokenizer, args.task, args.data, args.prompts, args.max_prompt_tokens, args.seed
        )
        self.llm = LLM(
            (cfg, weights, head),
            SpecConfig(self.drafts[self.strategies[1]]),
            most,
            self.max_len,
            control=ControlConfig(strategies=self.strategies),
        )
        self.start_up: StartUp = self.llm.warm_up((self.params,))
        print(self.start_up, flush=True)
        self.costs = self.llm.engine.controller.costs

    @property
    def engine(self) -> Engine:
        return self.llm.engine

    def jobs(self, seed: int = 0) -> Iterator[list[Job]]:
        """Samples of one prompt after the other, for ever; others, and of other prompts first, for
        every seed."""
        eos, count = self.llm.cfg.eos_token_ids, len(self._prompts)
        for lap in itertools.count(self.args.seed + 1000 * seed):
            params = dataclasses.replace(self.params, seed=lap)
            for at in range(count):
                index = (at + seed * count // 8) % count
                yield make_jobs(self._prompts[index], params, eos, request=index)

    def controller(self, kind: str) -> Controller:
        """A new one that has seen nothing but, if it wants it, the calibration.

        `ema` has the compiled chains as its tiers, `static` is the strategy of `--static`.
        """
        settings = {"strategies": self.strategies}
        if kind == "static":
            settings["initial"] = self.args.static
        if kind == "ema":
            steps = tuple(d.steps for d in self.drafts.values() if d.is_chain)
            settings["ema"] = EmaConfig(steps)
        return make_controller(
            ControlConfig(kind, **settings), [*self.drafts.values()], costs=self.costs
        )

    def recalibrate(self) -> None:
        """Measures `costs` again, as another start of the engine would."""
        self.engine.clear()
        self.costs, _ = calibrate(self.engine.programs(), Features())
        self.engine.runner.reset()

    def static(self, strategy: str) -> Controller:
        return Static(self.drafts[strategy])

    def plain(self) -> Engine:
        """An engine that cannot speculate, with its programs compiled."""
        cfg, weights = self._model
        llm = LLM((cfg, weights, None), None, self.most, self.max_len)
        llm.warm_up((self.params,))
        return llm.engine

    def random_head(self) -> Params:
        """A head that has learned nothing."""
        return init_head_params(self.llm.cfg, self.args.seed)

    def budget(self, slots: int, seconds: float, per_slot: int) -> int:
        """Tokens that plain decoding takes about so many seconds for, and `per_slot` at least."""
        least = per_slot * slots
        recorder = Recorder(self.static(OFF))
        pilot = measure(self.engine, recorder, self.jobs(), slots, least)
        return max(least, round(seconds * pilot.rate))


Arm = Callable[[int], Measured]  # one measurement, given the number of the turn


def in_turns(arms: Mapping[T, Arm], repeats: int) -> dict[T, list[Measured]]:
    """Every arm so often, each time on samples that are the same for all and new to all; they take
    turns, in reversed order every other time."""
    found: dict[T, list[Measured]] = {name: [] for name in arms}
    for repeat, name in turns(arms, repeats):
        found[name].append(arms[name](repeat))
    return found


def stream_parser(name: str, doc: str, out: str) -> argparse.ArgumentParser:
    """Returns the parser of `python -m bench.control <name>`: what runs, and how it is sampled."""
    parser = bench_parser(f"control {name}", doc, out)
    add_prompt_arguments(parser)
    add = parser.add_argument
    strategies = [name for name in DEFAULT_STRATEGIES if name != OFF]
    add("--strategies", nargs="+", default=strategies, help="that are compiled beside off")
    add("--max_tokens", type=int, default=160, help="response tokens at most")
    add("--samples_per_prompt", type=int, default=4)
    add("--prompts", type=int, default=64, help="problems, which are repeated with new seeds")
    add("--temperature", type=float, default=1.0)
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--seconds", type=float, default=0.5, help="of a measurement, if it is plain decoding's")
    add("--tokens_per_slot", type=int, default=48, help="of a measurement, at least")
    return parser


def check_counts(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses what would show only after minutes."""
    for name in ("batch", "batches", "rounds", "runs", "repeats", "tokens_per_slot",
                 "samples_per_prompt"):  # fmt: skip
        given = getattr(args, name, 1)
        least = min(given) if isinstance(given, (list, tuple)) else given
        if least < 1:
            parser.error(f"--{name} must be at least 1, got {least}")


def share_of_rounds(measured: Sequence[Measured]) -> dict[str, float]:
    """By strategy, what share of all rounds it ran in, the most used first."""
    rounds: dict[str, int] = {}
    for choice in itertools.chain.from_iterable(m.choices for m in measured):
        rounds[choice.strategy] = rounds.get(choice.strategy, 0) + choice.rounds
    total = max(sum(rounds.values()), 1)
    return {name: n / total for name, n in sorted(rounds.items(), key=lambda item: -item[1])}
