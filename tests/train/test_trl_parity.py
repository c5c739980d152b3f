"""Losses and gradients of every parameter are those of TRL's GRPOTrainer, with clipping active.

tests/golden/make_trl.py made the files with torch and TRL; this test needs neither. The settings of
TRL and of the presets here are in `CASES`.
"""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.checkpoint.weights import load_model
from train.loss.algo import algo
from train.loss.packing import Sample, pack
from train.loss.policy import PolicyTrainer
from train.loss.terms import count_denominators, finalize_metrics, policy_loss

GOLDEN = Path(__file__).parents[1] / "golden" / "trl"
TRL = json.loads((GOLDEN / "trl.json").read_text())
LENGTH, ROWS = 32, 2
# TRL's epsilon_high of CISPO is the bound itself.
CASES = {
    "grpo": {"preset": "grpo"},
    "dr_grpo": {"preset": "dr_grpo", "loss_scale_factor": TRL["max_completion_length"]},
    "dapo": {"preset": "dapo"},
    "gspo": {"preset": "gspo"},
    "cispo": {"preset": "cispo", "clip_ratio_high": 0.3},
    "dual_clip": {"preset": "dapo", "clip_ratio_c": 1.5},
    "kl": {"preset": "dapo", "kl_loss_coef": TRL["beta"]},
    "entropy": {"preset": "dapo", "entropy_coeff": 0.05},
}
CASES |= {
    f"{name}_truncated": CASES[name] | {"mask_truncated": True}
    for name in ("grpo", "dr_grpo", "dapo")
}


@functools.cache
def inputs():
    with np.load(GOLDEN / "inputs.npz") as found:
        return dict(found)


@functools.cache
def batch():
    """The samples in packed rows, and the log-probabilities of the reference there."""
    given, samples = inputs(), []
    for i, mask in enumerate(given["completion_mask"]):
        kept = mask > 0
        old = given["old_per_token_logps"][i][kept]
        response = given["completion_ids"][i][kept].tolist()
        prompt, advantage = given["prompt_ids"][i].tolist(), float(given["advantages"][i])
        samples.append(Sample(i, prompt, response, old, old, advantage))
    [packed] = pack(samples, LENGTH, ROWS)
    reference = np.zeros_like(packed["old_logprobs"])
    for i, sample in enumerate(samples):
        own = (packed["sample_ids"] == i) & (packed["loss_mask"] > 0)
        reference[own] = given["ref_per_token_logps"][i][: len(sample.response_ids)]
    return packed, reference


@functools.cache
def scored():
    """Log-probabilities and entropies of the model, and the gradient of a sum over them."""
    found = load_model(GOLDEN, "float32")
    trainer = PolicyTrainer(
        found.cfg, None, optax.sgd(1.0), temperature=TRL["temperature"], entropy_gradient=True
    )
    packed = {name: jnp.asarray(value) for name, value in batch()[0].items()}

    def scores(params):
        return trainer._token_logprobs(params, packed)[:2]

    pull = jax.jit(lambda params, given: jax.vjp(scores, params)[1](given)[0])
    return found.policy, jax.jit(scores)(found.policy), pull


@functools.cache
def gradients(name):
    """TRL's gradients in the layout of the parameters: a checkpoint of the same shapes."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(GOLDEN / "config.json", folder)
        shutil.copy(GOLDEN / f"{name}.safetensors", Path(folder) / "model.safetensors")
        return jax.tree.map(np.array, load_model(folder, "float32").policy)


def largest(tree):
    return max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_trl(name):
    cfg = algo(**CASES[name])
    packed, reference = batch()
    params, (logprobs, entropy), pull = scored()
    samples = len(inputs()["advantages"])
    if cfg.mask_truncated:
        truncated = inputs()["completion_mask"].sum(1) == TRL["max_completion_length"]
        out = np.isin(packed["sample_ids"], np.flatnonzero(truncated))
        packed = {**packed, "loss_mask": np.where(out, np.float32(0), packed["loss_mask"])}
    counts = count_denominators([packed], samples)
    ref = reference if cfg.kl_loss_coef else None

    def loss(logprobs, entropy):
        return policy_loss(logprobs, packed, cfg, counts, ref, entropy)

    value = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (total, sums), cotangents = value(logprobs, entropy)
    assert float(total) == pytest.approx(TRL["losses"][name], rel=1e-4)
    metrics = finalize_metrics({key: float(x) for key, x in sums.items()})
    assert 0 < metrics["clip_fraction"] < 1
    if name == "dual_clip":
        assert 0 < metrics["dual_clip_fraction"] < 1
    found, wanted = pull(params, cotangents), gradients(name)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, mine), theirs in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        size = largest(theirs)
        assert size > 0, path
        np.testing.assert_allclose(mine, theirs, atol=1e-4 * size, rtol=0, err_msg=str(path))


@pytest.mark.parametrize("name", CASES)
def test_the_gradients_of_other_objectives_are_others(name):
    """So the comparison above would fail if a setting were read as another one."""
    mine = gradients(name)
    for other in CASES.keys() - {name}:
        off = jax.tree.map(np.subtract, mine, gradients(other))
        assert largest(off) > 0.01 * largest(mine), other
