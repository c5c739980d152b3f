"""The MTP head as a source: every prediction is what its training forward gives over the sequence.

The target's states are made up, a table by slot and position: what the head makes of them is what
is looked at.
"""

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import drive
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import sharpened, tiny_config

from specjax.config.model import Layer
from specjax.decode.state import STOPPED
from specjax.drafts import mtp
from specjax.drafts.head import HeadSource
from specjax.drafts.mtp import MTPSource, head_graphdef, init_head_params
from specjax.interfaces import Memory, Param, Room
from specjax.models.mixers.attention import Attention

VOCAB, MAX_LEN, STEPS = 24, 64, 3


class Drafter(NamedTuple):
    """A head on made-up states, and a running batch of it."""

    source: HeadSource
    params: dict
    target: drive.Target
    hidden: jax.Array
    state: drive.State
    between: object


@functools.cache
def head_of(cfg):
    return sharpened(jax.jit(init_head_params, static_argnums=(0, 1))(cfg, 1), 10.0, 0.7)


class OwnAttention(Attention):
    """A mixer by another type and name."""

    kind: ClassVar[str] = "own attention"


class RunsOnce(OwnAttention):
    @property
    def run_again(self):
        raise AttributeError("run_again")


@dataclasses.dataclass(frozen=True)
class Halves:
    """An mlp that needs to know where its rows stand."""

    kind: ClassVar[str] = "halves"

    def params(self, width):
        return {"halve": Param((width, width), ("embed", None), matrix=True)}

    def run(self, w, x, where, given=None):
        odd = (where.positions % 2 == 1)[..., None]
        return jnp.where(odd, 0.5, 1) * (x @ w["halve"]), None


def with_last(cfg, mixer):
    """The config with another last layer, after which a head is made."""
    return cfg.replace(layers=(*cfg.layers, Layer(mixer, Halves())))


OWN = OwnAttention(2, 1, 12, qk_norm=True, window=3)


def drafter(modules, prompts, page_size=None, recycle="post_norm", mixer=None) -> Drafter:
    cfg = tiny_config(VOCAB, mtp=modules, mtp_recycle=recycle)
    cfg = cfg if mixer is None else with_last(cfg, mixer)
    source, params, width = MTPSource(cfg), head_of(cfg), cfg.hidden_size
    rng = np.random.default_rng(modules)
    draws = [rng.normal(size=shape) for shape in ((VOCAB, width), (width, VOCAB))]
    target = drive.Target(*(jnp.asarray(0.7 * x, jnp.float32) for x in draws))
    hidden = jnp.asarray(rng.normal(size=(len(prompts), MAX_LEN, width)), jnp.float32)
    empty = drive.empty_state(source, len(prompts), MAX_LEN, STEPS, page_size)
    state = drive.place(empty, source, params, prompts, 4, target, hidden)
    return Drafter(source, params, target, hidden, state, empty.draft.slots)


@functools.partial(jax.jit, static_argnums=0)
def _unroll(cfg, head, target, hidden, rows, segments, following):
    module = nnx.merge(head_graphdef(cfg), head)
    following = [target.embed_tokens(tokens[None]) for tokens in following]
    states = module.unroll(hidden[None], following, rows[None], segments[None])
    return jnp.concatenate(states) @ target.head_weight()


def expected(run: Drafter, slot, path=(), without=range(0)) -> np.ndarray:
    """Logits below the root and below each token of a path under it: [len(path) + 1, V].

    Args:
      without: positions of which the head knows nothing.
    """
    length = int(run.state.length[slot])
    tokens = [*np.asarray(run.state.tokens)[slot, :length].tolist(), *path]
    rows = [j for j in range(length - 1) if j not in without]
    shown = np.zeros(MAX_LEN, np.int32)
    shown[: len(rows)] = rows
    padded = np.array([*tokens, *[0] * (2 * MAX_LEN - len(tokens))])
    following = np.stack([padded[shown + 1 + s] for s in range(STEPS)])
    segments = (np.arange(MAX_LEN) < len(rows)).astype(np.int32)
    states = run.hidden[slot][shown]
    cfg, head = run.source.cfg, run.params
    out = _unroll(cfg, head, run.target, states, shown, segments, following)
    return np.asarray(out)[: len(path) + 1, len(rows) - 1]


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


