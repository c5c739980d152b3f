"""`python -m bench.throughput host`: how long does the device wait for the host?

Two things take turns, on the same samples at a batch of one (or --batch):

    engine   `LLM.generate`: scheduling, chunks, results, text
    device   the very programs that `generate` just ran, with the same arguments, enqueued one after
             the other; no result is read between them

The *host share* is the part of the engine's seconds that the device alone does not need: the device
waited, or on a CPU shared its cores. Both include enqueuing; where that is no quicker than the
device, as with tiny models, the device's seconds include waiting for it, so `enqueuing` is a figure
of its own. *Host busy* is the share of the engine's seconds in which its thread does not wait for
results, mostly while the device runs.

A profile of the host's functions (cProfile, which makes Python calls look slower than they are) is
written beside the result, as text.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import io
import pstats
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from bench.command import add_prompt_arguments, bench_parser, heldout_prompts, user_errors
from bench.record import alternate, figure, paired_ratio_interval, report, write_result
from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.control import ControlConfig
from specjax.control.config import DEFAULT_STRATEGIES
from specjax.engine.settings import EngineConfig
from specjax.tokenizer import load_tokenizer

ARMS = ("plain", "speculative", "controlled")
PROGRAMS = ("prefill", "place", "chunk")
LINES = 30  # of a profile


class Device:
    """Records the programs that an engine runs, and runs them again without it.

    Attributes:
      calls: programs and arguments of the last `generate`.
      waited: seconds for which its thread waited for results.
      enqueuing: seconds of the last `replay` until all programs were enqueued.
      last: results of the last chunk.
    """

    def __init__(self, llm: LLM):
        self.llm, self.runner = llm, llm.engine.runner
        self.calls: list[tuple] = []
        self.waited = self.enqueuing = 0.0
        self.last = None
        for name in PROGRAMS:
            run = getattr(self.runner, name)
            setattr(self.runner, name, functools.partial(self._record, run))
        self._postprocess = llm.engine._postprocess
        llm.engine._postprocess = self._wait_and_postprocess

    def _record(self, run, *args):
        self.calls.append((run, args))
        result = run(*args)
        self.last = result if result is not None else self.last
        return result

    def _wait_and_postprocess(self, chunk) -> None:
        start = time.perf_counter()
        jax.block_until_ready(chunk.result)
        self.waited += time.perf_counter() - start
        self._postprocess(chunk)

    def generate(self, prompts, params) -> None:
        """Generates through the engine, and records its programs."""
        self.calls, self.waited = [], 0.0
        self.outputs = self.llm.generate(prompts, params)

    def replay(self) -> None:
        """Runs the programs of the last `generate` again, back to back."""
        start = time.perf_counter()
        for run, args in self.calls:
            result = run(*args)
            self.last = result if result is not None else self.last
        self.enqueuing = time.perf_counter() - start
        jax.block_until_ready((self.runner.state, self.last))


def measure(device: Device, prompts, params, repeats: int) -> dict[str, list[float]]:
    """Measures the seconds of the engine, of its waiting, of the device alone and of enqueuing."""
    found: dict[str, list[float]] = {"waited": [], "enqueuing": []}

    def generate() -> None:
        device.generate(prompts, params)
        found["waited"].append(device.waited)

    def replay() -> None:
        device.replay()
        found["enqueuing"].append(device.enqueuing)

    for run in (generate, replay, generate, replay):  # compiles, and fills the controller's window
        run()
    for values in found.values():
        values.clear()
    return alternate({"engine": generate, "device": replay}, repeats) | found


def figures_of(name: str, batch: int, seconds: dict[str, list[float]], tokens: int) -> dict:
    at = f"/{name}/batch_{batch}"
    ratio, low, high = paired_ratio_interval(seconds["device"], seconds["engine"])
    busy = [1 - w / e for w, e in zip(seconds["waited"], seconds["engine"], strict=True)]
    enqueuing = [q / d for q, d in zip(seconds["enqueuing"], seconds["device"], strict=True)]
    middle = statistics.median
    unit = "of the engine's seconds that the device alone does not need"
    return {
        f"host_share{at}": figure(1 - ratio, unit, [1 - high, 1 - low]),
        f"host_busy{at}": figure(
            middle(busy), "of the engine's seconds, not waiting", [min(busy), max(busy)]
        ),
        f"enqueuing{at}": figure(
            middle(enqueuing), "of the device's seconds", [min(enqueuing), max(enqueuing)]
        ),
        f"engine_seconds{at}": figure(middle(seconds["engine"]), "s"),
        f"device_seconds{at}": figure(middle(seconds["device"]), "s"),
        f"tokens{at}": figure(tokens, "tokens per measurement"),
    }


def profile(device: Device, prompts, params) -> str:
    """Profiles the host's functions during one `generate`, sorted by their own time."""
    profiler = cProfile.Profile()
    profiler.runcall(device.generate, prompts, params)
    text = io.StringIO()
    stats = pstats.Stats(profiler, stream=text).strip_dirs()
    stats.sort_stats("tottime").print_stats(LINES)
    return "\n".join(line.rstrip() for line in text.getvalue().strip().splitlines()) + "\n"


