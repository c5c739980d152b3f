"""`python -m train.rl`: GRPO with speculative rollouts and a draft head trained beside the policy.

One step (`Trainer.step`):

    problems  -> rollout (train.collect, specjax.engine): speculative, with the tokens of plain
                 decoding, until the groups to learn from are certain (train.groups)
              -> rewards (train.scoring), advantages relative to the group (train.objectives)
              -> packed micro-batches (train.packing)
              -> policy update(s) (train.policy, train.loss), which return the policy's states, too
              -> draft update on those states (train.heads): its own program, optimizer, clip norm
              -> both sets of weights back to the engine
              -> metrics, checkpoint

The result depends on settings and seeds and not on time, except for the last bits that
`precision_warning` describes. With `coupled` acceptance it does not depend on the draft head.
"""

from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C from here on
    from specjax import interrupts

    interrupts.begin("train.rl")

import contextlib
import copy
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from specjax import determinism
from specjax.checkpoint.store import Checkpointer
from specjax.checkpoint.weights import Head, save_model
from specjax.command_line import ConfigError
from specjax.config import ModelConfig
from specjax.engine.engine import LEAST, advice
from specjax.engine.programs import CompileProgress
from specjax.engine.request import InvalidLogitsError
from specjax.interfaces import Draft
from specjax.models.generation_config import sampling_defaults
from specjax.parallel import distributed, sharding
from train import plot, processes
from train.cli import (
    CHECKPOINTS,
    USER_ERRORS,
    Interrupted,
    Progress,
    can_resume,
    interruptible,
    recovery_advice,
    require_finite,
    run_program,
    settle_date,
)
from train.describe import describe_run, settings_of
from train.evaluation import described
from train.head_files import HeadCheckpoints
from train.inputs import DropWarning
from train.log import MetricsLogger, read_metrics
from train.rollout_schema import SPELL
from train.samples import SampleLog
from train.schema import RLConfig
from train.scoring import RewardsFailedError
from train.trainer import Trainer


class Terminated(RuntimeError):
    """The job got SIGTERM, and has saved its state."""


class StepWarnings:
    """Warns about speculation without gain, and rewards or draft training without effect.

    Args:
      patience: number of steps without gain before the warning about speculation. It stands in
        place of the engine's, which counts rounds: a head may learn.
      source: what drafts.
    """

    def __init__(self, patience: int = 3, source: Draft | None = None):
        self.patience, self.flat, self.zero_shown = patience, 0, False
        self._advice = advice(source, SPELL)

    def check(
        self,
        step: int,
        metrics: dict[str, float],
        zero: str | None = None,
        short: str | None = None,
    ) -> list[str]:
        """Returns the warnings of a step.

        Args:
          step: number of the step.
          metrics: metrics of the step.
          zero: example of a response while every response of the run scored 0; printed once.
          short: warning that dynamic sampling did not fill the batch, if so.
        """
        warnings = []
        length = metrics.get("rollout/drafted_accept_length")
        if length is not None:
            self.flat = self.flat + 1 if length < LEAST else 0
            if self.flat == self.patience:
                warnings.append(
                    f"accept length has been {length:.2f} for {self.flat} steps: speculation only "
                    f"costs time. {self._advice}"
                )
        if zero is not None and not self.zero_shown:
            self.zero_shown = True
            warnings.append(f"every response so far scored 0, so the policy learns nothing; {zero}")
        elif short is not None:
            warnings.append(short)
        elif metrics.get("train/microbatches") == 0:
            warnings.append(
                "no sample is trained on: all reached rollout.max_tokens, and algo.mask_truncated "
                "leaves these out. Raise rollout.max_tokens"
            )
        elif metrics.get("rollout/zero_std") == 1:
            warnings.append(
                "no group has differing rewards: the policy learns nothing from this step. Is the "
                "task too hard or too easy for it?"
            )
        if metrics.get("train/mtp_tokens") == 0:
            warnings.append("draft training saw no token: is every response a single token?")
        elif metrics.get("train/mtp_update_norm") == 0:
            warnings.append("draft training changed nothing: draft.optim.lr or clip_norm is 0?")
        return warnings


def run(cfg: RLConfig, resume: bool = False, resume_step: int | None = None) -> Path:
    """Trains to step `cfg.steps` and returns the path of the plot.

    Every process of a job calls it; the first process writes logs, plot and export.
    """
    out = Path(cfg.out)
    # Before the first call that starts jax's backends, and so before processes can agree on a
    # directory. Each finds the same one, because they share `out`, which `processes` checks.
    if cfg.deterministic:
        try:
            determinism.set_up(out if resume else _fresh(out))
        except ValueError as error:
            raise ConfigError(str(error)) from error
    distributed.start(cfg.distributed, max(cfg.mesh.size, cfg.rollout_devices))
    settle_date(cfg, out if resume else None)
    if not resume:
        out = distributed.of_first(lambda: _fresh(out), "run directory")
        if out != Path(cfg.out):  # files of the run, and those that name it, are of this directory
            cfg = copy.copy(cfg)
            cfg.out = str(out)
    resume = resume and can_resume(out, resume_step, _say)
    ends = (*USER_ERRORS, Terminated, Interrupted)
    with processes.watched(cfg, out, ends), interruptible(out) as progress:
        return _train(cfg, out, resume, resume_step, progress)


