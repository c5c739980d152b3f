"""Pairs of settings that do not go together, or of which one changes nothing: refused by name."""

from pathlib import Path

import pytest
import tiny_run

from serve.__main__ import main as serve
from specjax import schema
from specjax.command_line import ConfigError, parse_config
from specjax.drafts.dflash import DFlashSource
from specjax.drafts.mtp import MTPSource
from specjax.engine import sources
from train import draft, rl, sft
from train.draft_schema import DraftRunConfig
from train.programs import describe_drafting, settle_drafting
from train.schema import RLConfig, SFTConfig

RL = [
    (["data.path=f.jsonl", "data.task=sums"], "leave out data.task to read the file"),
    (["data.duplicates=drop"], "generated and has no rows; set data.path=FILE"),
    (["data.unwinnable=drop"], "every problem of it can be won"),
    (["data.unwinnable=drop", "data.path=f", "reward=m:f"], "reward=m:f is none"),
    (["data.unwinnable=drop", "data.path=f", "reward=format"], "reward=format is none"),
    (["data.chat=off", "data.chat_template_kwargs={a: 1}"], "with data.chat=off no chat template"),
    (["data.heldout_path=f.jsonl"], "set data.path=FILE"),
    (["data.path=f", "data.min_terms=3"], "data.path=f is trained on; leave out one of them"),
    (["data.slip=0.5"], "which train.sft reads and train.rl does not"),
    (["data.strip_calculator=false"], "which train.sft reads and train.rl does not"),
    (["eval.problems=0", "eval.every=2"], "eval.problems=0 evaluates nothing"),
    (["rollout.max_staleness=2"], "set rollout.partial=true"),
    (["rollout.strategy=off", "rollout.draft=ngram"], "rollout.draft=ngram changes nothing"),
    (["rollout.strategy=off", "draft.mode=online"], "there is no head to train"),
    (["rollout.strategy=off", "draft.loss=ce"], "no draft head is trained"),
    (["draft.mode=none", "rollout.strategy=6_1_7"], "draft.mode=none decodes plainly"),
    (["draft.mode=none", "rollout.control.bs_threshold=4"], "draft.mode=none decodes plainly"),
    (["draft.mode=frozen", "draft.optim.lr=0.1"], "draft.optim.lr=0.1 changes nothing"),
    (["draft.mode=online", "draft.mtp_loss_scaling_factor=0"], "makes each of its updates 0"),
    (["draft.mode=frozen", "draft.mtp_loss_scaling_factor=0.2"], "no draft head is trained, with"),
    (["draft.mtp_loss_scaling_factor=0", "draft.epochs=2"], "mtp_loss_scaling_factor=0.0, rollout"),
    (["rollout.draft=random", "rollout.replicas=2", "draft.spot.enabled=true",
      "draft.mtp_loss_scaling_factor=0"], "a factor above 0"),
    (["rollout.draft=ngram", "draft.epochs=2"], "rollout.draft=random for a new one"),
    (["rollout.draft=ngram", "draft.mode=online"], "nothing drafts with it"),
    (["rollout.draft_kind=eagle3"], "use rollout.draft=random"),
    (["rollout.draft_overrides={backbone: llama}"], "use rollout.draft=DIR"),
    (["rollout.draft=ngram", "checkpoint.draft_only=true"], "no head drafts"),
    (["rollout.draft=checkpoint", "rollout.ngram_max=6"], "set rollout.draft=ngram"),
    (["rollout.draft=random", "rollout.ngram_min=2"], "n-grams do not draft"),
    (["rollout.draft=d", "rollout.ngram_siblings=false"], "n-grams do not draft"),
    (["rollout.tau=0.5"], "rollout.tau=0.5 changes nothing: it scores the paths of a dynamic"),
    (["rollout.control.ema={candidate_steps: [1, 3]}"], "rollout.control.controller=ema"),
    (["rollout.control.controller=bandit", "rollout.control.goodput={probe_fraction: 0.1}"],
     "rollout.control.controller=goodput"),
    (["rollout.control.initial=2_1_3"], "static or ema"),
    (["rollout.control.strategies=[off,2_1_3]", "rollout.strategy=6_1_7"], "list it there"),
    (["rollout.control.controller=ema", "rollout.control.strategies=[off,2_1_3]"],
     "does not choose among them"),
    (["draft.unroll_steps=1", "draft.step_decay=0.5"], "draft.unroll_steps=1 trains one step"),
    (["draft.spot.updates=3"], "set draft.spot.enabled=true"),
    (["algo.tis_cap=3"], "set algo.tis=true"),
    (["algo.tis_level=sequence"], "set algo.tis=true"),
    (["algo.kl_loss_type=k2"], "algo.kl_loss_coef=0.0 has no KL in the loss"),
    (["algo.use_bias_correction_kl=true"], "algo.kl_loss_coef=0.0 has no KL in the loss"),
    (["algo.kl_penalty=k2"], "algo.kl_coef=0.0 has no KL in rewards"),
    (["algo.ref_update_steps=2"], "algo.kl_loss_coef=0.0 and algo.kl_coef=0.0 need no reference"),
    (["algo.overlong_penalty_factor=2"], "set algo.overlong_buffer_len"),
    (["algo=dapo", "algo.clip_ratio=0.1"], "algo.clip_ratio=0.1 changes nothing"),
    (["algo.loss_scale_factor=9"], "set algo.loss_aggregation=constant"),
    (["algo.clip_ratio_c=3"], "raise algo.updates_per_rollout"),
    (["algo.normalize_std=false", "algo.normalize_over=batch"], "algo.normalize_over=batch ch"),
    (["algo.objective=cispo", "algo.clip_ratio_high=3"], "raise algo.updates_per_rollout"),
    (["algo.objective=gspo", "algo.importance_sampling_level=sequence"], "both levels the same"),
    (["algo.objective=rloo", "algo.loss_scale_factor=9"], "set algo.loss_aggregation=constant"),
    (["algo.clip_ratio=0.1"], "raise algo.updates_per_rollout"),
    (["algo.normalize_std=false", "algo.advantage_eps=0.1"], "algo.advantage_eps=0.1 changes"),
    (["algo.dynamic_sampling=false", "algo.max_num_gen_batches=3"], "algo.dynamic_sampling=false"),
    (["rollout.aligned=false"], "rollouts sample with a temperature alone, which drafts always"),
    (["algo.logprobs=processed"], "set rollout.top_p or another transform"),
    (["rollout.temperature=0", "rollout.top_p=0.9"], "takes the most likely token each time"),
    (["rollout.include_stop_str_in_output=true"], "names no string; set rollout.stop"),
    (["optim.final_lr_ratio=0.5"], "set optim.decay_steps"),
    (["draft.optim.final_lr_ratio=0.5"], "set draft.optim.decay_steps"),
    (["mesh.cp_order=contiguous"], "mesh.cp=1 splits no row"),
    (["mesh.sequence_parallel=true"], "mesh.tp=1 splits no product"),
    (["remat_policy=full"], "remat=false recomputes nothing"),
    (["distributed.mode=off", "distributed.process_id=1"], "distributed.mode=off is one process"),
]  # fmt: skip
SFT = [
    (["data.path=f.jsonl", "data.task=sums"], "leave out data.task to read the file"),
    (["data.duplicates=drop"], "generated and has no rows; set data.path=FILE"),
    (["data.unwinnable=drop"], "which train.rl checks and train.sft does not"),
    (["data.unwinnable=keep", "data.path=f"], "unknown key 'data.unwinnable': it is about gold"),
    (["data.overlong_prompts=truncate"], "train.sft cuts no demonstration: raise packing.row"),
    (["data.strip_calculator=false", "data.task=math", "data.path=f"], "and data.task=math has"),
    (["data.chat=off", "data.chat_template_kwargs={a: 1}"], "with data.chat=off no chat template"),
    (["data.path=f", "data.slip=0.5"], "data.path=f is imitated"),
    (["data.strip_calculator=false"], "set data.path=FILE"),
    (["data.heldout_size=9"], "evaluates nothing"),
    (["model=d", "model.num_layers=3"], "init=d has a shape and a tokenizer of its own"),
    (["--init", "d", "vocab_size=300"], "vocab_size=300 changes nothing"),
    (["draft_steps=9", "draft.mode=none"], "draft_steps=9 changes nothing"),
    (["draft_steps=0", "draft.loss=ce"], "draft_steps=0, draft.mode=auto and"),
    (["draft_steps=9", "draft.mtp_loss_scaling_factor=0"], "draft_steps=9 changes nothing"),
    (["draft.spot.enabled=true"], "unknown key 'draft.spot': train.sft has no rollouts"),
    (["steps=0", "optim.lr=0.1"], "steps=0 trains no policy"),
    (["optim.final_lr_ratio=0.5"], "set optim.decay_steps"),
]
DRAFT = [
    (["data.texts=f", "rollout.n=2"], "the policy generates none; leave out one of them"),
    (["data.texts=f", "data.max_terms=3"], "data.texts=f gives the texts to train on"),
    (["data.texts=f", "data.overlong_prompts=truncate"], "of data.texts are not cut"),
    (["data.prompt_key=q"], "name no rows with columns"),
    (["data.duplicates=drop"], "names no rows, of which some might be equal"),
    (["rollout.temperature=0", "rollout.top_p=0.9"], "takes the most likely token each time"),
    (["steps=9", "epochs=2"], "steps=9 says how many updates there are"),
    (["states=cache"], "epochs=1 reads the states once"),
    (["epochs=2", "cache_bytes=9"], "states=stream keeps no states; set states=cache"),
    (["kind=mtp", "draft_vocab=9"], "only a new EAGLE-3 head has a vocabulary of its own"),
    (["init=d", "draft_vocab=9"], "only a new EAGLE-3 head has a vocabulary of its own"),
    (["draft_overrides={norm_output: true}"], "kind=eagle3 with init=null names none; set init=D"),
    (["kind=mtp", "init=d", "draft_overrides={norm_output: true}"], "kind=mtp with init=d names"),
    (["kind=mtp", "export=safeailab"], "kind=mtp has one layout, the policy's own names"),
    (["export=none", "export_dtype=float32"], "export=none writes no files"),
    (["eval.problems=0", "eval.every=2"], "eval.problems=0 evaluates nothing"),
    (["draft.unroll_steps=1", "draft.step_decay=0.5"], "draft.unroll_steps=1 trains one step"),
    (["draft.mode=online"], "unknown key 'draft.mode': the head is the only thing"),
    (["draft.epochs=2"], "unknown key 'draft.epochs': train.draft counts passes"),
    (["data.slip=0.5"], "data.texts are trained on as they are"),
    (["draft.optim.final_lr_ratio=0.5"], "set draft.optim.decay_steps"),
]
SERVE = [
    (["speculation.strategy=off", "speculation.draft=ngram"], "speculation.draft=ngram changes"),
    (["speculation.strategy=off", "speculation.draft=d"], "decodes plainly"),
    (["speculation.controller=bandit", "speculation.strategies=[off, 2_1_3]",
      "speculation.strategy=6_1_7"], "list it there"),
]  # fmt: skip


