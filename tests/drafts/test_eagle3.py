"""EAGLE-3 heads against their equations in numpy, which keep no cache and run every row anew.

The target's states are made up, as in `test_mtp`: what the head makes of them is what is looked at.
"""

import dataclasses
import functools

import drive
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_mtp import Drafter, enter, leave, plain, prompts_of, propose, round_of
from tiny import sharpened, tiny_config

from specjax.checked_json import CheckpointError
from specjax.decode.tree import chain_bits
from specjax.drafts.eagle3 import Eagle3Source, new_config
from specjax.drafts.eagle3_config import tensor_shapes
from specjax.drafts.mtp import last_layer, new_head
from specjax.interfaces import Room, Where
from specjax.kernels import dispatch
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params
from specjax.weights.panels import Panels

VOCAB, MAX_LEN, STEPS, TARGET_WIDTH = 24, 48, 3, 12


class Drafting(Eagle3Source):
    """With the size of the vocabulary that `drive.dense` asks for."""

    @property
    def vocab(self):
        return self.cfg.target_vocab


def source_of(
    layers=1,
    width=TARGET_WIDTH,
    qk_norm=False,
    columns=None,
    inner=20,
    head_dim=8,
    windows=None,
    biases=False,
    **fields,
) -> Drafting:
    network = dense_config(
        vocab_size=columns or VOCAB,
        hidden_size=width,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        rope_theta=5000.0,
        qk_norm=qk_norm,
        qkv_bias=biases,
        o_bias=biases,
        model_type="qwen3" if qk_norm else "llama",
        tie_embeddings=False,
    )
    if windows is not None:
        mixers = [dataclasses.replace(network.layers[0].mixer, window=each) for each in windows]
        layers = tuple(dataclasses.replace(network.layers[0], mixer=mixer) for mixer in mixers)
        network = network.replace(layers=layers)
    base = new_config(tiny_config(VOCAB, mtp=0))
    changes = {"network": network, "target_width": TARGET_WIDTH, "own_ids": columns is not None}
    return Drafting(dataclasses.replace(base, **changes, **fields))


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
def params_of(source: Drafting) -> dict:
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


def made_up(source: Drafting, batch: int) -> tuple[drive.Target, jax.Array]:
    """A target, and its states [batch MAX_LEN taps_width]."""
    rng = np.random.default_rng(4)
    draws = [rng.normal(size=shape) for shape in ((VOCAB, TARGET_WIDTH), (TARGET_WIDTH, VOCAB))]
    target = drive.Target(*(jnp.asarray(0.7 * x, jnp.float32) for x in draws))
    states = rng.normal(size=(batch, MAX_LEN, source.taps_width))
    return target, jnp.asarray(states, jnp.float32)


def drafter(source: Drafting, prompts, page_size=None) -> Drafter:
    params = params_of(source)
    target, hidden = made_up(source, len(prompts))
    empty = drive.empty_state(source, len(prompts), MAX_LEN, STEPS, page_size)
    state = drive.place(empty, source, params, prompts, 4, target, hidden)
    return Drafter(source, params, target, hidden, state, empty.draft.slots)


# --- the equations --------------------------------------------------------------------------------


