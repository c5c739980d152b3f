"""`train.rl` as a user runs it: a short run, its files, its options, and what it refuses."""

import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from tokenizers.processors import TemplateProcessing

from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.store import load_draft
from specjax.checkpoint.weights import Head
from specjax.command_line import parse_config
from specjax.drafts.mtp import MTPSource
from specjax.tokenizer import load_tokenizer, prompt_ids
from train import eval as evaluation
from train import rl
from train.head_files import starting_head
from train.log import read_metrics
from train.loss import count_denominators, sft_loss
from train.optim import OptimConfig
from train.policy import PolicyTrainer
from train.schema import RLConfig, SFTConfig
from train.sft import PackedDemonstrations
from train.trainer import Trainer

HEAD = {"rollout.strategy": "2_1_3", "draft.unroll_steps": 2}


@pytest.fixture(scope="module", autouse=True)
def programs():
    with tiny_run.shared_programs():
        yield


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
    changes |= {"checkpoint.keep_last": 2, "checkpoint.draft_only": "true", "log.samples": 1000}
    rows = out.with_name("rows.jsonl")
    rows.write_text("".join(f'{{"prompt": "{i}+1=", "answer": {i + 1}}}\n' for i in range(3)))
    changes |= {"eval.sets.own.path": rows, "eval.sets.own.n": 3, "eval.sets.own.reward": "number"}
    changes |= {"eval.sets.greedy": f"{{path: {rows}, temperature: 0}}"}
    evaluate = Trainer.evaluate

    def watched(self):
        caches = self.engine.runner.state
        found, runner = evaluate(self), self.eval_engine.runner
        HELD.append((caches, runner.params, runner.state))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "evaluate", watched)
        rl.main(tiny_run.arguments(thin_policy, out, **changes, **HEAD))
    return out


HELD: list[tuple] = []  # the rollout's caches before each evaluation; its own weights, caches after


def test_evaluations_have_no_caches_beside_them_and_leave_nothing(run):
    assert HELD == [(None, None, None)] * 3


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
    found = json.loads((tmp_path / "eval.json").read_text())
    assert [*found["sets"]] == ["heldout", "own", "greedy"], "as the run's config.yaml says"
    for name, prefix in (("own", "eval/own/"), ("heldout", "eval/")):
        metrics = found["sets"][name]["metrics"]
        assert metrics and metrics == {key: record[prefix + key] for key in metrics}
    assert "reward" in found["sets"]["heldout"]["metrics"] and found["step"] == 2
    assert found["speed"]["accept_length"] > 1, "it speculates"
    assert found["code"] and found["versions"]["specjax"]
    assert {file["setting"] for file in found["data"]} == {
        f"eval.sets.{name}.path" for name in ("own", "greedy")
    }
    own = found["sets"]["own"]["metrics"]
    samples = [json.loads(line) for line in (tmp_path / "eval-own.jsonl").read_text().splitlines()]
    places = [(sample["problem"], sample["sample"]) for sample in samples]
    assert places == [(i, g) for i in range(3) for g in range(3)]
    assert np.mean([s["tokens"] for s in samples]) == own["response_length_mean"]
    assert "avg@3" in capsys.readouterr().out


def test_the_program_that_evaluates_takes_no_setting_of_training(tmp_path, capsys):
    for argv, said in (
        (["optim.lr=1"], "optim.lr is about training, and train.eval trains nothing"),
        (["rollout.n=3"], "rollout.n is about training"),
        (["distributed.num_processes=2"], "train.eval runs in one process"),
        (["model=nowhere"], "nowhere does not exist"),
    ):
        with pytest.raises(SystemExit) as error:
            evaluation.main([f"out={tmp_path}", *argv])
        assert said in f"{error.value}{capsys.readouterr().err}"


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


