"""`python -m bench.acceptance`: accept length of each rule, tree and draft source.

    python -m bench.acceptance                                   the embedded policy
    python -m bench.acceptance --model DIR --data test.jsonl     and a GSM8K policy

Trees are compared at equal drafted nodes (4, 7 and 15), for every draft token costs the policy one
row to verify; the steps that a tree takes to draft are in its name. Sources: the policy's own head;
n-grams of the sample and of its siblings (other samples of its prompt); and two standalone models
made on the spot: the policy's first layers, untrained as such, and the policy itself, which shows
what a perfect draft would reach (as many as the rows, but for the samples' ends). Then
sampling-aligned drafting, on and off, under top-p and under penalties.

Accept length is 1 + accepted drafts / rounds, both summed over all samples of a setting; intervals
resample the prompts. A sample's last round is cut by its end, for all arms alike. In `coupled` mode
all arms of a setting decode the very same tokens; `block` and `recursive` draw their own. `greedy`
has no arms, for it is the coupled walk at temperature 0. Every rule meets every tree that it takes;
chain, spine and the wide dynamic tree stand for all where the head does not draft.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from bench import acceptance_plot
from bench.acceptance_arms import ALIGNED_SETTINGS, SETTINGS, TREES, Arm, aligned_arms, arms
from bench.command import add_prompt_arguments, bench_parser, heldout_prompts, user_errors
from bench.record import figure, write_result
from specjax import LLM, ModelConfig, SamplingParams, Strategy
from specjax.checkpoint import huggingface as hf
from specjax.tokenizer import load_tokenizer


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
    """Drafts accepted and rounds run, [prompts] each: what accept lengths are computed from."""

    accepted: np.ndarray
    rounds: np.ndarray

    @property
    def accept_length(self) -> float:
        return float(1 + self.accepted.sum() / self.rounds.sum())

    def resampled(self, picks: np.ndarray) -> np.ndarray:
        """Accept length over each row of `picks`, [resamples, prompts] indices: [resamples]."""
        return 1 + self.accepted[picks].sum(1) / self.rounds[picks].sum(1)

    def interval(self) -> list[float]:
        return _interval(self.resampled(_picks(len(self.rounds))))


def _picks(prompts: int) -> np.ndarray:
    """The same resamples every time, so that ratios of two arms resample the same prompts."""
    return np.random.default_rng(0).integers(prompts, size=(2000, prompts))


def _interval(values: np.ndarray) -> list[float]:
    return [float(x) for x in np.quantile(values, [0.025, 0.975])]


# --- measuring -----------------------------------------------------------------------------------

Found = dict[tuple[str, str, Arm], Counts]  # by policy, setting, arm


def measure(policy: Policy, arm: Arm, settings: Mapping[str, Mapping], args) -> dict[str, Counts]:
    """One arm under every setting.

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
    """The embedded policy, and the one that `--model` names."""
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
            drafts = {f"first_{layers}_layers": str(small), "itself": str(path)}
            truncated(cfg, params, layers, path, small)
        yield Policy(task, (cfg, params, head), prompts, drafts)


def truncated(cfg: ModelConfig, params, layers: int, tokenizer: str, path: Path) -> None:
    """Writes a checkpoint of a policy's first layers, with its embedding and final norm."""
    first = params | {"layers": jax.tree.map(lambda x: x[:layers], params["layers"])}
    small = cfg.replace(layers=cfg.layers[:layers], mtp_num_layers=0)
    hf.save_checkpoint(path, small, first, None, tokenizer)


def measure_all(args: argparse.Namespace) -> tuple[Found, Found, list[str]]:
    """Counts of all arms, of the aligned pairs, and the policies' names."""
    found, aligned, names = {}, {}, []
    with tempfile.TemporaryDirectory() as directory:
        for policy in policies(args, Path(directory)):
            names.append(policy.name)
            jobs = [(policy, arm, SETTINGS) for arm in arms(policy.sources)]
            jobs += [(policy, arm, ALIGNED_SETTINGS) for arm in aligned_arms()]
            jobs = [job for job in jobs if _wanted(job[1], args.only)]
            with _pool(args.workers) as run_all:
                results = list(run_all(functools.partial(_job, args), jobs))
            for (_, arm, settings), counts in zip(jobs, results, strict=True):
                into = found if settings is SETTINGS else aligned
                into.update({(policy.name, name, arm): c for name, c in counts.items()})
    if not found:
        raise ValueError(f"no arm has any of {args.only} in its name; leave --only out to see all")
    return found, aligned, names


