"""Settings that are refused by name, and what follows for others from the checkpoint."""

import re
from pathlib import Path

import pytest

from serve.settings import ServeConfig
from specjax import schema
from specjax.command_line import ConfigError, parse_config
from specjax.drafts.dflash import DFlashSource
from specjax.drafts.mtp import MTPSource
from specjax.engine import sources
from train.draft_schema import DraftRunConfig
from train.programs import describe_drafting, settle_drafting
from train.schema import RLConfig, SFTConfig

PROGRAMS = {
    "rl": (RLConfig, []),
    "sft": (SFTConfig, []),
    "draft": (DraftRunConfig, []),
    "serve": (ServeConfig, ["model=d"]),
}
# (program, settings, what the message must name)
REFUSED = [
    # data
    ("rl", "data.path=f data.task=sums", "leave out data.task"),
    ("rl", "data.path=f data.min_terms=3", "data.min_terms=3 changes nothing"),
    ("rl", "data.path=f data.task=gsm8k data.prompt_key=q", "data.prompt_key and data.answer_key"),
    ("rl", "data.prompt_key=q", "data.prompt_key=q changes nothing"),
    ("rl", "data.duplicates=drop", "set data.path=FILE"),
    ("rl", "data.unwinnable=drop data.path=f reward=m:f", "reward=m:f is none"),
    ("rl", "data.chat=off data.chat_template_kwargs={a: 1}", "data.chat=off"),
    ("rl", "data.slip=0.5", "which train.sft reads"),
    ("rl", "data.task=reasoning_gym", "set data.dataset"),
    ("rl", "data.task=reasoning_gym data.dataset=x data.path=f", "is generated and reads no file"),
    ("rl", "data.dataset=x", "data.dataset=x changes nothing"),
    ("rl", "data.seed=4294967296", "data.seed: expected an integer of 32 bits"),
    # rewards
    ("rl", "reward=[exact,exact]", "reward: expected one or several different rewards"),
    ("rl", "reward=[exact,best]", "unknown reward 'best'"),
    ("rl", "reward=[exact,format] rewards.weights=[1]", "rewards.weights: expected 2 numbers"),
    ("rl", "reward=exact rewards.weights=[0.0]", "rewards.weights: expected"),
    ("rl", "reward=exact rewards.timeout=3", "rewards.timeout=3.0 changes nothing"),
    ("rl", "reward=number rewards.pattern=x", "rewards.pattern=x changes nothing"),
    # rollouts
    ("rl", "rollout.temprature=1", "did you mean 'rollout.temperature'?"),
    ("rl", "rollout.strategy=5_1_4", "5_1_4"),
    ("rl", "rollout.strategy=8_4_32 rollout.acceptance=recursive", "re-ranking is biased"),
    ("rl", "rollout.strategy=4x2x1 rollout.acceptance=block", "acceptance 'block'"),
    ("rl", "rollout.strategy=4x4x4", "spec_verify_tokens"),
    ("rl", "rollout.draft=ngram rollout.acceptance=block", "the samples that share a batch"),
    ("rl", "rollout.temperature=0 rollout.top_p=0.9", "rollout.top_p=0.9 changes nothing"),
    ("rl", "rollout.aligned=false", "rollout.aligned=false changes nothing"),
    ("rl", "rollout.include_stop_str_in_output=true", "set rollout.stop"),
    ("rl", "rollout.n=1", "rollout.n: expected at least 2"),
    ("rl", "rollout.replicas=0", "rollout.replicas: expected at least 1"),
    ("rl", "rollout.partial=true", "raise over_sample"),
    ("rl", "rollout.max_staleness=2", "set rollout.partial=true"),
    ("rl", "rollout.strategy=off rollout.draft=ngram", "rollout.draft=ngram changes nothing"),
    ("rl", "rollout.draft_kind=eagle3", "use rollout.draft=random"),
    ("rl", "rollout.draft=checkpoint rollout.ngram_max=6", "set rollout.draft=ngram"),
    ("rl", "rollout.tau=0.5", "rollout.tau=0.5 changes nothing"),
    ("rl", "rollout.control.controler=bandit", "did you mean 'rollout.control.controller'?"),
    ("rl", "rollout.control.ema={candidate_steps: [1, 3]}", "rollout.control.controller=ema"),
    ("rl", "rollout.control.initial=2_1_3", "rollout.control.initial=2_1_3 changes nothing"),
    ("rl", "rollout.control={} rollout.strategy=off", "rollout.strategy=off"),
    ("rl", "rollout.control={} rollout.acceptance=block", "would depend on the clock"),
    ("rl", "rollout.control.fastrl={enable: true, mode: 1}", "speculative has unknown keys mode"),
    ("rl", "rollout.control.controller=ema rollout.control.ema_file=no.json", "no.json"),
    # the draft head
    ("rl", "rollout.strategy=off draft.mode=online", "there is no head to train"),
    ("rl", "rollout.draft=ngram draft.mode=online", "draft.mode=online"),
    ("rl", "draft.mode=none rollout.strategy=6_1_7", "draft.mode=none decodes plainly"),
    ("rl", "draft.mode=frozen draft.optim.lr=0.1", "draft.optim.lr=0.1 changes nothing"),
    ("rl", "draft.mode=online draft.mtp_loss_scaling_factor=0", "draft.mtp_loss_scaling_factor"),
    ("rl", "draft.unroll_steps=1 draft.step_decay=0.5", "draft.unroll_steps=1 trains one step"),
    ("rl", "draft.loss=mse", "draft.loss: expected one of"),
    ("rl", "draft.loss=tv draft.loss_top_k=8", "draft.loss_top_k=8"),
    ("rl", "draft.spot.updates=3", "set draft.spot.enabled=true"),
    ("rl", "draft.spot.enabled=true rollout.strategy=off rollout.replicas=2", "none to train"),
    ("rl", "draft.spot.enabled=true", "rollout.replicas=1"),
    ("rl", "rollout.draft=ngram checkpoint.draft_only=true", "checkpoint.draft_only"),
    # the loss
    ("rl", "algo.tis_cap=3", "set algo.tis=true"),
    ("rl", "algo.kl_loss_type=k2", "algo.kl_loss_coef=0.0"),
    ("rl", "algo.kl_penalty=k2", "algo.kl_coef=0.0"),
    ("rl", "algo.ref_update_steps=2", "need no reference"),
    ("rl", "algo.overlong_penalty_factor=2", "set algo.overlong_buffer_len"),
    ("rl", "algo=dapo algo.overlong_buffer_len=2000 rollout.max_tokens=100", "at most"),
    ("rl", "algo.loss_scale_factor=9", "set algo.loss_aggregation=constant"),
    ("rl", "algo.clip_ratio=0.1", "raise algo.updates_per_rollout"),
    ("rl", "algo.objective=gspo algo.clip_ratio=1e-3", "algo.clip_ratio=0.001 changes nothing"),
    ("rl", "algo.objective=gspo algo.importance_sampling_level=sequence", "both levels the same"),
    ("rl", "algo.objective=gpro", "algo.objective: unknown objective 'gpro'"),
    ("rl", "algo=dapa", "algo.preset: unknown preset 'dapa'"),
    ("rl", "algo=dapo algo.preset=gspo", "algo is another name of algo.preset"),
    ("rl", "algo=rloo algo.normalize_std=false", "unknown key 'algo.normalize_std'"),
    ("rl", "algo.objective=dapo", "It is a preset: use algo=dapo"),
    ("rl", "num_iterations=2", "every sample of a step is trained on once"),
    ("rl", "algo.logprobs=processed", "set rollout.top_p or another transform"),
    ("rl", "algo.logprobs=processed rollout.presence_penalty=1 mesh.cp=2", "set mesh.cp=1"),
    ("rl", "algo.dynamic_sampling=false algo.filter_groups.min=1", "replaces no group"),
    ("rl", "algo.dynamic_sampling=true algo.filter_groups.metric=acc", "is one reward"),
    ("rl", "optim.lr=inf", "optim.lr: expected a finite number, got inf"),
    ("rl", "optim.b2=1", "optim.b2: expected a number below 1"),
    ("rl", "optim.final_lr_ratio=0.5", "set optim.decay_steps"),
    # evaluation
    ("rl", "eval.problems=0 eval.every=2", "eval.problems=0 evaluates nothing"),
    ("rl", "eval.sets.a.pth=f", "eval.sets: a: unknown key 'pth'; did you mean 'path'?"),
    ("rl", "eval.sets.a.n=2", "eval.sets.a: has no rows; set its path"),
    ("rl", "eval.sets.heldout.path=f", "got 'heldout'"),
    ("rl", "eval.sets.a={path: f, n: 2, temperature: 0}", "eval.sets.a.n=2"),
    ("rl", "eval.sets.a.path=f eval.sets.a.reward=nothing", "eval.sets.a: unknown reward"),
    ("rl", "eval.sets.a={path: f, dataset: g}", "dataset=g is of task=reasoning_gym"),
    ("rl", f"eval.seed={10**30}", "eval.seed: expected an integer of 64 bits"),
    # devices and files
    ("rl", "mesh.data=2 packing.rows=3", "packing.rows must be a multiple of"),
    ("rl", "mesh.sequence_parallel=true", "mesh.tp=1 splits no product"),
    ("rl", "remat_policy=full", "remat=false recomputes nothing"),
    ("rl", "distributed.mode=off distributed.process_id=1", "distributed.mode=off"),
    ("rl", "rollout.max_tokens=300 packing.row_length=300", "packing.row_length=300"),
    ("rl", "checkpoint.keep_last=0", "checkpoint.keep_last: expected at least 1"),
    ("sft", "data.overlong_prompts=truncate", "raise packing.row_length"),
    ("sft", "data.unwinnable=keep data.path=f", "unknown key 'data.unwinnable'"),
    ("sft", "data.path=f data.slip=0.5", "data.path=f is imitated"),
    ("sft", "data.strip_calculator=false", "set data.path=FILE"),
    ("sft", "init=d vocab_size=300", "vocab_size=300 changes nothing"),
    ("sft", "draft_steps=0 draft.loss=ce", "draft_steps=0"),
    ("sft", "steps=0 optim.lr=0.1", "steps=0 trains no policy"),
    ("sft", "draft.loss=soft_ce", "which is called kl now"),
    ("sft", "draft.spot.enabled=true", "unknown key 'draft.spot': train.sft has no rollouts"),
    ("draft", "kind=medusa", "kind"),
    ("draft", "eval.strategy=off", "eval.strategy=off drafts nothing"),
    ("draft", "data.texts=f rollout.n=2", "rollout.n=2 changes nothing"),
    ("draft", "data.texts=f data.overlong_prompts=truncate", "data.overlong_prompts"),
    ("draft", "steps=9 epochs=2", "steps=9 says how many updates there are"),
    ("draft", "epochs=2 cache_bytes=9", "set states=cache"),
    ("draft", "kind=mtp draft_vocab=9", "draft_vocab=9"),
    ("draft", "draft_overrides={norm_output: true}", "draft_overrides"),
    ("draft", "export=none export_dtype=float32", "export=none writes no files"),
    ("serve", "speculation.strategy=off speculation.draft=ngram", "speculation.draft=ngram"),
]


