"""Measures how long a user waits: import, first token, first answer of a server, steps of train.rl.

    python -m bench.first_token --repeats 3

Each program is a process of its own, which is started twice: with an empty cache directory, and
again. Figures are medians over the repeats, in seconds from the start of the process. Nothing else
may run on the machine meanwhile. The second policy has the shape of SmolLM2-135M, random weights,
and the tokenizer of the embedded one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.flax import save_file

from bench.command import bench_parser
from bench.record import figure, report, write_result

EMBEDDED = "assets/sums"
PROMPT = "17+25+8="
GENERATE = """
from specjax import LLM, SamplingParams
print(LLM({model!r}).generate({prompt!r}, SamplingParams(max_tokens=8, seed=0)), flush=True)
"""
POLL = 0.02  # seconds


def main(argv: Sequence[str] | None = None) -> None:
    parser = bench_parser("first_token", __doc__, "first_token")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--only", nargs="*", help="measure the figures that begin with one of these"
    )
    args = parser.parse_args(argv)
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = {"embedded": EMBEDDED, "135M": make_model(Path(folder) / "135M")}
        cases = {"import": (imported, None), "train.rl": (trained, None)}
        for size, model in models.items():
            cases |= {
                f"{name}, {size}": (measure, str(model))
                for name, measure in (("generate", typed), ("LLM", called), ("server", served))
            }
        for repeat in range(args.repeats):
            for name, (measure, model) in cases.items():
                if args.only and not name.startswith(tuple(args.only)):
                    continue
                cache = Path(folder) / "cache"
                shutil.rmtree(cache, ignore_errors=True)
                for start in ("first", "second"):
                    for part, seconds in measure(model, cache).items():
                        key = f"{part or name}, {start} start"
                        times.setdefault(key, []).append(seconds)
                        print(f"{repeat} {key}: {seconds:.2f} s", flush=True)
    figures = {
        name: figure(statistics.median(values), "s", [min(values), max(values)])
        for name, values in times.items()
    }
    print(report(figures))
    write_result("first_token", {"repeats": args.repeats}, figures, args.out)


def make_model(folder: Path) -> Path:
    """Writes a policy of SmolLM2-135M's shape with random weights."""
    hidden, inner, layers, heads, kv, vocabulary = 576, 1536, 30, 9, 3, 49152
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(EMBEDDED) / name, folder)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "vocab_size": vocabulary, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 100000, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "eos_token_id": 0, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    width, rng = hidden // heads * kv, np.random.default_rng(0)
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (width, hidden),
        "self_attn.v_proj": (width, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    tensors = {"model.embed_tokens": (vocabulary, hidden), "model.norm": (hidden,)}
    tensors |= {
        f"model.layers.{i}.{n}": shape for i in range(layers) for n, shape in shapes.items()
    }
    weights = {
        f"{name}.weight": jnp.asarray(
            rng.normal(0, 0.02, shape) if len(shape) == 2 else np.ones(shape), jnp.bfloat16
        )
        for name, shape in tensors.items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


# --- one start of a program: seconds by figure, "" for that of the case ---------------------------


def imported(_: str | None, cache: Path) -> dict[str, float]:
    return {"": _seconds(["-c", "from specjax import LLM, SamplingParams"], cache)}


def called(model: str, cache: Path) -> dict[str, float]:
    """A script, until `LLM.generate` has returned."""
    return _until_output(["-c", GENERATE.format(model=model, prompt=PROMPT)], cache)


def typed(model: str, cache: Path) -> dict[str, float]:
    """`specjax generate`, until it writes the first character of the sample."""
    arguments = ["generate", "--model", model, PROMPT, "--max-tokens", "8"]
    return _until_output(["-m", "serve.cli", *arguments], cache)


def _until_output(command: Sequence[str], cache: Path) -> dict[str, float]:
    began = time.perf_counter()
    with _process(command, cache, subprocess.PIPE) as process:
        process.stdout.read(1)
        return {"": time.perf_counter() - began}


def served(model: str, cache: Path) -> dict[str, float]:
    """The server, until the first answer with status 200."""
    port, began = 18731, time.perf_counter()
    body = json.dumps({"model": "policy", "prompt": PROMPT, "max_tokens": 8}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    command = ["-m", "serve", "--model", model, f"port={port}", "served_name=policy"]
    with _process(command, cache) as process:
        while process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(request).read()
                return {"": time.perf_counter() - began}
            time.sleep(POLL)
    raise RuntimeError("the server ended")


def trained(_: str | None, cache: Path) -> dict[str, float]:
    """`make rl`, until the first step is logged, and the whole."""
    with tempfile.TemporaryDirectory() as out:
        log, began, first = Path(out) / "run" / "metrics.jsonl", time.perf_counter(), None
        command = ["-m", "train.rl", "--config", "configs/sums.yaml", f"out={out}/run"]
        with _process(command, cache) as process:
            while process.poll() is None:
                if first is None and log.exists() and '"step": 1' in log.read_text():
                    first = time.perf_counter() - began
                time.sleep(POLL)
        return {"train.rl, step 1": first, "train.rl, whole": time.perf_counter() - began}


def _seconds(command: Sequence[str], cache: Path) -> float:
    began = time.perf_counter()
    with _process(command, cache) as process:
        if process.wait():
            raise RuntimeError(f"{command} ended with status {process.returncode}")
    return time.perf_counter() - began


@contextlib.contextmanager
def _process(command: Sequence[str], cache: Path, stdout: int = subprocess.DEVNULL):
    """A Python process whose caches are under `cache`; it is killed at the end."""
    names = ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    process = subprocess.Popen(
        [sys.executable, *command],
        env=environment | {"XDG_CACHE_HOME": str(cache)},
        stdout=stdout,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
