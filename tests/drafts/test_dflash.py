"""DFlash heads against the program of their authors in numpy, which keeps no cache.

The target's states are made up, as in `test_mtp`: what the head makes of them is what is looked at.
"""

import dataclasses
import functools
import json

import drive
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_files import DFlash, written
from eagle3_files import Body
from safetensors.numpy import load_file
from test_mtp import Drafter, enter, leave, plain, prompts_of, propose, round_of
from tiny import tiny_config

from serve.cli.main import main
from specjax import SpecConfig
from specjax.checked_json import CheckpointError, UnsupportedModelError
from specjax.checkpoint.draft_files import find_draft, load_draft_files, save_draft_files
from specjax.checkpoint.huggingface import save_checkpoint
from specjax.config import Strategy
from specjax.drafts.dflash import LAYOUTS, DFlashConfig, DFlashSource
from specjax.engine.plans import make_plans
from specjax.interfaces import Room
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params

VOCAB, MAX_LEN, STEPS, WIDTH, MASK, BLOCK = 24, 48, 3, 12, 5, 6
TARGET = dense_config(VOCAB, WIDTH, 16, 8, 2, 1, 6)


class Drafting(DFlashSource):
    """With the size of the vocabulary that `drive.dense` asks for."""

    @property
    def vocab(self):
        return self.cfg.target_vocab


def source_of(
    layers=2, width=WIDTH, columns=None, inner=20, head_dim=8, windows=(), **fields
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
        qk_norm=True,
        model_type="qwen3",
        tie_embeddings=False,
        max_position=512,
    )
    windows = windows or (None,) * layers
    network = network.replace(
        layers=tuple(
            dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, window=window))
            for layer, window in zip(network.layers, windows, strict=True)
        )
    )
    fields = {"taps": (2, 5), "own_ids": columns is not None, **fields}
    return Drafting(DFlashConfig(network, WIDTH, VOCAB, mask_token=MASK, block=BLOCK, **fields))


HEADS = {
    "the authors'": source_of(taps=(2, 4, 6)),
    "its own width, embedding and tokens": source_of(
        layers=1, width=16, columns=9, own_embedding=True, own_head=True
    ),
    "a window in one of two layers": source_of(windows=(4, None)),
    "some of the target's columns": source_of(layers=1, columns=10),
}


@functools.cache
def params_of(source: Drafting) -> dict:
    """Random parameters, whose norms are not all ones, and draft tokens that are not the first."""
    rng = np.random.default_rng(3)

    def walk(rows):
        if "shape" not in dir(rows):
            return {name: walk(row) for name, row in rows.items()}
        if rows.stored.name == "d2t":
            return jnp.asarray(np.sort(rng.permutation(VOCAB)[: rows.shape[0]]), jnp.int32)
        if len(rows.shape) == 1:
            return jnp.asarray(rng.uniform(0.5, 1.5, rows.shape), jnp.float32)
        return jnp.asarray(rng.normal(size=rows.shape) / np.sqrt(rows.shape[0]), jnp.float32)

    return walk(source.rows())


def drafter(source: Drafting, prompts, page_size=None) -> Drafter:
    rng, params = np.random.default_rng(4), params_of(source)
    draws = [rng.normal(size=shape) for shape in ((VOCAB, WIDTH), (WIDTH, VOCAB))]
    target = drive.Target(*(jnp.asarray(0.7 * x, jnp.float32) for x in draws))
    states = rng.normal(size=(len(prompts), MAX_LEN, source.taps_width))
    hidden = jnp.asarray(states, jnp.float32)
    empty = drive.empty_state(source, len(prompts), MAX_LEN, STEPS, page_size)
    state = drive.place(empty, source, params, prompts, 4, target, hidden)
    return Drafter(source, params, target, hidden, state, empty.draft.slots)


# --- the authors' program -------------------------------------------------------------------------