def test_a_run_says_how_it_was_started(run, capsys):
    [start] = json.loads((run / "run.json").read_text())
    assert start["program"] == "train.rl" and f"out={run}" in start["command"]
    assert start["first_step"] == 1 and start["versions"]["jax"] == jax.__version__
    sets = {f"eval.sets.{name}.path" for name in ("own", "greedy")}
    assert {file["setting"] for file in start["data"]} == sets
    with pytest.raises(SystemExit):
        rl.main(["--config", str(run / "config.yaml"), "--print-config"])
    assert "steps: 3" in capsys.readouterr().out, "the file must be taken as it is"


def test_the_last_heads_of_a_run_lie_in_a_directory_of_their_own(run):
    assert sorted(p.name for p in (run / "draft").iterdir()) == ["2", "3"]
    head, meta = load_draft(run / "draft" / "3")
    assert same(head, hf.load_checkpoint(run / "hf")[2])
    assert not same(head, load_draft(run / "draft" / "2")[0])
    names = {p.key for path, _ in jax.tree_util.tree_leaves_with_path(head) for p in path}
    assert not names & {"embed", "lm_head"}
    assert meta["step"] == 3 and meta["mtp_concat"] == "embedding_first"


@pytest.mark.parametrize("source", ["draft/3", "hf", "hf/mtp.safetensors"])
def test_a_run_starts_from_a_head_that_lies_alone(run, thin_policy, source):
    model, _, own = hf.load_checkpoint(thin_policy)
    own_head = Head(MTPSource(model), own)
    _, found = starting_head(SpecConfig(draft=str(run / source)), model, own_head, None)
    head = found.params
    assert same(head, hf.load_checkpoint(run / "hf")[2]) and not same(head, own)


