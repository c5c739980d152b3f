"""The standalone draft model: every prediction is the model's own full forward pass."""

import drafter
import drive
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafter import VOCAB
from flax import nnx
from tiny import sharpened, tiny_config

from specjax.drafts.model import ModelSource
from specjax.models.transformer import graphdef, init_params, to_decode_layout

DRAFT = tiny_config(VOCAB, mtp=0, layers=2)


@jax.jit
def _forward(params, tokens):
    model = nnx.merge(graphdef(DRAFT), params)
    positions = jnp.arange(drafter.MAX_LEN)[None]
    return model.logits(model.hidden(tokens, positions, jnp.ones_like(tokens)).x)


@pytest.mark.parametrize(
    ("is_chain", "scan"), [pytest.param(True, False, marks=pytest.mark.slow), (False, True)]
)
def test_logits_at_every_node_are_the_models_own_over_rounds_and_plain_decoding(is_chain, scan):
    params, source = (
        sharpened(init_params(DRAFT, 0), 10.0, 0.7),
        ModelSource(DRAFT.running(scan_layers=scan), VOCAB),
    )

    def full_logits(context):
        tokens = np.zeros((1, drafter.MAX_LEN), np.int32)
        tokens[0, : len(context)] = context
        return np.asarray(_forward(params, tokens))[0, len(context) - 1]

    def check(run, grown):
        found, _ = drafter.propose(run, grown)
        for b, length in enumerate(np.asarray(run.state.length)):
            context = np.asarray(run.state.tokens)[b, :length].tolist()
            np.testing.assert_allclose(found[0][b, 0], full_logits(context), atol=2e-4)
            for i, logits in enumerate(found[1:]):
                for path, got in zip(drive.paths_of(grown, i)[b], logits[b], strict=True):
                    want = full_logits(context + path.tolist())
                    np.testing.assert_allclose(got, want, atol=2e-4)

    drafter.over_rounds(source, to_decode_layout(params, source.cfg), check, is_chain, taps_width=1)
