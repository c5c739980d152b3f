"""A model as people have it, instruction-tuned and without a draft head, by every program.

Tiny random directories of three families, saved in bfloat16, with a tokenizer and a chat template.
Each program is given the model's path and what keeps the test short, and nothing that it requires.
"""

import json
import logging

import pytest
import tiny_run

from serve.__main__ import main as serve
from serve.cli.main import main as command
from serve.settings import ServeConfig, load_llm
from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.command_line import load_config
from specjax.drafts.mtp import MTPSource
from specjax.engine.sources import settle_draft
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params
from specjax.spelling import flags
from specjax.verify.__main__ import _parser as verify_parser
from train import data, rl, sft
from train.log import read_metrics

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
    demonstrations = data.demonstrations(data.DataConfig(), "train")
    texts = [t for i in range(200) for t in (demonstrations[i].prompt, demonstrations[i].response)]
    found = data.train_bpe_tokenizer(texts, 272, path)
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


def test_the_directories_have_no_head_and_are_saved_in_bfloat16(directories):
    for name, path in directories.items():
        config = json.loads((path / "config.json").read_text())
        assert (config["model_type"], config["torch_dtype"]) == (name, "bfloat16")
        assert not config.get("num_nextn_predict_layers")


# --- decoding ------------------------------------------------------------------------------------


