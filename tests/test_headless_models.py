"""A model as people have it, instruction-tuned and without a draft head, by every program.

Tiny random directories of three families, saved in bfloat16, with a tokenizer and a chat template.
Each program is given the model's path and what keeps the test short, and nothing that it requires.
"""

import json
import logging

import pytest
import tiny_run

from serve.settings import ServeConfig, load_llm
from specjax import LLM, SamplingParams
from specjax.checkpoint import huggingface as hf
from specjax.command_line import parse_config
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params
from train import rl, sft
from train.data.rows import demonstrations
from train.data.tokenizer import train_bpe_tokenizer
from train.run.files import read_metrics
from train.schema import DataConfig

pytestmark = pytest.mark.usefixtures("logging_as_it_was")
FAMILIES = {
    "llama": {"qk_norm": False, "tie_embeddings": False},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "qwen3": {},
}
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
FEW = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
# One family in the ordinary suite: the others run the same programs of other shapes.
EACH = [
    name if name == "qwen2" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("headless") / "tokenizer"
    rows = demonstrations(DataConfig(), "train")[:200]
    texts = [text for row in rows for text in (row.prompt, row.response)]
    found = train_bpe_tokenizer(texts, 272, path)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": CHAT}))
    return path, found


@pytest.fixture(scope="module")
def directories(tokenizer):
    path, found = tokenizer
    for name, changes in FAMILIES.items():
        cfg = dense_config(
            model_type=name,
            vocab_size=272,
            hidden_size=16,
            intermediate_size=32,
            num_layers=1,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            max_position=256,
            eos_token_ids=(found.eos_token_id,),
            pad_token_id=found.pad_token_id,
            **changes,
        )
        params = tiny_run._sharpened(init_params(cfg, 0))
        hf.save_checkpoint(path.with_name(name), cfg, params, None, path, dtype="bfloat16")
    return {name: path.with_name(name) for name in FAMILIES}


@pytest.fixture(params=EACH)
def model(request, directories):
    return directories[request.param]


# --- decoding ------------------------------------------------------------------------------------


def test_llm_drafts_with_n_grams_and_gives_the_tokens_of_plain_decoding(model, caplog):
    with caplog.at_level(logging.INFO):
        llm = LLM(model, max_batch=1, max_len=64)
    [said] = [r.message for r in caplog.records if r.message.startswith("draft:")]
    assert "n-grams, for the checkpoint has no draft head" in said
    assert "goodput chooses among off, 4_1_5" in said
    plain = LLM(model, None, max_batch=1, max_len=64)
    assert plain.drafting.described() == "draft: none, by plain decoding"
    tokens = [x.generate("1+1=", FEW)[0].samples[0].token_ids for x in (llm, plain)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 6


def test_the_server_needs_the_path_alone_and_says_what_drafts(model, caplog):
    from fastapi.testclient import TestClient

    from serve.api import create_app

    small = ["--engine.max-len=64", "--engine.max-batch", "1"]
    cfg, _ = parse_config(ServeConfig, ["--model", str(model), *small], "serve")
    with caplog.at_level(logging.INFO):
        llm = load_llm(cfg)
    [said] = [r.message for r in caplog.records if r.message.startswith("draft:")]
    assert "n-grams, for the checkpoint has no draft head" in said
    with TestClient(create_app(cfg, llm)) as client:
        body = {"model": cfg.name, "prompt": "1+1=", "max_tokens": 4, "seed": 1}
        reply = client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        messages = [{"role": "user", "content": "1+1="}]
        body = {"model": cfg.name, "messages": messages, "max_tokens": 4}
        reply = client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text


# --- training ------------------------------------------------------------------------------------

SHORT = [
    "data.max_terms=3", "rollout.prompts=4", "rollout.n=4", "rollout.max_tokens=20",
    "rollout.max_prompt_tokens=32", "rollout.max_batch=1", "rollout.strategy=1_1_2",
    "packing.row_length=64", "packing.rows=2", "eval.problems=0", "reward=tiny_run:coin",
    "rewards.workers=0",
]  # fmt: skip


@pytest.mark.slow
def test_train_rl_drafts_with_n_grams_and_trains_no_head(model, tmp_path, capsys):
    rl.main([*SHORT, "--model", str(model), "--steps", "3", f"out={tmp_path}/run"])
    said = capsys.readouterr().out
    assert f"the embedded task sums, through the tokenizer of {model}" in said
    assert "draft: n-grams, for the checkpoint has no draft head; the controller goodput" in said
    records = [r for r in read_metrics(tmp_path / "run") if "rollout/reward" in r]
    assert len(records) == 3 and all("train/mtp_loss" not in r for r in records)
    assert all(r["train/loss"] == r["train/loss"] for r in records)
    model, _, head = hf.load_checkpoint(tmp_path / "run" / "hf")
    assert head is None and model.mtp_num_layers == 0


def test_train_sft_imitates_the_embedded_task_and_makes_a_head(model, tmp_path, capsys):
    few = ["steps=2", "draft_steps=2", "data.max_terms=3", "packing.rows=2", "log_every=1"]
    sft.main([*few, "--packing.row_length=80", "--model", str(model), f"out={tmp_path}/run"])
    said = capsys.readouterr().out
    assert f"the embedded task sums, through the tokenizer of {model}" in said
    losses = [r["train/loss"] for r in read_metrics(tmp_path / "run") if "train/loss" in r]
    assert len(losses) == 2
    assert hf.load_checkpoint(tmp_path / "run" / "hf")[2] is not None
