"""`python -m bench.serve load|throughput`: the server under load, and what HTTP costs.

`load` starts `python -m serve` on loopback with a controller, and 64 clients send it 2,000
requests: completions and chats, streamed and not, of all lengths, with all kinds of options. Some
clients disconnect before the answer is complete, and some send malformed requests. Then every
complete answer is compared with plain decoding of the same request by an `LLM(spec=None)` here:
tokens, text, finish reasons; and what a client received before it left, with the beginning of it.
Every fourth request repeats the one before, streamed if that was not, and the other way round.

    requests_lost, requests_wrong      0, or this program fails
    malformed_accepted                 malformed and not answered by a 4xx in OpenAI's shape: 0
    pages_used/before, /after          cache pages that samples hold: equal
    memory_growth                      resident memory at the end over that after a quarter of the
                                       requests, less 1; at most --memory_bound
    first_token_seconds, inter_token_seconds
                                       seen by the clients of streams, .../p50 and .../p99. Tokens
                                       that come in one piece share the wait for it

After that requests of the same kind, all of which stay, are sent with and without speculation in
turns, to the same server: `tokens_per_second/on` and `/off`, and their ratio. Without, all of them
say `"speculative": false`, and the engine runs its plain programs.

`throughput` measures the speed through HTTP over that of the batch API: the same requests by
`LLM.generate` here and, not streamed, by 32 clients of a server, in turns. The clients run on the
same machine, which costs speed too; the target is `TARGET`. `batch` has the server's settings and
counts why drafts are rejected, as the server does; `batch_without_telemetry`, the batch API's
default, does not.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import functools
import gc
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx
import numpy as np

from bench.command import bench_parser, task_name, user_errors
from bench.record import (
    alternate,
    figure,
    median_interval,
    paired_ratio_interval,
    report,
    write_result,
)
from bench.serve.traffic import Answer, Request, send_all, traffic
from bench.serve.verdict import Verdict, judge
from serve.engine_thread import count_only
from serve.settings import WARM_UP, ServeConfig, load_llm
from specjax import LLM, SamplingParams
from specjax.command_line import load_config
from train import data

LOAD = (
    "speculation.control.controller=goodput",
    "speculation.control.strategies=[off, 4_1_5]",
    "engine.warm_up=all",  # else programs are compiled while clients wait
    "chat_template='{{ messages[-1].content }}'",  # the embedded policy has none
)
THROUGHPUT = ("engine.warm_up=sampled",)  # requests set no more than a temperature
TARGET = 0.95  # of the batch API's tokens per second
ROOT = Path(__file__).resolve().parents[2]
Figures = dict[str, dict]


# --- the server --------------------------------------------------------------------------------


class ServerProcess:
    """Runs `python -m serve` on loopback, on a free port, within a `with`.

    Args:
      model: Hugging Face directory.
      settings: `key=value`, as on the command line.

    Attributes:
      url: URL of the server.

    Raises:
      RuntimeError: the server ended while starting; the message holds its last lines.
    """

    def __init__(self, model: str, settings: Sequence[str] = ()):
        self._command = [sys.executable, "-m", "serve", "--model", model, "port=0", *settings]
        self._lines: collections.deque[str] = collections.deque(maxlen=30)

    def __enter__(self) -> ServerProcess:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(
            self._command, env=environment, stderr=subprocess.PIPE, text=True
        )
        for line in self._process.stderr:
            self._lines.append(line)
            print(line, end="", file=sys.stderr, flush=True)
            if found := re.search(r"running on (http://127\.0\.0\.1:\d+)", line):
                self.url = found[1]
                threading.Thread(target=self._drain, daemon=True).start()
                return self
        self._process.wait()
        raise RuntimeError("the server ended instead of listening:\n" + "".join(self._lines))

    def __exit__(self, *_) -> None:
        self._process.terminate()
        try:
            self._process.wait(90)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    def _drain(self) -> None:
        """Reads the rest of the server's output, so that the pipe does not fill."""
        self._lines.extend(self._process.stderr)

    @property
    def resident_bytes(self) -> int | None:
        """Resident memory; None where the system has no /proc."""
        try:
            text = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        except OSError:
            return None
        return 1024 * int(re.search(r"VmRSS:\s+(\d+) kB", text)[1])

    def info(self) -> dict:
        """Returns GET /server_info."""
        return httpx.get(f"{self.url}/server_info", timeout=60).json()

    def metrics(self) -> dict[str, float]:
        """Returns GET /metrics, by name and labels as written, without the prefix."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name.removeprefix("specjax:"): float(value) for name, value in pairs}

    def idle_metrics(self, seconds: float = 60) -> dict[str, float]:
        """Returns the metrics once no request runs or waits, or after that many seconds."""
        until = time.perf_counter() + seconds
        while True:
            now = self.metrics()
            busy = now["num_requests_running"] + now["num_requests_waiting"]
            if not busy or time.perf_counter() > until:
                return now
            time.sleep(0.1)


def texts(args: argparse.Namespace) -> list[str]:
    """Returns the first `--prompts` held-out problems."""
    cfg = data.DataConfig(task=args.task, path=args.data, seed=args.seed)
    source = data.problems(cfg, "heldout")
    if len(source) < args.prompts:
        raise ValueError(f"expected {args.prompts} held-out problems, got {len(source)}; give more")
    return [source[index].prompt for index in range(args.prompts)]


# --- load ------------------------------------------------------------------------------------


def load(args: argparse.Namespace) -> list[str]:
    """Measures, and writes the result file; returns a line for each failure."""
    with ServerProcess(args.model, [*LOAD, *args.settings]) as server:
        info = server.info()
        requests = traffic(
            args.requests, texts(args), info["strategies"], args.seed, args.longest,
            args.disconnects, args.malformed,
        )  # fmt: skip
        before, memory = server.idle_metrics(), {}

        def on_answer(done: int) -> None:
            if done == len(requests) // 4:
                memory["quarter"] = server.resident_bytes

        begin = time.perf_counter()
        answers = asyncio.run(
            send_all(server.url, info["model"], requests, args.clients, on_answer)
        )
        seconds, after = time.perf_counter() - begin, server.idle_metrics()
        memory["end"] = server.resident_bytes
        figures = _turns(server.url, info["model"], requests, args)
        settings = server.info()["settings"]
    stops = settings["engine"]["max_stop_tokens"]
    plain = LLM(args.model, None, max_len=info["max_model_len"], max_stop_tokens=stops)
    verdict = judge(plain, requests, answers)
    figures = {
        **_counts(requests, verdict, answers),
        **_server(before, after, memory),
        **_latencies("load", answers),
        "seconds": figure(seconds, "s"),
        "tokens_per_second/load": figure(sum(a.written for a in answers) / seconds, "tokens/s"),
        **figures,
    }
    # The model's path is in `vars(args)` already, as it was typed.
    settings = {**vars(args), "server": {n: v for n, v in settings.items() if n != "model"}}
    path = write_result("serve_load", settings, figures, args.out)
    for line in verdict.messages[:20]:
        print(line)
    print(report(figures), path, sep="\n")
    return failures(figures, args.memory_bound)


def _turns(url: str, model: str, requests: Sequence, args: argparse.Namespace) -> Figures:
    """Sends the requests of clients that stay, with and without speculation, in turns."""
    staying = [
        request for request in requests if isinstance(request, Request) and not request.disconnects
    ]
    staying = staying[: args.turn_requests]
    arms = {
        name: [Request(a.prompt, a.options, a.chat, a.stream, speculative) for a in staying]
        for name, speculative in (("on", None), ("off", False))
    }
    answers: dict[str, list[list[Answer]]] = {name: [] for name in arms}

    def run(name: str) -> None:
        answers[name].append(asyncio.run(send_all(url, model, arms[name], args.clients)))

    seconds = alternate({name: lambda name=name: run(name) for name in arms}, args.repeats)
    figures: Figures = {}
    for name, runs in answers.items():
        rates = [
            sum(a.written for a in run) / took
            for run, took in zip(runs, seconds[name], strict=True)
        ]
        median, *interval = median_interval(rates)
        figures[f"tokens_per_second/{name}"] = figure(median, "tokens/s", interval)
        figures |= _latencies(name, [answer for run in runs for answer in run])
    ratio, *interval = paired_ratio_interval(seconds["off"], seconds["on"])
    figures["tokens_per_second_ratio/on/off"] = figure(ratio, "x", interval)
    return figures


def _counts(requests: Sequence, verdict: Verdict, answers: Sequence[Answer]) -> Figures:
    counts = {
        "requests": len(requests),
        "requests_completed": verdict.completed,
        "requests_lost": verdict.lost,
        "requests_wrong": verdict.wrong,
        "requests_explained_by_rounding": verdict.explained,
        "requests_left": verdict.left,
        "malformed": verdict.malformed,
        "malformed_accepted": verdict.accepted,
        "pairs_streamed_and_not": verdict.pairs,
        "pairs_unlike": verdict.unlike,
    }
    tokens = figure(sum(answer.written for answer in answers), "tokens")
    return {name: figure(n, "requests") for name, n in counts.items()} | {"tokens": tokens}


def _server(before: Mapping, after: Mapping, memory: Mapping[str, int | None]) -> Figures:
    """Returns what the server's metrics say."""
    figures = {
        f"pages_used/{when}": figure(int(metrics["kv_cache_pages_used"]), "pages")
        for when, metrics in (("before", before), ("after", after))
    }
    for name, unit in (
        ("request_aborted_total", "samples"),
        ("num_preemptions_total", "samples"),
        ("compilations_total", "programs"),
    ):
        moved = after[name] - before.get(name, 0)
        figures[f"server/{name.removesuffix('_total')}"] = figure(int(moved), unit)
    quarter, end = memory.get("quarter"), memory["end"]
    growth = None if not quarter or end is None else end / quarter - 1
    return figures | {
        "memory_bytes/quarter": figure(quarter, "bytes"),
        "memory_bytes/end": figure(end, "bytes"),
        "memory_growth": figure(growth, "share"),
    }


