"""The loss, with GRPO, and its identities; test_objectives has the reference."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.interfaces import Denominators
from train.loss.algo import algo
from train.loss.logprobs import Scoring, score_logits
from train.loss.objectives.grpo import GRPO
from train.loss.packing import Sample, pack
from train.loss.shared import group_advantages
from train.loss.terms import count_denominators, finalize_metrics, policy_loss

ROWS, LENGTH, VOCAB = 2, 16, 11


def packed_batches(seed, samples=6, num_batches=None):
    """Random samples, several to a row, with log-probabilities that make every branch happen."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(samples):
        n = int(rng.integers(1, 6))
        made.append(
            Sample(
                i,
                rng.integers(0, VOCAB, rng.integers(1, 4)).tolist(),
                rng.integers(0, VOCAB, n).tolist(),
                behaviour_logprobs=(-rng.random(n) * 3).tolist(),
                advantage=float(rng.normal()),
            )
        )
    batches = pack(made, LENGTH, ROWS, num_batches)
    for batch in batches:
        noise = rng.normal(0, 0.7, (ROWS, LENGTH)).astype(np.float32)
        batch["old_logprobs"] = (batch["behaviour_logprobs"] + noise) * batch["loss_mask"]
    return batches


def random_logprobs(batch, seed):
    """Near old_logprobs in the loss; elsewhere garbage, which must not matter."""
    rng = np.random.default_rng(seed)
    near = batch["old_logprobs"] + rng.normal(0, 0.4, (ROWS, LENGTH))
    return np.where(batch["loss_mask"] > 0, near, -7.0 * rng.random((ROWS, LENGTH))).astype("f4")


@pytest.mark.parametrize("aggregation", ("token", "sequence"))
def test_gradients_of_micro_batches_add_up_to_the_gradient_of_the_batch(aggregation):
    cfg = algo(loss_aggregation=aggregation, kl_loss_coef=0.1, tis=True)
    parts = packed_batches(3, samples=9, num_batches=4)
    whole = {name: np.concatenate([batch[name] for batch in parts]) for name in parts[0]}
    denominators = count_denominators(parts)
    assert denominators == count_denominators([whole])
    lps = [random_logprobs(batch, i) for i, batch in enumerate(parts)]
    refs = [random_logprobs(batch, i + 20) for i, batch in enumerate(parts)]

    def gradient(lp, batch, ref):
        return jax.grad(lambda x: policy_loss(x, batch, cfg, denominators, ref)[0])(jnp.asarray(lp))

    apart = [gradient(*one) for one in zip(lps, parts, refs, strict=True)]
    together = gradient(np.concatenate(lps), whole, np.concatenate(refs))
    np.testing.assert_allclose(np.concatenate(apart), together, rtol=1e-6, atol=1e-8)
    assert np.all(np.asarray(together)[whole["loss_mask"] == 0] == 0)


def test_tis_weight_carries_no_gradient_and_is_capped():
    batch = packed_batches(6, samples=3, num_batches=1)[0]
    batch["behaviour_logprobs"] = batch["old_logprobs"] - 5.0 * batch["loss_mask"]
    d = count_denominators([batch])
    lp = jnp.asarray(batch["old_logprobs"])
    plain = jax.grad(lambda x: policy_loss(x, batch, algo(), d)[0])(lp)
    cfg = algo(tis=True, tis_cap=2.0)
    weighted, sums = jax.grad(lambda x: policy_loss(x, batch, cfg, d), has_aux=True)(lp)
    np.testing.assert_allclose(weighted, 2.0 * plain, rtol=1e-6)
    assert finalize_metrics(sums)["tis_truncated_fraction"] == 1.0

    def through_old(old):
        return policy_loss(lp, batch | {"old_logprobs": old}, cfg, d)[0]

    assert np.all(np.asarray(jax.grad(through_old)(jnp.asarray(batch["old_logprobs"]))) == 0)


def test_extreme_log_ratios_keep_loss_and_gradient_finite():
    batch = packed_batches(7, samples=3, num_batches=1)[0]
    cfg = algo(tis=True, kl_loss_coef=0.1)
    for shift in (-500.0, 500.0):
        lp = jnp.asarray(batch["old_logprobs"] + shift)
        loss, grad = jax.value_and_grad(
            lambda x: policy_loss(
                x, batch, cfg, count_denominators([batch]), batch["old_logprobs"]
            )[0]
        )(lp)
        assert np.isfinite(loss) and np.isfinite(grad).all()


def test_an_all_padding_micro_batch_contributes_nothing():
    batch = packed_batches(8, samples=1, num_batches=2)[1]
    loss, sums = policy_loss(
        jnp.full((ROWS, LENGTH), jnp.nan), batch, algo(), Denominators(1.0, 1.0)
    )
    assert float(loss) == 0 and all(float(x) == 0 for x in sums.values())


@pytest.mark.parametrize("temperature", (0.0, 0.7, 1.0))
def test_token_logprobs_equal_a_log_softmax_per_segment(temperature):
    batch = packed_batches(9, samples=3, num_batches=1)[0]
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, (ROWS, LENGTH, VOCAB)).astype("f4")
    logits[0, 0, 0] = -np.inf
    batch["tokens"][0, 1] = 1
    logprobs, entropy = jax.jit(functools.partial(score_logits, Scoring(temperature)))(
        logits, batch
    )
    for r, t in itertools.product(range(ROWS), range(LENGTH)):
        segment = batch["segment_ids"][r, t]
        if segment == 0 or t == 0 or batch["segment_ids"][r, t - 1] != segment:
            assert logprobs[r, t] == 0 and entropy[r, t] == 0
            continue
        row = logits[r, t - 1].astype("f8") / (temperature or 1.0)
        p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        assert logprobs[r, t] == pytest.approx(np.log(p[batch["tokens"][r, t]]), abs=2e-5)
        assert entropy[r, t] == pytest.approx(-(p[p > 0] * np.log(p[p > 0])).sum(), abs=2e-5)


def test_token_logprob_gradient_is_onehot_minus_softmax_and_entropy_has_none():
    batch = packed_batches(10, samples=3, num_batches=1)[0]
    tokens, segments = batch["tokens"], batch["segment_ids"]
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(ROWS, LENGTH, VOCAB)), jnp.float32)
    grad = jax.grad(lambda x: score_logits(Scoring(0.5), x, batch)[0].sum())(logits)
    inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    expected = (jax.nn.one_hot(tokens[:, 1:], VOCAB) - jax.nn.softmax(logits[:, :-1] / 0.5)) / 0.5
    np.testing.assert_allclose(grad[:, :-1], expected * inside[..., None], atol=1e-5)
    none = jax.grad(lambda x: score_logits(Scoring(), x, batch)[1].sum())(logits)
    assert np.all(np.asarray(none) == 0)


def test_advantages_are_scaled_by_the_deviation_of_the_group():
    rewards = np.random.default_rng(0).random((5, 4))
    centred = rewards - rewards.mean(1, keepdims=True)
    np.testing.assert_allclose(group_advantages(rewards, False), centred, atol=1e-6)
    scale = rewards.std(axis=1, ddof=1, keepdims=True) + 1e-6  # torch.std, as TRL and verl
    found = GRPO(std_correction=1).advantages(rewards)
    np.testing.assert_allclose(found, centred / scale, rtol=1e-5)
