"""DFlash heads against the program of their authors in numpy, which keeps no cache.

The target's states are made up, as in `test_mtp`: what the head makes of them is what is looked at.
"""

import functools

import drafter
import drive
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_files import DFlash, written
from drafter import VOCAB, WIDTH
from eagle3_files import Body
from tiers import slow_but
from tiny import tiny_config

from specjax import SpecConfig
from specjax.checked_json import CheckpointError, UnsupportedModelError
from specjax.checkpoint.draft_files import find_draft, load_draft_files, save_draft_files
from specjax.config import Strategy
from specjax.drafts.dflash import DFlashConfig, DFlashSource
from specjax.engine.programs import make_plans
from specjax.models.families.dense import dense_config

MASK, BLOCK = 5, 6
TARGET = dense_config(VOCAB, WIDTH, 16, 8, 2, 1, 6)


def source_of(layers=2, width=WIDTH, columns=None, windows=None, **fields) -> DFlashSource:
    network = drafter.network_of(layers, width, columns, qk_norm=True, windows=windows)
    fields = {"taps": (2, 5), "own_ids": columns is not None, **fields}
    return DFlashSource(DFlashConfig(network, WIDTH, VOCAB, mask_token=MASK, block=BLOCK, **fields))


HEADS = {
    "the authors'": source_of(taps=(2, 4, 6)),
    "its own width, embedding and tokens": source_of(
        layers=1, width=16, columns=9, own_embedding=True, own_head=True
    ),
    "a window in one of two layers": source_of(windows=(4, None)),
    "some of the target's columns": source_of(layers=1, columns=10),
}


@functools.cache
def params_of(source: DFlashSource) -> dict:
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


# --- the authors' program -------------------------------------------------------------------------


class Authors:
    """`DFlashDraftModel.forward` of z-lab's dflash/model.py, in float64, over a whole sequence."""

    def __init__(self, run: drafter.Drafter):
        self.windows = [layer.mixer.window for layer in run.source.network.layers]
        self.eps = run.source.network.rms_norm_eps
        self.w = jax.tree.map(lambda x: np.asarray(x, np.float64), run.params)
        self.embed = self.w.get("embed", np.asarray(run.target.embed, np.float64))
        self.lm_head = np.asarray(run.target.lm_head, np.float64)

    def drafts(self, states, root, steps):
        """[steps V] logits below the root, before which the target had states [n taps_width]."""
        at = np.arange(len(states) + steps + 1)
        target_hidden = drafter.rms(states @ self.w["fc"], self.w["hidden_norm"], self.eps)
        x = self.embed[[root] + [MASK] * steps]
        for number, w in sorted(self.w["layers"].items()):
            normed, window = drafter.rms(x, w["input_norm"], self.eps), self.windows[number]
            rows, ago = np.concatenate([target_hidden, normed]), at[-len(x) :, None] - at
            # No mask; where there is a window it is as in vLLM: causal, the row itself included.
            sees = (ago >= 0) & (ago < window) if window else np.ones_like(ago, bool)
            x = drafter.after_mlp(
                w, x + drafter.attention(w, normed, rows, at, sees, self.eps), self.eps
            )
        normed = drafter.rms(x, self.w["norm"], self.eps)[1:]
        return drafter.token_logits(self.w, self.lm_head, normed)


def check(run: drafter.Drafter, grown):
    """What is proposed now, against the authors' program; every row of a level gets the same."""
    found, _ = drafter.propose(run, grown)
    for slot in range(3):
        length = int(run.state.length[slot])
        states = np.asarray(run.hidden, np.float64)[slot, : length - 1]
        root = int(run.state.tokens[slot, length - 1])
        want = Authors(run).drafts(states, root, len(found))
        for logits, wanted in zip(found, want, strict=True):
            for row in logits[slot]:
                np.testing.assert_allclose(row, wanted, atol=2e-4)


@pytest.mark.parametrize("name", slow_but(HEADS, *list(HEADS)[:2]))
def test_predictions_over_rounds_and_plain_decoding_are_those_of_the_authors_program(name):
    """In a chunk of one step as well."""
    source = HEADS[name]
    run = drafter.over_rounds(source, params_of(source), check, source.network.num_layers > 1)
    run = drafter.enter(drafter.leave(run), 1)
    check(run, drive.random_tree(np.random.default_rng(1), 3, (), VOCAB, True))


# --- in an engine ---------------------------------------------------------------------------------


def test_a_strategy_of_more_steps_than_its_block_has_masks_is_refused():
    policy = tiny_config(VOCAB, mtp=0, layers=2)
    width = policy.hidden_size
    network = drafter.network_of(2, width, None, qk_norm=True)
    source = DFlashSource(DFlashConfig(network, width, VOCAB, (0, 2), mask_token=MASK, block=BLOCK))
    assert make_plans(policy, SpecConfig("5_1_6"), source).keys() == {"5_1_6"}
    with pytest.raises(ValueError, match="6_1_7.*block_size of 6.* at most 5 tokens, got 6"):
        make_plans(policy, SpecConfig("5_1_6"), source, [Strategy.parse("6_1_7")])


# --- files ----------------------------------------------------------------------------------------