def rms(x, scale, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def rotated(x, positions):
    """x [n heads H]: halves of a head are turned."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions)[:, None] / 5000.0 ** (np.arange(half) / half)
    angles = np.concatenate([angles, angles], -1)[:, None]
    turned = np.concatenate([-x[..., half:], x[..., :half]], -1)
    return x * np.cos(angles) + turned * np.sin(angles)


class Authors:
    """`DFlashDraftModel.forward` of z-lab's dflash/model.py, in float64, over a whole sequence."""

    def __init__(self, run: Drafter):
        self.cfg, self.head_dim = run.source.cfg, run.source.network.layers[0].mixer.head_dim
        self.windows = [layer.mixer.window for layer in run.source.network.layers]
        self.eps = run.source.network.rms_norm_eps
        self.w = jax.tree.map(lambda x: np.asarray(x, np.float64), run.params)
        self.embed = self.w.get("embed", np.asarray(run.target.embed, np.float64))
        self.lm_head = np.asarray(run.target.lm_head, np.float64)

    def heads(self, x, matrix):
        return (x @ matrix).reshape(len(x), -1, self.head_dim)

    def attention(self, w, x, target_hidden, positions, window):
        q = rms(self.heads(x, w["q"]), w["q_norm"], self.eps)
        both = np.concatenate([target_hidden, x])
        k = rms(self.heads(both, w["k"]), w["k_norm"], self.eps)
        v = self.heads(both, w["v"])
        q, k = rotated(q, positions[-len(x) :]), rotated(k, positions)
        groups = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
        scores = np.einsum("qnh,knh->nqk", q, k) * self.head_dim**-0.5  # is_causal=False, no mask
        if window is not None:  # else as in vLLM: causal, the row's own position included
            ago = positions[-len(x) :, None] - positions
            scores = np.where((ago >= 0) & (ago < window), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("nqk,knh->qnh", scores / scores.sum(-1, keepdims=True), v)
        return mixed.reshape(len(x), -1) @ w["o"]

    def drafts(self, states, root, steps, positions=None):
        """[steps V] logits; -inf where a token is not drafted.

        Args:
          states: [n taps_width] the target's states before the root.
          positions: positions of these states, where some are left out.
        """
        at = list(range(len(states))) if positions is None else list(positions)
        first = at[-1] + 1 if at else 0
        at = np.array([*at, *range(first, first + steps + 1)])
        target_hidden = rms(states @ self.w["fc"], self.w["hidden_norm"], self.eps)
        x = self.embed[[root] + [MASK] * steps]
        for number, w in sorted(self.w["layers"].items()):
            normed = rms(x, w["input_norm"], self.eps)
            x = x + self.attention(w, normed, target_hidden, at, self.windows[number])
            h = rms(x, w["post_norm"], self.eps)
            gate = h @ w["gate"]
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
        normed = rms(x, self.w["norm"], self.eps)[1:]
        ids = self.w["ids"].astype(int) if "ids" in self.w else np.arange(VOCAB)
        columns = self.w["lm_head"] if "lm_head" in self.w else self.lm_head[:, ids]
        out = np.full((steps, VOCAB), -np.inf)
        out[:, ids] = normed @ columns
        return out


def check(run: Drafter, grown, slots, gone=(range(0),) * 9):
    """What is proposed now, against the authors' program; every row of a level gets the same."""
    found, _ = propose(run, grown)
    for slot in slots:
        length = int(run.state.length[slot])
        kept = [j for j in range(length - 1) if j not in gone[slot]]
        states = np.asarray(run.hidden, np.float64)[slot, kept]
        root = int(run.state.tokens[slot, length - 1])
        want = Authors(run).drafts(states, root, len(found), kept)
        for logits, wanted in zip(found, want, strict=True):
            for row in logits[slot]:
                np.testing.assert_allclose(row, wanted, atol=2e-4)


@pytest.mark.parametrize("name", HEADS)
def test_predictions_over_rounds_and_plain_decoding_are_those_of_the_authors_program(name):
    """Chains and trees of several depths, ragged counts, prompts in pieces, one without a token
    before the root, plain decoding for longer and shorter than a round."""
    source, rng = HEADS[name], np.random.default_rng(0)
    is_chain = source.network.num_layers > 1
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
    run = enter(leave(run), 1)
    check(run, drive.random_tree(rng, 3, (), VOCAB, True), range(3))


def test_positions_that_plain_decoding_dropped_are_missing_and_no_others(monkeypatch):
    monkeypatch.setattr("specjax.drafts.file_head.WINDOW", 6)
    source, rng = HEADS["the authors'"], np.random.default_rng(1)
    run = enter(drafter(source, prompts_of(rng, 4, 9)), STEPS)
    grown = drive.random_tree(rng, 2, (1, 1), VOCAB, True)
    emitted = rng.integers(0, VOCAB, (2, 20))
    run = enter(plain(leave(run), emitted, (20, 3)), STEPS)
    skipped = np.asarray(run.state.draft.slots.skipped)
    assert skipped[0] > 0 and skipped[1] == 0
    # The state before the root was pending when plain decoding began: the oldest are dropped.
    check(run, grown, range(2), (range(2, 2 + skipped[0]), range(0)))


# --- in an engine ---------------------------------------------------------------------------------

POLICY = tiny_config(VOCAB, mtp=0, layers=2)


def for_policy() -> DFlashSource:
    source = source_of(width=POLICY.hidden_size, taps=(0, 2))
    return DFlashSource(dataclasses.replace(source.cfg, target_width=POLICY.hidden_size))


def test_a_strategy_of_more_steps_than_its_block_has_masks_is_refused():
    source, spec = for_policy(), SpecConfig("5_1_6")
    assert make_plans(POLICY, spec, source).keys() == {"5_1_6"}
    for name in ("6_1_7", "6_2_8", "1x1x1x1x1x1"):
        strategies = [Strategy.parse(name)]
        with pytest.raises(ValueError, match=f"{name}.*block_size of 6.* at most 5 tokens, got 6"):
            make_plans(POLICY, spec, source, strategies)


@pytest.mark.usefixtures("cpu_kernels")
def test_packed_layers_compute_what_unpacked_ones_do():
    """In the number format of CPU kernels, and with their attention, which sees later rows too."""
    source = source_of(width=32, own_embedding=True, own_head=True, columns=16, inner=48,
                       head_dim=16)  # fmt: skip
    run = enter(drafter(source, prompts_of(np.random.default_rng(2), 5, 9)), STEPS)
    found, _ = drive.begin(source, run.params, run.state, STEPS, 0, run.target)
    packed = source.with_network(source.network.running(products="panels", attention="cpu"))
    weights = jax.jit(packed.pack)(run.params)
    assert "qkv_proj" in weights["layers"][1] and weights["ids"].dtype == np.int32
    again, _ = drive.begin(packed, weights, run.state, STEPS, 0, run.target)
    np.testing.assert_allclose(again, found, atol=1e-4)
    assert np.isfinite(found[0, 0]).sum() == 16


def test_cost_is_what_the_memory_takes():
    source = HEADS["the authors'"]
    memory = jax.eval_shape(lambda: source.empty(Room(3, 5, 8), 4))
    took = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(part)) for part in memory]
    cost = source.cost(8)
    assert took == [5 * cost.page, 3 * cost.slot]


