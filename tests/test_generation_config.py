"""generation_config.json: whose defaults its sampling keys are, and what becomes of the file."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "serve"))
from serving import config, served  # noqa: E402

from serve.cli.main import main  # noqa: E402
from serve.settings import load_llm  # noqa: E402
from specjax import LLM, SamplingParams  # noqa: E402
from specjax.checked_json import CheckpointError  # noqa: E402
from specjax.checkpoint import huggingface as hf  # noqa: E402
from specjax.checkpoint.weights import load_model  # noqa: E402
from specjax.models.generation_config import (  # noqa: E402
    sampling_defaults,
    sampling_of,
)

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
        assert message.startswith(f"DIR/generation_config.json: {key} must be ")
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


def test_a_directory_lends_its_defaults(checkpoint, generate, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generation_config.json").write_text('{"temperature": 0}')
    _, text, said = generate(checkpoint(**SHORT), "--generation-config", str(tmp_path / "other"))
    assert "temperature=0 " in said and "top_p" not in said
    _, greedy, _ = generate(checkpoint("plain"), "--temperature", "0")
    assert text == greedy
    status, _, said = generate(checkpoint("third"), "--generation-config", str(tmp_path / "no"))
    assert status == 1 and "generation_config: expected auto, none, or a directory" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_they_are_the_defaults_of_a_server(checkpoint):
    cfg = config(
        checkpoint(**{**SHORT, "temperature": 0}),
        speculation={"strategy": "off"},
        engine={"max_batch": 1},
    )
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
