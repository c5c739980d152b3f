"""generation_config.json: whose defaults its sampling keys are, and what becomes of the file."""

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run

sys.path.insert(0, str(Path(__file__).parent / "serve"))
from serving import config, served  # noqa: E402

from serve.cli.main import main  # noqa: E402
from serve.settings import load_llm  # noqa: E402
from specjax import LLM, SamplingParams  # noqa: E402
from specjax.checked_json import CheckpointError  # noqa: E402
from specjax.checkpoint import huggingface as hf  # noqa: E402
from specjax.checkpoint.weights import load_model  # noqa: E402
from specjax.command_line import ConfigError, parse_config  # noqa: E402
from specjax.models.generation_config import (  # noqa: E402
    asked_for,
    describe_defaults,
    sampling_defaults,
    sampling_of,
)
from train import rl  # noqa: E402
from train.schema import RLConfig  # noqa: E402

SHORT = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 7}
ALL = {"do_sample": True, **SHORT, "min_p": 0.05, "repetition_penalty": 1.1}
PROMPT = "17+25+8="

pytestmark = pytest.mark.usefixtures("logging_as_it_was")


@pytest.fixture
def checkpoint(thin_policy, tmp_path):
    """A copy of the tiny policy whose generation_config.json says more."""

    def make(name="policy", /, **keys):
        path = Path(shutil.copytree(thin_policy, tmp_path / name))
        file = path / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))
        return path

    return make


def keys_in(path: Path) -> dict:
    return {k: v for k, v in json.loads((path / "generation_config.json").read_text()).items()
            if k not in ("bos_token_id", "eos_token_id", "pad_token_id")}  # fmt: skip


# --- the file -------------------------------------------------------------------------------------

WRONG = {
    "temperature": ("0.6", -0.1, True, [0.6], float("nan"), float("inf")),
    "top_p": (0, 1.5, "high", {}, False),
    "top_k": (2.5, "20", -2, True),
    "min_p": (-0.1, 2, "0"),
    "repetition_penalty": (0, -1, "1.1", True),
    "max_new_tokens": (0, -5, 1.5, "many"),
    "do_sample": (1, "false", 0.0),
}


@pytest.mark.parametrize("key", WRONG)
def test_a_value_that_cannot_be_meant_is_named(key):
    for value in WRONG[key]:
        with pytest.raises(CheckpointError) as caught:
            sampling_of(Path("DIR/generation_config.json"), {key: value})
        message = str(caught.value)
        assert message.startswith(f"DIR/generation_config.json: {key}: expected ")
        assert message.endswith(f", got {value!r}") and "\n" not in message


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({}, {}),
        ({"temperature": None, "top_k": None}, {}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"top_k": 50.0, "top_p": 1}, {"top_k": 50, "top_p": 1}),
        ({"top_k": -1, "max_new_tokens": 9}, {"top_k": -1, "max_tokens": 9}),
        ({"do_sample": False, "length_penalty": 3, "transformers_version": "5"}, {}),
        (ALL, {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 7, "min_p": 0.05,
               "repetition_penalty": 1.1}),
    ],
)  # fmt: skip
def test_what_the_file_says_is_what_sampling_params_take(said, meant):
    found = sampling_defaults(sampling_of(Path("x"), said))
    assert found == meant
    SamplingParams(**found)


def test_one_line_tells_what_is_taken_and_how_to_leave_it_out():
    line = describe_defaults(sampling_of(Path("x"), ALL), "--generation-config none")
    assert "temperature=0.6, top_p=0.95, top_k=20" in line and "--generation-config none" in line
    assert "\n" not in line and describe_defaults((), "x") is None
    assert describe_defaults((("do_sample", True),), "x") is None
    greedy = describe_defaults((("do_sample", False),), "x")
    assert "do_sample=false is not looked at" in greedy and "temperature=0" in greedy


def test_the_setting_is_auto_none_or_a_directory(tmp_path):
    assert asked_for("auto") is None and asked_for("none") == asked_for("vllm") == ()
    (tmp_path / "generation_config.json").write_text('{"top_k": 3}')
    for name in (tmp_path, tmp_path / "generation_config.json"):
        assert asked_for(str(name)) == (("top_k", 3),)
    with pytest.raises(CheckpointError, match="auto, none, or a directory"):
        asked_for(str(tmp_path / "nowhere"))
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        asked_for(str(tmp_path))


