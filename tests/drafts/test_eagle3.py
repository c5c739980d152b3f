"""EAGLE-3 heads against their equations in numpy, which keep no cache and run every row anew.

The target's states are made up, as in `test_mtp`: what the head makes of them is what is looked at.
"""

import dataclasses
import functools

import drafter
import drive
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafter import VOCAB, WIDTH
from tiers import slow_but
from tiny import sharpened, tiny_config

from specjax.drafts.eagle3 import Eagle3Source, new_config
from specjax.drafts.mtp import copied_layer, new_head
from specjax.models.transformer import init_params
from specjax.parallel import sharding
from specjax.parallel.sharding import MeshConfig, make_mesh, rollout_mesh


def source_of(
    layers=1, width=WIDTH, qk_norm=False, columns=None, windows=None, biases=False, **fields
) -> Eagle3Source:
    network = drafter.network_of(layers, width, columns, qk_norm, biases, windows)
    base = new_config(tiny_config(VOCAB, mtp=0))
    changes = {"network": network, "target_width": WIDTH, "own_ids": columns is not None}
    return Eagle3Source(dataclasses.replace(base, **changes, **fields))


# Every switch both ways, one layer and two, both backbones, all and some tokens, windows that are
# shorter than the texts, in chains and trees, and biases.
HEADS = {
    "its own width, embedding and tokens": source_of(
        width=16, columns=10, taps=(1, 3, 4), own_embedding=True, norm_before_residual=True,
        fc_norm="joined", windows=(5,),
    ),
    "two layers, norms of each state": source_of(
        layers=2, qk_norm=True, taps=(2, 4), fc_norm="each", norm_output=True, own_head=False,
        windows=(4, None), biases=True,
    ),
    "final state, some of the target's columns": source_of(
        qk_norm=True, columns=9, taps=("post_norm",), own_head=False
    ),
    "as in the paper": source_of(taps=(1, 2, 3), columns=24),
    "all tokens at once": source_of(taps=(1, 3), fc_norm="joined", mask_token=5, columns=11),
}  # fmt: skip


@functools.cache
def params_of(source: Eagle3Source) -> dict:
    """Parameters whose norms are not all ones, and draft tokens that are not the first ones."""
    rng = np.random.default_rng(3)

    def changed(path, x):
        names = "/".join(str(part.key) for part in path)
        if names == "ids":
            return jnp.asarray(np.sort(rng.permutation(VOCAB)[: len(x)]), jnp.int32)
        if "norm" in names or "bias" in names:
            return x + jnp.asarray(rng.uniform(-0.5, 0.5, x.shape), x.dtype)
        return x * (35.0 if names in ("embed", "lm_head") else 10.0)

    return jax.tree_util.tree_map_with_path(changed, source.init(1))


# --- the equations --------------------------------------------------------------------------------


class Plain:
    """A head by its equations, in float64, over whole sequences."""

    def __init__(self, source: Eagle3Source, params, target: drive.Target):
        self.cfg, self.eps = source.cfg, source.cfg.network.rms_norm_eps
        self.w = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        self.embed = self.w.get("embed", np.asarray(target.embed, np.float64))
        self.lm_head = np.asarray(target.lm_head, np.float64)

    def g(self, states):
        """[n D] of the target's states [n taps_width]."""
        count = len(self.cfg.taps)
        if self.cfg.fc_norm == "joined":
            states = drafter.rms(states, self.w["input_norm"], self.eps)
        if self.cfg.fc_norm == "each":
            parts = np.split(states, count, axis=-1)
            normed = [drafter.rms(x, self.w["fc_norm"][i], self.eps) for i, x in enumerate(parts)]
            states = np.concatenate(normed, -1)
        return states if self.cfg.taps == ("post_norm",) else states @ self.w["fc"]

    def rows(self, g, tokens, positions):
        """States for the language-model head, and the next g, of rows in order."""
        x = g
        for number, w in sorted(self.w["layers"].items()):
            into, residual = drafter.rms(x, w["input_norm"], self.eps), x
            if number == 0:
                normed = drafter.rms(x, w["hidden_norm"], self.eps)
                residual = normed if self.cfg.norm_before_residual else x
                e = drafter.rms(self.embed[np.asarray(tokens)], w["input_norm"], self.eps)
                into = np.concatenate([e, normed], -1)
            window, at = self.cfg.network.layers[number].mixer.window, np.asarray(positions)
            sees = np.tri(len(x), dtype=bool)
            if window is not None:  # so many positions, its own included
                sees &= at[:, None] - at < window
            x = drafter.after_mlp(
                w, residual + drafter.attention(w, into, into, at, sees, self.eps), self.eps
            )
        normed = drafter.rms(x, self.w["norm"], self.eps)
        return normed, normed if self.cfg.norm_output else x

    def drafts(self, states, tokens, path=()):
        """States for the language-model head below the last token and below each one of a path.

        Args:
          states: [n taps_width] the target's states of the first n positions.
          tokens: n + 1 tokens, the last of which is the root.
        """
        g, following, found = self.g(np.asarray(states, np.float64)), list(tokens[1:]), []
        at = list(range(len(g)))
        for token in (*path, None):
            normed, recycled = self.rows(g, following, at)
            found.append(normed[-1])
            if self.cfg.mask_token is not None:
                recycled, token = self.g(self.w["mask_hidden"][0]), self.cfg.mask_token
            g, following = np.concatenate([g, recycled[-1:]]), [*following, token]
            at.append(at[-1] + 1)
        return np.array(found)

    def logits(self, normed):
        return drafter.token_logits(self.w, self.lm_head, normed)