# --- files ----------------------------------------------------------------------------------------

BODY = Body(WIDTH, TARGET.num_layers, VOCAB)


SLIDING = ["sliding_attention", "full_attention"]
WINDOWED = {"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": 4}


def head_of(boundaries=(2, 4, 6), columns=None) -> DFlash:
    return DFlash(boundaries, MASK, BLOCK, columns=columns)


HEAD = head_of()
IDS = HEAD.config(BODY, "z-lab")["dflash_config"]


def authors_files(**changes) -> dict:
    raw = {**HEAD.config(BODY, "z-lab"), **changes}
    return {name: value for name, value in raw.items() if value is not ...}


def speculators_files(**changes) -> dict:
    raw = {**HEAD.config(BODY, "speculators"), **changes}
    return {name: value for name, value in raw.items() if value is not ...}


def tensors_of(columns=None, taps=3) -> dict:
    return head_of(range(taps), columns).tensors(BODY, np.float16)


def test_files_of_both_layouts_are_the_same_head(tmp_path):
    tensors = tensors_of()
    one = written(tmp_path / "z-lab", authors_files(), tensors)
    two = written(tmp_path / "speculators", speculators_files(), tensors)
    assert find_draft(one) is DFlashSource and find_draft(two) is DFlashSource
    source, params = load_draft_files(one, TARGET)
    assert source == DFlashSource(HEADS["the authors'"].cfg)
    other, same = load_draft_files(two, TARGET)
    assert other == dataclasses.replace(source, layout="speculators")
    jax.tree.map(np.testing.assert_array_equal, params, same)
    np.testing.assert_array_equal(params["fc"], tensors["fc.weight"].T.astype(np.float32))
    k = tensors["layers.1.self_attn.k_proj.weight"].T.astype(np.float32)
    np.testing.assert_array_equal(params["layers"][1]["k"], k)
    assert "aux_hidden_state_layer_ids [2, 4, 6], mask_token_id 5, block_size 6" in (
        source.described()
    )
    assert "2 layers of width 12, drafts all of 24 tokens, the target's" in source.described()
    assert "block_size 6" in source.suspects()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_is_read_with_every_bit_the_same(tmp_path, layout):
    columns = [3, 1, 20, 7]  # in the order of the files, which need not ascend
    raw = speculators_files(draft_vocab_size=4)
    files = written(tmp_path / "one", raw, tensors_of(columns))
    source, params = load_draft_files(files, TARGET)
    assert params["ids"].tolist() == sorted(columns)
    save_draft_files(tmp_path / "two", source, params, layout, "float16")
    again, same = load_draft_files(tmp_path / "two", TARGET)
    assert again == dataclasses.replace(source, layout=layout)
    jax.tree.map(np.testing.assert_array_equal, params, same)


