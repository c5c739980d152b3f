"""`python -m bench.peers`: generation with the same weights, by other programs.

    transformers    `transformers.generate` on torch
    jax_sampler     a plain jitted sampler (bench/sampler.py)
    specjax_plain   `LLM` without speculation
    specjax         `LLM` with default speculation, the strategy chosen while running
    specjax_block   the same with `block` acceptance: equal to plain decoding in distribution, and
                    not in every token

All take turns in one process, at temperature 1 in float32, with as many threads as there are cores.
Two kinds of work:

    batch_N     prompts of held-out problems, N samples at a time, until they end or reach
                --max_tokens. Tokens are counted up to the end of a sample, its stop token included.
                Every repeat draws new samples, which differ between peers: rates are compared.
    long_tail   each prompt with a budget of tokens of its own, from a long-tailed distribution, end
                tokens ignored, so that all generate the same number of tokens.

A peer without continuous batching takes static batches, in the given order, each until its longest
sample ends. Every peer runs once before the clock starts, and compiles then. What specjax spends on
measuring its strategies at that time is reported, and figures `.._charged` include it, spread over
the repeats.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from bench.command import add_prompt_arguments, bench_parser, heldout_prompts, user_errors
from bench.decode import Turns
from bench.longtail import long_tailed
from bench.record import figure, ratio_figure, report, write_result
from bench.sampler import JaxSampler
from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.control import ControlConfig
from specjax.control.config import DEFAULT_STRATEGIES
from specjax.tokenizer import load_tokenizer
from specjax.versions import installed

PEERS = ("transformers", "jax_sampler")
PLAIN = "specjax_plain"
SPECULATIVE = {"specjax": "coupled", "specjax_block": "block"}  # and how they accept
LONGEST = 20  # times the median budget; it is also the 99th percentile before it is cut


class Work(NamedTuple):
    """What all generate: prompts, tokens of each at most, and samples at a time."""

    name: str
    prompts: list[list[int]]
    limits: list[int]
    batch: int
    ignore_eos: bool


# --- transformers --------------------------------------------------------------------------------


class TorchPeer:
    """A policy in float32 that generates in static batches, in the given order.

    Raises:
      ModuleNotFoundError: torch is not installed.
    """

    def __init__(self, model: str | Path, work: Work):
        try:
            import torch
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "torch is not installed (specjax itself does not need it): pip install torch "
                "--index-url of the CPU wheels, or leave transformers out of --peers"
            ) from error
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.torch, self.device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        self.policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.policy = self.policy.eval().to(self.device)
        self.work = work
        stops = self.policy.generation_config.eos_token_id
        self.stops = {stops} if isinstance(stops, int) else set(stops or ())
        if work.ignore_eos:
            self.stops, self.policy.generation_config.eos_token_id = set(), None

    def __call__(self, seed: int) -> list[list[int]]:
        """Generates the response to every prompt; a stop token is the last of its response."""
        self.torch.set_num_threads(cores())
        self.torch.manual_seed(seed)
        outputs: list[list[int]] = []
        for first in range(0, len(self.work.prompts), self.work.batch):
            here = slice(first, first + self.work.batch)
            limits = self.work.limits[here]
            rows = self._generate(self.work.prompts[here], max(limits))
            outputs += [self._cut(row, n) for row, n in zip(rows, limits, strict=True)]
        return outputs

    def _generate(self, prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        torch, width = self.torch, max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = self.policy.generate(
                ids.to(self.device),
                attention_mask=mask.to(self.device),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=most,
                pad_token_id=0,
            )
        return out[:, width:].tolist()

    def _cut(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Cuts a row at its own end, behind which the batch went on."""
        stop = next((i + 1 for i, token in enumerate(tokens) if token in self.stops), limit)
        return list(tokens[: min(stop, limit)])


def cores() -> int:
    """Returns the number of threads that all programs use."""
    return os.cpu_count() or 1


# --- all arms ------------------------------------------------------------------------------------


class Arm(NamedTuple):
    """One way to do the work; `generate` draws the samples of a seed.

    `calibration` is the seconds spent on measuring strategies beforehand.
    """

    generate: Callable[[int], list[list[int]]]
    calibration: float = 0.0


class Speculation:
    """An `LLM` that generates; it sums up the accept length over its calls."""

    def __init__(self, llm: LLM, work: Work):
        self.llm, self.work, self.totals = llm, work, None

    def __call__(self, seed: int) -> list[list[int]]:
        params = [
            SamplingParams(max_tokens=limit, seed=seed, ignore_eos=self.work.ignore_eos)
            for limit in self.work.limits
        ]
        outputs = self.llm.generate(self.work.prompts, params)
        if self.totals is None:
            self.totals = self.llm.totals
        else:
            self.totals.merge(self.llm.totals)
        return [out.samples[0].token_ids for out in outputs]


def build(name: str, model, args: argparse.Namespace, work: Work) -> Arm:
    """Makes a peer or specjax."""
    cfg, params, _ = model
    width = max(map(len, work.prompts))
    if name == "transformers":
        return Arm(TorchPeer(args.model, work))
    if name == "jax_sampler":
        stops = () if work.ignore_eos else cfg.eos_token_ids
        peer = JaxSampler(cfg, params, work.batch, width, max(work.limits), stops)
        return Arm(lambda seed: peer(work.prompts, work.limits, seed))
    spec = control = None
    if name in SPECULATIVE:
        spec = SpecConfig(draft=args.draft, acceptance=SPECULATIVE[name])
        control = ControlConfig(strategies=tuple(args.strategies))
    llm = LLM(model, spec, work.batch, width + max(work.limits), control=control)
    start_up = llm.warm_up()
    print(start_up, flush=True)
    return Arm(Speculation(llm, work), start_up.calibration_seconds)


