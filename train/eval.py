"""`python -m train.eval`: evaluates a policy, or a run's, on the sets that `train.rl` evaluates.

    python -m train.eval model=DIR eval.sets.aime.path=aime24.parquet eval.sets.aime.n=16
    python -m train.eval model=runs/rl step=40

Settings are those of `train.rl`; what is about training alone is refused on the command line, and
ignored in a file. Without `--config` a run is evaluated with its own configuration, `config.yaml`,
all of it but `out`: results are written to `runs/eval` unless `out` is typed.
It speculates as the rollouts of a run would, with the draft head that the run trained, even if the
run began with one in files or a random one. A `rollout.draft` that is typed decides instead.

It prints a table of the metrics of `train.rollout.evaluation`, and writes `<out>/eval.json` with
them and `<out>/eval-NAME.jsonl` with the samples of each set; those of an earlier evaluation are
moved to `<out>/earlier-1` and so on. It runs in one process. The held-out problems of the data are
evaluated if their settings say so, or there is no other set.
"""

from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C from here on
    from specjax import interrupts

    interrupts.begin("train.eval")

import dataclasses
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from specjax.checkpoint.weights import RUN, layout_of, load_model, read_config, tokenizer_dir
from specjax.command_line import ConfigError, given_in, parse_config, typed_in
from specjax.engine.programs import CompileProgress
from specjax.engine.request import Totals
from specjax.engine.sources import head_class, load_source
from specjax.interrupts import INTERRUPTED
from specjax.parallel import sharding
from specjax.parallel.sharding import MeshConfig
from specjax.settings import fingerprint, option
from specjax.shipped import find_shipped
from specjax.tokenizer import with_tokenizer_end
from specjax.versions import installed
from specjax.weights import load_tokenizer
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
from train.rollout.evaluation import Evaluated, evaluate
from train.rollout.groups import Group
from train.rollout.replicas import join_engines
from train.rollout.samples import HELD_OUT
from train.rollout.sets import ProblemSet, problem_sets
from train.run.describe import PACKAGES, data_files, git_state
from train.run.files import CHECKPOINTS, CONFIG_FILE, RUN_FILE, complete_steps
from train.run.start import USER_ERRORS, find_policy, say, settle_date
from train.schema import RLConfig

RESULT = "eval.json"

