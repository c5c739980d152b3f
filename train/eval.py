"""`python -m train.eval`: evaluates a policy, or a run's, on the sets that `train.rl` evaluates.

    python -m train.eval model=DIR eval.sets.aime.path=aime24.parquet eval.sets.aime.n=16
    python -m train.eval model=runs/rl step=40

Settings are those of `train.rl`; what is about training alone is refused on the command line, and
ignored in a file. Without `--config` a run is evaluated with its own configuration, `config.yaml`,
all of it but `out`: results are written to `runs/eval` unless `out` is typed.
It speculates as the rollouts of a run would, with the draft head that the run trained, even if the
run began with one in files or a random one. A `rollout.draft` that is typed decides instead.

It prints a table of the metrics of `train.rollout.evaluation`, and writes the files of a run:
`metrics.jsonl`, `samples.jsonl` with all samples, `config.yaml` and `run.json`; metrics and samples
of an earlier evaluation are moved aside. It runs in one process. The held-out problems of the data
are evaluated if their settings say so, or there is no other set.
"""

from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C from here on
    from specjax import interrupts

    interrupts.begin("train.eval")

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specjax.checkpoint.weights import RUN, layout_of, load_model, read_config, tokenizer_dir
from specjax.command_line import ConfigError, given_in, typed_in
from specjax.engine.programs import CompileProgress
from specjax.engine.sources import head_class, load_source
from specjax.parallel import sharding
from specjax.parallel.sharding import MeshConfig
from specjax.settings import named_in, option, within
from specjax.shipped import find_shipped
from specjax.tokenizer import with_tokenizer_end
from specjax.weights import load_tokenizer
from train.cli import run_program
from train.data.checks import read_inputs
from train.programs import (
    as_computed,
    as_rolled_out,
    chunk_features,
    describe_drafting,
    evaluation_engines,
    make_meshes,
    settle_drafting,
    settle_length,
)
from train.rollout.evaluation import evaluate
from train.rollout.replicas import join_engines
from train.rollout.samples import SampleLog
from train.rollout.sets import problem_sets
from train.rollout.turns import Turns
from train.rollout_schema import SECTIONS
from train.run.describe import describe_run
from train.run.files import CHECKPOINTS, CONFIG_FILE, RUN_FILE, complete_steps
from train.run.live import sample_bar
from train.run.log import MetricsLogger
from train.run.start import find_policy, say, settle_date
from train.schema import RLConfig

# Settings, and sections, that are about training alone.
_OF_TRAINING = (
    "seed", "steps", "max_failed_rewards", "algo", "optim", "draft", "packing", "mesh", "remat",
    "remat_policy", "logprob_chunk_size", "deterministic", "checkpoint", "log", "distributed",
    "dtype.params", "data.train_size", "data.unwinnable", "eval.every", "eval.before",
    "rollout.prompts", "rollout.n", "rollout.over_sample", "rollout.partial",
    "rollout.max_staleness", "rollout.exact_mode",
)  # fmt: skip


@dataclass
class EvalConfig(RLConfig):
    """`python -m train.eval`: evaluates a policy on sets of problems.

    Attributes:
      model: Hugging Face directory or id of the policy, or the directory of a run.
      step: step of a run that is evaluated; null: the newest.
      out: directory of the results.
    """

    step: int | None = option(None, least=0)
    out: str = "runs/eval"


