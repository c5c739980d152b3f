"""A policy so small that a whole training run takes seconds, and rewards that differ at once.

Its weights are random but sharpened, so that the next token depends on the context; besides
`<|eos|>` a few other tokens end a response, so that lengths vary although nothing has been learnt.
"""

import contextlib
import dataclasses
import io
import json
import os
import time
import zlib
from pathlib import Path
from unittest import mock

import jax
import pytest

from specjax import command_line
from specjax.checkpoint import huggingface as hf
from specjax.drafts.mtp import init_head_params
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params
from specjax.settings import idle
from train import trainer
from train.data.rows import demonstrations
from train.data.tokenizer import train_bpe_tokenizer
from train.schema import DataConfig, RLConfig

SETTINGS = {
    "reward": "tiny_run:coin",
    "rewards.workers": 0,  # a worker would import this module, and jax with it
    "seed": 3,
    "steps": 2,
    "data.max_terms": 3,
    "rollout.prompts": 4,
    "rollout.n": 4,
    "rollout.max_tokens": 20,
    "rollout.max_prompt_tokens": 12,
    "rollout.max_batch": 1,  # one size of the batch to compile
    "rollout.prefill_chunk": 16,  # one program
    "rollout.strategy": "1_1_2",  # a third as much to compile as the default
    "packing.row_length": 64,
    "packing.rows": 2,
    "algo.dynamic_sampling": True,
    "optim.lr": 1e-2,
    "optim.warmup_steps": 0,
    "draft.optim.lr": 1e-2,
    "draft.optim.warmup_steps": 0,
    "draft.unroll_steps": 1,
    "eval.problems": 0,
    "eval.max_batch": 1,
    "checkpoint.every": 0,
}


# Keys of `write_policy` for two layers, a recurrent one and one of attention; a head of attention.
HYBRID = {
    "model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 20, "mtp_num_hidden_layers": 1,
}  # fmt: skip


def coin(text: str, answer: str) -> float:
    """A reward of 0 or 1 that depends on every character of the response."""
    return float(zlib.crc32(f"{text}|{answer}".encode()) % 2)


def nothing(text: str, answer: str) -> float:
    """A reward that teaches nothing: every group has zero variance."""
    return 0.0


def rare(text: str, answer: str) -> float:
    """1 for one response in five: many groups of four have no variance, some have.

    The environment may slow it down, so that a test finds the time to kill the run.
    """
    time.sleep(float(os.environ.get("TINY_RUN_REWARD_SECONDS", "0")))
    return float(zlib.crc32(f"{text}|{answer}".encode()) % 5 == 0)


def arguments(model: Path, out: Path, /, **changes) -> list[str]:
    """`key=value` arguments of a tiny `train.rl`; dots of keys are written as two underscores.

    Settings that others leave without effect are left out, for they would be refused.
    """
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    settings = {**SETTINGS, "model": model, "out": out, **changes}
    return with_effect(RLConfig, settings)


def with_effect(program: type, settings: dict) -> list[str]:
    """`key=value` arguments, without those that others leave without effect."""
    given, unread = [f"{key}={value}" for key, value in settings.items()], set()

    def note(config, names, values=None):
        unread.update(name for name, _ in idle(config, names, values))
        return ()

    # A mistake is one that the program will name.
    quiet = contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit)
    with mock.patch.object(command_line, "idle", note), quiet[0], quiet[1]:
        command_line.parse_config(program, given)
    return [setting for setting in given if setting.partition("=")[0] not in unread]


# Settings that no program of a rollout, or of the policy, depends on.
OF_NO_ROLLOUT = {
    "prompts", "n", "temperature", "over_sample", "partial", "max_staleness", "order", "exact_mode",
}  # fmt: skip
OF_NO_UPDATE = {
    "dynamic_sampling", "max_num_gen_batches", "preset", "normalize_std", "kl_coef",
    "overlong_buffer_len", "overlong_penalty_factor", "mask_truncated", "std_correction",
}  # fmt: skip
# Those that engines that decode plainly take from the rollout's.
OF_PLAIN = (
    "max_prompt_tokens", "max_tokens", "page_size", "chunk_tokens", "prefill_chunk", "scan_layers",
    "products", "dtype",
)  # fmt: skip


KNOWN = {}  # what compiled what, of this process


