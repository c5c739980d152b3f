"""config.json: both dialects read the same, and what is not implemented is refused by name."""

import dataclasses
import json
import math

import numpy as np
import pytest

from specjax.checkpoint import huggingface as hf
from specjax.models.families import family_of
from specjax.models.families.dense import dense_config
from specjax.models.mixers.attention import Attention
from specjax.models.mlps.dense import Dense
from specjax.models.rope import RopeScaling

FAMILIES = ("llama", "qwen2", "qwen3", "mimo")


@pytest.mark.parametrize("family", FAMILIES)
def test_both_config_dialects_read_the_same(family, folder, edit_json):
    path = folder(family)
    new = hf.read_config(path)
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    scaling = None if rope["rope_type"] == "default" else rope
    edit_json(
        path / "config.json",
        rope_parameters=...,
        dtype=...,
        layer_types=...,
        rope_theta=theta,
        rope_scaling=scaling,
        torch_dtype="bfloat16",
    )
    assert hf.read_config(path) == new
    assert new.run.param_dtype == "bfloat16"
    mixer = new.layers[0].mixer
    assert mixer.rope.scaling == (RopeScaling(8.0, 1.0, 4.0, 16) if family == "llama" else None)
    assert (mixer.qkv_bias, mixer.qk_norm) == (family in ("qwen2", "mimo"), family == "qwen3")
    assert new.tie_embeddings == (family in ("qwen2", "qwen3"))
    assert mixer.head_dim == (16 if family == "qwen3" else 8)


def test_end_of_sequence_ids_of_both_files_are_merged(folder, edit_json):
    path = folder("qwen3")
    edit_json(path / "config.json", eos_token_id=7)
    edit_json(path / "generation_config.json", eos_token_id=[9, 7], pad_token_id=4)
    cfg = hf.read_config(path)
    assert cfg.eos_token_ids == (7, 9)
    assert (cfg.bos_token_id, cfg.pad_token_id) == (1, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "deepseek_v3"}, "'deepseek_v3'.*llama, qwen2, qwen3, mimo"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}}, "current length"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"num_experts": 8}, "mixture of experts"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, words, folder, edit_json):
    path = folder("qwen2")
    edit_json(path / "config.json", **changes)
    with pytest.raises(hf.UnsupportedModelError, match=words):
        hf.read_config(path)