def test_files_are_converted_to_the_other_layout_and_back(tmp_path, capsys):
    files, policy = written(tmp_path / "one", authors_files(), tensors_of()), tmp_path / "policy"
    save_checkpoint(policy, TARGET, init_params(TARGET))
    assert main(["convert", str(files), str(tmp_path / "two"), "--like", str(policy)]) == 0
    raw = json.loads((tmp_path / "two" / "config.json").read_text())
    assert raw["aux_hidden_state_layer_ids"] == [2, 4, 6]
    back = ["convert", str(tmp_path / "two"), str(tmp_path / "back"), "--like", str(policy)]
    assert main([*back, "--to", "safeailab"]) == 1
    assert "the layouts speculators and z-lab, expected one of them" in capsys.readouterr().err
    assert main([*back, "--to", "z-lab"]) == 0
    for name, array in load_file(tmp_path / "back" / "model.safetensors").items():
        np.testing.assert_array_equal(array, tensors_of()[name])


def read(raw, tensors=None, overrides=None, target=TARGET):
    tensors = tensors_of() if tensors is None else tensors
    assert DFlashSource.recognises(raw, tensors)
    return DFlashSource.read("config.json", raw, tensors, target, overrides).cfg


def test_layers_that_files_do_not_name_are_those_of_the_authors_program():
    ids = {"mask_token_id": MASK, "block_size": 4}
    found = read(authors_files(dflash_config=ids, block_size=...), tensors_of(taps=2))
    assert found.taps == (2, 6) and found.block == 4  # outputs of layers 1 and 8 - 3
    by_hand = read(authors_files(), overrides={"aux_hidden_state_layer_ids": [8, 1, 0]})
    assert by_hand.taps == (8, 1, 0)


