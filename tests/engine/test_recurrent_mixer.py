"""Models with a recurrence beside attention: Gated DeltaNet, and the leaky sum of docs/extend.md.

Their state is kept per slot and per prompt, so whatever moves, interrupts or shares sequences is
compared with plain decoding of one sample after the other.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import AtRandom, restless_of
from flax import nnx
from recurrent import VOCAB, engine_of, hybrid, jobs_of, plain, tokens, toy, weights
from tiers import slow_but

from specjax import SpecConfig
from specjax.config import ModelConfig
from specjax.config.model import Layer, LogitForm
from specjax.control import ControlConfig
from specjax.decode.tree import build_tree, chain_bits
from specjax.drafts.model import ModelSource
from specjax.interfaces import Room, Where
from specjax.memory import Commit, commit, empty
from specjax.models.mixers.attention import Attention
from specjax.models.mlps.dense import Dense
from specjax.models.transformer import graphdef, to_decode_layout

PAGE, ARMS = 16, ("off", "3_2_6", "2x2")


def sandwich(**run) -> ModelConfig:
    """As Gemma: norms around both halves, windows in half the layers, bounded scores and logits."""
    window = Attention(4, 2, 8, qk_norm=True, norm_offset=True, window=5, soft_cap=2.0, scale=0.5)
    layers = tuple(
        Layer(mixer, Dense(24, "gelu_pytorch_tanh"), "both", norm_offset=True)
        for mixer in (window, dataclasses.replace(window, window=None))
    )
    cfg = ModelConfig(
        vocab_size=VOCAB, hidden_size=16, layers=layers, tie_embeddings=False, norm_offset=True,
        max_position=512, mtp_num_layers=1, embedding_multiplier=2.0,
        logits=LogitForm(soft_cap=8.0),
    )  # fmt: skip
    return cfg.running(**run)


@pytest.mark.parametrize(
    ("of", "attention"),
    [
        pytest.param(hybrid, "auto", marks=pytest.mark.slow),
        (toy, "auto"),
        (sandwich, "auto"),
        (sandwich, "reference"),
    ],
)
def test_state_survives_other_strategies_preemption_pieces_and_shared_prompts(of, attention):
    """Dynamic and static trees and plain rounds in turn, alone and beside others, with pages for a
    few sequences at a time."""
    cfg, jobs = of(), jobs_of()
    spec, control = SpecConfig("3_2_6"), ControlConfig(controller="bandit", strategies=ARMS)
    kept = dict(page_size=PAGE, chunk_tokens=8, prefill_chunk=PAGE, attention=attention)
    probe = engine_of(cfg, spec, 4, control, **kept)
    room = probe.runner.slot_bytes + 16 * probe.runner.page_bytes
    engine = engine_of(cfg, spec, 4, control, cache_bytes=room, **kept)
    engine.controller, engine.buckets[:] = AtRandom(arms=ARMS), [1, 4]
    assert engine.runner.pages == 16
    found = tokens(engine, jobs)
    assert found == tokens(plain(cfg), jobs)
    assert engine.preemptions > 0
    before = engine.runner.compilations
    assert tokens(engine, jobs) == found and engine.runner.compilations == before


@pytest.mark.slow
@pytest.mark.parametrize("of", [hybrid, toy])
def test_in_invariant_mode_bits_do_not_depend_on_strategies(of):
    """State advances and rows are computed in the order of positions, in one program."""
    cfg, jobs, arms = of(), jobs_of(), ("off", "3_1_4", "2x2")
    spec = SpecConfig("2x2", invariant=True)
    engine = restless_of(arms, [4], spec, cfg=cfg, params=weights(cfg))
    found = []
    for controller in (AtRandom(arms=arms), AtRandom(arms=arms[:1])):
        engine.controller = controller
        found.append([(s.token_ids, s.logprobs) for s in engine.generate(jobs)[0]])
    assert found[0] == found[1] and engine.preemptions


@pytest.mark.parametrize("of", [hybrid, toy])
def test_a_standalone_draft_with_recurrent_state_is_refused(of):
    with pytest.raises(ValueError, match="with recurrent state; draft with a head"):
        ModelSource(of(), VOCAB)


def forget_nothing(patch):
    from specjax.decode import admit

    patch.setattr(admit, "choose_slots", lambda first, slots, others: others)


def keep_rows_in_order(patch):
    from specjax import memory

    patch.setattr(memory, "_along", lambda x, path, axis: x[:, : path.shape[1]])


@pytest.mark.parametrize("broken", slow_but([forget_nothing, keep_rows_in_order], forget_nothing))
def test_state_that_is_kept_wrongly_changes_tokens(broken, monkeypatch):
    """Memory that is kept wrongly must fail the comparison above; see also `test_hybrid`."""
    cfg, jobs = toy(), jobs_of(3)
    right = tokens(plain(cfg), jobs)
    broken(monkeypatch)
    engine = engine_of(cfg, SpecConfig("2x2", draft="checkpoint"), 2, page_size=PAGE)
    found = tokens(engine, jobs), tokens(engine, jobs)  # the second time in rows of other prompts
    assert found != (right, right)


@pytest.fixture(scope="module", params=[hybrid, pytest.param(toy, marks=pytest.mark.slow)])
def samples(request):
    """Samples of a chain drafted by n-grams, four layers that are scanned over their pattern."""
    cfg, jobs = request.param(repeats=2, scan_layers=True), jobs_of(3)
    engine = engine_of(cfg, SpecConfig("3_1_4", draft="ngram"), 2, page_size=PAGE)
    return cfg, jobs, engine.generate(jobs)[0]


def packed(jobs, samples):
    """All samples in one row [1 S]: tokens, positions and segments."""
    known = [[*job.prompt, *sample.token_ids] for job, sample in zip(jobs, samples, strict=True)]
    segments = [[i + 1] * len(ids) for i, ids in enumerate(known)]
    positions = [range(len(ids)) for ids in known]
    return (np.concatenate([*map(np.array, rows)])[None] for rows in (known, positions, segments))


def test_packed_training_forward_gives_the_log_probabilities_of_decoding(samples):
    cfg, jobs, found = samples
    ids, positions, segments = packed(jobs, found)

    @jax.jit
    def logprobs(params):
        model = nnx.merge(graphdef(cfg), params)
        logits = model.logits(model.hidden(ids, positions, segments).x)[0]
        temperature = jnp.asarray(
            np.concatenate(
                [
                    np.full(len(job.prompt) + len(sample.token_ids), job.params.temperature or 1)
                    for job, sample in zip(jobs, found, strict=True)
                ]
            )
        )
        scaled = jax.nn.log_softmax(logits / temperature[:, None])
        return jnp.take_along_axis(scaled, jnp.roll(ids[0], -1)[:, None], 1)[:, 0]

    trained, at = np.asarray(logprobs(weights(cfg)[0])), 0
    for job, sample in zip(jobs, found, strict=True):
        first, end = at + len(job.prompt) - 1, at + len(job.prompt) + len(sample.token_ids) - 1
        if job.params.temperature:
            np.testing.assert_allclose(trained[first:end], sample.logprobs, atol=2e-3)
        at = end + 1


@pytest.mark.slow
def test_scanned_layers_of_two_kinds_emit_what_unrolled_ones_do(samples):
    cfg, jobs, found = samples
    unrolled = engine_of(cfg.running(scan_layers=False), None, 1)
    assert [sample.token_ids for sample in found] == tokens(unrolled, jobs)


@pytest.mark.parametrize("form", ["tree", "by_position"])
@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("of", [hybrid, pytest.param(toy, marks=pytest.mark.slow)])
def test_rows_of_a_tree_are_those_of_their_paths_and_nan_reaches_only_its_descendants(
    of, form, scan
):
    cfg = of(repeats=2, scan_layers=scan)
    params, tree = to_decode_layout(weights(cfg)[0], cfg), build_tree(SpecConfig("2x2").resolve())
    model = nnx.merge(graphdef(cfg, cfg.run.decode_layout), params)
    context, rows = np.array([[3, 9, 4]]), np.arange(10, 10 + tree.rows)[None]
    room, shape = Room(slots=1, pages=1, page_size=16), tree.shape

    @jax.jit
    def read(ids):
        """The state behind a path, and memory after it, read at once."""
        at, first, fresh = np.arange(len(ids))[None], jnp.zeros(1, int), empty(cfg, room)
        where = Where("tree", at, prefix=first, visible=chain_bits(len(ids)))
        found = model.decode(ids[None], where, fresh)
        count = jnp.full(1, len(ids))
        return found.x[0, -1], commit(cfg, fresh, found.scratch, None, count, Commit(first))

    @functools.partial(jax.jit, static_argnames="spoilt")
    def of_tree(memory, spoilt=None):
        where = Where(
            form, 3 + shape.depth[None], prefix=jnp.array([3]), visible=shape.bits,
            path_rows=shape.path_rows, depth=shape.depth,
        )  # fmt: skip
        mine = model
        if spoilt is not None:
            embed = params["embed"].at[rows[0, spoilt]].set(jnp.nan)
            mine = nnx.merge(graphdef(cfg, cfg.run.decode_layout), {**params, "embed": embed})
        return mine.decode(jnp.asarray(rows), where, memory)

    def path_of(row):
        path = shape.path_rows[row][: shape.depth[row] + 1]
        return path, read(np.array([*context[0], *rows[0, path]]))

    _, memory = read(context[0])
    found = of_tree(memory)
    for row in range(tree.rows):
        np.testing.assert_allclose(found.x[0, row], path_of(row)[1][0], atol=1e-4)
    broken, reached = of_tree(memory, spoilt=1), shape.visible[:, 1]
    assert np.isnan(broken.x[0, reached]).all()
    np.testing.assert_allclose(broken.x[0, ~reached], found.x[0, ~reached], atol=1e-5)
    # A path without that row, which stands behind its end: nothing of it is left in the memory.
    path, (_, right) = path_of(int(np.flatnonzero(~reached)[-1]))
    padded, count = jnp.asarray([[*path, 1]]), jnp.array([len(path)])
    kept = commit(cfg, memory, broken.scratch, padded, count, Commit(jnp.array([3])))
    for slot, wanted in zip(jax.tree.leaves(kept.slots), jax.tree.leaves(right.slots), strict=True):
        np.testing.assert_allclose(slot, wanted, atol=1e-4)
