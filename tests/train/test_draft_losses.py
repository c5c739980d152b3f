"""Losses of a draft head against a numpy reference in float64, and heads with their own vocabulary.

The reference has a formula of its own for every loss and every gradient.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.interfaces import Draft, DraftNeeds
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params
from specjax.parallel import sharding
from specjax.parallel.context import context_of
from specjax.parallel.sharding import MeshConfig, make_mesh
from train.heads.losses import DRAFT_LOSSES, Objective, Sampling, Target
from train.heads.training import (
    DraftConfig,
    DraftTrainer,
    frozen_policy_parts,
    head_loss,
    trained_part,
)
from train.loss.optim import OptimConfig
from train.loss.packing import Sample, pack

VOCAB, STEPS, ROWS, LENGTH = 11, 3, 2, 5
HOW = {
    "temperature": Sampling(0.7),
    "filters": Sampling(0.8, top_k=6, top_p=0.85, min_p=0.02),
    "not aligned": Sampling(0.8, top_p=0.7, aligned=False),
}
PART = [1, 2, 5, 7, 10]  # of the vocabulary, which is the head's

# --- the reference --------------------------------------------------------------------------------


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def filtered(scores, how):
    """Scores of one token, -inf where top-k, top-p and min-p drop it."""
    if 0 < how.top_k < len(scores):
        scores = np.where(scores < np.sort(scores)[-how.top_k], -np.inf, scores)
    if how.top_p < 1:
        p, order = softmax(scores), np.argsort(-scores)
        kept = order[: 1 + np.searchsorted(np.cumsum(p[order]), how.top_p)]
        scores = np.where(np.isin(np.arange(len(scores)), kept), scores, -np.inf)
    return np.where(softmax(scores) < how.min_p * softmax(scores).max(), -np.inf, scores)


def distributions(q_logits, p_logits, how, ids):
    """(q', q, p) of one token over the head's vocabulary."""
    tempered = q_logits / how.temperature
    p = softmax(filtered(p_logits / how.temperature, how))
    q = softmax(filtered(tempered, how)) if how.aligned else softmax(tempered)
    return softmax(tempered), q, p if ids is None else p[ids]


def acceptance(q, p, how):
    """(alpha, its gradient for the logits) of one token."""
    less = q < p
    return np.minimum(p, q).sum(), q * (less - (q * less).sum()) / how.temperature


def reference(name, q_logits, labels, p_logits, how, ids=None):
    """(losses [K R S], gradients [K R S C] of the sum of all losses)."""
    values, gradients = np.zeros(labels.shape), np.zeros(q_logits.shape)
    for row in np.ndindex(*labels.shape[1:]):
        alphas, slopes = [], []
        for k in range(len(labels)):
            at = (k, *row)
            free, q, p = distributions(q_logits[at], p_logits[at], how, ids)
            alpha, slope = acceptance(q, p, how)
            alphas.append(alpha)
            slopes.append(slope)
            divergence = sum(x * np.log(x / y) for x, y in zip(p, free, strict=True) if x > 0)
            of_kl = (p.sum() * free - p) / how.temperature
            if name == "ce":
                wanted = np.eye(len(free))[labels[at]]
                values[at], gradients[at] = -np.log(free @ wanted), (free - wanted)
                gradients[at] /= how.temperature
            elif name == "kl":
                values[at], gradients[at] = divergence, of_kl
            elif name == "lk_alpha":
                floor = max(alpha, 1e-8)  # where filters leave p and q no common token
                values[at], gradients[at] = -np.log(floor), -slope / floor
            elif name == "lk_lambda":
                mix = np.exp(-3 * alpha)
                values[at] = mix * divergence + (1 - mix) * (1 - alpha)
                gradients[at] = mix * of_kl - (1 - mix) * slope
            elif name == "tv":
                values[at], gradients[at] = 1 - alpha, -slope
            else:
                values[at] = 1 - np.prod(alphas)
        if name == "tv_e2e":
            for j, slope in enumerate(slopes):
                after = range(j, len(labels))
                others = [
                    np.prod([a for i, a in enumerate(alphas[: k + 1]) if i != j]) for k in after
                ]
                gradients[(j, *row)] = -sum(others) * slope
    return values, gradients


def inputs(seed=0, columns=VOCAB):
    rng = np.random.default_rng(seed)
    q = rng.normal(0, 1, (STEPS, ROWS, LENGTH, columns))
    p = rng.normal(0, 1, (STEPS, ROWS, LENGTH, VOCAB))
    return q, p, rng.integers(0, columns, (STEPS, ROWS, LENGTH))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _computed(names, how, top_k, q, p, labels, ids):
    def total(q, name):
        objective = Objective(name, how, top_k if name == "kl" else 0)
        targets = [objective.target(x, ids) for x in p]
        values, aux = [], []
        for group in objective.groups(STEPS):
            logits, columns = [q[k] for k in group], [labels[k] for k in group]
            found = objective.losses(logits, columns, [targets[k] for k in group])
            values, aux = values + found[0], aux + found[1]
        overlap = jnp.stack([a["overlap"] for a in aux])
        return sum(x.sum() for x in values), (jnp.stack(values), overlap)

    found = {name: jax.grad(total, has_aux=True)(q, name) for name in names}
    return {name: (values, slope, overlap) for name, (slope, (values, overlap)) in found.items()}


def computed(q, p, labels, how, ids=None, names=tuple(DRAFT_LOSSES), top_k=0):
    """name -> (losses, gradients of their sum, overlap), of all names in one program."""
    ids = None if ids is None else jnp.asarray(ids)
    return _computed(names, how, top_k, jnp.float32(q), jnp.float32(p), labels, ids)


@pytest.mark.parametrize(
    ("how", "ids"),
    [
        pytest.param("temperature", PART, marks=pytest.mark.slow),
        pytest.param("filters", None, marks=pytest.mark.slow),
        ("filters", PART),
        ("not aligned", None),
    ],
    ids=["temperature, part", "filters, all", "filters, part", "not aligned, all"],
)
def test_losses_and_their_gradients_equal_the_reference(how, ids):
    how = HOW[how]
    q, p, labels = inputs(columns=VOCAB if ids is None else len(ids))
    if how.top_p < 1:
        dropped = [softmax(filtered(x / how.temperature, how)) == 0 for x in p.reshape(-1, VOCAB)]
        assert 0.2 < np.mean(dropped) < 0.9  # p has zeros
    rejected, _ = reference("tv", q, labels, p, how, ids)
    for name, (values, gradient, overlap) in computed(q, p, labels, how, ids).items():
        wanted = reference(name, q, labels, p, how, ids)
        np.testing.assert_allclose(values, wanted[0], rtol=2e-5, atol=2e-6, err_msg=name)
        np.testing.assert_allclose(gradient, wanted[1], rtol=2e-4, atol=2e-6, err_msg=name)
        np.testing.assert_allclose(overlap, 1 - rejected, atol=2e-6, err_msg=name)


def test_kl_over_the_likeliest_tokens_holds_these_alone():
    q, p, labels = inputs(5)
    how, k = Sampling(0.7), 4
    target = Target.of(jnp.float32(p[0]), how, None, k)
    assert target.p.shape == target.columns.shape == (ROWS, LENGTH, k)
    values, gradient, overlap = computed(q, p, labels, how, names=("kl",), top_k=k)["kl"]
    for at in np.ndindex(STEPS, ROWS, LENGTH):
        free, _, full = distributions(q[at], p[at], how, None)
        best = np.argsort(-full)[:k]
        part = np.where(np.isin(np.arange(VOCAB), best), full, 0)
        wanted = (full[best] * np.log(full[best] / free[best])).sum()
        np.testing.assert_allclose(values[at], wanted, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(gradient[at], (part.sum() * free - part) / 0.7, atol=2e-6)
        np.testing.assert_allclose(overlap[at], np.minimum(full, free)[best].sum(), rtol=2e-5)
    whole = [computed(q, p, labels, how, names=("kl",), top_k=top)["kl"] for top in (0, VOCAB)]
    for found, wanted in zip(*whole, strict=True):
        np.testing.assert_array_equal(found, wanted)


# --- heads with a vocabulary, or a language-model head, of their own -----------------------------

WIDTH, IDS = 16, (0, 1, 3, 4, 7, 9, 12, 13)
CFG = dense_config(
    16, WIDTH, 24, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, tie_embeddings=False
)  # fmt: skip
needs_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


@dataclasses.dataclass(frozen=True)
class Mixing(Draft):
    """A head of one matrix, with a vocabulary of its own and an embedding that training leaves."""

    own: bool = True
    needs = DraftNeeds(taps=("post_norm",))
    fixed = frozenset({"embed"})

    def head(self, params):
        return params["lm_head"] if self.own else None, params["ids"]

    def axes(self):
        return {"mix": ("embed", None), "lm_head": ("embed", "vocab"), "ids": (None,)}

    def init(self, seed):
        rng = np.random.default_rng(seed)
        params = {
            "inner": {"mix": jnp.float32(rng.normal(size=(WIDTH, WIDTH)) / 4)},
            "ids": jnp.asarray(IDS, jnp.int32),
            "embed": jnp.float32(rng.normal(size=(16, WIDTH))),
        }
        if self.own:
            params["lm_head"] = jnp.float32(rng.normal(size=(WIDTH, len(IDS))))
        return params

    def unroll(self, params, policy, states, tokens, positions, segments, context=None):
        found = []
        for now in tokens:
            states = jnp.tanh((states + params["embed"][now]) @ params["inner"]["mix"])
            found.append(states)
        return found


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    samples = [
        Sample(i, rng.integers(0, 16, 2).tolist(), rng.integers(0, 16, n).tolist())
        for i, n in enumerate((7, 6, 9, 8, 5, 8, 7, 9))
    ]
    [found] = pack(samples, 32, 4, 1)
    return found


@functools.cache
def policy_and_states():
    policy = frozen_policy_parts(init_params(CFG, 0))
    policy["lm_head"] = 20 * policy["lm_head"]
    return policy, np.random.default_rng(1).normal(size=(4, 32, WIDTH)).astype("f4")


def loss_and_gradient(source, settings, axes=None, chunk=None, how=1.0, head=None):
    layout = MeshConfig(**(axes or {}))
    mesh = make_mesh(layout)
    context = context_of(layout, mesh)
    policy, states = policy_and_states()
    head = source.init(3) if head is None else head
    given = {"batch": batch(), "states": states}
    if context is not None:
        given = jax.tree.map(context.permute, given)
    if mesh is not None:
        given = jax.device_put(given, sharding.rows_sharding(mesh))

    def value(part, given):
        with sharding.ambient(mesh):
            return head_loss(
                CFG, settings, how, {**head, **part}, policy, given["batch"], given["states"],
                context, source, mesh, chunk,
            )  # fmt: skip

    return jax.jit(jax.value_and_grad(value, has_aux=True))(trained_part(source, head), given)


@pytest.mark.parametrize(
    ("own", "axes", "loss", "chunk"),
    [
        (True, {}, "ce", 7),
        pytest.param(
            False,
            {"fsdp": 2, "cp": 2, "tp": 2},
            "tv_e2e",
            5,
            marks=[needs_devices, pytest.mark.slow],
        ),
    ],
    ids=["own", "borrowed, on a mesh"],
)
def test_heads_with_a_vocabulary_of_their_own_in_blocks_of_tokens(axes, loss, chunk, own):
    settings = DraftConfig(loss=loss, unroll_steps=3, step_decay=0.8)
    source, how = Mixing(own), Sampling(0.9, top_p=0.9)
    whole = loss_and_gradient(source, settings, how=how)
    assert ("lm_head" in whole[1]) == own
    assert all(np.any(np.asarray(g)) for g in jax.tree.leaves(whole[1]))
    blocks = loss_and_gradient(source, settings, axes, chunk, how)
    for a, b in zip(*map(jax.tree.leaves, (whole, blocks)), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5)


def test_labels_that_the_vocabulary_lacks_have_no_cross_entropy_and_are_counted():
    (_, sums), _ = loss_and_gradient(Mixing(), DraftConfig(loss="ce", unroll_steps=2))
    rolled = np.zeros((2, 4, 32), int)
    for k in range(2):
        rolled[k, :, : -2 - k] = batch()["tokens"][:, 2 + k :]
    mask = np.ones((2, 4, 32), bool)
    for k in range(2):
        for shift in range(1, k + 3):
            there = np.zeros((4, 32), bool)
            same = batch()["segment_ids"][:, shift:] == batch()["segment_ids"][:, :-shift]
            there[:, :-shift] = (batch()["loss_mask"][:, shift:] > 0) & same
            mask[k] &= there & (batch()["segment_ids"] > 0)
    inside = np.isin(rolled, IDS)
    np.testing.assert_array_equal(sums["mtp_tokens"], mask.sum((1, 2)))
    np.testing.assert_array_equal(sums["mtp_outside"], (mask & ~inside).sum((1, 2)))
    np.testing.assert_array_equal(sums["mtp_terms"], (mask & inside).sum((1, 2)))
    assert (sums["mtp_outside"] > 10).all()


def test_fixed_parameters_and_integers_are_not_trained():
    source, (policy, states) = Mixing(), policy_and_states()
    optim = OptimConfig(lr=1e-2, warmup_steps=0, weight_decay=0.1)
    trainer = DraftTrainer(
        CFG, DraftConfig(loss="lk_lambda", unroll_steps=2, optim=optim), 1.0, source=source
    )
    before = source.init(3)
    head = jax.tree.map(jnp.array, before)
    state = trainer.init_opt_state(head)
    shapes = {np.shape(leaf) for leaf in jax.tree.leaves(state)}
    assert shapes == {(), (WIDTH, WIDTH), (WIDTH, len(IDS))}
    head, _, sums = trainer.update(head, state, policy, [batch()], [states])
    assert sums["draft_update_norm"] > 0
    for name in ("embed", "ids"):
        np.testing.assert_array_equal(head[name], before[name])
        assert head[name].dtype == before[name].dtype
    assert np.any(head["lm_head"] != before["lm_head"])
    assert np.any(head["inner"]["mix"] != before["inner"]["mix"])
