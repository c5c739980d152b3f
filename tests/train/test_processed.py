"""Log-probabilities after all sampling transforms, against a float64 reference of one token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode import transform_reference as reference

from specjax.command_line import parse_config
from specjax.config import SamplingParams
from specjax.parallel import sharding
from specjax.parallel.context import context_of
from specjax.parallel.sharding import MeshConfig, make_mesh
from train.logprobs import Transforms, processed_logprobs, token_logprobs
from train.packing import Sample, pack
from train.schema import RLConfig

ROWS, LENGTH, VOCAB, STOPS = 2, 32, 13, (3, 4)
FILTERS = {"top_k": 6, "top_p": 0.8, "min_p": 0.05}
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2}
CASES = {
    "top_p": {"top_p": 0.7},
    "filters": {"temperature": 0.7, **FILTERS},
    "masks": {"logit_bias": {2: 1.5, 7: -3.0}, "min_tokens": 3, "top_k": 4},
    "penalties": {"temperature": 1.3, **PENALTIES},
    "everything": {**FILTERS, **PENALTIES, "logit_bias": {5: 2.0}, "min_tokens": 2},
    "greedy": {"temperature": 0.0, **PENALTIES},
}


def packed(seed):
    """Several samples to a row, whose tokens repeat, and raw logits."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(7):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 5)).tolist()  # stop tokens among them
        response = rng.integers(5, VOCAB, rng.integers(3, 8)).tolist()
        samples.append(Sample(i, prompt, response))
    batch = pack(samples, LENGTH, ROWS, 1)[0]
    assert (batch["segment_ids"].max(axis=1) >= 3).all()
    return samples, batch, rng.normal(0, 2, (ROWS, LENGTH, VOCAB)).astype(np.float32)


def expected(logits, params, prompt, output, token, kept=None):
    """Log-probability of a token and the entropy there, and what the filters keep beside it."""
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    scores = reference.transform(logits, params | neutral, prompt, output, [], STOPS)
    if kept is None:
        kept = np.isfinite(reference.transform(logits, params, prompt, output, [], STOPS))
        kept[token] = True
    p = np.where(kept, np.exp(scores - scores.max()), 0.0)
    p /= p.sum()
    return np.log(p[token]), -(p[p > 0] * np.log(p[p > 0])).sum(), kept


def places(samples, batch):
    """(row, index, sample, how many tokens of its response come before) of generated tokens."""
    for row, at in zip(*np.nonzero(batch["loss_mask"]), strict=True):
        sample = samples[batch["sample_ids"][row, at]]
        yield row, at, sample, batch["positions"][row, at] - len(sample.prompt_ids)


def transforms_of(case):
    return Transforms.of(SamplingParams(**case, max_tokens=9), STOPS, VOCAB)


@pytest.mark.parametrize("case", CASES)
def test_they_equal_a_reference_and_so_do_their_gradients(case):
    case = CASES[case]
    samples, batch, logits = packed(3)
    transforms, outside = transforms_of(case), 0

    def total(logits, weights):
        logprobs, entropy = processed_logprobs(logits, batch, transforms)
        return jnp.sum(logprobs * weights), (logprobs, entropy)

    weights = np.random.default_rng(4).normal(size=(ROWS, LENGTH)).astype(np.float32)
    gradient, (logprobs, entropy) = jax.jit(jax.grad(total, has_aux=True))(logits, weights)
    wanted = np.zeros(logits.shape)
    for row, at, sample, count in places(samples, batch):
        here, token = logits[row, at - 1].astype(np.float64), sample.response_ids[count]
        history = sample.prompt_ids, sample.response_ids[:count]
        logprob, spread, kept = expected(here, case, *history, token)
        outside += reference.transform(here, case, *history, [], STOPS)[token] == -np.inf
        assert logprobs[row, at] == pytest.approx(logprob, abs=1e-5)
        assert entropy[row, at] == pytest.approx(spread, abs=1e-5)
        for v in range(VOCAB):
            step = 1e-6 * np.eye(VOCAB)[v]
            ends = [expected(here + s, case, *history, token, kept)[0] for s in (step, -step)]
            wanted[row, at - 1, v] = weights[row, at] * (ends[0] - ends[1]) / 2e-6
    np.testing.assert_allclose(gradient, wanted, atol=2e-4)
    elsewhere = batch["loss_mask"] == 0
    assert (np.asarray(logprobs)[elsewhere] == 0).all() and (entropy[elsewhere] == 0).all()
    assert (outside > 0) == bool(set(case) & set(FILTERS)), "tokens that the filters drop are there"


