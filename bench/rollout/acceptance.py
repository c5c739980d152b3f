"""`python -m bench.rollout acceptance`: accept length of each rule, tree and draft source.

It measures the embedded policy, and with `--model DIR --data test.jsonl` a GSM8K policy too.

Trees are compared at equal drafted nodes (4, 7 and 15), because every draft token costs one row to
verify; the steps that a tree takes to draft are in its name. Sources: the policy's own head;
n-grams of the sample and of its siblings (other samples of its prompt); and two standalone models
made on the spot: the policy's first layers, untrained as such, and the policy itself, which shows
what a perfect draft would reach (as many as the rows, but for the samples' ends). Then
sampling-aligned drafting, on and off, under top-p and under penalties.

Accept length is 1 + accepted drafts / rounds, both summed over all samples of a setting; intervals
resample the prompts. A sample's last round is cut by its end, for all arms alike. In `coupled` mode
all arms of a setting decode the very same tokens; `block` and `recursive` draw their own. `greedy`
has no arms, because it is the coupled walk at temperature 0. The head's drafts are measured with
every rule and every tree that it takes, other sources with chain, spine and wide dynamic tree.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench import plots
from bench.command import add_prompt_arguments, bench_parser, heldout_prompts, user_errors
from bench.record import figure, report, write_result
from specjax import LLM, ModelConfig, SamplingParams, SpecConfig, Strategy
from specjax.checkpoint import huggingface as hf
from specjax.tokenizer import load_tokenizer

TAUS = (0.3, 0.6, 1.0)
DEFAULT_TAU = SpecConfig().tau

# Trees with as many drafted nodes as the key says. `bushy` is wide at the root, `spine` is a long
# chain of best children with a second choice beside its first nodes.
TREES: dict[int, dict[str, Any]] = {
    4: {
        "chain": "4_1_5",
        "spine": ((0,), (1,), (0, 0), (0, 0, 0)),
        "dynamic_wide": "3_2_5",
    },
    7: {
        "chain": "7_1_8",
        "bushy": ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)),
        "spine": ((0,), (1,), (0, 0), (0, 1), (0,) * 3, (0,) * 4, (0,) * 5),
        "dynamic_narrow": "4_2_8",
        "dynamic_wide": "4_4_8",
    },
    15: {
        "chain": "15_1_16",
        "spine": (
            *((0,) * depth for depth in range(1, 9)),
            *((0,) * depth + (1,) for depth in range(4)),
            (1, 0), (0, 1, 0), (1, 0, 0),
        ),
        "dynamic_wide": "6_4_16",
    },
}  # fmt: skip
MAIN_TREES = ("chain", "spine", "dynamic_wide")

# Sampling parameters; the keys name figures.
SETTINGS = {
    "T_0": {"temperature": 0.0},
    "T_0.7": {"temperature": 0.7},
    "T_1": {"temperature": 1.0},
}
ALIGNED_SETTINGS = {
    "T_0.7_top_p_0.9": {"temperature": 0.7, "top_p": 0.9},
    "T_1_repetition_1.1_frequency_0.5": {
        "temperature": 1.0,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.5,
    },
}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to draft and accept; `nodes` are drafted tokens, `tree` a key of `TREES[nodes]`."""

    source: str
    mode: str
    nodes: int
    tree: str
    tau: float = DEFAULT_TAU
    aligned: bool = True

    @property
    def strategy(self) -> Strategy:
        return Strategy.parse(TREES[self.nodes][self.tree])

    @property
    def name(self) -> str:
        tau = f"_tau_{self.tau}" if self.strategy.is_dynamic else ""
        return f"{self.source}/{self.mode}/{self.tree}{tau}/nodes_{self.nodes}"

    def spec(self, drafts: Mapping[str, str]) -> SpecConfig:
        """Returns its `SpecConfig`; `drafts` has the directory of each standalone model."""
        common = {
            "strategy": self.strategy,
            "acceptance": self.mode,
            "tau": self.tau,
            "aligned": self.aligned,
        }
        if self.source in drafts:
            return SpecConfig(draft=drafts[self.source], **common)
        draft = "checkpoint" if self.source == "head" else self.source
        return SpecConfig(draft=draft, **common)


def arms(sources: Sequence[str]) -> Iterator[Arm]:
    """Yields every rule with every tree that it takes; the head has more trees and tau."""
    for source, nodes in itertools.product(sources, TREES):
        head = source == "head"
        if source == "itself":  # what a perfect draft would reach
            yield Arm(source, "coupled", nodes, "chain")
            continue
        for tree in TREES[nodes] if head else MAIN_TREES:
            dynamic = tree.startswith("dynamic")
            for tau in TAUS if head and tree == "dynamic_wide" else (DEFAULT_TAU,):
                yield Arm(source, "coupled", nodes, tree, tau)
            if tree == "chain":
                yield Arm(source, "block", nodes, tree)
            if not dynamic:
                yield Arm(source, "recursive", nodes, tree)


