"""Decoding by hand: one full forward pass per token, the transforms in plain Python and float64."""

import functools
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.decode.noise import request_keys, request_words, target_noise
from specjax.models.transformer import graphdef

sys.path.append(str(Path(__file__).resolve().parent.parent / "decode"))
import transform_reference as reference  # noqa: E402

ROOM = 96  # every forward pass has this shape


class ByHand(NamedTuple):
    """Attributes:
    tokens: generated ones. logits: raw, after which each was generated. scores: transformed.
    """

    tokens: list[int]
    logits: list[np.ndarray]
    scores: list[np.ndarray]


@functools.partial(jax.jit, static_argnums=0)
def _forward(cfg, params, tokens):
    model = nnx.merge(graphdef(cfg), params)
    positions = jnp.arange(ROOM)[None]
    return model.logits(model.hidden(tokens, positions, jnp.ones_like(positions)).x)[0]


def logits_at(cfg, params, tokens) -> np.ndarray:
    """Raw logits [V] of what follows `tokens`."""
    padded = np.zeros((1, ROOM), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_forward(cfg, params, padded)[len(tokens) - 1], np.float64)


@jax.jit
def _noise(words, position):
    return target_noise(request_keys(words[None]), position[None, None], 64)[0, 0]


def decode(cfg, params, prompt, sampling, sample=0) -> ByHand:
    """One sample, token by token; the noise is that of its request and each token's position."""
    stops = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else cfg.eos_token_ids)]
    words = request_words(sampling.seed or 0, prompt, sample)
    out = ByHand([], [], [])
    while len(out.tokens) < sampling.max_tokens and not (out.tokens and out.tokens[-1] in stops):
        logits = logits_at(cfg, params, [*prompt, *out.tokens])
        scores = reference.transform(logits, sampling, prompt, out.tokens, [], stops)
        noisy = scores
        if sampling.temperature > 0:
            position = np.int32(len(prompt) + len(out.tokens))
            noisy = scores + np.asarray(_noise(words, position), np.float64)
        out.tokens.append(int(np.argmax(noisy)))
        out.logits.append(logits)
        out.scores.append(scores)
    return out


def log_softmax(scores) -> np.ndarray:
    shifted = np.asarray(scores, np.float64) - np.max(scores)
    return shifted - np.log(np.exp(shifted).sum())