def check(run: drafter.Drafter, grown):
    """What is proposed now, against the equations, node by node."""
    found, _ = drafter.propose(run, grown)
    reference = Plain(run.source, run.params, run.target)
    for slot in range(3):
        length = int(run.state.length[slot])
        if length < 2:
            continue  # nothing precedes the root
        tokens = np.asarray(run.state.tokens)[slot, :length].tolist()
        states = np.asarray(run.hidden)[slot, : length - 1]
        want = reference.logits(reference.drafts(states, tokens))
        np.testing.assert_allclose(found[0][slot, 0], want[0], atol=2e-4)
        for level, logits in enumerate(found[1:]):
            for path, got in zip(drive.paths_of(grown, level)[slot], logits[slot], strict=True):
                want = reference.logits(reference.drafts(states, tokens, path.tolist()))
                np.testing.assert_allclose(got, want[-1], atol=2e-4)


@pytest.mark.parametrize("name", slow_but(HEADS, *list(HEADS)[:2]))
def test_predictions_over_rounds_and_plain_decoding_are_those_of_the_equations(name):
    source = HEADS[name]
    drafter.over_rounds(source, params_of(source), check, source.network.num_layers > 1)


@pytest.mark.parametrize("name", HEADS)
def test_training_sees_what_drafting_sees_and_nothing_of_other_segments(name):
    """Two sequences and padding in one row; the drafted path is what the sequence goes on with."""
    source, lengths, steps = HEADS[name], (9, 7), 3
    params, rng = params_of(source), np.random.default_rng(6)
    target, hidden = drafter.made_up(1, WIDTH, source.taps_width)
    count = sum(lengths) + 2
    texts = [rng.integers(0, VOCAB, n) for n in lengths]
    tokens = np.concatenate([*texts, [0, 0]])
    segments = np.repeat([1, 2, 0], [*lengths, 2])
    positions = np.concatenate([*map(np.arange, lengths), [0, 0]])
    after = np.arange(count)[None] + 1 + np.arange(steps)[:, None]
    following = np.where(after < count, tokens[np.minimum(after, count - 1)], 0)
    policy = {"embed": target.embed, "lm_head": target.lm_head}
    states = np.asarray(hidden)[:, :count]

    def unroll(params, policy):
        rows = [jnp.asarray(row)[None] for row in following]
        return source.unroll(params, policy, states, rows, positions[None], segments[None])

    found = jax.jit(unroll)(params, policy)
    reference, first = Plain(source, params, target), 0
    for text in texts:
        own = states[0, first : first + len(text)]
        for row in range(len(text) - 2):
            path = text[row + 2 : row + 1 + steps]
            want = reference.drafts(own[: row + 1], text[: row + 2], path.tolist())
            for step in range(min(steps, len(text) - 1 - row)):
                got = found[step][0, first + row]
                np.testing.assert_allclose(got, want[step], atol=2e-4)
        first += len(text)


