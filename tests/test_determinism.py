"""`deterministic=true` sets XLA's flags in time, and a run is resumed with the same algorithms.

Nothing here compiles for a GPU: the flags, the refusals and the records are those of any process.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import tiny_run

from specjax import determinism
from specjax.checkpoint.store import Checkpointer
from specjax.config import ModelConfig
from specjax.interfaces import Device
from specjax.kernels import library
from specjax.models.families.dense import dense_config
from train import rl

ROOT = Path(__file__).resolve().parent.parent
HALF: ModelConfig = dense_config(
    vocab_size=64, hidden_size=128, intermediate_size=128, num_layers=1, num_heads=2,
    num_kv_heads=1, head_dim=64,
).running(compute_dtype="bfloat16")  # fmt: skip
# Prints the flags at the end of a run.
SHOWS_FLAGS = """
import os, sys
from train import rl
sys.argv[0] = "train.rl"
rl.main()
print("flags:", os.environ["XLA_FLAGS"])
"""


@pytest.fixture
def undone(monkeypatch):
    """A process in which nobody has asked yet; what a test sets is taken back."""
    monkeypatch.setattr(determinism, "_cache", None)
    monkeypatch.setattr(determinism, "may_have_gpus", lambda: True)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    settings = determinism._XLA_CACHES, "jax_compilation_cache_dir"
    before = {name: getattr(jax.config, name) for name in settings}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.kept = before["jax_compilation_cache_dir"]
    yield monkeypatch
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def in_time(undone):
    """A process whose backends do not run yet, and will find GPUs."""
    undone.setattr(determinism, "backends_run", lambda: False)
    undone.setattr(determinism, "platform", lambda: "gpu")
    return undone


def run(code: str, *arguments: str, platforms: str = "cpu") -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": platforms}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True, cwd=ROOT
    )


@pytest.mark.slow
@pytest.mark.parametrize("told", [False, True])
def test_a_run_sets_flags_before_backends_start_and_says_that_cpus_need_none(
    told, thin_policy, tmp_path
):
    """It sets none where jax was told to use CPUs; else it finds out too late that it need not."""
    out = tmp_path / "run"
    given = tiny_run.arguments(thin_policy, out, steps=1, deterministic=True)
    done = run(SHOWS_FLAGS, *given, platforms="cpu" if told else "")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("deterministic=true changes nothing on CPU") == 1
    flags = re.search("^flags: (.*)$", done.stdout, re.MULTILINE)[1].split()
    with Checkpointer(out / "checkpoints", 1) as checkpoints:
        _, meta = checkpoints.restore(None, {})
    assert meta["determinism"] is None
    if told:
        assert not any("_gpu_" in flag for flag in flags) and not (out / "autotune").exists()
        return
    [cache] = [flag for flag in flags if flag.startswith(determinism.CACHE)]
    assert f"{determinism.NO_ATOMICS}=true" in flags
    assert Path(cache.partition("=")[2]).parent == out / "autotune"


@pytest.mark.slow
def test_a_run_is_not_resumed_with_other_algorithms(in_time, thin_policy, tmp_path):
    out = tmp_path / "run"
    determinism.set_up(out)  # as the run does; after that, compiled programs may be kept elsewhere
    jax.config.update("jax_compilation_cache_dir", in_time.kept)

    def train(steps, *flags):
        given = dict(steps=steps, deterministic=True, checkpoint__export=False)
        rl.main([*tiny_run.arguments(thin_policy, out, **given), *flags])

    train(1)
    [folder] = (out / "autotune").iterdir()
    (folder / "one").write_text("first")
    train(2, "--resume")
    (folder / "one").unlink()
    with pytest.raises(SystemExit, match="would not go on with the same bits: of the autotune"):
        train(3, "--resume")


def test_cudnn_is_no_training_attention_then(in_time, tmp_path):
    device = Device("gpu", "NVIDIA H100 80GB HBM3", 1)
    refuses = library.CUDNN.refuses
    assert refuses("causal_attention", device, HALF) is None
    determinism.set_up(tmp_path)
    assert "its backward pass may add by atomics" in refuses("causal_attention", device, HALF)
    assert refuses("tree_attention", device, HALF) is None
