"""Each key of a family's config.json is read, is known to change nothing, or is refused by name."""

import copy
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from specjax.checked_json import CheckpointError, UnsupportedModelError
from specjax.checkpoint import huggingface as hf
from specjax.drafts.eagle3 import Eagle3Source
from specjax.drafts.mtp import MTPSource
from specjax.models.families import family_of
from specjax.registry import FAMILIES

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
TYPES = [  # mimo is not in transformers, and the others are names of models that read images
    name for name in FAMILIES.names if name != "mimo" and family_of(name).model_type == name
]
INERT = {
    "transformers_version", "architectures", "output_hidden_states", "return_dict", "dtype",
    "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type",
    "initializer_range", "use_cache", "attention_dropout", "_name_or_path", "output_attentions",
    "pretraining_tp", "resid_pdrop", "embd_pdrop", "_sliding_window_pattern", "model_type",
    "output_router_logits", "router_aux_loss_coef",
}  # fmt: skip
# Where other keys have their defaults.
UNUSED = {
    "qwen2": {"sliding_window", "use_sliding_window", "max_window_layers"},
    "qwen3": {"sliding_window", "use_sliding_window", "max_window_layers"},
    "qwen3_moe": {"sliding_window", "use_sliding_window", "max_window_layers", "intermediate_size"},
    "smollm3": {
        "sliding_window",
        "use_sliding_window",
        "layer_types",
        "no_rope_layer_interval",
        "num_hidden_layers",
    },
    "phi3": {"original_max_position_embeddings"},
    "qwen3_next": {"intermediate_size"},
}


def usual_config(model_type):
    """What transformers writes of a family's defaults."""
    raw = transformers.AutoConfig.for_model(model_type).to_dict()
    return {**raw, "head_dim": 128} if model_type == "glm4_moe" else raw  # as published


def read(raw):
    return hf.config_of(Path("config.json"), raw, {})


