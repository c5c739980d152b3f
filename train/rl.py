"""`python -m train.rl`: GRPO with speculative rollouts and a draft head trained beside the policy.

One step (`Trainer.step`):

    problems  -> rollout (train.rollout, specjax.engine): speculative, with the tokens of plain
                 decoding, until the groups to learn from are certain (train.rollout.groups)
              -> rewards (train.rewards), advantages relative to the group (train.loss.objectives)
              -> packed micro-batches (train.loss.packing)
              -> policy update(s) (train.loss), which return the policy's states, too
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

import jax

from specjax import determinism
from specjax.checkpoint.weights import Head, save_model
from specjax.command_line import ConfigError
from specjax.engine.llm import LEAST
from specjax.engine.programs import CompileProgress
from specjax.engine.request import InvalidLogitsError
from specjax.parallel import distributed, sharding
from specjax.weights.matrix import kinds_of
from train.cli import run_program
from train.rewards.scoring import RewardsFailedError
from train.rollout.evaluation import described
from train.rollout.samples import SampleLog
from train.run import picture
from train.run.files import complete_steps
from train.run.start import Run, say, start
from train.schema import RLConfig
from train.trainer import Trainer


def run(cfg: RLConfig, resume: bool = False, resume_step: int | None = None) -> Path:
    """Trains to step `cfg.steps` and returns the path of the plot.

    Every process of a job calls it; the first process writes logs, plot and export.
    """
    out = Path(cfg.out)
    if cfg.deterministic:  # before the first call that starts jax's backends
        try:
            determinism.set_up()
        except ValueError as error:
            raise ConfigError(str(error)) from error
    distributed.start(cfg.distributed, max(cfg.mesh.size, cfg.rollout_devices))
    if not resume:  # files of the run, and those that name it, are of a directory of its own
        cfg = copy.copy(cfg)
        cfg.out = str(distributed.of_first(lambda: _fresh(out), "run directory"))
    with start("train.rl", cfg, resume, resume_step) as run:
        return _train(run, cfg)


def _train(run: Run, cfg: RLConfig) -> Path:
    began, out = time.perf_counter(), run.out
    trainer = Trainer(cfg)
    trainer.on_program = CompileProgress(say)
    run.restore(trainer, cfg.checkpoint.keep_last)  # which compiles, too
    for line in _start_lines(run, trainer):
        say(line)
    run.begin(cfg.model, cfg.steps)
    first = trainer.done_steps + 1
    say(f"run {out}: steps {first} to {cfg.steps}, set-up {time.perf_counter() - began:.0f} s")
    labels, begin = trainer.scorer.labels, run.first_logged
    log = SampleLog(out, cfg.log.samples, cfg.seed, trainer.tokenizer, labels, begin)
    with log as samples:
        _steps(run, trainer, samples)
    run.log.close()
    if cfg.checkpoint.export:
        _export(cfg, trainer, out / "hf")
    plot = picture.draw(out) if distributed.is_first() else out / picture.PICTURE
    if (line := trainer.engine.slower_than_plain()) is not None:
        say(f"{line}; rollout.strategy=off decodes plainly")
    say(f"total {time.perf_counter() - began:.0f} s\nplot: {plot}")
    say(f"page: python -m train.view {out}")
    return plot


def _steps(run: Run, trainer: Trainer, samples: SampleLog) -> None:
    """Runs the remaining steps, and evaluates, logs and saves in between."""
    cfg, warnings = trainer.cfg, StepWarnings(trainer)

    def evaluate(when: str) -> dict[str, float]:
        metrics = trainer.evaluate()
        for problem_set in trainer.eval_sets:
            name = problem_set.asked.name
            groups = trainer.last_evaluation[name]
            samples.log_evaluation(trainer.done_steps, name, problem_set.scorer.labels, groups)
        say(f"evaluation {when}: {described(metrics)}")
        return metrics

    evaluates = trainer.eval_engine is not None
    if cfg.eval.before and not run.resumed and evaluates:
        with _naming_step(run, 0):
            run.log.log(0, evaluate("before the first step"))
    while run.goes_on():
        step = trainer.done_steps + 1
        with _naming_step(run, step):
            try:
                metrics = trainer.step()
            except RewardsFailedError as error:
                raise RewardsFailedError(f"{error}; {_saved(run)}") from error
            run.require_finite(metrics)
            due = cfg.eval.every and step % cfg.eval.every == 0
            if evaluates and (due or not run.goes_on()):
                metrics |= evaluate(f"after step {step}")
        samples.log(step, trainer.last_rollout)
        run.log.log(step, metrics)
        for warning in warnings.of(metrics):
            say(f"WARNING: step {step}: {warning}")
        due = bool(cfg.checkpoint.every and step % cfg.checkpoint.every == 0)
        run.end_step(due)


@contextlib.contextmanager
def _naming_step(run: Run, step: int) -> Iterator[None]:
    """Adds the step and the saved steps to the error about NaN logits."""
    try:
        yield
    except InvalidLogitsError as error:
        remedy = "The policy was like this before training began: look at its checkpoint"
        if step > 1:
            remedy = run.recovery("optim.lr")
        raise InvalidLogitsError(f"step {step}: {error}. {remedy}") from error


def _saved(run: Run) -> str:
    """Saves the finished steps, if any, and says how to continue."""
    if run.state.done_steps == 0:
        return "no step was done before it. Correct the reward and start again"
    run.save(block=True)
    return f"{run.saved()}. Correct the reward and start again with --resume to go on"


def _export(cfg: RLConfig, trainer: Trainer, path: Path) -> None:
    weights = trainer.params, trainer.head
    if distributed.is_several():  # fetches what lies on other processes
        weights = sharding.fetch(weights)
    if distributed.is_first():
        params, head = weights
        head = head and Head(trainer.source, head)
        if not save_model(path, trainer.model, params, head, trainer.tokenizer_dir):
            say(f"{path} has no draft: no layout is known for {type(trainer.source).__name__}")


def _fresh(out: Path) -> Path:
    """Returns `out`, or the first `out-N` without checkpoints of an earlier run."""
    candidate, number = out, 2
    while complete_steps(candidate):
        candidate, number = out.with_name(f"{out.name}-{number}"), number + 1
    return candidate


# --- lines and warnings ---------------------------------------------------------------------------


def _start_lines(run: Run, trainer: Trainer) -> Iterator[str]:
    """Yields what a run says of its rollouts before the first step, and compiles them."""
    cfg = trainer.cfg
    yield from trainer.start_lines()
    yield trainer.dtype_line
    if run.resumed and not cfg.deterministic and jax.devices()[0].platform == "gpu":
        yield (
            "WARNING: on a GPU XLA chooses algorithms by measuring them, so that the last bits of "
            "this run may differ from those of a run that was never stopped; deterministic=true "
            "measures nothing"
        )
    yield f"rollouts: {trainer.warm_up()}"
    dtype = trainer.engine.runner.cfg.run.compute_dtype
    for warning in filter(None, (nothing_learnt(cfg), precision_warning(cfg, dtype))):
        yield f"WARNING: {warning}"
    for line in sharding.replicated_dims(trainer.mesh, trainer.params, trainer.policy.axes):
        yield f"kept whole on every device: {line}"


def precision_warning(cfg: RLConfig, dtype: str) -> str | None:
    """Writes the warning that tokens or parameters may depend on time; None if they cannot.

    Args:
      cfg: settings of the run.
      dtype: dtype in which rollouts compute.
    """
    if not cfg.rollout.by_the_clock or (dtype == "float32" and not cfg.algo.tis):
        return None
    effect = f"in {dtype} about one token in 500 depends"
    if cfg.algo.tis:
        effect = "algo.tis weighs the loss by log-probabilities of rollouts, whose last bits depend"
    return (
        f"{effect} on the strategy and batch that a token is sampled in, and rollout.control or "
        "rollout.replicas choose these by time or load. What is learned is as good, but --resume "
        "and repetitions may differ from this run. For runs that repeat exactly set "
        "rollout.invariant=true, or one strategy without rollout.control and rollout.replicas=1"
        f"{'' if cfg.algo.tis else ', with rollout.dtype=float32'}"
    )


def nothing_learnt(cfg: RLConfig) -> str | None:
    """Writes the warning that settings leave the policy as it is; None if it can learn."""
    roll, reason = cfg.rollout, None
    if cfg.optim.lr == 0 or cfg.optim.clip_norm == 0:
        reason = "optim.lr or optim.clip_norm is 0"
    elif cfg.algo.mask_truncated and roll.min_tokens >= roll.max_tokens:
        reason = "by rollout.min_tokens every sample is long, and algo.mask_truncated leaves it out"
    elif roll.temperature == 0 and roll.n > 1:
        reason = "with rollout.temperature=0 all samples of a prompt are equal, and none is better"
    return reason and f"the policy learns nothing: {reason}"


PATIENCE = 3  # steps without gain before the warning about speculation: a head may learn
# The most divergence of rollouts from the trainer's policy, in entropies. Steps of `bench.rl
# products` reach 0.0006 with weights of 8 bits, and 0.012 with MXFP4.
MISMATCH, MISMATCH_IN_4_BITS, LEAST_ENTROPY = 0.01, 0.03, 0.1


class StepWarnings:
    """Warns about speculation without gain, rewards or training without effect, and mismatch."""

    def __init__(self, trainer: Trainer):
        self._trainer, self._flat, self._zero_shown = trainer, 0, False
        self._mismatch_shown = False

    def of(self, metrics: dict[str, float]) -> Iterator[str]:
        """Yields the warnings about the last step, from its metrics."""
        trainer, length = self._trainer, metrics.get("rollout/drafted_accept_length")
        if length is not None:
            self._flat = self._flat + 1 if length < LEAST else 0
            if self._flat == PATIENCE:
                yield (
                    f"accept length has been {length:.2f} for {self._flat} steps: speculation only "
                    "costs time; is the draft the one that belongs to this policy?"
                )
        kl, entropy = metrics.get("train/train_rollout_kl", 0.0), -metrics["rollout/logprob_mean"]
        kinds = kinds_of(trainer.cfg.rollout.products)
        coarse = any(getattr(kind, "halves", False) for kind in kinds)  # 4 bits share a byte
        most = MISMATCH_IN_4_BITS if coarse else MISMATCH
        if kl > most * max(entropy, LEAST_ENTROPY) and not self._mismatch_shown:
            self._mismatch_shown = True
            yield (
                "rollouts come from another policy than the one that is trained: they diverge by "
                f"{kl:.3g} nats a token (train/train_rollout_kl), more than {most:.0%} of "
                f"their entropy, {entropy:.3g}. If rollout.products or rollout.dtype rounds "
                "weights, give them a finer format, or keep some matrices by a pattern such as "
                "'embed: int8'. If this stays with rollout.products=xla, rollout.dtype=float32 "
                "and attention=reference, it is a bug"
            )
        rollouts = trainer.rollouts
        if rollouts.zero is not None and not self._zero_shown:
            self._zero_shown = True
            yield f"every response so far scored 0, so the policy learns nothing; {rollouts.zero}"
        elif rollouts.short is not None:
            yield rollouts.short
        elif metrics.get("train/microbatches") == 0:
            yield (
                "no sample is trained on: all reached rollout.max_tokens, and algo.mask_truncated "
                "leaves these out. Raise rollout.max_tokens"
            )
        elif metrics.get("rollout/zero_std") == 1:
            yield (
                "no group has differing rewards: the policy learns nothing from this step. Is the "
                "task too hard or too easy for it?"
            )
        for difference in trainer.exact.differences if trainer.exact else ():
            yield (
                "speculative and plain decoding differ (a request's number is the place of its "
                f"problem in the order of draws): {difference}"
            )


def main(argv: list[str] | None = None) -> None:
    run_program(RLConfig, argv, "train.rl", "GRPO with speculative rollouts.", run)


if __name__ == "__main__":
    interrupts.run(main)
