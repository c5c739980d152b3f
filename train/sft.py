"""`python -m train.sft`: trains a policy, then its draft head, on demonstrations.

The first stage trains the policy by cross entropy. The second trains the head on the states of the
final policy, for which it will draft. The embedded policy was made by this program, with a config
in `configs/`. `--resume` continues a run that was killed.
"""

from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C from here on
    from specjax import interrupts

    interrupts.begin("train.sft")

import time
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.store import Checkpointer
from specjax.checkpoint.weights import TOKENIZER, Head, describe, describe_head
from specjax.command_line import ConfigError, typed_in
from specjax.config import ModelConfig
from specjax.drafts.mtp import MTPSource, init_head_params, weight_axes
from specjax.hub import find_model, portable
from specjax.models.transformer import Params, init_params
from specjax.parallel import sharding
from specjax.parallel.context import context_of
from specjax.settings import fingerprint, require_same_settings
from specjax.tokenizer import with_tokenizer_end
from specjax.weights import load_tokenizer
from train import data
from train.cli import (
    CHECKPOINTS,
    Progress,
    can_resume,
    interruptible,
    require_finite,
    run_program,
    settle_date,
)
from train.describe import describe_run, settings_of
from train.heads import DraftTrainer, draft_metrics
from train.inputs import (
    DropWarning,
    Limit,
    Prompts,
    demonstration_name,
    describe_data,
    dropped_warning,
    encode_some,
    require_most,
    require_template,
)
from train.log import MetricsLogger
from train.loss import count_denominators, sft_loss
from train.packing import pack_demonstrations, padding_share
from train.policy import PolicyTrainer, own_family
from train.schema import SFTConfig, as_run
from train.tasks.layout import text_of_response

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedTokenizerBase

FROM_RUN = "init=DIR, which `specjax convert {run} DIR` makes"
CONSOLE = (
    ("train/loss", "loss", "{:.4f}"),
    ("train/entropy", "entropy", "{:.3f}"),
    ("train/grad_norm", "grad", "{:.2f}"),
    ("train/mtp_loss", "mtp", "{:.4f}"),
    ("train/mtp_overlap_depth_1", "overlap 1", "{:.3f}"),
    ("train/mtp_overlap_depth_4", "overlap 4", "{:.3f}"),
    ("train/tokens_per_sec", "tok/s", "{:.0f}"),
)


class PackedDemonstrations:
    """An endless stream of packed updates.

    Args:
      cfg: settings of the run.
      tokenizer: tokenizer of the model.
      model: config of the model; None: token ids are not checked.

    Attributes:
      warning: warning about demonstrations, to print at start; None: there is none.
      position: number of demonstrations taken; the stream resumes from it.
      passed_over: number of demonstrations that were skipped, because they are longer than `limit`.
      limit: largest number of tokens of a demonstration: a row, or the positions of the model.
    """

    def __init__(self, cfg: SFTConfig, tokenizer, model: ModelConfig | None = None):
        self.prompts = Prompts(tokenizer, cfg.data, model=model)
        source = data.demonstrations(cfg.data, "train", self.prompts.chat)
        require_template(cfg, source[0].prompt)
        _require_calculator(cfg)
        names, encoded = encode_some(self.prompts, source)
        self.warning = dropped_warning([pair.dropped for pair in encoded])
        self._source = data.endless(source, cfg.data.seed)
        self._cfg, self.tokenizer, self.position = cfg, tokenizer, 0
        self.passed_over = 0
        self.limit = Limit.of_rows(cfg.packing.row_length, model)
        sizes = [len(pair.prompt) + len(pair.response) for pair in encoded]
        require_most(cfg.data, sizes, names, self.limit, "demonstrations")

    def next_update(self) -> list[dict[str, np.ndarray]]:
        """Fills the micro-batches of one update first-fit, until a demonstration does not fit.

        Demonstrations that are too long are skipped and counted.

        Raises:
          ConfigError: a demonstration is too long and `data.overlong_prompts` is `error`, or a
            thousand in a row were skipped.
        """
        packing = self._cfg.packing
        room = [packing.row_length] * (packing.rows * packing.microbatches)
        pairs, in_a_row = [], 0
        while True:
            item = self._source[self.position]
            found = self.prompts.demonstration(item)
            pair = found.prompt, found.response
            size = len(pair[0]) + len(pair[1])
            if size > self.limit.tokens:
                if self._cfg.data.overlong_prompts == "error":
                    raise ConfigError(self.limit.exceeded(demonstration_name(item), size))
                self.position += 1
                self.passed_over += 1
                in_a_row += 1
                if in_a_row == 1000:
                    raise ConfigError(
                        f"{in_a_row} demonstrations in a row have more tokens than {self.limit} "
                        f"(the last one {size}); {self.limit.remedy}"
                    )
                continue
            in_a_row = 0
            row = next((i for i, free in enumerate(room) if free >= size), None)
            if row is None:
                break
            room[row] -= size
            pairs.append(pair)
            self.position += 1
        return pack_demonstrations(
            pairs, packing.row_length, packing.rows, packing.microbatches, self._cfg.loss_on
        )