def build(name: str, model, args: argparse.Namespace, longest: int) -> LLM:
    spec = None if name == "plain" else SpecConfig(args.strategy, draft=args.draft)
    control = None
    if name == "controlled":
        control = ControlConfig(strategies=tuple(args.strategies))
    engine = EngineConfig(chunk_tokens=args.chunk_tokens, stretch=args.stretch)
    llm = LLM(
        model, spec, args.batch, longest, control=control, tokenizer=args.tokenizer, engine=engine
    )
    llm.warm_up()
    return llm


def run(args: argparse.Namespace) -> Path:
    """Measures every arm, and writes the result file and the profile."""
    settings = vars(args) | {}
    args.tokenizer = load_tokenizer(args.model)
    cfg, params, head = hf.load_checkpoint(args.model, "float32")
    model = cfg.running(compute_dtype="float32"), params, head
    count = args.samples_per_slot * args.batch
    prompts = heldout_prompts(
        args.tokenizer, args.task, args.data, count, args.max_prompt_tokens, args.seed
    )
    sampling = SamplingParams(max_tokens=args.max_tokens, seed=args.seed)
    longest = min(args.max_prompt_tokens + args.max_tokens, cfg.max_position)
    figures, profiles = {}, []
    for name in args.arms:
        device = Device(build(name, model, args, longest))
        seconds = measure(device, prompts, sampling, args.repeats)
        here = figures_of(name, args.batch, seconds, device.llm.totals.tokens)
        figures |= here
        title = f"--- {name}, batch {args.batch} ---"
        profiles.append(f"{title}\n\n{profile(device, prompts, sampling)}")
        print(report(here), flush=True)
    path = write_result(f"host_{Path(args.model).name}", settings, figures, args.out)
    text = path.with_suffix(".txt")
    text.write_text("\n".join(profiles), encoding="utf-8")
    print(f"{path}\n{text}")
    return path


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("throughput host", __doc__, "host_<model>")
    add_prompt_arguments(parser)
    add = parser.add_argument
    add("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    add("--batch", type=int, default=1, help="slots")
    add("--samples_per_slot", type=int, default=8)
    add("--chunk_tokens", type=int, default=EngineConfig.chunk_tokens)
    add("--stretch", type=int, default=EngineConfig.stretch, help="of chunks of few slots")
    add("--max_tokens", type=int, default=160, help="response tokens at most")
    add("--repeats", type=int, default=9)
    add("--strategy", default="4_1_5", help="of the speculative arm")
    add("--strategies", nargs="+", default=list(DEFAULT_STRATEGIES), help="of the controlled arm")
    add("--draft", default="checkpoint", choices=("checkpoint", "random"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("throughput host"):
        run(parse(argv))