def changed(name, value):
    """Another value of a key."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return "gelu"
    if isinstance(value, list):
        if not value:
            return [0]
        other = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
        return [other.get(value[0], 1 - value[0] if value[0] in (0, 1) else None), *value[1:]]
    if isinstance(value, dict):  # RoPE, by layer type or not
        value = copy.deepcopy(value)
        next((v for v in value.values() if isinstance(v, dict)), value)["rope_theta"] = 123.0
        return value
    return True if name.startswith("use_") else 7


@pytest.mark.parametrize("model_type", TYPES)
def test_each_key_changes_the_config_or_is_refused_by_name(model_type):
    raw = usual_config(model_type)
    usual = read(raw)
    for name in raw.keys() - INERT - UNUSED.get(model_type, set()):
        try:
            assert read({**raw, name: changed(name, raw[name])}) != usual, name
        except (CheckpointError, UnsupportedModelError) as error:
            assert name in str(error), name


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("llama", "final_logit_softcapping", 30.0), ("llama", "embedding_multiplier", 12.0),
        ("llama", "sliding_window", 512), ("qwen2", "query_pre_attn_scalar", 64),
        ("qwen3", "residual_multiplier", 0.2), ("mistral", "attention_bias", True),
        ("olmo2", "clip_qkv", 8.0), ("gemma2", "use_bidirectional_attention", True),
        ("granite", "num_local_experts", 8), ("phi3", "use_qk_norm", True),
        ("smollm3", "mlp_bias", True), ("gemma3_text", "attention_chunk_size", 64),
        ("llama", "some_new_scaling", 3.0), ("llama", "use_parallel_residual", True),
        ("llama", "output_multiplier", 2.0), ("llama", "swiglu_limit", 7.0),
        ("olmo2", "is_neox_style", False), ("qwen3", "use_rope", False),
    ],
)  # fmt: skip
def test_a_key_of_another_family_is_refused_by_name(model_type, key, value):
    raw = transformers.AutoConfig.for_model(model_type).to_dict()
    with pytest.raises(UnsupportedModelError, match=key):
        read({**raw, key: value})
    assert read({**raw, key: None}) == read(raw)


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("llama", {"unsloth_fixed": True, "is_llama_config": True, "rope_interleaved": False}),
        (
            "llama",
            {
                "is_causal": True,
                "use_rope": True,
                "logit_scale": 1.0,
                "causal": True,
                "sequence_parallel": True,
                "kv_cache_dtype": "x",
            },
        ),
        ("llama", {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}),
        ("qwen2", {"use_mrope": False, "max_window_layers": 21, "sliding_window": 131_072}),
        ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "sliding_window_size": 4096}),
        ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}),
        ("phi3", {"sliding_window": 262_144}),
        ("smollm3", {"max_window_layers": 28, "pretraining_tp": 2}),
    ],
)
def test_keys_of_published_files_that_change_nothing_are_left_alone(model_type, more):
    raw = transformers.AutoConfig.for_model(model_type).to_dict()
    assert read({**raw, **more}) == read(raw)


@pytest.mark.parametrize(
    ("model_type", "field"),
    [("llama", "windows"), ("ministral", "soft_cap"), ("gemma3_text", "qk_norm")],
)
def test_what_a_family_cannot_express_is_refused_by_the_field(model_type, field):
    cfg = hf.read_config(GOLDEN / "gemma2").replace(model_type=model_type)
    with pytest.raises(UnsupportedModelError, match=field):
        hf.config_json(cfg, False, "float32")


def test_ministral3_is_refused_because_it_scales_queries():
    raw = transformers.AutoConfig.for_model("ministral").to_dict()
    with pytest.raises(UnsupportedModelError, match="scales queries"):
        read({**raw, "model_type": "ministral3"})


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_of_a_model_that_reads_images_is_loaded_without_what_reads_them(
    prefix, tmp_path, caplog
):
    """The files of google/gemma-3-4b-it begin in the first way, and transformers' names in the
    second."""
    source = GOLDEN / "gemma3_text"
    raw = json.loads((source / "config.json").read_text())
    text = {**raw, "eos_token_id": 3, "dtype": None}
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}}
    outer |= {"eos_token_id": [2], "dtype": raw["dtype"], "mm_tokens_per_image": 4}
    outer["architectures"] = ["Gemma3ForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(source / "model.safetensors")
    tensors = {name.replace("model.", prefix, 1): array for name, array in tensors.items()}
    for name in ("vision_tower.embed.weight", "multi_modal_projector.weight"):
        tensors[name] = np.zeros((2, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    cfg, params, _ = hf.load_checkpoint(tmp_path)
    assert "2 tensors are left out" in caplog.text and "vision_tower" in caplog.text
    wanted, arrays, _ = hf.load_checkpoint(source)
    assert cfg == wanted
    jax.tree.map(np.testing.assert_array_equal, params, arrays)
    hf.save_checkpoint(tmp_path / "out", cfg, params)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "gemma3_text"


def test_an_old_config_of_gemma3_that_says_little_has_the_defaults_of_transformers():
    """As google/gemma-3-4b-it has it."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106]}
    raw = {"model_type": "gemma3", **whole, "text_config": text, "torch_dtype": "bfloat16"}
    for more in (
        {"architectures": ["Gemma3ForSequenceClassification"]},
        {"quantization_config": {"quant_method": "gptq"}},
    ):
        with pytest.raises(UnsupportedModelError, match=next(iter(more))):
            read({**raw, **more})
    cfg = read(raw)
    full, local = cfg.layers[5].mixer, cfg.layers[0].mixer
    assert (full.window, local.window) == (None, 1024)
    assert (full.rope.theta, full.rope.scaling.factor) == (1e6, 8.0)
    assert (local.rope.theta, local.rope.scaling) == (1e4, None)
    assert (local.num_heads, local.num_kv_heads, local.head_dim) == (8, 4, 256)
    assert cfg.eos_token_ids == (1, 106)
    assert (cfg.vocab_size, cfg.max_position, cfg.tie_embeddings) == (262_208, 131_072, True)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_new_eagle3_head_for_any_family_is_written_as_config_json(model_type):
    cfg = read(usual_config(model_type))
    raw, source = Eagle3Source.of(cfg).saved("float32")
    body = raw["transformer_layer_config"]
    rope = source.network.layers[0].mixer.rope
    assert body["rope_parameters"]["rope_theta"] == rope.theta
    assert (body["hidden_size"], rope.share, rope.interleaved) == (cfg.hidden_size, 1, False)
    [layer] = MTPSource.of(cfg).bound({}).layers
    assert layer.mixer.rope.share > 0


