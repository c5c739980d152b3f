"""`python -m serve` as a process of its own."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import openai
import pytest

ROOT = Path(__file__).resolve().parents[2]


def start(model, *settings):
    """(process, url) once it listens."""
    command = [sys.executable, "-m", "serve", "--model", str(model), "port=0", *settings]
    small = ("engine.max_batch=2", "engine.max_len=96", "engine.prefill_chunk=16")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPECJAX_API_KEY": "k"}
    process = subprocess.Popen(
        [*command, *small, "engine.warm_up=none"],
        env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    said = []
    for line in process.stderr:
        said.append(line)
        if found := re.search(r"running on (http://127\.0\.0\.1:\d+)", line):
            break
    else:
        raise AssertionError("".join(said))
    threading.Thread(target=process.stderr.read, daemon=True).start()  # lest the pipe fills
    return process, found[1]


def test_sigterm_lets_what_runs_finish_and_a_full_disk_stops_nothing(tiny_policy):
    """2,560 tokens are to come when it is told to end; all of them do."""
    process, url = start(tiny_policy, "log_file=/dev/full")
    try:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
        asked = {"model": tiny_policy.name, "prompt": "1+2=", "max_tokens": 80, "n": 8}
        more = {"ignore_eos": True, "return_token_ids": True}
        streams = [
            iter(client.completions.create(**asked, stream=True, seed=i, extra_body=more))
            for i in range(4)
        ]
        begun = [next(streams[0])]
        process.send_signal(signal.SIGTERM)
        streams[0] = [*begun, *streams[0]]
        for stream in streams:
            assert sum(len(event.choices[0].token_ids) for event in stream) == 8 * 80
        assert process.wait(60) == 0
        with pytest.raises(openai.APIConnectionError):
            client.models.list()
    finally:
        process.kill()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "/nowhere"], "none at /nowhere"),
        ([], "required keys"),
        (["--model", "x", "engine.max_bach=3"], "did you mean 'engine.max_batch'"),
        (["--model", "x", "speculation.strategy=off", "speculation.controller=ema"], "leave one"),
    ],
)
def test_mistakes_end_with_one_message(arguments, message, capsys):
    from serve.__main__ import main

    with pytest.raises(SystemExit) as caught:
        main(arguments)
    said = capsys.readouterr().err + str(caught.value.code)
    assert re.search(message, said) and "Traceback" not in said
