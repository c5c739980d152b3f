"""What ends a text: the end-of-sequence tokens of the checkpoint, and the tokenizer's."""

import json
import shutil
from pathlib import Path

import pytest

from serve.admin import read_weights
from serve.settings import EngineSection, ServeConfig, SpeculationSection, load_llm
from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.command_line import parse_config
from specjax.tokenizer import load_tokenizer, with_tokenizer_end
from train import rl, sft
from train.schema import RLConfig, SFTConfig

OFF = SpecConfig(strategy="off")
PROMPT = "17+25="
SIZES = {"max_batch": 1, "max_len": 64}


def policy(source: Path, path: Path, ends, token) -> Path:
    """A copy whose config names `ends`, and whose tokenizer `token`."""
    shutil.copytree(source, path)
    for file, changes in (
        ("config.json", {"eos_token_id": ends}),
        ("generation_config.json", {"eos_token_id": None}),
        ("tokenizer_config.json", {"eos_token": token}),
    ):
        value = json.loads((path / file).read_text()) | changes
        (path / file).write_text(json.dumps(value))
    return path


@pytest.fixture(scope="module")
def whole(thin_policy) -> list[int]:
    """Tokens of a sample that nothing ends."""
    params = SamplingParams(seed=0, max_tokens=24, ignore_eos=True)
    return LLM(thin_policy, OFF, **SIZES).generate(PROMPT, params)[0].samples[0].token_ids


@pytest.fixture(scope="module")
def differing(thin_policy, whole, tmp_path_factory):
    """A checkpoint whose config names a token that is never sampled, and whose tokenizer names one
    that is; and that token."""
    tokenizer = load_tokenizer(thin_policy)
    known = [t for t in whole if tokenizer.convert_ids_to_tokens(t).isalnum() and t not in (0, 1)]
    token = known[-1]
    never = next(t for t in range(2, 272) if t not in whole)
    path = tmp_path_factory.mktemp("ends") / "policy"
    return policy(thin_policy, path, never, tokenizer.convert_ids_to_tokens(token)), token, never


def test_llm_and_the_server_stop_at_both(differing, whole):
    path, token, never = differing
    expected = whole[: whole.index(token) + 1]
    served = ServeConfig(
        model=str(path),
        engine=EngineSection(max_batch=1, max_len=64),
        speculation=SpeculationSection(strategy="off"),
    )
    for llm in (LLM(path, OFF, **SIZES), load_llm(served)):
        assert llm.cfg.eos_token_ids == (never, token)
        sample = llm.generate(PROMPT, SamplingParams(seed=0, max_tokens=24))[0].samples[0]
        assert sample.token_ids == expected and sample.finish_reason == "stop"
        ends = SamplingParams(seed=0, max_tokens=24, ignore_eos=True)
        assert llm.generate(PROMPT, ends)[0].samples[0].token_ids == whole
        stop = SamplingParams(seed=0, max_tokens=24, stop_token_ids=whole[:1])
        assert llm.generate(PROMPT, stop)[0].samples[0].token_ids == whole[:1]


def test_rl_stops_at_both_and_exports_both(differing, tmp_path):
    path, token, never = differing
    cfg, _ = parse_config(RLConfig, [f"model={path}", f"out={tmp_path}/rl"])
    trainer = rl.Trainer(cfg)
    assert trainer.model.eos_token_ids == (never, token)
    rl._export(cfg, trainer, tmp_path / "hf")
    assert hf.read_config(tmp_path / "hf").eos_token_ids == (never, token)


def test_sft_ends_with_the_tokenizer_s_token_and_exports_it(differing, tmp_path):
    path, token, never = differing
    run = sft.SFTTrainer(parse_config(SFTConfig, [f"init={path}", f"out={tmp_path}/sft"])[0])
    assert run.stream.tokenizer.eos_token_id == token
    exported = run.export()
    assert hf.read_config(exported).eos_token_ids == (never, token)
    generation = json.loads((exported / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [never, token]


def test_a_server_takes_new_weights_of_the_same_and_of_an_exported_config(differing, tmp_path):
    path, token, never = differing
    tokenizer = load_tokenizer(path)
    served = with_tokenizer_end(hf.read_config(path), tokenizer)
    exported = policy(path, tmp_path / "exported", [token, never], tokenizer.eos_token)
    for place in (path, exported):
        assert read_weights(place, served, False, None, tokenizer)[0] is not None
    other = policy(path, tmp_path / "other", [token, never, 7], tokenizer.eos_token)
    with pytest.raises(ValueError, match="eos_token_ids"):
        read_weights(other, served, False, None, tokenizer)