def check(run: Drafter, grown, slots, without=None, atol=2e-4):
    """What is proposed now, against the training forward, node by node."""
    found, _ = propose(run, grown)
    for slot in slots:
        gone = range(0) if without is None else without[slot]
        if int(run.state.length[slot]) < 2:
            continue  # nothing precedes the root
        want = expected(run, slot, (), gone)
        np.testing.assert_allclose(found[0][slot, 0], want[0], atol=atol)
        for level, logits in enumerate(found[1:]):
            for path, got in zip(drive.paths_of(grown, level)[slot], logits[slot], strict=True):
                want = expected(run, slot, path.tolist(), gone)
                np.testing.assert_allclose(got, want[-1], atol=atol)


def prompts_of(rng, *lengths):
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


@pytest.mark.parametrize(
    ("modules", "recycle", "page_size", "mixer"),
    [
        (2, "pre_norm", 8, None),
        (1, "post_norm", 8, OWN),
        pytest.param(1, "post_norm", 16, None, marks=pytest.mark.slow),
        pytest.param(1, "pre_norm", None, None, marks=pytest.mark.slow),
        pytest.param(2, "post_norm", None, None, marks=pytest.mark.slow),
    ],
)
def test_predictions_over_rounds_are_those_of_the_training_forward(
    modules, recycle, page_size, mixer
):
    """A tree with branches, ragged counts, slots that have ended, prompts in pieces; a head whose
    layer is one of its own."""
    rng = np.random.default_rng(0)
    run = drafter(modules, prompts_of(rng, 1, 2, 3, 9, 7), page_size, recycle, mixer)
    run = enter(run, STEPS)
    grown = drive.random_tree(rng, 5, (2, 3), VOCAB, True)
    finish = run.state.finish.at[4].set(STOPPED)
    run = run._replace(state=run.state._replace(finish=finish))
    for _ in range(4):
        grown = drive.relabelled(rng, grown, VOCAB)
        check(run, grown, range(5))
        count = np.append(rng.integers(1, STEPS + 2, 4), 0)
        run = round_of(run, rng.integers(0, VOCAB, (5, STEPS + 1)), count, grown)


def by_rounds(run: Drafter, rng, emitted, count, grown) -> Drafter:
    """Rounds that emit what `plain` would, a few tokens at a time."""
    left = np.array(count)
    done = np.zeros_like(left)
    while left.any():
        now = np.minimum(rng.integers(1, STEPS + 2, len(left)), left)
        at = np.minimum(done[:, None] + np.arange(STEPS + 1), emitted.shape[1] - 1)
        run = round_of(run, np.take_along_axis(emitted, at, 1), now, grown)
        left, done = left - now, done + now
    return run


