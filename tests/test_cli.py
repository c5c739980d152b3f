"""The command `specjax`: what it prints, what it leaves on disk, and how it ends."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import serve.settings
from serve.cli.arguments import GenerateConfig
from serve.cli.main import BROKEN_PIPE, COMMANDS, INTERRUPTED, main
from serve.settings import EngineSection, ServeConfig, SpeculationSection
from specjax import LLM, SamplingParams
from specjax.command_line import parse_config
from specjax.control.config import Speculation
from specjax.engine.compare import Difference
from specjax.settings import part
from specjax.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}="
SMALL = [
    "--max-tokens", "24", "--strategy", "2_1_3", "--ignore-eos", "--max-len", "96", "--seed", "0",
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("logging_as_it_was")  # `specjax serve` sets it up


@pytest.fixture(scope="module")
def loaded():
    """`load_llm`, which loads each model once, with two slots, or one to decode plainly, and gives
    it the chat template."""
    real = serve.settings.load_llm

    @functools.cache
    def once(model, strategy):
        return real(
            ServeConfig(
                model=model,
                engine=EngineSection(
                    max_batch=1 if strategy == "off" else 2, max_len=96, chunk_tokens=8
                ),
                speculation=SpeculationSection(strategy=strategy, telemetry=False),
            )
        )

    def load(cfg, sections):
        llm = once(cfg.model, cfg.speculation.strategy)
        llm.tokenizer.chat_template = cfg.chat_template
        return llm

    return load


@pytest.fixture
def run(loaded, monkeypatch, capsys, thin_policy):
    """Runs `specjax generate` on the tiny policy; (status, output, errors)."""
    monkeypatch.setattr(serve.settings, "load_llm", loaded)

    def call(*arguments, small=SMALL):
        status = main(["generate", "--model", str(thin_policy), *small, *map(str, arguments)])
        return status, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def plain(thin_policy, loaded):
    """Texts and tokens of plain decoding, by the batch API."""
    off = SpeculationSection(strategy="off")
    llm = loaded(ServeConfig(model=str(thin_policy), speculation=off), None)

    @functools.cache
    def generate(prompt, **options):
        params = SamplingParams(**{"seed": 0, "max_tokens": 24, "ignore_eos": True, **options})
        return llm.generate(prompt, params)[0].samples

    return generate


def python(*arguments, **options):
    return subprocess.run(
        [sys.executable, *arguments], env=ENVIRONMENT, cwd=ROOT, text=True,
        capture_output=True, timeout=600, **options,
    )  # fmt: skip


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def tokens_of(rows) -> dict:
    return {(row["index"], row["sample"]): row["token_ids"] for row in rows}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["generate", "--model", "d", "a", "--max-tokenz", "3"], "did you mean 'max_tokens'?"),
        (["convert", "a", "b", "--dtyp=x"], "did you mean 'dtype'?"),
        (["serve", "--model", "d", "--maxbatch=3"], "did you mean 'engine.max_batch'?"),
        (["serve", "--model", "d", "--port"], "--port: expected int after it"),
    ],
)
def test_a_flag_that_there_is_not_is_answered_with_the_nearest(argv, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2 and said in capsys.readouterr().err


# --- which command ------------------------------------------------------------------------------


def test_help_mistakes_and_lists_do_not_wait_for_jax():
    program = """
import sys
from serve.cli.main import main
for argv in (["--help"], ["--version"], ["generate", "--help"], ["convert", "--help"],
             ["generat"], ["generate", "--model", "x"]):
    try:
        print(argv, main(argv))
    except SystemExit as end:
        print(argv, end.code)
print("jax" in sys.modules)
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    statuses = re.findall(r"^\[.*\] (\d)$", done.stdout, re.M)
    assert statuses == ["0", "0", "0", "0", "2", "2"]
    assert done.stdout.splitlines()[-1] == "False"
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    assert "specjax 0." in done.stdout and "jax 0." in done.stdout
    assert "no command 'generat'; did you mean 'generate'?" in done.stderr