def _train(
    cfg: RLConfig, out: Path, resume: bool, resume_step: int | None, progress: Progress
) -> Path:
    started = time.perf_counter()
    trainer = Trainer(cfg)
    for line in trainer.notes:
        _say(line)
    _say(trainer.drafting)
    trainer.on_program = CompileProgress(_say)
    keep = cfg.checkpoint.keep_last
    heads = HeadCheckpoints(out / "draft", trainer.model, keep, trainer.about_head)
    with Checkpointer(out / CHECKPOINTS, keep) as checkpoints, heads:
        strategies = len(trainer.engine.runner.programs)
        _say(compiling_line(cfg, trainer.programs_to_compile(), strategies))
        if resume:  # which compiles, too
            trainer.restore(checkpoints, resume_step)
        for line in trainer.start_lines():
            _say(line)
        if line := generation_config_line(cfg, trainer.model):
            _say(line)
        _say(trainer.dtype_line)
        if cfg.deterministic:
            _say(determinism.line())
        elif resume and (warning := determinism.without()):
            _say(f"WARNING: {warning}")
        _say(f"rollouts: {trainer.warm_up()}")
        dtype = trainer.engine.runner.cfg.run.compute_dtype
        for warning in (nothing_learnt(cfg), precision_warning(cfg, dtype), slots_warning(cfg)):
            if warning:
                _say(f"WARNING: {warning}")
        first = trainer.done_steps + 1
        progress.steps = lambda: (trainer.done_steps, cfg.steps)
        for line in sharding.replicated_dims(trainer.mesh, trainer.params, trainer.policy.axes):
            _say(f"kept whole on every device: {line}")
        _say(f"run {out}: steps {first} to {cfg.steps}, set-up {_since(started)}")
        begin = first if resume else None
        describe_run(out, cfg, "train.rl", cfg.model, first, resume)
        with (
            MetricsLogger(
                out,
                cfg.log.tensorboard,
                cfg.log.wandb,
                begin,
                live=cfg.log.live,
                settings=settings_of(cfg),
                steps=cfg.steps,
            ) as log,
            SampleLog(
                out,
                cfg.log.samples,
                cfg.seed,
                trainer.tokenizer,
                trainer.scorer.labels,
                begin,
            ) as samples,
        ):
            _steps(cfg, trainer, log, samples, checkpoints, heads, resumed=resume)
            if distributed.is_first():
                log.summary_table(summary(read_metrics(out)), title=f"{out}")
    if cfg.checkpoint.export:
        _export(cfg, trainer, out / "hf")
    picture = plot.draw(out) if distributed.is_first() else out / plot.PICTURE
    if (line := trainer.engine.slower_than_plain()) is not None:
        _say(f"{line}; rollout.strategy=off decodes plainly")
    _say(f"total {_since(started)}\nplot: {picture}\npage: python -m train.view {out}")
    return picture


def generation_config_line(cfg: RLConfig, model: ModelConfig) -> str | None:
    """The line at start if generation_config.json differs from `rollout.*`; else None."""
    own = cfg.rollout.sampling_params()
    asked = sampling_defaults(model.generation)
    asked = {name: value for name, value in asked.items() if value != getattr(own, name)}
    if max(own.top_k, asked.get("top_k", 0)) <= 0:
        asked.pop("top_k", None)  # 0 and -1 both keep all tokens
    names = [*asked]
    if ("do_sample", False) in model.generation and own.temperature > 0:
        asked["do_sample"] = False
        names += [] if "temperature" in asked else ["temperature"]
    if not asked:
        return None
    ours = ", ".join(f"rollout.{name}={getattr(own, name)}" for name in names)
    theirs = ", ".join(f"{name}={value}" for name, value in asked.items())
    return (
        f"rollouts sample with {ours}, and not as generation_config.json asks ({theirs}): the "
        "policy is trained on its own samples; set these to sample as the file asks"
    )