# Keys that something reads whatever the others say; what is here or in a rule was thought about.
RUN_KEYS = """
    family out revision seed steps data.task data.path data.seed data.prompt_template
    data.chat data.date data.overlong_prompts packing.row_length packing.rows dtype.params
    dtype.compute mesh.data mesh.fsdp
    mesh.tp mesh.cp remat logprob_chunk_size attention checkpoint.every checkpoint.keep_last
    log.tensorboard log.wandb log.live
"""
ALWAYS_READ = {
    RLConfig: f"""{RUN_KEYS}
        model reward rewards.weights rewards.workers max_failed_rewards
        rollout.prompts rollout.n
        rollout.over_sample rollout.partial rollout.temperature rollout.max_tokens
        rollout.max_prompt_tokens rollout.max_batch rollout.replicas rollout.tp rollout.order
        rollout.page_size rollout.cache_bytes rollout.chunk_tokens rollout.stretch
        rollout.prefill_chunk rollout.products rollout.dtype rollout.scan_layers
        rollout.enforce_eager rollout.invariant rollout.min_tokens rollout.repetition_penalty
        rollout.presence_penalty rollout.frequency_penalty rollout.logit_bias rollout.stop
        algo.objective algo.loss_aggregation algo.kl_loss_coef algo.tis algo.normalize_std
        algo.preset algo.kl_coef algo.overlong_buffer_len algo.mask_truncated algo.entropy_coeff
        algo.updates_per_rollout algo.dynamic_sampling optim.lr optim.warmup_steps
        optim.decay_steps optim.weight_decay optim.b1 optim.b2 optim.clip_norm
        eval.problems eval.sets checkpoint.export deterministic distributed.mode log.samples
    """,
    SFTConfig: f"""{RUN_KEYS}
        init log_every export_dtype model.mtp_num_layers model.mtp_concat model.mtp_target_hidden
        model.mtp_recycle packing.microbatches draft.mode
    """,
    DraftRunConfig: """
        model revision family kind init out seed steps data.task data.path data.texts
        data.prompt_template data.chat data.date data.overlong_prompts rollout.temperature
        rollout.max_tokens rollout.max_prompt_tokens rollout.scan_layers draft.loss draft.loss_top_k
        draft.unroll_steps draft.optim.lr draft.optim.warmup_steps draft.optim.decay_steps
        draft.optim.weight_decay draft.optim.b1 draft.optim.b2 draft.optim.clip_norm
        packing.row_length packing.rows eval.problems save_every keep_last log_every dtype
        logprob_chunk_size attention log.tensorboard log.wandb log.live
    """,
}