def test_a_reader_that_leaves_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "serve.cli", "--help"],
            env=ENVIRONMENT, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True,
            timeout=600,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (BROKEN_PIPE, "")


def test_serve_without_its_extra_says_what_to_install(thin_policy, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit, match=r"specjax serve: error: .*pip install 'specjax\[serve\]'"):
        main(["serve", "--model", str(thin_policy)])


# --- generate -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_sample_is_printed_as_it_grows_and_stops_before_a_stop_string(run, plain, monkeypatch):
    text = plain("17+25+8=")[0].text
    pieces = []
    write = sys.stdout.write
    monkeypatch.setattr(sys.stdout, "write", lambda text: pieces.append(text) or write(text))
    status, said, errors = run("17+25+8=")
    assert (status, said, errors) == (0, text + "\n", "")
    assert len([piece for piece in pieces if piece.strip()]) > 1
    stop = re.search(r"(?<=.{3})[0-9A-Za-z]{2}", text, re.S)[0]
    assert run("17+25+8=", "--stop", stop)[1] == text[: text.index(stop)] + "\n"


LINES = """{"prompt": "17+25+8=", "id": "a", "logprobs": 2}
{"prompt": "1+1=", "seed": 4, "max_tokens": 9}

no JSON
{"messages": [{"role": "user", "content": "2+3"}], "n": 2}
{"prompt": [5, 6, 7]}
{"prompt": [5, 999]}
{"prompt": "1+1=", "temperature": -1}
{"messages": "2+3"}
{"prompt": "1+1=", "messages": []}
{"prompt": "\\ud800"}
{"prompt": "1+1=", "max_tokens": 500}
[1]
"""


@pytest.mark.slow
def test_bad_lines_of_a_file_are_named_and_the_others_are_generated(run, plain, tmp_path):
    """Prompts as text, messages and ids; options of a line's own; what they are is handed on."""
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out" / "samples.jsonl"
    file.write_bytes(LINES.encode() + b'{"prompt": "\xff"}\n')
    status, said, errors = run(
        "--file", file, "--output", output, "--chat-template", TEMPLATE, "--stats"
    )
    assert (status, said) == (1, "")
    for number, words in (
        (4, "Expecting value"), (7, "token id 999"), (8, "temperature must be"),
        (9, "messages must be a list"), (10, "expected either"), (11, "surrogates not allowed"),
        (12, "more than max_len 96"), (13, "expected a JSON object, got list"), (14, "decode"),
    ):  # fmt: skip
        assert re.search(f"prompts.jsonl line {number}: .*{re.escape(words)}", errors), number
    assert not re.search(r"\bprompt \d", errors), "a prompt has one number"
    assert "9 of 13 prompts could not be used" in errors
    rows = rows_of(output)
    assert tokens_of(rows) == {
        (0, 0): plain("17+25+8=")[0].token_ids,
        (1, 0): plain("1+1=", seed=4, max_tokens=9)[0].token_ids,
        (4, 0): plain("2+3=", n=2)[0].token_ids,
        (4, 1): plain("2+3=", n=2)[1].token_ids,
        (5, 0): plain((5, 6, 7))[0].token_ids,
    }
    first = next(row for row in rows if row["index"] == 0)
    assert first["id"] == "a" and first["prompt"] == "17+25+8=" and first["seed"] == 0
    assert {len(top) for top in first["top_logprobs"]} <= {2, 3}
    assert first["text"] == plain("17+25+8=")[0].text and first["finish_reason"] == "length"
    assert 1 <= first["accept_length"] <= 3 and len(first["logprobs"]) == 24
    assert re.search(r"5 samples, 105 tokens in [\d.]+ s \(\d+ tok/s\), after [\d.]+ s", errors)
    assert re.search(r"Acceptance length: [\d.]+ .*2_1_3, coupled, the checkpoint's head.*", errors)
    for line in ("Speculative decoding enabled: True", "Using strategy: 2_1_3", "attention kernel"):
        assert errors.count(f"specjax generate: {line}") == 1
    assert re.search(r"at depth 1: \d+%  2: \d+%", errors)