# --- files, and new heads -------------------------------------------------------------------------


def test_offsets_become_ascending_ids_with_their_columns_and_back():
    source = HEADS["its own width, embedding and tokens"]
    ids = np.array([3, 1, 20, 7, 0, 8, 9, 15, 22, 2])
    params = {**params_of(source), "ids": ids - np.arange(10)}
    loaded = source.loaded(params)
    assert loaded["ids"].tolist() == sorted(ids) and loaded["ids"].dtype == np.int32
    for token, column in zip(ids, params["lm_head"].T, strict=True):
        place = loaded["ids"].tolist().index(token)
        np.testing.assert_array_equal(loaded["lm_head"][:, place], column)
    raw, writer = source.saved("float32")
    stored = writer.stored(loaded)
    assert stored.keys() == writer.rows().keys() and raw["draft_vocab_size"] == 10
    assert np.flatnonzero(stored["t2d"]).tolist() == sorted(ids)
    again = source.loaded(stored)
    np.testing.assert_array_equal(again["ids"], loaded["ids"])
    np.testing.assert_array_equal(again["lm_head"], loaded["lm_head"])


def test_a_new_head_starts_from_its_target():
    target = tiny_config(VOCAB, mtp=0, layers=5, tied=True)
    policy = sharpened(init_params(target, 0), 10.0, 0.7)
    source, params = Eagle3Source.new(target, [9, 2, 17], policy)
    assert source.cfg.taps == (2,) and params["ids"].tolist() == [2, 9, 17]
    np.testing.assert_array_equal(params["lm_head"], policy["embed"][params["ids"]].T)
    np.testing.assert_array_equal(params["norm"], policy["norm"])
    fresh = source.init(0)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, fresh)
    jax.tree.map(lambda array: array.delete(), params)  # as a trainer does that donates them
    assert not any(array.is_deleted() for array in jax.tree.leaves(policy))
    deeper = new_config(tiny_config(VOCAB, mtp=0, layers=12))
    assert deeper.taps == (2, 6, 9) and not deeper.own_ids


def test_an_mtp_head_starts_from_the_last_layer_of_its_target():
    target = tiny_config(VOCAB, mtp=2, layers=3)
    policy = sharpened(init_params(target, 0), 10.0, 0.7)
    head, fresh = new_head(target, policy), new_head(target)
    assert jax.tree.map(jnp.shape, head) == jax.tree.map(jnp.shape, fresh)
    for module in head["blocks"].values():
        assert copied_layer(target, policy).keys() == module["layer"].keys()
        for name, array in module["layer"].items():
            np.testing.assert_array_equal(array, policy["layers"][name][-1])


# --- on several devices ---------------------------------------------------------------------------

# The first has an embedding, tokens and columns of its own, the other has none.
FIRST, OTHER = list(HEADS)[:2]
TARGET_AXES = {"embed": ("vocab", "embed"), "lm_head": ("embed", "vocab")}


def split(mesh, tree, axes):
    return jax.device_put(tree, sharding.param_shardings(mesh, tree, axes))


def parts_of(array) -> int:
    return array.size // array.addressable_shards[0].data.size


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("name", [FIRST, pytest.param(OTHER, marks=pytest.mark.slow)])
def test_a_round_on_a_mesh_proposes_what_it_does_on_one_device(name):
    """On the mesh that rollouts have after training on fsdp=2 and tp=2."""
    source, rng = HEADS[name], np.random.default_rng(0)
    mesh = rollout_mesh(make_mesh(MeshConfig(fsdp=2, tp=2)))
    run = drafter.enter(
        drafter.start(source, params_of(source), drafter.prompts_of(rng, 3, 9)), drafter.STEPS
    )
    grown = drive.random_tree(rng, 2, (2, 3), VOCAB, True)
    whole, _ = drafter.propose(run, grown)
    several = run._replace(
        params=split(mesh, run.params, source.axes()),
        target=split(mesh, run.target, TARGET_AXES),
        state=jax.device_put(run.state, sharding.state_shardings(mesh, run.state)),
    )
    assert parts_of(several.params["fc"]) == parts_of(several.params["layers"][0]["q"]) == 2
    with jax.set_mesh(mesh):
        parts, _ = drafter.propose(several, grown)
    for got, want in zip(parts, whole, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