def _require_calculator(cfg: SFTConfig) -> None:
    """Refuses `data.strip_calculator=false` for rows that are not GSM8K's."""
    key, task = "data.strip_calculator", data.find_task(cfg.data)
    if cfg.data.strip_calculator or key not in typed_in(cfg) or task is None:
        return
    if task.name != "gsm8k":
        raise ConfigError(
            f"{key}=false changes nothing: such annotations are GSM8K's, and {cfg.data.named} is "
            f"read as {task.name}; leave it out"
        )


def start_model(
    cfg: SFTConfig, mesh, keep_tokenizer: bool = False
) -> tuple[ModelConfig, Params, Params, PreTrainedTokenizerBase]:
    """Loads model config, policy, head and tokenizer from `cfg.init`, or makes new ones.

    Args:
      cfg: settings of the run, with `cfg.dtype` settled.
      mesh: mesh to train on; None for one device.
      keep_tokenizer: whether to load the tokenizer that an earlier start of this run trained.
    """
    if cfg.init:
        tokenizer = load_tokenizer(cfg.init)
        model, params, head = hf.load_checkpoint(cfg.init, cfg.dtype.params, mesh)
        model = with_tokenizer_end(model.running(**as_run(cfg)), tokenizer)
        cfg.draft.optim.settle(is_new=head is None)
        if head is None:
            model = model.replace(**cfg.model.head_switches())
            head = init_head_params(model, cfg.seed + 1)
        return model, params, head, tokenizer
    tokenizer = load_tokenizer(tokenizer_dir(cfg)) if keep_tokenizer else train_tokenizer(cfg)
    vocab = -(-len(tokenizer) // 16) * 16  # divides by any small tensor-parallel degree
    model = cfg.model.build(vocab, tokenizer.eos_token_id, tokenizer.pad_token_id, cfg.dtype)
    model = model.running(**as_run(cfg))
    return model, init_params(model, cfg.seed), init_head_params(model, cfg.seed + 1), tokenizer


def train_tokenizer(cfg: SFTConfig) -> PreTrainedTokenizerBase:
    """Trains a tokenizer on the first `cfg.tokenizer_texts` demonstrations, and saves it."""
    source = data.demonstrations(cfg.data, "train")
    if not isinstance(source[0].prompt, str):
        raise ValueError(
            "prompts that are conversations need a model's chat template; set init to its directory"
        )
    texts = []
    for i in range(min(cfg.tokenizer_texts, len(source))):
        texts += [source[i].prompt, text_of_response(source[i].response)]
    return data.train_bpe_tokenizer(texts, cfg.vocab_size, tokenizer_dir(cfg))


def tokenizer_dir(cfg: SFTConfig) -> Path:
    """The directory of the run's tokenizer: `init`, or a directory in the run."""
    return Path(cfg.init) if cfg.init else Path(cfg.out) / TOKENIZER


class Run:
    """Policy, head, the policy's optimizer, the data position, and the two stages of training.

    Checkpoints of the policy stage are complete. The head stage is short; if interrupted it starts
    again from the end of the policy stage.
    """

    def __init__(self, cfg: SFTConfig, keep_tokenizer: bool = False):
        self.cfg = cfg
        stored = "float32"
        own_family(cfg.family)
        if cfg.init:
            # From here on it is a path. The path of an id names one commit, as --resume needs.
            path = find_model(cfg.init, cfg.revision)
            cfg.init, cfg.revision = (cfg.init if Path(cfg.init).exists() else str(path)), None
            stored = hf.read_config(cfg.init).run.param_dtype
        try:
            self.mesh = sharding.make_mesh(cfg.mesh)
            self.dtype_line = cfg.dtype.settle(stored, sharding.platform_of(self.mesh))
            model, params, head, tokenizer = start_model(cfg, self.mesh, keep_tokenizer)
            self.stream = PackedDemonstrations(cfg, tokenizer, model)
        except hf.UnsupportedModelError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.mesh is not None:
            axes = weight_axes(model)
            params = jax.device_put(params, sharding.param_shardings(self.mesh, params, axes))
            head = jax.device_put(head, sharding.param_shardings(self.mesh, head, axes))
        self.model, self.params, self.head = model, params, head
        self.policy = PolicyTrainer(
            model,
            sft_loss,
            cfg.optim.build(),
            self.mesh,
            context=context_of(cfg.mesh, self.mesh),
            attention=cfg.attention,
            chunk=cfg.logprob_chunk_size,
        )
        self.opt_state = self.policy.init_opt_state(params)
        self.step, self.stage = 0, "policy"

    def describe(self) -> str:
        """The line about sizes at start."""
        policy, head = (sum(a.size for a in jax.tree.leaves(t)) for t in (self.params, self.head))
        return (
            f"policy {policy / 1e6:.2f} M parameters, vocabulary {self.model.vocab_size}, "
            f"head {head / 1e6:.2f} M"
        )

    def trees(self) -> dict:
        """The arrays that a checkpoint of the current stage holds, by name."""
        trees = {"policy": self.params, "draft": self.head}
        return trees | {"policy_opt": self.opt_state} if self.stage == "policy" else trees

    def fingerprint(self) -> dict:
        """The settings that change the result of training; a resumed run must have the same."""
        ignored = ("out", "steps", "draft_steps", "log_every", "export_dtype")
        ignored += "log", "checkpoint", "mesh", "attention", "remat", "remat_policy"
        ignored += ("logprob_chunk_size",)
        settings = fingerprint(self.cfg, ignored)
        return settings | {"init": settings["init"] and portable(settings["init"])}

    def save(self, checkpoints: Checkpointer, block: bool = False) -> None:
        """Starts saving the state; `block` waits until it is on disk."""
        meta = {
            "stage": self.stage,
            "step": self.step,
            "policy_steps": min(self.step, self.cfg.steps),
            "position": self.stream.position,
            "passed_over": self.stream.passed_over,
            "settings": self.fingerprint(),
            # Relative to the run, where it lies in one.
            **describe(
                self.model,
                Path(self.cfg.init).absolute() if self.cfg.init else TOKENIZER,
                describe_head(Head(MTPSource(self.model), self.head)),
            ),
        }
        checkpoints.save(self.step, self.trees(), meta, block)

    def restore(self, checkpoints: Checkpointer, step: int | None) -> None:
        """Restores a checkpoint; later updates are those of a run that was never stopped.

        Raises:
          ConfigError: the checkpoint was made with other settings, or is past the last step.
          CheckpointError: the checkpoint cannot be read.
        """
        cfg = self.cfg
        _, meta = checkpoints.restore(step, {})
        saved = data.saved_settings(meta.get("settings", {}), self.cfg.data, self.stream.tokenizer)
        require_same_settings(saved, self.fingerprint())
        step, finished = meta["step"], meta["stage"] == "head"
        if finished and (step, meta["policy_steps"]) != (cfg.steps + cfg.draft_steps, cfg.steps):
            raise ConfigError(
                f"step {step} is the end of a run with other steps or draft_steps; go on from it "
                f"with init={Path(cfg.out) / 'hf'}, or from an earlier step with --resume_step"
            )
        if not finished and step > cfg.steps:
            raise ConfigError(
                f"the checkpoint is at step {step} of the policy, expected at most "
                f"steps={cfg.steps}; raise it, or take an earlier one with --resume_step"
            )
        self.stage, self.step = meta["stage"], step
        abstract = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), self.trees()
        )
        trees, _ = checkpoints.restore(step, abstract)
        self.params, self.head = trees["policy"], trees["draft"]
        self.opt_state = trees.get("policy_opt")
        self.stream.position, self.stream.passed_over = meta["position"], meta["passed_over"]

    def train_policy(self, log: MetricsLogger, checkpoints: Checkpointer) -> None:
        """Runs the rest of the policy stage, and saves a checkpoint at its end."""
        cfg = self.cfg
        since, tokens, padding = time.perf_counter(), 0.0, []
        dropping = DropWarning(cfg.data)
        while self.stage == "policy" and self.step < cfg.steps:
            batches = self.stream.next_update()
            padding.append(padding_share(batches))
            placed = [self.policy.place(b) for b in batches]
            self.params, self.opt_state, _, sums = self.policy.update(
                self.params, self.opt_state, placed, count_denominators(batches)
            )
            self.step += 1
            tokens += sum(float((b["segment_ids"] > 0).sum()) for b in batches)
            now = time.perf_counter()
            metrics = {
                "train/loss": sums["loss"],
                "train/entropy": sums["entropy"] / sums["tokens"],
                "train/grad_norm": sums["grad_norm"],
                "train/tokens_per_sec": tokens / (now - since),
                "train/padding_share": float(np.mean(padding)),
                "train/demonstrations_passed_over": self.stream.passed_over,
            }
            require_finite(self.step, metrics, log, checkpoints, FROM_RUN)
            for warning in dropping.check(self.stream.passed_over, self.stream.position):
                print(f"WARNING: step {self.step}: {warning}", flush=True)
            if self.step % cfg.log_every == 0 or self.step == cfg.steps:
                log.log(self.step, metrics)
                since, tokens, padding = now, 0.0, []
            if cfg.checkpoint.every and self.step % cfg.checkpoint.every == 0:
                self.save(checkpoints)
        checkpoints.wait()
        if self.step not in checkpoints.all_steps():
            self.save(checkpoints, block=True)

    def train_head(self, log: MetricsLogger, checkpoints: Checkpointer) -> None:
        """Runs the head stage, and saves a checkpoint at its end."""
        cfg = self.cfg
        if self.stage == "head" or head_steps(cfg) == 0:
            return
        self.stage, self.opt_state = "head", None
        trainer = DraftTrainer(
            self.model,
            cfg.draft,
            mesh=self.mesh,
            context=self.policy.context,
            attention=cfg.attention,
            chunk=cfg.logprob_chunk_size,
        )
        opt_state = trainer.init_opt_state(self.head)
        while self.step < cfg.steps + cfg.draft_steps:
            batches = [self.policy.place(b) for b in self.stream.next_update()]
            states = [self.policy.states(self.params, batch) for batch in batches]
            self.head, opt_state, sums = trainer.update(
                self.head, opt_state, self.params, batches, states
            )
            self.step += 1
            metrics = draft_metrics(sums)
            require_finite(self.step, metrics, log, checkpoints, FROM_RUN)
            if self.step % cfg.log_every == 0:
                log.log(self.step, metrics)
        self.save(checkpoints, block=True)

    def export(self) -> Path:
        """Writes the Hugging Face directory, and returns its path."""
        path, cfg = Path(self.cfg.out) / "hf", self.cfg
        hf.save_checkpoint(
            path, self.model, self.params, self.head, tokenizer_dir(cfg), dtype=cfg.export_dtype
        )
        return path


