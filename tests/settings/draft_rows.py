"""Rows of `train.draft`."""

from __future__ import annotations

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
from rows import (
    PLACES,
    Raised,
    Reaches,
    ReadBy,
    Row,
    Stopped,
    called_with,
    outcome,
    scratch,
    written,
)
from train_rows import (
    DAPO,
    DATA,
    GSM8K,
    GYM,
    answers,
    draft_of,
    eagle3_files,
    generated,
    head_rows,
    heldout,
    looked_at,
    other_policy,
    policy,
    tokenizer,
)

from specjax import EngineConfig, SamplingParams
from train import draft, draft_data, draft_kinds
from train.draft_data import Pair, choose_vocabulary, order_of, pack_pairs, read_texts
from train.draft_schema import DraftRunConfig
from train.inputs import Prompts

TEXTS = written(
    "texts.jsonl", "".join(json.dumps({"prompt": f"{i}+1=", "completion": "2"}) + "\n"
                           for i in range(40))
)  # fmt: skip
PAIRS = [Pair([1, 2], [3 + i % 9, 4, 5]) for i in range(90)]


def started(cfg: DraftRunConfig) -> draft.Run:
    return draft.Run(cfg, draft.Stop())


def texts(cfg: DraftRunConfig):
    return outcome(lambda: read_texts(cfg, Prompts(tokenizer(), cfg.data)))


def head(cfg: DraftRunConfig):
    """The class of the head that a run starts from and its arrays, or why there is none."""
    model = policy().replace(mtp_num_layers=0)

    def begins():
        run = started(cfg)
        return run.given_head or draft_kinds.start_head(cfg, model, run.params, None)

    found = outcome(begins)
    if isinstance(found, Raised):
        return found
    source, arrays = found
    return type(source).__name__, jax.tree.leaves(arrays)


def begun(cfg: DraftRunConfig) -> draft.Run:
    """A run before its first update, with a head of nothing to evaluate."""
    found = started(cfg)
    found.begin(PAIRS)
    return found


def kept(cfg: DraftRunConfig):
    """How many bytes of states are kept after a micro-batch, and where."""
    run = begun(cfg)
    run.states._compute = lambda batch: jnp.zeros((1, 256, 16), jnp.float32)
    run.states(0, {"x": np.zeros(1)})
    return run.states.bytes, run.states._directory is None


def engine(cfg: DraftRunConfig):
    """What the engine of a run's samples is made with."""
    return called_with(draft, "Engine", lambda: started(cfg)._engine(None, None, 3)).arguments


def asked(cfg: DraftRunConfig) -> SamplingParams:
    return cfg.rollout.sampling_params(1, cfg.rollout.n)


def evaluating(cfg: DraftRunConfig):
    """What is measured at which update, how, and with which seed."""
    run = begun(cfg)
    runner, jobs = run.evaluator.runner, []
    stand_in = types.SimpleNamespace(
        set_params=lambda *_: None, generate=lambda given, _: jobs.extend(given) or _stop()
    )
    outcome(lambda: run._accept_lengths(stand_in, {}))
    due = []
    for step in range(run.total + 1):
        run.step = step
        due.append(run.evaluates())
    return due, runner.batch, runner.tree, [(job.prompt, job.params) for job in jobs]


def _stop():
    raise Stopped


def sampled(cfg: DraftRunConfig):
    """The jobs of the first block of samples."""
    run, jobs = started(cfg), []
    order = draft.data.endless(run.problems, cfg.data.seed)
    sampler = draft_data.Sampler(cfg, scratch("no-run"), order, run.prompts)
    stand_in = types.SimpleNamespace(generate=lambda given, _: jobs.extend(given) or _stop())
    outcome(lambda: sampler.run(stand_in, (1,), None))
    return sampler.sizes, [(job.prompt, job.params) for job in jobs]


def trainer(cfg: DraftRunConfig):
    """The programs of a run."""
    run = begun(cfg)
    return run.policy, run.trainer


def batches(cfg: DraftRunConfig):
    return pack_pairs(cfg, PAIRS)


