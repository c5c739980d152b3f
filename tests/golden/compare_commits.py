"""Compares what a commit computes with what this checkout computes, on one machine.

    python tests/golden/compare_commits.py COMMIT [--parts heads,rl] [--keep DIR]

The commit is checked out into a temporary git worktree. This file then runs in each tree in turn,
on the public interface alone, and records

  heads, others   token ids and log-probabilities of 30 cases: every source of drafts, acceptance
                  mode, kind of tree and circumstance, by XLA and by the kernels for CPUs
  rl              policy, head, optimizers and metrics after three steps of `train.rl`: plain,
                  speculative, partial, and resumed
  configs         what `--print-config` says of every file in configs/
  convert         the bytes that `specjax convert` writes

Ids, rewards, settings and bytes must be equal. Log-probabilities and parameters must be equal, too,
or with `--tolerance` within it. Each difference is a line, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
# Policy, and what drafts for it. `files` are those that `write_files`
# makes; both trees read the same ones.
SOURCES = {
    "mtp": (f"{GOLDEN}/mimo", "checkpoint"),
    "eagle3": (f"{GOLDEN}/eagle3/policy", f"{GOLDEN}/eagle3/plain"),
    "dflash": (f"{GOLDEN}/eagle3/policy", "{files}/dflash"),
    "ngram": (f"{GOLDEN}/qwen2", "ngram"),
    "model": (f"{GOLDEN}/qwen3", f"{GOLDEN}/qwen3_sliding"),
}
# Source, acceptance mode, strategy, circumstance, kernels. Any two values occur together in one.
CASES = """
mtp    coupled   off    plain      xla
mtp    coupled   3_1_4  plain      cpu
mtp    block     3_1_4  preempted  xla
mtp    recursive 2x2x1  replicas   cpu
mtp    greedy    3_2_6  mesh       xla
mtp    invariant 2x2x1  plain      xla
eagle3 coupled   off    plain      cpu
eagle3 coupled   3_2_6  preempted  cpu
eagle3 block     3_1_4  replicas   xla
eagle3 recursive 2x2x1  mesh       xla
eagle3 greedy    2x2x1  plain      cpu
eagle3 invariant 3_1_4  mesh       xla
dflash coupled   3_1_4  replicas   cpu
dflash block     3_1_4  plain      cpu
dflash recursive 2x2x1  preempted  xla
dflash greedy    3_1_4  preempted  cpu
dflash invariant 3_2_6  replicas   xla
ngram  coupled   off    preempted  cpu
ngram  coupled   2x2x1  mesh       xla
ngram  block     3_1_4  plain      xla
ngram  recursive 2x2x1  plain      cpu
ngram  greedy    3_1_4  replicas   xla
ngram  invariant 3_1_4  preempted  cpu
model  coupled   off    mesh       xla
model  coupled   3_1_4  preempted  xla
model  coupled   3_2_6  plain      cpu
model  block     3_1_4  mesh       xla
model  recursive 2x2x1  replicas   cpu
model  greedy    2x2x1  preempted  xla
model  invariant 3_2_6  plain      cpu
"""
# Of 16 positions in the caches of policy and draft.
PAGE_BYTES = {"mtp": 24_576, "eagle3": 17_408, "dflash": 20_480, "ngram": 8_192, "model": 16_384}
RUNS = {
    "plain": ["rollout.strategy=off", "draft.mode=none"],
    "speculative": ["rollout.strategy=2_1_3", "rollout.draft=random"],
    "partial": ["rollout.strategy=off", "draft.mode=none", "rollout.partial=true",
                "rollout.over_sample=2"],
}  # fmt: skip
RUN = [
    "steps=3", "seed=3", "reward=compare_commits:coin", "rewards.workers=0", "data.max_terms=3",
    "rollout.prompts=4", "rollout.n=4", "rollout.max_tokens=20", "rollout.max_prompt_tokens=12",
    "rollout.max_batch=2", "packing.row_length=64", "packing.rows=2", "optim.lr=1e-2",
    "optim.warmup_steps=0", "eval.problems=0", "checkpoint.every=1", "checkpoint.keep_last=3",
]  # fmt: skip
# Metrics that settings and seeds alone decide.
EQUAL = ("rollout/tokens_sha", "rollout/reward", "rollout/tokens")
CLOSE = (
    "rollout/logprob_mean", "train/loss", "train/policy_loss", "train/entropy", "train/grad_norm",
    "train/mtp_loss",
)  # fmt: skip
EXPORTED = ("llama", "qwen2", "qwen3", "qwen3_sliding", "mistral", "mimo")


def coin(text: str, answer: str) -> float:
    """A reward of 0 or 1 that depends on every character of the response."""
    return float(zlib.crc32(f"{text}|{answer}".encode()) % 2)


def write_files(files: Path) -> None:
    """Writes a policy with the tokenizer of assets/sums, and a DFlash head, both random."""
    sys.path.insert(0, str(ROOT / "tests" / "drafts"))
    from dflash_files import DFlash
    from eagle3_files import Body
    from safetensors.numpy import save_file

    body = Body(vocab=64, width=16, layers=8)
    DFlash((1, 4, 7), mask_token=63, block=4).write(files / "dflash", body, "z-lab")
    policy, sums = files / "policy", ROOT / "assets" / "sums"
    policy.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (policy / name).write_bytes((sums / name).read_bytes())
    raw = json.loads((GOLDEN / "llama" / "config.json").read_text())
    width, hidden, heads, size = 16, 32, 4, 8
    raw |= {
        "hidden_size": width, "intermediate_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": size, "num_hidden_layers": 2, "vocab_size": 304,
        "max_position_embeddings": 64, "tie_word_embeddings": False, "eos_token_id": [1, 70, 75],
        "dtype": "float32",
    }  # fmt: skip
    (policy / "config.json").write_text(json.dumps(raw))
    inner = heads * size
    layer = {
        "self_attn.q_proj": (inner, width), "self_attn.k_proj": (inner, width),
        "self_attn.v_proj": (inner, width), "self_attn.o_proj": (width, inner),
        "mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden), "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }  # fmt: skip
    shapes = {"model.embed_tokens": (304, width), "model.norm": (width,), "lm_head": (304, width)}
    for i in range(2):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    save_file(
        {f"{k}.weight": rng.normal(0, 0.4, s).astype(np.float32) for k, s in shapes.items()},
        policy / "model.safetensors",
    )


# --- recording, which runs in the tree that it records --------------------------------------------


def generated(files: Path, sources: set[str]) -> dict[str, object]:
    """Ids and log-probabilities of `CASES` with these sources."""
    from specjax import LLM, EngineConfig, SamplingParams, SpecConfig

    recordings = {}
    for line in CASES.strip().splitlines():
        source, mode, strategy, circumstance, kernels = line.split()
        if source not in sources:
            continue
        policy, draft = SOURCES[source]
        engine = {"products": "xla", "attention": "reference"} if kernels == "xla" else {}
        if circumstance == "preempted":  # room for two of the four samples that run at once
            engine |= {"page_size": 16, "cache_bytes": 9 * PAGE_BYTES[source]}
        spec = SpecConfig(
            strategy,
            acceptance="coupled" if mode == "invariant" else mode,
            draft=draft.format(files=files),
            invariant=mode == "invariant",
        )
        llm = LLM(
            policy,
            spec if strategy != "off" else None,
            max_batch=4,
            max_len=64,
            engine=EngineConfig(**engine),
            dtype="float32",
            scan_layers=True,
            replicas=2 if circumstance == "replicas" else 1,
            tp=2 if circumstance == "mesh" else 1,
        )
        params = SamplingParams(
            n=2, seed=5, max_tokens=32, temperature=0.0 if mode == "greedy" else 0.9,
            top_p=0.95 if kernels == "cpu" else 1.0, ignore_eos=True,
        )  # fmt: skip
        prompts = [[1, 9, 12, 40, 9, 12], [1, 7, 7], [5] * 9]
        samples = [s for r in llm.generate(prompts, params) for s in r.samples]
        recordings[f"generate: {line}"] = {
            "equal": [[int(i) for i in s.token_ids] for s in samples],
            "close": {str(i): [float(p) for p in s.logprobs] for i, s in enumerate(samples)},
        }
    return recordings


def trained(files: Path, out: Path) -> dict[str, object]:
    """What `RUNS` leave behind, and one of them that was resumed after its second step."""
    import orbax.checkpoint as ocp

    def record(run: Path) -> dict[str, object]:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines = [line for line in lines if "train/loss" in line]
        steps = [{name: line[name] for name in EQUAL} for line in lines]
        newest = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name))
        arrays = {k: [line[k] for line in lines if line.get(k) is not None] for k in CLOSE}
        for item in sorted(path for path in newest.rglob("_METADATA")):
            with contextlib.suppress(ValueError, KeyError):
                tree = ocp.PyTreeCheckpointer().restore(item.parent)
                arrays |= {f"{item.parent.name}/{k}": v for k, v in flat(tree)}
        return {"equal": steps, "close": arrays}

    def flat(tree, path="") -> Iterator[tuple[str, list[float]]]:
        if isinstance(tree, dict):
            for key in sorted(tree):
                yield from flat(tree[key], f"{path}/{key}")
        elif isinstance(tree, (list, tuple)):
            for i, value in enumerate(tree):
                yield from flat(value, f"{path}/{i}")
        elif hasattr(tree, "dtype") and np.issubdtype(tree.dtype, np.number):
            yield path, np.asarray(tree, np.float64).ravel().tolist()

    def train(*settings: str) -> None:
        command = [sys.executable, "-m", "train.rl", f"model={files}/policy", *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    recordings = {}
    for name, settings in RUNS.items():
        run = out / name
        train(f"out={run}", *RUN, *settings)
        recordings[f"rl: {name}"] = record(run)
    train(f"out={run}", *RUN, *settings, "--resume", "--resume_step", "2")
    recordings["rl: resumed"] = record(run)
    return recordings


def printed() -> dict[str, object]:
    """The settings that each file of configs/ stands for."""
    from serve.__main__ import main as serve
    from train import draft, rl, sft

    recordings = {}
    for path in sorted(Path("configs").rglob("*.yaml")):
        stem, text, more = path.stem, io.StringIO(), []
        program = {"serve": serve, "draft": draft.main}.get(stem)
        program = program or (sft.main if stem.endswith("_sft") else rl.main)
        if "task: gsm8k" in path.read_text():
            more = ["data.path=train.jsonl"]
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            program(["--config", str(path), *more, "--print-config"])
        # As values: the order of keys is free.
        settings = yaml.safe_load(text.getvalue())
        recordings[f"configs: {path}"] = {"equal": settings, "close": {}}
    return recordings


def converted(out: Path) -> dict[str, object]:
    """Digests of converted checkpoints, and of those converted back."""
    from serve.cli.main import main as specjax

    recordings = {}
    for family in EXPORTED:
        there, back = out / f"{family}-orbax", out / f"{family}-files"
        with contextlib.redirect_stdout(io.StringIO()):
            specjax(["convert", str(GOLDEN / family), str(there)])
            specjax(["convert", str(there), str(back)])
        files = sorted(path for path in back.rglob("*") if path.is_file())
        recordings[f"convert: {family}"] = {
            "equal": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
            "close": {},
        }
    return recordings


PARTS = {
    "heads": lambda files, out: generated(files, {"mtp", "eagle3", "dflash"}),
    "others": lambda files, out: generated(files, {"ngram", "model"}),
    "rl": trained,
    "configs": lambda files, out: printed(),
    "convert": lambda files, out: converted(out),
}


# --- comparison -----------------------------------------------------------------------------------


def differences(base: dict, here: dict, tolerance: float) -> Iterator[str]:
    """Says where two recordings differ, a line each."""
    for name in sorted(base.keys() | here.keys()):
        if name not in base or name not in here:
            yield f"{name}: recorded {'here' if name in here else 'in the base'} only"
            continue
        was, now = base[name], here[name]
        if now["equal"] is None:
            yield f"{name}: its program prints no settings; see above"
        elif was["equal"] != now["equal"]:
            yield f"{name}:\n  base {was['equal']!s:.2000}\n  here {now['equal']!s:.2000}"
        for key in sorted(was["close"].keys() | now["close"].keys()):
            old, new = (np.asarray(r["close"].get(key, [])) for r in (was, now))
            if old.shape != new.shape:
                yield f"{name} {key}: {old.shape} in the base, {new.shape} here"
            elif not np.allclose(old, new, rtol=0, atol=tolerance, equal_nan=True):
                yield f"{name} {key}: they differ by up to {np.abs(old - new).max():.3g}"


def run_in(tree: Path, files: Path, parts: list[str]) -> dict:
    """Records a tree, each part in a process of its own, two at a time."""
    flags = "--xla_force_host_platform_device_count=4 --xla_cpu_parallel_codegen_split_count=1"
    if version("jaxlib").startswith("0.10."):  # newer ones refuse the flag
        flags += " --xla_cpu_use_fusion_emitters=false"
    environment = os.environ | {
        "PYTHONPATH": f"{tree}:{GOLDEN}", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # machine code is made in a third of the time
        "JAX_COMPILATION_CACHE_DIR": str(files / "programs"),  # trees have most in common
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }  # fmt: skip

    def record(part: str) -> dict:
        out = files / f"{part}.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--record", str(out)]
        command += ["--files", str(files), "--parts", part]
        subprocess.run(command, cwd=tree, env=environment, check=True)
        return json.loads(out.read_text())

    with ThreadPoolExecutor(2) as pool:
        return {name: value for part in pool.map(record, parts) for name, value in part.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", nargs="?", help="commit to compare with")
    parser.add_argument("--parts", default=",".join(PARTS), help="which (default: %(default)s)")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="of numbers (default: %(default)s)"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the base's recording stays")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--files", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    parts = args.parts.split(",")
    if unknown := set(parts) - PARTS.keys():
        parser.error(f"expected parts of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    if args.record:
        sys.path[0] = os.getcwd()  # the tree that is recorded, and not the folder of this file
        with tempfile.TemporaryDirectory() as out:
            args.record.write_text(json.dumps(PARTS[args.parts](args.files, Path(out))))
        return 0
    if not args.base:
        parser.error("expected a commit to compare with")
    git = ["git", "-C", str(ROOT)]
    resolved = subprocess.run([*git, "rev-parse", args.base], capture_output=True, text=True)
    if resolved.returncode:
        parser.error(f"expected a commit of {ROOT}, got {args.base!r}")
    commit = resolved.stdout.strip()
    with tempfile.TemporaryDirectory() as scratch:
        files, tree = Path(scratch) / "files", Path(scratch) / "base"
        files.mkdir()
        write_files(files)
        kept = (args.keep or Path(scratch)).resolve() / f"{commit[:12]}-{'-'.join(parts)}.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
        if kept.exists():
            base = json.loads(kept.read_text())
        else:
            subprocess.run([*git, "worktree", "add", "-q", "--detach", tree, commit], check=True)
            try:
                base = run_in(tree, files, parts)
            finally:
                subprocess.run([*git, "worktree", "remove", "--force", tree], check=True)
        kept.write_text(json.dumps(base))
        here = run_in(ROOT, files, parts)
    lines = list(differences(base, here, args.tolerance))
    print("\n".join(lines) or f"{len(here)} recordings agree with {args.base}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
