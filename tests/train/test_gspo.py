"""GSPO against the paper's sequence ratio in plain loops, however samples are packed and split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.loss.algo import algo
from train.loss.packing import Sample, pack
from train.loss.terms import count_denominators, finalize_metrics, policy_loss

ADVANTAGES = (1.5, -0.5, -2.0, 0.0, 0.75, -1.0)
WIDE = {"clip_ratio": 0.1, "clip_ratio_high": 0.15}


def made(seed=0):
    """Samples, and for each the log-probabilities of its response under the new policy."""
    rng = np.random.default_rng(seed)
    samples, new = [], []
    for i, advantage in enumerate(ADVANTAGES):
        old = -rng.random(1 + 2 * i) * 3
        near = old + rng.normal(0, 0.3, old.shape) + (0.2, -0.2)[i % 2]
        samples.append(Sample(i, [1] * (1 + i % 3), [2] * len(old), old - 0.1, old, advantage))
        new.append(near)
    return samples, new


def packed(samples, new, row_length, rows, order=None):
    """(micro-batch, new log-probabilities [R S]) of each; garbage outside of the loss."""
    found = []
    for batch in pack(samples, row_length, rows):
        inside = batch["loss_mask"] > 0
        logprobs = np.full(inside.shape, -50.0, np.float32)
        for i, values in enumerate(new):
            at = inside & (batch["sample_ids"] == i)
            if at.any():
                logprobs[at] = values
        if order is not None:
            batch, logprobs = {k: v[:, order] for k, v in batch.items()}, logprobs[:, order]
        found.append((batch, jnp.asarray(logprobs)))
    return found


def losses(parts, cfg):
    """The loss, the gradient of each sample's tokens in order of position, and the metrics."""
    counts = count_denominators([batch for batch, _ in parts])
    total, gradients, sums = 0.0, {}, {}
    for batch, logprobs in parts:
        batch = {k: jnp.asarray(v) for k, v in batch.items()}
        value = jax.value_and_grad(
            lambda x, batch=batch: policy_loss(x, batch, cfg, counts), has_aux=True
        )
        (loss, part), gradient = value(logprobs)
        total += float(loss)
        sums = {k: sums.get(k, 0.0) + float(v) for k, v in part.items()}
        inside = np.asarray(batch["loss_mask"]) > 0
        assert not np.asarray(gradient)[~inside].any()
        for i in np.unique(np.asarray(batch["sample_ids"])[inside]):
            at = inside & (np.asarray(batch["sample_ids"]) == i)
            by_position = np.argsort(np.asarray(batch["positions"])[at])
            gradients[int(i)] = np.asarray(gradient)[at][by_position]
    return total, gradients, finalize_metrics(sums)


def paper(samples, new, low, high, aggregation):
    """Equation 5 with section 4.1's ratio, differentiated through the ratio itself."""
    tokens = sum(len(values) for values in new)

    def loss(new):
        total = 0.0
        for sample, values in zip(samples, new, strict=True):
            s = jnp.exp(jnp.sum(values - jnp.asarray(sample.old_logprobs)) / len(values))
            bounded = jnp.clip(s, 1 - low, 1 + high)
            value = -jnp.minimum(s * sample.advantage, bounded * sample.advantage)
            share = len(values) / tokens if aggregation == "token" else 1 / len(samples)
            total += share * value
        return total

    return jax.value_and_grad(loss)([jnp.asarray(values, jnp.float32) for values in new])


LAYOUTS = {
    "one row": (64, 1, None),
    "micro-batches": (16, 2, None),
    "split over devices": (64, 1, np.random.default_rng(1).permutation(64)),
}


@pytest.mark.parametrize("aggregation", ["sequence", "token"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradient_are_the_papers_however_samples_are_packed(layout, aggregation):
    samples, new = made()
    row_length, rows, order = LAYOUTS[layout]
    cfg = algo("gspo", loss_aggregation=aggregation, **WIDE)
    total, gradients, metrics = losses(packed(samples, new, row_length, rows, order), cfg)
    expected, wanted = paper(samples, new, 0.1, 0.15, aggregation)
    assert total == pytest.approx(float(expected), rel=1e-5)
    assert len(gradients) == len(samples)
    for i, gradient in enumerate(wanted):
        np.testing.assert_allclose(gradients[i], gradient, rtol=2e-5, atol=1e-7)
    assert 0 < metrics["clip_fraction"] < 1