def figures_of(work: Work, arms: Mapping[str, Arm], turns: Turns) -> dict[str, dict]:
    """Returns what one kind of work contributes to the result file.

    Raises:
      ValueError: end tokens are ignored, and an arm generated another number of tokens.
    """
    at, result = f"/{work.name}", {}
    for name in arms:
        if work.ignore_eos and set(turns.tokens[name]) != {sum(work.limits)}:
            raise ValueError(
                f"{name} generated {turns.tokens[name]} tokens, expected {sum(work.limits)} in "
                "every call: it cannot be compared"
            )
        result[f"{name}_tokens_per_sec{at}"] = turns.rate(name)
    peers = [name for name in arms if name in PEERS]
    best = max(peers, key=lambda name: result[f"{name}_tokens_per_sec{at}"]["value"])
    result[f"best_peer{at}"] = figure(best, "peer with most tokens per second")
    for ours in (name for name in arms if name not in PEERS):
        result |= {f"{ours}_over_{peer}{at}": turns.ratio(ours, peer) for peer in peers}
        result[f"{ours}_over_best{at}"] = result[f"{ours}_over_{best}{at}"]
        if ours not in SPECULATIVE:
            continue
        share = arms[ours].calibration / len(turns.seconds[ours])
        counted = zip(turns.seconds[ours], turns.tokens[ours], strict=True)
        charged = [(seconds + share) / n for seconds, n in counted]
        unit = "measuring at start charged"
        charged = ratio_figure(turns.costs(best), charged, unit)
        result[f"{ours}_over_best_charged{at}"] = charged
        unit = "s, once, before the clock"
        result[f"{ours}_calibration_seconds{at}"] = figure(arms[ours].calibration, unit)
        length = arms[ours].generate.totals.accept_length
        result[f"{ours}_accept_length{at}"] = figure(length, "tokens per round")
    return result


def works(args: argparse.Namespace, tokenizer, most: int) -> list[Work]:
    """Returns all kinds of work.

    Args:
      most: largest number of tokens in a sequence of the policy.
    """
    found = []
    for batch in args.batches:
        count = max(args.fewest_samples, args.samples_per_slot * batch)
        limit = min(args.max_tokens, most - args.max_prompt_tokens)
        prompts = heldout_prompts(tokenizer, args, count)
        found.append(Work(f"batch_{batch}", prompts, [limit] * count, batch, False))
    if args.tail_prompts:
        drawn = long_tailed(args.tail_prompts, args.tail_median, LONGEST, args.seed)
        limits = [min(n, LONGEST * args.tail_median) for n in drawn]
        if args.max_prompt_tokens + max(limits) > most:
            raise ValueError(
                f"prompts of {args.max_prompt_tokens} and budgets of up to {max(limits)} tokens "
                f"are more than the policy's {most} positions; lower --tail_median"
            )
        prompts = heldout_prompts(tokenizer, args, args.tail_prompts)
        found.append(Work("long_tail", prompts, limits, args.tail_batch, True))
    return found


def run(args: argparse.Namespace) -> None:
    """Does every kind of work with all arms; the result file is rewritten after each."""
    cfg, params, head = hf.load_checkpoint(args.model, "float32")
    model = cfg.running(compute_dtype="float32"), params, head
    settings, figures = vars(args) | {"threads": cores()}, {}
    if "transformers" in args.peers:
        settings |= installed(["torch"])
    for work in works(args, load_tokenizer(args.model), cfg.max_position):
        names = (*args.peers, PLAIN, *SPECULATIVE)
        arms = {name: build(name, model, args, work) for name in names}
        turns = Turns({name: arm.generate for name, arm in arms.items()})
        turns.measure(args.repeats)
        here = figures_of(work, arms, turns)
        figures |= here
        print(report(here), flush=True)
        print(write_result(f"peers_{Path(args.model).name}", settings, figures, args.out))
        # The next work has programs of its own, and a process has room for some 65,000 memory maps.
        del arms, turns
        jax.clear_caches()
        gc.collect()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("peers", __doc__, "peers_<model>")
    add_prompt_arguments(parser)
    add = parser.add_argument
    add("--batches", type=int, nargs="*", default=[1, 8, 32], help="samples at a time")
    add("--repeats", type=int, default=7, help="measurements of each, at least 5 for a figure")
    add("--peers", nargs="+", default=list(PEERS), choices=PEERS, help="programs to compare with")
    add("--samples_per_slot", type=int, default=2)
    add("--fewest_samples", type=int, default=8, help="per measurement")
    add("--max_tokens", type=int, default=160, help="response tokens at most")
    add("--tail_prompts", type=int, default=32, help="of the long tail; 0: none")
    add("--tail_batch", type=int, default=8, help="samples at a time")
    add("--tail_median", type=int, default=16, help=f"median budget; the longest has {LONGEST}x")
    add("--strategies", nargs="+", default=list(DEFAULT_STRATEGIES), help="to choose from")
    add("--draft", default="checkpoint", choices=("checkpoint", "random"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    with user_errors("peers"):
        run(args)


if __name__ == "__main__":
    main()
