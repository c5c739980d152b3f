"""What the compiled transforms contain, and that every program rounds alike."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transform_cases import (
    STOPS,
    TRANSFORMS,
    VOCAB,
    Slot,
    rows_of,
    scores_of,
)

from specjax.config import SamplingParams
from specjax.decode import sampling
from specjax.decode.options import Features, neutral
from specjax.decode.sampling import Context, Counts, Rows

# --- the same bits everywhere ---------------------------------------------------------------------


def test_tokens_give_the_same_bits_in_the_context_and_on_the_path():
    """Else plain decoding and verification would differ where two programs round differently."""
    vocab, generator = 4096, np.random.default_rng(0)
    params = [
        SamplingParams(frequency_penalty=f, repetition_penalty=r, presence_penalty=0.1, top_k=99)
        for f, r in [(0.3, 1.1), (1.7, 1.3), (-0.7, 0.9), (0.123, 1.0)]
    ]
    start = generator.integers(0, 6, (4, 9))
    draft = generator.integers(0, 6, (4, 4))
    logits = np.repeat(generator.normal(0, 5, (4, 1, vocab)).astype(np.float32), 5, axis=1)
    chains = [[d[:depth].tolist() for depth in range(5)] for d in draft]
    at_once = scores_of(
        logits,
        [Slot(p, s[:2].tolist(), s[2:].tolist()) for p, s in zip(params, start, strict=True)],
        chains,
    )
    for depth in range(5):
        slots = [
            Slot(p, s[:2].tolist(), [*s[2:].tolist(), *d[:depth].tolist()])
            for p, s, d in zip(params, start, draft, strict=True)
        ]
        alone = scores_of(logits[:, :1], slots)
        np.testing.assert_array_equal(alone[:, 0], at_once[:, depth])


def test_penalties_are_rounded_the_same_fused_and_one_operation_at_a_time():
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 5, (2, 2, 1000)).astype(np.float32)
    params = SamplingParams(temperature=0.7, frequency_penalty=0.3, repetition_penalty=1.1)
    params = [params, dataclasses.replace(params, frequency_penalty=-1.7, presence_penalty=0.2)]
    slots = [Slot(p, [1, 2], generator.integers(0, 1000, 500).tolist() * 3) for p in params]
    rows = rows_of([[[], [5]]] * 2)
    features = Features(penalties=True, bias=True)
    fused = scores_of(logits, slots, features=features, width=1600, rows=rows)
    with jax.disable_jit():
        apart = scores_of(logits, slots, features=features, width=1600, rows=rows)
    np.testing.assert_array_equal(fused, apart)


def test_scores_and_noise_are_rounded_the_same_fused_and_apart():
    """XLA merges `x / t + noise` into one rounding; two programs would then disagree."""
    generator = np.random.default_rng(0)
    temperature = np.array([0.7, 0.3, 1.1], np.float32)
    for rows, vocab in [(1, 1000), (5, 1000), (1, 1)]:
        logits = generator.normal(0, 5, (3, rows, vocab)).astype(np.float32)
        noise = generator.gumbel(0, 1, logits.shape).astype(np.float32)

        @jax.jit
        def fused(logits, temperature, noise):
            return sampling.perturb(sampling.tempered(logits, temperature), temperature, noise)

        apart = np.asarray(jax.jit(sampling.tempered)(logits, temperature)) + noise
        np.testing.assert_array_equal(fused(logits, temperature, noise), apart)


OPTIONS = {
    "top_k": dict(top_k=2),
    "top_p": dict(top_p=0.3),
    "min_p": dict(min_p=0.5),
    "penalties": dict(repetition_penalty=1.3),
    "bias": dict(logit_bias={7: 3.0}),
    "allowed": dict(allowed_token_ids=(5, 6)),
    "bad_words": dict(bad_words=((9,),)),
    "min_tokens": dict(min_tokens=8),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_acts_if_and_only_if_its_flag_is_set(name):
    logits = np.random.default_rng(0).normal(0, 5, (1, 2, VOCAB)).astype(np.float32)
    slots = [Slot(SamplingParams(**OPTIONS[name]), [1, 2], [2, 5], STOPS)]
    neutral_slots = [slots[0]._replace(params=SamplingParams())]
    paths = [[[], [1]]]
    others = dataclasses.replace(TRANSFORMS, **{name: False})
    np.testing.assert_array_equal(
        scores_of(logits, slots, paths, others), scores_of(logits, neutral_slots, paths, others)
    )
    with_flag = scores_of(logits, slots, paths, Features(**{name: True}))
    assert (with_flag != scores_of(logits, slots, paths, Features())).any(axis=-1).all()


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def program(features, batch=2, rows=3, depth=2):
    """All equations of transform's program."""
    counts = Counts(jnp.zeros((batch, VOCAB), bool), jnp.zeros((batch, VOCAB), jnp.int32))
    context = Context(jnp.zeros(batch, jnp.int32), counts, jnp.zeros((batch, 7), jnp.int32))
    where = Rows(np.arange(rows), jnp.zeros((batch, rows, depth), jnp.int32))

    def run(logits, options):
        return sampling.transform(logits, options, features, context, where)

    traced = jax.make_jaxpr(run)(jnp.zeros((batch, rows, VOCAB)), neutral(batch, VOCAB, 4))
    return list(equations(traced.jaxpr))


LOOPS_AND_SCATTERS = ("sort", "top_k", "while", "scan", "scatter", "gather", "reduce")


def primitives(features):
    names = {equation.primitive.name for equation in program(features)}
    return {kind for kind in LOOPS_AND_SCATTERS for name in names if name.startswith(kind)}


def test_without_options_the_program_only_tempers():
    assert primitives(Features()) == set()
    assert primitives(Features.none()) == set()
    logits = np.random.default_rng(0).normal(0, 5, (2, 1, VOCAB)).astype(np.float32)
    slots = [Slot(SamplingParams(temperature=t), [1]) for t in (0.7, 0.0)]
    scores = scores_of(logits, slots, features=Features())
    np.testing.assert_array_equal(scores[0], logits[0] * (1 / np.float32(0.7)))
    np.testing.assert_array_equal(scores[1], logits[1])


def test_no_option_sorts_the_vocabulary():
    assert primitives(Features.all()) == {"scan", "scatter", "gather", "reduce"}
    assert not primitives(Features.all()) & {"sort", "top_k", "while"}
