"""`python -m bench.throughput peers`: generation with the same weights, by other programs.

    transformers            `transformers.generate` on torch
    transformers_assisted   its own assisted generation (bench/throughput/peer_torch.py); batch 1
    jax_sampler             a plain jitted sampler (bench/throughput/jax_sampler.py)
    specjax_plain           `LLM` without speculation
    specjax                 `LLM` with default speculation, the strategy chosen while running
    specjax_block           the same with `block` acceptance: equal to plain decoding in
                            distribution, as transformers' rule is, and not in every token

All take turns in one process, at temperature 1 in float32, with as many threads as there are cores.
Two kinds of work:

    batch_N     prompts of held-out problems, N samples at a time, until they end or reach
                --max_tokens. Tokens are counted up to the end of a sample, its stop token included.
                Every repeat draws new samples, which differ between peers: rates are compared.
    long_tail   each prompt with a budget of tokens of its own, from a long-tailed distribution, end
                tokens ignored, so that all generate the same number of tokens. Behind an end token
                text is no longer natural, which the accept length shows.

A peer without continuous batching takes static batches, in the given order, each until its longest
sample ends. Every peer runs once before the clock starts, and compiles then. What specjax spends on
measuring its strategies at that time is reported, and figures `.._charged` include it, spread over
the repeats. The trials of transformers' ways to draft are not charged.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from bench.command import add_prompt_arguments, bench_parser, heldout_prompts, user_errors
from bench.record import figure, paired_ratio_interval, report, write_result
from bench.rollout.chains import long_tailed
from bench.throughput import peer_torch
from bench.throughput.decode import Turns
from bench.throughput.jax_sampler import JaxSampler
from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.control import ControlConfig
from specjax.control.config import DEFAULT_STRATEGIES
from specjax.tokenizer import load_tokenizer

FEWEST_SAMPLES = 8  # per measurement, so that one long sample does not decide it
TORCH = ("transformers", "transformers_assisted")
PEERS = (*TORCH, "jax_sampler")
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

    @property
    def width(self) -> int:
        return max(map(len, self.prompts))


class Arm(NamedTuple):
    """One way to do the work; `generate` draws the samples of a seed.

    `calibration` is the seconds spent on measuring strategies beforehand, `choice` what was chosen.
    """

    generate: Callable[[int], list[list[int]]]
    calibration: float = 0.0
    choice: str = ""


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


def build(name: str, model, args: argparse.Namespace, work: Work) -> Arm | None:
    """Makes a peer or specjax; returns None where it does not do such work."""
    cfg, params, head = model
    choice = ""
    if name == "transformers":
        peer = peer_torch.TorchPeer(args.model, work.batch, args.threads, work.ignore_eos)
    elif name == "transformers_assisted":
        if work.batch > 1:
            return None
        peer, choice, tried = peer_torch.fastest_assisted(
            args.model, args.threads, work.ignore_eos, work.prompts, work.limits
        )
        print("  ".join(f"{way}: {1 / s:.0f} tok/s" for way, s in tried.items()), flush=True)
    elif name == "jax_sampler":
        stops = () if work.ignore_eos else cfg.eos_token_ids
        peer = JaxSampler(cfg, params, work.batch, work.width, max(work.limits), stops)
    else:
        return _specjax(SPECULATIVE.get(name), (cfg, params, head), args, work)
    return Arm(lambda seed: peer(work.prompts, work.limits, seed), choice=choice)


def _specjax(acceptance: str | None, model, args: argparse.Namespace, work: Work) -> Arm:
    longest = work.width + max(work.limits)
    spec = control = None
    if acceptance is not None:
        spec = SpecConfig(draft=args.draft, acceptance=acceptance)
        control = ControlConfig(strategies=tuple(args.strategies))
    llm = LLM(model, spec, work.batch, longest, control=control)
    start_up = llm.warm_up()
    print(start_up, flush=True)
    return Arm(Speculation(llm, work), start_up.calibration_seconds)


def figures_of(work: Work, arms: Mapping[str, Arm], turns: Turns) -> dict[str, dict]:
    """Returns what one kind of work contributes to the result file."""
    at, result = f"/{work.name}", {}
    if work.ignore_eos:
        _check_counts(work, turns)
    for name, arm in arms.items():
        result[f"{name}_tokens_per_sec{at}"] = turns.rate(name)
        if arm.choice:
            result[f"{name}_choice{at}"] = figure(arm.choice, "fastest way to draft")
    peers = [name for name in arms if name in PEERS]
    best = max(peers, key=lambda name: result[f"{name}_tokens_per_sec{at}"]["value"])
    result[f"best_peer{at}"] = figure(best, "peer with most tokens per second")
    for ours in (name for name in arms if name not in PEERS):
        for peer in peers:
            result[f"{ours}_over_{peer}{at}"] = turns.ratio(ours, peer)
        result[f"{ours}_over_best{at}"] = result[f"{ours}_over_{best}{at}"]
    for name in (name for name in arms if name in SPECULATIVE):
        result |= _charged(name, arms[name], turns, best, at)
    for name in TORCH:
        if name not in arms:
            result[f"{name}_tokens_per_sec{at}"] = figure(None, "not offered")
    return result


def _charged(name: str, arm: Arm, turns: Turns, best: str, at: str) -> dict[str, dict]:
    """Figures of a speculative arm that include what measuring its strategies took."""
    share = arm.calibration / len(turns.seconds[name])
    charged = [
        (s + share) / n for s, n in zip(turns.seconds[name], turns.tokens[name], strict=True)
    ]
    ratio, *ends = paired_ratio_interval(turns.costs(best), charged)
    accepted = arm.generate.totals.accept_length
    return {
        f"{name}_over_best_charged{at}": figure(ratio, "measuring at start charged", ends),
        f"{name}_calibration_seconds{at}": figure(arm.calibration, "s, once, before the clock"),
        f"{name}_accept_length{at}": figure(accepted, "tokens per round, plain rounds included"),
    }


def _check_counts(work: Work, turns: Turns) -> None:
    """Checks that all generated the same number of tokens, which ignored end tokens make sure of.

    Raises:
      ValueError: an arm generated another number.
    """
    for name, counts in turns.tokens.items():
        if set(counts) != {sum(work.limits)}:
            raise ValueError(
                f"{name} generated {sorted(set(counts))} tokens, expected {sum(work.limits)} in "
                "every call: it cannot be compared"
            )


def budgets(count: int, median: int, seed: int) -> list[int]:
    """Returns tokens per prompt: log-normal, 99th percentile and longest at `LONGEST` medians."""
    return [min(n, LONGEST * median) for n in long_tailed(count, median, LONGEST, seed)]


def works(args: argparse.Namespace, tokenizer, most: int) -> list[Work]:
    """Returns all kinds of work.

    Args:
      most: largest number of tokens in a sequence of the policy.
    """

    def prompts(count: int) -> list[list[int]]:
        longest = args.max_prompt_tokens
        return heldout_prompts(tokenizer, args.task, args.data, count, longest, args.seed)

    found = []
    for batch in args.batches:
        count = max(args.fewest_samples, args.samples_per_slot * batch)
        limit = min(args.max_tokens, most - args.max_prompt_tokens)
        found.append(Work(f"batch_{batch}", prompts(count), [limit] * count, batch, False))
    if args.tail_prompts:
        limits = budgets(args.tail_prompts, args.tail_median, args.seed)
        if args.max_prompt_tokens + max(limits) > most:
            raise ValueError(
                f"prompts of {args.max_prompt_tokens} and budgets of up to {max(limits)} tokens "
                f"are more than the policy's {most} positions; lower --tail_median"
            )
        tail = prompts(args.tail_prompts)
        found.append(Work("long_tail", tail, limits, args.tail_batch, True))
    return found


def run(args: argparse.Namespace) -> Path:
    """Does every kind of work with all arms; the result file is rewritten after each.

    Raises:
      ValueError: there is nothing to do.
    """
    if not args.batches and not args.tail_prompts:
        raise ValueError("--batches lists no batch size, and --tail_prompts is 0: nothing to do")
    cfg, params, head = hf.load_checkpoint(args.model, "float32")
    model = cfg.running(compute_dtype="float32"), params, head
    settings, figures = vars(args) | {}, {}
    if set(args.peers) & set(TORCH):
        torch = peer_torch.import_torch()
        import transformers

        settings |= {"torch": torch.__version__, "transformers": transformers.__version__}
    settings["budgets"] = budgets(args.tail_prompts, args.tail_median, args.seed)
    for work in works(args, load_tokenizer(args.model), cfg.max_position):
        names = (*args.peers, PLAIN, *(n for n, a in SPECULATIVE.items() if a in args.acceptance))
        arms = {name: build(name, model, args, work) for name in names}
        arms = {name: arm for name, arm in arms.items() if arm is not None}
        turns = Turns({name: arm.generate for name, arm in arms.items()})
        turns.measure(args.repeats)
        here = figures_of(work, arms, turns)
        figures |= here
        print(report(here), flush=True)
        path = write_result(f"peers_{Path(args.model).name}", settings, figures, args.out)
        # The next work has programs of its own, and a process has room for some 65,000 memory maps.
        del arms, turns
        jax.clear_caches()
        gc.collect()
    print(path)
    return path


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("throughput peers", __doc__, "peers_<model>")
    add_prompt_arguments(parser)
    add = parser.add_argument
    add("--batches", type=int, nargs="*", default=[1, 8, 32], help="samples at a time")
    add("--repeats", type=int, default=7, help="measurements of each, at least 5 for a figure")
    add("--peers", nargs="+", default=list(PEERS), choices=PEERS, help="programs to compare with")
    add("--samples_per_slot", type=int, default=2)
    add("--fewest_samples", type=int, default=FEWEST_SAMPLES, help="per measurement")
    add("--max_tokens", type=int, default=160, help="response tokens at most")
    add("--threads", type=int, default=peer_torch.cores(), help="of torch; default: all cores")
    add("--tail_prompts", type=int, default=32, help="of the long tail; 0: none")
    add("--tail_batch", type=int, default=8, help="samples at a time")
    add("--tail_median", type=int, default=16, help=f"median budget; the longest has {LONGEST}x")
    add("--strategies", nargs="+", default=list(DEFAULT_STRATEGIES), help="to choose from")
    add("--acceptance", nargs="+", default=list(SPECULATIVE.values()), choices=SPECULATIVE.values())
    add("--draft", default="checkpoint", choices=("checkpoint", "random"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("throughput peers"):
        run(parse(argv))
