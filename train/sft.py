"""`python -m train.sft`: trains a policy, then its draft head, on demonstrations.

First the policy alone, by cross entropy. Then the head alone, on the states of the finished policy:
states of a policy that still moves teach the head about a policy that will not exist. This made the
embedded policy; its config is in `configs/`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax
import numpy as np

from specjax import sharding
from specjax.checkpoint import Checkpointer, CheckpointError
from specjax.config import ModelConfig
from specjax.draft.mtp import init_head_params
from specjax.engine.tokenizer import load_tokenizer
from specjax.models import hf
from specjax.models.hf import UnsupportedModelError
from specjax.models.transformer import Params, init_params
from train import data
from train.config import ConfigError, parse_config
from train.draft import DraftTrainer, draft_metrics
from train.grpo import count_denominators
from train.log import MetricsLogger
from train.packing import pack_demonstrations
from train.policy import PolicyTrainer, sft_loss
from train.schema import SFTConfig

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
    """An endless stream of packed updates; `position` is all that must be saved to resume it."""

    def __init__(self, cfg: SFTConfig, tokenizer, position: int = 0):
        source = data.demonstrations(cfg.data, "train")
        self._source = data.endless(source, cfg.data.seed)
        self._cfg, self._tokenizer, self.position = cfg, tokenizer, position
        self.passed_over = 0

    def next_update(self) -> list[dict[str, np.ndarray]]:
        """Micro-batches filled first-fit until the next demonstration has no room.

        A demonstration longer than a row is passed over and counted.

        Raises:
          ConfigError: a thousand in a row were.
        """
        packing = self._cfg.packing
        room = [packing.row_length] * (packing.rows * packing.microbatches)
        pairs, in_a_row = [], 0
        while True:
            item = self._source[self.position]
            pair = data.encode_demonstration(self._tokenizer, item)
            size = len(pair[0]) + len(pair[1])
            if size > packing.row_length:
                self.position += 1
                self.passed_over += 1
                in_a_row += 1
                if in_a_row == 1000:
                    raise ConfigError(
                        f"{in_a_row} demonstrations in a row have more than packing.row_length = "
                        f"{packing.row_length} tokens (the last one {size}); raise it"
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


def start_model(cfg: SFTConfig, mesh) -> tuple[ModelConfig, Params, Params, object]:
    """Model config, policy, head and tokenizer: from `cfg.init`, or new."""
    if cfg.init:
        model, params, head = hf.load_checkpoint(cfg.init, cfg.dtype.params, mesh)
        model = model.replace(compute_dtype=cfg.dtype.compute, remat=cfg.remat)
        if head is None:
            model = model.replace(mtp_num_layers=cfg.model.mtp_num_layers)
            head = init_head_params(model, cfg.seed + 1)
        return model, params, head, load_tokenizer(cfg.init)
    source = data.demonstrations(cfg.data, "train")
    texts = []
    for i in range(min(cfg.tokenizer_texts, len(source))):
        texts += [source[i].prompt, source[i].response]
    tokenizer = data.train_bpe_tokenizer(texts, cfg.vocab_size, tokenizer_dir(cfg))
    vocab = -(-len(tokenizer) // 16) * 16  # divides by any small tensor-parallel degree
    model = cfg.model.build(vocab, tokenizer.eos_token_id, tokenizer.pad_token_id, cfg.dtype)
    model = model.replace(remat=cfg.remat)
    return model, init_params(model, cfg.seed), init_head_params(model, cfg.seed + 1), tokenizer


def tokenizer_dir(cfg: SFTConfig) -> Path:
    return Path(cfg.init) if cfg.init else Path(cfg.out) / "tokenizer"


def train(cfg: SFTConfig) -> Path:
    """Runs both stages and exports a Hugging Face directory, whose path is returned."""
    if any((Path(cfg.out) / "checkpoints").glob("*")):
        raise ConfigError(f"{cfg.out} holds checkpoints of an earlier run; set out= to another")
    try:
        mesh = sharding.make_mesh(cfg.mesh)
        model, params, head, tokenizer = start_model(cfg, mesh)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if mesh is not None:
        params = jax.device_put(params, sharding.param_shardings(mesh, params))
        head = jax.device_put(head, sharding.param_shardings(mesh, head))
    count = sum(a.size for a in jax.tree.leaves(params))
    print(f"policy {count / 1e6:.2f} M parameters, vocabulary {model.vocab_size}, head "
          f"{sum(a.size for a in jax.tree.leaves(head)) / 1e6:.2f} M")
    stream = PackedDemonstrations(cfg, tokenizer)
    with (
        MetricsLogger(cfg.out, cfg.log.tensorboard, cfg.log.wandb, console_fields=CONSOLE) as log,
        Checkpointer(Path(cfg.out) / "checkpoints", cfg.checkpoint.keep_last) as checkpoints,
    ):
        params = _train_policy(cfg, model, params, head, stream, mesh, log, checkpoints)
        head = _train_head(cfg, model, params, head, stream, mesh, log)
        if cfg.steps + cfg.draft_steps not in checkpoints.all_steps():
            meta = {"position": stream.position}
            checkpoints.save(
                cfg.steps + cfg.draft_steps, {"policy": params, "draft": head}, meta, block=True
            )
    path = Path(cfg.out) / "hf"
    hf.save_checkpoint(path, model, params, head, tokenizer_dir(cfg), dtype="bfloat16")
    return path


def _train_policy(cfg, model, params, head, stream, mesh, log, checkpoints) -> Params:
    trainer = PolicyTrainer(model, sft_loss, cfg.optim.build(), mesh)
    opt_state = trainer.init_opt_state(params)
    since, tokens = time.perf_counter(), 0.0
    for step in range(1, cfg.steps + 1):
        batches = stream.next_update()
        params, opt_state, _, sums = trainer.update(
            params, opt_state, [trainer.place(b) for b in batches], count_denominators(batches)
        )
        tokens += sum(float((b["segment_ids"] > 0).sum()) for b in batches)
        if step % cfg.log_every == 0 or step == cfg.steps:
            now = time.perf_counter()
            log.log(
                step,
                {
                    "train/loss": sums["loss"],
                    "train/entropy": sums["entropy"] / sums["tokens"],
                    "train/grad_norm": sums["grad_norm"],
                    "train/tokens_per_sec": tokens / (now - since),
                    "train/demonstrations_passed_over": stream.passed_over,
                },
            )
            since, tokens = now, 0.0
        if cfg.checkpoint.every and step % cfg.checkpoint.every == 0:
            trees = {"policy": params, "draft": head}
            checkpoints.save(step, trees, {"position": stream.position})
    return params


def _train_head(cfg, model, params, head, stream, mesh, log) -> Params:
    policy = PolicyTrainer(model, sft_loss, cfg.optim.build(), mesh)
    trainer = DraftTrainer(model, cfg.draft, mesh=mesh)
    opt_state = trainer.init_opt_state(head)
    for step in range(cfg.steps + 1, cfg.steps + cfg.draft_steps + 1):
        batches = [policy.place(b) for b in stream.next_update()]
        states = [policy.states(params, batch) for batch in batches]
        head, opt_state, sums = trainer.update(head, opt_state, params, batches, states)
        if step % cfg.log_every == 0:
            log.log(step, draft_metrics(sums))
    return head


def main(argv: list[str] | None = None) -> None:
    cfg, _ = parse_config(
        SFTConfig, argv, "train.sft", "Train a policy and its draft head on demonstrations."
    )
    try:
        path = train(cfg)
    except (ConfigError, CheckpointError, UnsupportedModelError, FileNotFoundError) as error:
        sys.exit(f"train.sft: error: {error}")
    print(f"exported to {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