def train(cfg: SFTConfig, resume: bool = False, resume_step: int | None = None) -> Path:
    """Runs both stages and exports a Hugging Face directory, whose path is returned.

    Args:
      cfg: settings of the run.
      resume: whether to continue from a checkpoint in `cfg.out`.
      resume_step: step of that checkpoint; None for the newest.

    Raises:
      ConfigError: `cfg.out` holds checkpoints without `resume`, or holds no run with it.
    """
    directory = Path(cfg.out) / CHECKPOINTS
    if not resume and any(directory.glob("*")):
        raise ConfigError(
            f"{cfg.out} holds checkpoints of an earlier run; set out= to another, or use --resume"
        )
    settle_date(cfg, Path(cfg.out) if resume else None)
    resume = resume and can_resume(Path(cfg.out), resume_step, print)
    with interruptible(Path(cfg.out)) as progress:
        return _train(cfg, directory, resume, resume_step, progress)


def _train(
    cfg: SFTConfig, directory: Path, resume: bool, resume_step: int | None, progress: Progress
) -> Path:
    named = cfg.init  # as the user typed it; `Run` replaces it by a path
    run = Run(cfg, keep_tokenizer=resume)
    prompts = run.stream.prompts
    print(describe_data(cfg.data, prompts.chat, named, date=prompts.date))
    if run.stream.warning:
        print(f"WARNING: {run.stream.warning}")
    if run.stream.limit.setting is None:
        print(f"demonstrations that exceed {run.stream.limit} tokens are left out")
    print(f"{run.describe()}\n{run.dtype_line}")
    print(describe_stages(cfg), flush=True)
    with Checkpointer(directory, cfg.checkpoint.keep_last) as checkpoints:
        if resume:
            run.restore(checkpoints, resume_step)
            print(f"resumed at step {run.step}")
        progress.steps = lambda: (run.step, cfg.steps + head_steps(cfg))
        first = run.step + 1 if resume else None
        describe_run(Path(cfg.out), cfg, "train.sft", cfg.init, run.step + 1, resume)
        with MetricsLogger(
            cfg.out,
            cfg.log.tensorboard,
            cfg.log.wandb,
            first,
            console_fields=CONSOLE,
            live=cfg.log.live,
            settings=settings_of(cfg),
            steps=cfg.steps + head_steps(cfg),
        ) as log:
            run.train_policy(log, checkpoints)
            run.train_head(log, checkpoints)
    return run.export()


def head_steps(cfg: SFTConfig) -> int:
    """The number of updates of the head stage, which only `draft.mode=online` has."""
    return cfg.draft_steps if cfg.draft.mode == "online" else 0


def describe_stages(cfg: SFTConfig) -> str:
    """The line at start about the number of updates of policy and head."""
    policy = f"trains the policy for {cfg.steps} updates (steps={cfg.steps})"
    if cfg.steps and not cfg.optim.moves:
        policy = (
            f"WARNING: optim.lr or optim.clip_norm is 0, so the policy learns nothing; {policy}"
        )
    if cfg.draft.mode != "online":
        return f"{policy}; {cfg.draft.describe_mode()}: the head is not trained, only exported"
    if not cfg.draft_steps:
        return f"{policy}; draft_steps=0: the head is not trained, only exported"
    return (
        f"{policy}, then the draft head for {cfg.draft_steps} (draft_steps={cfg.draft_steps}; 0 "
        "leaves that out)"
    )


def main(argv: list[str] | None = None) -> None:
    description = "Train a policy and its draft head on demonstrations."
    path = run_program(SFTConfig, argv, "train.sft", description, train)
    print(f"exported to {path}")


if __name__ == "__main__":
    interrupts.run(main)