KINDS = ["sliding_attention", "full_attention"]
NAMED = {"layer_types": ..., "use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({**NAMED, "max_window_layers": 28}, [None, None]),
        ({**NAMED, "max_window_layers": ...}, [None, None]),
        ({**NAMED, "max_window_layers": 1}, [None, 8]),
        ({**NAMED, "max_window_layers": 1, "use_sliding_window": False}, [None, None]),
        ({**NAMED, "max_window_layers": 1, "sliding_window": None}, [None, None]),
        ({**NAMED, "max_window_layers": 1, "sliding_window": ...}, [None, 4096]),
        ({**NAMED, "max_window_layers": 0, "layer_types": KINDS}, [8, None]),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_layers_of_qwen_have_the_windows_that_transformers_gives_them(
    family, changes, windows, folder, edit_json
):
    path = folder(family)
    edit_json(path / "config.json", **changes)
    assert [layer.mixer.window for layer in hf.read_config(path).layers] == windows


def test_windows_that_cannot_be_meant_or_are_not_implemented_are_refused(folder, edit_json):
    path = folder("qwen2")
    edit_json(path / "config.json", layer_types=KINDS, use_sliding_window=False)
    with pytest.raises(hf.CheckpointError, match="no sliding_window is in use"):
        hf.read_config(path)
    edit_json(path / "config.json", **NAMED, max_window_layers=0)
    edit_json(path / "config.json", sliding_window=0)
    with pytest.raises(hf.CheckpointError, match="sliding_window: expected at least 1"):
        hf.read_config(path)
    edit_json(path / "config.json", layer_types=["full_attention", "chunked_attention"])
    with pytest.raises(hf.UnsupportedModelError, match="chunked_attention"):
        hf.read_config(path)
    path = folder("mimo")
    edit_json(path / "config.json", **NAMED, max_window_layers=0)
    with pytest.raises(hf.UnsupportedModelError, match="sliding window of 8"):
        hf.read_config(path)


def test_config_problems_are_clear_errors(folder, tmp_path, edit_json):
    with pytest.raises(hf.CheckpointError, match="config.json does not exist"):
        hf.load_checkpoint(tmp_path)
    path = folder("llama")
    edit_json(path / "config.json", hidden_size=...)
    with pytest.raises(hf.CheckpointError, match="lacks the key 'hidden_size'"):
        hf.read_config(path)
    (path / "config.json").write_text("{ not json")
    with pytest.raises(hf.CheckpointError, match="cannot be read as JSON"):
        hf.read_config(path)


# --- every key has a type and a range -----------------------------------------------------------

NO_SIZE = [None, "32", 32.0, 0, -8, True, [32], {"a": 1}, 10**12, float("nan"), float("inf")]
NO_NUMBER = ["1e-6", float("nan"), float("inf"), -1.0, True, [1], 10**400]
NO_FLAG = [1, 0, "true", "yes", [], {}]
NO_IDS = [-1, 64, 10**6, 2.0, "2", True, [2, -1], [[2]], {"id": 2}]
WRONG = {
    "hidden_size": NO_SIZE,
    "intermediate_size": NO_SIZE,
    "num_hidden_layers": NO_SIZE,
    "num_attention_heads": NO_SIZE,
    "vocab_size": NO_SIZE,
    "max_position_embeddings": NO_SIZE,
    "num_key_value_heads": [*NO_SIZE[1:], 3, 8],
    "head_dim": [*NO_SIZE[1:], 7],
    "rms_norm_eps": [None, *NO_NUMBER],
    "tie_word_embeddings": [None, *NO_FLAG],
    "use_sliding_window": NO_FLAG,
    "mlp_bias": NO_FLAG,
    "eos_token_id": NO_IDS,
    "bos_token_id": [*NO_IDS, [1]],
    "pad_token_id": [*NO_IDS, [1]],
    "model_type": [None, 3, ["qwen2"], "", "deepseek_v3"],
    "architectures": ["Qwen2ForCausalLM", [1], ["Qwen2ForSequenceClassification"], ["Qwen2Model"]],
    "hidden_act": [None, 3, "relu", ["silu"]],
    "dtype": [16, "float8_e4m3fn", ["bfloat16"], "auto", ""],
    "layer_types": ["full_attention", ["full_attention"], [1, 2], ["full_attention", "other"]],
    "rope_parameters": ["default", 10_000.0, [1]],
    "quantization_config": ["awq", [4], {"quant_method": "fp8"}, {"bits": 4}],
    "num_nextn_predict_layers": ["1", -1, 1.5, True],
    "specjax_mtp": ["pre_norm", {"concat": "both"}, {"recycle": 1}],
    "num_experts": [8, "8", -1, True],
    "sliding_window": ["8", -8, 4.5],
}


@pytest.mark.parametrize("key", WRONG)
def test_values_that_cannot_be_meant_are_one_line_that_names_file_and_key(key, folder, edit_json):
    path = folder("qwen2")
    for value in WRONG[key]:
        edit_json(path / "config.json", **{key: value})
        with pytest.raises((hf.CheckpointError, hf.UnsupportedModelError)) as caught:
            hf.read_config(path)
        said = str(caught.value)
        assert f"{path / 'config.json'}: " in said and key in said and "\n" not in said, said
        assert len(said) < 400 and said.isascii()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ({"rope_theta": "1e6"}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_type": 3}, "rope_type"),
        ({"rope_type": "llama3"}, "factor"),
        (LLAMA3 := {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({**LLAMA3, "high_freq_factor": 4.0, "factor": -8.0}, "factor"),
        (
            {**LLAMA3, "high_freq_factor": 4.0, "original_max_position_embeddings": "8192"},
            "original_max_position_embeddings",
        ),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}, "rope_theta"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 0}, "attention_factor"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": 1}, "truncate"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "rope"),
    ],
)
def test_rope_is_checked_in_both_dialects(family, rope, key, folder, edit_json):
    path = folder(family)
    for name in ("rope_parameters", "rope_scaling"):
        edit_json(path / "config.json", rope_parameters=..., rope_scaling=...)
        edit_json(path / "config.json", **{name: rope})
        with pytest.raises((hf.CheckpointError, hf.UnsupportedModelError), match=key):
            hf.read_config(path)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def yarn_by_its_equations(size, theta, keys, longest):
    """Frequencies, and the factor of cosines and sines, as in the paper and in transformers."""
    factor, length = keys["factor"] or longest / 64, keys["original_max_position_embeddings"]
    places = [
        size * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))
        for turns in (keys.get("beta_fast", 32), keys.get("beta_slow", 1))
    ]
    if keys.get("truncate", True):
        places = [math.floor(places[0]), math.ceil(places[1])]
    low, high = max(places[0], 0), min(places[1], size - 1)
    found = []
    for i in range(size // 2):
        plain = theta ** (-2 * i / size)
        share = min(max((i - low) / (high - low), 0), 1)
        found.append(plain * (1 - share) + plain / factor * share)
    growth = 0.1 * math.log(factor) + 1
    if "mscale" in keys:
        one, other = (0.1 * keys[n] * math.log(factor) + 1 for n in ("mscale", "mscale_all_dim"))
        growth = one / other
    return found, keys.get("attention_factor", growth)


@pytest.mark.parametrize(
    "keys",
    [
        YARN,
        {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
        {**YARN, "attention_factor": 1.25},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
        {**YARN, "factor": None},
    ],
)
def test_yarn_and_linear_positions_are_those_of_their_equations(keys, folder, edit_json):
    path, size, theta = folder("qwen3"), 12, 5e3
    positions = np.arange(0, 4000, 37)[None]

    def check(given, frequencies, magnitude):
        nothing = {"rope_parameters": ..., "rope_scaling": ..., "rope_theta": ...}
        lengths = {"head_dim": size, "max_position_embeddings": longest}
        edit_json(path / "config.json", **nothing, **lengths)
        edit_json(path / "config.json", **given)
        rope = (mixer := hf.read_config(path).layers[0].mixer).rope
        angles = np.tile(positions[..., None] * np.array(frequencies), 2)
        for ours, theirs in zip(mixer.angles(positions), (np.cos, np.sin), strict=True):
            np.testing.assert_allclose(ours, magnitude * theirs(angles), atol=1e-3)
        small = dense_config(8, 4, 4, 1, 2, 1, size, rope_theta=theta, rope_scaling=rope.scaling)
        written = hf.config_json(small, False, "float32")
        edit_json(path / "config.json", **{name: written[name] for name in nothing})
        assert hf.read_config(path).layers[0].mixer.rope == rope

    longest = 320
    expected = yarn_by_its_equations(size, theta, keys, longest)
    old = {**keys, "type": "yarn"}
    del old["rope_type"]
    check({"rope_parameters": {**keys, "rope_theta": theta}}, *expected)
    check({"rope_scaling": old, "rope_theta": theta}, *expected)
    linear = {"type": "linear", "factor": 2.5}
    plain = theta ** (-np.arange(0, size, 2) / size)
    check({"rope_scaling": linear, "rope_theta": theta}, plain / 2.5, 1.0)


PLAIN = {"rope_type": "default", "rope_theta": 1e6}
SCALED = {**LLAMA3, "high_freq_factor": 4.0, "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ({"rope_type": "default"}, {"rope_type": "yarn", "factor": 4.0}),
        (PLAIN, {"type": "linear", "factor": 2.0, "rope_theta": 1e6}),
        (PLAIN, SCALED),
        (SCALED, PLAIN),
        (SCALED, {**SCALED, "factor": 4.0}),
        (PLAIN, {"rope_type": "default"}),  # whose theta is 10000: transformers drops the other
    ],
)
def test_two_sets_of_rope_parameters_that_differ_are_refused(new, old, folder, edit_json):
    path = folder("qwen3")
    edit_json(path / "config.json", rope_parameters=new, rope_scaling=old, rope_theta=...)
    with pytest.raises(hf.UnsupportedModelError, match="rope_parameters .* rope_scaling .* differ"):
        hf.read_config(path)


def test_null_is_absent_where_transformers_reads_it_so(folder, edit_json):
    path = folder("llama")
    before = hf.read_config(path)
    nothing = dict.fromkeys(
        ("head_dim", "pad_token_id", "rope_scaling", "quantization_config", "sliding_window")
    )
    edit_json(path / "config.json", **nothing)
    assert hf.read_config(path) == before  # whose head_dim is hidden_size / num_attention_heads
    edit_json(path / "config.json", num_key_value_heads=None, eos_token_id=None, dtype=None)
    edit_json(path / "generation_config.json", eos_token_id=None)
    cfg = hf.read_config(path)
    mixer = cfg.layers[0].mixer
    assert (mixer.num_kv_heads, cfg.eos_token_ids) == (mixer.num_heads, ())
    assert cfg.run.param_dtype == "bfloat16"  # that of the weights
    edit_json(path / "config.json", hidden_size=33)
    with pytest.raises(hf.CheckpointError, match="hidden_size: expected a multiple of num_"):
        hf.read_config(path)


class OtherAttention(Attention):
    """May compute something else."""


class OtherDense(Dense):
    """May compute something else."""


@pytest.mark.parametrize("part", ["mixer", "mlp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_class_derived_from_a_known_one_is_not_written_as_that_one(family, part):
    kinds = {"qkv_bias": family in ("qwen2", "mimo"), "qk_norm": family == "qwen3"}
    cfg = dense_config(64, 32, 48, 2, 4, 2, 8, model_type=family, **kinds)
    assert family_of(family).write(cfg)["intermediate_size"] == 48
    known = getattr(cfg.layers[1], part)
    other = {"mixer": OtherAttention, "mlp": OtherDense}[part](**vars(known))
    layer = dataclasses.replace(cfg.layers[1], **{part: other})
    with pytest.raises(hf.UnsupportedModelError, match=f"got {type(other).__name__}"):
        family_of(family).write(cfg.replace(layers=(layer, layer)))
