"""EAGLE-3 heads' files: what each key and tensor means, and which files are refused, and why."""

import numpy as np
import pytest
from eagle3_files import Body, Eagle3, named

from specjax.checked_json import CheckpointError, UnsupportedModelError
from specjax.drafts.eagle3 import Eagle3Source
from specjax.drafts.head_config import shapes_of
from specjax.models.families.dense import dense_config
from specjax.models.rope import Rope, RopeScaling

D, F, N, K, H, V, L = 16, 24, 4, 2, 4, 40, 8
IDS = (1, 5, 9, 39)
FILE = "/heads/some/config.json"
TARGET = dense_config(V, D, F, L, N, K, H, rope_theta=5e5)
QWEN3 = {"model_type": "qwen3", "head_dim": H}


def tensors(layout="safeailab", ids=None, states=3, **switches):
    """Tensors of a head as a program of that layout writes them."""
    sizes = {"width": D, "heads": N, "kv_heads": K, "head_dim": H, "hidden": F} | switches
    head = Eagle3(boundaries=tuple(range(states)), vocab=ids and len(ids), **sizes)
    found = named(head.tensors(Body(D, L, V)), layout)
    if ids is not None:
        found["d2t"] = np.asarray(ids, np.int64) - np.arange(len(ids))
        found["t2d"] = np.isin(np.arange(V), ids)
    return found


def plain(**changes):
    """A config as SafeAILab writes it; a key that is None is left out."""
    raw = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": D,
        "intermediate_size": F, "num_attention_heads": N, "num_key_value_heads": K,
        "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
        "vocab_size": V, "draft_vocab_size": V, "hidden_act": "silu", "torch_dtype": "float16",
    } | changes  # fmt: skip
    return {name: value for name, value in raw.items() if value is not None}


def speculators(layer=(), **changes):
    """A config as speculators writes it."""
    body = plain(head_dim=H, architectures=None, draft_vocab_size=None) | dict(layer)
    raw = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "draft_vocab_size": V, "norm_before_residual": False, "target_hidden_size": None,
        "transformer_layer_config": {k: v for k, v in body.items() if v is not None},
    }  # fmt: skip
    return raw | changes


def taps(*ids, inside=False, **more):
    """Keys that list the states, outside of `eagle_config` or inside."""
    listed = {"eagle_aux_hidden_state_layer_ids": list(ids)}
    return {"eagle_config": listed, **more} if inside else listed | more


def source_of(raw, files, target=TARGET):
    assert Eagle3Source.is_of(raw, files)
    return Eagle3Source.read_files(FILE, raw, files, target)


def read(raw, files, target=TARGET):
    return source_of(raw, files, target).cfg


def refused(raw, files, *texts, kind=CheckpointError, target=TARGET):
    with pytest.raises(kind) as caught:
        Eagle3Source.read_files(FILE, raw, files, target)
    for text in (FILE, *texts):
        assert text in str(caught.value)


# --- what is read -------------------------------------------------------------------------------


def test_a_config_of_either_layout_is_a_head_of_llama_with_the_default_states():
    cfg = read(plain(), tensors())
    assert cfg.taps == (2, 4, 5) and cfg.network.model_type == "llama"
    assert (cfg.norm_before_residual, cfg.fc_norm, cfg.norm_output) == (False, "none", False)
    assert (cfg.own_embedding, cfg.own_head, cfg.own_ids) == (False, True, False)
    mixer = cfg.network.layers[0].mixer
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (N, K, H)
    assert not mixer.qk_norm and mixer.norm_eps == cfg.network.rms_norm_eps == 1e-5
    assert mixer.rope == Rope(10_000.0)  # not the target's
    assert read(speculators(), tensors("speculators")) == cfg


