"""A head on made-up states of a target, a running batch of it, and layers by their equations.

What a head makes of the states is what tests look at, so that these may be any numbers.
"""

import dataclasses
from typing import NamedTuple

import drive
import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafts.head import HeadSource
from specjax.models.families.dense import dense_config

VOCAB, MAX_LEN, STEPS, WIDTH = 24, 64, 3, 12
HEAD_DIM, THETA = 8, 5000.0


class Drafter(NamedTuple):
    """A head on made-up states, and a running batch of it."""

    source: HeadSource
    params: dict
    target: drive.Target
    hidden: jax.Array
    state: drive.State
    between: object


def network_of(layers=1, width=WIDTH, columns=None, qk_norm=False, biases=False, windows=None):
    """The config of a head's layers; `windows` is one for each."""
    network = dense_config(
        vocab_size=columns or VOCAB, hidden_size=width, intermediate_size=20, num_layers=layers,
        num_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, rope_theta=THETA, qk_norm=qk_norm,
        qkv_bias=biases, o_bias=biases, model_type="qwen3" if qk_norm else "llama",
        tie_embeddings=False, max_position=512,
    )  # fmt: skip
    layers = [
        dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, window=window))
        for layer, window in zip(network.layers, windows or (None,) * layers, strict=True)
    ]
    return network.replace(layers=tuple(layers))


def made_up(batch: int, width: int, taps_width: int) -> tuple[drive.Target, jax.Array]:
    """A target of that width, and its states [batch MAX_LEN taps_width]."""
    rng = np.random.default_rng(4)
    draws = [rng.normal(size=shape) for shape in ((VOCAB, width), (width, VOCAB))]
    target = drive.Target(*(jnp.asarray(0.7 * x, jnp.float32) for x in draws))
    return target, jnp.asarray(rng.normal(size=(batch, MAX_LEN, taps_width)), jnp.float32)


def start(source, params, prompts, page_size=None, width=WIDTH, taps_width=None) -> Drafter:
    target, hidden = made_up(len(prompts), width, taps_width or source.taps_width)
    empty = drive.empty_state(source, len(prompts), MAX_LEN, STEPS, page_size)
    state = drive.place(empty, source, params, prompts, 4, target, hidden)
    return Drafter(source, params, target, hidden, state, empty.draft.slots)


def prompts_of(rng, *lengths):
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


def enter(run: Drafter, steps) -> Drafter:
    return run._replace(state=drive.resume(run.state, run.source, run.params, steps, run.target))


def leave(run: Drafter) -> Drafter:
    return run._replace(state=drive.pause(run.state, run.source, run.between))


def plain(run: Drafter, emitted, count) -> Drafter:
    state = drive.plain(run.state, run.source, emitted, np.asarray(count), run.hidden)
    return run._replace(state=state)


def propose(run: Drafter, grown):
    return drive.propose(run.source, run.params, run.state, grown, True, run.target)


def round_of(run: Drafter, emitted, count, grown) -> Drafter:
    """One round in which count[b] of the tokens are emitted."""
    _, work = propose(run, grown)
    count = np.asarray(count)
    state = drive.accept(run.state, run.source, work, emitted, count, run.hidden)
    return run._replace(state=state)


def over_rounds(source, params, check, is_chain=False, **sizes) -> Drafter:
    """Checks before each of four rounds, with plain decoding for longer and shorter than a round
    after the second: ragged counts, prompts in pieces, one without a token before the root; a
    chain, or a tree over pages."""
    rng = np.random.default_rng(0)
    prompts, page_size = prompts_of(rng, 1, 3, 9), None if is_chain else 8
    run = enter(start(source, params, prompts, page_size, **sizes), STEPS)
    grown = drive.random_tree(rng, 3, (1, 1) if is_chain else (2, 3), VOCAB, True)
    for number in range(4):
        if number == 2:
            emitted = rng.integers(0, VOCAB, (3, 12))
            run = enter(plain(leave(run), emitted, (2, 11, 0)), STEPS)
        grown = drive.relabelled(rng, grown, VOCAB)
        check(run, grown)
        count = rng.integers(1, STEPS + 2, 3)
        run = round_of(run, rng.integers(0, VOCAB, (3, STEPS + 1)), count, grown)
    return run


# --- layers by their equations, in float64 --------------------------------------------------------


def rms(x, scale, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def rotated(x, positions):
    """x [n heads H]: the first half of a head is paired with the second."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions)[:, None, None] / THETA ** (np.arange(half) / half)
    cos, sin, a, b = np.cos(angles), np.sin(angles), x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(w, x, rows, positions, sees, eps):
    """What the last rows, x [q D], take from all rows [k D]; sees [q k]."""
    heads = []
    for name, these in (("q", x), ("k", rows), ("v", rows)):
        y = (these @ w[name] + w.get(f"{name}_bias", 0)).reshape(len(these), -1, HEAD_DIM)
        if f"{name}_norm" in w:
            y = rms(y, w[f"{name}_norm"], eps)
        heads.append(y if name == "v" else rotated(y, positions[len(positions) - len(these) :]))
    q, k, v = (np.repeat(y, heads[0].shape[1] // y.shape[1], axis=1) for y in heads)
    scores = np.where(sees, np.einsum("qnh,knh->nqk", q, k) / np.sqrt(HEAD_DIM), -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("nqk,knh->qnh", scores / scores.sum(-1, keepdims=True), v)
    return mixed.reshape(len(x), -1) @ w["o"] + w.get("o_bias", 0)


def after_mlp(w, x, eps):
    h = rms(x, w["post_norm"], eps)
    gate = h @ w["gate"]
    return x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]


def token_logits(w, lm_head, normed):
    """[.. V] with -inf where a token is not drafted."""
    ids = w["ids"].astype(int) if "ids" in w else np.arange(VOCAB)
    out = np.full((*normed.shape[:-1], VOCAB), -np.inf)
    out[..., ids] = normed @ (w["lm_head"] if "lm_head" in w else lm_head[:, ids])
    return out
