"""`python -m serve` as a process of its own."""

import contextlib
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from serve.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


SMALL = ("engine.max_batch=1", "engine.max_len=96", "engine.prefill_chunk=16",
         "speculation.strategy=off")  # fmt: skip
MORE = {"ignore_eos": True, "return_token_ids": True}


class Process:
    """A server that listens on a port.

    Args:
      stderr: where its log goes; None: to `said`.
    """

    def __init__(self, model, port, *settings, stderr=None):
        command = [sys.executable, "-m", "serve", "--model", str(model), f"port={port}", *SMALL]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        if not any(setting.startswith("api_key_file=") for setting in settings):
            environment["SPECJAX_API_KEY"] = "k"
        scheme = "https" if any(setting.startswith("ssl_") for setting in settings) else "http"
        self.url, self.model, self.said = f"{scheme}://127.0.0.1:{port}", model.name, []
        self.process = subprocess.Popen(
            [*command, "engine.warm_up=none", *settings], env=environment, cwd=ROOT,
            stdout=stderr, stderr=stderr or subprocess.PIPE, text=True,
        )  # fmt: skip
        if stderr is None:
            threading.Thread(target=self._read, daemon=True).start()
        while self.health() is None:
            assert self.process.poll() is None, "".join(self.said)
            time.sleep(0.1)

    def _read(self):
        for line in self.process.stderr:
            self.said.append(line)

    def health(self):
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=60, verify=False).json()

    def metrics(self):
        headers = {"Authorization": "Bearer k"}
        text = httpx.get(f"{self.url}/metrics", headers=headers, timeout=60, verify=False).text
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def prompt_tokens(self):
        """Of all requests that were accepted."""
        return self.metrics()["specjax:prompt_tokens_total"]

    def ask(self, **changes):
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="k", max_retries=0)
        asked = {"model": self.model, "prompt": "1+2=", "max_tokens": 80, "n": 4, **changes}
        return client.completions.create(**asked, extra_body=MORE)


@pytest.fixture(scope="module")
def port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.fixture(scope="module")
def killed(thin_policy, port):
    """(tokens it gave, the error of a client whose stream it cut) of a server that was killed.

    Both its logs are on a disk without room.
    """
    with open("/dev/full", "w") as full:
        server = Process(thin_policy, port, "log_file=/dev/full", stderr=full)
    try:
        tokens = server.ask(seed=5, n=1).choices[0].token_ids
        assert server.metrics()["specjax:log_errors_total"] > 0
        stream = iter(server.ask(stream=True))
        next(stream)
        server.process.kill()
        with pytest.raises((openai.APIError, httpx.TransportError)) as caught:
            list(stream)
    finally:
        server.process.kill()
        server.process.wait()
    return tokens, caught.value


@pytest.fixture(scope="module")
def restarted(killed, thin_policy, port):
    server = Process(thin_policy, port)
    yield server
    server.process.kill()
    server.process.wait()


@pytest.mark.slow
def test_a_full_disk_under_the_logs_stops_nothing(killed):
    assert len(killed[0]) == 80


@pytest.mark.slow
def test_after_kill_9_it_serves_again_on_the_same_port(killed, restarted):
    assert restarted.ask(seed=5, n=1).choices[0].token_ids == killed[0]
    said = "".join(restarted.said)
    assert re.search(r"loading .*policy\n(.*\n)*loaded .* weights", said) and restarted.url in said


def test_a_port_that_is_taken_is_said_before_anything_is_compiled(restarted, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--model", "x", f"port={restarted.url.rsplit(':')[-1]}"])
    said = (
        r"cannot listen on host=127.0.0.1 port=\d+: another program listens there; choose another"
    )
    assert re.search(rf"{said} port=NUMBER, or port=0 for any$", caught.value.code)


def test_sigterm_lets_what_runs_finish(restarted):
    """Nearly all of 1,920 tokens are to come when it is told to end; all do, streamed and not."""
    whole, before = [], restarted.prompt_tokens()
    streams = [iter(restarted.ask(stream=True, seed=i)) for i in range(4)]
    each = (restarted.prompt_tokens() - before) / 4
    asks = [functools.partial(restarted.ask, seed=9 + i) for i in range(2)]
    threads = [threading.Thread(target=lambda ask=ask: whole.append(ask())) for ask in asks]
    for thread in threads:
        thread.start()
    while restarted.prompt_tokens() < before + 6 * each:  # until all have come
        time.sleep(0.02)
    restarted.process.send_signal(signal.SIGTERM)
    for stream in streams:
        assert sum(len(event.choices[0].token_ids) for event in stream) == 4 * 80
    for thread in threads:
        thread.join(60)
    assert [len(c.token_ids) for answer in whole for c in answer.choices] == [80] * 8
    assert restarted.process.wait(60) == 0
    assert restarted.health() is None


@pytest.mark.slow
def test_keys_and_certificate_come_from_files(thin_policy, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl, which makes the certificate")
    pair = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1",
         "-days", "2", "-keyout", pair[0], "-out", pair[1]], check=True, capture_output=True,
    )  # fmt: skip
    (tmp_path / "key").write_text("k\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    files = f"ssl_keyfile={pair[0]}", f"ssl_certfile={pair[1]}", f"api_key_file={tmp_path / 'key'}"
    server = Process(thin_policy, port, *files, "metrics_prefix=vllm")
    try:
        names = server.metrics()
        label = f'{{engine="0",model_name="{thin_policy.name}"}}'
        assert names[f"vllm:num_requests_running{label}"] == 0
        assert names[f"vllm:prefix_cache_queries_total{label}"] == 0
        bare = httpx.get(f"{server.url}/v1/models", verify=False)
        assert bare.status_code == 401
    finally:
        server.process.kill()
        server.process.wait()


def test_an_empty_key_is_no_key(tmp_path):
    (tmp_path / "key").write_text("\n")
    with pytest.raises(SystemExit, match="admin_key_file.*is empty"):
        main(["--model", "nowhere", f"admin_key_file={tmp_path / 'key'}", "port=0"])


@pytest.mark.parametrize("name", ["api_key_file", "ssl_certfile"])
def test_files_that_cannot_be_read_are_told_of_before_the_model_is_loaded(name, tmp_path):
    with pytest.raises(SystemExit, match=f"{name}.*No such file"):
        main(["--model", "nowhere", f"{name}={tmp_path / 'absent'}", "port=0"])