# Config, tensors' switches, and what the head then is.
MEANINGS = [
    # Boundaries outside, outputs of layers inside.
    (plain(**taps(1, 3, 6)), {}, {"taps": (1, 3, 6)}),
    (plain(**taps(0, 8)), {"states": 2}, {"taps": (0, 8)}),
    (plain(**taps(1, 3, 6, inside=True)), {}, {"taps": (2, 4, 7)}),
    (plain(**taps(4, 6, 8, inside=True)), {}, {"taps": (4, 6, 8)}),
    (plain(**taps(0, 3, 6, inside=True), **taps(1, 4, 7)), {}, {"taps": (1, 4, 7)}),
    (plain(eagle_config={"use_aux_hidden_state": False}), {"states": 0}, {"taps": ("post_norm",)}),
    (plain(norm_before_residual=True), {}, {"norm_before_residual": True}),
    (plain(norm_before_fc=True), {"fc_norm": "joined"}, {"fc_norm": "joined"}),
    (plain(), {"fc_norm": "joined"}, {"fc_norm": "joined"}),
    (plain(fc_norm=True), {"fc_norm": "each"}, {"fc_norm": "each"}),
    # Only with a norm of each state, or from speculators.
    (plain(norm_output=True), {"fc_norm": "joined"}, {"norm_output": False}),
    (plain(norm_output=True), {"fc_norm": "each"}, {"norm_output": True}),
    (speculators(norm_output=True), {"layout": "speculators"}, {"norm_output": True}),
    (plain(draft_vocab_size=4), {"ids": IDS, "own_embedding": True},
     {"own_ids": True, "own_embedding": True}),
    (plain(), {"own_head": False}, {"own_head": False}),
    (plain(tie_word_embeddings=True), {"own_head": False}, {"own_head": False}),
    # vLLM and speculators never tie it to the head's own embedding; others do if the key says so.
    (speculators({"tie_word_embeddings": True}),
     {"layout": "speculators", "own_head": False, "own_embedding": True}, {"own_head": False}),
    (plain(tie_word_embeddings=True), {"own_head": False, "own_embedding": True},
     {"own_head": True}),
    (plain(mask_token_id=4), {"mask_token": 4}, {"mask_token": 4}),
    (plain(mask_token_id=4), {}, {"mask_token": None}),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "switches", "meant"), MEANINGS)
def test_keys_and_tensors_mean_what_those_who_write_them_mean(raw, switches, meant):
    cfg = read(raw, tensors(**switches))
    assert {name: getattr(cfg, name) for name in meant} == meant


def test_default_states_depend_on_the_number_of_layers_and_are_refused_out_of_order():
    for count, states, wanted in ((36, 3, (2, 18, 33)), (6, 2, (2, 3))):
        target = dense_config(V, D, F, count, N, K, H)
        assert read(plain(), tensors(states=states), target).taps == wanted
    target = dense_config(V, D, F, 4, N, K, H)
    refused(plain(), tensors(), "[2, 2, 1]", "expected ascending", target=target)


def test_the_rotary_embedding_is_the_heads_own_in_either_dialect():
    scaling = {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    }  # fmt: skip
    wanted = Rope(7e4, RopeScaling(8.0, 1.0, 4.0, 8192))
    for keys in (
        {"rope_theta": 7e4, "rope_scaling": scaling},
        {"rope_parameters": {"rope_theta": 7e4, **scaling}},
    ):
        assert read(plain(**keys), tensors()).network.layers[0].mixer.rope == wanted


@pytest.mark.parametrize(
    ("raw", "layout", "backbone"),
    [
        (plain(**QWEN3), "safeailab", "qwen3"),
        (speculators({"model_type": None}), "speculators", "qwen3"),
        (speculators({"model_type": "llama"}), "speculators", "llama"),
    ],
)
def test_the_backbone_is_named_or_qwen3_in_a_file_of_speculators(raw, layout, backbone):
    wrong = {"llama": "qwen3", "qwen3": "llama"}[backbone]
    cfg = read(raw, tensors(layout, backbone=backbone))
    assert cfg.network.layers[0].mixer.qk_norm is (backbone == "qwen3")
    others = tensors(layout, backbone=wrong)
    refused(raw, others, "q_norm")


def test_further_layers_take_the_heads_width_alone():
    raw, two = speculators({"num_hidden_layers": 2}), tensors(layers=2)
    assert read(raw, tensors("speculators", layers=2)).network.num_layers == 2
    assert read(plain(num_hidden_layers=2), two).network.num_layers == 2
    refused(raw, tensors("speculators"), "missing: layers.1.self_attn.q_proj.weight, expected [16")
    refused(plain(), two, "unexpected: layers.1.")