def test_ropes_by_layer_type_are_written_in_the_old_dialect_too():
    text = {**transformers.AutoConfig.for_model("gemma3_text").to_dict(), "rope_parameters": None}
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear"}}
    old["rope_scaling"]["factor"] = 8.0
    cfg = read({**text, **old})
    raw = hf.config_json(cfg, False, "float32")
    assert {name: raw[name] for name in old} == old
    assert read(raw) == cfg == read({**raw, "rope_scaling": None})
    with pytest.raises(UnsupportedModelError, match="differ"):
        read({**raw, "rope_scaling": {"rope_type": "linear", "factor": 4.0}})


def test_longrope_is_written_as_transformers_4_accepts_it():
    raw = json.loads((GOLDEN / "phi3" / "config.json").read_text())
    del raw["rope_parameters"]["attention_factor"]
    raw |= {"max_position_embeddings": 131_072, "sliding_window": 262_144}
    cfg = read(raw)
    out = hf.config_json(cfg, False, "bfloat16")
    assert out["rope_scaling"].keys() == {"type", "short_factor", "long_factor"}
    assert read(out) == cfg
    del out["rope_parameters"]
    assert read(out) == cfg
    with pytest.raises(CheckpointError, match="factors of longrope"):
        read({**out, "rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [2]}})


def test_a_window_of_qwen3_moe_is_that_of_all_layers_and_its_keys_must_agree():
    raw = usual_config("qwen3_moe")
    used = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 20}
    cfg = read({**raw, **used, "use_qk_norm": True})
    assert {layer.mixer.window for layer in cfg.layers} == {512}
    assert read({**raw, **family_of("qwen3_moe").write(cfg)}).layers == cfg.layers
    for wrong in ({"use_qk_norm": False}, {"num_experts": 64}, {"num_experts_per_tok": 200}):
        with pytest.raises((CheckpointError, UnsupportedModelError), match=next(iter(wrong))):
            read({**raw, **wrong})


# --- hybrids --------------------------------------------------------------------------------------

KINDS = ["linear_attention"] * 3 + ["full_attention"]
SHAPES = Path(__file__).resolve().parents[2] / "assets" / "shapes"
WHOLE = json.loads((SHAPES / "Qwen3.5-35B-A3B" / "config.json").read_text())
WHOLE["text_config"] |= {"layer_types": KINDS * 10, "mlp_only_layers": []}
WHOLE["text_config"]["output_gate_type"] = "swish"  # of Qwen3.6
WHOLE |= {"image_token_id": 248_056, "vision_config": {"depth": 27, "hidden_size": 1152}}
TEXT = WHOLE["text_config"]
OF_35 = ("attn_output_gate", "layer_types", "mamba_ssm_dtype", "mtp_num_hidden_layers", "dtype")
NEXT = {name: value for name, value in TEXT.items() if name not in OF_35} | {
    "architectures": ["Qwen3NextForCausalLM"], "decoder_sparse_step": 1, "intermediate_size": 5120,
    "model_type": "qwen3_next", "norm_topk_prob": True, "num_experts": 512, "vocab_size": 151_936,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "output_router_logits": False,
    "partial_rotary_factor": 0.25, "rope_parameters": None, "rope_scaling": None,
    "rope_theta": 10_000_000, "router_aux_loss_coef": 0.001, "torch_dtype": "bfloat16",
    "use_sliding_window": False, "eos_token_id": 151_645,
}  # fmt: skip


@pytest.mark.parametrize(("raw", "experts", "heads"), [(NEXT, 512, 0), (WHOLE, 256, 1)])
def test_a_published_hybrid_is_read_as_what_it_is_and_written_as_such(raw, experts, heads):
    cfg = read(raw)
    linear, full = cfg.layers[2].mixer, cfg.layers[3].mixer
    pattern = (linear, linear, linear, full) * (cfg.num_layers // 4)
    assert tuple(layer.mixer for layer in cfg.layers) == pattern
    assert (linear.num_k_heads, linear.num_v_heads, linear.conv_kernel) == (16, 32, 4)
    assert (full.head_dim, full.gate, full.rope.theta, full.rope.share) == (256, True, 1e7, 0.25)
    [mlp] = {layer.mlp for layer in cfg.layers}
    assert (mlp.num_experts, mlp.shared_size, mlp.shared_gate) == (experts, 512, True)
    assert (mlp.norm_topk_prob, cfg.mtp_num_layers) == (True, heads)
    assert read(hf.config_json(cfg, heads > 0, "bfloat16")) == cfg


@pytest.mark.parametrize(
    "change",
    [
        {"attn_output_gate": False}, {"mtp_use_dedicated_embeddings": True},
        {"layer_types": ["linear_attention", "mamba"] * 20}, {"layer_types": KINDS},
        {"layer_types": ["full_attention"] * 40}, {"output_gate_type": "sigmoid"},
        {"linear_num_value_heads": 24}, {"mlp_only_layers": [1]}, {"linear_conv_kernel_dim": 1},
        {"mamba_chunk_size": 64}, {"attention_bias": True},
    ],
)  # fmt: skip
def test_what_a_hybrid_does_not_compute_is_refused_by_name(change):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=next(iter(change))):
        read(TEXT | change)


# --- gpt-oss --------------------------------------------------------------------------------------

METHOD = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


@pytest.mark.parametrize(("size", "layers", "experts"), [("20b", 24, 32), ("120b", 36, 128)])
def test_a_published_gpt_oss_is_read_as_what_it_is_and_written_as_such(size, layers, experts):
    raw = json.loads((SHAPES / f"gpt-oss-{size}" / "config.json").read_text())
    cfg = read({**raw, "quantization_config": METHOD, "router_aux_loss_coef": 0.9})
    sliding, full = cfg.layers[0].mixer, cfg.layers[1].mixer
    assert [layer.mixer for layer in cfg.layers] == [sliding, full] * (layers // 2)
    assert (sliding.window, full.window) == (128, None)
    assert (full.sinks, full.qkv_bias, full.o_bias, full.head_dim) == (True, True, True, 64)
    scaling = full.rope.scaling
    assert (full.rope.theta, scaling.factor, scaling.truncate) == (150_000, 32, False)
    assert scaling.magnitude == pytest.approx(1.3466, abs=1e-4)
    [mlp] = {layer.mlp for layer in cfg.layers}
    assert (mlp.num_experts, mlp.num_experts_per_tok, mlp.intermediate_size) == (experts, 4, 2880)
    assert (mlp.router, mlp.biases, mlp.limit, mlp.alpha) == ("topk_softmax", True, 7.0, 1.702)
    out = hf.config_json(cfg, False, "bfloat16")
    assert read(out) == cfg and out["experts_per_token"] == 4
    assert read({k: v for k, v in raw.items() if k not in ("rope_theta", "rope_scaling")}) == cfg
    for wrong in ({"experts_per_token": 2}, {"num_experts": 64}, {"layer_types": KINDS}):
        with pytest.raises((CheckpointError, UnsupportedModelError), match=next(iter(wrong))):
            read(raw | wrong)