def test_a_run_goes_to_the_first_directory_without_checkpoints(run):
    assert rl._fresh(run) == run.with_name("run-2")
    assert rl._fresh(run / "new") == run / "new"


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


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rollout.temprature": 1}, "unknown key 'rollout.temprature'; did you mean"),
        ({"model": "no/such/dir"}, "expected a checkpoint directory, got 'no/such/dir'"),
        ({"rollout.strategy": "5_1_4"}, "5_1_4"),
        ({"rollout.strategy": "wide"}, "strategy 'wide' is not understood"),
        (
            {"rollout.strategy": "8_4_32", "rollout.acceptance": "recursive"},
            "re-ranking is biased",
        ),
        (
            {"rollout.strategy": "4x2x1", "rollout.acceptance": "block"},
            "acceptance 'block' is exact for chains only",
        ),
        ({"rollout.acceptance": "typical"}, "rollout.acceptance: expected one of coupled, block"),
        ({"rollout.temperature": -1}, "temperature must be a finite number >= 0"),
        ({"rollout.n": 1}, "rollout.n: expected at least 2, got 1"),
        ({"rollout.prompts": 0}, "rollout.prompts: expected at least 1"),
        ({"rollout.max_tokens": 0}, "max_tokens must be at least 1"),
        ({"rollout.draft": "eagle"}, "rollout.draft: expected auto, checkpoint, random, ngram, "),
        ({"packing.row_length": 31}, "must fit a row, got packing.row_length=31"),
        ({"rollout.max_tokens": 250, "packing.row_length": 262}, "the longest sequence of"),
        ({"packing.microbatches": 2}, "unknown key 'packing.microbatches'"),
        ({"algo.updates_per_rollout": 0}, "algo.updates_per_rollout: expected at least 1"),
        ({"algo.loss_aggregation": "mean"}, "loss_aggregation must be one of token, sequence"),
        ({"draft.mode": "sometimes"}, "draft.mode: expected one of auto, none, frozen, online"),
        ({"draft.unroll_steps": 0}, "draft.unroll_steps and draft.epochs >= 1"),
        ({"draft.loss": "mse"}, "mse"),
        ({"reward": "close_enough"}, "unknown reward 'close_enough'"),
        ({"reward": "tiny_run:missing"}, "cannot load reward 'tiny_run:missing'"),
        ({"data.task": "gsm8k"}, "set data.path=/path/to/train.jsonl"),
        ({"data.task": "gsm8k", "data.path": "no.jsonl"}, "no.jsonl: no such file"),
        ({"mesh.data": 64, "packing.rows": 64}, "needs 64 devices"),
        ({"mesh.tp": 0}, "mesh.tp: expected at least 1"),
        ({"mesh.data": 2, "packing.rows": 3}, "packing.rows must be a multiple of"),
        ({"checkpoint.keep_last": 0}, "checkpoint.keep_last: expected at least 1"),
        ({"steps": 0}, "steps: expected at least 1"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_one_clear_message_before_any_work(
    thin_policy, tmp_path, capsys, changes, expected
):
    argv = tiny_run.arguments(thin_policy, tmp_path / "run", **changes)
    assert expected in refusal(capsys, argv)
    assert not (tmp_path / "run").exists()


def test_strategy_off_is_no_speculation(tmp_path):
    (tmp_path / "off.yaml").write_text("rollout: {strategy: off}\n")
    for argv in (["rollout.strategy=off"], ["--config", str(tmp_path / "off.yaml")]):
        assert SpecConfig(parse_config(RLConfig, argv)[0].rollout.strategy).is_off


@pytest.mark.parametrize("mode", ["frozen", "online"])
def test_speculation_without_a_head_says_how_to_get_one(tmp_path, capsys, mode):
    model = tiny_run.write_policy(tmp_path / "headless", with_head=False)
    argv = tiny_run.arguments(model, tmp_path / "run", draft__mode=mode)
    message = refusal(capsys, argv)
    assert "no draft head" in message and "rollout.draft=random" in message
    assert not (tmp_path / "run").exists()


def test_a_damaged_policy_is_one_clear_message(tmp_path, thin_policy, capsys):
    import shutil

    model = shutil.copytree(thin_policy, tmp_path / "damaged")
    (model / "model.safetensors").write_bytes(b"nothing")
    assert "damaged" in refusal(capsys, tiny_run.arguments(model, tmp_path / "run"))
    config = json.loads((thin_policy / "config.json").read_text()) | {"model_type": "mamba"}
    (model / "config.json").write_text(json.dumps(config))
    assert "mamba" in refusal(capsys, tiny_run.arguments(model, tmp_path / "run"))


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


def test_a_kl_term_is_added_with_its_coefficient(vary, base):
    _, steps = vary(2, algo__kl_loss_coef=0.5)
    assert "train/kl" not in base[1][0] and base[1][1]["train/kl_loss"] == 0
    assert steps[0]["train/kl"] == 0  # the reference is the policy it started from
    second = steps[1]
    assert second["train/kl"] > 0
    assert second["train/kl_loss"] == pytest.approx(0.5 * second["train/kl"], rel=1e-4)
    total = second["train/policy_loss"] + second["train/kl_loss"]
    assert second["train/loss"] == pytest.approx(total, rel=1e-4, abs=1e-7)


def test_several_updates_per_rollout_are_off_policy_and_clipped_by_two_bounds(vary, base):
    changes = {"algo.updates_per_rollout": 2, "algo.clip_ratio": 0.9}
    trainer, steps = vary(2, **changes, **{"algo.clip_ratio_high": 9.0})
    assert base[1][0]["train/ratio"] == 1 and base[1][0]["train/ppo_kl"] == 0
    assert steps[0]["train/ratio"] != 1 and steps[0]["train/ppo_kl"] != 0
    counts = [int(x) for x in leaves(trainer.opt_state) if x.ndim == 0]
    assert counts and set(counts) == {4}  # two steps of two updates
    tight = vary(**changes, **{"algo.clip_ratio_high": 0.0})[1]
    assert tight[0]["train/clip_fraction"] > 0 == steps[0]["train/clip_fraction"]


def test_dynamic_sampling_drops_and_replaces_groups_that_teach_nothing(thin_policy, tmp_path):
    changes = {"reward": "tiny_run:rare", "draft.mode": "none"}
    one = {"algo.max_num_gen_batches": 1}
    off = train(thin_policy, tmp_path, 1, **changes, **{"algo.dynamic_sampling": "false"})[1][0]
    trainer, (on,) = train(thin_policy, tmp_path, 1, **changes, **one)
    replacing, (more,) = train(thin_policy, tmp_path, 1, **changes)
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
    said = trainer.rollouts.short
    assert said.startswith(f"{informative} groups of 4 have differing rewards, fewer than rollout.")
    assert "algo.max_num_gen_batches=1" in said
    assert said in rl.StepWarnings().check(1, on, short=said)
    assert replacing.rollouts.short is None


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


def test_rematerialisation_changes_no_loss(vary, base):
    _, steps = vary(2, remat="true")
    for mine, theirs in zip(steps, base[1], strict=False):
        assert mine["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-4, abs=1e-6)
        assert mine["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-4)


def test_scanned_and_looped_layers_give_the_same_loss_and_gradient(tiny_policy):
    model, start, _ = hf.load_checkpoint(tiny_policy, "float32")
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(0, 272, (2, 24)).astype(np.int32),
        "positions": np.tile(np.arange(24, dtype=np.int32), (2, 1)),
        "segment_ids": np.ones((2, 24), np.int32),
        "loss_mask": np.ones((2, 24), np.float32),
    }
    results = []
    for scan in (True, False):
        policy = PolicyTrainer(model, sft_loss, OptimConfig().build())
        policy.cfg = model.running(scan_layers=scan)
        counts = count_denominators([batch])
        params = jax.tree.map(jnp.copy, start)
        *_, sums = policy.update(params, policy.init_opt_state(params), [batch], counts)
        results.append((float(sums["loss"]), float(sums["grad_norm"])))
    assert results[0] == pytest.approx(results[1], rel=1e-5)


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


@pytest.mark.slow
def test_a_static_tree_soft_targets_and_bfloat16_go_together(thin_policy, tmp_path):
    changes = {"rollout.strategy": "4x2x1", "rollout.temperature": 0.7, "draft.loss": "kl"}
    changes |= {"draft.unroll_steps": 3, "draft.epochs": 2}
    changes |= {"dtype.compute": "bfloat16", "dtype.params": "bfloat16"}
    _, steps = train(thin_policy, tmp_path, 2, **changes)
    for step in steps:
        assert all(math.isfinite(v) for v in step.values() if not isinstance(v, str))
        assert step["train/mtp_update_norm"] > 0


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


def test_a_policy_that_goes_to_nan_ends_the_run_with_what_is_saved(
    thin_policy, tmp_path, monkeypatch
):
    update = Trainer._update_policy

    def diverges(self, *given):
        done = update(self, *given)
        if self.done_steps == 1:
            self.params = of_nan(self.params)
        return done

    monkeypatch.setattr(Trainer, "_update_policy", diverges)
    changes = HEAD | {"steps": 5, "checkpoint.every": 1, "draft.mode": "frozen"}
    with pytest.raises(SystemExit) as end:
        rl.main(tiny_run.arguments(thin_policy, tmp_path / "out", **changes))
    said = str(end.value)
    assert "step 3: " in said and "Steps 1, 2 are saved in" in said
    assert f"model={tmp_path / 'out'}" in said
    for record in read_metrics(tmp_path / "out"):
        json.dumps(record, allow_nan=False)
    assert [record["step"] for record in read_metrics(tmp_path / "out")] == [1, 2]


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
    trainer.rollouts._at = 0
    for group in (trainer.rollouts._draw(1) for _ in range(3)):
        bare = made.encode(group.problem.prompt, add_special_tokens=False)
        assert group.prompt == [bos, *bare] == prompt_ids(made, group.problem.prompt)
    argv = [f"init={policy}", "packing.rows=2", "packing.row_length=64", "data.max_terms=3"]
    packed = PackedDemonstrations(parse_config(SFTConfig, argv)[0], made).next_update()
    for batch in packed:
        begins = (batch["segment_ids"] > 0) & (batch["positions"] == 0)
        assert begins.any() and (batch["tokens"][begins] == bos).all()
        assert (batch["tokens"][batch["segment_ids"] > 0] == bos).sum() == begins.sum()
