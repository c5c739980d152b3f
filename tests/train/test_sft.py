"""`train.sft` makes a policy and a head from nothing, or goes on with them; then `train.rl`."""

import math
from pathlib import Path

import numpy as np
import pytest
import tiny_run

from specjax import LLM, SamplingParams, SpecConfig
from specjax.models import hf
from train import rl, sft
from train.log import read_metrics

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k"
SETTINGS = {
    "steps": 60,
    "draft_steps": 40,
    "vocab_size": 272,
    "tokenizer_texts": 200,
    "log_every": 5,
    "data.max_terms": 3,
    "model.hidden_size": 32,
    "model.intermediate_size": 64,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.head_dim": 8,
    "model.max_position": 256,
    "packing.row_length": 64,
    "packing.rows": 4,
    "optim.lr": 1e-2,
    "draft.optim.lr": 1e-2,
    "draft.unroll_steps": 2,
    "checkpoint.every": 30,
}


def arguments(out, **changes) -> list[str]:
    return [f"{key}={value}" for key, value in {**SETTINGS, "out": out, **changes}.items()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("sft") / "run"
    sft.main(arguments(out))
    return out


def series(run, name) -> list[float]:
    return [r[name] for r in read_metrics(run) if name in r]


def test_the_policy_learns_and_then_its_head(run):
    losses = series(run, "train/loss")
    assert losses[0] < math.log(272) and losses[-1] < 0.6 * losses[0]
    assert losses[-1] < 2.5
    for name in ("train/mtp_overlap_depth_1", "train/mtp_overlap_depth_2"):
        overlap = series(run, name)
        assert overlap[-1] > overlap[0] + 0.05 and overlap[-1] < 1
    assert [r["step"] for r in read_metrics(run)] == list(range(5, 101, 5))
    assert (run / "checkpoints" / "100").is_dir()


def test_the_export_generates_with_its_own_tokenizer_and_head(run):
    llm = LLM(run / "hf", SpecConfig("2_1_3"), max_batch=4, max_len=64)
    assert llm.cfg.mtp_num_layers == 1
    params = SamplingParams(max_tokens=32, n=4, seed=0)
    samples = llm.generate(["4+17+9=", "8+5="], params)[0].samples
    assert all(s.text and s.finish_reason in ("stop", "length") for s in samples)
    assert llm.totals.accept_length > 1.3, "the trained head is of no use"


@pytest.mark.torch
def test_the_export_is_what_transformers_loads(run):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(run / "hf")("4+17=", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        scores = torch.log_softmax(theirs(torch.tensor([ids])).logits[0, -1], -1).numpy()
    sample = LLM(run / "hf", max_batch=1, max_len=64).generate(
        "4+17=", SamplingParams(max_tokens=1, temperature=1.0)
    )[0].samples[0]  # fmt: skip
    assert abs(scores[sample.token_ids[0]] - sample.logprobs[0]) < 1e-4


def test_init_continues_a_policy_with_its_tokenizer_and_head(run, tmp_path):
    changes = {"init": run / "hf", "steps": 5, "draft_steps": 5, "log_every": 1}
    sft.main(arguments(tmp_path / "more", **changes))
    assert series(tmp_path / "more", "train/loss")[0] < 1.2 * series(run, "train/loss")[-1]
    overlap = "train/mtp_overlap_depth_1"
    assert series(tmp_path / "more", overlap)[0] > series(run, overlap)[0]
    tokenizers = [(p / "hf" / "tokenizer.json").read_text() for p in (run, tmp_path / "more")]
    assert tokenizers[0] == tokenizers[1]
    before, after = (hf.load_checkpoint(p / "hf")[1]["embed"] for p in (run, tmp_path / "more"))
    assert not np.array_equal(np.asarray(before), np.asarray(after))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data.task": "gsm8k"}, "set data.path=/path/to/train.jsonl"),
        ({"init": "no/such/dir"}, "no/such/dir"),
        ({"vocab_size": 100}, "vocab_size must be at least 258"),
        ({"packing.row_length": 8}, "raise it"),
        ({"mesh.data": 64, "packing.rows": 64}, "needs 64 devices"),
        ({"model.num_heads": 5}, "num_heads must be a multiple"),
        ({"lr": 1}, "did you mean"),
        ({"draft.loss": "mse"}, "draft.loss: expected one of ce, soft_ce"),
        ({"packing.rows": 0}, "packing.rows: expected at least 1"),
    ],
)
def test_a_wrong_setting_is_one_clear_message(tmp_path, capsys, changes, expected):
    with pytest.raises(SystemExit) as exit_info:
        sft.main(arguments(tmp_path / "run", **changes))
    message = capsys.readouterr().err + str(exit_info.value.code)
    assert expected in message and "Traceback" not in message


def test_a_directory_with_checkpoints_is_not_trained_over(run, capsys):
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="holds checkpoints of an earlier run"):
        sft.main(arguments(run))
    assert (run / "metrics.jsonl").read_bytes() == before


# --- GSM8K's format, end to end -------------------------------------------------------------------


def gsm8k(model, out, path, **changes) -> list[dict]:
    """Two RL steps on GSM8K-format lines; returns their records."""
    settings = {
        "data.task": "gsm8k",
        "data.path": path,
        "reward": "number",
        "rollout.max_prompt_tokens": 40,
        "rollout.max_tokens": 24,
        "rollout.strategy": "2_1_3",
        "algo.dynamic_sampling": "false",
        "eval.problems": 2,
        **changes,
    }
    rl.main(tiny_run.arguments(model, out, **settings))
    records = read_metrics(out)
    assert not any("nonfinite" in r for r in records)
    steps = [r for r in records if r["step"] > 0]
    assert all(r["rollout/spec_accept_length"] >= 1 for r in steps)
    assert all(0 <= r["rollout/reward"] <= 1 and r["train/tokens"] > 0 for r in steps)
    return steps


def test_gsm8k_lines_go_through_sft_and_rl_with_numbers_as_rewards(tmp_path):
    path = tiny_run.write_gsm8k(tmp_path / "train.jsonl")
    common = {"data.task": "gsm8k", "data.path": path, "loss_on": "all"}
    sft.main(arguments(tmp_path / "sft", **common))
    assert len(gsm8k(tmp_path / "sft" / "hf", tmp_path / "rl", path)) == 2


@pytest.mark.slow
@pytest.mark.skipif(not (GSM8K / "train.jsonl").exists(), reason="GSM8K is not beside the checkout")
def test_the_real_gsm8k_goes_through_ten_steps(tmp_path):
    path = GSM8K / "train.jsonl"
    common = {"data.task": "gsm8k", "data.path": path, "loss_on": "all", "vocab_size": 512}
    packing = {"packing.row_length": 1024, "model.max_position": 1024, "checkpoint.every": 0}
    sft.main(arguments(tmp_path / "sft", **common, **packing))
    changes = {"steps": 10, "rollout.max_prompt_tokens": 192, "packing.row_length": 256}
    steps = gsm8k(tmp_path / "sft" / "hf", tmp_path / "rl", path, **changes)
    assert len(steps) == 10
