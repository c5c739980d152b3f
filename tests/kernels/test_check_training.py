"""Training attention that is wrong on the device, or has wrong gradients, is not used there."""

import jax
import jax.numpy as jnp
import pytest

from bench.programs import change_dense
from specjax.config import RunConfig
from specjax.interfaces import Backend
from specjax.kernels import check, reference
from specjax.models.families.dense import dense_config
from train.loss.optim import OptimConfig
from train.loss.policy import PolicyTrainer
from train.loss.terms import sft_loss

CFG = dense_config(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, run=RunConfig(param_dtype="bfloat16", compute_dtype="bfloat16"),
)  # fmt: skip
HERE = __name__


def _right(q, k, v, own, segment_ids, **options):
    return reference.causal_attention(q, k, v, segment_ids, **options)


def _wrong_gradient(q, k, v, own, segment_ids, **options):
    return _right(q, k, v, own, segment_ids, **options) + (k - jax.lax.stop_gradient(k))[:, :1]


def _one_segment(q, k, v, own, segment_ids, **options):
    return _right(q, k, v, own, jnp.ones_like(segment_ids), **options)


def _kernels(attend) -> Backend:
    takes = {"causal_attention": ("window", "soft_cap")}
    return Backend({"causal_attention": attend}, line="a kernel of a test", takes=takes)


RIGHT, WRONG_GRADIENT, ONE_SEGMENT = map(_kernels, (_right, _wrong_gradient, _one_segment))


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """CPUs are checked as GPUs are, and nothing is remembered."""
    monkeypatch.setattr(check, "GPUS", ("cpu",))
    monkeypatch.setattr(check, "cache_dir", lambda: None)
    check._remembered.cache_clear()


def trains_by(kernel: str) -> str:
    trainer = PolicyTrainer(CFG, sft_loss, OptimConfig().build(()), attention=f"{HERE}:{kernel}")
    return trainer.cfg.run.attention


def test_a_kernel_that_is_right_trains(caplog):
    assert trains_by("RIGHT") == f"{HERE}:RIGHT"
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


@pytest.mark.parametrize("kernel", ["WRONG_GRADIENT", "ONE_SEGMENT"])
def test_a_kernel_that_is_wrong_is_replaced_by_its_rest_with_one_line(kernel, caplog):
    assert trains_by(kernel) == "reference"
    [record] = [r for r in caplog.records if r.levelname == "WARNING"]
    wanted = f"training attention: not by {HERE}:{kernel}, but by reference: it is wrong here"
    assert wanted in record.message and "rows=0" in record.message


@pytest.mark.parametrize("dtype, window", [("bfloat16", None), ("float32", 100)])
def test_flash_attention_passes(dtype, window):
    cfg = change_dense(CFG, window=window).running(compute_dtype=dtype)
    assert check.why_wrong_in_training(cfg, "tests.kernels.interpreted:FLASH_GPU") is None
