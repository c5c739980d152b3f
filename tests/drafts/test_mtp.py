"""The MTP head as a source: every prediction is what its training forward gives over the sequence.

The target's states are made up, a table by slot and position: what the head makes of them is what
is looked at.
"""

import functools

import drafter
import drive
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafter import VOCAB
from tiny import sharpened, tiny_config

from specjax.drafts.mtp import MTPHead, MTPSource, init_head_params


@functools.cache
def head_of(cfg):
    return sharpened(jax.jit(init_head_params, static_argnums=(0, 1))(cfg, 1), 10.0, 0.7)


@functools.partial(jax.jit, static_argnums=0)
def _unroll(cfg, head, target, hidden, rows, segments, following):
    module = MTPHead(cfg, head)
    following = [target.embed_tokens(tokens[None]) for tokens in following]
    states = module.unroll(hidden[None], following, rows[None], segments[None])
    return jnp.concatenate(states) @ target.head_weight()


def expected(run: drafter.Drafter, slot, path=()) -> np.ndarray:
    """Logits below the root and below each token of a path under it: [len(path) + 1, V]."""
    length = int(run.state.length[slot])
    tokens = [*np.asarray(run.state.tokens)[slot, :length].tolist(), *path]
    rows = list(range(length - 1))
    shown = np.zeros(drafter.MAX_LEN, np.int32)
    shown[: len(rows)] = rows
    padded = np.array([*tokens, *[0] * (2 * drafter.MAX_LEN - len(tokens))])
    following = np.stack([padded[shown + 1 + s] for s in range(drafter.STEPS)])
    segments = (np.arange(drafter.MAX_LEN) < len(rows)).astype(np.int32)
    states = run.hidden[slot][shown]
    cfg, head = run.source.cfg, run.params
    out = _unroll(cfg, head, run.target, states, shown, segments, following)
    return np.asarray(out)[: len(path) + 1, len(rows) - 1]


def check(run: drafter.Drafter, grown):
    """What is proposed now, against the training forward, node by node."""
    found, _ = drafter.propose(run, grown)
    for slot in range(3):
        if int(run.state.length[slot]) < 2:
            continue  # nothing precedes the root
        want = expected(run, slot)
        np.testing.assert_allclose(found[0][slot, 0], want[0], atol=2e-4)
        for level, logits in enumerate(found[1:]):
            for path, got in zip(drive.paths_of(grown, level)[slot], logits[slot], strict=True):
                want = expected(run, slot, path.tolist())
                np.testing.assert_allclose(got, want[-1], atol=2e-4)


@pytest.mark.parametrize(
    ("modules", "recycle", "is_chain"), [(2, "pre_norm", False), (1, "post_norm", True)]
)
def test_predictions_over_rounds_and_plain_decoding_are_those_of_the_training_forward(
    modules, recycle, is_chain
):
    cfg = tiny_config(VOCAB, mtp=modules, mtp_recycle=recycle)
    width = cfg.hidden_size
    drafter.over_rounds(
        MTPSource(cfg), head_of(cfg), check, is_chain, width=width, taps_width=width
    )