def _latencies(name: str, answers: Sequence[Answer]) -> Figures:
    first = [answer.first - answer.sent for answer in answers if answer.first is not None]
    gaps = [gap for answer in answers for gap in answer.gaps]
    return {
        f"{what}/{name}/p{percent}": figure(
            float(np.percentile(values, percent)) if values else None, "s"
        )
        for what, values in (("first_token_seconds", first), ("inter_token_seconds", gaps))
        for percent in (50, 99)
    }


def failures(figures: Mapping[str, Mapping], memory_bound: float) -> list[str]:
    """Returns a line for each figure that misses its bound."""
    value = {name: entry["value"] for name, entry in figures.items()}
    nothing = ("requests_lost", "requests_wrong", "malformed_accepted", "pairs_unlike")
    found = [f"{name} is {value[name]}, expected 0" for name in nothing if value[name]]
    if value["pages_used/after"] != value["pages_used/before"]:
        found.append(f"{value['pages_used/after']} cache pages are still held")
    if value["memory_growth"] is not None and value["memory_growth"] > memory_bound:
        found.append(f"memory grew by {value['memory_growth']:.1%}, at most {memory_bound:.1%}")
    return found


# --- throughput ------------------------------------------------------------------------------


def throughput(args: argparse.Namespace) -> list[str]:
    """Measures, and writes the result file; returns a line for each failure."""
    settings = [*THROUGHPUT, *args.settings]
    cfg = load_config(ServeConfig, [f"model={args.model}", *settings], "bench.serve")
    prompts, llms = texts(args), {"batch": _warm_llm(cfg)}
    if cfg.speculation.telemetry:
        count_only(llms["batch"].engine)
        uncounted = dataclasses.replace(cfg.speculation, telemetry=False)
        plain = dataclasses.replace(cfg, speculation=uncounted)
        llms["batch_without_telemetry"] = _warm_llm(plain)
    requests = [
        Request(prompts[i % len(prompts)], {"seed": i, "max_tokens": args.longest})
        for i in range(args.requests)
    ]
    got: dict[str, list[list[int]]] = {}
    with ServerProcess(args.model, settings) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        bodies = [request.body(cfg.name) for request in requests]

        def http() -> None:
            replies = asyncio.run(post_all(host, int(port), bodies, args.clients))
            got["http"] = [reply["choices"][0]["token_ids"] for reply in replies]

        def batch(name: str) -> None:
            outputs = llms[name].generate(
                [a.prompt for a in requests], [a.params for a in requests]
            )
            got[name] = [output.samples[0].token_ids for output in outputs]

        arms: dict[str, Callable[[], None]] = {"http": http}
        arms |= {name: functools.partial(batch, name) for name in llms}
        for run in arms.values():
            run()
        different = sum(x != y for x, y in zip(got["http"], got["batch"], strict=True))
        gc.collect()
        gc.freeze()  # as the server does: neither arm is to wait for the collector
        seconds = alternate(arms, args.repeats)
    tokens = sum(map(len, got["batch"]))
    figures: Figures = {
        "requests": figure(len(requests), "requests"),
        "tokens": figure(tokens, "tokens"),
        "requests_different": figure(different, "requests"),
    }
    for name in arms:
        median, *interval = median_interval([tokens / took for took in seconds[name]])
        figures[f"tokens_per_second/{name}"] = figure(median, "tokens/s", interval)
    for name in llms:
        ratio, *interval = paired_ratio_interval(seconds[name], seconds["http"])
        figures[f"tokens_per_second_ratio/http/{name}"] = figure(ratio, "x", interval)
    share = figures["tokens_per_second_ratio/http/batch"]["value"]
    figures["tokens_per_second_ratio/target"] = figure(TARGET, "x")
    path = write_result("serve_throughput", vars(args), figures, args.out)
    print(report(figures), path, sep="\n")
    print(f"target {TARGET}x {'met' if share >= TARGET else 'missed'}: {share:.3f}x")
    # Two programs of other shapes may round one token in a million differently.
    return [f"{different} requests have other tokens"] if different > 1 else []


