"""`python -m bench.rl COMPARISON [--config FILE] [key=value ...]`: training runs from one start.

    drafts      GRPO without speculation, and with a frozen, an online and a random online head: are
                tokens, rewards and policies the same bits, and how fast is each
    schedule    steps that wait for all samples, and over-sampling with partial rollouts
    gaps        draft training after rollouts, and in the gaps of two replicas of one thread each
    objectives  the presets grpo, dr_grpo, gspo and cispo
    products    rollouts of packed weights beside a trainer in full precision: mismatch and reward
    losses      heads trained before RL by `train.draft` with each loss: accept length
    mxfp4_heads, int4_heads
                heads trained on the states of the full policy, and of the packed one, which both
                draft for: accept length
    rl, draft   arms of your own of `train.rl` and `train.draft`

Settings are those of the program, for all arms. An arm of your own is `--arm NAME key=value ..`,
behind the settings of all. The arms of `train.rl` live in one process and take turns step by step,
in an order that alternates, so that the machine's noise affects all alike. Where a comparison says
so, digests of tokens, rewards and parameters are compared after every step; the exit status is 1 if
they differ.

Figures, NAME being one of `METRICS`:

    first/NAME/ARM, last/NAME/ARM    at the first and the last step that has it; mean of the seeds,
                                     the smallest and the largest
    mean/NAME/ARM                    over the steps that are timed; quartiles
    ratio/NAME/ONE/OTHER             paired by step, median
    difference/heldout_reward/ONE/OTHER    at the end, mean of the seeds; two standard errors
    steps_identical                  steps at which all arms had the same digests

Writes `rl_<COMPARISON>.json`, `.jsonl` (a record per seed, step and arm) and `.png` to --results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import yaml

from bench import plots
from bench.command import user_errors
from bench.record import RESULTS, figure, ratio_figure, report, turns, write_result
from specjax.command_line import Yaml, parse_config
from specjax.settings import values_of
from specjax.shipped import find_shipped
from train import draft
from train.draft_schema import DraftRunConfig
from train.heads import curve as draft_curve
from train.heads.losses import DRAFT_LOSSES
from train.schema import RLConfig
from train.trainer import Trainer

# Name in results -> metric of `train.rl`.
METRICS = {
    "reward": "rollout/reward",
    "heldout_reward": "eval/reward",
    "accept_length": "rollout/spec_accept_length",
    "draft_loss": "train/mtp_loss",
    "entropy": "train/entropy",
    "mismatch": "train/train_rollout_logprob_abs_diff",
    "mismatch_kl": "train/train_rollout_kl",
    "rate": "rollout/tokens_per_sec",
    "longest_rate": "rollout/longest_sample_tokens_per_sec",
    "rollout_seconds": "time/rollout",
    "train_seconds": "time/train",
    "draft_seconds": "time/draft",
    "stale_token_share": "rollout/stale_token_share",
    "updates": "draft/updates",
    "updates_in_gaps": "draft/updates_in_gaps",
}
BOTH = "rollout_and_draft_seconds"
TIMED = ("rate", "longest_rate", "rollout_seconds", BOTH)
PANELS = {
    "accept_length": "Accept length",
    "accept_length/temperature_1": "Held-out accept length at temperature 1",
    "reward": "Reward of samples",
    "heldout_reward": "Held-out reward",
    "mismatch": "|log-probability| of rollout - trainer",
    "rate": "Rollout, tokens/s",
    BOTH: "Seconds of rollout and draft training",
}
DEVICES = "--xla_force_host_platform_device_count"


class Comparison(NamedTuple):
    """Arms of one program.

    Attributes:
      arms: settings of each arm.
      config: default of `--config`.
      settings: of all arms.
      equal: the digests that must be those of the first arm.
      ratios: pairs of arms whose times are compared.
      seeds: number of runs of each arm.
      devices: number of simulated devices of one thread each; 0: those that are there.
    """

    arms: Mapping[str, Sequence[str]]
    config: str | None = None
    settings: Sequence[str] = ()
    equal: Sequence[str] = ()
    ratios: Sequence[tuple[str, str]] = ()
    seeds: int = 1
    program: str = "rl"
    devices: int = 0


TIS = "algo.tis=true"
FROM_NOTHING = ("draft.optim.lr=3e-3", "draft.epochs=6", "draft.max_microbatches=0")
COMPARISONS = {
    "drafts": Comparison(
        {
            "none": ["rollout.strategy=off"],
            "frozen": ["draft.mode=frozen"],
            "online": ["draft.mode=online"],
            "online_random": ["draft.mode=online", "rollout.draft=random", *FROM_NOTHING],
        },
        "configs/arms.yaml",
        equal=("tokens", "rewards", "policy"),
        ratios=[
            ("online", "none"),
            ("online", "frozen"),
            ("frozen", "none"),
            ("online_random", "none"),
        ],
    ),
    "schedule": Comparison(
        {"waiting": ["rollout.over_sample=1.0", "rollout.partial=false"], "partial": []},
        "configs/schedule.yaml",
        ratios=[("partial", "waiting")],
        seeds=3,
    ),
    "gaps": Comparison(
        {"after": ["draft.spot.gaps=false"], "gaps": []},
        "configs/spot.yaml",
        equal=("tokens", "rewards", "policy", "head"),
        ratios=[("gaps", "after")],
        devices=2,
    ),
    "objectives": Comparison(
        {
            name: [f"algo={name}", "rollout.strategy=off"]
            for name in ("grpo", "dr_grpo", "gspo", "cispo")
        },
        "configs/sums.yaml",
        ["steps=10", "algo.updates_per_rollout=2", "eval.problems=256"],
        seeds=3,
    ),
    "products": Comparison(
        {
            "full": [TIS],
            **{name: [TIS, f"rollout.products={name}"] for name in ("int8", "fp8", "mxfp4")},
            "mxfp4_without_tis": ["rollout.products=mxfp4"],
        },
        "configs/sums.yaml",
        [
            "steps=8",
            "rollout.prompts=8",
            "rollout.max_batch=8",
            "packing.rows=4",
            "eval.problems=256",
        ],
        ratios=[("mxfp4", "full"), ("mxfp4", "mxfp4_without_tis")],
        seeds=3,
    ),
    "environments": Comparison(
        {
            "calculator": [],
            "guess": [
                "environment=guess",
                "max_turns=4",
                "rollout.stop=null",
                "rollout.max_tokens=32",
            ],
        },
        "configs/environment.yaml",
    ),
    "losses": Comparison(
        {loss: [f"draft.loss={loss}"] for loss in DRAFT_LOSSES},
        "configs/draft.yaml",
        ["kind=mtp", "export=none"],
        program="draft",
    ),
    **{
        f"{name}_heads": Comparison(
            {"full": [f"eval.policy_products={name}"], "packed": [f"products={name}"]},
            "configs/draft.yaml",
            ["kind=mtp", "export=none"],
            seeds=3,
            program="draft",
        )
        for name in ("mxfp4", "int4")
    },
    "rl": Comparison({}),
    "draft": Comparison({}, program="draft"),
}


def digests_of(trainer: Trainer, tokens: str) -> dict[str, str]:
    """Returns digests of the step that a trainer has just done: equal for bit-identical steps."""
    rewards = np.array([group.rewards for group in trainer.last_rollout])
    trees = {"rewards": rewards, "policy": trainer.params, "head": trainer.head}
    digests = {"tokens": tokens}
    for name, tree in trees.items():
        leaves = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))
        digests[name] = hashlib.sha256(leaves).hexdigest()
    return digests


class Run(NamedTuple):
    """One run: its arm, its number among the seeds, and its settings."""

    arm: str
    seed: int
    cfg: Any

    def record(self, step: int, values: Mapping[str, Any]) -> dict:
        return {"arm": self.arm, "seed": self.seed, "step": step, **values}


def run_rl(runs: Sequence[Run], equal: Sequence[str], write: Callable[[dict], None]) -> None:
    """Runs `train.rl` of all arms with one seed, step by step in turns.

    Args:
      write: takes a record for each step and arm, and of evaluations before and at the end.
    """
    trainers = {run.arm: Trainer(run.cfg) for run in runs}
    first, steps = next(iter(trainers.values())), runs[0].cfg.steps
    for run in runs:
        if equal:  # one compiled update of the policy serves all
            trainers[run.arm].policy = first.policy
        trainers[run.arm].warm_up()
        if run.cfg.eval.problems:
            write(run.record(0, {"heldout_reward": trainers[run.arm].evaluate()["eval/reward"]}))
    for step, run in turns(runs, steps):
        trainer = trainers[run.arm]
        metrics = trainer.step()
        if run.cfg.eval.problems and step + 1 == steps:
            metrics |= trainer.evaluate()
        found = {name: metrics[m] for name, m in METRICS.items() if metrics.get(m) is not None}
        found[BOTH] = metrics["time/rollout"] + metrics.get("time/draft", 0.0)
        if equal:
            made = digests_of(trainer, metrics["rollout/tokens_sha"])
            found["digests"] = {name: made[name] for name in equal}
        write(run.record(step + 1, found))


def run_draft(runs: Sequence[Run], equal: Sequence[str], write: Callable[[dict], None]) -> None:
    """Runs `train.draft` of all arms with one seed, one after the other; a run is continued."""
    for run in runs:
        out = Path(run.cfg.out)
        draft.train(run.cfg, resume=(out / draft.SAMPLES).exists())
        curve = json.loads((out / draft_curve.FILE).read_text())
        for point in curve["points"]:
            found = {"tokens": point["tokens"]}
            for at, length in point["accept_length"].items():
                found[f"accept_length/temperature_{at}"] = length
                found[f"ngram/temperature_{at}"] = curve["ngram"][at]
            write(run.record(point["step"], found))


PROGRAMS = {"rl": (RLConfig, run_rl), "draft": (DraftRunConfig, run_draft)}


# --- figures -------------------------------------------------------------------------------------


def figures_of(records: Sequence[Mapping], comparison: Comparison, untimed: int) -> dict:
    """Computes the figures of all runs.

    Args:
      untimed: number of first steps that are left out of means and ratios: they compile.
    """
    result = identical(records) if comparison.equal else {}
    arms = list(dict.fromkeys(record["arm"] for record in records))
    skipped = ("arm", "seed", "step", "digests")
    names = [n for n in dict.fromkeys(n for record in records for n in record) if n not in skipped]
    for name in names:
        for arm in arms:
            ends = [(run[0], run[-1]) for run in _runs(records, arm, name) if run]
            for which, values in zip(("first", "last"), zip(*ends, strict=True), strict=False):
                unit, spread = f"mean of {len(values)} seeds", [min(values), max(values)]
                key, mean = f"{which}/{name}/{arm}", float(np.mean(values))
                result[key] = figure(mean, unit, spread if len(values) > 1 else None)
            if values := [v for run in _runs(records, arm, name, untimed) for v in run]:
                spread = [float(np.quantile(values, q)) for q in (0.25, 0.75)]
                mean = float(np.mean(values))
                result[f"mean/{name}/{arm}"] = figure(mean, "of steps; quartiles", spread)
    for one, other in comparison.ratios:
        for name in [name for name in TIMED if name in names]:
            mine, theirs = (sum(_runs(records, arm, name, untimed), []) for arm in (one, other))
            if mine and len(mine) == len(theirs):
                ratio = ratio_figure(mine, theirs, "median of steps")
                result[f"ratio/{name}/{one}/{other}"] = ratio
        ends = [
            [run[-1] for run in _runs(records, a, "heldout_reward") if run] for a in (one, other)
        ]
        if all(ends):
            differences = np.subtract(*ends)
            mean, count, half = float(differences.mean()), len(differences), 0.0
            if count > 1:
                half = 2 * float(differences.std(ddof=1)) / count**0.5
            result[f"difference/heldout_reward/{one}/{other}"] = figure(
                mean, f"mean of {count} seeds; two standard errors", [mean - half, mean + half]
            )
    return result


def _runs(records: Sequence[Mapping], arm: str, name: str, after: int = -1) -> list[list[float]]:
    """Returns a metric's values by step of each of an arm's runs, at steps behind `after`."""
    found: dict[int, list[float]] = {}
    for record in sorted(records, key=lambda record: record["step"]):
        if record["arm"] == arm and record["step"] > after and name in record:
            found.setdefault(record["seed"], []).append(record[name])
    return list(found.values())


def identical(records: Sequence[Mapping]) -> dict[str, dict]:
    """Counts the steps at which all arms had the digests of the first one."""
    steps: dict[tuple, list[Mapping]] = {}
    for record in records:
        if "digests" in record:
            steps.setdefault((record["seed"], record["step"]), []).append(record["digests"])
    same = [all(digests == found[0] for digests in found) for found in steps.values()]
    found = {"steps_identical": figure(sum(same), f"of {len(same)} steps")}
    if False in same:
        seed, step = list(steps)[same.index(False)]
        why = f"seed {seed}, step {step}; the records have the digests"
        found["first_difference"] = figure(why, "where arms differ")
    return found


# --- command line --------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Comparison, list[str]]:
    """Returns the arguments, the comparison, and the settings of all its arms."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.rl",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("comparison", choices=COMPARISONS, metavar="COMPARISON", help=", ".join(COMPARISONS))
    add("--config", metavar="FILE", help="YAML file of settings of all arms")
    add("--arm", nargs="+", action="append", default=[], metavar=("NAME", "key=value"))
    add("--arms", nargs="+", metavar="NAME", help="only these arms of the comparison")
    add("--seeds", type=int, help="runs of each arm; they begin at `seed` and `data.seed`")
    add("--untimed", type=int, default=1, help="first steps left out of timings: they compile")
    add("--name", help="of the result's files; default: rl_<COMPARISON>")
    add("--results", default=str(RESULTS), metavar="DIR", help="directory of the result's files")
    args, settings = parser.parse_known_args(argv)
    found = COMPARISONS[args.comparison]
    arms = {name: words for name, *words in args.arm} or found.arms or {"run": []}
    if unknown := set(args.arms or ()) - arms.keys():
        parser.error(
            f"--arms: expected some of {', '.join(arms)}, got {', '.join(sorted(unknown))}"
        )
    arms = {name: words for name, words in arms.items() if name in (args.arms or arms)}
    ratios = [pair for pair in found.ratios if set(pair) <= set(arms)]
    if args.arm:
        ratios = [(name, next(iter(arms))) for name in list(arms)[1:]]
    args.config = args.config or found.config
    return args, found._replace(arms=arms, ratios=ratios), [*found.settings, *settings]


