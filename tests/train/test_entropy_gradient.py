"""The gradient of the entropy, of all logits at once and in blocks, is that of -sum p log p."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import SamplingParams
from train.logits import Head
from train.logprobs import Transforms, processed_state_logprobs, state_logprobs

ROWS, LENGTH, VOCAB, WIDTH = 2, 6, 11, 4
TEMPERATURE = 0.7


def made():
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(0, VOCAB, (ROWS, LENGTH)),
        "segment_ids": np.array([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0]]),
        "positions": np.array([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 0]]),
        "loss_mask": np.array([[0, 1, 1, 0, 1, 1], [0, 1, 1, 1, 0, 0]], np.float32),
    }
    normed, matrix = rng.normal(size=(ROWS, LENGTH, WIDTH)), rng.normal(size=(WIDTH, VOCAB))
    weights = rng.normal(size=(ROWS, LENGTH)) * batch["loss_mask"]
    return batch, normed.astype("f4"), matrix.astype("f4"), weights.astype("f4")


def plain(normed, matrix, weights, kept=VOCAB):
    """The weighed entropies of tokens, of the `kept` most likely ids, in numpy and float64."""
    total = 0.0
    for r in range(ROWS):
        for t in range(1, LENGTH):
            z = np.float64(normed[r, t - 1]) @ np.float64(matrix) / TEMPERATURE
            z = np.sort(z)[-kept:]
            p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
            total -= weights[r, t] * (p * np.log(p)).sum()
    return total


@pytest.mark.parametrize("chunk", [None, 3, "processed", "processed in blocks"])
def test_the_gradient_of_the_entropy_is_that_of_finite_differences(chunk):
    batch, normed, matrix, weights = made()
    processed, size = isinstance(chunk, str), {"processed in blocks": 3}.get(chunk, chunk)
    kept = VOCAB
    if processed:
        kept, size = 5, None if chunk == "processed" else size
        params = SamplingParams(max_tokens=4, temperature=TEMPERATURE, top_k=kept)
        transforms = Transforms.of(params, [], VOCAB)
        # The filters keep sampled tokens as well: take the most likely ones.
        best = np.argmax(normed @ matrix, axis=-1)
        batch["tokens"][:, 1:] = best[:, :-1]
    head = Head.of(None, ("embed", "vocab"), matrix, (ROWS, LENGTH), size)
    assert head.is_whole == (size is None)

    def total(normed, matrix, gradient=True):
        if processed:
            found = processed_state_logprobs(
                head, normed, matrix, batch, transforms, entropy_gradient=gradient
            )
        else:
            found = state_logprobs(
                head, normed, matrix, batch["tokens"], batch["segment_ids"], TEMPERATURE,
                entropy_gradient=gradient,
            )  # fmt: skip
        return jnp.sum(found[1] * weights)

    compute = jax.jit(jax.value_and_grad(total, argnums=(0, 1)), static_argnums=2)
    value, gradients = compute(normed, matrix, True)
    assert float(value) == pytest.approx(plain(normed, matrix, weights, kept), rel=1e-4)
    rng, step = np.random.default_rng(1), 1e-4
    for _ in range(4):
        along = [rng.normal(size=x.shape) for x in (normed, matrix)]
        ends = [
            plain(normed + s * along[0], matrix + s * along[1], weights, kept)
            for s in (step, -step)
        ]
        slope = sum(float((g * d).sum()) for g, d in zip(gradients, along, strict=True))
        assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=2e-3, abs=1e-3)
    if chunk is None or chunk == 3:
        same, none = compute(normed, matrix, False)
        assert float(same) == pytest.approx(float(value), rel=1e-6)
        assert not any(np.asarray(g).any() for g in none)