# --- who takes the defaults -----------------------------------------------------------------------


def test_they_are_the_defaults_of_the_batch_api(checkpoint):
    path = checkpoint(**ALL)
    llm = LLM(path, max_batch=1, max_len=96)
    expected = SamplingParams(
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        min_p=0.05,
        repetition_penalty=1.1,
        max_tokens=7,
    )
    assert llm.get_default_sampling_params() == expected
    [by_default] = llm.generate(PROMPT)
    [by_hand] = llm.generate(PROMPT, dataclasses.replace(expected, seed=by_default.seed))
    assert by_default.samples == by_hand.samples
    neutral = LLM(path, max_batch=1, max_len=96, generation_config="none")
    assert neutral.get_default_sampling_params() == SamplingParams()
    [output] = llm.generate(PROMPT, SamplingParams(seed=0, max_tokens=12, ignore_eos=True))
    assert len(output.samples[0].token_ids) == 12, "what is said is not added to"


@pytest.fixture
def generate(capsys):
    def run(path, *arguments):
        small = ["--strategy", "off", "--max-len", "96", "--ignore-eos", "--max-batch", "1"]
        small += ["--seed", "0"]
        status = main(["generate", "--model", str(path), *small, *arguments, PROMPT])
        return status, *capsys.readouterr()

    return run


def test_they_are_the_defaults_of_the_command(checkpoint, generate):
    path = checkpoint(**SHORT)
    status, text, said = generate(path)
    assert status == 0
    line = "sampling defaults of generation_config.json: temperature=0.6, top_p=0.95, top_k=20"
    assert line in said and "--generation-config none" in said
    by_hand = ["--temperature", "0.6", "--top-p", "0.95", "--top-k", "20", "--max-tokens", "7"]
    _, neutral, silent = generate(path, "--generation-config", "none", *by_hand)
    assert neutral == text and "defaults" not in silent
    _, longer, _ = generate(path, "--max-tokens", "12")
    assert longer != text and longer.startswith(text.rstrip("\n"))
    _, other, _ = generate(path, "--generation-config", "vllm", "--max-tokens", "7")
    assert other != text


def test_a_directory_lends_its_defaults(checkpoint, generate, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generation_config.json").write_text('{"temperature": 0}')
    _, text, said = generate(checkpoint(**SHORT), "--generation-config", str(tmp_path / "other"))
    assert "temperature=0 " in said and "top_p" not in said
    _, greedy, _ = generate(checkpoint("plain"), "--temperature", "0")
    assert text == greedy
    status, _, said = generate(checkpoint("third"), "--generation-config", str(tmp_path / "no"))
    assert status == 1 and "--generation-config: expected auto, none, or a directory" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(("key", "value"), [("top_p", "0.9"), ("top_k", 1.5), ("do_sample", "no")])
def test_a_bad_value_is_one_line_in_every_program(checkpoint, generate, key, value):
    path = checkpoint(**{key: value})
    status, _, said = generate(path)
    assert status == 1 and f"generation_config.json: {key}: expected" in said
    assert len(said.strip().splitlines()) == 1
    with pytest.raises((CheckpointError, ConfigError), match=key):
        load_llm(config(path))


def test_they_are_the_defaults_of_a_server(checkpoint):
    cfg = config(checkpoint(**{**SHORT, "temperature": 0}))
    cfg.speculation.strategy, cfg.engine.max_batch = "off", 1
    with served(cfg, load_llm(cfg)) as server:
        client = server.client()
        asked = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}]}
        extra = {"extra_body": {"ignore_eos": True}}
        first, again = (client.chat.completions.create(**asked, **extra) for _ in range(2))
        assert first.choices[0].message == again.choices[0].message, "greedy, without a seed"
        assert first.usage.completion_tokens == 7
        text = client.completions.create(model="tiny", prompt=PROMPT, **extra)
        assert text.usage.completion_tokens == 7, "fewer than OpenAI's 16"
        more = client.chat.completions.create(**asked, max_tokens=11, **extra)
        assert more.usage.completion_tokens == 11, "what a request says is what it gets"
        hot = [
            client.chat.completions.create(**asked, temperature=1.0, top_p=1.0, seed=s, **extra)
            for s in range(6)
        ]
        assert len({answer.choices[0].message.content for answer in hot}) > 1
        null = client.chat.completions.create(**asked, temperature=None, **extra)
        assert null.choices[0].message == first.choices[0].message


