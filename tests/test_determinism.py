"""`deterministic=true` sets XLA's flag in time. Nothing here compiles for a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run

from specjax import determinism
from specjax.config import ModelConfig
from specjax.interfaces import Device
from specjax.kernels import library
from specjax.models.families.dense import dense_config

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
print("flags:", os.environ.get("XLA_FLAGS"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("platforms", ["cpu", ""])
def test_a_run_sets_the_flag_before_backends_start(platforms, thin_policy, tmp_path):
    """It sets none where jax was told to use CPUs."""
    given = tiny_run.arguments(thin_policy, tmp_path / "run", steps=1, deterministic=True)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": platforms}
    done = subprocess.run(
        [sys.executable, "-c", SHOWS_FLAGS, *given],
        env=env, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    flags = re.search("^flags: (.*)$", done.stdout, re.MULTILINE)[1].split()
    assert (f"{determinism.FLAG}=true" in flags) == (platforms == "")


def test_it_may_be_too_late_and_cudnn_is_no_training_attention_then(monkeypatch):
    device = Device("gpu", "NVIDIA H100 80GB HBM3", 1)
    refuses = library.CUDNN.refuses
    assert refuses("causal_attention", device, HALF) is None
    monkeypatch.setattr(determinism.jax, "devices", lambda: [device])
    monkeypatch.setattr(determinism, "_is_set_up", False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.setattr(determinism, "may_have_gpus", lambda: True)
    with pytest.raises(ValueError, match="comes too late.*XLA_FLAGS=--xla_gpu_det"):
        determinism.set_up()
    monkeypatch.setenv("XLA_FLAGS", f"{determinism.FLAG}=true")
    determinism.set_up()
    assert "its backward pass may add by atomics" in refuses("causal_attention", device, HALF)
    assert refuses("tree_attention", device, HALF) is None