def aligned_arms() -> Iterator[Arm]:
    """Yields pairs of arms that differ in `aligned` alone."""
    for mode, tree in (("coupled", "chain"), ("coupled", "dynamic_wide"), ("block", "chain")):
        for aligned in (True, False):
            yield Arm("head", mode, 7, tree, aligned=aligned)


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy with its draft sources and prompts.

    Attributes:
      drafts: directory of each standalone draft model, by source name.
    """

    name: str
    model: tuple[ModelConfig, Any, Any]
    prompts: list[list[int]]
    drafts: Mapping[str, str]

    @property
    def sources(self) -> tuple[str, ...]:
        return ("head", "ngram", *self.drafts)


@dataclasses.dataclass(frozen=True)
class Counts:
    """Accepted drafts and rounds, [prompts] each, from which accept lengths are computed."""

    accepted: np.ndarray
    rounds: np.ndarray

    @property
    def accept_length(self) -> float:
        return float(1 + self.accepted.sum() / self.rounds.sum())

    def resampled(self, picks: np.ndarray) -> np.ndarray:
        """Returns accept lengths [resamples] over each row of prompts' indices, `picks`."""
        return 1 + self.accepted[picks].sum(1) / self.rounds[picks].sum(1)

    def interval(self) -> list[float]:
        return _interval(self.resampled(_picks(len(self.rounds))))


def _picks(prompts: int) -> np.ndarray:
    """Draws the same resamples every time, so that two arms resample the same prompts."""
    return np.random.default_rng(0).integers(prompts, size=(2000, prompts))


def _interval(values: np.ndarray) -> list[float]:
    return [float(x) for x in np.quantile(values, [0.025, 0.975])]


# --- measuring -----------------------------------------------------------------------------------

Found = dict[tuple[str, str, Arm], Counts]  # by policy, setting, arm


def measure(policy: Policy, arm: Arm, settings: Mapping[str, Mapping], args) -> dict[str, Counts]:
    """Measures one arm under every setting.

    Settings run side by side in one batch, which compiles one program for all. N-grams look into
    their siblings, so there every setting runs alone.
    """
    longest = max(map(len, policy.prompts)) + args.max_tokens
    llm = LLM(policy.model, arm.spec(policy.drafts), args.max_batch, longest, scan_layers=args.scan)
    groups = [[name] for name in settings] if arm.source == "ngram" else [list(settings)]
    counts = {}
    for group in groups:
        pairs = [(name, prompt) for name in group for prompt in policy.prompts]
        params = [_sampling(settings[name], args) for name, _ in pairs]
        outputs = llm.generate([prompt for _, prompt in pairs], params)
        for name in group:
            mine = [out for (other, _), out in zip(pairs, outputs, strict=True) if other == name]
            stats = [[sample.stats for sample in out.samples] for out in mine]
            counts[name] = Counts(
                np.array([sum(s.accepted for s in row) for row in stats]),
                np.array([sum(s.rounds for s in row) for row in stats]),
            )
    return counts


def _sampling(setting: Mapping[str, float], args) -> SamplingParams:
    # Greedy samples of one prompt are all the same.
    n = args.samples if setting["temperature"] > 0 else 1
    return SamplingParams(n=n, max_tokens=args.max_tokens, seed=args.seed, **setting)


