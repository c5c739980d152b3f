"""The standalone draft model: every prediction is the model's own full forward pass."""

import drive
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import sharpened, tiny_config

from specjax.decode.state import STOPPED
from specjax.drafts.model import ModelSource
from specjax.models.transformer import graphdef, init_params, to_decode_layout

VOCAB, MAX_LEN, LONG = 32, 40, 100
DRAFT = tiny_config(VOCAB, mtp=0, layers=2)


def draft_params():
    return sharpened(init_params(DRAFT, 0), 10.0, 0.7)


def full_logits(params, context):
    """The draft model's logits after `context`, without any cache."""
    tokens = np.zeros((1, MAX_LEN if len(context) <= MAX_LEN else LONG), np.int32)
    tokens[0, : len(context)] = context
    return np.asarray(_forward(params, tokens))[0, len(context) - 1]


@jax.jit
def _forward(params, tokens):
    model = nnx.merge(graphdef(DRAFT), params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model.logits(model.hidden(tokens, positions, jnp.ones_like(tokens)).x)


def check_round(params, state, grown, found):
    for b, length in enumerate(np.asarray(state.length)):
        context = np.asarray(state.tokens)[b, :length].tolist()
        np.testing.assert_allclose(found[0][b, 0], full_logits(params, context), atol=2e-4)
        for i, logits in enumerate(found[1:]):
            for path, got in zip(drive.paths_of(grown, i)[b], logits[b], strict=True):
                want = full_logits(params, context + path.tolist())
                np.testing.assert_allclose(got, want, atol=2e-4)


@pytest.mark.parametrize(
    ("widths", "shared", "scan", "page_size"),
    [
        ((1, 1), True, False, None),
        ((3, 4), True, True, 8),
        ((2, 2), False, False, 16),
        pytest.param((), True, False, None, marks=pytest.mark.slow),
    ],
    ids=["chain", "static and scanned layers", "dynamic", "one step"],
)
def test_logits_at_every_node_are_the_models_own_over_rounds(widths, shared, scan, page_size):
    """Ragged pending counts, a slot that stands still, branches that must not see each other."""
    rng = np.random.default_rng(0)
    params = draft_params()
    source = ModelSource(DRAFT.running(scan_layers=scan), VOCAB)
    layout = to_decode_layout(params, source.cfg)
    steps = len(widths) + 1
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 5, 8)]
    state = drive.empty_state(source, 3, MAX_LEN, steps, page_size)
    state = drive.place(state, source, layout, prompts, width=8)
    state = drive.resume(state, source, layout, steps)
    grown = drive.random_tree(rng, 3, widths, VOCAB, shared)
    for round_index in range(3):
        grown = drive.relabelled(rng, grown, VOCAB)
        found, work = drive.propose(source, layout, state, grown, shared)
        check_round(params, state, grown, found)
        emitted = rng.integers(0, VOCAB, (3, steps + 1))
        count = np.array([steps + 1, round_index % (steps + 2), 1])
        state = drive.accept(state, source, work, emitted, count)


@pytest.mark.parametrize("page_size", [16, pytest.param(None, marks=pytest.mark.slow)])
def test_after_plain_decoding_logits_are_those_of_a_prompt_that_was_read(page_size):
    """Chunks of both kinds, strategies of several depths, more tokens than are taken in at once,
    prompts in pieces, a slot that has ended."""
    rng = np.random.default_rng(3)
    params, source = draft_params(), ModelSource(DRAFT, VOCAB)
    layout = to_decode_layout(params, DRAFT)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 9, 6, 4)]
    empty = drive.empty_state(source, 4, LONG, 3, page_size)
    state = drive.place(empty, source, layout, prompts, width=4)
    ended = np.array([False, False, False, True])
    for steps, widths, emit in ((3, (1, 1), (70, 3, 4, 20)), (1, (), (0, 1, 2, 0))):
        emitted = rng.integers(0, VOCAB, (4, 70))
        state = drive.plain(state, source, emitted, np.array(emit))
        state = state._replace(finish=jnp.where(ended, STOPPED, state.finish))
        state = drive.resume(state, source, layout, steps)
        assert (state.draft.slots.pending[:3] <= steps + 1).all()
        grown = drive.random_tree(rng, 4, widths, VOCAB, True)
        for _ in range(2):
            found, work = drive.propose(source, layout, state, grown, True)
            running = state._replace(tokens=state.tokens[:3], length=state.length[:3])
            check_round(params, running, grown, found)
            emitted = rng.integers(0, VOCAB, (4, steps + 1))
            count = np.where(ended, 0, rng.integers(1, steps + 2, 4))
            state = drive.accept(state, source, work, emitted, count)
        state = drive.pause(state, source, empty.draft.slots)


def test_a_slot_that_does_not_run_keeps_its_pending_tokens():
    source = ModelSource(DRAFT, VOCAB)
    state = drive.empty_state(source, 2, 8, 3)
    memory = state.draft._replace(slots=state.draft.slots._replace(pending=jnp.array([3, 2])))
    state = state._replace(draft=memory, length=jnp.array([5, 6]))
    params = to_decode_layout(draft_params(), DRAFT)
    work = jax.eval_shape(lambda: source.begin(None, params, state, 3, 2)[1])
    after = source.commit(memory, work, None, jnp.array([0, 4]))
    assert after.slots.pending.tolist() == [3, 4]


@pytest.mark.parametrize("vocab", [24, 40])
def test_a_table_of_another_size_gives_the_targets_ids(vocab):
    """Padding is cut off; ids that the draft lacks are never proposed."""
    params = draft_params()
    own, other = ModelSource(DRAFT, VOCAB), ModelSource(DRAFT, vocab)
    layout = to_decode_layout(params, DRAFT)
    state = drive.place(drive.empty_state(own, 1, 16, 2), own, layout, [[3, 1, 4]], 4)
    (want, _), (got, _) = (drive.begin(s, layout, state, 2, 1) for s in (own, other))
    common = min(vocab, VOCAB)
    assert got.shape == (1, 1, vocab)
    np.testing.assert_array_equal(got[..., :common], want[..., :common])
    assert np.all(np.isneginf(got[..., common:]))