def _job(args, job: tuple[Policy, Arm, Mapping[str, Mapping]]) -> dict[str, Counts]:
    """`measure`, with a line of what it found."""
    policy, arm, settings = job
    start = time.perf_counter()
    counts = measure(policy, arm, settings, args)
    seconds = time.perf_counter() - start
    lengths = "  ".join(f"{n} {c.accept_length:.2f}" for n, c in counts.items())
    off = "" if arm.aligned else " (not aligned)"
    print(f"{policy.name}  {arm.name}{off}: {lengths}  [{seconds:.1f} s]", flush=True)
    return counts


def _build_quickly() -> None:
    """Drafts are counted, nothing is timed: programs should be quickly built, and may be slow."""
    jax.config.update("jax_disable_most_optimizations", True)


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[Callable]:
    """A `map` over so many processes: threads can't share tracing, which is most of the work."""
    if workers == 1:
        yield map
        return
    spawn = multiprocessing.get_context("spawn")  # jax's threads don't survive a fork
    with concurrent.futures.ProcessPoolExecutor(workers, spawn, _build_quickly) as pool:
        yield pool.map


def _wanted(arm: Arm, only: Sequence[str] | None) -> bool:
    return not only or any(part in arm.name for part in only)


# --- figures -------------------------------------------------------------------------------------


def figures(found: Found, aligned: Found) -> dict[str, dict]:
    """Accept lengths with intervals, arms against the coupled chain, and what alignment gains."""
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
    """Geometric mean of ratios of accept lengths; both sides resample the same prompts."""
    logs = [np.log(a.accept_length / b.accept_length) for a, b in pairs]
    resampled = [
        np.log(a.resampled(picks) / b.resampled(picks))
        for a, b in pairs
        for picks in [_picks(len(a.rounds))]
    ]
    return float(np.exp(np.mean(logs))), _interval(np.exp(np.mean(resampled, axis=0)))


def print_tables(result: Mapping[str, Mapping], found: Found, names: Sequence[str]) -> None:
    """One table per policy; arms down, temperatures across."""
    console = Console(width=110)
    for policy in names:
        table = Table(title=f"{policy}: accept length", title_justify="left")
        for column in ("source", "rule", "tree", "nodes", "steps", *SETTINGS, "/ chain"):
            table.add_column(column, justify="left" if column in ("source", "tree") else "right")
        for arm in dict.fromkeys(arm for name, _, arm in found if name == policy):
            cells = [result[f"accept_length/{policy}/{s}/{arm.name}"]["value"] for s in SETTINGS]
            tau = f" tau {arm.tau}" if arm.strategy.is_dynamic else ""
            relative = result.get(f"relative/{arm.name}", {}).get("value")
            table.add_row(
                arm.source,
                arm.mode,
                arm.tree + tau,
                str(arm.nodes),
                str(arm.strategy.steps),
                *(f"{v:.2f}" for v in cells),
                "-" if relative is None else f"{relative:.3f}",
            )
        console.print(table)
    for key, entry in result.items():
        if key.startswith("aligned_gain/"):
            low, high = entry["interval"]
            console.print(
                f"{key}: {entry['value']:.3f} [{low:.3f}, {high:.3f}]", markup=False, soft_wrap=True
            )


def run(args: argparse.Namespace) -> Path:
    """Measures, writes the result file and its figure, prints the tables."""
    _build_quickly()
    start = time.perf_counter()
    found, aligned, names = measure_all(args)
    result = figures(found, aligned)
    settings = vars(args) | {
        "trees": {n: {k: Strategy.parse(v).name for k, v in t.items()} for n, t in TREES.items()},
        "sampling": SETTINGS | ALIGNED_SETTINGS,
        "seconds": round(time.perf_counter() - start, 1),
    }
    path = write_result("acceptance", settings, result, args.out)
    print_tables(result, found, names)
    print(path)
    print(acceptance_plot.draw(path))
    return path


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("acceptance", __doc__, "acceptance")
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
    add("--workers", type=int, default=2, help="processes that measure, an arm at a time")
    scan = "scan over the layers, which compiles faster and decodes slower"
    add("--scan", action=argparse.BooleanOptionalAction, default=True, help=scan)
    add(
        "--quick",
        action="store_true",
        help="2 prompts of 8 tokens, no standalone models, 1 process",
    )
    args = parser.parse_args(argv)
    if args.quick:
        args.prompts, args.samples, args.max_tokens, args.max_batch = 2, 2, 8, 4
        args.workers = 1
    return args


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("acceptance"):
        run(parse(argv))


if __name__ == "__main__":
    main()