def run(cfg: EvalConfig) -> dict[str, float]:
    """Evaluates a policy, prints a table, writes the results, and returns the metrics.

    Raises:
      ConfigError: settings do not fit together, the model or the rows.
    """
    _leave_training_out(cfg)
    named = find_policy(cfg)
    path, out = Path(cfg.model), Path(cfg.out)
    if (out / CHECKPOINTS).is_dir():
        raise ConfigError(f"out={out} is the directory of a run; choose another for the results")
    try:
        _, places = make_meshes(cfg)
        target = read_config(path)
        settle_length(cfg, target)
        settle_date(cfg, _run_of(path))
        tokenizer = load_tokenizer(tokenizer_dir(path).absolute())
        inputs = read_inputs(cfg, tokenizer, named, target, trains=False)
        sets, about_sets = problem_sets(cfg, inputs, named)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for line in (*inputs.notes, *about_sets):
        say(line)
    if not sets:
        raise ConfigError("nothing is evaluated: set eval.sets, or data.path and eval.problems")
    out.mkdir(parents=True, exist_ok=True)
    mesh = places[0]  # from which the other replicas get their weights
    is_run = layout_of(path) == RUN
    step = cfg.step
    if is_run and step is None:
        run = path if (path / CHECKPOINTS).is_dir() else path.parent
        step = max(complete_steps(run), default=None)
    loaded = load_model(path, "auto", mesh, step)
    say(cfg.dtype.settle(loaded.stored, sharding.platform_of(mesh)).partition("; ")[2])
    model = as_computed(cfg, with_tokenizer_end(loaded.cfg, tokenizer))
    if loaded.head is not None:
        _draft_with_trained_head(cfg, is_run)
    drafting = settle_drafting(cfg, head_class(loaded.head), model)
    say(describe_drafting(cfg, drafting))
    decoder, source, weights = as_rolled_out(cfg, model), None, None
    try:
        if drafting.spec is not None:
            decoder, source, weights = load_source(
                decoder, drafting.spec, loaded.head, tokenizer, mesh, loaded.policy
            )
        engine = join_engines(evaluation_engines(cfg, decoder, source, places), None)
        engine.set_params(loaded.policy, weights if engine.spec else None)
    except (ValueError, OSError) as error:
        raise ConfigError(named_in(SECTIONS, error)) from error
    for line in engine.engines[0].start_lines():
        say(line)
    features = chunk_features(cfg, model, evaluating=True)
    say(engine.warm_up((features,), CompileProgress(print)))
    with sample_bar(sum(len(each.problems) * each.asked.n for each in sets)) as show:
        ends, turns = model.eos_token_ids, None
        if inputs.environments is not None:
            turns = Turns(inputs.environments, inputs.prompts, ends, cfg.max_turns, "heldout")
        evaluated = evaluate(engine, sets, ends, cfg.eval.seed, show, turns)
    inputs.scorer.close()
    if (line := engine.slower_than_plain()) is not None:
        say(f"{line}; rollout.strategy=off decodes plainly")
    metrics, totals = evaluated.metrics, evaluated.totals
    metrics["eval/tokens_per_sec"] = totals.tokens / max(totals.seconds, 1e-9)
    if totals.steps and totals.rounds:
        metrics["eval/accept_length"] = totals.accept_length
    describe_run(out, cfg, "train.eval", named, step or 0, resumed=False)
    with MetricsLogger(out, live=False) as log, SampleLog(out, None, 0, tokenizer, ()) as samples:
        log.log(step or 0, metrics)
        for problem_set in sets:
            name = problem_set.asked.name
            samples.log_evaluation(
                step or 0, name, problem_set.scorer.labels, evaluated.groups[name]
            )
    for key, value in metrics.items():
        say(f"{key:<40} {value:.4g}")
    say(f"results: {out}, python -m train.view {out} shows them")
    return metrics


def _leave_training_out(cfg: EvalConfig) -> None:
    """Refuses settings of training that were typed, and leaves out what a file says of it.

    Raises:
      ConfigError: a setting that was typed changes nothing here.
    """
    for name in sorted(typed_in(cfg)):
        if any(within(name, key) for key in _OF_TRAINING):
            raise ConfigError(
                f"{name} is about training, and train.eval trains nothing, in one process; leave "
                "it out"
            )
    if cfg.draft.mode != "none":
        cfg.draft.mode = "auto"
    cfg.draft.spot.enabled = False
    cfg.mesh = MeshConfig()  # rollout.replicas and rollout.tp say which devices evaluate
    names = {name for name in given_in(cfg) if name.startswith("data.")} | {"eval.problems"}
    if cfg.eval.sets and not names & given_in(cfg):
        cfg.eval.problems = 0  # of the embedded task, which no setting names
    if "revision" not in typed_in(cfg) and find_shipped(cfg.model).exists():
        cfg.revision = None  # of the model that the run began with


def _draft_with_trained_head(cfg: EvalConfig, is_run: bool) -> None:
    """Drafts with the head in the checkpoint where settings name the one that training began with.

    Args:
      cfg: settings, whose `rollout.draft` is replaced unless it was typed.
      is_run: whether the checkpoint, which has a head, is that of a run.
    """
    began_with = cfg.rollout.draft
    if "rollout.draft" in typed_in(cfg) or began_with in ("auto", "ngram"):
        return
    if is_run or began_with == "random":
        cfg.rollout = dataclasses.replace(cfg.rollout, draft="checkpoint")


def _run_of(model: Path) -> Path | None:
    """Returns the directory of the run whose checkpoints, or export, a model is; else None.

    A directory of another program may have files of the same names.
    """
    if model.name == "hf" and os.path.isfile(model.parent / RUN_FILE):  # which raises nothing
        return model.parent
    run = model.parent if model.name == CHECKPOINTS else model
    return run if os.path.isdir(run / CHECKPOINTS) else None


def main(argv: Sequence[str] | None = None) -> None:
    """The command `python -m train.eval`; without `--config` a run's own settings are read."""
    argv = [*map(str, sys.argv[1:] if argv is None else argv)]
    values = dict(argument.removeprefix("--").partition("=")[::2] for argument in argv)
    values |= {flag.removeprefix("--"): value for flag, value in zip(argv, argv[1:], strict=False)
               if flag.startswith("--") and "=" not in flag}  # fmt: skip
    model, of_run = Path(values.get("model") or os.devnull), []
    if "config" not in values and _run_of(model) == model and os.path.isfile(model / CONFIG_FILE):
        of_run = ["--config", str(model / CONFIG_FILE)]

    def evaluates(cfg: EvalConfig) -> None:
        if "out" not in typed_in(cfg):
            cfg.out = EvalConfig.out  # and not the directory of the run whose settings these are
        run(cfg)

    description = "Evaluates a policy."
    run_program(EvalConfig, [*of_run, *argv], "train.eval", description, evaluates, resumes=False)


if __name__ == "__main__":
    interrupts.run(main)