def rms(x, scale, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


class Plain:
    """A head by its equations, in float64, over whole sequences."""

    def __init__(self, source: Drafting, params, target: drive.Target):
        self.cfg, self.eps = source.cfg, source.cfg.network.rms_norm_eps
        self.w = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        self.embed = self.w.get("embed", np.asarray(target.embed, np.float64))
        self.lm_head = np.asarray(target.lm_head, np.float64)

    def g(self, states):
        """[n D] of the target's states [n taps_width]."""
        count = len(self.cfg.taps)
        if self.cfg.fc_norm == "joined":
            states = rms(states, self.w["input_norm"], self.eps)
        if self.cfg.fc_norm == "each":
            parts = np.split(states, count, axis=-1)
            normed = [rms(x, self.w["fc_norm"][i], self.eps) for i, x in enumerate(parts)]
            states = np.concatenate(normed, -1)
        return states if self.cfg.taps == ("post_norm",) else states @ self.w["fc"]

    def attention(self, w, x, positions, window):
        heads = []
        for name in "qkv":
            y = (x @ w[name] + w.get(f"{name}_bias", 0)).reshape(len(x), -1, 8)
            if f"{name}_norm" in w:
                y = rms(y, w[f"{name}_norm"], self.eps)
            if name != "v":
                angles = np.asarray(positions)[:, None] / 5000.0 ** (np.arange(4) / 4)
                cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
                a, b = y[..., :4], y[..., 4:]
                y = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
            heads.append(y)
        q, k, v = heads
        k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
        scores = np.einsum("qnh,knh->nqk", q, k) / np.sqrt(8)
        at = np.asarray(positions)
        sees = np.tri(len(x), dtype=bool)
        if window is not None:  # so many positions, its own included
            sees &= at[:, None] - at[None] < window
        scores = np.where(sees, scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("nqk,knh->qnh", scores / scores.sum(-1, keepdims=True), v)
        return mixed.reshape(len(x), -1) @ w["o"] + w.get("o_bias", 0)

    def rows(self, g, tokens, positions):
        """States for the language-model head, and the next g, of rows in order."""
        x = g
        for number, w in sorted(self.w["layers"].items()):
            into, residual = rms(x, w["input_norm"], self.eps), x
            if number == 0:
                normed = rms(x, w["hidden_norm"], self.eps)
                residual = normed if self.cfg.norm_before_residual else x
                e = rms(self.embed[np.asarray(tokens)], w["input_norm"], self.eps)
                into = np.concatenate([e, normed], -1)
            window = self.cfg.network.layers[number].mixer.window
            x = residual + self.attention(w, into, positions, window)
            h = rms(x, w["post_norm"], self.eps)
            gate = h @ w["gate"]
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
        normed = rms(x, self.w["norm"], self.eps)
        return normed, normed if self.cfg.norm_output else x

    def drafts(self, states, tokens, path=(), positions=None):
        """States for the language-model head below the last token and below each one of a path.

        Args:
          states: [n taps_width] the target's states of the first n positions.
          tokens: n + 1 tokens, the last of which is the root.
          positions: positions of the n states where some are left out.
        """
        g, following, found = self.g(np.asarray(states, np.float64)), list(tokens[1:]), []
        at = list(range(len(g))) if positions is None else list(positions)
        for token in (*path, None):
            normed, recycled = self.rows(g, following, at)
            found.append(normed[-1])
            if self.cfg.mask_token is not None:
                recycled, token = self.g(self.w["mask_hidden"][0]), self.cfg.mask_token
            g, following = np.concatenate([g, recycled[-1:]]), [*following, token]
            at.append(at[-1] + 1)
        return np.array(found)

    def logits(self, normed):
        """[.. V] with -inf where a token is not drafted."""
        if "lm_head" in self.w:
            columns = normed @ self.w["lm_head"]
        else:
            columns = normed @ self.lm_head
            columns = columns[..., self.w["ids"].astype(int)] if "ids" in self.w else columns
        ids = self.w["ids"].astype(int) if "ids" in self.w else np.arange(VOCAB)
        out = np.full((*normed.shape[:-1], VOCAB), -np.inf)
        out[..., ids] = columns
        return out


def check(run: Drafter, grown, slots):
    """What is proposed now, against the equations, node by node."""
    found, _ = propose(run, grown)
    reference = Plain(run.source, run.params, run.target)
    for slot in slots:
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


@pytest.mark.parametrize("name", HEADS)
def test_predictions_over_rounds_and_plain_decoding_are_those_of_the_equations(name):
    """Trees and chains, ragged counts, prompts in pieces, plain decoding for longer and shorter
    than a round."""
    source, rng = HEADS[name], np.random.default_rng(0)
    is_chain = source.cfg.network.num_layers > 1
    run = drafter(source, prompts_of(rng, 1, 3, 9), None if is_chain else 8)
    grown = drive.random_tree(rng, 3, (1, 1) if is_chain else (2, 3), VOCAB, True)
    run = enter(run, STEPS)
    for chunk in range(2):
        for _ in range(2):
            grown = drive.relabelled(rng, grown, VOCAB)
            check(run, grown, range(3))
            count = rng.integers(1, STEPS + 2, 3)
            run = round_of(run, rng.integers(0, VOCAB, (3, STEPS + 1)), count, grown)
        if chunk == 0:
            emitted = rng.integers(0, VOCAB, (3, 12))
            run = enter(plain(leave(run), emitted, (2, 11, 0)), STEPS)


@pytest.mark.parametrize("name", HEADS)
def test_training_sees_what_drafting_sees_and_nothing_of_other_segments(name):
    """Two sequences and padding in one row; the drafted path is what the sequence goes on with."""
    source, lengths, steps = HEADS[name], (9, 7), 3
    params, rng = params_of(source), np.random.default_rng(6)
    target, hidden = made_up(source, 1)
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


# --- in decoding ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("cpu_kernels")
def test_packed_layers_compute_what_unpacked_ones_do():
    """In the number format of CPU kernels, whose whole-layer kernel has no such first layer."""
    source = source_of(
        layers=2, width=32, own_embedding=True, qk_norm=True, columns=16, inner=48, head_dim=16
    )
    params = params_of(source)
    rng = np.random.default_rng(8)
    states, embedded = (
        jnp.asarray(rng.normal(size=(2, 5, width)), jnp.float32)
        for width in (source.taps_width, 32)
    )
    where = Where(
        "tree", jnp.arange(5)[None] + jnp.zeros((2, 1), int), prefix=jnp.zeros(2, int),
        visible=chain_bits(5),
    )  # fmt: skip

    def run(source, params):
        head = source.bound(params)
        pages = source.module_pages(Room(2, 2, 8))
        normed, recycled, scratch = head.decode(head.fused(states), embedded, where, pages)
        return source.own_proposal(None, params, normed).scores, recycled, scratch.pages

    packed = source.with_network(source.network.running(products="panels", attention="cpu"))
    assert dispatch.runs_layers(packed.network)
    weights = jax.jit(packed.pack)(params)
    assert "qkv_proj" in weights["layers"][0] and "gate_up" in weights["layers"][1]
    assert isinstance(weights["layers"][0]["qkv_proj"], Panels)
    assert weights["ids"].dtype == np.int32
    want, got = (
        jax.jit(functools.partial(run, which))(w)
        for which, w in [(source, params), (packed, weights)]
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), got, want)


@pytest.mark.parametrize("name", list(HEADS)[:3])
def test_a_part_of_the_vocabulary_is_drafted_as_the_same_columns_of_all(name):
    source = HEADS[name]
    params, (target, _) = params_of(source), made_up(source, 1)
    ids = np.array([1, 4, 5, 9, 14, 20, 23])
    policy = {"embed": target.embed, "lm_head": target.lm_head}
    entry = jax.jit(source.columns)(params, policy, ids)
    normed = jnp.asarray(np.random.default_rng(2).normal(size=(1, 2, source.network.hidden_size)))
    full = drive.dense(source, source.own_proposal(target, params, normed))
    some = drive.dense(source, source._proposal(target, {**params, "vocabulary": entry}, normed))
    assert (np.diff(entry["ids"]) >= 0).all()
    kept = np.isin(np.arange(VOCAB), ids) & np.isfinite(full[0, 0])
    assert 0 < kept.sum() < len(ids) or not source.cfg.own_ids
    np.testing.assert_allclose(some, np.where(kept, full, -np.inf), atol=1e-5)


# --- files, and new heads -------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
@pytest.mark.parametrize("name", HEADS)
def test_rows_name_every_tensor_of_the_files_with_its_shape(name, layout):
    source = dataclasses.replace(HEADS[name], layout=layout)
    shapes = jax.eval_shape(lambda: source.init(0))
    rows = source.rows()
    found = {}

    def walk(rows, arrays):
        assert rows.keys() == arrays.keys()
        for key, row in rows.items():
            if isinstance(row, dict):
                walk(row, arrays[key])
                continue
            assert row.shape == arrays[key].shape == tuple(arrays[key].shape)
            shape = row.shape[::-1] if row.stored.transpose else row.shape
            found[row.stored.name] = shape

    walk(rows, shapes)
    assert found.pop("d2t", None) == ((source.cfg.network.vocab_size,) if "ids" in rows else None)
    assert found == tensor_shapes(source.cfg, layout)


def test_offsets_become_ascending_ids_with_their_columns_and_back():
    source = HEADS["its own width, embedding and tokens"]
    ids = np.array([3, 1, 20, 7, 0, 8, 9, 15, 22, 2])
    params = {**params_of(source), "ids": ids - np.arange(10)}
    loaded = source.loaded(params)
    assert loaded["ids"].tolist() == sorted(ids) and loaded["ids"].dtype == np.int32
    for token, column in zip(ids, params["lm_head"].T, strict=True):
        place = loaded["ids"].tolist().index(token)
        np.testing.assert_array_equal(loaded["lm_head"][:, place], column)
    raw, writer = source.saved("speculators", "float32")
    stored = writer.stored(loaded)
    assert stored.keys() == writer.rows().keys() and raw["draft_vocab_size"] == 10
    assert np.flatnonzero(stored["t2d"]).tolist() == sorted(ids)
    again = source.loaded(stored)
    np.testing.assert_array_equal(again["ids"], loaded["ids"])
    np.testing.assert_array_equal(again["lm_head"], loaded["lm_head"])


@pytest.mark.parametrize(
    ("name", "layout"),
    [("all tokens at once", "speculators"), ("its own width, embedding and tokens", "safeailab")],
)
def test_what_is_written_is_read_as_the_same_head(name, layout):
    source = Eagle3Source(HEADS[name].cfg, layout)
    raw, writer = source.saved(layout, "float32")
    shapes = tensor_shapes(source.cfg, layout)
    tensors = {n: np.zeros(shape, np.float32) for n, shape in shapes.items()}
    stored = writer.stored(params_of(HEADS[name]))
    tensors |= {"d2t": stored["ids"], "t2d": stored["t2d"]}
    target = tiny_config(VOCAB, mtp=0, layers=5).replace(hidden_size=TARGET_WIDTH)
    assert Eagle3Source.recognises(raw, tensors)
    assert Eagle3Source.read("config.json", raw, tensors, target) == source
    if source.cfg.mask_token is not None:
        wrong = {None: "lacks the key 'mask_token_id'", VOCAB: "from 0 to 23, got 24"}
        for token, message in wrong.items():
            changed = {**raw, "mask_token_id": token}
            with pytest.raises(CheckpointError, match=message):
                Eagle3Source.read("config.json", changed, tensors, target)


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
    with pytest.raises(ValueError, match="different ids from 0 to 23, got 2 ids from 5 to 24"):
        Eagle3Source.new(target, [5, 24])


def test_an_mtp_head_starts_from_the_last_layer_of_its_target():
    target = tiny_config(VOCAB, mtp=2, layers=3)
    policy = sharpened(init_params(target, 0), 10.0, 0.7)
    head, fresh = new_head(target, policy), new_head(target)
    assert jax.tree.map(jnp.shape, head) == jax.tree.map(jnp.shape, fresh)
    for module in head["blocks"].values():
        assert last_layer(target, policy).keys() == module["layer"].keys()
        for name, array in module["layer"].items():
            np.testing.assert_array_equal(array, policy["layers"][name][-1])


def test_cost_is_what_the_memory_takes():
    source = HEADS["two layers, norms of each state"]
    memory = jax.eval_shape(lambda: source.empty(Room(3, 5, 8), 4))
    took = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(part)) for part in memory]
    cost = source.cost(8)
    assert took == [5 * cost.page, 3 * cost.slot]


def test_a_head_is_described_by_all_that_may_be_wrong_with_it():
    line = HEADS["two layers, norms of each state"].described()
    assert "aux_hidden_state_layer_ids [2, 4], norm_before_residual false, fc_norm each" in line
    assert "norm_output true, backbone qwen3, sliding_window 4 in the layers [0]; 2 layers" in line
    assert "post_norm" in HEADS["final state, some of the target's columns"].suspects()


def test_a_head_of_another_width_cannot_use_the_targets_matrices():
    with pytest.raises(ValueError, match="target's language-model head must have .* 12, got 16"):
        source_of(width=16, own_embedding=True, own_head=False, taps=(1,))