@contextlib.contextmanager
def shared_programs():
    """Within it, runs with the same settings take programs from the first of them.

    What a program may depend on is not only what it does depend on: runs that train their heads
    otherwise have policy programs of their own, so that a test can find them different.
    """
    build = trainer.build_programs

    def settings(section, without) -> dict:
        return {key: value for key, value in vars(section).items() if key not in without}

    def first(program, *key):
        return KNOWN.setdefault(str((type(program), *key)), program)

    def share(engine, *key) -> None:
        runner = engine.runner
        runner.executables.by_key = first(runner.executables.by_key, *key)
        runner.weights.convert = first(runner.weights.convert, *key)
        runner._empty = first(runner._empty, "empty", *key)

    def shared(cfg, model, source, mesh, places):
        built = build(cfg, model, source, mesh, places)
        roll, common = settings(cfg.rollout, OF_NO_ROLLOUT), (model, cfg.mesh, cfg.attention)
        common = (*common, cfg.rollout.temperature, cfg.draft, source)
        loss = settings(cfg.algo, OF_NO_UPDATE), cfg.rollout.partial
        if cfg.algo.logprobs == "processed":
            loss = (*loss, cfg.rollout.sampling_params())
        built.policy = first(built.policy, *common, *loss, cfg.optim)
        built.draft = first(built.draft, *common)
        for engine, place in zip(built.engines, places, strict=True):
            spec = engine.spec and dataclasses.replace(engine.spec, exact_mode=False)
            share(engine, str(place and place.devices), model, roll, cfg.dtype, spec)
        for engine, place in zip(built.eval_engines, places, strict=False):
            share(engine, str(place and place.devices), model, roll, cfg.dtype, cfg.eval)
        if places == [None]:
            plain = {name: getattr(cfg.rollout, name) for name in OF_PLAIN}
            for engine in built.plain_engines:
                share(engine, model, plain, cfg.rollout.max_batch, cfg.algo.logprobs)
        return built

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "build_programs", shared)
        yield
    if len(KNOWN) > 150:  # a process has room for some 65,000 memory maps; programs take dozens
        KNOWN.clear()


def write_policy(path: Path, with_head: bool = True, raw: dict | None = None, **changes) -> Path:
    """A random policy (D 16, 2 layers) with BPE tokenizer and draft head, Hugging Face layout.

    Args:
      raw: keys of a config.json of another family, beside those that give these sizes.
    """
    rows = demonstrations(DataConfig(), "train")[:200]
    texts = [text for row in rows for text in (row.prompt, row.response)]
    tokenizer = train_bpe_tokenizer(texts, 272, path.with_name(f"{path.name}-tokenizer"))
    ends = [tokenizer.convert_tokens_to_ids(c) for c in "aeiostn"]
    cfg = dense_config(
        **{
            "vocab_size": 272,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "max_position": 256,
            "mtp_num_layers": int(with_head),
            "eos_token_ids": (tokenizer.eos_token_id, *ends),
            "pad_token_id": tokenizer.pad_token_id,
            **changes,
        }
    )
    if raw is not None:
        sizes = {
            "vocab_size": 272, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "max_position_embeddings": 256, "eos_token_id": list(cfg.eos_token_ids),
            "pad_token_id": cfg.pad_token_id, "num_nextn_predict_layers": int(with_head),
        }  # fmt: skip
        cfg = hf.config_of(path / "config.json", {**sizes, **raw}, {})
    params = _sharpened(init_params(cfg, 0))
    head = _sharpened(init_head_params(cfg, 1)) if with_head else None
    hf.save_checkpoint(path, cfg, params, head, path.with_name(f"{path.name}-tokenizer"))
    return path


def _sharpened(params):
    def scale(path, x):
        name = path[-1].key
        return x if "norm" in name else x * (20.0 if name == "embed" else 10.0)

    return jax.tree_util.tree_map_with_path(scale, params)


def write_gsm8k(path: Path, count: int = 64) -> Path:
    """Questions and worked answers as GSM8K's JSON lines."""
    lines = []
    for i in range(count):
        a, b = i % 7 + 2, i % 5 + 3
        question = f"{a} and {b} ({i})?"
        answer = f"{a}+{b}=<<{a}+{b}={a + b}>>{a + b}\n#### {a + b}"
        lines.append(json.dumps({"question": question, "answer": answer}))
    path.write_text("\n".join(lines) + "\n")
    return path