# Settings, and sections, that are about training alone.
_OF_TRAINING = (
    "seed", "steps", "max_failed_rewards", "algo", "optim", "draft", "packing", "mesh", "remat",
    "remat_policy", "logprob_chunk_size", "deterministic", "checkpoint", "log", "distributed",
    "dtype.params", "data.train_size", "data.unwinnable", "eval.every", "eval.before",
    "rollout.prompts", "rollout.n", "rollout.over_sample", "rollout.partial",
    "rollout.max_staleness", "rollout.exact_mode",
    "rollout.draft_vocab_every", "rollout.draft_vocab_decay",
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


def run(cfg: EvalConfig) -> dict[str, Any]:
    """Evaluates a policy, prints a table, writes the results, and returns them.

    Raises:
      ConfigError: settings do not fit together, the model or the rows.
    """
    _leave_training_out(cfg)
    revision, named = cfg.revision, find_policy(cfg)
    path, out = Path(cfg.model), Path(cfg.out)
    cfg.model, cfg.revision = named, revision  # as results name them
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
    _require_writable(out)
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
    draft = describe_drafting(cfg, drafting)
    say(draft)
    decoder, source, weights = as_rolled_out(cfg, model), None, None
    try:
        if drafting.spec is not None:
            decoder, source, weights = load_source(
                decoder, drafting.spec, loaded.head, tokenizer, mesh, loaded.policy
            )
        engine = join_engines(evaluation_engines(cfg, decoder, source, places), None)
    except (ValueError, OSError) as error:
        raise ConfigError(f"rollout: {error}") from error
    engine.set_params(loaded.policy, weights if engine.spec else None)
    for line in engine.engines[0].start_lines():
        say(line)
    features = chunk_features(cfg, model, evaluating=True)
    say(engine.warm_up((features,), CompileProgress(print)))
    total = sum(len(problem_set.problems) * problem_set.asked.n for problem_set in sets)
    with tqdm(total=total, unit="sample", dynamic_ncols=True, disable=None) as bar:

        def show(ended: int, totals: Totals) -> None:
            bar.update(ended - bar.n)
            bar.set_postfix_str(f"{totals.tokens / max(totals.seconds, 1e-9):.0f} tok/s")

        evaluated = evaluate(engine, sets, model.eos_token_ids, cfg.eval.seed, show)
    inputs.scorer.close()
    if (line := engine.slower_than_plain()) is not None:
        say(f"{line}; rollout.strategy=off decodes plainly")
    files = data_files(cfg if cfg.eval.problems else SimpleNamespace(data=None, eval=cfg.eval))
    results = {"model": named, "step": step, "draft": draft, "data": files}
    results |= _results(cfg, sets, evaluated)
    Console(highlight=False).print(_table(results))
    _write(out, results, evaluated)
    say(f"results: {out / RESULT}")
    return results


def _leave_training_out(cfg: EvalConfig) -> None:
    """Refuses settings of training that were typed, and leaves out what a file says of it.

    Raises:
      ConfigError: a setting that was typed changes nothing here.
    """
    for name in sorted(typed_in(cfg)):
        if name.startswith("distributed."):
            raise ConfigError(
                f"{name}: train.eval runs in one process, on the devices of one machine; leave it "
                "out. A policy that needs several machines is evaluated in its run, by eval.sets"
            )
        if any(name == key or name.startswith(f"{key}.") for key in _OF_TRAINING):
            raise ConfigError(
                f"{name} is about training, and train.eval trains nothing; leave it out"
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


# --- results -------------------------------------------------------------------------------------


def _results(cfg: EvalConfig, sets: Sequence[ProblemSet], evaluated: Evaluated) -> dict[str, Any]:
    """The results of an evaluation, as JSON, without what says which weights were evaluated."""
    totals, about = evaluated.totals, {}
    for problem_set in sets:
        name, prefix = problem_set.asked.name, problem_set.prefix
        metrics = {
            key.removeprefix(prefix): value
            for key, value in evaluated.metrics.items()
            if key.startswith(prefix)
            and (name is not None or key.split("/")[1] not in cfg.eval.sets)
        }
        params = dataclasses.asdict(problem_set.asked.sampling)
        about[name or HELD_OUT] = {
            "n": problem_set.asked.n,
            "reward": list(problem_set.scorer.names),
            "max_prompt_tokens": problem_set.asked.max_prompt_tokens,
            "sampling": {key: params[key] for key in sorted(params)},
            "metrics": metrics,
        }
    speed = {
        "seconds": totals.seconds,
        "tokens": totals.tokens,
        "tokens_per_sec": totals.tokens / max(totals.seconds, 1e-9),
    }
    if totals.steps and totals.rounds:
        speed["accept_length"] = totals.accept_length
    return {
        "seed": cfg.eval.seed,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": installed(PACKAGES),
        "code": git_state(Path.cwd()),
        "device": jax.devices()[0].device_kind,
        "sets": about,
        "speed": speed,
        "settings": fingerprint(cfg, tuple(k for k in _OF_TRAINING if "." not in k)),
    }


def _require_writable(out: Path) -> None:
    """Creates the directory of the results.

    Raises:
      ConfigError: it cannot be created, or no file can be written there.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(
            f"out={out}: expected a directory in which results can be written, got: {error}; set "
            "out to another one"
        ) from error


def _write(out: Path, results: dict[str, Any], evaluated: Evaluated) -> None:
    """Writes `eval.json`, and the samples of each set; files of earlier results are moved aside.

    Raises:
      ConfigError: a file cannot be written; the message names it.
    """
    try:
        _move_aside(out)
        (out / RESULT).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        for name, groups in evaluated.groups.items():
            with (out / f"eval-{name or HELD_OUT}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(
                    json.dumps(line) + "\n" for group in groups for line in _lines(group)
                )
    except OSError as error:
        raise ConfigError(
            f"results could not be written, the metrics are in the table above: {error}"
        ) from error


def _move_aside(out: Path) -> None:
    """Moves the files of an earlier evaluation to the first free of `earlier-1`, `earlier-2`, .."""
    files = [*out.glob(RESULT), *sorted(out.glob("eval-*.jsonl"))]
    if not files:
        return
    number = 1
    while (aside := out / f"earlier-{number}").exists():
        number += 1
    aside.mkdir()
    for file in files:
        file.rename(aside / file.name)
    say(f"results of an earlier evaluation in {out}: moved to {aside}")


def _lines(group: Group) -> list[dict[str, Any]]:
    problem = group.problem
    return [
        {
            "problem": problem.index,
            "place": problem.place,
            "sample": place,
            "prompt": problem.prompt,
            "answer": problem.answer,
            "completion": response.text,
            "reward": response.reward,
            "tokens": len(response.token_ids),
            "finish_reason": response.finish_reason,
        }
        for place, response in enumerate(group.responses)
    ]


def _table(results: dict[str, Any]) -> Table:
    """Makes a table with one column per set, and one row per metric."""
    table = Table(title=results["model"], title_justify="left")
    table.add_column("metric")
    sets = results["sets"]
    for name in sets:
        table.add_column(name, justify="right")
    for metric in dict.fromkeys(key for about in sets.values() for key in about["metrics"]):
        values = [about["metrics"].get(metric) for about in sets.values()]
        table.add_row(metric, *("-" if value is None else f"{value:.4g}" for value in values))
    return table


def _run_of(model: Path) -> Path | None:
    """Returns the directory of the run whose checkpoints, or export, a model is; else None.

    A directory of another program may have files of the same names.
    """
    if model.name == "hf" and os.path.isfile(model.parent / RUN_FILE):  # which raises nothing
        return model.parent
    run = model.parent if model.name == CHECKPOINTS else model
    return run if os.path.isdir(run / CHECKPOINTS) else None


def parse(argv: Sequence[str]) -> EvalConfig:
    """Returns the settings of a command line; those of a run's `config.yaml` are under them."""
    values = dict(argument.removeprefix("--").partition("=")[::2] for argument in argv)
    values |= {flag.removeprefix("--"): value for flag, value in zip(argv, argv[1:], strict=False)
               if flag.startswith("--") and "=" not in flag}  # fmt: skip
    model, of_run = Path(values.get("model") or os.devnull), []
    if "config" not in values and _run_of(model) == model and os.path.isfile(model / CONFIG_FILE):
        of_run = ["--config", str(model / CONFIG_FILE)]
    cfg, _ = parse_config(
        EvalConfig,
        [*of_run, *argv],
        "train.eval",
        "Evaluates a policy.",
        require=lambda cfg: cfg.data.require_path(),
    )
    if of_run and "out" not in typed_in(cfg):
        cfg.out = EvalConfig.out  # and not the directory of the run
    return cfg


def main(argv: Sequence[str] | None = None) -> None:
    """The command `python -m train.eval`."""
    cfg = parse([*map(str, sys.argv[1:] if argv is None else argv)])
    try:
        run(cfg)
    except USER_ERRORS as error:
        sys.exit(f"train.eval: error: {error}")
    except KeyboardInterrupt:
        print("\ntrain.eval: interrupted; nothing was written", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    interrupts.run(main)