def compiling_line(cfg: RLConfig, programs: int, strategies: int) -> str:
    """The line before rollouts are compiled, which may take minutes.

    Args:
      cfg: settings of the run.
      programs: number of programs to compile.
      strategies: number of strategies that they are for.
    """
    fewer = ["a smaller rollout.max_batch"] if cfg.rollout.max_batch > 1 else []
    if strategies > 1:
        fewer = ["rollout.strategy=off", "fewer in rollout.control.strategies", *fewer]
    elif cfg.rollout.spec() is not None and not cfg.rollout.spec().is_off:
        fewer = ["rollout.strategy=off (smaller ones)", *fewer]
    advice = f"; to compile less: {', or '.join(fewer)}" if fewer else ""
    return f"rollouts: compiling {programs} programs, which may take minutes{advice}"


def precision_warning(cfg: RLConfig, dtype: str) -> str | None:
    """The warning that tokens or parameters may depend on time; None if they cannot.

    Args:
      cfg: settings of the run.
      dtype: dtype in which rollouts compute.
    """
    if not cfg.rollout.by_the_clock:
        return None
    chosen = "and rollout.control or rollout.replicas choose these by time or load"
    roll, static = cfg.rollout, "rollout.control.controller=static"
    if roll.draft != "ngram":  # by default these have a controller beside a strategy
        static = f"rollout.strategy={roll.spec().own_strategy} without rollout.control"
    exact = f"rollout.invariant=true, or {static} and rollout.replicas=1"
    if cfg.algo.tis:
        return (
            "algo.tis weighs the loss by the log-probabilities of rollouts, whose last bits depend "
            f"on the strategy and the batch that a token is sampled in, {chosen}. What is learned "
            "is as good, but parameters, and hence later tokens, may differ between repetitions of "
            f"this run, and from what --resume goes on with. For runs that repeat exactly set "
            f"{exact}"
        )
    if dtype == "float32":
        return None
    return (
        f"in {dtype} about one token in 500 depends on the strategy and the batch that it is "
        f"sampled in, {chosen}. What is learned is as good, but --resume will not repeat the "
        f"tokens of a run that was killed. For that set rollout.dtype=float32, {exact}"
    )


def nothing_learnt(cfg: RLConfig) -> str | None:
    """The warning that settings leave the policy as it is; None if it can learn."""
    roll, algo = cfg.rollout, cfg.algo
    if not cfg.optim.moves:
        return (
            f"the policy learns nothing: optim.lr={cfg.optim.lr:g} with optim.clip_norm="
            f"{cfg.optim.clip_norm:g} makes every update 0"
        )
    if algo.mask_truncated and roll.min_tokens >= roll.max_tokens:
        return (
            f"the policy learns nothing: with rollout.min_tokens={roll.min_tokens} every sample "
            "reaches rollout.max_tokens, and algo.mask_truncated leaves these out"
        )
    if roll.temperature == 0 and roll.n > 1:
        return (
            f"the policy learns nothing from rewards: with rollout.temperature=0 all rollout.n="
            f"{roll.n} samples of a prompt are equal, and none is better than another; raise "
            "rollout.temperature"
        )
    return None


