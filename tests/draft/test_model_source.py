"""The standalone draft model: every prediction is the model's own full forward pass."""

import drive
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import sharpened, tiny_config

from specjax.draft.model_source import ModelSource
from specjax.models.transformer import graphdef, init_params, to_decode_layout

VOCAB, MAX_LEN = 32, 40
DRAFT = tiny_config(VOCAB, mtp=0, layers=2)


def draft_params():
    return sharpened(init_params(DRAFT, 0), 10.0, 0.7)


def full_logits(params, context):
    """The draft model's logits after `context`, without any cache."""
    tokens = np.zeros((1, MAX_LEN), np.int32)
    tokens[0, : len(context)] = context
    return np.asarray(_forward(params, tokens))[0, len(context) - 1]


@jax.jit
def _forward(params, tokens):
    model = nnx.merge(graphdef(DRAFT), params)
    positions = jnp.broadcast_to(jnp.arange(MAX_LEN), tokens.shape)
    return model.logits(model.hidden(tokens, positions, jnp.ones_like(tokens)))


def check_round(params, state, grown, found):
    for b, length in enumerate(np.asarray(state.length)):
        context = np.asarray(state.tokens)[b, :length].tolist()
        np.testing.assert_allclose(found[0][b, 0], full_logits(params, context), atol=2e-4)
        for i, logits in enumerate(found[1:]):
            for path, got in zip(drive.paths_of(grown, i)[b], logits[b], strict=True):
                want = full_logits(params, context + path.tolist())
                np.testing.assert_allclose(got, want, atol=2e-4)


@pytest.mark.parametrize(
    ("widths", "shared", "scan"),
    [
        ((1, 1), True, False),
        ((3, 4), True, True),
        ((2, 2), False, False),
        ((), True, False),
    ],
    ids=["chain", "static and scanned layers", "dynamic", "one step"],
)
def test_logits_at_every_node_are_the_models_own_over_rounds(widths, shared, scan):
    """Ragged pending counts, a slot that stands still, branches that must not see each other."""
    rng = np.random.default_rng(0)
    params = draft_params()
    source = ModelSource(DRAFT.replace(scan_layers=scan), VOCAB)
    layout = to_decode_layout(params, source.cfg)
    steps = len(widths) + 1
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 5, 8)]
    state = drive.empty_state(source, 3, MAX_LEN, steps)
    state = drive.place(state, source, layout, steps, prompts, width=8)
    grown = drive.random_tree(rng, 3, widths, VOCAB, shared)
    for round_index in range(3):
        grown = drive.relabelled(rng, grown, VOCAB)
        found, work = drive.propose(source, layout, state, grown, shared)
        check_round(params, state, grown, found)
        emitted = rng.integers(0, VOCAB, (3, steps + 1))
        count = np.array([steps + 1, round_index % (steps + 2), 1])
        state = drive.accept(state, source, work, emitted, count)


def test_a_slot_that_does_not_run_keeps_its_pending_tokens():
    source = ModelSource(DRAFT, VOCAB)
    memory = source.empty(2, 16, 3)._replace(pending=jnp.array([3, 2]))
    state = drive.empty_state(source, 2, 8, 3)._replace(draft=memory, length=jnp.array([5, 6]))
    params = to_decode_layout(draft_params(), DRAFT)
    work = jax.eval_shape(lambda: source.extend(None, params, state, 3, 2)[1])
    after = source.commit(memory, work, None, jnp.array([0, 4]))
    assert after.pending.tolist() == [3, 4]


@pytest.mark.parametrize("vocab", [24, 40])
def test_a_table_of_another_size_gives_the_targets_ids(vocab):
    """Padding is cut off; ids that the draft lacks are never proposed."""
    params = draft_params()
    own, other = ModelSource(DRAFT, VOCAB), ModelSource(DRAFT, vocab)
    layout = to_decode_layout(params, DRAFT)
    state = drive.place(drive.empty_state(own, 1, 16, 2), own, layout, 2, [[3, 1, 4]], 4)
    (want, _), (got, _) = (drive.extend(s, layout, state, 2, 1) for s in (own, other))
    common = min(vocab, VOCAB)
    assert got.shape == (1, 1, vocab)
    np.testing.assert_array_equal(got[..., :common], want[..., :common])
    assert np.all(np.isneginf(got[..., common:]))