@pytest.mark.parametrize("program", ALWAYS_READ)
def test_every_setting_stands_in_a_rule_or_is_always_read(program):
    keys = {key.name for key in schema.keys_of(program) if not key.section}
    rules = schema.rules_of(program)
    ruled = {name for name in keys if any(rule.covers(name) for rule in rules)}
    named = {name for rule in rules for name in rule.names if "*" not in name}
    always = set(ALWAYS_READ[program].split())
    assert keys - ruled == always - ruled, "a key is in no rule, and not in the list"
    assert {name.lstrip("!") for name in named} | always <= keys, "there is no such key"


# Numbers that make no sense, in settings of every section.
NUMBERS = [
    (RLConfig, "optim.lr=nan", "optim.lr: expected a finite number, got nan"),
    (RLConfig, "optim.lr=inf", "optim.lr: expected a finite number, got inf"),
    (RLConfig, "optim.lr=1e999", "optim.lr: expected a finite number, got inf"),
    (RLConfig, "optim.lr=-0.1", "optim.lr: expected at least 0, got -0.1"),
    (RLConfig, "draft.optim.lr=-.inf", "draft.optim.lr: expected a finite number, got -inf"),
    (RLConfig, "optim.b2=1", "optim.b2: expected a number below 1, got 1.0"),
    (RLConfig, "optim.warmup_steps=-1", "optim.warmup_steps: expected at least 0, got -1"),
    (RLConfig, "optim.clip_norm=nan", "optim.clip_norm: expected a number, or inf, got nan"),
    (RLConfig, "algo.clip_ratio_high=inf", "algo.clip_ratio_high: expected a finite number"),
    (RLConfig, "distributed.lost_after=inf", "distributed.lost_after: expected a finite number"),
    (SFTConfig, "optim.weight_decay=-1", "optim.weight_decay: expected at least 0, got -1"),
    (SFTConfig, "model.rope_theta=inf", "model.rope_theta: expected a finite number"),
]