def slots_warning(cfg: RLConfig) -> str | None:
    """The warning that over-sampling cannot end a step early; None if it can."""
    rollout = cfg.rollout
    samples, slots = rollout.in_flight * rollout.n, rollout.max_batch * rollout.replicas
    if rollout.in_flight == rollout.prompts or samples <= slots:
        return None
    enough = -(-samples // rollout.replicas)
    return (
        f"rollout.over_sample={rollout.over_sample} has {samples} samples of a step share {slots} "
        "slots: a step cannot end before those that wait for one have started, so over-sampling "
        f"makes it longer, not shorter. Set rollout.max_batch={enough}, or rollout.over_sample=1"
    )


def _steps(
    cfg: RLConfig, trainer: Trainer, log, samples, checkpoints, heads, resumed: bool
) -> None:
    """Runs the remaining steps, and evaluates, logs and saves in between."""
    step_warnings, first = StepWarnings(source=trainer.source), True
    dropping, dropped, position = DropWarning(cfg.data), 0, trainer.rollouts.position
    if cfg.eval.before and not resumed and trainer.eval_engine is not None:
        with _naming_step(0, checkpoints):
            metrics = trainer.evaluate()
        samples.log_evaluation(0, trainer.eval_sets, trainer.last_evaluation)
        log.log(0, metrics)
        _say(f"evaluation before the first step: {described(metrics)}")
    while trainer.done_steps < cfg.steps:
        with _naming_step(trainer.done_steps + 1, checkpoints):
            try:
                metrics = trainer.step()
            except RewardsFailedError as error:
                raise RewardsFailedError(f"{error}; {_saved(trainer, checkpoints)}") from error
        step = trainer.done_steps
        require_finite(step, metrics, log, checkpoints, "model={run}")
        last = step == cfg.steps
        due = cfg.eval.every and step % cfg.eval.every == 0
        if trainer.eval_engine is not None and (last or due):
            with _naming_step(step, checkpoints):
                evaluated = trainer.evaluate()
            metrics |= evaluated
            samples.log_evaluation(step, trainer.eval_sets, trainer.last_evaluation)
            _say(f"evaluation after step {step}: {described(evaluated)}")
        samples.log(step, trainer.last_rollout)
        log.log(step, metrics)
        if first and "rollout/drafted_accept_length" in metrics:
            length = metrics["rollout/drafted_accept_length"]
            _say(f"Acceptance length: {length:.2f} at step {step}; each step's line has its own")
            first = False
        zero, short = trainer.rollouts.zero_reward_example(), trainer.rollouts.short
        warnings = step_warnings.check(step, metrics, zero, short)
        dropped += int(metrics.get("rollout/prompts_overlong", 0))
        warnings += dropping.check(dropped, trainer.rollouts.position - position)
        if trainer.exact is not None:
            warnings += [
                f"speculative and plain decoding differ (a request's number is the place of its "
                f"problem in the order of draws): {difference}"
                for difference in trainer.exact.differences
            ]
        for warning in warnings:
            _say(f"WARNING: step {step}: {warning}")
        end = distributed.told_to_end(step) and not last
        if last or end or (cfg.checkpoint.every and step % cfg.checkpoint.every == 0):
            only = heads if cfg.checkpoint.draft_only else None
            trainer.save(checkpoints, only, block=last or end)
        if end:
            raise Terminated(
                f"ended by SIGTERM after step {step}, which is saved in {checkpoints.directory}; "
                "start again with --resume to go on"
            )


@contextlib.contextmanager
def _naming_step(step: int, checkpoints: Checkpointer) -> Iterator[None]:
    """Adds the step and the saved steps to the error about NaN logits."""
    try:
        yield
    except InvalidLogitsError as error:
        advice = "The policy was like this before training began: look at its checkpoint"
        if step > 1:
            advice = recovery_advice(checkpoints, "model={run}", "optim.lr")
        raise InvalidLogitsError(f"step {step}: {error}. {advice}") from error


def _saved(trainer: Trainer, checkpoints: Checkpointer) -> str:
    """Saves the finished steps, if any, and returns a sentence about how to continue."""
    step = trainer.done_steps
    if step == 0:
        return "no step was done before it. Correct the reward and start again"
    checkpoints.wait()
    if step not in checkpoints.all_steps():
        trainer.save(checkpoints, block=True)
    return (
        f"step {step} is saved in {checkpoints.directory}. Correct the reward and start again with "
        "--resume to go on"
    )


def _export(cfg: RLConfig, trainer: Trainer, path: Path) -> None:
    weights = trainer.params, trainer.head
    if distributed.is_several():  # fetches what lies on other processes
        weights = sharding.fetch(weights)
    if distributed.is_first():
        params, head = weights
        head = head and Head(trainer.source, head)
        if not save_model(path, trainer.model, params, head, trainer.tokenizer_dir):
            _say(f"{path} has no draft: no layout is known for {type(trainer.source).__name__}")


def _say(text: str) -> None:
    """Prints a line in the first process."""
    if distributed.is_first():
        print(text, flush=True)


def summary(records: list[dict]) -> list[dict]:
    """First, last and mean value of the main metrics, for the table at the end."""
    names = {
        "eval/reward": "held-out reward",
        "rollout/reward": "rollout reward",
        "rollout/drafted_accept_length": "accept length",
        "rollout/tokens_per_sec": "rollout tok/s",
        "rollout/longest_sample_tokens_per_sec": "longest sample tok/s",
        "train/entropy": "policy entropy, nats",
        "train/mtp_loss": "draft loss, nats",
        "time/rollout": "rollout, s",
        "time/train": "policy update, s",
        "time/draft": "draft update, s",
    }
    sets = dict.fromkeys(name for record in records for name in record if "/avg@" in name)
    names |= {name: name.removeprefix("eval/") for name in sets}
    rows = []
    for name, label in names.items():
        values = [r[name] for r in records if r.get(name) is not None]
        if values:
            rows.append(
                {
                    "metric": label,
                    "first": round(values[0], 3),
                    "last": round(values[-1], 3),
                    "mean": round(float(np.mean(values)), 3),
                }
            )
    return rows


def _fresh(out: Path) -> Path:
    """The run directory: `out`, or the first `out-N` without checkpoints of an earlier run."""
    candidate, number = out, 2
    while any((candidate / CHECKPOINTS).glob("[0-9]*")):
        candidate, number = out.with_name(f"{out.name}-{number}"), number + 1
    return candidate


def _since(start: float) -> str:
    return f"{time.perf_counter() - start:.0f} s"


def main(argv: list[str] | None = None) -> None:
    run_program(RLConfig, argv, "train.rl", "GRPO with speculative rollouts.", run)


if __name__ == "__main__":
    interrupts.run(main)