def test_a_server_says_what_it_takes(checkpoint):
    path = checkpoint(**SHORT)
    for setting, expected in (("auto", True), ("none", False)):
        process = subprocess.Popen(
            [sys.executable, "-m", "serve", "--model", str(path), "port=0", "engine.warm_up=none",
             "speculation.strategy=off", f"generation_config={setting}"],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        said = []
        for line in process.stderr:
            said.append(line)
            if "Uvicorn running" in line:
                break
        process.terminate()
        process.communicate(timeout=60)
        lines = [line for line in said if "sampling defaults of generation_config.json" in line]
        assert len(lines) == expected, said
        assert all("generation_config=none leaves them out" in line for line in lines)


# --- what becomes of them -------------------------------------------------------------------------


def test_they_survive_convert_in_both_directions(checkpoint, tmp_path, capsys):
    path = checkpoint(**ALL)
    assert main(["convert", str(path), str(tmp_path / "orbax")]) == 0
    assert main(["convert", str(tmp_path / "orbax"), str(tmp_path / "back")]) == 0
    assert keys_in(tmp_path / "back") == keys_in(path) == ALL
    cfgs = [hf.read_config(path), load_model(tmp_path / "orbax").cfg, hf.read_config(path)]
    assert len({cfg.generation for cfg in cfgs}) == 1
    plain = checkpoint("plain")
    assert main(["convert", str(plain), str(tmp_path / "plain-orbax")]) == 0
    assert main(["convert", str(tmp_path / "plain-orbax"), str(tmp_path / "plain-back")]) == 0
    assert keys_in(tmp_path / "plain-back") == {}
    capsys.readouterr()


def test_training_does_not_take_them_says_so_and_exports_them(checkpoint, tmp_path):
    def cfg(path, **changes):
        return parse_config(RLConfig, tiny_run.arguments(path, tmp_path / "run", **changes))[0]

    path = checkpoint(**SHORT)
    model = hf.read_config(path)
    line = rl.generation_config_line(cfg(path), model)
    assert "rollout.temperature=1.0, rollout.top_p=1.0" in line
    assert "temperature=0.6, top_p=0.95" in line and "\n" not in line
    other = rl.generation_config_line(cfg(path, rollout__temperature=0.8), model)
    assert "rollout.temperature=0.8" in other
    asked = {
        f"rollout__{name}": value for name, value in sampling_defaults(model.generation).items()
    }
    assert rl.generation_config_line(cfg(path, **asked), model) is None
    most = rl.generation_config_line(cfg(path, **asked | {"rollout__top_p": 1.0}), model)
    assert most.startswith("rollouts sample with rollout.top_p=1.0, and not as") and (
        "asks (top_p=0.95)" in most
    )
    for name, keys in (("plain", {}), ("sampled", {"do_sample": True})):
        assert (
            rl.generation_config_line(cfg(path), hf.read_config(checkpoint(name, **keys))) is None
        )


def test_a_run_says_so_once(checkpoint, tmp_path, capsys):
    path = checkpoint(**ALL)
    out = rl.run(parse_config(RLConfig, tiny_run.arguments(path, tmp_path / "run", steps=1))[0])
    said = capsys.readouterr().out
    assert said.count("and not as generation_config.json asks") == 1
    assert out.exists() and keys_in(tmp_path / "run" / "hf") == ALL


def test_the_help_names_the_setting():
    from serve.cli.arguments import build_parser, sampling_params

    parser = build_parser()
    assert "--generation-config DIR" in parser.format_help()
    args = parser.parse_intermixed_args(["--model", "x", "--top-k", "4", "hi"])
    assert sampling_params(args, {"top_k": 9, "min_p": 0.1}) == SamplingParams(top_k=4, min_p=0.1)
    assert isinstance(args, argparse.Namespace)