@pytest.mark.parametrize(("program", "setting", "said"), NUMBERS)
@pytest.mark.parametrize("in_file", [False, True])
def test_numbers_that_make_no_sense_are_refused(program, setting, said, in_file, tmp_path, capsys):
    argv = [setting]
    if in_file:
        name, value = setting.split("=")
        *above, last = name.split(".")
        text = f"{last}: {value}"
        for section in reversed(above):
            text = f"{section}: {{{text}}}"
        (tmp_path / "c.yaml").write_text(text)
        argv = ["--config", str(tmp_path / "c.yaml")]
    with pytest.raises(SystemExit) as ended:
        parse_config(program, argv)
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("program", [RLConfig, SFTConfig])
def test_no_number_of_any_setting_is_nan(program, capsys):
    numbers = [k for k in schema.keys_of(program) if k.type in (float, float | None)]
    assert len(numbers) > 10
    for key in numbers:
        with pytest.raises(SystemExit):
            parse_config(program, [f"{key.name}=nan"])
        assert f"{key.name}: expected a " in capsys.readouterr().err
    assert parse_config(program, ["optim.clip_norm=inf"])[0].optim.clip_norm == float("inf")


def refused(program, argv, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        program(argv)
    message = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in message
    assert len(message.splitlines()) == 2, "one line, and where help is"
    return message


@pytest.mark.parametrize(("argv", "said"), RL)
def test_train_rl_refuses_what_changes_nothing(argv, said, capsys):
    assert said in refused(rl.main, argv, capsys)


@pytest.mark.parametrize(("argv", "said"), SFT)
def test_train_sft_refuses_what_changes_nothing(argv, said, capsys):
    assert said in refused(sft.main, argv, capsys)


@pytest.mark.parametrize(("argv", "said"), DRAFT)
def test_train_draft_refuses_what_changes_nothing(argv, said, capsys):
    assert said in refused(draft.main, argv, capsys)


@pytest.mark.parametrize(("argv", "said"), SERVE)
def test_the_server_refuses_what_changes_nothing(argv, said, capsys):
    assert said in refused(serve, ["--model", "d", *argv], capsys)


@pytest.mark.parametrize(
    "argv",
    [
        ["data.path=f.jsonl", "data.heldout_path=g.jsonl", "data.heldout_size=9"],
        ["data.min_terms=3", "data.max_number=20"],
        ["data.path=f.jsonl", "data.duplicates=drop", "data.unwinnable=drop", "reward=number"],
        ["data.path=f.jsonl", "data.chat=off", "data.chat_template_kwargs={a: 1}"],
        ["data.chat=on", "data.chat_template_kwargs={a: 1}"],
        ["rollout.draft=ngram", "rollout.ngram_max=6", "rollout.strategy=6_4_16", "rollout.tau=1"],
        ["rollout.ngram_max=6"],  # the checkpoint may have no head
        ["rollout.draft=random", "draft.epochs=2", "draft.optim.lr=0.1"],
        ["rollout.strategy=off", "draft.mode=frozen"],
        ["rollout.strategy=off", "draft.mode=none"],
        ["rollout.control.controller=static", "rollout.control.initial=6_4_16", "rollout.tau=0.5"],
        ["rollout.control.strategies=[off,2_1_3]", "rollout.strategy=2_1_3"],
        ["algo.updates_per_rollout=2", "algo.clip_ratio=0.1"],
        ["rollout.top_p=0.9", "rollout.aligned=false", "algo.logprobs=processed"],
        ["rollout.temperature=0", "rollout.min_tokens=3", "rollout.aligned=false"],
        ["rollout.logit_bias={3: 1}", "algo.logprobs=processed", "mesh.cp=2"],
        ["rollout.partial=true", "rollout.over_sample=1.5", "algo.clip_ratio=0.1"],
        ["optim.decay_steps=10", "optim.final_lr_ratio=0.5"],
    ],
)
def test_settings_that_need_each_other_go_together(argv):
    parse_config(RLConfig, argv)


@pytest.mark.parametrize("file", ["sums", "gsm8k", "arms", "schedule", "spot"])
def test_shipped_configurations_follow_the_rules_and_may_be_turned_off(file):
    for more in ([], ["rollout.strategy=off"], ["rollout.draft=ngram"], ["model=d"]):
        if file == "spot" and more and not more[0].startswith("model"):
            continue  # there is then no head to train in gaps
        if file != "gsm8k" and file != "sums" and more == ["rollout.draft=ngram"]:
            continue  # they say draft.mode=online
        parse_config(RLConfig, ["--config", f"configs/{file}.yaml", *more])
    parse_config(DraftRunConfig, ["--config", "configs/draft.yaml"])
    for file in ("sums_sft", "gsm8k_sft"):
        more = ["init=d", "steps=0", "draft_steps=5"]
        parse_config(SFTConfig, ["--config", f"configs/{file}.yaml", *more])


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


@pytest.mark.parametrize("argv", [[], ["rollout.draft=checkpoint"], ["rollout.draft=random"]])
def test_a_head_whose_updates_are_scaled_to_nothing_stays_as_it_is_and_a_line_says_so(argv):
    cfg, said = settled("draft.mtp_loss_scaling_factor=0", *argv, has_head=True)
    assert (cfg.rollout.draft != "ngram", cfg.draft.mode) == (True, "frozen")
    why = "because draft.mtp_loss_scaling_factor=0 makes every update 0"
    assert said.endswith(f"(draft.mode=frozen, {why})")
    demonstrations, _ = parse_config(SFTConfig, ["draft.mtp_loss_scaling_factor=0"])
    assert sft.head_steps(demonstrations) == 0
    assert f"draft.mode=frozen, {why}: the head is not" in sft.describe_stages(demonstrations)
    parse_config(RLConfig, ["draft.mtp_loss_scaling_factor=0.2"])


@pytest.mark.parametrize(
    ("argv", "steps"),
    [
        ([], 4),
        (["rollout.strategy=2_1_3"], 2),
        (["rollout.strategy=8_4_32"], 4),
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


@pytest.mark.parametrize(
    "one", ["rollout.strategy=1_1_2", "rollout.control.strategies=[off,1_1_2]"]
)
def test_a_decay_over_the_one_step_that_the_strategy_drafts_is_refused(one):
    with pytest.raises(ConfigError, match="draft.step_decay=0.8 changes nothing: draft.unroll"):
        settled(one, "draft.step_decay=0.8", has_head=True)
    settled("draft.step_decay=0.8", has_head=True)


def test_a_head_that_is_trained_on_fewer_steps_than_it_drafts_is_told_so():
    one = "draft.unroll_steps=1"
    for argv, said in (
        ([one], f"; {one} trains 1 of the 4 tokens that 4_1_5 drafts in a row"),
        ([one, "rollout.strategy=2_1_3"], "the head moves: draft.unroll_steps=2 trains all"),
        (["rollout.control.strategies=[2_1_3,6_1_7]"], "4 of the 6 tokens that 6_1_7 drafts"),
        ([one, "rollout.draft=random"], f"{one} trains 1 of the 4"),
    ):
        assert said in settled(*argv, has_head=True)[1]
    for argv in ([], [one, "rollout.strategy=1_1_2"], ["draft.mode=frozen"]):
        assert "trains" not in settled(*argv, has_head=True)[1]
    assert "unroll_steps" not in settled("rollout.draft=ngram", has_head=True)[1]


def test_a_head_that_cannot_be_trained_is_a_head(monkeypatch):
    monkeypatch.setattr(sources, "kind_of", lambda path, target: DFlashSource)

    def drafting(*argv):
        cfg, _ = parse_config(RLConfig, ["rollout.draft=some/head", *argv])
        return describe_drafting(cfg, settle_drafting(cfg, None, None, Path))

    assert drafting().startswith("draft: the head some/head;")
    assert drafting().endswith("(draft.mode=frozen)")
    for setting in ("draft.mode=online", "checkpoint.draft_only=true"):
        with pytest.raises(ConfigError) as refused:
            drafting(setting)
        said = str(refused.value)
        assert said.startswith(f"{setting} is about a draft head that is trained, and the head")
        assert "some/head cannot be trained here (DFlashSource; heads of the kinds mtp and" in said
    monkeypatch.setattr(sources, "kind_of", lambda path, target: sources.ModelSource)
    with pytest.raises(ConfigError, match="is about a draft head, and rollout.draft=.* is none"):
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
        (["draft.mode=frozen"], False, "no draft head; set rollout.draft=random"),
        (["draft.loss=ce"], False, "draft.loss=ce changes nothing: no draft head is"),
        (["draft.optim.lr=0.1"], False, "draft.optim.lr=0.1 changes nothing"),
        (["checkpoint.draft_only=true"], False, "no head drafts"),
        (["rollout.ngram_max=6"], True, "rollout.ngram_max=6 changes nothing: n-grams do not"),
        (["rollout.ngram_siblings=false"], True, "set rollout.draft=ngram"),
    ],
)
def test_settings_that_the_checkpoint_leaves_without_effect_are_refused(argv, has_head, said):
    with pytest.raises(ConfigError) as refused:
        settled(*argv, has_head=has_head)
    assert said in str(refused.value)


def test_settings_of_a_file_may_be_made_idle_by_the_checkpoint(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("draft: {loss: kl, optim: {lr: 0.1}}\n")
    cfg, _ = settled("--config", str(file), has_head=False)
    assert cfg.draft.mode == "frozen"


def test_a_run_of_a_model_with_a_head_refuses_what_is_for_n_grams(thin_policy, tmp_path):
    argv = tiny_run.arguments(thin_policy, tmp_path / "run", rollout__ngram_max=6)
    with pytest.raises(SystemExit, match="set rollout.draft=ngram, or leave it out"):
        rl.main(argv)
