"""Names of settings: the nearest one, and those of other programs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

# Last words of settings of vLLM, SGLang, verl and TRL -> how the key here ends.
FOREIGN = {
    "max_new_tokens": "max_tokens",
    "max_completion_length": "max_tokens",
    "response_length": "max_tokens",
    "max_response_length": "max_tokens",
    "max_prompt_length": "max_prompt_tokens",
    "clip_ratio_low": "clip_ratio",
    "max_model_len": "max_len",
    "max_num_seqs": "max_batch",
    "top_logprobs": "logprobs",
    "tensor_parallel_size": "tp",
    "tensor_model_parallel_size": "tp",
    "data_parallel_size": "replicas",
    "speculative_model": "draft",
    "speculative_draft_model_path": "draft",
    "prompt_lookup_max": "ngram_max",
    "num_generations": "rollout.n",
    "train_batch_size": "rollout.prompts",
    "learning_rate": "optim.lr",
    "max_grad_norm": "clip_norm",
    "grad_clip": "clip_norm",
    "max_steps": "steps",
    "save_freq": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "test_freq": "eval.every",
    "eval_steps": "eval.every",
    "train_files": "data.path",
    "val_files": "data.heldout_path",
    "reward_funcs": "reward",
    "adv_estimator": "algo.preset",
    "loss_agg_mode": "loss_aggregation",
    "beta": "kl_loss_coef",
    "epsilon": "clip_ratio",
    "epsilon_high": "clip_ratio_high",
    "num_iterations": "updates_per_rollout",
    "ppo_epochs": "updates_per_rollout",
}


def nearest(name: str, known: Iterable[Any], cutoff: float = 0.6) -> str:
    """The end of a message about an unknown name: a known one that is close, or nothing."""
    close = difflib.get_close_matches(name, [str(k) for k in known if k is not None], 1, cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def nearest_key(name: str, keys: Iterable[str]) -> str:
    """The end of a message about an unknown key: the one that is meant, or where to look."""
    keys, last = [*keys], name.rpartition(".")[2]
    meant = f".{FOREIGN.get(last, last)}"
    tails = {key.rpartition(".")[2]: key for key in keys}
    similar = difflib.get_close_matches(last, tails, 1, 0.7)
    return (
        nearest(name, [key for key in keys if f".{key}".endswith(meant)], 0.0)
        or nearest(name, keys)
        or nearest(name, [tails[tail] for tail in similar], 0.0)
        or "; --help lists every key"
    )