def runs_of(
    comparison: Comparison, config: str | None, settings: Sequence[str], number: int, out: Path
) -> list[Run]:
    """Returns the runs of all arms with one seed; they write below `out`."""
    schema, _ = PROGRAMS[comparison.program]
    out.mkdir(parents=True, exist_ok=True)
    # In a file: an arm may leave settings of it without effect, and must use those of its own.
    of_all = yaml.load(find_shipped(config).read_text(), Yaml) if config else {}
    for word in settings:
        key, _, value = word.removeprefix("--").partition("=")
        *sections, last = getattr(schema, "aliases", {}).get(key, key).split(".")
        at = of_all
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = yaml.load(value, Yaml)
    (out / "settings.yaml").write_text(yaml.safe_dump(of_all), encoding="utf-8")
    found = []
    for arm, words in comparison.arms.items():
        argv = ["--config", str(out / "settings.yaml"), *words]
        cfg, _ = parse_config(schema, argv, f"bench.rl, arm {arm}")
        cfg.seed, cfg.data.seed = cfg.seed + number, cfg.data.seed + number
        cfg.out = str(out / f"{arm}-{number}")
        found.append(Run(arm, number, cfg))
    return found


def run(args: argparse.Namespace, comparison: Comparison, settings: Sequence[str]) -> dict:
    """Runs all arms and seeds, writes the three files and returns the figures."""
    name = args.name or f"rl_{args.comparison}"
    path = Path(args.results) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    records: list[dict] = []
    with path.with_suffix(".jsonl").open("w", encoding="utf-8") as stream:

        def write(record: dict) -> None:
            records.append(record)
            print(json.dumps(record), file=stream, flush=True)
            shown = [f"{k} {v:.4g}" for k, v in record.items() if k in PANELS]
            print(f"{record['arm']} {record['seed']}.{record['step']}:", *shown, flush=True)

        for number in range(args.seeds or comparison.seeds):
            runs = runs_of(comparison, args.config, settings, number, Path("runs", name))
            PROGRAMS[comparison.program][1](runs, comparison.equal, write)
    figures = figures_of(records, comparison, args.untimed)
    said = values_of(runs[0].cfg) | {"arms": comparison.arms, "untimed": args.untimed}
    write_result(name, said | {"model": Path(runs[0].cfg.model).name}, figures, path)
    plots.draw_runs(records, PANELS, path.with_suffix(".png"))
    print(report(figures), path, sep="\n")
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    args, comparison, settings = parse(argv)
    flags = os.environ.get("XLA_FLAGS", "")
    if comparison.devices and DEVICES not in flags:  # which jax reads when it is imported
        own = f"{DEVICES}={comparison.devices} --xla_cpu_multi_thread_eigen=false"
        os.environ["XLA_FLAGS"] = f"{flags} {own}".strip()
        words = sys.argv[1:] if argv is None else argv
        os.execv(sys.executable, [sys.executable, "-m", "bench.rl", *words])
    with user_errors("rl"):
        figures = run(args, comparison, settings)
    if "first_difference" in figures:
        sys.exit(f"bench.rl: not the same run: {figures['first_difference']['value']}")


if __name__ == "__main__":
    main()
