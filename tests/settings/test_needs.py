"""What settings need of each other, in the programs."""

import re

import pytest

from serve.cli.arguments import GenerateConfig
from serve.settings import ServeConfig
from specjax.command_line import parse_config
from specjax.settings import keys_of, look
from specjax.verify.__main__ import VerifyConfig
from train.draft_schema import DraftRunConfig
from train.registry import OBJECTIVES
from train.schema import RLConfig, SFTConfig

PROGRAMS = {
    "rl": (RLConfig, []),
    "sft": (SFTConfig, []),
    "draft": (DraftRunConfig, []),
    "serve": (ServeConfig, ["model=d"]),
    "generate": (GenerateConfig, ["model=d", "a"]),
    "verify": (VerifyConfig, ["model=d"]),
}
# (program, settings, what the message must name)
REFUSED = [
    ("rl", "data.path=f data.min_terms=3", "data.min_terms=3 has no effect: it needs no data.path"),
    ("rl", "data.prompt_key=q", "it needs rows with columns, of data.path"),
    ("rl", "data.unwinnable=keep data.path=f reward=m:f", "a built-in reward that compares"),
    ("rl", "data.slip=0.5", "which train.sft reads"),
    ("rl", "data.task=reasoning_gym", "set data.dataset"),
    ("rl", "data.seed=4294967296", "data.seed: expected a number below"),
    ("rl", "reward=[exact,format] rewards.weights=[1]", "rewards.weights: expected 2 numbers"),
    ("rl", "reward=exact rewards.weights=[0.0]", "rewards.weights: expected"),
    ("rl", "rollout.strategy=8_4_32 rollout.acceptance=recursive", "re-ranking is biased"),
    ("rl", "rollout.strategy=4x4x4", "rollout.strategy '4x4x4' has 85 rows"),
    ("rl", "rollout.draft=ngram rollout.acceptance=block", "the samples that share a batch"),
    ("rl", "rollout.temperature=0 rollout.top_p=0.9", "it needs a temperature above 0"),
    ("rl", "rollout.n=1", "rollout.n: expected at least 2"),
    ("rl", "rollout.partial=true", "raise over_sample"),
    ("rl", "rollout.control={} rollout.acceptance=block", "would depend on the clock"),
    ("rl", "rollout.strategy=off draft.mode=online", "it needs a head to train"),
    ("rl", "rollout.draft=ngram draft.mode=online", "it needs a head to train"),
    ("rl", "draft.mode=none rollout.strategy=6_1_7", "draft.mode=none turn off"),
    ("rl", "draft.mode=frozen draft.optim.lr=0.1", "it needs a draft head that is trained"),
    ("rl", "draft.mode=online draft.mtp_loss_scaling_factor=0", "draft.mtp_loss_scaling_factor"),
    ("rl", "draft.spot.enabled=true", "rollout.replicas=1"),
    ("rl", "draft.spot.enabled=true rollout.strategy=off rollout.replicas=2", "none to train"),
    ("rl", "algo=dapo algo.overlong_buffer_len=2000 rollout.max_tokens=100", "at most"),
    ("rl", "algo.clip_ratio=0.1", "it needs tokens of an older policy"),
    ("rl", "algo.objective=gpro", "algo.objective: unknown objective 'gpro'"),
    ("rl", "algo=dapa", "algo.preset: unknown 'dapa'; did you mean 'dapo'?"),
    ("rl", "algo=rloo algo.normalize_std=false", "unknown key 'algo.normalize_std'"),
    ("rl", "algo.objective=dapo", "It is a preset: use algo=dapo"),
    ("rl", "epsilon_high=2", "did you mean 'algo.clip_ratio_high'?"),
    ("rl", "actor_rollout_ref.rollout.top_p=2", "did you mean 'rollout.top_p'?"),
    ("rl", "rollout.attention=gpu", "did you mean 'attention'?"),
    ("rl", "algo.logprobs=processed rollout.presence_penalty=1 mesh.cp=2", "set mesh.cp=1"),
    ("rl", "optim.lr=inf", "optim.lr: expected a finite number, got inf"),
    ("rl", "eval.sets.a.n=2", "eval.sets.a: has no rows; set its path"),
    ("rl", "eval.sets.heldout.path=f", "got 'heldout'"),
    ("rl", "eval.sets.a={path: f, n: 2, temperature: 0}", "eval.sets.a.n=2"),
    ("rl", f"eval.seed={10**30}", "eval.seed: expected an integer of 64 bits"),
    ("rl", "mesh.data=2 packing.rows=3", "packing.rows must be a multiple of"),
    ("rl", "rollout.max_tokens=300 packing.row_length=300", "packing.row_length=300"),
    ("rl", "attention=gpuu", "did you mean 'gpu'"),
    ("sft", "data.overlong_prompts=truncate", "raise packing.row_length"),
    ("sft", "init=d vocab_size=300", "vocab_size=300 has no effect: it needs no init"),
    ("sft", "draft_steps=0 draft.loss=ce", "training of the head, by draft_steps"),
    ("sft", "steps=0 optim.lr=0.1", "optim.lr=0.1 has no effect: it needs steps"),
    ("draft", "eval.strategy=off", "eval.strategy=off drafts nothing"),
    ("draft", "data.texts=f data.overlong_prompts=truncate", "data.overlong_prompts"),
    ("draft", "rollout.stop=x", "a head is trained for the temperature"),
    ("draft", "kind=mtp draft_vocab=9", "it needs kind=eagle3, and kind is mtp"),
    ("serve", "speculation.exact_mode=true", "a server sends them as they grow"),
    ("verify", "exact_mode=true", "the check of identity compares every token"),
]


