"""Every objective and option of the loss against plain numpy in float64, with its gradient.

Log-probabilities are random and far enough from the old ones that every clip is active. Gradients
are central differences of the reference, in which parts without gradient are a copy, `fixed`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_loss import Scored, differences, loss_of

from train.loss.algo import algo
from train.loss.objectives.reinforce_pp import ReinforcePP
from train.loss.packing import Sample, pack
from train.loss.terms import count_denominators, finalize_metrics, policy_loss

PROMPTS, GROUP, LENGTH = 2, 3, 40
REWARDS = np.array([[1.0, 0.0, 0.5], [0.0, 0.0, 2.0]])
SCALE = 7  # of `loss_aggregation=constant`


def scored(cfg, seed=0):
    """Random samples with the advantages of the objective; one token is not the policy's."""
    rng = np.random.default_rng(seed)
    found = []
    advantages = cfg.advantages(REWARDS).ravel()
    for i in range(PROMPTS * GROUP):
        n = 2 + i
        old = -3 * rng.random(n)
        mask = np.ones(n)
        mask[1] = i != 2
        near = [old + rng.normal(0, width, n) for width in (0.6, 0.4, 0.5)]
        advantage = np.full(n, advantages[i], np.float64)
        found.append(Scored(near[0], old, near[1], near[2], rng.random(n), mask, advantage))
    return found


def computed(samples, cfg, masked=0):
    """Loss, gradient in each sample's tokens and metrics of `policy_loss`, in packed rows.

    `masked` further samples of the update are in no row.
    """
    packed = [
        Sample(i, [1, 2], [3] * len(s.new), s.behaviour, s.old, s.advantage, loss_mask=s.mask)
        for i, s in enumerate(samples)
    ]
    batches = pack(packed, LENGTH, 1)
    counts = count_denominators(batches, len(samples) + masked)
    total, gradients, sums = 0.0, {}, {}
    for batch in batches:
        at = {
            i: np.where((batch["sample_ids"] == i) & (batch["positions"] >= 2))
            for i in range(len(samples))
            if (batch["sample_ids"] == i).any()
        }
        rows = {name: np.full((1, LENGTH), np.inf, np.float32) for name in ("new", "ref")}
        rows["entropy"] = np.zeros((1, LENGTH), np.float32)
        for i, where in at.items():
            for name, values in rows.items():
                values[where] = getattr(samples[i], name)

        def loss(new, entropy, batch=batch, rows=rows):
            return policy_loss(new, batch, cfg, counts, jnp.asarray(rows["ref"]), entropy)

        value = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (here, part), (gradient, of_entropy) = value(
            *map(jnp.asarray, (rows["new"], rows["entropy"]))
        )
        total += float(here)
        sums = {k: sums.get(k, 0.0) + float(v) for k, v in part.items()}
        for i, where in at.items():
            gradients[i] = np.asarray(gradient)[where], np.asarray(of_entropy)[where]
        outside = batch["loss_mask"] == 0
        assert not np.asarray(gradient)[outside].any()
    return total, [gradients[i] for i in range(len(samples))], finalize_metrics(sums)