# A shell's background job, as a test may be one, ignores Ctrl-C.
SLOWLY = """
import signal, sys, time
from serve.cli.main import main
from serve.cli.outputs import JsonLines
signal.signal(signal.SIGINT, signal.default_int_handler)
write = JsonLines.write
JsonLines.write = lambda self, row: (write(self, row), time.sleep(0.1))
sys.exit(main())
"""


def test_an_interrupted_call_has_lost_nothing_and_is_resumed(run, thin_policy, tmp_path):
    """Ctrl-C while samples run, a line cut in two as by kill -9, then `--resume`."""
    file, output, whole = (tmp_path / name for name in ("in.txt", "out.jsonl", "whole.jsonl"))
    file.write_text("".join(f"{i}+{i + 1}=\n" for i in range(10)))
    asked = ["--file", str(file), "-n", "3", "--seed", "9"]
    assert run(*asked, "--output", whole)[0] == 0
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWLY, "generate", "--model", str(thin_policy), *SMALL, *asked,
         "--max-batch", "1", "--output", str(output)],
        env=ENVIRONMENT, cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 600
        while not (output.exists() and output.read_bytes().count(b"\n") >= 2):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=600)[1]
    finally:
        process.kill()
    assert process.returncode == INTERRUPTED, errors
    assert "interrupted" in errors and "--resume" in errors and "Traceback" not in errors
    before = rows_of(output)
    assert 2 <= len(before) < 30
    with output.open("a") as torn:
        torn.write(json.dumps(before[0])[:40])
    assert run(*asked, "--output", output)[0] == 2, "overwritten without being asked"
    other = run(*asked[:-1], "10", "--output", output, "--resume")
    assert other[0] == 2 and "from another prompt, model or other options" in other[2]
    row = before[0]
    weights = row["origin"]["weights"]
    assert row["origin"] == {"weights": weights, "dtype": "float32", "acceptance": "exact"}
    for name, value, options, said in (
        ("weights", "00000000", [], f"weights 00000000, and this call is of weights {weights}"),
        ("dtype", "float32", ["--acceptance", "block"], "exact, .* block, 2_1_3"),
    ):
        torn_off = tmp_path / "other.jsonl"
        torn_off.write_text(json.dumps({**row, "origin": {**row["origin"], name: value}}) + "\n")
        status, _, errors = run(*asked, *options, "--output", torn_off, "--resume")
        assert status == 2 and re.search(said, errors) and "--force" in errors, errors
        assert len(rows_of(torn_off)) == 1
    status, _, errors = run(*asked, "--output", output, "--resume")
    assert status == 0 and f"{len(before)} samples are in" in errors
    rows = rows_of(output)
    assert rows[: len(before)] == before and len(rows) == 30
    assert tokens_of(rows) == tokens_of(rows_of(whole))
    assert run(*asked, "--output", output, "--force")[0] == 0
    assert len(rows_of(output)) == 30