def refused(program: str, settings: str, capsys) -> str:
    schema, given = PROGRAMS[program]
    with pytest.raises(SystemExit) as ended:
        parse_config(schema, [*given, *re.split(r" (?=[a-z_.]+=)", settings)], program)
    captured = capsys.readouterr()
    assert ended.value.code == 2 and len(captured.err.splitlines()) == 2 and not captured.out
    return captured.err


@pytest.mark.parametrize(("program", "settings", "named"), REFUSED)
def test_settings_that_do_not_go_together_are_refused(program, settings, named, capsys):
    assert named in refused(program, settings, capsys)


# Settings of speculation, as in each program below its section, and what the message must say.
SPECULATION = [
    ("tau=0.3", "it needs a dynamic tree"),
    ("strategy=6_4_16 tau=0.3 acceptance=block", "exact for chains only"),
    ("adaptive_width=true control.strategies=off,2_1_3", "it needs a dynamic tree"),
    ("strategy=off draft=ngram", "it needs speculation"),
    ("strategy=off control.controller=ema", "it needs speculation"),
    ("draft_kind=eagle3", "draft=random"),
    ("draft=checkpoint ngram_max=6", "draft is checkpoint"),
    ("draft=ngram token_map=m", "and not draft=ngram"),
    ("invariant=true acceptance=block", "is about equal tokens"),
    ("control.strategies=[wide]", "strategy 'wide' is not understood"),
    ("control.strategies=[off,9_4_64] spec_verify_tokens=6", "raise it to 10 or more"),
    ("control.strategies=[off,2_1_3] strategy=6_1_7", "a controller that may choose it"),
    ("control.controller=static control.strategies=[1_1_2,2_1_3]", "static takes a single one"),
    ("control.controller=static control.initial=2_1_3 strategy=6_1_7", "that may choose it"),
    ("control.initial=2_1_3", "controller=static or ema"),
    ("control.controller=bandit control.goodput.hysteresis=0.1", "controller is bandit"),
]


@pytest.mark.parametrize("program", ["rl", "serve", "generate"])
@pytest.mark.parametrize(("settings", "said"), SPECULATION)
def test_every_program_refuses_the_same_of_speculation(program, settings, said, capsys):
    schema, given = PROGRAMS[program]
    section = {"rl": "rollout.", "serve": "speculation."}.get(program, "")
    words = [section + word for word in re.split(r" (?=[a-z_.]+=)", settings)]
    with pytest.raises(SystemExit):
        parse_config(schema, [*given, *words])
    assert said in capsys.readouterr().err


def test_every_need_names_a_setting_or_a_property_of_some_program():
    argv = [*PROGRAMS.values(), (RLConfig, ["rollout.control={}"])]
    argv += [(RLConfig, [f"algo.objective={name}"]) for name in OBJECTIVES.names]
    resolved: dict[tuple[str, str], bool] = {}
    for config in (parse_config(*words)[0] for words in argv):
        for key in keys_of(config):
            for section, need in key.needs:
                parts = section.split(".")
                around = [".".join(parts[:n]) for n in range(len(parts) + 1)]
                first = re.match(r"!?(\w+)", need)[1]
                place = key.name.rpartition(".")[2], need
                here = any(hasattr(look(config, name), first) for name in around)
                resolved[place] = resolved.get(place, False) or here
    assert len(resolved) > 80 and [place for place, here in resolved.items() if not here] == []


@pytest.mark.slow
@pytest.mark.parametrize("program", ["rl", "sft"])
def test_no_number_of_any_setting_is_nan(program, capsys):
    numbers = [key for key in keys_of(PROGRAMS[program][0]) if key.kinds == [float]]
    assert len(numbers) > 10
    for key in numbers:
        said = refused(program, f"{key.name}=nan", capsys)
        assert f"{key.name}: expected a finite number" in said or "control" in key.name


def test_shipped_configurations_follow_the_rules_and_may_be_turned_off():
    for file in ("sums", "gsm8k"):
        for more in ([], ["rollout.strategy=off"], ["rollout.draft=ngram"], ["model=d"]):
            parse_config(RLConfig, ["--config", f"configs/{file}.yaml", *more])
        more = ["init=d", "steps=0", "draft_steps=5"]
        parse_config(SFTConfig, ["--config", f"configs/{file}_sft.yaml", *more])
    for file in ("schedule", "spot"):
        parse_config(RLConfig, ["--config", f"configs/{file}.yaml", "model=d"])
    parse_config(DraftRunConfig, ["--config", "configs/draft.yaml"])
    pod = ["--config", "configs/pods/qwen3_8b_h200_8.yaml", "rollout.strategy=off"]
    assert parse_config(RLConfig, pod)[0].rollout.control_config() is None


def test_seeds_that_fit_are_taken_as_they_are():
    taken = [f"seed={(1 << 64) - 1}", f"eval.seed={-(1 << 63)}", f"data.seed={(1 << 32) - 1}"]
    cfg, _ = parse_config(RLConfig, taken)
    seeds = cfg.seed, cfg.eval.seed, cfg.data.seed
    assert seeds == ((1 << 64) - 1, -(1 << 63), (1 << 32) - 1)