def _warm_llm(cfg: ServeConfig) -> LLM:
    llm = load_llm(cfg)
    llm.warm_up(WARM_UP[cfg.engine.warm_up] or [SamplingParams()])
    return llm


async def post_all(host: str, port: int, bodies: Sequence[bytes], clients: int) -> list[dict]:
    """Sends POST /v1/completions, `clients` at a time, each on a connection of its own.

    It speaks HTTP itself, because a client library would cost more than the server's side.

    Raises:
      ValueError: a request was refused.
    """
    answers: list[dict] = [{}] * len(bodies)
    waiting = iter(range(len(bodies)))

    async def client() -> None:
        reader, writer = await asyncio.open_connection(host, port)
        for index in waiting:
            body = bodies[index]
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = int(answer.split("content-length:")[1].split("\r\n")[0])
            text = await reader.readexactly(length)
            if not answer.startswith("http/1.1 200"):
                raise ValueError(f"the server refused {body!r}: {text!r}")
            answers[index] = json.loads(text)
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


# --- command line ----------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("serve", __doc__, "serve_<what>")
    add: Callable = parser.add_argument
    add("what", choices=("load", "throughput"))
    add("--model", default="assets/sums", help="Hugging Face directory of policy and head")
    add("--task", default="sums", type=task_name, help="where the prompts come from: data.task")
    add("--data", metavar="FILE", help="file of rows, for tasks that are not generated")
    add("--prompts", type=int, help="different ones; default: 64 for load, all for throughput")
    add("--requests", type=int, help="default: 2000 for load, 256 for throughput")
    add("--clients", type=int, help="at once; default: 64 for load, 32 for throughput")
    add("--longest", type=int, default=160, help="tokens of a sample at most")
    add("--repeats", type=int, default=7, help="turns of each arm")
    add("--turn_requests", type=int, default=192, help="of a turn with or without speculation")
    add("--disconnects", type=float, default=0.1, help="share of clients that go away")
    add("--malformed", type=float, default=0.05, help="share of malformed requests")
    add("--memory_bound", type=float, default=0.05, help="growth of resident memory at most")
    add("--settings", nargs="*", default=[], metavar="KEY=VALUE", help="of the server")
    args = parser.parse_args(argv)
    load = args.what == "load"
    args.requests = args.requests or (2000 if load else 256)
    args.clients = args.clients or (64 if load else 32)
    # The batch API reads equal prompts once, a server cannot: its requests come one by one. So
    # throughput compares different prompts.
    args.prompts = args.prompts or (64 if load else args.requests)
    for name in ("prompts", "requests", "clients", "longest", "repeats", "turn_requests"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("serve"):
        args = parse(argv)
        failed = (load if args.what == "load" else throughput)(args)
    if failed:
        sys.exit("bench.serve: " + "; ".join(failed))


if __name__ == "__main__":
    main()
