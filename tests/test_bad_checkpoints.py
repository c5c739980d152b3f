"""A checkpoint that cannot be used is one line by every program, which names file and key."""

import json
import shutil
from pathlib import Path

import pytest

from serve.cli.main import main
from specjax import LLM
from specjax.checked_json import CheckpointError, UnsupportedModelError
from train import rl, sft

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9733\n"

pytestmark = pytest.mark.usefixtures("logging_as_it_was")  # `specjax serve` sets it up


def key(file: str, **changes):
    """Changes keys of a JSON file."""

    def spoil(path: Path):
        value = json.loads((path / file).read_text()) | changes
        (path / file).write_text(json.dumps(value))

    return spoil


def model_key(**changes):
    """Changes keys of the model in tokenizer.json."""

    def spoil(path: Path):
        value = json.loads((path / "tokenizer.json").read_text())
        value["model"] |= changes
        (path / "tokenizer.json").write_text(json.dumps(value))

    return spoil


def content(file: str, text: str | bytes):
    def spoil(path: Path):
        data = text if isinstance(text, bytes) else text.encode()
        (path / file).write_bytes(data)

    return spoil


def cut(file: str, size: int):
    def spoil(path: Path):
        (path / file).write_bytes((path / file).read_bytes()[:size])

    return spoil


def index(value):
    """Shards, of which an index says this."""

    def spoil(path: Path):
        (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
        (path / "model.safetensors.index.json").write_text(json.dumps(value))

    return spoil


def torch_files(path: Path):
    (path / "model.safetensors").unlink()
    (path / "pytorch_model-00001-of-00002.bin").write_bytes(b"PK")


def without(file: str):
    return lambda path: (path / file).unlink()


# What is wrong -> how it is made, and words of the line.
CASES = {
    "eos beyond": (key("config.json", eos_token_id=[1, 272]), "config.json: eos_token_id"),
    "eos negative": (key("generation_config.json", eos_token_id=-1), "generation_config.json: eos"),
    "text for a number": (key("config.json", intermediate_size="32"), "intermediate_size"),
    "negative": (key("config.json", num_attention_heads=-4), "num_attention_heads"),
    "head_dim": (key("config.json", head_dim=None), "head_dim"),
    "layers": (key("config.json", layer_types=["full_attention"] * 9), "layer_types"),
    "quantised": (key("config.json", quantization_config={"quant_method": "gptq"}), "gptq"),
    "a list": (content("config.json", "[]"), "config.json: expected a JSON object"),
    "a number": (content("generation_config.json", "7"), "generation_config.json: expected"),
    "no text": (content("config.json", b"\xff\xfe{"), "config.json cannot be read"),
    "nested": (content("config.json", "[" * 100_000), "config.json cannot be read"),
    "no config": (without("config.json"), "config.json does not exist"),
    "config pointer": (content("config.json", POINTER), "git lfs pull"),
    "tokenizer pointer": (content("tokenizer.json", POINTER), "git lfs pull"),
    "settings pointer": (content("tokenizer_config.json", POINTER), "git lfs pull"),
    "weights pointer": (content("model.safetensors", POINTER), "git lfs pull"),
    "tokenizer type": (model_key(type="Bloom"), "the tokenizer cannot be read"),
    "tokenizer cut": (cut("tokenizer.json", 900), "the tokenizer cannot be read"),
    "tokenizer list": (content("tokenizer.json", "[]"), "the tokenizer cannot be read"),
    "no vocabulary": (without("tokenizer.json"), "tokenizer files and no vocabulary"),
    "class": (key("tokenizer_config.json", tokenizer_class=7), "tokenizer_class"),
    "eos token": (
        key("tokenizer_config.json", eos_token=["<|eos|>"]),
        "the tokenizer cannot be read",
    ),
    "settings list": (content("tokenizer_config.json", "[]"), "tokenizer_config.json: expected"),
    "weights cut": (cut("model.safetensors", 2000), "model.safetensors is damaged"),
    "weights empty": (content("model.safetensors", ""), "model.safetensors is damaged"),
    "absent shard": (index({"weight_map": {"a": "b.safetensors"}}), "missing: b.safetensors"),
    "index outside": (index({"weight_map": {"a": "../b.safetensors"}}), "index.json: weight_map"),
    "index list": (index([]), "index.json: expected a JSON object"),
    "torch files": (torch_files, "convert pytorch_model-00001-of-00002.bin to safetensors"),
}
PROGRAMS = {
    "generate": lambda path, out: main(["generate", "--model", str(path), "1+2="]),
    "serve": lambda path, out: main(["serve", "--model", str(path), "port=0"]),
    "convert": lambda path, out: main(["convert", str(path), str(out)]),
    "verify": lambda path, out: main(["verify", "--model", str(path)]),
    "train.rl": lambda path, out: rl.main([f"model={path}", f"out={out}"]),
    "train.sft": lambda path, out: sft.main([f"init={path}", f"out={out}"]),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_one_line_that_names_the_file(case, thin_policy, tmp_path, capsys):
    spoil, words = CASES[case]
    path = Path(shutil.copytree(thin_policy, tmp_path / "policy"))
    spoil(path)
    programs = PROGRAMS if case == "eos beyond" else {"convert": PROGRAMS["convert"]}
    for program, run in programs.items():
        try:
            status = run(path, tmp_path / "out")
        except SystemExit as end:  # as the interpreter prints it
            status = end.code
            if isinstance(status, str):
                print(status)
                status = 1
        captured = capsys.readouterr()
        lines = [*captured.err.splitlines(), *captured.out.splitlines()]
        lines = [line for line in lines if not line.startswith("loading")]
        assert status in (1, 2) and len(lines) == 1, (program, status, lines)
        assert words in lines[0] and str(path) in lines[0], (program, lines)
        assert not (tmp_path / "out" / "config.json").exists()
    with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        LLM(path)
    assert words in str(caught.value)