@pytest.mark.parametrize(
    ("raw", "error", "message"),
    [
        (authors_files(layer_types=..., use_sliding_window=True),
         UnsupportedModelError, "use_sliding_window true without layer_types"),
        (authors_files(layer_types=SLIDING), CheckpointError, "for no sliding_window is in use"),
        (authors_files(**WINDOWED, dflash_config={**IDS, "causal": False}),
         UnsupportedModelError, "causal false"),
        (speculators_files(transformer_layer_config={**HEAD.layer_config(BODY), **WINDOWED},
                           sliding_window_non_causal=True),
         UnsupportedModelError, "sliding_window_non_causal true"),
        (speculators_files(transformer_layer_config={**HEAD.layer_config(BODY), **WINDOWED,
                                                     "sliding_window_non_causal": True}),
         UnsupportedModelError, "sliding_window_non_causal true"),
        (authors_files(**WINDOWED, is_causal=False), UnsupportedModelError, "is_causal false"),
        (authors_files(**WINDOWED, causal=False), UnsupportedModelError, ": causal false"),
        (authors_files(**WINDOWED, dflash_config={**IDS, "is_causal": False}),
         UnsupportedModelError, "is_causal false"),
        (authors_files(layer_types=["linear_attention", "full_attention"]),
         UnsupportedModelError, "layer_types linear_attention"),
        (authors_files(is_causal=True), UnsupportedModelError, "is_causal true"),
        (authors_files(is_neox_style=False), UnsupportedModelError, "is_neox_style false"),
        (authors_files(attention_bias=True), UnsupportedModelError, "attention_bias true"),
        (authors_files(model_type="llama"), UnsupportedModelError, "layers of model_type llama"),
        (authors_files(logit_scale=0.5), UnsupportedModelError, "logit_scale 0.5"),
        (authors_files(architectures=["DFlash2DraftModel"]), UnsupportedModelError, "DFlash2Draft"),
        (speculators_files(projector_type="domino"), UnsupportedModelError, "_type domino"),
        (speculators_files(sample_from_anchor=True), UnsupportedModelError, "sample_from_anchor"),
        (speculators_files(speculators_model_type="dflash2"), UnsupportedModelError, "dflash2"),
        (speculators_files(mask_token_id=...), CheckpointError, "lacks the key 'mask_token_id'"),
        (speculators_files(mask_token_id=VOCAB), CheckpointError, "to 23, got 24"),
        (speculators_files(block_size=1), CheckpointError, "block_size: expected an integer of at"),
        (authors_files(block_size=...), CheckpointError, "lacks the key 'block_size'"),
        (authors_files(num_target_layers=9), CheckpointError, "num_target_layers 9, expected 8"),
        (authors_files(vocab_size=23), CheckpointError, "vocab_size 23, expected 24"),
        (speculators_files(aux_hidden_state_layer_ids=...), CheckpointError, "a list of numbers"),
        (speculators_files(aux_hidden_state_layer_ids=[2, 4, 9]), CheckpointError, "from 0 to 8"),
        (speculators_files(aux_hidden_state_layer_ids=[4, 2, 6]), CheckpointError, "ascending"),
        (speculators_files(aux_hidden_state_layer_ids=[2, 6]), CheckpointError,
         r"fc.weight, expected \[12, 24\], got \[12, 36\]"),
        (authors_files(dflash_config={"mask_token_id": 5, "target_layer_ids": [1, 3, 7]}),
         CheckpointError, "output of the target's last layer 7"),
        (speculators_files(draft_vocab_size=9), CheckpointError, "missing: d2t"),
    ],
)  # fmt: skip
def test_what_is_not_this_head_of_this_target_is_refused(raw, error, message):
    with pytest.raises(error, match=message):
        read(raw)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_are_read_and_written(layout):
    source = DFlashSource(read(authors_files(**WINDOWED)), layout)
    assert [layer.mixer.window for layer in source.network.layers] == [4, None]
    assert read(source.saved(layout, "float32")[0]) == source.cfg
    raw = source.saved(layout, "float32")[0]
    assert DFlashSource.read("config.json", raw, tensors_of(), TARGET).described() == (
        source.described()
    )
    said = "block_size 6, sliding_window 4 in the layers [0], causal true; 2 layers"
    assert said in source.described()


def test_a_window_that_files_do_not_call_causal_is_so_and_a_line_says_it():
    body = {**HEAD.layer_config(BODY), **WINDOWED}

    def described(**given) -> str:
        raw = speculators_files(transformer_layer_config=body, **given)
        return DFlashSource.read("config.json", raw, tensors_of(), TARGET).described()

    unsaid = "in the layers [0], causal true (the file does not say it; vLLM then takes false); 2"
    for absent in (..., None):
        assert unsaid in described(sliding_window_non_causal=absent)
    assert "in the layers [0], causal true; 2" in described()
    whole = speculators_files(sliding_window_non_causal=..., is_causal=False)  # no layer slides
    assert "causal" not in DFlashSource.read("c", whole, tensors_of(), TARGET).described()


def test_tensors_and_settings_that_it_does_not_have_are_refused():
    more = {**tensors_of(), "selector.weight": np.zeros((2, 2), np.float16)}
    with pytest.raises(CheckpointError, match="this DFlash head: unexpected: selector.weight"):
        read(authors_files(), more)
    kept = {**tensors_of(), "verifier_norm.weight": np.zeros(WIDTH, np.float16)}
    assert read(speculators_files(), kept) == read(speculators_files())
    wider = dense_config(VOCAB, 2 * WIDTH, 16, 8, 2, 1, 6)
    with pytest.raises(CheckpointError, match="whose width is 24, and the head's is 12"):
        read(authors_files(), target=wider)
    with pytest.raises(ValueError, match="no setting 'fc_norm'; expected aux_hidden_state"):
        read(authors_files(), overrides={"fc_norm": "each"})
    with pytest.raises(ValueError, match="must be a list of boundaries; got 'post_norm'"):
        read(authors_files(), overrides={"aux_hidden_state_layer_ids": "post_norm"})


def test_it_is_not_trained():
    with pytest.raises(NotImplementedError, match="DFlashSource cannot be trained: it has no"):
        for_policy().init(0)