@pytest.mark.parametrize(
    ("modules", "page_size"),
    [(2, 8), *(pytest.param(1, size, marks=pytest.mark.slow) for size in (16, None))],
)
def test_after_plain_decoding_predictions_are_those_of_a_head_that_was_in_every_round(
    modules, page_size
):
    """Fewer tokens than a round takes in, as many, more than are taken in at once, and none;
    strategies of other depths."""
    rng = np.random.default_rng(5)
    prompts = prompts_of(rng, 1, 2, 3, 9, 5)
    mixed = drafter(modules, prompts, page_size)
    steady = enter(drafter(modules, prompts, page_size), STEPS)
    chain = drive.random_tree(rng, 5, (1, 1), VOCAB, True)
    for count, widths in zip(
        [(3, 38, 0, 4, 5), (2, 1, 7, 0, 3), (3, 0, 6, 1, 2)], [(1, 1), (), (1, 1)], strict=True
    ):
        emitted = rng.integers(0, VOCAB, (5, 40))
        mixed = enter(plain(mixed, emitted, count), len(widths) + 1)
        steady = by_rounds(steady, rng, emitted, count, chain)
        assert (mixed.state.draft.slots.pending <= len(widths) + 2).all()
        assert not mixed.state.draft.slots.skipped.any()
        grown = drive.random_tree(rng, 5, widths, VOCAB, True)
        for _ in range(2):
            found, wanted = (propose(run, grown)[0] for run in (mixed, steady))
            for got, want in zip(found, wanted, strict=True):
                np.testing.assert_allclose(got, want, atol=1e-5)
            emitted = rng.integers(0, VOCAB, (5, STEPS + 1))
            count = rng.integers(1, len(widths) + 3, 5)
            mixed = round_of(mixed, emitted[:, : len(widths) + 2], count, grown)
            steady = round_of(steady, emitted, count, chain)
        check(mixed, grown, range(5))
        mixed = leave(mixed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "page_size"), [(2, 8), pytest.param(1, None, marks=pytest.mark.slow)]
)
def test_what_the_window_loses_in_plain_decoding_is_missing_and_nothing_else_is(
    monkeypatch, modules, page_size
):
    """Two holes, the second made by two chunks; prompts of one token, slots whose states just fit
    or just do not, slots without any."""
    monkeypatch.setattr(mtp, "WINDOW", 6)
    rng, lag, window = np.random.default_rng(6), modules - 1, 6 + modules
    run = drafter(modules, prompts_of(rng, 1, 2, 9, 4, 5, 6), page_size)
    assert run.state.draft.slots.hidden.shape[1] == window
    fits = window - lag - 1
    grown = drive.random_tree(rng, 6, (1, 2), VOCAB, True)
    gone, missing = [set() for _ in range(6)], []
    for chunks in ([(14, 15, 12, fits, fits + 1, 0)], [(3, 0, 9, 15, 2, 1), (8, 1, 9, 0, 6, 7)]):
        # The window repeats `lag` rows that came before those that are pending.
        begin = np.asarray(run.state.length - 1 - run.state.draft.slots.pending - lag)
        for count in chunks:
            run = plain(run, rng.integers(0, VOCAB, (6, 15)), count)
        for slot, length in enumerate(np.asarray(run.state.length)):
            gone[slot] |= set(range(max(begin[slot], 0), length - 1 - window))
        run = enter(run, STEPS)
        missing.append([len(lost) for lost in gone])
        assert run.state.draft.slots.skipped.tolist() == missing[-1]
        for _ in range(2):
            check(run, grown, range(6), gone)
            count = rng.integers(1, STEPS + 2, 6)
            run = round_of(run, rng.integers(0, VOCAB, (6, STEPS + 1)), count, grown)
        run = leave(run)
    assert missing[0][3:] == [0, 1, 0] and min(missing[0][:3]) > 1
    assert missing[1][1] == missing[0][1] and missing[1][2] > missing[0][2]


class Sums(OwnAttention):
    """A mixer with a recurrent state."""

    kind: ClassVar[str] = "sums"

    def empty(self, run, room):
        return Memory(None, jnp.zeros((room.slots, 4)))


def test_a_head_with_a_layer_that_keeps_recurrent_state_is_refused():
    cfg = with_last(tiny_config(VOCAB), Sums(4, 2, 8))
    with pytest.raises(ValueError, match="the last layer is sums, which keeps recurrent state"):
        MTPSource(cfg).empty(Room(2, 4, 8), STEPS)


def test_recursive_steps_of_a_mixer_that_cannot_run_again_are_refused_and_one_step_is_not():
    cfg = with_last(tiny_config(VOCAB), RunsOnce(4, 2, 8))
    rows = jnp.ones((1, 6), jnp.int32)
    states = jnp.ones((1, 6, cfg.hidden_size))

    def unroll(steps):
        def run(head):
            module = nnx.merge(head_graphdef(cfg), head)
            return module.unroll(states, [states] * steps, rows, rows)

        return jax.eval_shape(run, jax.eval_shape(lambda: init_head_params(cfg)))

    assert [x.shape for x in unroll(1)] == [states.shape]
    with pytest.raises(NotImplementedError, match="own attention .* has no method `run_again`"):
        unroll(2)
