"""`train.rl` as a user runs it: a short run, its files, and its options."""

import json
import math
import shutil

import jax
import numpy as np
import pytest
import tiny_run
from tokenizers.processors import TemplateProcessing

from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.weights import Head
from specjax.command_line import parse_config
from specjax.drafts.mtp import MTPSource
from specjax.tokenizer import load_tokenizer, prompt_ids
from train import eval as evaluation
from train import rl
from train.heads.files import starting_head
from train.run.files import read_metrics, read_starts
from train.schema import RLConfig, SFTConfig
from train.sft import PackedDemonstrations

pytestmark = pytest.mark.usefixtures("shared_programs")

HEAD = {"rollout.strategy": "2_1_3", "draft.unroll_steps": 2}


def train(model, out, steps=2, /, **changes):
    """(trainer, metrics of each step) of the program's own `Trainer`, without its files."""
    argv = tiny_run.arguments(model, out, **HEAD | changes)
    trainer = rl.Trainer(parse_config(RLConfig, argv)[0])
    return trainer, [trainer.step() for _ in range(steps)]


def leaves(tree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def same(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


# --- a run and its files --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(thin_policy, tmp_path_factory):
    out = tmp_path_factory.mktemp("rl") / "run"
    changes = {"steps": 3, "eval.problems": 6, "eval.every": 2, "checkpoint.every": 1}
    changes |= {"checkpoint.keep_last": 2, "log.samples": 1000}
    rows = out.with_name("rows.jsonl")
    rows.write_text("".join(f'{{"prompt": "{i}+1=", "answer": {i + 1}}}\n' for i in range(3)))
    changes |= {"eval.sets.own.path": rows, "eval.sets.own.n": 3, "eval.sets.own.reward": "number"}
    changes |= {"eval.sets.greedy": f"{{path: {rows}, temperature: 0}}"}
    rl.main(tiny_run.arguments(thin_policy, out, **changes, **HEAD))
    return out


def test_every_step_has_finite_metrics_under_the_known_names(run):
    records = read_metrics(run)
    assert [r["step"] for r in records] == [0, 1, 2, 3]
    assert not any("nonfinite" in r for r in records)
    numbers = [v for r in records for v in r.values() if not isinstance(v, str)]
    assert all(math.isfinite(v) for v in numbers)
    expected = {
        "rollout/reward", "rollout/zero_std", "rollout/response_length_mean",
        "rollout/tokens_per_sec", "rollout/spec_accept_length", "rollout/accept_rate_depth_2",
        "train/loss", "train/entropy", "train/grad_norm", "train/ppo_kl", "train/clip_fraction",
        "train/train_rollout_logprob_abs_diff", "train/mtp_loss", "time/rollout", "time/train",
        "perf/tflops/actor",
    }  # fmt: skip
    assert all(expected <= set(r) for r in records[1:])
    assert not any("perf/mfu/actor" in r for r in records), "the peak of a CPU is not known"
    evaluated = [r for r in records if "eval/reward" in r]
    assert [r["step"] for r in evaluated] == [0, 2, 3]
    sets = {"eval/own/avg@3", "eval/own/pass@1", "eval/own/pass@2", "eval/own/maj@3",
            "eval/own/truncated_ratio", "eval/greedy/avg@1", "eval/truncated_ratio",
            "eval/greedy/response_length_mean", "eval/own/reward_timed_out",
            "time/eval_reward"}  # fmt: skip
    assert all(sets <= set(r) and 1 <= r["eval/own/response_length_mean"] <= 20 for r in evaluated)
    assert all(0 <= r["train/entropy"] <= math.log(272) for r in records[1:])
    assert all(r["train/train_rollout_logprob_abs_diff"] < 1e-4 for r in records[1:])


def test_the_program_that_evaluates_gives_the_numbers_of_a_run(run, tmp_path, capsys):
    evaluation.main([f"model={run}", f"out={tmp_path}", "step=2"])
    record = read_metrics(run)[2]
    [found], [start] = read_metrics(tmp_path), read_starts(tmp_path)
    metrics = {key: value for key, value in found.items() if key.startswith("eval/")}
    assert found["step"] == 2 and metrics.pop("eval/accept_length") > 1, "it speculates"
    assert metrics.pop("eval/tokens_per_sec") > 0
    assert metrics == {key: record[key] for key in record if key.startswith("eval/")}
    assert start["code"] and start["versions"]["specjax"]
    assert {file["setting"] for file in start["data"]} == {
        f"eval.sets.{name}.path" for name in ("own", "greedy")
    }
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    samples = [row for row in rows if row["set"] == "own"]
    places = [(sample["problem"], sample["sample"]) for sample in samples]
    assert places == [(i, g) for i in range(3) for g in range(3)]
    lengths = [len(sample["token_ids"]) for sample in samples]
    assert np.mean(lengths) == found["eval/own/response_length_mean"]
    assert "avg@3" in capsys.readouterr().out


def test_a_run_leaves_a_plot_checkpoints_and_a_policy_that_generates(run):
    assert (run / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (run / "checkpoints").iterdir() if p.name.isdigit()) == ["2", "3"]
    llm = LLM(run / "hf", max_batch=1, max_len=32)
    sample = llm.generate("4+17=", SamplingParams(max_tokens=8, seed=1))[0].samples[0]
    assert sample.text is not None and len(sample.token_ids) == len(sample.logprobs) <= 8


def test_the_samples_of_a_step_say_which_tokens_were_accepted_drafts(run):
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    metrics = {record["step"]: record for record in read_metrics(run)}
    sampled = [row for row in rows if row["set"] == "train"]
    assert {row["step"] for row in sampled} == {1, 2, 3}
    for row in sampled:
        assert len(row["origins"]) == len(row["token_ids"]) == len(row["tokens"])
        text = "".join(row["tokens"])
        assert text.startswith(row["completion"]) or "<|" in text, "rewards do not see what ends it"
    assert any(row["advantage"] for row in sampled)
    for step in (1, 2, 3):
        origins = "".join(row["origins"] for row in sampled if row["step"] == step)
        assert set(origins) == {"d", "b"}
        accept_length = len(origins) / origins.count("b")
        assert accept_length == pytest.approx(metrics[step]["rollout/spec_accept_length"])
        rewards = [row["reward"] for row in sampled if row["step"] == step]
        assert np.mean(rewards) == pytest.approx(metrics[step]["rollout/reward"])
    for name, count in {"heldout": 6, "own": 3, "greedy": 3}.items():
        of_set = [row for row in rows if row["set"] == name]
        assert [row["step"] for row in of_set] == [0] * count + [2] * count + [3] * count
        assert len({row["problem"] for row in of_set}) == count
        assert all(set(row["origins"]) <= {"d", "b", "p"} for row in of_set)


@pytest.mark.parametrize("source", ["checkpoints", "hf"])
def test_a_run_starts_from_the_head_of_another_run(run, thin_policy, source):
    model, _, own = hf.load_checkpoint(thin_policy)
    own_head = Head(MTPSource(model), own)
    _, found = starting_head(SpecConfig(draft=str(run / source)), model, own_head, None)
    head = found.params
    assert same(head, hf.load_checkpoint(run / "hf")[2]) and not same(head, own)


# --- wrong arguments ------------------------------------------------------------------------------


def refusal(capsys, argv) -> str:
    with pytest.raises(SystemExit) as exit_info:
        rl.main(argv)
    captured = capsys.readouterr()
    message = captured.err
    if isinstance(exit_info.value.code, str):  # printed by the interpreter, with status 1
        message += exit_info.value.code
    else:
        assert exit_info.value.code == 2
    assert "error: " in message and "Traceback" not in message
    return message


def test_speculation_without_a_head_says_how_to_get_one(tmp_path, capsys):
    model = tiny_run.write_policy(tmp_path / "headless", with_head=False)
    argv = tiny_run.arguments(model, tmp_path / "run", draft__mode="online")
    message = refusal(capsys, argv)
    assert "no draft head" in message and "draft=random" in message
    assert not (tmp_path / "run").exists()


# --- options of GRPO ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(modes):
    """The plain run (no speculation, all options at their defaults) the others differ from."""
    return modes["none"]


@pytest.fixture
def vary(thin_policy, tmp_path, base):
    """Runs with one change and checks that the first rollout, which it cannot touch, is equal."""

    def run(steps=1, **changes):
        trainer, steps = train(thin_policy, tmp_path, steps, draft__mode="none", **changes)
        assert steps[0]["rollout/tokens_sha"] == base[1][0]["rollout/tokens_sha"]
        return trainer, steps

    return run


@pytest.mark.slow
def test_a_kl_term_is_added_with_its_coefficient(vary, base):
    _, steps = vary(2, algo__kl_loss_coef=0.5)
    assert "train/kl" not in base[1][0] and base[1][1]["train/kl_loss"] == 0
    assert steps[0]["train/kl"] == 0  # the reference is the policy it started from
    second = steps[1]
    assert second["train/kl"] > 0
    assert second["train/kl_loss"] == pytest.approx(0.5 * second["train/kl"], rel=1e-4)
    total = second["train/policy_loss"] + second["train/kl_loss"]
    assert second["train/loss"] == pytest.approx(total, rel=1e-4, abs=1e-7)


def test_dynamic_sampling_drops_and_replaces_groups_that_teach_nothing(thin_policy, tmp_path):
    changes = {"reward": "tiny_run:rare", "draft.mode": "none"}
    one = {"algo.max_num_gen_batches": 1}
    off = train(thin_policy, tmp_path, 1, **changes, **{"algo.dynamic_sampling": "false"})[1][0]
    _, (on,) = train(thin_policy, tmp_path, 1, **changes, **one)
    _, (more,) = train(thin_policy, tmp_path, 1, **changes)
    informative = round(4 * (1 - off["rollout/zero_std"]))
    assert off["rollout/groups_selected"] == 4 and 0 < informative < 4
    assert on["rollout/groups_selected"] == informative
    assert on["rollout/groups_dropped"] == 4 - informative and on["rollout/groups_drawn"] == 4
    assert on["rollout/tokens"] == off["rollout/tokens"]
    assert more["rollout/groups_selected"] == 4
    assert more["rollout/groups_drawn"] == 4 + more["rollout/groups_dropped"] > 4
    assert more["rollout/tokens"] > on["rollout/tokens"]
    assert off["train/tokens"] == off["rollout/tokens"]
    assert on["train/tokens"] < on["rollout/tokens"]


def test_a_step_in_which_every_group_is_dropped_moves_nothing(thin_policy, tmp_path):
    trainer, _ = train(
        thin_policy, tmp_path, 0, reward="tiny_run:nothing", **{"algo.max_num_gen_batches": 2}
    )
    before = leaves(trainer.params) + leaves(trainer.head)
    metrics = trainer.step()
    after = leaves(trainer.params) + leaves(trainer.head)
    assert metrics["rollout/groups_selected"] == 0 and metrics["rollout/zero_std"] == 1
    assert metrics["rollout/groups_drawn"] == metrics["rollout/groups_dropped"] == 8
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(math.isfinite(v) for v in metrics.values() if not isinstance(v, str))


# --- modes of the draft head ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def modes(thin_policy, tmp_path_factory):
    """Three steps in every mode; `random` is online too, with updates that are absurdly large."""
    out = tmp_path_factory.mktemp("modes")
    changes = {
        "none": {"draft.mode": "none"},
        "frozen": {"draft.mode": "frozen"},
        "online": {"draft.mode": "online"},
        "random": {"rollout.draft": "random", "draft.mtp_loss_scaling_factor": 1e6},
    }
    return {name: train(thin_policy, out, 3, **extra) for name, extra in changes.items()}


@pytest.mark.parametrize("mode", ["frozen", "online", "random"])
def test_speculation_and_draft_training_change_no_token_reward_or_policy_bit(modes, mode):
    (plain, plain_steps), (trainer, steps) = modes["none"], modes[mode]
    for a, b in zip(plain_steps, steps, strict=True):
        for name in ("rollout/tokens_sha", "rollout/reward", "train/loss", "train/grad_norm"):
            assert a[name] == b[name], (mode, name)
    assert same(plain.params, trainer.params)
    assert same(plain.opt_state, trainer.opt_state)


def test_evaluations_change_no_token_or_loss_of_training(run, modes):
    for record, step in zip(read_metrics(run)[1:], modes["online"][1], strict=True):
        for name in ("rollout/tokens_sha", "rollout/reward", "train/loss", "train/mtp_loss"):
            assert record[name] == step[name], name


def test_a_frozen_head_stays_as_it_was_and_an_online_head_moves(modes, thin_policy):
    start = hf.load_checkpoint(thin_policy, "float32")[2]
    assert same(start, modes["frozen"][0].head)
    assert modes["frozen"][0].draft is None and "train/mtp_loss" not in modes["frozen"][1][0]
    assert modes["none"][0].head is None
    assert "rollout/spec_accept_length" not in modes["none"][1][0]
    online = modes["online"][0].head
    pairs = zip(leaves(start), leaves(online), strict=True)
    assert all(not np.array_equal(a, b) for a, b in pairs), (
        "some parameter of the head is not trained"
    )
    assert not same(modes["random"][0].head, online)


def test_an_online_head_learns_from_its_rollouts(modes):
    losses = [step["train/mtp_loss"] for step in modes["online"][1]]
    assert losses[-1] < losses[0]
    for mode in ("online", "random"):
        assert all(step["train/mtp_update_norm"] > 0 for step in modes[mode][1])
        assert all(step["rollout/spec_accept_length"] >= 1 for step in modes[mode][1])


# --- a policy that gives no numbers ---------------------------------------------------------------


def of_nan(tree):
    return jax.tree.map(lambda x: x * np.asarray(np.nan, x.dtype), tree)


def test_a_policy_of_nan_is_one_message_at_the_first_step(thin_policy, tmp_path):
    cfg, policy, head = hf.load_checkpoint(thin_policy)
    policy = {**policy, "norm": of_nan(policy["norm"])}
    hf.save_checkpoint(tmp_path / "nan", cfg, policy, head, tokenizer_dir=thin_policy)
    with pytest.raises(SystemExit) as end:
        rl.main(tiny_run.arguments(tmp_path / "nan", tmp_path / "out", **HEAD))
    said = str(end.value)
    assert said.startswith("train.rl: error: step 1: the rollout of problem ")
    assert "NaN" in said and "before training began" in said and "\n" not in said


# --- the beginning-of-sequence token --------------------------------------------------------------


def test_rollouts_and_demonstrations_begin_with_the_tokenizers_bos(thin_policy, tmp_path):
    policy = tmp_path / "policy"
    shutil.copytree(thin_policy, policy)
    made = load_tokenizer(policy)
    backend, token = made.backend_tokenizer, ("<|pad|>", made.pad_token_id)
    backend.post_processor = TemplateProcessing(single="<|pad|> $A", special_tokens=[token])
    backend.save(str(policy / "tokenizer.json"))
    settings = json.loads((policy / "tokenizer_config.json").read_text())
    (policy / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": token[0]}))
    made, bos = load_tokenizer(policy), token[1]
    argv = tiny_run.arguments(policy, tmp_path / "out", **HEAD)
    trainer = rl.Trainer(parse_config(RLConfig, argv)[0])
    trainer.rollouts.draws.begin(1)
    for group in (trainer.rollouts.draws.draw() for _ in range(3)):
        bare = made.encode(group.problem.prompt, add_special_tokens=False)
        assert group.prompt == [bos, *bare] == prompt_ids(made, group.problem.prompt)
    argv = [f"init={policy}", "packing.rows=2", "packing.row_length=64", "data.max_terms=3"]
    packed = PackedDemonstrations(parse_config(SFTConfig, argv)[0], made).next_update()
    for batch in packed:
        begins = (batch["segment_ids"] > 0) & (batch["positions"] == 0)
        assert begins.any() and (batch["tokens"][begins] == bos).all()
        assert (batch["tokens"][batch["segment_ids"] > 0] == bos).sum() == begins.sum()