LENGTHS = {
    "rollout.max_tokens": 20, "rollout.max_prompt_tokens": 12, "data.overlong_prompts": "drop",
}  # fmt: skip
SMALL = {
    **LENGTHS, "kind": "mtp", "eval.problems": 0, "packing.row_length": 64, "packing.rows": 1,
    "draft.unroll_steps": 1,
}  # fmt: skip
MEASURED = {**SMALL, "eval.problems": 3, "eval.strategy": "1_1_2", "eval.max_batch": 1}
PASSES = {**SMALL, "epochs": 2}
CACHED = {**PASSES, "states": "cache"}
DRAFT = {
    "model": Row(other_policy, lambda cfg: started(cfg).model, SMALL),
    "revision": Row("main", lambda cfg: outcome(lambda: started(cfg)), SMALL),
    "family": Row("nowhere:FAMILY", lambda cfg: outcome(lambda: bool(started(cfg))), SMALL),
    "kind": Row("mtp", head, LENGTHS),
    "init": Row(lambda: str(PLACES.policy), head, SMALL),
    "draft_overrides": Row(
        {"norm_output": True},
        lambda cfg: started(cfg).given_head[0],
        {**SMALL, "kind": "eagle3", "init": eagle3_files},
    ),
    "out": ReadBy(lambda: str(scratch("draft-elsewhere")), draft),
    "seed": (Row(1, sampled, SMALL), Row(1, head, SMALL), Row(1, batches, SMALL),
             Row(1, lambda cfg: order_of(cfg, 9, 1), SMALL)),
    "steps": Row(5, lambda cfg: begun(cfg).total, SMALL),
    "epochs": Row(3, lambda cfg: begun(cfg).total, SMALL),
    "states": Row("cache", kept, PASSES),
    "cache_bytes": Row(1, kept, CACHED),
    "cache_dir": Row(lambda: str(scratch("states")), kept, CACHED),
    "draft_vocab": Row(5, lambda cfg: choose_vocabulary(cfg, PAIRS, 99, (1,)).ids),
    **{name: row for name, row in DATA.items() if name not in ("data.task", "data.answer_key")},
    "data.task": Row("prompt", texts, {**SMALL, "data.texts": DAPO}),
    "data.answer_key": Row("question", answers, {"data.path": GSM8K}),
    "data.dataset": Row("twos", generated, GYM),
    "data.dataset_args": Row({"first": 3}, generated, GYM),
    "data.texts": Row(TEXTS, lambda cfg: len(started(cfg).problems), SMALL),
    "data.overlong_prompts": Row("truncate", looked_at, {"rollout.max_prompt_tokens": 40}),
    "data.heldout_size": Row(4, heldout),
    "rollout.prompts": Row(7, sampled, SMALL),
    "rollout.n": Row(3, sampled, SMALL),
    **{
        f"rollout.{name}": Reaches(value, asked, SamplingParams, name)
        for name, value in {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "max_tokens": 30}.items()
    },
    "rollout.temperature": (
        Reaches(0.5, asked, SamplingParams, "temperature"),
        Row(0.5, lambda cfg: trainer(cfg)[1].rollout, SMALL),
    ),
    "rollout.max_prompt_tokens": Row(40, looked_at),
    "rollout.max_batch": Row(5, sampled, SMALL),
    "rollout.scan_layers": Row(True, lambda cfg: engine(cfg)["cfg"].run.scan_layers, SMALL),
    **{
        name: row
        for name, row in head_rows(
            draft_of, {"unroll_steps": 2, "step_decay": 0.5}
        ).items()
        if name not in ("draft.mtp_loss_scaling_factor", "draft.epochs", "draft.max_microbatches")
    },
    "packing.row_length": Row(128, batches, SMALL),
    "packing.rows": Row(2, batches, SMALL),
    "eval.problems": Row(2, evaluating, MEASURED),
    "eval.every": Row(1, evaluating, MEASURED),
    "eval.strategy": Row("2_1_3", evaluating, MEASURED),
    "eval.max_batch": Row(2, evaluating, MEASURED),
    "eval.seed": Row(5, evaluating, MEASURED),
    "save_every": ReadBy(3, draft),
    "keep_last": ReadBy(3, draft),
    "log_every": ReadBy(3, draft),
    "export": (ReadBy("safeailab", draft_kinds), ReadBy("none", draft)),
    "export_dtype": ReadBy("float32", draft_kinds),
    "dtype": Row("bfloat16", lambda cfg: started(cfg).params["norm"].dtype, SMALL),
    "logprob_chunk_size": Row(64, lambda cfg: [t.chunk for t in trainer(cfg)], SMALL),
    "attention": (
        Row("tpu", lambda cfg: outcome(lambda: trainer(cfg)[0].cfg.run.attention), SMALL),
        Reaches("reference", lambda cfg: engine(cfg)["config"], EngineConfig, "attention", SMALL),
    ),
    "log.tensorboard": ReadBy(True, draft),
    "log.wandb": ReadBy(True, draft),
    "log.live": ReadBy(False, draft),
}  # fmt: skip

BASE = {DraftRunConfig: {"model": lambda: str(PLACES.policy), "out": lambda: str(scratch("draft"))}}
TABLES = {DraftRunConfig: DRAFT}