def policies(args, directory: Path) -> Iterator[Policy]:
    """Yields the embedded policy, and the one that `--model` names."""
    for path, task, data, begin in (
        (args.embedded, "sums", None, args.embedded_begin),
        (args.model, args.task, args.data, ""),
    ):
        if path is None:
            continue
        cfg, params, head = hf.load_checkpoint(path, "float32")
        cfg, tokenizer = cfg.running(compute_dtype="float32"), load_tokenizer(path)
        prompts = heldout_prompts(
            tokenizer, task, data, args.prompts, args.max_prompt_tokens, args.seed
        )
        prompts = [p + tokenizer.encode(begin, add_special_tokens=False) for p in prompts]
        drafts = {}
        if not args.quick:
            layers, small = max(1, cfg.num_layers // 2), directory / task
            whole = directory / f"{task}_without_a_head"
            drafts = {f"first_{layers}_layers": str(small), "itself": str(whole)}
            truncated(cfg, params, layers, path, small)
            truncated(cfg, params, cfg.num_layers, path, whole)
        yield Policy(task, (cfg, params, head), prompts, drafts)


def truncated(cfg: ModelConfig, params, layers: int, tokenizer: str, path: Path) -> None:
    """Writes a checkpoint of a policy's first layers, with its embedding and final norm."""
    first = params | {"layers": jax.tree.map(lambda x: x[:layers], params["layers"])}
    small = cfg.replace(layers=cfg.layers[:layers], mtp_num_layers=0)
    hf.save_checkpoint(path, small, first, None, tokenizer)


def measure_all(args: argparse.Namespace) -> tuple[Found, Found]:
    """Measures all arms and the aligned pairs, and prints a line of each."""
    found, aligned = {}, {}
    with tempfile.TemporaryDirectory() as directory:
        for policy in policies(args, Path(directory)):
            jobs = [(arm, SETTINGS, found) for arm in arms(policy.sources)]
            jobs += [(arm, ALIGNED_SETTINGS, aligned) for arm in aligned_arms()]
            for arm, settings, into in jobs:
                if args.only and not any(part in arm.name for part in args.only):
                    continue
                counts = measure(policy, arm, settings, args)
                into.update({(policy.name, name, arm): c for name, c in counts.items()})
                lengths = "  ".join(f"{n} {c.accept_length:.2f}" for n, c in counts.items())
                off = "" if arm.aligned else " (not aligned)"
                print(f"{policy.name}  {arm.name}{off}: {lengths}", flush=True)
    if not found:
        raise ValueError(f"no arm has any of {args.only} in its name; leave --only out to see all")
    return found, aligned


# --- figures -------------------------------------------------------------------------------------


def figures(found: Found, aligned: Found) -> dict[str, dict]:
    """Computes accept lengths, their ratios to the coupled chain, and what alignment gains."""
    result = {}
    for (policy, setting, arm), counts in found.items():
        key = f"accept_length/{policy}/{setting}/{arm.name}"
        result[key] = figure(counts.accept_length, "tokens per round", counts.interval())
    for (policy, setting, arm), counts in aligned.items():
        side = "aligned" if arm.aligned else "not_aligned"
        key = f"accept_length/{policy}/{setting}/{arm.name}/{side}"
        result[key] = figure(counts.accept_length, "tokens per round", counts.interval())
    unit = "times the coupled chain's accept length, geometric mean over policies and temperatures"
    for arm in dict.fromkeys(arm for _, _, arm in found):
        chain = Arm(arm.source, "coupled", arm.nodes, "chain")
        pairs = [
            (counts, found[policy, setting, chain])
            for (policy, setting, other), counts in found.items()
            if other == arm and (policy, setting, chain) in found
        ]
        if pairs:
            value, interval = mean_ratio(pairs)
            result[f"relative/{arm.name}"] = figure(value, unit, interval)
    for (policy, setting, arm), counts in aligned.items():
        if not arm.aligned:
            partner = aligned[policy, setting, dataclasses.replace(arm, aligned=True)]
            value, interval = mean_ratio([(partner, counts)])
            result[f"aligned_gain/{policy}/{setting}/{arm.name}"] = figure(
                value, "accept length, aligned / not aligned", interval
            )
    return result


def mean_ratio(pairs: Sequence[tuple[Counts, Counts]]) -> tuple[float, list[float]]:
    """Returns the geometric mean of ratios; both sides resample the same prompts."""
    logs = [np.log(a.accept_length / b.accept_length) for a, b in pairs]
    resampled = [
        np.log(a.resampled(picks) / b.resampled(picks))
        for a, b in pairs
        for picks in [_picks(len(a.rounds))]
    ]
    return float(np.exp(np.mean(logs))), _interval(np.exp(np.mean(resampled, axis=0)))


def run(args: argparse.Namespace) -> Path:
    """Measures, and writes the result file and its picture."""
    # Nothing is timed, and programs compile faster without optimizations.
    jax.config.update("jax_disable_most_optimizations", True)
    start = time.perf_counter()
    found, aligned = measure_all(args)
    result = figures(found, aligned)
    settings = vars(args) | {
        "trees": {n: {k: Strategy.parse(v).name for k, v in t.items()} for n, t in TREES.items()},
        "sampling": SETTINGS | ALIGNED_SETTINGS,
        "seconds": round(time.perf_counter() - start, 1),
    }
    path = write_result("acceptance", settings, result, args.out)
    print(report({k: v for k, v in result.items() if not k.startswith("accept_length/")}))
    print(path)
    print(plots.draw(path))
    return path


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("rollout acceptance", __doc__, "acceptance")
    add_prompt_arguments(parser)
    parser.set_defaults(model=None, task="gsm8k", max_prompt_tokens=96)
    add = parser.add_argument
    add("--embedded", default="assets/sums", help="the embedded policy, always measured")
    begin = "what its answers begin with: without working, greedy ones are a guess of six tokens"
    add("--embedded_begin", metavar="TEXT", default=" so", help=begin)
    add("--prompts", type=int, default=16, help="held-out problems per policy")
    add("--samples", type=int, default=2, help="samples per prompt where the temperature is not 0")
    add("--max_tokens", type=int, default=64, help="response tokens at most")
    add("--max_batch", type=int, default=32, help="slots that run at once")
    add("--only", nargs="+", metavar="PART", help="arms with one of these in their name")
    scan = "scan over the layers, which compiles faster and decodes slower"
    add("--scan", action=argparse.BooleanOptionalAction, default=True, help=scan)
    add(
        "--quick",
        action="store_true",
        help="2 prompts of 8 tokens, no standalone models",
    )
    args = parser.parse_args(argv)
    if args.quick:
        args.prompts, args.samples, args.max_tokens, args.max_batch = 2, 2, 8, 4
    return args


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("rollout acceptance"):
        run(parse(argv))