BODY = Body(WIDTH, TARGET.num_layers, VOCAB)
SLIDING = ["sliding_attention", "full_attention"]
WINDOWED = {"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": 4}
HEAD = DFlash((2, 4, 6), MASK, BLOCK)
IDS = HEAD.config(BODY, "z-lab")["dflash_config"]


def files_of(layout: str, **changes) -> dict:
    """A config of the layout; `...` removes a key."""
    raw = {**HEAD.config(BODY, layout), **changes}
    return {name: value for name, value in raw.items() if value is not ...}


def tensors_of(columns=None) -> dict:
    return DFlash(range(3), MASK, BLOCK, columns=columns).tensors(BODY, np.float16)


def test_files_of_both_layouts_are_the_same_head(tmp_path):
    tensors = tensors_of()
    one = written(tmp_path / "z-lab", files_of("z-lab"), tensors)
    two = written(tmp_path / "speculators", files_of("speculators"), tensors)
    assert find_draft(one) is DFlashSource and find_draft(two) is DFlashSource
    source, params = load_draft_files(one, TARGET)
    assert source == DFlashSource(HEADS["the authors'"].cfg)
    other, same = load_draft_files(two, TARGET)
    assert other == source
    jax.tree.map(np.testing.assert_array_equal, params, same)
    np.testing.assert_array_equal(params["fc"], tensors["fc.weight"].T.astype(np.float32))
    k = tensors["layers.1.self_attn.k_proj.weight"].T.astype(np.float32)
    np.testing.assert_array_equal(params["layers"][1]["k"], k)


def test_what_is_written_is_read_with_every_bit_the_same(tmp_path):
    columns = [3, 1, 20, 7]  # in the order of the files, which need not ascend
    raw = files_of("speculators", draft_vocab_size=4)
    files = written(tmp_path / "one", raw, tensors_of(columns))
    source, params = load_draft_files(files, TARGET)
    assert params["ids"].tolist() == sorted(columns)
    save_draft_files(tmp_path / "two", source, params, "float16")
    again, same = load_draft_files(tmp_path / "two", TARGET)
    assert again == source
    jax.tree.map(np.testing.assert_array_equal, params, same)


def read(raw, tensors=None, target=TARGET):
    tensors = tensors_of() if tensors is None else tensors
    assert DFlashSource.is_of(raw, tensors)
    return DFlashSource.read_files("config.json", raw, tensors, target).cfg


INNER = {**HEAD.layer_config(BODY), **WINDOWED}  # of speculators, with windows


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("z-lab", {"layer_types": SLIDING}, "for no sliding_window is in use"),
        ("z-lab", {**WINDOWED, "dflash_config": {**IDS, "causal": False}}, "causal false"),
        ("z-lab", {**WINDOWED, "is_causal": False}, "is_causal false"),
        ("speculators", {"transformer_layer_config": INNER, "sliding_window_non_causal": True},
         "sliding_window_non_causal true"),
        ("z-lab", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ("z-lab", {"is_causal": True}, "is_causal true"),
        ("z-lab", {"attention_bias": True}, "attention_bias true"),
        ("z-lab", {"model_type": "llama"}, "layers of model_type llama"),
        ("z-lab", {"logit_scale": 0.5}, "logit_scale 0.5"),
        ("z-lab", {"architectures": ["DFlash2DraftModel"]}, "DFlash2Draft"),
        ("z-lab", {"block_size": ...}, "lacks the key 'block_size'"),
        ("z-lab", {"num_target_layers": 9}, "num_target_layers 9, expected 8"),
        ("z-lab", {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 3, 7]}},
         "output of the target's last layer 7"),
        ("speculators", {"projector_type": "domino"}, 'projector_type "domino'),
        ("speculators", {"sample_from_anchor": True}, "sample_from_anchor"),
        ("speculators", {"mask_token_id": VOCAB}, "at most 23, got 24"),
        ("speculators", {"aux_hidden_state_layer_ids": [2, 4, 9]}, "from 0 to 8"),
        ("speculators", {"aux_hidden_state_layer_ids": [2, 6]}, r"expected \[12, 24\], got"),
        ("speculators", {"draft_vocab_size": 9}, "a tensor d2t"),
    ],
)  # fmt: skip
def test_what_is_not_this_head_of_this_target_is_refused(layout, changes, message):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read(files_of(layout, **changes))


def test_windows_are_read_and_written():
    source = DFlashSource(read(files_of("z-lab", **WINDOWED)))
    assert [layer.mixer.window for layer in source.network.layers] == [4, None]
    assert read(source.saved("float32")[0]) == source.cfg


def test_tensors_that_it_does_not_have_and_other_targets_are_refused():
    more = {**tensors_of(), "selector.weight": np.zeros((2, 2), np.float16)}
    with pytest.raises(CheckpointError, match="this DFlash head: unexpected: selector.weight"):
        read(files_of("z-lab"), more)
    wider = dense_config(VOCAB, 2 * WIDTH, 16, 8, 2, 1, 6)
    with pytest.raises(CheckpointError, match="the target's width 24, got 12"):
        read(files_of("z-lab"), target=wider)
