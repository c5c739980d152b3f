"""Which settings of `train.rl` and `train.sft` need which others: what would change nothing.

Each row names settings, when something reads them, and what to do where nothing does. Settings that
are read but contradict each other are refused where the sections check themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.config.strategy import OFF_NAMES, Strategy
from specjax.schema import Needs

Values = Mapping[str, Any]


def _speculates(v: Values) -> bool:
    return v["draft.mode"] != "none" and str(v["rollout.strategy"]).lower() not in OFF_NAMES


def _drafts_with_head(v: Values) -> bool:
    """Whether the head may draft; `auto` is not known before the checkpoint is."""
    return v["rollout.source"] in ("auto", "head") and v["rollout.draft_model"] is None


def _trains_head(v: Values) -> bool:
    return _speculates(v) and _drafts_with_head(v) and v["draft.mode"] in ("auto", "online")


def _may_look_up(v: Values) -> bool:
    """Whether n-grams may draft."""
    asked = v["rollout.draft_model"] is not None or v["rollout.head"] != "checkpoint"
    return v["rollout.source"] == "ngram" or (v["rollout.source"] == "auto" and not asked)


def _strategies(v: Values) -> list[str]:
    """Those that a rollout may use, `rollout.strategy` among them where it is one."""
    controller = v.get("rollout.control.controller")
    listed = list(v.get("rollout.control.strategies") or ())
    if controller is None or v.get("rollout.control.fastrl") or controller == "ema":
        return [v["rollout.strategy"], *listed]
    if controller == "static":
        return [v["rollout.strategy"], *listed, v.get("rollout.control.initial")]
    return listed


def _grows_trees(v: Values) -> bool:
    for strategy in filter(None, _strategies(v)):
        try:
            if Strategy.parse(strategy).is_dynamic:
                return True
        except ValueError:  # `off`, or a mistake that is named elsewhere
            continue
    return False


def _strategy_is_used(v: Values) -> bool:
    off = str(v["rollout.strategy"]).lower() in OFF_NAMES
    return off or v["rollout.strategy"] in _strategies(v)


def _several_devices(v: Values) -> bool:
    return v["mesh.cp"] > 1


def _generates_sums(v: Values) -> bool:
    return v["data.task"] == "sums" or (v["data.task"] == "auto" and v["data.path"] is None)


_SUMS_ARE_GENERATED = (
    "the task is sums, which is generated and reads no file; set data.path=FILE and leave out "
    "data.task, or leave this out"
)
_DATA = (
    Needs(
        ("data.heldout_path",), lambda v: not _generates_sums(v), _SUMS_ARE_GENERATED
    ),
    Needs(
        ("data.train_size", "data.min_terms", "data.max_terms", "data.max_number"),
        _generates_sums,
        "it shapes the sums that data.task=sums generates, and [data.path] is trained on; leave "
        "out one of them",
    ),
    Needs(
        ("data.duplicates",),
        lambda v: not _generates_sums(v),
        "the task is sums, which is generated and has no rows; set data.path=FILE, or leave it out",
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
        _several_devices,
        "[mesh.cp] splits no row; raise mesh.cp, or leave it out",
    ),
)


def _decay(section: str) -> Needs:
    return Needs(
        (f"{section}.final_lr_ratio",),
        lambda v: v[f"{section}.decay_steps"] > 0,
        f"[{section}.decay_steps] keeps the rate constant; set {section}.decay_steps, or leave it "
        "out",
    )


_DEPTH = Needs(
    ("draft.step_decay",),
    lambda v: v["draft.unroll_steps"] > 1,
    "[draft.unroll_steps] trains one step, which has the weight 1; raise draft.unroll_steps, or "
    "leave it out",
)

RL_RULES = (
    *_DATA,
    Needs(
        ("data.slip", "data.impatience", "data.strip_calculator"),
        lambda v: False,
        "it is about worked answers to imitate, which train.sft reads and train.rl does not; leave "
        "it out",
    ),
    Needs(
        ("data.unwinnable",),
        lambda v: not _generates_sums(v),
        "the task is sums, which is generated, and every problem of it can be won; set "
        "data.path=FILE, or leave it out",
    ),
    Needs(
        ("data.unwinnable",),
        lambda v: ":" not in v["reward"],
        "gold answers are checked with a built-in reward only, and [reward] is your own; leave it "
        "out",
    ),
    Needs(
        ("data.heldout_size", "data.heldout_path", "eval.every", "eval.max_batch", "eval.seed"),
        lambda v: v["eval.problems"] > 0,
        "[eval.problems] evaluates nothing; raise eval.problems, or leave it out",
    ),
    Needs(
        ("rollout.max_staleness",),
        lambda v: v["rollout.partial"],
        "[rollout.partial] carries nothing from step to step; set rollout.partial=true, or leave "
        "it out",
    ),
    # Speculation. First what turns all of it off.
    Needs(
        (
            "rollout.source", "rollout.head", "rollout.draft_model", "rollout.ngram_max",
            "rollout.ngram_min", "rollout.ngram_siblings", "rollout.acceptance", "rollout.aligned",
            "rollout.tau", "rollout.adaptive_width", "rollout.spec_verify_tokens",
            "rollout.telemetry",
        ),
        _speculates,
        "[draft.mode] and [rollout.strategy] leave nothing to speculate with; set a strategy and "
        "leave out draft.mode, or leave this out",
    ),
    Needs(
        ("rollout.strategy", "rollout.control.*"),
        lambda v: v["draft.mode"] != "none",
        "draft.mode=none decodes plainly; leave out one of them",
        unless="off",
    ),
    Needs(
        ("draft.mode",),
        lambda v: _speculates(v) or v["draft.mode"] != "online",
        "[rollout.strategy] decodes plainly, and there is no head to train; leave out one of them",
    ),
    Needs(
        ("rollout.head",),
        _drafts_with_head,
        "[rollout.source] with [rollout.draft_model] drafts without a head; set "
        "rollout.source=head, or leave it out",
    ),
    Needs(
        ("rollout.ngram_max", "rollout.ngram_min", "rollout.ngram_siblings"),
        _may_look_up,
        "n-grams do not draft, with [rollout.source], [rollout.draft_model] and [rollout.head]; "
        "set rollout.source=ngram, or leave it out",
    ),
    Needs(
        ("rollout.tau",),
        lambda v: _grows_trees(v) and v["rollout.acceptance"] == "coupled",
        "it scores the paths of a dynamic tree, and [rollout.strategy] is none; use one such as "
        "6_4_16, or leave it out",
    ),
    Needs(
        ("rollout.strategy",),
        _strategy_is_used,
        "rollout.control.strategies does not list it, and [rollout.control.controller] chooses "
        "among these; list it there, or leave it out",
    ),
    # Controllers, each with settings of its own.
    Needs(
        ("rollout.control.initial",),
        lambda v: v["rollout.control.controller"] in ("static", "ema"),
        "[rollout.control.controller] starts where its measurements say; use "
        "rollout.control.controller=static or ema, or leave it out",
    ),
    Needs(
        ("rollout.control.ema", "rollout.control.ema_file"),
        lambda v: v["rollout.control.controller"] == "ema",
        "[rollout.control.controller] has other settings; use rollout.control.controller=ema, or "
        "leave it out",
    ),
    Needs(
        ("rollout.control.bandit",),
        lambda v: v["rollout.control.controller"] == "bandit",
        "[rollout.control.controller] has other settings; use rollout.control.controller=bandit, "
        "or leave it out",
    ),
    Needs(
        ("rollout.control.goodput",),
        lambda v: v["rollout.control.controller"] == "goodput",
        "[rollout.control.controller] has other settings; use rollout.control.controller=goodput, "
        "or leave it out",
    ),
    Needs(
        ("rollout.control.strategies",),
        lambda v: (
            v["rollout.control.controller"] != "ema"
            and not (
                v["rollout.control.controller"] == "static"
                and v["rollout.control.initial"] is not None
            )
        ),
        "[rollout.control.controller] does not choose among them (ema has those of its "
        "candidate_steps, static the one of rollout.control.initial); leave it out",
    ),
    # Training of the head.
    Needs(
        (
            "draft.loss", "draft.unroll_steps", "draft.step_decay", "draft.mtp_loss_scaling_factor",
            "draft.epochs", "draft.max_microbatches", "draft.optim.*",
        ),
        _trains_head,
        "no draft head is trained, with [draft.mode], [rollout.strategy] and [rollout.source]; set "
        "draft.mode=online with a head that drafts (rollout.head=random for a new one), or leave "
        "it out",
    ),
    Needs(
        ("draft.spot.enabled",),
        _drafts_with_head,
        "it trains the draft head, and [rollout.source] with [rollout.draft_model] drafts without "
        "one; leave it out",
    ),
    _DEPTH,
    Needs(
        ("draft.spot.gaps", "draft.spot.updates", "draft.spot.buffer_tokens"),
        lambda v: v["draft.spot.enabled"],
        "[draft.spot.enabled] trains the head in no gap; set draft.spot.enabled=true, or leave it "
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
        "no head drafts, with [draft.mode], [rollout.strategy] and [rollout.source], and none is "
        "saved; leave it out",
    ),
    # The policy's loss.
    Needs(
        ("algo.tis_cap",),
        lambda v: v["algo.tis"],
        "[algo.tis] weighs nothing; set algo.tis=true, or leave it out",
    ),
    Needs(
        ("algo.clip_ratio", "algo.clip_ratio_high"),
        lambda v: v["algo.updates_per_rollout"] > 1 or v["rollout.partial"],
        "with [algo.updates_per_rollout] and [rollout.partial] every token is trained on by the "
        "policy that sampled it, its ratio is 1, and nothing is clipped; raise "
        "algo.updates_per_rollout, or leave it out",
    ),
    Needs(
        ("algo.advantage_eps",),
        lambda v: v["algo.normalize_std"],
        "[algo.normalize_std] divides by nothing; set algo.normalize_std=true, or leave it out",
    ),
    Needs(
        ("algo.max_resample",),
        lambda v: v["algo.dynamic_sampling"],
        "[algo.dynamic_sampling] replaces no group; set algo.dynamic_sampling=true, or leave it "
        "out",
    ),
    _decay("optim"),
    _decay("draft.optim"),
    *_MESH,
    Needs(
        (
            "distributed.coordinator", "distributed.process_id", "distributed.num_processes",
            "distributed.local_devices", "distributed.start_timeout", "distributed.lost_after",
        ),
        lambda v: v["distributed.mode"] != "off",
        "distributed.mode=off is one process; leave out one of them",
    ),
)  # fmt: skip

SFT_RULES = (
    *_DATA,
    Needs(
        ("data.heldout_size",),
        lambda v: False,
        "train.sft evaluates nothing; leave it out",
    ),
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
        ("data.unwinnable",),
        lambda v: False,
        "it is about gold answers, which train.rl checks and train.sft does not; leave it out",
    ),
    Needs(
        ("data.overlong_prompts",),
        lambda v: False,
        "it is about rollout.max_prompt_tokens of train.rl; train.sft passes over demonstrations "
        "longer than [packing.row_length]: raise that, and leave this out",
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
        lambda v: v["draft.mode"] in ("auto", "online"),
        "[draft.mode] trains no head; leave out draft.mode, or leave this out",
        unless=0,
    ),
    Needs(
        ("draft.spot.*",),
        lambda v: False,
        "train.sft has no rollouts, and so no gaps in them; leave it out",
    ),
    Needs(
        ("draft.*", "!draft.mode"),
        lambda v: v["draft_steps"] > 0 and v["draft.mode"] in ("auto", "online"),
        "[draft_steps] and [draft.mode] train no head; raise draft_steps and leave out draft.mode, "
        "or leave this out",
    ),
    _DEPTH,
    Needs(
        ("optim.*", "loss_on"),
        lambda v: v["steps"] > 0,
        "[steps] trains no policy; raise steps, or leave it out",
    ),
    _decay("optim"),
    _decay("draft.optim"),
    *_MESH,
)  # fmt: skip