@pytest.mark.parametrize(("program", "settings", "named"), REFUSED)
def test_settings_that_do_not_go_together_or_change_nothing_are_refused(
    program, settings, named, capsys
):
    schema_of, given = PROGRAMS[program]
    with pytest.raises(SystemExit) as ended:
        parse_config(schema_of, [*given, *re.split(r" (?=[a-z_.]+=)", settings)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and named in said and len(said.splitlines()) == 2


def test_seeds_that_fit_are_taken_as_they_are():
    taken = [f"seed={(1 << 64) - 1}", f"eval.seed={-(1 << 63)}", f"data.seed={(1 << 32) - 1}"]
    cfg, _ = parse_config(RLConfig, taken)
    seeds = cfg.seed, cfg.eval.seed, cfg.data.seed
    assert seeds == ((1 << 64) - 1, -(1 << 63), (1 << 32) - 1)


@pytest.mark.parametrize("program", [RLConfig, SFTConfig])
def test_no_number_of_any_setting_is_nan(program, capsys):
    numbers = [k for k in schema.keys_of(program) if k.type in (float, float | None)]
    assert len(numbers) > 10
    for key in numbers:
        with pytest.raises(SystemExit):
            parse_config(program, [f"{key.name}=nan"])
        assert f"{key.name}: expected a " in capsys.readouterr().err
    assert parse_config(program, ["optim.clip_norm=inf"])[0].optim.clip_norm == float("inf")


def test_shipped_configurations_follow_the_rules_and_may_be_turned_off():
    for file in ("sums", "gsm8k"):
        for more in ([], ["rollout.strategy=off"], ["rollout.draft=ngram"], ["model=d"]):
            parse_config(RLConfig, ["--config", f"configs/{file}.yaml", *more])
        more = ["init=d", "steps=0", "draft_steps=5"]
        parse_config(SFTConfig, ["--config", f"configs/{file}_sft.yaml", *more])
    for file in ("schedule", "spot"):
        parse_config(RLConfig, ["--config", f"configs/{file}.yaml", "model=d"])
    parse_config(DraftRunConfig, ["--config", "configs/draft.yaml"])


# --- what follows from the checkpoint ------------------------------------------------------------


def arms_of(cfg) -> list[str]:
    return [arm.name for arm in cfg.rollout.control_config().arms]


def settled(*argv, has_head):
    cfg, _ = parse_config(RLConfig, argv)
    return cfg, describe_drafting(cfg, settle_drafting(cfg, MTPSource if has_head else None))


def test_a_head_is_trained_and_n_grams_are_not():
    cfg, said = settled(has_head=True)
    assert (cfg.rollout.draft, cfg.draft.mode) == ("checkpoint", "online")
    assert arms_of(cfg) == ["off", "4_1_5"]
    assert said.startswith("draft: the checkpoint's head; the controller goodput chooses among off")
    cfg, said = settled("rollout.strategy=4_1_5", has_head=True)
    assert cfg.rollout.control is None
    assert said.startswith("draft: the checkpoint's head; always 4_1_5; to change it: rollout.")
    cfg, said = settled("rollout.strategy=3_1_4", has_head=False)
    assert (cfg.rollout.draft, cfg.draft.mode) == ("ngram", "frozen")
    assert arms_of(cfg) == ["off", "3_1_4"]
    assert said.startswith("draft: n-grams, for the checkpoint has no draft head; the controller")


def test_a_choice_of_the_user_is_followed():
    for has_head, other in ((True, "checkpoint"), (False, "random")):
        cfg, said = settled("rollout.draft=ngram", "rollout.strategy=4_1_5", has_head=has_head)
        assert (cfg.rollout.draft, cfg.draft.mode, cfg.rollout.control) == ("ngram", "frozen", None)
        how = f"always 4_1_5; to change it: rollout.draft={other}, "
        assert said.startswith(f"draft: n-grams; {how}")
    cfg, said = settled("rollout.draft=random", has_head=False)
    assert (cfg.rollout.draft, cfg.draft.mode) == ("random", "online")
    assert said.startswith("draft: a random head; the controller goodput chooses among off, 4_1_5")
    cfg, _ = settled("rollout.draft=random", "rollout.acceptance=block", has_head=False)
    assert cfg.rollout.control is None, "tokens would depend on its choices"
    strategies = ["rollout.control.controller=bandit", "rollout.control.strategies=[off,2_1_3]"]
    cfg, said = settled(*strategies, has_head=False)
    assert cfg.rollout.control.controller == "bandit" and "bandit chooses among off, 2_1_3" in said


def test_a_head_whose_updates_are_scaled_to_nothing_stays_as_it_is_and_a_line_says_so():
    cfg, said = settled("draft.mtp_loss_scaling_factor=0", has_head=True)
    assert (cfg.rollout.draft != "ngram", cfg.draft.mode) == (True, "frozen")
    assert "draft.mtp_loss_scaling_factor=0" in said


@pytest.mark.parametrize(
    ("argv", "steps"),
    [
        ([], 4),
        (["rollout.strategy=2_1_3"], 2),
        (["rollout.control.strategies=[off,2_1_3,3_1_4]"], 3),
        (["rollout.draft=random", "draft.unroll_steps=2"], 2),
        (["rollout.strategy=off"], 1),
    ],
)
def test_a_head_is_trained_on_the_steps_that_it_drafts_unless_told_otherwise(argv, steps):
    cfg, said = settled(*argv, has_head=True)
    assert cfg.draft.unroll_steps == steps
    line = f"(draft.mode=online, draft.unroll_steps={steps})"
    assert (line in said) == ("rollout.strategy=off" not in argv)


def test_a_decay_over_the_one_step_that_the_strategy_drafts_is_refused():
    with pytest.raises(ConfigError, match="draft.step_decay=0.8 changes nothing: draft.unroll"):
        settled("rollout.strategy=1_1_2", "draft.step_decay=0.8", has_head=True)
    settled("draft.step_decay=0.8", has_head=True)


def test_a_head_that_cannot_be_trained_is_a_head(monkeypatch):
    monkeypatch.setattr(sources, "kind_of", lambda path, target: DFlashSource)

    def drafting(*argv):
        cfg, _ = parse_config(RLConfig, ["rollout.draft=some/head", *argv])
        return describe_drafting(cfg, settle_drafting(cfg, None, None, Path))

    assert drafting().startswith("draft: the head some/head;")
    assert drafting().endswith("(draft.mode=frozen)")
    with pytest.raises(ConfigError, match="some/head cannot be trained here"):
        drafting("draft.mode=online")


@pytest.mark.parametrize("acceptance", ["block", "recursive"])
def test_where_tokens_must_not_depend_on_the_clock_nothing_is_chosen_by_it(acceptance):
    cfg, said = settled(f"rollout.acceptance={acceptance}", has_head=False)
    assert cfg.rollout.draft == "ngram" and not cfg.rollout.by_the_clock
    assert "always 4_1_5" in said and not cfg.rollout.ngram_siblings


@pytest.mark.parametrize("has_head", [False, True])
def test_where_bits_would_reach_the_weights_nothing_is_chosen_by_the_clock(has_head):
    cfg, said = settled("algo.tis=true", has_head=has_head)
    assert cfg.rollout.control is None and not cfg.rollout.by_the_clock and "always 4_1_5" in said
    cfg, said = settled("algo.tis=true", "rollout.control={}", has_head=has_head)
    assert cfg.rollout.by_the_clock, "asked for"
    cfg, said = settled("algo.tis=true", "rollout.invariant=true", has_head=has_head)
    assert arms_of(cfg) == ["off", "4_1_5"] and "goodput chooses" in said
    assert not cfg.rollout.by_the_clock and cfg.rollout.ngram_siblings


@pytest.mark.parametrize(
    ("argv", "has_head", "said"),
    [
        (["draft.mode=online"], False, "no draft head; set rollout.draft=random"),
        (["draft.optim.lr=0.1"], False, "draft.optim.lr=0.1 changes nothing"),
        (["checkpoint.draft_only=true"], False, "no head drafts"),
        (["rollout.ngram_max=6"], True, "rollout.ngram_max=6 changes nothing: n-grams do not"),
    ],
)
def test_settings_that_the_checkpoint_leaves_without_effect_are_refused(argv, has_head, said):
    with pytest.raises(ConfigError) as refused:
        settled(*argv, has_head=has_head)
    assert said in str(refused.value)