DR_GRPO = {"loss_aggregation": "constant", "loss_scale_factor": SCALE, "normalize_std": False}
CASES = {
    "grpo": ("grpo", {"loss_aggregation": "sequence"}),
    "dr_grpo": ("grpo", DR_GRPO),
    "dapo": ("grpo", {"clip_ratio_high": 0.28}),
    "gspo by token": ("gspo", {"clip_ratio": 0.05, "clip_ratio_high": 0.1}),
    "cispo": ("cispo", {"clip_ratio_high": 0.3}),
    "cispo with a lower bound": ("cispo", {"clip_ratio_high": 0.3, "clip_ratio": 0.2}),
    "rloo": ("rloo", {}),
    "reinforce_pp": ("reinforce_pp", {}),
    "dual clip": ("grpo", {"clip_ratio_c": 1.3}),
    "k1 in the loss": ("grpo", {"kl_loss_coef": 0.3, "kl_loss_type": "k1"}),
    "k2 in the loss": ("grpo", {"kl_loss_coef": 0.3, "kl_loss_type": "k2"}),
    "k3 in the loss": ("grpo", {"kl_loss_coef": 0.3}),
    "entropy": ("grpo", {"entropy_coeff": 0.2}),
    "tis of tokens": ("grpo", {"tis": True, "tis_cap": 1.2}),
    "tis of sequences": ("grpo", {"tis": True, "tis_cap": 1.2, "tis_level": "sequence"}),
    "gspo by token, tis": ("gspo", {"tis": True, "clip_ratio": 0.05, "clip_ratio_high": 0.1}),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_the_numpy_reference(case):
    objective, settings = CASES[case]
    cfg = algo(objective, **settings)
    samples = scored(cfg)
    loss, gradients, metrics = computed(samples, cfg)
    assert loss == pytest.approx(loss_of(samples, cfg, [s.new for s in samples]), rel=2e-5)
    for (gradient, _), wanted in zip(gradients, differences(samples, cfg), strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=2e-4, atol=2e-6)
    assert 0 < metrics["clip_fraction"] < 1
    if settings.get("clip_ratio_c"):
        assert 0 < metrics["dual_clip_fraction"] < 1
    # Without any one of the options it is another loss, or another gradient.
    for name in settings.keys() - {"loss_scale_factor", "tis_cap", "kl_loss_type"}:
        fewer = {k: v for k, v in settings.items() if not k.startswith(NEEDED.get(name, (name,)))}
        without = algo(objective, **fewer)
        if getattr(without, name) == getattr(cfg, name):
            continue
        other, others, _ = computed(scored(without), without)
        moved = not np.allclose(*(np.concatenate([g for g, _ in x]) for x in (gradients, others)))
        assert moved or other != pytest.approx(loss, rel=1e-4), name


NEEDED = {"loss_aggregation": ("loss_",), "kl_loss_coef": ("kl_loss",)}


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_masked_samples_count_where_the_loss_is_divided_by_samples(aggregation):
    scale = {"loss_scale_factor": SCALE} if aggregation == "constant" else {}
    cfg = algo("grpo", loss_aggregation=aggregation, mask_truncated=True, **scale)
    *samples, _ = scored(cfg)
    loss, gradients, _ = computed(samples, cfg, masked=1)
    fixed = [s.new for s in samples]
    assert loss == pytest.approx(loss_of(samples, cfg, fixed, masked=1), rel=2e-5)
    for (gradient, _), wanted in zip(gradients, differences(samples, cfg, masked=1), strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=2e-4, atol=2e-6)
    share = 1 if aggregation == "token" else len(samples) / (len(samples) + 1)
    assert loss == pytest.approx(share * loss_of(samples, cfg, fixed), rel=2e-5)


def test_the_gradient_of_the_entropy_bonus_raises_entropy_by_the_weights_of_tokens():
    cfg = algo("grpo", loss_aggregation="sequence", entropy_coeff=0.2)
    samples = scored(cfg)
    _, gradients, metrics = computed(samples, cfg)
    for s, (_, gradient) in zip(samples, gradients, strict=True):
        np.testing.assert_allclose(gradient, -0.2 * s.mask / s.mask.sum() / 6, rtol=1e-6)
    means = [(s.entropy * s.mask).sum() / s.mask.sum() for s in samples]
    assert metrics["entropy_loss"] == pytest.approx(-0.2 * np.mean(means), rel=1e-6)
    parts = metrics["policy_loss"] + metrics["kl_loss"] + metrics["entropy_loss"]
    assert metrics["loss"] == pytest.approx(parts, rel=1e-6)


def test_advantages_are_those_of_the_formulas():
    group = REWARDS - REWARDS.mean(1, keepdims=True)
    found = {
        "group": algo("grpo").advantages(REWARDS),
        "rloo": algo("rloo").advantages(REWARDS),
    }
    np.testing.assert_allclose(found["group"], group / REWARDS.std(1, keepdims=True), rtol=1e-5)
    others = [[(row.sum() - r) / (GROUP - 1) for r in row] for row in REWARDS]
    np.testing.assert_allclose(found["rloo"], REWARDS - others, rtol=1e-6)
    equal = np.full((2, 3), 0.1)
    for name in ("grpo", "rloo", "reinforce_pp"):
        assert not algo(name).advantages(equal).any()
    with pytest.raises(ValueError, match="raise rollout.n"):
        algo("rloo").advantages(np.ones((2, 1)))
    assert algo("reinforce_pp").advantages(np.array([[0.0], [1.0]])).shape == (2, 1)


def test_reinforce_pp_has_returns_per_token_normalised_over_all_tokens():
    rng = np.random.default_rng(0)
    masks = [np.ones(2 + i) for i in range(6)]
    masks[3][1] = 0
    penalties = [rng.random(len(mask)) * mask for mask in masks]
    found = ReinforcePP().token_advantages(REWARDS, masks, penalties)
    returns = []
    for i, (mask, penalty) in enumerate(zip(masks, penalties, strict=True)):
        reward = REWARDS[i // GROUP, i % GROUP]
        returns.append([reward - sum(penalty[t:]) for t in range(len(mask))])
    inside = np.concatenate(
        [np.array(row)[mask > 0] for row, mask in zip(returns, masks, strict=True)]
    )
    for row, mask, advantages in zip(returns, masks, found, strict=True):
        wanted = (np.array(row) - np.mean(inside)) / (np.std(inside) + 1e-6) * mask
        np.testing.assert_allclose(advantages, wanted, rtol=1e-5, atol=1e-6)


def test_a_constant_that_nobody_set_is_refused():
    cfg = algo("grpo", loss_aggregation="constant")
    with pytest.raises(ValueError, match="divides by loss_scale_factor, which is null"):
        computed(scored(cfg), cfg)
    cfg = cfg.settled(SCALE).settled(9)
    assert cfg.loss_scale_factor == SCALE
    assert np.isfinite(computed(scored(cfg), cfg)[0])
