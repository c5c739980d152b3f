"""`python -m bench.peers --model assets/sums`: generation with the same weights, by other means.

    transformers            `transformers.generate` on torch
    transformers_assisted   its own assisted generation (see bench/peer_torch.py); batch 1 only
    jax_sampler             a plain jitted sampler (bench/jax_sampler.py)
    specjax_plain           `LLM` without speculation
    specjax                 `LLM` with default speculation, the strategy chosen while running
    specjax_block           the same with `block` acceptance: equal to plain decoding in
                            distribution, as transformers' rule is, and not in every token

All run in turns in one process, at temperature 1 in float32, with as many threads as there are
cores. Two kinds of work:

    batch_N     prompts of held-out problems, N samples at a time, until they end or reach
                --max_tokens. Counted are tokens up to the end of a sample, its stop token included.
                Every repeat draws new samples, which differ between peers: so rates are compared.
    long_tail   each prompt with a budget of tokens of its own, from a long-tailed distribution, end
                tokens ignored, so that all generate the same number of tokens: seconds are
                compared. Behind an end token text is no longer natural; the accept length says so.

Who has no continuous batching takes static batches, in the given order, each until its longest
sample ends. Every peer runs once before the clock starts, and what has to be compiled is compiled
then. What specjax spends on measuring its strategies at that time is told, and charged in figures
of their own (`.._charged`), spread over the repeats. transformers' ways to draft are tried, and the
fastest chosen, for nothing.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from bench import peer_torch
from bench.chains import long_tailed
from bench.command import add_prompt_arguments, bench_parser, heldout_prompts, user_errors
from bench.jax_sampler import JaxSampler
from bench.record import alternate, figure, paired_ratio_interval, write_result
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
    """What everybody generates: prompts, tokens of each at most, and samples at a time."""

    name: str
    prompts: list[list[int]]
    limits: list[int]
    batch: int
    ignore_eos: bool

    @property
    def width(self) -> int:
        return max(map(len, self.prompts))


class Arm:
    """One way to do the work; every call draws new samples.

    Attributes:
      tokens: generated in each call. extra: seconds that were spent on measuring beforehand.
      choice: what was chosen beforehand, in words.
    """

    def __init__(self, generate: Callable[[int], list[list[int]]]):
        self.generate = generate
        self.tokens: list[int] = []
        self.extra, self.choice = 0.0, ""
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        self.tokens.append(sum(map(len, self.generate(self._calls))))


class Speculation:
    """An `LLM` as an arm; sums up the accept length over its calls."""

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
    """The arm of a peer, or of specjax, compiled; None where it does not do such work."""
    cfg, params, head = model
    if name == "transformers":
        peer = peer_torch.TorchPeer(args.model, work.batch, args.threads, work.ignore_eos)
    elif name == "transformers_assisted":
        if work.batch > 1:
            return None
        trial = work.prompts, work.limits
        peer, choice, tried = peer_torch.fastest_assisted(
            args.model, args.threads, work.ignore_eos, *trial
        )
        print("  ".join(f"{way}: {1 / s:.0f} tok/s" for way, s in tried.items()), flush=True)
    elif name == "jax_sampler":
        stops = () if work.ignore_eos else cfg.eos_token_ids
        peer = JaxSampler(cfg, params, work.batch, work.width, max(work.limits), stops)
    else:
        return _specjax(SPECULATIVE.get(name), (cfg, params, head), args, work)
    arm = Arm(lambda seed: peer(work.prompts, work.limits, seed))
    if name == "transformers_assisted":
        arm.choice = choice
    return arm


def _specjax(acceptance: str | None, model, args: argparse.Namespace, work: Work) -> Arm:
    longest = work.width + max(work.limits)
    spec = control = None
    if acceptance is not None:
        spec = SpecConfig(head=args.head, acceptance=acceptance)
        control = ControlConfig(strategies=tuple(args.strategies))
    llm = LLM(model, spec, work.batch, longest, control=control)
    start_up = llm.warm_up()
    print(start_up, flush=True)
    arm = Arm(Speculation(llm, work))
    arm.extra = start_up.calibration_seconds
    return arm


def measure(arms: Mapping[str, Arm], repeats: int) -> dict[str, list[float]]:
    """Seconds of every arm, in turns, after a call of each that is not counted."""
    for arm in arms.values():
        arm()
        arm.tokens.clear()
        if isinstance(arm.generate, Speculation):
            arm.generate.totals = None
    return alternate(arms, repeats)


def figures_of(work: Work, arms: Mapping[str, Arm], seconds: Mapping[str, list[float]]) -> dict:
    """What one kind of work contributes to the result file.

    Costs are seconds per token, or for the long tail seconds, which is the same up to a factor.
    """
    at, result = f"/{work.name}", {}
    costs = {n: [s / t for s, t in zip(seconds[n], arms[n].tokens, strict=True)] for n in arms}
    if work.ignore_eos:
        _check_counts(work, arms)
    for name, values in costs.items():
        rates = [1 / cost for cost in values]
        ends = [min(rates), max(rates)]
        result[f"{name}_tokens_per_sec{at}"] = figure(statistics.median(rates), "tok/s", ends)
        if work.ignore_eos:
            ends = [min(seconds[name]), max(seconds[name])]
            result[f"{name}_seconds{at}"] = figure(statistics.median(seconds[name]), "s", ends)
        if arms[name].choice:
            result[f"{name}_choice{at}"] = figure(arms[name].choice, "fastest way to draft")
    best = min((n for n in costs if n in PEERS), key=lambda n: statistics.median(costs[n]))
    result[f"best_peer{at}"] = figure(best, "peer with the least time per token")
    for ours in (n for n in costs if n not in PEERS):
        for peer in (n for n in costs if n in PEERS):
            ratio, *ends = paired_ratio_interval(costs[peer], costs[ours])
            result[f"{ours}_over_{peer}{at}"] = figure(
                ratio, "times as fast, median over turns", ends
            )
        result[f"{ours}_over_best{at}"] = result[f"{ours}_over_{best}{at}"]
    for name in (n for n in arms if n in SPECULATIVE):
        result |= _charged(name, arms[name], seconds[name], costs[best], at)
    for name in TORCH:
        if name not in arms:
            result[f"{name}_tokens_per_sec{at}"] = figure(None, "not offered")
    return result


def _charged(name: str, arm: Arm, seconds: list[float], best: list[float], at: str) -> dict:
    """Figures of a speculative arm, what measuring its strategies cost included."""
    share = arm.extra / len(seconds)
    charged = [(s + share) / t for s, t in zip(seconds, arm.tokens, strict=True)]
    ratio, *ends = paired_ratio_interval(best, charged)
    accepted = arm.generate.totals.accept_length
    return {
        f"{name}_over_best_charged{at}": figure(ratio, "measuring at start charged", ends),
        f"{name}_calibration_seconds{at}": figure(arm.extra, "s, once, before the clock starts"),
        f"{name}_accept_length{at}": figure(accepted, "tokens per round, plain rounds included"),
    }


def _check_counts(work: Work, arms: Mapping[str, Arm]) -> None:
    """With end tokens ignored everybody generates the same number of tokens.

    Raises:
      ValueError: somebody did not.
    """
    for name, arm in arms.items():
        if set(arm.tokens) != {sum(work.limits)}:
            raise ValueError(
                f"{name} generated {sorted(set(arm.tokens))} tokens, expected {sum(work.limits)} "
                "in every call: its seconds cannot be compared"
            )


def budgets(count: int, median: int, seed: int) -> list[int]:
    """Tokens per prompt: log-normal, 99th percentile and longest at `LONGEST` medians."""
    return [min(n, LONGEST * median) for n in long_tailed(count, median, LONGEST, seed)]


def works(args: argparse.Namespace, tokenizer, most: int) -> list[Work]:
    """All that is to be generated.

    Args:
      most: tokens of a sequence that the policy has positions for.
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
    """Does every work with all arms and writes the result file, anew after each of them.

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
        here = figures_of(work, arms, measure(arms, args.repeats))
        figures |= here
        print(summary(work, here), flush=True)
        path = write_result(f"peers_{Path(args.model).name}", settings, figures, args.out)
        # The next work has programs of its own, and a process has room for some 65,000 memory maps.
        del arms
        jax.clear_caches()
        gc.collect()
    print(path)
    return path


def summary(work: Work, figures: Mapping[str, Mapping]) -> str:
    """One line for people."""
    rates = "  ".join(
        f"{name.partition('_tokens_per_sec')[0]} {entry['value']:.0f}"
        for name, entry in figures.items()
        if "tokens_per_sec" in name and entry["value"] is not None
    )
    ratios = []
    for name in SPECULATIVE:
        if found := figures.get(f"{name}_over_best/{work.name}"):
            low, high = found["interval"]
            ratios.append(f"{name} {found['value']:.2f}x [{low:.2f}, {high:.2f}]")
    best = figures[f"best_peer/{work.name}"]["value"]
    return f"{work.name}: {', '.join(ratios)} of {best}, the best peer  tok/s: {rates}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("peers", __doc__, "peers_<model>")
    add_prompt_arguments(parser)
    add = parser.add_argument
    add("--batches", type=int, nargs="*", default=[1, 8, 32], help="samples at a time")
    add("--repeats", type=int, default=7, help="measurements of each, at least 5 for a figure")
    add("--peers", nargs="+", default=list(PEERS), choices=PEERS, help="whom to compare with")
    add("--samples_per_slot", type=int, default=2)
    add("--fewest_samples", type=int, default=FEWEST_SAMPLES, help="per measurement")
    add("--max_tokens", type=int, default=160, help="response tokens at most")
    add("--threads", type=int, default=peer_torch.cores(), help="of torch; default: all cores")
    add("--tail_prompts", type=int, default=32, help="of the long tail; 0: none")
    add("--tail_batch", type=int, default=8, help="samples at a time")
    add("--tail_median", type=int, default=16, help=f"median budget; the longest has {LONGEST}x")
    add("--strategies", nargs="+", default=list(DEFAULT_STRATEGIES), help="to choose from")
    add("--acceptance", nargs="+", default=list(SPECULATIVE.values()), choices=SPECULATIVE.values())
    add("--head", default="checkpoint", choices=("checkpoint", "random"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("peers"):
        run(parse(argv))


if __name__ == "__main__":
    main()
