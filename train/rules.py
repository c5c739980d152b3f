"""Settings of `train.rl` and `train.sft` that have no effect unless others are set.

Each row names settings, the condition under which they have an effect, and what to do if it does
not hold. Rows about an objective's own options are with the objective (`train.loss.objectives`).
The sections themselves check for settings that contradict each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.schema import Needs
from specjax.speculation import (
    drafts_with_head,
    is_off,
    is_switched_off,
    speculation_rules,
    switched_on,
)
from train.registry import SUMS_REWARD
from train.rewards.builtin import THINKS_FIRST
from train.rollout_schema import FILTERS, TRANSFORMS, transforms

Values = Mapping[str, Any]


def _speculates(v: Values) -> bool:
    return v["draft.mode"] != "none" and not is_off(v, "rollout")


def _drafts_with_head(v: Values) -> bool:
    return drafts_with_head(v, "rollout")


def _may_train(v: Values) -> bool:
    """Whether a head would be trained if there is one."""
    return v["draft.mode"] in ("auto", "online") and v["draft.mtp_loss_scaling_factor"] > 0


def _trains_head(v: Values) -> bool:
    return _speculates(v) and _drafts_with_head(v) and _may_train(v)


def _samples_by_more(v: Values) -> bool:
    """Whether rollouts sample with more than a temperature."""
    own = {name: v[f"rollout.{name}"] for name in ("temperature", *TRANSFORMS)}
    return bool(transforms(own))


def _generates_sums(v: Values) -> bool:
    return v["data.task"] == "sums" or (v["data.task"] == "auto" and v["data.path"] is None)


def _generates(v: Values) -> bool:
    return _generates_sums(v) or v["data.task"] == "reasoning_gym"


def _generates_sets(v: Values) -> bool:
    """Whether a set of evaluation has problems that are generated."""
    return any(each.get("dataset") for each in v["eval.sets"].values())


_IS_GENERATED = (
    "the task is generated and reads no file; set data.path=FILE and leave out data.task, or leave "
    "this out"
)
DATA_RULES = (
    Needs(
        ("data.heldout_path",), lambda v: not _generates(v), _IS_GENERATED
    ),
    Needs(
        ("data.train_size",),
        _generates,
        "it is the number of problems that are generated, and [data.path] is trained on; leave out "
        "one of them",
    ),
    Needs(
        ("data.min_terms", "data.max_terms", "data.max_number"),
        _generates_sums,
        "it shapes the sums that data.task=sums generates, and [data.path] is trained on; leave "
        "out one of them",
    ),
    Needs(
        ("data.duplicates", "data.prompt_key", "data.answer_key"),
        lambda v: not _generates(v),
        "the task is generated and has no rows; set data.path=FILE, or leave it out",
    ),
    Needs(
        ("data.chat_template_kwargs",),
        lambda v: not (_generates_sums(v) and v["data.chat"] == "off"),
        "the task is sums, whose prompts are text, and with [data.chat] no chat template is "
        "applied; leave out one of them",
    ),
)  # fmt: skip
_MESH = (
    Needs(
        ("mesh.cp_order", "mesh.cp_attention"),
        lambda v: v["mesh.cp"] > 1,
        "[mesh.cp] splits no row; raise mesh.cp, or leave it out",
    ),
    Needs(
        ("mesh.sequence_parallel",),
        lambda v: v["mesh.tp"] > 1,
        "[mesh.tp] splits no product; raise mesh.tp, or leave it out",
    ),
)
_REMAT = (
    Needs(
        ("remat_policy",),
        lambda v: v["remat"],
        "[remat] recomputes nothing; set remat=true, or leave it out",
    ),
)


def decay_rule(section: str) -> Needs:
    return Needs(
        (f"{section}.final_lr_ratio",),
        lambda v: v[f"{section}.decay_steps"] > 0,
        f"[{section}.decay_steps] keeps the rate constant; set {section}.decay_steps, or leave it "
        "out",
    )


_NOT_TRAINED = (
    "no draft head is trained, with [draft.mode], [draft.mtp_loss_scaling_factor], "
    "[rollout.strategy] and [rollout.draft]; set draft.mode=online with a head that drafts "
    "(rollout.draft=random for a new one), or leave it out"
)
DEPTH_RULE = Needs(
    ("draft.step_decay",),
    # null: the strategy decides, and rules are applied again when it has (`settle_drafting`)
    lambda v: v["draft.unroll_steps"] != 1,
    "[draft.unroll_steps] trains one step, which has the weight 1; raise draft.unroll_steps, or "
    "leave it out",
)

# Keys in sections of both programs that one of the programs does not read.
RL_ABSENT_KEYS = dict.fromkeys(
    ("data.slip", "data.impatience", "data.strip_calculator"),
    "it is about worked answers to imitate, which train.sft reads and train.rl does not; leave it "
    "out",
)
SFT_ABSENT_KEYS = {
    "data.heldout_size": "train.sft evaluates nothing; leave it out",
    "data.dataset": "reasoning-gym has no worked answers to imitate; leave it out",
    "data.dataset_args": "reasoning-gym has no worked answers to imitate; leave it out",
    "data.unwinnable": (
        "it is about gold answers, which train.rl checks and train.sft does not; leave it out"
    ),
    "draft.spot": "train.sft has no rollouts, and so no gaps in them; leave it out",
}


def _rewards(v: Values) -> list[str]:
    """The names of the rewards."""
    return [v["reward"]] if isinstance(v["reward"], str) else v["reward"]


def _set_rewards(v: Values) -> list[str]:
    """The names of rewards of evaluation sets; `auto` where the rows of a set decide."""
    found = []
    for each in v["eval.sets"].values():
        own = each.get("reward") or _rewards(v)
        found += [own] if isinstance(own, str) else own
    return found


def _may_use_workers(v: Values) -> bool:
    """Whether rewards may run in processes of their own, see `train.rewards.scoring.Scorer`.

    With `auto` the rows of files decide, which `train.data.checks` reads.
    """
    if v["rewards.workers"] is not None:
        return v["rewards.workers"] > 0
    usual = v["rewards.pattern"] == THINKS_FIRST
    names = [SUMS_REWARD] if _rewards(v) == ["auto"] and _generates_sums(v) else _rewards(v)
    return any(
        name not in ("exact", "number", "choice") and not (name == "format" and usual)
        for name in (*names, *_set_rewards(v))
    )


RL_RULES = (
    *DATA_RULES,
    Needs(
        ("data.dataset", "data.dataset_args"),
        lambda v: v["data.task"] == "reasoning_gym",
        "it is of reasoning-gym, and [data.task] is another task; set data.task=reasoning_gym, or "
        "leave it out",
    ),
    Needs(
        ("rewards.pattern",),
        lambda v: "format" in (*_rewards(v), *_set_rewards(v)),
        "it is of the reward `format`, and [reward] has none; add it, or leave this out",
    ),
    Needs(
        ("rewards.timeout",),
        _may_use_workers,
        "[rewards.workers] with [reward] needs no processes, and there is no time limit without; "
        "set rewards.workers, or leave it out",
    ),
    Needs(
        ("data.unwinnable",),
        lambda v: not _generates(v),
        "the task is generated, and every problem of it can be won; set "
        "data.path=FILE, or leave it out",
    ),
    Needs(
        ("data.unwinnable",),
        lambda v: any(
            ":" not in name and name not in ("format", "reasoning_gym") for name in _rewards(v)
        ),
        "gold answers are checked with a built-in reward that compares answers, and [reward] is "
        "none; leave it out",
    ),
    Needs(
        # Problems of data.heldout_path are left out of training in any case.
        ("data.heldout_size",),
        lambda v: v["eval.problems"] > 0 or _generates_sets(v),
        "[eval.problems] evaluates nothing; raise eval.problems, or leave it out",
    ),
    Needs(
        ("eval.every", "eval.before", "eval.max_batch", "eval.seed"),
        lambda v: v["eval.problems"] > 0 or bool(v["eval.sets"]),
        "[eval.problems] evaluates nothing; raise eval.problems, set eval.sets, or leave it out",
    ),
    Needs(
        ("rollout.draft_vocab_every",),
        lambda v: v["rollout.draft_vocab"] is not None and v["rollout.token_map"] is None,
        "the draft proposes all tokens, or those of [rollout.token_map]; set rollout.draft_vocab "
        "alone, or leave it out",
    ),
    Needs(
        ("rollout.draft_vocab_every",),
        lambda v: v["rollout.acceptance"] in ("coupled", "greedy"),
        "[rollout.acceptance] needs the tokens that it began with; use rollout.acceptance=coupled, "
        "or leave it out",
    ),
    Needs(
        ("rollout.draft_vocab_decay",),
        lambda v: (
            v["rollout.draft_vocab"] is not None
            and v["rollout.token_map"] is None
            and v["rollout.draft_vocab_every"] > 0
            and v["rollout.acceptance"] in ("coupled", "greedy")
        ),
        "the tokens that the draft proposes are not chosen by what rollouts emit; set "
        "rollout.draft_vocab, or leave it out",
    ),
    Needs(
        ("rollout.max_staleness",),
        lambda v: v["rollout.partial"],
        "[rollout.partial] carries nothing from step to step; set rollout.partial=true, or leave "
        "it out",
    ),
    Needs(
        tuple(f"rollout.{name}" for name in FILTERS),
        lambda v: v["rollout.temperature"] > 0,
        "[rollout.temperature] takes the most likely token each time; raise rollout.temperature, "
        "or leave it out",
    ),
    Needs(
        ("rollout.include_stop_str_in_output",),
        lambda v: bool(v["rollout.stop"]),
        "[rollout.stop] names no string; set rollout.stop, or leave it out",
    ),
    Needs(
        ("algo.logprobs",),
        _samples_by_more,
        "rollouts sample with a temperature alone, of which temperature and processed "
        "log-probabilities are the same; set rollout.top_p or another transform, or leave it out",
    ),
    *speculation_rules(
        "rollout",
        _speculates,
        "[draft.mode] and [rollout.strategy] leave nothing to speculate with; set a strategy and "
        "leave out draft.mode, or leave this out",
    ),
    Needs(
        ("rollout.aligned",),
        _samples_by_more,
        "rollouts sample with a temperature alone, which drafts always have; set rollout.top_p or "
        "another transform, or leave it out",
    ),
    Needs(
        ("rollout.strategy", "rollout.control.*"),
        lambda v: v["draft.mode"] != "none",
        "draft.mode=none decodes plainly; leave out one of them",
        unless="off",
    ),
    switched_on(
        "rollout",
        (
            "draft.loss", "draft.loss_top_k", "draft.unroll_steps", "draft.step_decay",
            "draft.epochs", "draft.max_microbatches", "draft.optim.*", "draft.spot.*",
            "checkpoint.draft_only",
        ),
    ),
    switched_on("rollout", ("draft.mtp_loss_scaling_factor",), unless=0),
    Needs(
        ("draft.mode",),
        lambda v: v["draft.mode"] != "online" or not is_switched_off(v, "rollout"),
        "rollout.control.fastrl says enable: false, which decodes plainly, and there is no head to "
        "train; set enable: true, or leave out draft.mode",
    ),
    Needs(
        ("draft.mode",),
        lambda v: _speculates(v) or v["draft.mode"] != "online",
        "[rollout.strategy] decodes plainly, and there is no head to train; leave out one of them",
    ),
    # Training of the head.
    Needs(
        (
            "draft.loss", "draft.loss_top_k", "draft.unroll_steps", "draft.step_decay",
            "draft.epochs", "draft.max_microbatches", "draft.optim.*",
        ),
        _trains_head,
        _NOT_TRAINED,
    ),
    Needs(("draft.mtp_loss_scaling_factor",), _trains_head, _NOT_TRAINED, unless=0),
    Needs(
        ("draft.spot.enabled",),
        _drafts_with_head,
        "it trains the draft head, and [rollout.draft] drafts without one; leave it out",
    ),
    DEPTH_RULE,
    Needs(
        ("draft.spot.gaps", "draft.spot.updates", "draft.spot.buffer_tokens"),
        lambda v: v["draft.spot.enabled"],
        "[draft.spot.enabled] switches spot training off; set draft.spot.enabled=true, or leave it "
        "out",
    ),
    Needs(
        ("draft.epochs",),
        lambda v: not (v["draft.spot.enabled"] and v["draft.spot.updates"] > 0),
        "[draft.spot.updates] says how many updates the head has; leave out one of them",
    ),
    Needs(
        ("checkpoint.draft_only",),
        lambda v: _speculates(v) and _drafts_with_head(v),
        "no head drafts, with [draft.mode], [rollout.strategy] and [rollout.draft], and none is "
        "saved; leave it out",
    ),
    # The policy's loss.
    Needs(
        ("algo.tis_cap", "algo.tis_level"),
        lambda v: v["algo.tis"],
        "[algo.tis] weighs nothing; set algo.tis=true, or leave it out",
    ),
    Needs(
        ("algo.kl_loss_type", "algo.use_bias_correction_kl"),
        lambda v: v["algo.kl_loss_coef"] > 0,
        "[algo.kl_loss_coef] has no KL in the loss; set algo.kl_loss_coef, or leave it out",
    ),
    Needs(
        ("algo.kl_penalty",),
        lambda v: v["algo.kl_coef"] > 0,
        "[algo.kl_coef] has no KL in rewards; set algo.kl_coef, or leave it out",
    ),
    Needs(
        ("algo.ref_update_steps",),
        lambda v: v["algo.kl_loss_coef"] > 0 or v["algo.kl_coef"] > 0,
        "[algo.kl_loss_coef] and [algo.kl_coef] need no reference; set one of them, or leave it "
        "out",
    ),
    Needs(
        ("algo.overlong_penalty_factor",),
        lambda v: v["algo.overlong_buffer_len"] > 0,
        "[algo.overlong_buffer_len] has no penalty; set algo.overlong_buffer_len, or leave it out",
    ),
    Needs(
        ("algo.max_num_gen_batches",),
        lambda v: v["algo.dynamic_sampling"],
        "[algo.dynamic_sampling] replaces no group; set algo.dynamic_sampling=true, or leave it "
        "out",
    ),
    Needs(
        ("algo.filter_groups.*",),
        lambda v: v["algo.dynamic_sampling"],
        "[algo.dynamic_sampling] replaces no group; set algo.dynamic_sampling=true, or leave it "
        "out",
    ),
    Needs(
        ("algo.filter_groups.metric",),
        lambda v: len(_rewards(v)) > 1,
        "[reward] is one reward, which is compared in any case; name several, or leave it out",
    ),
    decay_rule("optim"),
    decay_rule("draft.optim"),
    *_MESH,
    *_REMAT,
    Needs(
        (
            "distributed.coordinator", "distributed.process_id", "distributed.num_processes",
            "distributed.local_devices", "distributed.start_timeout", "distributed.lost_after",
        ),
        lambda v: v["distributed.mode"] != "off",
        "distributed.mode=off is one process; leave out one of them",
    ),
)  # fmt: skip

_NO_HEAD_STAGE = (
    "[draft_steps], [draft.mode] and [draft.mtp_loss_scaling_factor] train no head; raise "
    "draft_steps and leave out draft.mode, or leave this out"
)
SFT_RULES = (
    *DATA_RULES,
    Needs(
        ("data.slip", "data.impatience"),
        _generates_sums,
        "it shapes the demonstrations that data.task=sums generates, and [data.path] is imitated; "
        "leave out one of them",
    ),
    Needs(
        ("data.strip_calculator",),
        lambda v: not _generates_sums(v),
        "the generated task sums has no such annotations; set data.path=FILE, or leave it out",
    ),
    Needs(
        ("data.strip_calculator",),
        lambda v: v["data.task"] in ("auto", "gsm8k") or ":" in v["data.task"],
        "such annotations are GSM8K's, and [data.task] has none; leave it out",
    ),
    Needs(
        (
            "model.*", "!model.mtp_num_layers", "!model.mtp_concat", "!model.mtp_target_hidden",
            "!model.mtp_recycle", "vocab_size", "tokenizer_texts",
        ),
        lambda v: not v["init"],
        "[init] has a shape and a tokenizer of its own; leave out init to start from nothing, or "
        "leave this out",
    ),
    Needs(
        ("draft_steps",),
        _may_train,
        "[draft.mode] with [draft.mtp_loss_scaling_factor] trains no head; leave out these, or "
        "leave this out",
        unless=0,
    ),
    Needs(
        ("draft.*", "!draft.mode", "!draft.mtp_loss_scaling_factor"),
        lambda v: v["draft_steps"] > 0 and _may_train(v),
        _NO_HEAD_STAGE,
    ),
    Needs(
        ("draft.mtp_loss_scaling_factor",),
        lambda v: v["draft_steps"] > 0 and _may_train(v),
        _NO_HEAD_STAGE,
        unless=0,
    ),
    DEPTH_RULE,
    Needs(
        ("optim.*", "loss_on"),
        lambda v: v["steps"] > 0,
        "[steps] trains no policy; raise steps, or leave it out",
    ),
    decay_rule("optim"),
    decay_rule("draft.optim"),
    *_MESH,
    *_REMAT,
)  # fmt: skip
