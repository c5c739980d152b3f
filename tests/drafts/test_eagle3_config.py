"""EAGLE-3 heads' files: what each key and tensor means, and which files are refused, and why."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from specjax.checked_json import CheckpointError, UnsupportedModelError
from specjax.drafts import eagle3_config as e3
from specjax.drafts.eagle3 import Eagle3Source
from specjax.models.families.dense import dense_config
from specjax.models.rope import LinearScaling, Rope, RopeScaling, YarnScaling

D, F, N, K, H, V, L = 16, 24, 4, 2, 4, 40, 8
FILE = "/heads/some/config.json"
TARGET = dense_config(V, D, F, L, N, K, H, rope_theta=5e5)


def tensors(
    layout="safeailab", states=3, width=D, columns=V, layers=1, qk_norm=False, dims=D,
    embed=False, head=True, ids=None, norm="none", dtype=np.float16,
):  # fmt: skip
    """Tensors of a head as a program of that layout writes them."""
    found = {"norm": (dims,)}
    if states:
        found["fc"] = (dims, states * width)
    for i in range(layers):
        prefix = "midlayer" if layout == "safeailab" and i == 0 else f"layers.{i}"
        inputs = 2 * dims if i == 0 else dims
        found |= {
            f"{prefix}.self_attn.q_proj": (N * H, inputs),
            f"{prefix}.self_attn.k_proj": (K * H, inputs),
            f"{prefix}.self_attn.v_proj": (K * H, inputs),
            f"{prefix}.self_attn.o_proj": (dims, N * H),
            f"{prefix}.mlp.gate_proj": (F, dims),
            f"{prefix}.mlp.up_proj": (F, dims),
            f"{prefix}.mlp.down_proj": (dims, F),
            f"{prefix}.input_layernorm": (dims,),
            f"{prefix}.post_attention_layernorm": (dims,),
        }
        if qk_norm:
            found |= {f"{prefix}.self_attn.{x}_norm": (H,) for x in "qk"}
        if i == 0:
            found[f"{prefix}.hidden_norm"] = (dims,)
    if embed:
        found["embed_tokens"] = (V, dims)
    if head:
        found["lm_head"] = (columns, dims)
    if norm == "joined":
        found["input_norm"] = (states * width,)
    if norm == "each":
        found |= {f"fc_norm.{i}": (width,) for i in range(states)}
    rng = np.random.default_rng(0)
    out = {f"{n}.weight": rng.normal(size=s).astype(dtype) for n, s in found.items()}
    if ids is not None:
        out["d2t"] = np.asarray(ids, np.int64) - np.arange(len(ids))
        out["t2d"] = np.isin(np.arange(V), ids)
    return out


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


def read(raw, files, target=TARGET, **overrides):
    assert e3.recognises(raw, files)
    return e3.read(FILE, raw, files, target, overrides)


def refused(raw, files, *texts, kind=CheckpointError, target=TARGET, **overrides):
    with pytest.raises(kind) as caught:
        e3.read(FILE, raw, files, target, overrides)
    for text in (FILE, *texts):
        assert text in str(caught.value)


# --- what is read -------------------------------------------------------------------------------


def test_a_config_of_safeailab_is_a_head_of_llama_with_the_default_states():
    cfg = read(plain(), tensors())
    assert cfg.taps == (2, 4, 5) and cfg.network.model_type == "llama"
    assert (cfg.norm_before_residual, cfg.fc_norm, cfg.norm_output) == (False, "none", False)
    assert (cfg.own_embedding, cfg.own_head, cfg.own_ids) == (False, True, False)
    mixer = cfg.network.layers[0].mixer
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (N, K, H)
    assert not mixer.qk_norm and mixer.norm_eps == cfg.network.rms_norm_eps == 1e-5
    assert mixer.rope == Rope(10_000.0)  # not the target's
    assert cfg.network.vocab_size == V and cfg.network.run == TARGET.run


def test_only_draft_vocab_size_tells_a_head_of_llama_from_a_model():
    model = {"model.embed_tokens.weight": np.zeros((V, D)), "model.norm.weight": np.zeros(D)}
    assert e3.recognises(plain(), {})
    assert not e3.recognises(plain(draft_vocab_size=None), model)


@pytest.mark.parametrize("layout", e3.LAYOUTS)
def test_both_layouts_name_the_same_head(layout):
    raw = plain() if layout == "safeailab" else speculators()
    assert read(raw, tensors(layout)) == read(plain(), tensors())


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
    yarn = {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 40.0, "mscale": 0.707,
        "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "rope_type": "yarn",
    }  # fmt: skip
    found = read(plain(rope_scaling=yarn), tensors()).network.layers[0].mixer.rope
    assert found == Rope(10_000.0, YarnScaling(40.0, 4096, 1.0))
    found = read(plain(rope_scaling={"type": "linear", "factor": 4.0}), tensors())
    assert found.network.layers[0].mixer.rope == Rope(10_000.0, LinearScaling(4.0))
    refused(
        plain(rope_scaling={"rope_type": "longrope", "factor": 4.0}), tensors(), "longrope", "yarn",
        kind=UnsupportedModelError,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "count", "states", "taps"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, L, 3, (1, 3, 6)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 8]}, L, 2, (0, 8)),
        ({"eagle_aux_hidden_state_layer_ids": None}, L, 3, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, L, 3, (2, 4, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}, L, 3, (2, 4, 8)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 6, 8]}}, L, 3, (4, 6, 8)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, L, 3, (2, 4, 5)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, L, 3, (2, 4, 5)),
        ({}, 36, 3, (2, 18, 33)),
        ({}, 6, 3, (2, 3, 3)),
        ({}, 6, 2, (2, 3)),
        ({}, 4, 2, (1, 2)),
    ],
)
def test_lists_of_states_are_boundaries_outside_and_outputs_of_layers_inside(
    keys, count, states, taps
):
    target = dense_config(V, D, F, count, N, K, H)
    assert read(plain(**keys), tensors(states=states), target).taps == taps


def test_a_file_may_list_the_states_in_both_ways_if_they_agree():
    inner = {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}
    raw = plain(eagle_aux_hidden_state_layer_ids=[1, 4, 7], eagle_config=inner)
    assert read(raw, tensors()).taps == (1, 4, 7)
    raw["eagle_aux_hidden_state_layer_ids"] = [0, 3, 6]
    refused(raw, tensors(), "[0, 3, 6]", "[1, 4, 7]", "expected the same")


def test_a_head_of_the_final_state_has_no_fc():
    raw = plain(eagle_config={"use_aux_hidden_state": False})
    assert read(raw, tensors(states=0)).taps == ("post_norm",)
    refused(plain(), tensors(states=0), "missing: fc.weight", "post_norm")
    assert read(plain(), tensors(states=0), aux_hidden_state_layer_ids="post_norm").taps == (
        "post_norm",
    )


@pytest.mark.parametrize("norm", ["none", "joined", "each"])
def test_fc_and_its_norms_are_not_used_with_the_final_state_and_the_user_is_told(norm):
    """Programs make them whatever the config says, and vLLM then skips them."""
    files, by_hand = tensors(norm=norm), {"aux_hidden_state_layer_ids": "post_norm"}
    unused = sorted(n for n in files if n.startswith(("fc.", "fc_norm.", "input_norm.")))
    final = {"norm_before_fc": norm == "joined", "fc_norm": norm == "each"}
    final["eagle_config"] = {"use_aux_hidden_state": False}
    for raw, overrides in ((plain(**final), {}), (plain(), by_hand)):
        source = Eagle3Source.read(FILE, raw, files, TARGET, overrides)
        assert (source.cfg.taps, source.cfg.fc_norm) == (("post_norm",), "none")
        assert f"not used with the final state: {', '.join(unused)}" in source.described()
        assert source == Eagle3Source.read(FILE, plain(**final), tensors(states=0), TARGET)
    assert read(plain(**final), files, aux_hidden_state_layer_ids=[1, 2, 3]).fc_norm == norm
    with pytest.raises(ValueError, match="fc_norm must be none"):
        e3.read(FILE, plain(**final), files, TARGET, {"fc_norm": "each"})


@pytest.mark.parametrize("value", [True, False, None])
def test_the_residual_is_before_its_norm_where_the_key_is_absent(value):
    for raw, layout in ((plain(), "safeailab"), (speculators(), "speculators")):
        raw["norm_before_residual"] = value
        if value is None:
            del raw["norm_before_residual"]
        assert read(raw, tensors(layout)).norm_before_residual is bool(value)
        said = Eagle3Source.read(FILE, raw, tensors(layout), TARGET).described()
        guessed = value is None and layout == "speculators"
        assert ("(the file does not say it; vLLM then takes true)" in said) == guessed


@pytest.mark.parametrize(
    ("norm", "keys"),
    [
        ("none", {}),
        ("none", {"norm_before_fc": False, "fc_norm": False}),
        ("joined", {"norm_before_fc": True}),
        ("joined", {}),
        ("each", {"fc_norm": True}),
        ("each", {"fc_norm": True, "norm_before_fc": True}),
        ("each", {"fc_norm": True, "norm_before_fc": False}),
        ("each", {}),
    ],
)
def test_the_norm_before_fc_is_that_of_key_and_tensors(norm, keys):
    assert read(plain(**keys), tensors(norm=norm)).fc_norm == norm


@pytest.mark.parametrize(
    ("norm", "keys"),
    [
        ("none", {"norm_before_fc": True}),
        ("none", {"fc_norm": True}),
        ("joined", {"norm_before_fc": False}),
        ("joined", {"fc_norm": True}),
        ("each", {"fc_norm": False}),
        ("each", {"norm_before_fc": False}),
    ],
)
def test_a_norm_before_fc_that_key_and_tensors_contradict_is_refused(norm, keys):
    refused(plain(**keys), tensors(norm=norm), "norm_before_fc is", "fc_norm in draft_overrides")
    assert read(plain(**keys), tensors(norm=norm), fc_norm=norm).fc_norm == norm


def test_norm_output_is_read_only_with_fc_norm_or_from_speculators():
    assert not read(plain(norm_output=True), tensors()).norm_output
    assert not read(plain(norm_output=True), tensors(norm="joined")).norm_output
    assert read(plain(norm_output=True), tensors(norm="each")).norm_output
    assert read(speculators(norm_output=True), tensors("speculators")).norm_output
    assert not read(speculators(), tensors("speculators", norm="each")).norm_output
    assert read(plain(), tensors(), norm_output=True).norm_output


@pytest.mark.parametrize(
    ("raw", "layout", "backbone"),
    [
        (plain(model_type="qwen3", head_dim=H), "safeailab", "qwen3"),
        (plain(model_type=None, head_dim=H), "safeailab", "llama"),
        (
            plain(model_type=None, architectures=["Qwen3ForCausalLMEagle3"], head_dim=H),
            "safeailab",
            "qwen3",
        ),
        (speculators({"model_type": None}), "speculators", "qwen3"),
        (speculators({"model_type": "llama"}), "speculators", "llama"),
    ],
)
def test_the_backbone_is_named_or_qwen3_in_a_file_of_speculators(raw, layout, backbone):
    wrong = {"llama": "qwen3", "qwen3": "llama"}[backbone]
    files = tensors(layout, qk_norm=backbone == "qwen3")
    cfg = read(raw, files)
    assert cfg.network.model_type == backbone
    assert cfg.network.layers[0].mixer.qk_norm is (backbone == "qwen3")
    others = tensors(layout, qk_norm=backbone != "qwen3")
    refused(raw, others, f"the backbone is {backbone}", "q_norm", "set backbone in draft_overrides")
    assert read(raw, others, backbone=wrong).network.model_type == wrong


@pytest.mark.parametrize("name", ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"])
@pytest.mark.parametrize("kind", ["qwen2", "phi3", "qwen3", None])
def test_a_class_of_heads_names_the_backbone_whatever_model_the_config_was_copied_from(name, kind):
    raw = plain(architectures=[name], model_type=kind)
    assert read(raw, tensors()) == read(plain(), tensors())
    normed = tensors(qk_norm=True)
    if kind == "qwen3":
        assert read(raw | {"head_dim": H}, normed).network.model_type == "qwen3"
    else:
        refused(raw, normed, "the backbone is llama", "unexpected: midlayer.self_attn.q_norm")


def test_a_class_of_models_names_no_backbone():
    refused(plain(model_type="phi3"), tensors(), "model_type 'phi3'", kind=UnsupportedModelError)


def test_buffers_of_the_rotary_embedding_are_not_read():
    buffer = np.ones(H // 2, np.float32)
    names = ("", "midlayer.self_attn.")
    buffers = {f"{n}rotary_emb.{x}": buffer for n in names for x in ("inv_freq", "cos_cached")}
    assert read(plain(), tensors() | buffers) == read(plain(), tensors())


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("logit_scale", 0.5, 1.0),
        ("logits_scaling", 8.0, 1),
        ("final_logit_softcapping", 30.0, None),
        ("attn_logit_softcapping", 50.0, None),
        ("embedding_multiplier", 12.0, 1.0),
        ("scale_emb", 12, 1),
        ("residual_multiplier", 0.22, 1.0),
        ("attention_multiplier", 0.0078, H**-0.5),
        ("query_pre_attn_scalar", 256, H),
        ("is_causal", False, True),
        ("partial_rotary_factor", 0.5, 1.0),
    ],
)
def test_keys_that_would_change_the_computation_are_refused_by_their_names(key, value, neutral):
    refused(plain(**{key: value}), tensors(), f"{key} ", kind=UnsupportedModelError)
    assert read(plain() | {key: neutral}, tensors()) == read(plain(), tensors())
    raw, files = speculators({key: value}), tensors("speculators")
    refused(raw, files, f"{key} ", kind=UnsupportedModelError)


def test_qwen3s_heads_are_of_128_where_a_file_does_not_say_it():
    refused(
        plain(model_type="qwen3"), tensors(qk_norm=True),
        "midlayer.self_attn.q_proj.weight, expected [512, 32], got [16, 32]",
    )  # fmt: skip


def test_further_layers_take_the_heads_width_alone():
    raw = speculators({"num_hidden_layers": 2})
    files = {layout: tensors(layout, layers=2) for layout in e3.LAYOUTS}
    assert read(raw, files["speculators"]).network.num_layers == 2
    assert read(plain(num_hidden_layers=2), files["safeailab"]).network.num_layers == 2
    refused(
        raw, tensors("speculators"),
        "missing: layers.1.self_attn.q_proj.weight, expected [16, 16]",
    )  # fmt: skip
    refused(plain(), files["safeailab"], "unexpected: layers.1.")


def test_a_number_of_layers_copied_from_the_target_leaves_one_midlayer():
    assert read(plain(num_hidden_layers=40), tensors()) == read(plain(), tensors())
    assert read(plain(num_hidden_layers=40), tensors(layers=2)).network.num_layers == 2
    source = Eagle3Source.read(FILE, plain(num_hidden_layers=40), tensors(), TARGET, {})
    assert "num_hidden_layers is 40, and the files hold 1, which is run" in source.described()
    source = Eagle3Source.read(FILE, plain(), tensors(), TARGET, {})
    assert "num_hidden_layers" not in source.described()


def with_biases(files, projections):
    found = dict(files)
    for x in projections:
        name = f"midlayer.self_attn.{x}_proj"
        name = name if f"{name}.weight" in files else f"layers.0.self_attn.{x}_proj"
        found[f"{name}.bias"] = np.zeros(len(files[f"{name}.weight"]), np.float16)
    return found


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("projections", ["", "qkv", "o", "qkvo"])
def test_the_tensors_say_which_biases_there_are_in_a_config_like_a_models(projections, said):
    raw = plain(attention_bias=said, mlp_bias=said)
    mixer = read(raw, with_biases(tensors(), projections)).network.layers[0].mixer
    assert (mixer.qkv_bias, mixer.o_bias) == ("qkv" in projections, "o" in projections)
    refused(raw, with_biases(tensors(), "q"), "missing: midlayer.self_attn.k_proj.bias, expected")


def test_attention_bias_says_it_in_a_config_of_speculators():
    raw, files = speculators({"attention_bias": True}), tensors("speculators")
    mixer = read(raw, with_biases(files, "qkvo")).network.layers[0].mixer
    assert mixer.qkv_bias and mixer.o_bias
    refused(raw, files, "missing: layers.0.self_attn.o_proj.bias, expected [16]")
    refused(speculators(), with_biases(files, "o"), "unexpected: layers.0.self_attn.o_proj.bias")
    refused(
        speculators({"mlp_bias": True}), files, "mlp_bias true", kind=UnsupportedModelError
    )  # fmt: skip


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("keys", "llama", "qwen3"),
    [
        # speculators writes this for all heads unless told otherwise.
        ({"layer_types": [SLIDING] * 2, "sliding_window": 2048, "use_sliding_window": True},
         (2048, 2048), (2048, 2048)),
        ({"layer_types": [FULL, SLIDING], "sliding_window": 8}, (None, 8), (None, 8)),
        ({"layer_types": [SLIDING, FULL] * 9, "sliding_window": 8}, (8, None), (8, None)),
        ({"layer_types": [FULL, FULL], "sliding_window": 8, "use_sliding_window": True},
         (None, None), (None, None)),
        ({"sliding_window": 8}, (None, None), (None, None)),
        ({"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0},
         (None, None), (None, None)),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
         "use_sliding_window true without layer_types", (None, 8)),
        ({"sliding_window": 8, "use_sliding_window": True},
         "use_sliding_window true without layer_types", (None, None)),  # from layer 28 on
        ({"use_sliding_window": True, "max_window_layers": 0},
         "use_sliding_window true without layer_types", (4096, 4096)),
        ({"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0},
         "use_sliding_window true without layer_types", (None, None)),
        ({"layer_types": [SLIDING] * 2, "sliding_window": 8, "use_sliding_window": False},
         (8, 8), "full_attention alone, for no sliding_window is in use"),
        ({"layer_types": [SLIDING] * 2}, *["full_attention alone"] * 2),
        ({"layer_types": [SLIDING] * 2, "sliding_window": 0}, *["a positive integer"] * 2),
        ({"layer_types": [SLIDING], "sliding_window": 8}, *["as many as num_hidden_layers"] * 2),
        ({"layer_types": [FULL, "chunked_attention"]}, *["layer_types chunked_attention"] * 2),
    ],
)  # fmt: skip
def test_windows_are_those_of_layer_types_or_of_qwen3s_keys(keys, llama, qwen3):
    for backbone, wanted in (("llama", llama), ("qwen3", qwen3)):
        raw = speculators({"model_type": backbone, "num_hidden_layers": 2})
        raw["transformer_layer_config"] |= keys
        files = tensors("speculators", layers=2, qk_norm=backbone == "qwen3")
        if isinstance(wanted, str):
            with pytest.raises((CheckpointError, UnsupportedModelError), match=wanted):
                e3.read(FILE, raw, files, TARGET)
            continue
        source = Eagle3Source.read(FILE, raw, files, TARGET)
        assert tuple(x.mixer.window for x in source.cfg.network.layers) == wanted
        used = [i for i, window in enumerate(wanted) if window]
        said = f"sliding_window {max(wanted, key=lambda w: w or 0)} in the layers {used}"
        assert (said in source.described()) == bool(used)
        assert "SpecForge" not in source.described()


def test_a_window_in_a_config_like_a_models_is_named_as_what_programs_differ_in():
    raw = plain(layer_types=[SLIDING], sliding_window=8)
    source = Eagle3Source.read(FILE, raw, tensors(), TARGET)
    assert source.cfg.network.layers[0].mixer.window == 8
    assert "the window is that of vLLM; SpecForge and SGLang run" in source.described()


def test_a_head_without_a_language_model_head_uses_the_targets_unless_it_is_tied():
    """vLLM and speculators never tie the two; transformers and SGLang do where the key says it."""
    tied, copied, some = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}, [1, 5, 9]
    every = {layout: tensors(layout, head=False, embed=True) for layout in e3.LAYOUTS}
    for layout, inside in (("safeailab", plain(**tied)), ("speculators", speculators(tied))):
        fewer = tensors(layout, head=False, embed=True, ids=some)
        assert not read(inside | {"draft_vocab_size": 3}, fewer).own_head
        assert not read(inside, tensors(layout, head=False)).own_head
    for raw in (speculators(tied, **copied), speculators(tied)):
        assert not read(raw, every["speculators"]).own_head
    refused(
        speculators(copied, **tied), every["speculators"], "tie_word_embeddings",
        kind=UnsupportedModelError,
    )  # fmt: skip
    source = Eagle3Source.read(FILE, plain(**tied), every["safeailab"], TARGET)
    assert source.cfg.own_head and "vLLM then uses the target's lm_head" in source.described()
    assert not read(plain(), every["safeailab"]).own_head


def test_a_head_may_list_its_draft_tokens_and_have_tables_of_its_own():
    ids = [1, 5, 9, 39]
    cfg = read(plain(draft_vocab_size=4), tensors(columns=4, ids=ids, embed=True))
    assert (cfg.network.vocab_size, cfg.own_ids, cfg.own_embedding) == (4, True, True)
    cfg = read(plain(draft_vocab_size=4), tensors(head=False, ids=ids))
    assert (cfg.network.vocab_size, cfg.own_head) == (4, False)
    cfg = read(plain(), tensors(ids=range(V)))  # listed although they are all
    assert (cfg.network.vocab_size, cfg.own_ids) == (V, True)
    files = tensors(columns=4, ids=[9, 5, 39, 1])  # in any order, and without t2d
    del files["t2d"]
    assert read(plain(draft_vocab_size=None, architectures=["LlamaForCausalLMEagle3"]), files)


def test_a_head_may_be_narrower_than_its_target():
    raw, files = plain(hidden_size=8, head_dim=H), tensors(dims=8, embed=True)
    cfg = read(raw, files)
    assert (cfg.network.hidden_size, cfg.target_width) == (8, D)
    files = tensors(dims=8)
    refused(raw, files, "no embed_tokens", "width is 16", "is 8")
    refused(raw, tensors(dims=8, embed=True, head=False), "no lm_head", "width is 16")


def test_settings_by_hand_replace_those_of_the_files():
    cfg = read(
        plain(), tensors(), aux_hidden_state_layer_ids=[8, 0, 3], norm_before_residual=True,
        norm_output=True,
    )  # fmt: skip
    assert cfg.taps == (8, 0, 3) and cfg.norm_before_residual and cfg.norm_output


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"taps": [1]}, "unknown setting of the head 'taps'"),
        ({"aux_hidden_state_layer_ids": "1,2"}, "list of boundaries"),
        ({"aux_hidden_state_layer_ids": [1, -1, 2]}, "list of boundaries"),
        ({"norm_output": 1}, "norm_output must be true or false"),
        ({"fc_norm": True}, "fc_norm must be one of none, joined, each"),
        ({"backbone": "mamba"}, "backbone must be one of llama, qwen3"),
    ],
)
def test_a_wrong_setting_by_hand_is_refused(overrides, text):
    with pytest.raises(ValueError, match=text):
        e3.read(FILE, plain(), tensors(), TARGET, overrides)


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


def with_(files, **more):
    return files | more


@pytest.mark.parametrize(
    ("raw", "files", "name"),
    [
        (plain(draft_vocab_size=None), eagle1(), "EAGLE-1"),
        (plain(), eagle1(), "EAGLE-1"),  # also if the config says EAGLE-3
        (
            plain(draft_vocab_size=None),
            eagle1() | {"layers.0.input_layernorm.weight": np.ones(D, np.float16)},
            "EAGLE-1",
        ),
        ({"medusa_num_heads": 4}, {"0.0.linear.weight": np.zeros((D, D))}, "Medusa"),
        ({}, {"medusa_heads.0.linear.weight": np.zeros((D, D))}, "Medusa"),
        ({"hydra_num_heads": 4}, {}, "Hydra"),
        ({"speculators_model_type": "mlp_speculator"}, {}, "mlp_speculator"),
    ],
)
def test_other_kinds_of_heads_are_refused_by_their_names(raw, files, name):
    assert e3.recognises(raw, files)
    refused(raw, files, name, "expected an EAGLE-3 head", kind=UnsupportedModelError)


@pytest.mark.parametrize("key", ["mask_token_id", "ptd_token_id"])
def test_a_p_eagle_head_has_a_mask_token(key):
    files = with_(tensors(), mask_hidden=np.zeros((1, 1, 3 * D), np.float16))
    assert read(plain(**{key: 4}), files).mask_token == 4
    assert read(plain(**{key: 4}), tensors()).mask_token is None
    refused(plain(), files, "lacks the key 'mask_token_id'")
    for shape in ((1, 3 * D), (3 * D,)):
        other = with_(tensors(), mask_hidden=np.zeros(shape, np.float16))
        assert read(plain(**{key: 4}), other) == read(plain(**{key: 4}), files)
    for shape in ((2, 3 * D), (1, 1, 1, 3 * D), ()):
        other = with_(tensors(), mask_hidden=np.zeros(shape, np.float16))
        refused(plain(**{key: 4}), other, f"mask_hidden, expected [1, 1, {3 * D}]")
    narrow = with_(tensors(), mask_hidden=np.zeros((1, 1, D), np.float16))
    refused(plain(**{key: 4}), narrow, f"mask_hidden, expected [1, 1, {3 * D}], got [1, 1, {D}]")


def test_files_of_no_head_are_refused():
    refused(plain(draft_vocab_size=None), {"model.norm.weight": np.zeros(D)}, "model.norm.weight")


@pytest.mark.parametrize(
    ("keys", "change", "text"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantization_config fp8"),
        ({}, {"midlayer.mlp.up_proj.weight_scale": np.ones(1, np.float32)}, "weight_scale"),
        ({"hidden_act": "gelu"}, {}, "hidden_act 'gelu'"),
        ({"model_type": "deepseek_v3"}, {}, "deepseek_v3"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_its_name(keys, change, text):
    files = {n: t for n, t in (tensors() | change).items() if t is not None}
    refused(plain(**keys), files, text, kind=UnsupportedModelError)


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"midlayer.hidden_norm.weight": None},
         ("missing: midlayer.hidden_norm.weight, expected [16]", "fetch")),
        ({"norm.weight": None}, ("missing: norm.weight",)),
        ({"midlayer.mlp.down_proj.weight": np.zeros((F, D), np.float16)},
         ("wrong shape: midlayer.mlp.down_proj.weight, expected [16, 24], got [24, 16]",)),
        ({"midlayer.mlp.down_proj.weight": np.zeros((D, F), np.int64)},
         ("wrong dtype: midlayer.mlp.down_proj.weight", "got int64")),
        ({"midlayer.mlp.up_proj.bias": np.zeros(F)}, ("unexpected: midlayer.mlp.up_proj.bias",)),
        ({"fc.weight": np.zeros((D, 3 * 12), np.float16)},
         ("wrong shape: fc.weight, expected [16, states * 16]", "width 16", "got [16, 36]")),
        ({"fc.weight": np.zeros((D, 4 * D), np.float16)},
         ("takes 4 states of the target's width 16", "[2, 4, 5]", "expected 4")),
        ({"lm_head.weight": np.zeros((V - 1, D), np.float16)},
         ("wrong shape: lm_head.weight, expected [40, 16], got [39, 16]",)),
        ({"embed_tokens.weight": np.zeros((V + 8, D), np.float16)},
         ("wrong shape: embed_tokens.weight, expected [40, 16], got [48, 16]",)),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(change, texts):
    files = {n: t for n, t in (tensors() | change).items() if t is not None}
    refused(plain(), files, *texts)


IDS = (1, 5, 9, 39)


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"d2t": np.array([1, 4, 7, 37])}, ("d2t[3] is 37", "token 40", "from 0 to 39")),
        ({"d2t": np.array([-1, 4, 7, 36])}, ("d2t[0] is -1", "token -1")),
        ({"d2t": np.array([1, 4, 7, 2**63 - 1])}, ("d2t[3]", "from 0 to 39")),
        ({"d2t": np.array([1, 0, 7, 36])}, ("token 1 more than once",)),
        ({"d2t": np.array([1.0, 4.0, 7.0, 36.0])}, ("wrong dtype: d2t", "got float64")),
        ({"d2t": np.array([1, 4, 7])}, ("wrong shape: d2t, expected [4], got [3]",)),
        ({"d2t": None}, ("missing: d2t, expected [4]", "4 of 40 tokens")),
        ({"t2d": np.isin(np.arange(V), (1, 5, 9, 38))},
         ("contradict each other about 2 tokens", "token 38")),
        ({"t2d": np.ones(V - 1, bool)}, ("wrong shape: t2d, expected [40], got [39]",)),
        ({"t2d": np.ones(V, np.float32)}, ("wrong dtype: t2d", "got float32")),
    ],
)  # fmt: skip
def test_lists_of_draft_tokens_that_cannot_be_right_are_refused(change, texts):
    files = tensors(columns=4, ids=IDS) | change
    files = {n: t for n, t in files.items() if t is not None}
    refused(plain(draft_vocab_size=4), files, *texts)


@pytest.mark.parametrize(
    ("keys", "texts"),
    [
        ({"draft_vocab_size": V + 1}, ("41 draft tokens", "at most the 40")),
        ({"vocab_size": V + 8}, ("vocab_size 48, expected 40",)),
        ({"target_hidden_size": 32}, ("target_hidden_size 32, expected 16",)),
        ({"hidden_size": 24}, ("hidden_size is 24", "norm.weight is [16]")),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, ("[2, 4, 9]", "0 to 8", "8 layers")),
        ({"eagle_aux_hidden_state_layer_ids": [4, 2, 5]}, ("[4, 2, 5]", "expected ascending")),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, ("takes 3 states", "[2, 4]")),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5.0]}, ("a list of integers",)),
        ({"eagle_aux_hidden_state_layer_ids": [2, True, 5]}, ("a list of integers",)),
        ({"eagle_config": [1]}, ("eagle_config: expected an object",)),
        ({"use_aux_hidden_state": False, "eagle_config": {"use_aux_hidden_state": True}},
         ("use_aux_hidden_state", "inside eagle_config")),
        ({"norm_before_residual": "yes"}, ("norm_before_residual: expected true or false",)),
        ({"hidden_size": None}, ("lacks the key 'hidden_size'",)),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_are_named(keys, texts):
    refused(plain(**keys), tensors(), *texts)


@pytest.mark.parametrize(("count", "taps"), [(4, "[2, 2, 1]"), (3, "[2, 1, 0]"), (2, "[2, 1, -1]")])
def test_default_states_of_few_layers_are_refused_where_their_order_is_unknown(count, taps):
    target = dense_config(V, D, F, count, N, K, H)
    refused(plain(), tensors(), taps, "layer_ids in draft_overrides", target=target)
    given = read(plain(), tensors(), target, aux_hidden_state_layer_ids=[2, 2, 1])
    assert given.taps == (2, 2, 1)


def test_a_list_of_draft_tokens_without_their_number_must_be_a_list():
    raw = plain(draft_vocab_size=None)
    files = tensors(columns=4, ids=IDS)
    refused(raw, files | {"lm_head.weight": np.float16(1)}, "lm_head.weight, expected 2 axes")
    del files["lm_head.weight"]
    refused(raw, files | {"d2t": np.int64(1)}, "wrong shape: d2t, expected 1 axes, got []")


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
                e3.recognises(changed, files)
                try:
                    e3.read(FILE, changed, files, TARGET)
                except (CheckpointError, UnsupportedModelError) as error:
                    assert FILE in str(error)
                    done += 1
    assert done > 100


def test_a_config_of_speculators_needs_that_of_its_layers():
    raw = speculators()
    del raw["transformer_layer_config"]
    refused(raw, tensors("speculators"), "transformer_layer_config")


# --- what is written ----------------------------------------------------------------------------


HEADS = [
    (plain(), tensors()),
    (plain(rope_theta=7e4, norm_before_residual=True), tensors(norm="joined", embed=True)),
    (plain(draft_vocab_size=4, norm_output=True), tensors(norm="each", columns=4, ids=IDS)),
    (plain(model_type="qwen3", head_dim=H), tensors(qk_norm=True, states=3, head=False)),
    (plain(num_hidden_layers=2), tensors(layers=2, dtype=ml_dtypes.bfloat16)),
    (
        plain(
            num_hidden_layers=2,
            layer_types=["full_attention", "sliding_attention"],
            sliding_window=8,
        ),
        tensors(layers=2),
    ),
    (
        plain(
            model_type="qwen3",
            head_dim=H,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=0,
        ),
        tensors(qk_norm=True),
    ),
    (plain(eagle_aux_hidden_state_layer_ids=[0, 8]), tensors(states=2)),
    (plain(eagle_config={"use_aux_hidden_state": False}), tensors(states=0)),
]


def renamed(files, layout):
    old, new = e3.prefix_of(e3.layout_of(files)), e3.prefix_of(layout)
    return {n.replace(old, new) if n.startswith(old) else n: t for n, t in files.items()}


def test_biases_are_written_where_the_layout_has_a_key_for_them():
    cfg, files = read(plain(), with_biases(tensors(), "qkvo")), tensors("speculators")
    written = {layout: e3.write(cfg, layout, "float16") for layout in e3.LAYOUTS}
    assert read(written["safeailab"], with_biases(tensors(), "qkvo")) == cfg
    assert read(written["speculators"], with_biases(files, "qkvo")) == cfg
    cfg = read(plain(), with_biases(tensors(), "qkv"))
    written = e3.write(cfg, "safeailab", "float16")
    assert read(written, with_biases(tensors(), "qkv")) == cfg
    with pytest.raises(ValueError, match="write the layout safeailab"):
        e3.write(cfg, "speculators", "float16")


@pytest.mark.parametrize("layout", e3.LAYOUTS)
@pytest.mark.parametrize(("raw", "files"), HEADS)
def test_what_is_written_is_read_as_the_same_head(raw, files, layout):
    cfg = read(raw, files)
    if cfg.taps == ("post_norm",) and layout == "speculators":
        with pytest.raises(ValueError, match="write the layout safeailab"):
            e3.write(cfg, layout, "float16")
        return
    written = e3.write(cfg, layout, "float16")
    assert ("model_type" in written) is (layout == "safeailab")
    assert read(written, renamed(files, layout)) == cfg
    assert e3.tensor_shapes(cfg, layout).keys() == renamed(files, layout).keys() - {"d2t", "t2d"}


def test_collided_states_are_written_as_they_are_read():
    target = dense_config(V, D, F, 6, N, K, H)
    cfg = read(plain(), tensors(), target)
    for layout in e3.LAYOUTS:
        written = e3.write(cfg, layout, "float16")
        assert read(written, tensors(layout), target).taps == (2, 3, 3)


def test_a_head_that_a_layout_cannot_express_is_not_written():
    cfg = read(speculators(norm_output=True), tensors("speculators"))
    assert e3.write(cfg, "speculators", "float16")["norm_output"]
    with pytest.raises(ValueError, match="write the layout speculators"):
        e3.write(cfg, "safeailab", "float16")
    with pytest.raises(ValueError, match="ascending"):
        e3.write(dataclasses.replace(cfg, taps=(3, 1, 2)), "speculators", "float16")
    with pytest.raises(ValueError, match="layout must be one of speculators, safeailab"):
        e3.write(cfg, "megatron", "float16")