@pytest.mark.parametrize("biases", ["", "qkv", "o", "qkvo"])
def test_the_tensors_say_which_biases_there_are_in_a_config_like_a_models(biases):
    mixer = read(plain(attention_bias=False), tensors(biases=biases)).network.layers[0].mixer
    assert (mixer.qkv_bias, mixer.o_bias) == ("qkv" in biases, "o" in biases)
    refused(plain(), tensors(biases="q"), "missing: midlayer.self_attn.k_proj.bias, expected")


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("keys", "llama", "qwen3"),
    [
        ({"layer_types": [FULL, SLIDING], "sliding_window": 8}, (None, 8), (None, 8)),
        ({"sliding_window": 8}, (None, None), (None, None)),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
         "use_sliding_window true", (None, 8)),
        ({"layer_types": [SLIDING] * 2, "sliding_window": 8, "use_sliding_window": False},
         (8, 8), "full_attention alone, for no sliding_window is in use"),
        ({"layer_types": [SLIDING], "sliding_window": 8}, *["as many as num_hidden_layers"] * 2),
        ({"layer_types": [FULL, "chunked_attention"]}, *["layer_types chunked_attention"] * 2),
    ],
)  # fmt: skip
def test_windows_are_those_of_layer_types_or_of_qwen3s_keys(keys, llama, qwen3):
    for backbone, wanted in (("llama", llama), ("qwen3", qwen3)):
        raw = speculators({"model_type": backbone, "num_hidden_layers": 2, **keys})
        files = tensors("speculators", layers=2, backbone=backbone)
        if isinstance(wanted, str):
            with pytest.raises((CheckpointError, UnsupportedModelError), match=wanted):
                read(raw, files)
        else:
            network = read(raw, files).network
            assert tuple(x.mixer.window for x in network.layers) == wanted


def test_a_head_may_be_narrower_than_its_target_if_it_has_tables_of_its_own():
    raw = plain(hidden_size=8, head_dim=H)
    cfg = read(raw, tensors(width=8, own_embedding=True))
    assert (cfg.network.hidden_size, cfg.target_width) == (8, D)
    refused(raw, tensors(width=8), "the target's embedding", "width 16, got 8")
    refused(
        raw,
        tensors(width=8, own_embedding=True, own_head=False),
        "the target's language-model head",
    )


# --- what is refused ----------------------------------------------------------------------------


def eagle1():
    """Tensors of an EAGLE-1 head: fc over the embedding and one state, no extra norms."""
    files = tensors("speculators", states=2)
    for name in ("input_layernorm", "hidden_norm"):
        del files[f"layers.0.{name}.weight"]
    for x in "qkv":
        name = f"layers.0.self_attn.{x}_proj.weight"
        files[name] = files[name][:, :D]
    del files["norm.weight"], files["lm_head.weight"]
    return files


def test_other_kinds_of_heads_are_refused():
    for raw in (plain(draft_vocab_size=None), plain()):
        assert Eagle3Source.is_of(raw, eagle1())
        refused(raw, eagle1(), "missing: layers.0.hidden_norm.weight")
    raw = {"speculators_model_type": "mlp_speculator"}
    assert Eagle3Source.is_of(raw, {})
    refused(raw, {}, "mlp_speculator", "expected an EAGLE-3 head", kind=UnsupportedModelError)


def test_what_would_change_the_computation_is_refused_by_its_name():
    for key, value in {
        "logit_scale": 0.5, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0078,
        "is_causal": False, "partial_rotary_factor": 0.5, "hidden_act": "gelu",
        "model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"},
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    }.items():  # fmt: skip
        named = "dynamic" if key == "rope_scaling" else key
        refused(plain(**{key: value}), tensors(), named, kind=UnsupportedModelError)


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"midlayer.hidden_norm.weight": None},
         ("missing: midlayer.hidden_norm.weight, expected [16]", "fetch")),
        ({"midlayer.mlp.down_proj.weight": np.zeros((F, D), np.float16)},
         ("wrong shape: midlayer.mlp.down_proj.weight, expected [16, 24], got [24, 16]",)),
        ({"midlayer.mlp.down_proj.weight": np.zeros((D, F), np.int64)},
         ("wrong dtype: midlayer.mlp.down_proj.weight", "got int64")),
        ({"midlayer.mlp.up_proj.bias": np.zeros(F)}, ("unexpected: midlayer.mlp.up_proj.bias",)),
        ({"fc.weight": np.zeros((D, 3 * 12), np.float16)},
         ("wrong shape: fc.weight, expected [16, 48], got [16, 36]",)),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(change, texts):
    files = {n: t for n, t in (tensors() | change).items() if t is not None}
    refused(plain(), files, *texts, kind=(CheckpointError, UnsupportedModelError))


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"d2t": np.array([1, 4, 7, 37])}, ("from 1 to 40", "from 0 to 39")),
        ({"d2t": np.array([1, 0, 7, 36])}, ("3 different tokens",)),
        ({"d2t": np.array([1.0, 4.0, 7.0, 36.0])}, ("wrong: d2t", "float64")),
        ({"d2t": np.array([1, 4, 7])}, ("wrong: d2t, expected 4 integers, got [3]",)),
        ({"d2t": None}, ("4 draft tokens of the target's 40", "a tensor d2t [4]")),
    ],
)  # fmt: skip
def test_lists_of_draft_tokens_that_cannot_be_right_are_refused(change, texts):
    files = {n: t for n, t in (tensors(ids=IDS) | change).items() if t is not None}
    refused(plain(draft_vocab_size=4), files, *texts)