def test_llm_drafts_with_n_grams_and_gives_the_tokens_of_plain_decoding(model, caplog):
    with caplog.at_level(logging.INFO):
        llm = LLM(model, max_batch=1, max_len=64)
    [said] = [r.message for r in caplog.records if r.message.startswith("draft:")]
    assert "n-grams, for the checkpoint has no draft head" in said
    assert "goodput chooses among off, 4_1_5" in said
    assert "SpecConfig(strategy='off')" in said and "SpecConfig(draft='random')" in said
    plain = LLM(model, None, max_batch=1, max_len=64)
    assert plain.drafting.described() == "draft: none, by plain decoding"
    tokens = [x.generate("1+1=", FEW)[0].samples[0].token_ids for x in (llm, plain)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 6


@pytest.mark.parametrize("source", ["auto", "ngram", "checkpoint", "random", "a head", "a model"])
@pytest.mark.parametrize("head", [None, MTPSource])
def test_verify_advises_what_it_takes(source, head, directories, thin_policy):
    paths = {"a head": thin_policy, "a model": directories["llama"]}
    drafting = settle_draft(SpecConfig(draft=paths.get(source, source)), None, head)
    line = drafting.described(flags, always_drafts=True)
    advised = line.partition("to change it: ")[2].replace("or ", "").split(", ")
    for advice in advised:
        verify_parser("verify").parse_args(["--model", "x", "--prompt", "y", *advice.split()])
    assert advised and "off" not in line.partition("to change it: ")[2]
    assert "--strategy off" in drafting.described(flags)


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_generate_needs_the_path_alone_and_says_what_drafts(model, chat, capsys):
    asked = ["generate", "--model", str(model), *chat, "1+1=", "--max-tokens", "6"]
    assert command([*asked, "--seed", "1", "--ignore-eos"]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip()
    assert "draft: n-grams, for the checkpoint has no draft head" in captured.err
    assert "--draft random, --draft DIR, or --strategy off" in captured.err


def test_the_server_needs_the_path_alone_and_says_what_drafts(model, caplog):
    from fastapi.testclient import TestClient

    from serve.api import create_app

    small = ["--engine.max-len=64", "--engine.max-batch", "1"]
    cfg = load_config(ServeConfig, ["--model", str(model), *small], "serve")
    with caplog.at_level(logging.INFO):
        llm = load_llm(cfg)
    [said] = [r.message for r in caplog.records if r.message.startswith("draft:")]
    assert "speculation.draft=random, speculation.draft=DIR" in said
    assert "or speculation.strategy=off" in said and "SpecConfig" not in said
    with TestClient(create_app(cfg, llm)) as client:
        body = {"model": cfg.name, "prompt": "1+1=", "max_tokens": 4, "seed": 1}
        reply = client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        messages = [{"role": "user", "content": "1+1="}]
        body = {"model": cfg.name, "messages": messages, "max_tokens": 4}
        reply = client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text


@pytest.mark.slow  # thousands of samples
def test_verify_needs_the_path_alone(directories, capsys):
    few = ["--samples", "600", "--requests", "2"]
    assert command(["verify", "--model", str(directories["llama"]), *few]) in (0, 3)
    captured = capsys.readouterr()
    assert "draft: n-grams, for the checkpoint has no draft head; always 4_1_5" in captured.err
    # Plain decoding leaves nothing to verify, so it is not offered here.
    assert "--draft random" in captured.err and "--strategy off" not in captured.err


@pytest.mark.parametrize("family", FAMILIES)
def test_convert_needs_the_path_alone(directories, family, tmp_path, capsys):
    assert command(["convert", str(directories[family]), str(tmp_path / "orbax")]) == 0
    assert command(["convert", str(tmp_path / "orbax"), str(tmp_path / "hf")]) == 0
    assert capsys.readouterr().out
    before, after = (p / "config.json" for p in (directories[family], tmp_path / "hf"))
    assert json.loads(before.read_text()) == json.loads(after.read_text())


def test_where_the_head_is_asked_for_each_program_says_what_to_type_there(directories, capsys):
    path = str(directories["llama"])
    with pytest.raises(ValueError, match=r"no draft head.*SpecConfig\(draft='ngram'\)"):
        LLM(path, SpecConfig(draft="checkpoint"), max_batch=1, max_len=64)
    assert command(["generate", "--model", path, "1+1=", "--draft=checkpoint"]) == 2
    said = capsys.readouterr().err
    assert "no draft head" in said and "--draft ngram" in said and "--draft random" in said
    assert "SpecConfig" not in said and "speculation." not in said
    with pytest.raises(SystemExit) as refused:
        serve(["--model", path, "--speculation.draft", "checkpoint", "--port", "0"])
    said = str(refused.value)
    assert "no draft head" in said and "speculation.draft=ngram" in said
    assert "speculation.draft=DIR" in said and "SpecConfig" not in said


@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        (["--strategy", "9_1_3"], ["speculation.strategy=9_1_3"]),
        (["--strategy", "60_1_61"], ["speculation.strategy=60_1_61"]),
        (["--max-len", "1"], ["engine.max_len=1"]),
        (["--draft", "/no/such"], ["speculation.draft=/no/such"]),
        (["--draft", "model"], ["speculation.draft=model"]),
        (["--controller", "ema", "--acceptance", "block"],
         ["speculation.controller=ema", "speculation.acceptance=block",
          "speculation.invariant=true"]),
    ],
)  # fmt: skip
def test_no_program_names_settings_as_another(directories, flag, setting, capsys):
    path = str(directories["llama"])
    assert command(["generate", "--model", path, "1+1=", *flag]) in (1, 2)
    said = capsys.readouterr().err
    python = ("SpecConfig(", "LLM(", "EngineConfig(", "ControlConfig(", "Traceback")
    assert said and not any(word in said for word in (*python, "speculation.", "engine."))
    if flag[0] == "--max-len":
        return  # a server may start, and refuses requests
    with pytest.raises(SystemExit) as refused:
        serve(["--model", path, *setting, "--port=0"])
    said = f"{refused.value} {capsys.readouterr().err}"
    assert not any(word in said for word in python), said


# --- training ------------------------------------------------------------------------------------

SHORT = [
    "data.max_terms=3", "rollout.prompts=4", "rollout.n=4", "rollout.max_tokens=20",
    "rollout.max_prompt_tokens=32", "rollout.max_batch=1", "rollout.strategy=1_1_2",
    "packing.row_length=64", "packing.rows=2", "eval.problems=0", "reward=tiny_run:coin",
    "rewards.workers=0",
]  # fmt: skip


def test_train_rl_drafts_with_n_grams_and_trains_no_head(model, tmp_path, capsys):
    rl.main([*SHORT, "--model", str(model), "--steps", "3", f"out={tmp_path}/run"])
    said = capsys.readouterr().out
    assert f"the embedded task sums, through the tokenizer of {model}" in said
    assert "draft: n-grams, for the checkpoint has no draft head; the controller goodput" in said
    assert "rollout.draft=random, rollout.draft=DIR, or rollout.strategy=off" in said
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