def test_a_seed_that_is_drawn_is_told_and_kept_by_resume(run, tmp_path):
    asked = ["1+1=", "1+1=", "2+3=", "--seed", "none", "--temperature", "1"]
    status, said, errors = run(*asked)
    [seed] = re.findall(r"--seed (\d+) repeats these samples", errors)
    assert status == 0 and run(*asked, "--seed", seed)[1] == said != run(*asked)[1]
    output = tmp_path / "samples.jsonl"
    assert run(*asked, "--output", output)[0] == 0
    rows = rows_of(output)
    assert len({row["seed"] for row in rows}) == 1
    output.write_text(json.dumps(rows[1]) + "\n")
    assert run(*asked, "--output", output, "--resume")[0] == 0
    assert tokens_of(rows_of(output)) == tokens_of(rows)
    unset = dict.fromkeys(("seed", "temperature", "max_tokens", "n"))  # null in a line of JSON
    lines = [json.dumps({"prompt": prompt, **unset}) + "\n" for prompt in asked[:3]]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    asked[:3] = "--file", tmp_path / "prompts.jsonl"
    assert run(*asked, "--output", output, "--resume")[0] == 0
    assert tokens_of(rows_of(output)) == tokens_of(rows), "they are the same requests"


@pytest.mark.parametrize(
    ("key", "said"),
    [("temprature", "did you mean 'temperature'?"), ("max_new_tokens", "did you mean 'max_tokens'"),
     ("chat_template_kwarg", "did you mean 'chat_template_kwargs'"), ("answer", "put it into 'id'"),
     ("prompt_logprobs", "nothing reads the key 'prompt_logprobs'")],
)  # fmt: skip
def test_a_key_that_nothing_reads_ends_the_call_before_a_model_is_loaded(
    key, said, tmp_path, capsys
):
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "1+1="}\n' + json.dumps({"prompt": "2+3=", key: 1}))
    assert main(["generate", "--model", "/no/such/model", "--file", str(file)]) == 2
    errors = capsys.readouterr().err
    assert f"{file} line 2: nothing reads the key {key!r}" in errors and said in errors


def test_a_full_standard_output_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "serve.cli", "--help"],
            env=ENVIRONMENT, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600,
        )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


def test_a_full_disk_under_the_output_is_a_message(run):
    status, _, errors = run("1+1=", "--output", "/dev/full")
    assert status == 1 and "writing /dev/full failed: No space left on device" in errors


def test_exact_mode_says_whether_every_token_is_plain_decodings(run, monkeypatch):
    status, _, errors = run("17+25+8=", "1+1=", "-n", "2", "--exact-mode")
    assert status == 0
    assert "all 96 tokens of 4 samples are those of plain decoding" in errors
    difference = Difference(1, 0, 7, 3, 4, 0.0, False)
    monkeypatch.setattr(LLM, "compare_samples", lambda *unused: [difference])
    status, _, errors = run("17+25+8=", "1+1=", "--exact-mode")
    assert status == 1 and "1 of 2 samples differ from plain decoding" in errors
    assert "prompt 2: request 1 sample 0 position 7" in errors and "NOT explained" in errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected prompts as arguments, or --file"),
        (["a", "--file", "b"], "got both"),
        (["--file", "/no/such/file"], "--file /no/such/file: No such file"),
        (["a", "--top-p", "2"], "top_p must be"),
        (["a", "--logit-bias", "5"], "logit_bias: expected dict[int, float], got 5"),
        (["a", "--resume"], "are for --output FILE"),
    ],
)
def test_mistakes_in_the_arguments_end_with_status_2_and_a_message(arguments, said, capsys):
    try:
        status = main(["generate", "--model", "/no/such/model", *arguments])
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    assert status == 2
    assert said in captured.err and not captured.out
    assert captured.err.endswith("Try specjax generate --help\n")