@pytest.mark.parametrize(
    ("keys", "switches", "texts"),
    [
        ({"draft_vocab_size": V + 1}, {}, ("41 draft tokens", "at most these")),
        ({"vocab_size": V + 8}, {}, ("vocab_size 48, expected 40",)),
        ({"target_hidden_size": 32}, {}, ("target_hidden_size 32, expected 16",)),
        ({"hidden_size": 24}, {}, ("hidden_size is 24", "norm.weight is [16]")),
        ({"hidden_size": None}, {}, ("lacks the key 'hidden_size'",)),
        (taps(2, 4, 9), {}, ("[2, 4, 9]", "from 0 to 8")),
        (taps(4, 2, 5), {}, ("[4, 2, 5]", "expected ascending")),
        (taps(2, 4), {}, ("wrong shape: fc.weight, expected [16, 32], got [16, 48]",)),
        ({**taps(0, 3, 6, inside=True), **taps(0, 3, 6)}, {}, ("expected the same",)),
        ({}, {"states": 0}, ("missing: fc.weight", "use_aux_hidden_state to false")),
        ({}, {"mask_token": 4}, ("lacks the key 'mask_token_id'",)),
        *(({key: True}, {}, ("correct config.json",)) for key in ("norm_before_fc", "fc_norm")),
        ({"norm_before_fc": False}, {"fc_norm": "joined"}, ("correct config.json",)),
        ({"fc_norm": False}, {"fc_norm": "each"}, ("correct config.json",)),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_are_named(keys, switches, texts):
    refused(plain(**keys), tensors(**switches), *texts)


def test_no_config_raises_an_error_of_another_kind():
    """Wrong values of any type, for any key, are named, or read."""
    values = [None, True, -1, 0, 3, 2**40, 1.5, float("nan"), "", "x", [], [1], ["x"], {}, {"x": 1}]
    raws = {"safeailab": plain(head_dim=H), "speculators": speculators()}
    others = (
        "architectures", "rope_theta", "rope_scaling", "rope_parameters", "eagle_config", "fc_norm",
        "eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "norm_before_fc", "norm_output",
        "quantization_config", "tie_word_embeddings", "layer_types", "speculators_model_type",
    )  # fmt: skip
    done = 0
    for layout, raw in raws.items():
        files = tensors(layout)
        for key in (*raw, *others):
            for value in values:
                changed = raw | {key: value}
                Eagle3Source.is_of(changed, files)
                try:
                    Eagle3Source.read_files(FILE, changed, files, TARGET)
                except (CheckpointError, UnsupportedModelError) as error:
                    assert FILE in str(error)
                    done += 1
    assert done > 100


# --- what is written ----------------------------------------------------------------------------


HEADS = [
    (plain(), {}),
    (plain(norm_before_residual=True), {"fc_norm": "joined", "own_embedding": True}),
    (plain(draft_vocab_size=4, norm_output=True), {"fc_norm": "each", "ids": IDS}),
    (plain(**QWEN3), {"backbone": "qwen3", "own_head": False}),
    (plain(num_hidden_layers=2), {"layers": 2}),
    (plain(layer_types=[SLIDING], sliding_window=8), {}),
    (plain(**taps(0, 8)), {"states": 2}),
]


@pytest.mark.parametrize(("raw", "switches"), HEADS)
def test_what_is_written_is_read_as_the_same_head(raw, switches):
    source, files = source_of(raw, tensors(**switches)), tensors("speculators", **switches)
    config, written = source.saved("float16")
    assert read(config, files) == source.cfg
    assert shapes_of(written.rows()).keys() == files.keys() - {"d2t", "t2d"}


def test_a_head_that_files_cannot_express_is_not_written():
    source = source_of(speculators(norm_output=True), tensors("speculators"))
    final = source_of(plain(eagle_config={"use_aux_hidden_state": False}), tensors(states=0))
    assert source.unwritable() is None and "final state" in final.unwritable()
