"""Sampling options, histories and trees as arrays, made from what the plain reference takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import transform_reference

from specjax.config import SamplingParams
from specjax.decode import sampling
from specjax.decode.options import Features, Options, neutral
from specjax.decode.sampling import Rows, context_of, count_tokens, root_rows

VOCAB, SLOTS, ROWS = 40, 6, 6  # of random cases
STOPS = (3, 4)
TRANSFORMS = Features(
    top_k=True,
    top_p=True,
    min_p=True,
    penalties=True,
    bias=True,
    allowed=True,
    bad_words=True,
    min_tokens=True,
)


class Slot(NamedTuple):
    """One slot: how it is sampled, and its history up to and including the root."""

    params: SamplingParams
    prompt: list[int]
    output: list[int] = []
    stop_ids: tuple[int, ...] = ()


def options_of(slots: Sequence[Slot], vocab: int, stop_width: int = 4) -> Options:
    """The device rows of the slots' parameters, written from the docstring of Options."""
    options = neutral(len(slots), vocab, stop_width, np=np)
    for b, (params, prompt, _, stop_ids) in enumerate(slots):
        options.temperature[b] = params.temperature
        options.top_k[b], options.top_p[b], options.min_p[b] = (
            params.top_k,
            params.top_p,
            params.min_p,
        )
        options.repetition[b] = params.repetition_penalty
        options.presence[b] = params.presence_penalty
        options.frequency[b] = params.frequency_penalty
        for i, (token, value) in enumerate(params.logit_bias):
            options.bias_ids[b, i], options.bias_values[b, i] = token, value
        if params.allowed_token_ids:
            options.allowed[b] = 0
            for token in params.allowed_token_ids:
                options.allowed[b, token // 32] |= np.uint32(1 << token % 32)
        for i, word in enumerate(params.bad_words):
            options.bad_words[b, i, -len(word) :] = word
        options.stop_ids[b, : len(stop_ids)] = stop_ids
        options.prompt_len[b] = len(prompt)
        options.min_len[b] = len(prompt) + params.min_tokens
    return options


def sequences(slots: Sequence[Slot], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Token buffer [B width] and lengths [B]; what lies past a length is rubbish."""
    tokens = np.full((len(slots), width), 1, np.int32)
    for b, slot in enumerate(slots):
        known = [*slot.prompt, *slot.output]
        tokens[b, : len(known)] = known
    return tokens, np.array([len(s.prompt) + len(s.output) for s in slots], np.int32)


def rows_of(paths: Sequence[Sequence[Sequence[int]]], depth: int | None = None) -> Rows:
    """Rows from each slot's list of root-to-row paths (tokens below the root)."""
    if depth is None:
        depth = max(len(path) for slot in paths for path in slot)
    padded = [[[*path, *[-1] * (depth - len(path))] for path in slot] for slot in paths]
    shape = (len(paths), len(paths[0]), depth)
    lengths = np.array([[len(path) for path in slot] for slot in paths], np.int32)
    return Rows(lengths, np.array(padded, np.int32).reshape(shape))


def scores_of(
    logits: np.ndarray,
    slots: Sequence[Slot],
    paths: Sequence[Sequence[Sequence[int]]] | None = None,
    features: Features = TRANSFORMS,
    width: int = 32,
    rows: Rows | None = None,
) -> np.ndarray:
    """The library's scores [B R V]; without paths there is one row per slot, the root.

    Small trees are padded to one shape, so that tests share a program.
    """
    batch, number, vocab = logits.shape
    if paths is not None:
        slots = [*slots, *[Slot(SamplingParams(), [0])] * (4 - batch)]
        paths = [[*p, *[[]] * (6 - len(p))] for p in [*paths, *[[]] * (4 - batch)]]
        logits = np.pad(logits, [(0, len(slots) - batch), (0, len(paths[0]) - number), (0, 0)])
        rows = rows_of(paths, depth=4)
    elif rows is None:
        rows = root_rows(batch)
    tokens, length = sequences(slots, width)
    scores = _scores(logits, options_of(slots, vocab), tokens, length, rows, features)
    return np.asarray(scores)[:batch, :number]


@jax.jit(static_argnames="features")
def _scores(logits, options, tokens, length, rows, features):
    counts = None
    if features.penalties:
        counts = count_tokens(tokens, length, options.prompt_len, logits.shape[-1])
    context = context_of(tokens, length, features, counts)
    return sampling.transform(logits, options, features, context, rows)


def expected_scores(
    logits: np.ndarray, slots: Sequence[Slot], paths: Sequence[Sequence[Sequence[int]]]
) -> np.ndarray:
    """The reference's scores [B R V], float64."""
    return np.array(
        [
            [
                transform_reference.transform(
                    logits[b, r], s.params, s.prompt, s.output, path, s.stop_ids
                )
                for r, path in enumerate(paths[b])
            ]
            for b, s in enumerate(slots)
        ]
    )


def random_params(generator, tail):
    """Each option is set half of the time; `tail` are the last tokens known."""

    def maybe(value, otherwise):
        return value if generator.random() < 0.5 else otherwise

    def tokens(most):
        return [int(t) for t in generator.choice(VOCAB, generator.integers(1, most), replace=False)]

    def bad_word():
        return (*tail[len(tail) - generator.integers(0, 4) :], int(generator.integers(VOCAB)))

    return SamplingParams(
        temperature=maybe(generator.uniform(0.2, 2), 0.0 if generator.random() < 0.4 else 1.0),
        top_k=maybe(int(generator.choice([1, 3, 10, VOCAB, 1000])), 0),
        top_p=maybe(generator.uniform(0.05, 1), 1.0),
        min_p=maybe(generator.uniform(0, 0.5), 0.0),
        repetition_penalty=maybe(generator.uniform(0.5, 2), 1.0),
        presence_penalty=maybe(generator.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(generator.uniform(-2, 2), 0.0),
        logit_bias={t: generator.normal(0, 5) for t in maybe(tokens(8), [])},
        allowed_token_ids=maybe(tokens(20), None),
        bad_words=[bad_word() for _ in range(maybe(5, 0))],
        min_tokens=maybe(int(generator.integers(0, 12)), 0),
    )


def random_slot(generator):
    # Few different tokens, so that histories repeat and bad words complete.
    prompt = generator.integers(0, 6, generator.integers(1, 8)).tolist()
    output = generator.integers(0, 6, generator.integers(0, 8)).tolist()
    return Slot(random_params(generator, [*prompt, *output]), prompt, output, STOPS)


def random_tree(generator):
    """Paths of a tree's rows, the root first."""
    paths = [[]]
    while len(paths) < ROWS:
        above = paths[generator.integers(len(paths))]
        if len(above) < 4:
            paths.append([*above, int(generator.integers(0, 6))])
    return paths


def random_logits(generator, shape):
    logits = generator.normal(0, 3, shape)
    if generator.random() < 0.4:
        logits = np.round(logits)  # ties
    if generator.random() < 0.4:
        logits[generator.random(shape) < 0.6] = -np.inf  # tokens without mass
    if generator.random() < 0.1:
        logits[..., 5:] = -np.inf
    return logits.astype(np.float32)