def test_every_sampling_option_is_a_setting():
    flags = [
        "--temperature", "0.5", "--max-tokens", "none", "--seed", "none", "-n", "3",
        "--top-p", "0.9", "--top-k", "5", "--min-p", "0.1", "--repetition-penalty", "1.1",
        "--presence-penalty", "-0.5", "--frequency-penalty", "0.25", "--min-tokens", "2",
        "--stop", "x", "--stop", "y", "--include-stop", "--stop-token-ids", "5,17",
        "--ignore-eos", "--bad-words", "z", "--allowed-token-ids", "1,2,5", "logprobs=2",
        "--logit-bias", "{5: -100, 17: 2.5}",
    ]  # fmt: skip
    cfg, _ = parse_config(GenerateConfig, ["--model", "m", "a", *flags, "b"])
    assert cfg.prompts == ["a", "b"]
    assert cfg.sampling() == SamplingParams(
        temperature=0.5, max_tokens=None, seed=None, n=3, top_p=0.9, top_k=5, min_p=0.1,
        repetition_penalty=1.1, presence_penalty=-0.5, frequency_penalty=0.25, min_tokens=2,
        stop=("x", "y"), include_stop_str_in_output=True, stop_token_ids=(5, 17), ignore_eos=True,
        bad_words=("z",), allowed_token_ids=(1, 2, 5), logit_bias=((5, -100.0), (17, 2.5)),
        logprobs=2,
    )  # fmt: skip
    cfg, _ = parse_config(GenerateConfig, ["--model", "m", "a"])
    assert cfg.sampling() == SamplingParams()
    assert part(Speculation, cfg) == Speculation()


# --- text and numbers of a request ----------------------------------------------------------------


def test_chat_without_a_template_or_with_options_that_are_not_its_own_says_what_to_do(run):
    status, said, errors = run("--chat", "17+25+8")
    assert (status, said) == (1, "") and "give one with --chat-template FILE" in errors
    options = ("--chat-template", TEMPLATE, "--chat-template-kwargs", '{"tokenize": true}')
    status, said, errors = run("--chat", "17+25+8", *options)
    assert said == "" and "tokenize" in errors


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1, "1.5"])
def test_a_seed_that_has_no_64_bits_is_refused(seed, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "--model", "/no/such/model", "a", f"--seed={seed}"])
    said = capsys.readouterr().err
    expected = "expected int" if isinstance(seed, str) else f"{-(1 << 63)} to {(1 << 64) - 1}"
    assert "seed" in said and expected in said


def test_a_stop_string_may_be_a_special_token(run, thin_policy):
    made = load_tokenizer(thin_policy)
    some = made.encode("17+", add_special_tokens=False) + [made.eos_token_id]
    options = ["17+25+8=", "--allowed-token-ids", ",".join(map(str, some)), "--output", "-"]
    [whole] = map(json.loads, run(*options)[1].splitlines())
    count = whole["token_ids"].index(made.eos_token_id)
    before = made.decode(whole["token_ids"][:count])
    [row] = map(json.loads, run(*options, "--stop", "<|eos|>")[1].splitlines())
    assert row["token_ids"] == whole["token_ids"][: count + 1]
    assert row["text"] == before and row["finish_reason"] == "stop"
    assert run(*options[:-2], "--stop", "<|eos|>")[1] == row["text"] + "\n"
    status, _, errors = run(*options, "--stop", f"{before[-1]}<|eos|>")
    assert status != 0 and "skip_special_tokens" in errors


def test_a_policy_that_gives_no_numbers_is_no_success(run, thin_policy, loaded, tmp_path):
    own = SpeculationSection(strategy="2_1_3")
    llm = loaded(ServeConfig(model=str(thin_policy), speculation=own), None)
    sound = llm.params
    llm.update_weights({**sound, "norm": sound["norm"] * float("nan")})
    try:
        for arguments in (["17+25+8="], ["17+25+8=", "1+1=", "-n", "2"], ["1=", "--stop", "x"]):
            status, said, errors = run(*arguments)
            assert status == 1 and not said.strip()
            assert "prompt 1, sample 0: the model's logits for the first token hold NaN" in errors
            assert "samples ended by an error" in errors
        output = tmp_path / "samples.jsonl"
        assert run("1+1=", "--output", output)[0] == 1 and not output.read_text()
    finally:
        llm.update_weights(sound)
    assert run("1+1=", "--output", output, "--resume")[0] == 0, "nothing was taken for done"
    assert len(output.read_text().splitlines()) == 1