def test_without_transforms_they_are_those_of_the_temperature():
    _, batch, logits = packed(5)
    plain = token_logprobs(logits, batch["tokens"], batch["segment_ids"], 0.7)
    mine = processed_logprobs(logits, batch, transforms_of({"temperature": 0.7}))
    for a, b in zip(mine, plain, strict=True):
        on = batch["loss_mask"] > 0
        np.testing.assert_allclose(np.asarray(a)[on], np.asarray(b)[on], atol=1e-5)


def test_a_token_outside_of_what_filters_keep_has_a_logprob_and_a_gradient_that_raises_it():
    samples, batch, _ = packed(3)
    row, at, sample, count = next(places(samples, batch))
    token = sample.response_ids[count]
    logits = np.tile(np.linspace(0.0, 9.0, VOCAB, dtype=np.float32), (ROWS, LENGTH, 1))
    logits[row, at - 1, token] = -50.0
    transforms = transforms_of({"top_k": 3})

    def logprob(logits):
        return processed_logprobs(logits, batch, transforms)[0][row, at]

    value, gradient = jax.value_and_grad(logprob)(logits)
    best = np.sort(logits[row, at - 1])[-3:]
    assert value == pytest.approx(-50.0 - np.log(np.exp(best).sum()), rel=1e-5)
    gradient = np.asarray(gradient)[row, at - 1]
    assert np.isfinite(gradient).all() and gradient[token] == pytest.approx(1.0)
    assert (gradient != 0).sum() == 4, "of what the filters drop nothing else has a gradient"


@pytest.mark.slow
def test_stop_tokens_of_a_prompt_that_are_masked_spoil_no_gradient():
    """Where a token is no loss its score may be -inf: it must not become NaN."""
    batch = pack([Sample(0, [5, 3, 4, 6], [7, 8])], 8, 1)[0]
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, VOCAB)), jnp.float32)
    for case in ({"min_tokens": 2}, {"min_tokens": 2, "presence_penalty": 0.5, "top_p": 0.9}):
        transforms = transforms_of(case)

        def squares(logits, transforms=transforms):
            return jnp.square(jnp.exp(processed_logprobs(logits, batch, transforms)[0])).sum()

        assert np.isfinite(jax.grad(squares)(logits)).all()


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize(
    ("case", "axes"),
    [
        pytest.param("everything", {"data": 2, "tp": 2}, marks=pytest.mark.slow),
        ("filters", {"data": 2, "tp": 2}),
        ("masks", {"cp": 2, "data": 2}),
        pytest.param("filters", {"cp": 4}, marks=pytest.mark.slow),
    ],
)
def test_split_over_devices_they_are_the_same(case, axes):
    """Rows over data, the vocabulary over tp, and the tokens of rows over cp."""
    _, batch, logits = packed(3)
    logits = np.concatenate([logits, np.full((ROWS, LENGTH, 3), -1e9, np.float32)], -1)
    transforms = Transforms.of(SamplingParams(**CASES[case], max_tokens=9), STOPS, VOCAB + 3)
    config = MeshConfig(**axes)
    mesh = make_mesh(config)
    context, rows = context_of(config, mesh), sharding.rows_sharding(mesh)
    arrays = {**batch, "logits": logits}
    if context is not None:
        arrays = {name: context.permute(x) for name, x in arrays.items()}
    arrays = {name: jax.device_put(x, rows) for name, x in arrays.items()}
    if "tp" in axes:
        spec = jax.P(*rows.spec[:1], None, "tp")
        arrays["logits"] = jax.device_put(arrays["logits"], jax.NamedSharding(mesh, spec))

    def scored(arrays, context=None):
        def total(logits):
            logprobs, entropy = processed_logprobs(logits, arrays, transforms, context)
            return jnp.sum(logprobs * jnp.cos(logprobs)), (logprobs, entropy)

        gradient, found = jax.grad(total, has_aux=True)(arrays["logits"])
        return *found, gradient

    whole = jax.jit(scored)({**batch, "logits": logits})
    split = jax.jit(functools.partial(scored, context=context))(arrays)
    for a, b in zip(whole, split, strict=True):
        b = np.asarray(b) if context is None else context.restore(np.asarray(b))
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_penalties_over_split_rows_are_refused(capsys):
    argv = ["algo.logprobs=processed", "rollout.presence_penalty=1", "mesh.cp=2"]
    with pytest.raises(SystemExit):
        parse_config(RLConfig, argv)
    assert "set mesh.cp=1, or algo.logprobs=temperature" in capsys.readouterr().err


def test_transforms_are_those_that_the_engine_is_asked_for():
    params = SamplingParams(**CASES["everything"], max_tokens=9, stop=("x",), n=4)
    features = Transforms.of(params, STOPS, VOCAB).features
    on = {name for name, value in dataclasses.asdict(features).items() if value}
    assert on == {"sampled", "top_k", "top_p", "min_p", "penalties", "bias", "min_tokens"}
