"""`python -m bench.serve [key=value ...]`: the server under a published load generator.

Starts `python -m serve` with the given settings on loopback, has `guidellm` (0.8 or newer, on the
PATH) send it --requests completions of random words from --clients clients at once, and writes what
that measured to a result file: times to the first and between tokens, tokens and requests per
second. `speculation.strategy=off` is for comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.command import bench_parser, user_errors
from bench.record import figure, report, write_result

METRICS = (
    "time_to_first_token_ms",
    "inter_token_latency_ms",
    "request_latency",
    "output_tokens_per_second",
    "requests_per_second",
)


@contextlib.contextmanager
def server(settings: Sequence[str]) -> Iterator[str]:
    """Runs a server; yields its address.

    Raises:
      ValueError: it ended before it listened.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "serve", "port=0", *settings],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"running on (http://[\w.]+:\d+)", line):
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield found[1]
                return
        raise ValueError(f"the server ended before it listened: {''.join(lines[-5:])}")
    finally:
        process.terminate()
        process.wait()


def load(url: str, args: argparse.Namespace) -> dict[str, dict]:
    """Has guidellm send the requests, and returns what it measured.

    Raises:
      ValueError: it is not on the PATH, or it failed.
    """
    if (path := shutil.which("guidellm")) is None:
        raise ValueError(
            "expected guidellm, which sends the requests, on the PATH; pip install 'guidellm>=0.8' "
            "into an environment of its own"
        )
    lengths = f"prompt_tokens={args.prompt},output_tokens={args.output}"
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "report.json"
        options = {
            "--backend": f"kind=openai_http,target={url},request_format=/v1/completions",
            "--profile": f"kind=concurrent,streams={args.clients}",
            "--constraint": f"kind=max_requests,count={args.requests}",
            "--tokenizer": f"kind=hf_auto,model={args.model}",
            "--data": f"kind=synthetic_text,{lengths}",
            "--seed": f"kind=static,value={args.seed}",
            "--output": f"kind=json,path={out}",
        }
        words = [word for option in options.items() for word in option]
        env = os.environ | {"HF_HUB_OFFLINE": str(int(Path(args.model).is_dir()))}
        command = [path, "run", "--disable-console", *words]
        if code := subprocess.run(command, env=env).returncode:
            raise ValueError(f"guidellm ended with exit status {code}; see above")
        [found] = json.loads(out.read_text(encoding="utf-8"))["benchmarks"]
    metrics, result = found["metrics"], {}
    for name in METRICS:
        of = metrics[name]["successful"]
        values = {"mean": of["mean"], "median": of["median"], "p99": of["percentiles"]["p99"]}
        result |= {f"{name}/{at}": figure(value, "by guidellm") for at, value in values.items()}
    for name, count in metrics["request_totals"].items():
        result[f"requests/{name}"] = figure(count, "requests")
    return result


def main(argv: Sequence[str] | None = None) -> None:
    parser = bench_parser("serve", __doc__, "serve_<model>")
    add = parser.add_argument
    add("--model", default="assets/sums", help="what is served; also the generator's tokenizer")
    add("--clients", type=int, default=16, help="requests at once")
    add("--requests", type=int, default=256)
    add("--prompt", type=int, default=32, help="tokens of a prompt")
    add("--output", type=int, default=96, help="tokens of an answer")
    args, settings = parser.parse_known_args(argv)
    settings = [f"model={args.model}", *settings]
    with user_errors("serve"):
        with server(settings) as url:
            figures = load(url, args)
        print(report(figures))
        said = vars(args) | {"settings": settings}
        print(write_result(f"serve_{Path(args.model).name}", said, figures, args.out))


if __name__ == "__main__":
    main()
