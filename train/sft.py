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
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.weights import TOKENIZER, Head, describe, describe_head
from specjax.command_line import ConfigError
from specjax.config import ModelConfig
from specjax.drafts.mtp import MTPSource, init_head_params, weight_axes
from specjax.hub import find_model, portable
from specjax.models.rows import matrix_names
from specjax.models.transformer import Params, init_params
from specjax.parallel import sharding
from specjax.parallel.context import context_of
from specjax.settings import fingerprint
from specjax.tokenizer import with_tokenizer_end
from specjax.weights import load_tokenizer
from train.cli import run_program
from train.data import rows
from train.data.checks import (
    Limit,
    describe_data,
    dropped_warnings,
    encode_some,
    require_most,
)
from train.data.prompts import Prompts
from train.data.tasks.layout import text_of_response
from train.data.tokenizer import train_bpe_tokenizer
from train.heads.training import DraftTrainer, draft_metrics
from train.loss.packing import PackedBatch, pack_demonstrations, padding_share
from train.loss.policy import PolicyTrainer
from train.loss.terms import count_denominators, sft_loss
from train.run.start import Run, add_own_family, require_unused, start
from train.schema import SFTConfig, as_run

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedTokenizerBase

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
      warnings: warnings about demonstrations, to print at start.
      position: number of demonstrations taken; the stream resumes from it.
      passed_over: number of demonstrations that were skipped, because they are longer than `limit`.
      limit: largest number of tokens of a demonstration: a row, or the positions of the model.
    """

    def __init__(self, cfg: SFTConfig, tokenizer, model: ModelConfig | None = None):
        self.prompts = Prompts(tokenizer, cfg.data, model=model)
        source = rows.demonstrations(cfg.data, "train", self.prompts.chat)
        encoded = encode_some(self.prompts, source)
        self.warnings = dropped_warnings(encoded)
        self._source, self._cfg = rows.endless(source, cfg.data.seed), cfg
        self.tokenizer, self.position, self.passed_over = tokenizer, 0, 0
        self.limit = Limit.of_rows(cfg.packing.row_length, model)
        sizes = [len(pair.prompt) + len(pair.tokens) for pair in encoded]
        require_most(cfg.data, sizes, self.limit, "demonstrations")

    def next_update(self) -> list[PackedBatch]:
        """Fills the micro-batches of one update first-fit, until a demonstration does not fit.

        Demonstrations that are too long are skipped and counted.

        Raises:
          ConfigError: a thousand in a row were skipped.
        """
        packing = self._cfg.packing
        room = [packing.row_length] * (packing.rows * packing.microbatches)
        pairs, in_a_row = [], 0
        while True:
            item = self._source[self.position]
            pair = self.prompts.demonstration(item)
            size = len(pair.prompt) + len(pair.tokens)
            if size > self.limit.tokens:
                in_a_row += 1
                if in_a_row == 1000:
                    raise ConfigError(
                        f"{in_a_row} demonstrations in a row have more tokens than {self.limit}; "
                        f"{self.limit.remedy}"
                    )
                self.position += 1
                self.passed_over += 1
                continue
            in_a_row = 0
            row = next((i for i, free in enumerate(room) if free >= size), None)
            if row is None:
                break
            room[row] -= size
            pairs.append((pair.prompt, pair.tokens))
            self.position += 1
        return pack_demonstrations(
            pairs, packing.row_length, packing.rows, packing.microbatches, self._cfg.loss_on
        )


class SFTTrainer:
    """Policy, head, their optimizers, the data position, and the two stages of training.

    Attributes:
      done_steps: number of updates: those of the policy, then those of the head.
      stream: the demonstrations.
      notes: lines to print at start.
    """

    work = "update"
    restart = "init=DIR, which `specjax convert {run} DIR` makes"

    def __init__(self, cfg: SFTConfig, keep_tokenizer: bool = False):
        self.cfg, named, stored = cfg, cfg.init, "float32"
        add_own_family(cfg.family)
        if cfg.init:
            # From here on it is a path. The path of an id names one commit, as --resume needs.
            path = find_model(cfg.init, cfg.revision)
            cfg.init, cfg.revision = (cfg.init if Path(cfg.init).exists() else str(path)), None
            stored = hf.read_config(cfg.init).run.param_dtype
        try:
            self.mesh = sharding.make_mesh(cfg.mesh)
            dtypes = cfg.dtype.settle(stored, sharding.platform_of(self.mesh))
            model, params, head, tokenizer = start_model(cfg, self.mesh, keep_tokenizer)
            self.stream = PackedDemonstrations(cfg, tokenizer, model)
        except hf.UnsupportedModelError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.tokenizer = tokenizer
        if self.mesh is not None:
            axes = weight_axes(model)
            params = jax.device_put(params, sharding.param_shardings(self.mesh, params, axes))
            head = jax.device_put(head, sharding.param_shardings(self.mesh, head, axes))
        self.model, self.params, self.head = model, params, head
        common = {
            "mesh": self.mesh,
            "context": context_of(cfg.mesh, self.mesh),
            "attention": cfg.attention,
            "chunk": cfg.logprob_chunk_size,
        }
        self.policy = PolicyTrainer(model, sft_loss, cfg.optim.build(matrix_names(model)), **common)
        self.opt_state = self.policy.init_opt_state(params)
        self.draft, self.draft_opt = None, None
        if head_steps(cfg):
            self.draft = DraftTrainer(model, cfg.draft, **common)
        self.done_steps = 0
        sizes = [sum(a.size for a in jax.tree.leaves(tree)) / 1e6 for tree in (params, head)]
        self.notes = [describe_data(self.stream.prompts, named)]
        self.notes += [f"WARNING: {text}" for text in self.stream.warnings]
        if self.stream.limit.tokens < cfg.packing.row_length:
            self.notes.append(f"demonstrations that exceed {self.stream.limit} tokens are left out")
        self.notes += [
            f"policy {sizes[0]:.2f} M parameters, vocabulary {model.vocab_size}, head "
            f"{sizes[1]:.2f} M",
            dtypes,
            describe_stages(cfg),
        ]

    def update(self) -> tuple[dict[str, float], list[PackedBatch]]:
        """Makes an update of the policy, or of the head once those of the policy are done.

        Returns:
          (metrics, what it was trained on).
        """
        batches = self.stream.next_update()
        placed = [self.policy.place(batch) for batch in batches]
        self.done_steps += 1
        if self.done_steps > self.cfg.steps:
            return self._update_head(placed), batches
        self.params, self.opt_state, _, sums = self.policy.update(
            self.params, self.opt_state, placed, count_denominators(batches)
        )
        metrics = {
            "train/loss": sums["loss"],
            "train/entropy": sums["entropy"] / sums["tokens"],
            "train/grad_norm": sums["grad_norm"],
            "train/demonstrations_passed_over": self.stream.passed_over,
        }
        return metrics, batches

    def _update_head(self, batches: list) -> dict[str, float]:
        if self.draft_opt is None:
            self.opt_state, self.draft_opt = None, self.draft.init_opt_state(self.head)
        states = [self.policy.states(self.params, batch) for batch in batches]
        self.head, self.draft_opt, sums = self.draft.update(
            self.head, self.draft_opt, self.params, batches, states
        )
        return draft_metrics(sums)

    # --- state ---------------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, Any]:
        """Returns the settings that change the result; a resumed run must have the same."""
        ignored = ("out", "steps", "draft_steps", "log_every", "export_dtype", "log", "checkpoint")
        ignored += "mesh", "attention", "remat", "remat_policy", "logprob_chunk_size"
        settings = fingerprint(self.cfg, ignored)
        return settings | {"init": settings["init"] and portable(settings["init"])}

    def trees(self, meta: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the arrays that a checkpoint of the current stage holds, by name."""
        if meta is not None and meta["step"] > meta["policy_steps"]:
            self.opt_state, self.draft_opt = None, self.draft.init_opt_state(self.head)
        trees = {"policy": self.params, "draft": self.head}
        if self.draft_opt is not None:
            return trees | {"draft_opt": self.draft_opt}
        return trees | {"policy_opt": self.opt_state}

    def meta(self) -> dict[str, Any]:
        """Returns what else a checkpoint has."""
        return {
            "policy_steps": min(self.done_steps, self.cfg.steps),
            "position": self.stream.position,
            "passed_over": self.stream.passed_over,
            # Relative to the run, where it lies in one.
            **describe(
                self.model,
                Path(self.cfg.init).absolute() if self.cfg.init else TOKENIZER,
                describe_head(Head(MTPSource(self.model), self.head)),
            ),
        }

    def check(self, meta: Mapping[str, Any]) -> None:
        """Raises ConfigError if the checkpoint is of other stages, or past the last step."""
        cfg, step, policy = self.cfg, meta["step"], meta["policy_steps"]
        if step > cfg.steps + head_steps(cfg) or (step > policy != cfg.steps):
            raise ConfigError(
                f"the checkpoint has {policy} updates of the policy and {step - policy} of the "
                f"head, and settings are steps={cfg.steps} and draft_steps={head_steps(cfg)}; go "
                f"on from it with init={Path(cfg.out) / 'hf'}, or from an earlier step with "
                "--resume_step"
            )

    def load(self, trees: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Takes the content of a checkpoint."""
        self.params, self.head = trees["policy"], trees["draft"]
        self.opt_state, self.draft_opt = trees.get("policy_opt"), trees.get("draft_opt")
        self.stream.position, self.stream.passed_over = meta["position"], meta["passed_over"]

    def export(self) -> Path:
        """Writes the Hugging Face directory, and returns its path."""
        path, cfg = Path(self.cfg.out) / "hf", self.cfg
        hf.save_checkpoint(
            path, self.model, self.params, self.head, tokenizer_dir(cfg), dtype=cfg.export_dtype
        )
        return path


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
        model = model.running(**as_run(cfg)).for_length(cfg.packing.row_length)
        model = with_tokenizer_end(model, tokenizer)
        cfg.draft.optim.settle(is_new=head is None)
        if head is None:
            model = model.replace(**cfg.model.head_switches())
            head = init_head_params(model, cfg.seed + 1)
        return model, params, head, tokenizer
    tokenizer = load_tokenizer(tokenizer_dir(cfg)) if keep_tokenizer else train_tokenizer(cfg)
    vocab = -(-len(tokenizer) // 16) * 16  # divides by any small tensor-parallel degree
    model = cfg.model.build(vocab, tokenizer.eos_token_id, tokenizer.pad_token_id, cfg.dtype)
    model = model.running(**as_run(cfg)).for_length(cfg.packing.row_length)
    return model, init_params(model, cfg.seed), init_head_params(model, cfg.seed + 1), tokenizer


def train_tokenizer(cfg: SFTConfig) -> PreTrainedTokenizerBase:
    """Trains a tokenizer on the first `cfg.tokenizer_texts` demonstrations, and saves it."""
    source = rows.demonstrations(cfg.data, "train")
    if not isinstance(source[0].prompt, str):
        raise ValueError(
            "prompts that are conversations need a model's chat template; set init to its directory"
        )
    texts = []
    for i in range(min(cfg.tokenizer_texts, len(source))):
        texts += [source[i].prompt, text_of_response(source[i].response)]
    return train_bpe_tokenizer(texts, cfg.vocab_size, tokenizer_dir(cfg))


def tokenizer_dir(cfg: SFTConfig) -> Path:
    """Returns the directory of the run's tokenizer: `init`, or a directory in the run."""
    return Path(cfg.init) if cfg.init else Path(cfg.out) / TOKENIZER


def head_steps(cfg: SFTConfig) -> int:
    """Returns the number of updates of the head stage, which only `draft.mode=online` has."""
    return cfg.draft_steps if cfg.trains_head else 0


def describe_stages(cfg: SFTConfig) -> str:
    """Writes the line at start about the number of updates of policy and head."""
    policy = f"trains the policy for {cfg.steps} updates (steps={cfg.steps})"
    if not head_steps(cfg):
        mode = f"draft.mode={cfg.draft.mode}" if cfg.draft.mode != "online" else "draft_steps=0"
        return f"{policy}; {mode}: the head is not trained, only exported"
    return (
        f"{policy}, then the draft head for {cfg.draft_steps} (draft_steps={cfg.draft_steps}; 0 "
        "leaves that out)"
    )


def train(cfg: SFTConfig, resume: bool = False, resume_step: int | None = None) -> Path:
    """Runs both stages and exports a Hugging Face directory, whose path is returned.

    Args:
      cfg: settings of the run.
      resume: whether to continue from a checkpoint in `cfg.out`.
      resume_step: step of that checkpoint; None for the newest.

    Raises:
      ConfigError: `cfg.out` holds checkpoints without `resume`, or holds no run with it.
    """
    if not resume:
        require_unused(Path(cfg.out))
    with start("train.sft", cfg, resume, resume_step) as run:
        trainer = SFTTrainer(cfg, keep_tokenizer=run.resumed)
        run.restore(trainer, cfg.checkpoint.keep_last)
        run.begin(cfg.init, cfg.steps + head_steps(cfg), CONSOLE)
        _updates(run, trainer)
        run.save(block=True)
    return trainer.export()


def _updates(run: Run, trainer: SFTTrainer) -> None:
    """Makes the remaining updates, and saves a checkpoint at the end of the policy stage."""
    cfg, since, tokens, padding = trainer.cfg, time.perf_counter(), 0.0, []
    while run.goes_on():
        metrics, batches = trainer.update()
        run.require_finite(metrics)
        padding.append(padding_share(batches))
        tokens += sum(float((batch["segment_ids"] > 0).sum()) for batch in batches)
        step, every = trainer.done_steps, cfg.checkpoint.every
        if step % cfg.log_every == 0 or step == cfg.steps:
            now = time.perf_counter()
            metrics["train/tokens_per_sec"] = tokens / (now - since)
            metrics["train/padding_share"] = float(np.mean(padding))
            run.log.log(step, metrics)
            since, tokens, padding = now, 0.0, []
        run.end_step(due=step == cfg.steps or bool(every and step % every == 0))


def main(argv: list[str] | None = None) -> None:
    description = "Train a policy and its draft head on demonstrations."
    path = run_program(SFTConfig, argv, "train.sft", description, train)
    print(f"exported to {path}")


if __name__ == "__main__":
    interrupts.run(main)
