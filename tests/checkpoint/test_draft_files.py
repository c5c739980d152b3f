"""Heads in directories of their own: found, read, written, converted, with every bit the same."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from serve.cli.main import main
from specjax.checked_json import CheckpointError
from specjax.checkpoint.draft_files import load_draft_files, save_draft_files
from specjax.checkpoint.huggingface import save_checkpoint
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params
from specjax.parallel import sharding

LAYOUTS = ("safeailab", "speculators")
D, V, L = 16, 40, 8
TARGET = dense_config(V, D, 24, L, 4, 2, 4)
IDS = [3, 1, 39, 9, 17]  # in the order of the files, which need not ascend


def prefix_of(layout):
    return "midlayer." if layout == "safeailab" else "layers.0."


def head(layout, dtype=np.float16, **keys):
    """The config and the tensors of a head with some draft tokens, as its files have them."""
    body = {
        "model_type": "llama", "hidden_size": D, "intermediate_size": 24, "vocab_size": V,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "head_dim": 4,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    }  # fmt: skip
    top = {"draft_vocab_size": len(IDS), "torch_dtype": np.dtype(dtype).name, **keys}
    raw = {"architectures": ["LlamaForCausalLM"], **body, **top}
    if layout == "speculators":
        raw = {"speculators_model_type": "eagle3", "transformer_layer_config": body, **top}
    made, rng = prefix_of(layout), np.random.default_rng(0)
    shapes = {
        "fc": (D, 3 * D), "norm": (D,), "lm_head": (len(IDS), D), "embed_tokens": (V, D),
        f"{made}self_attn.q_proj": (16, 2 * D), f"{made}self_attn.k_proj": (8, 2 * D),
        f"{made}self_attn.v_proj": (8, 2 * D), f"{made}self_attn.o_proj": (D, 16),
        f"{made}mlp.gate_proj": (24, D), f"{made}mlp.up_proj": (24, D),
        f"{made}mlp.down_proj": (D, 24), f"{made}input_layernorm": (D,),
        f"{made}hidden_norm": (D,), f"{made}post_attention_layernorm": (D,),
    }  # fmt: skip
    tensors = {f"{n}.weight": rng.normal(size=s).astype(dtype) for n, s in shapes.items()}
    tensors["d2t"] = np.array(IDS, np.int64) - np.arange(len(IDS))
    tensors["t2d"] = np.isin(np.arange(V), IDS)
    return raw, tensors


def written(path, raw, tensors):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(params=LAYOUTS)
def files(request, tmp_path):
    return written(tmp_path / "head", *head(request.param))


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))


# --- loading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_head_is_loaded_in_the_dtype_of_its_target_and_ids_stay_integers(files, dtype):
    tensors = load_file(files / "model.safetensors")
    source, params = load_draft_files(files, TARGET.running(param_dtype=dtype))
    assert source.cfg.taps == (2, 4, 5)
    assert params["ids"].dtype == jnp.int32 and params["ids"].tolist() == sorted(IDS)
    order, prefix = np.argsort(IDS), prefix_of(source.layout)
    for array, expected in (
        (params["fc"], tensors["fc.weight"].T),
        (params["lm_head"], tensors["lm_head.weight"][order].T),
        (params["embed"], tensors["embed_tokens.weight"]),
        (params["layers"][0]["q"], tensors[f"{prefix}self_attn.q_proj.weight"].T),
        (params["layers"][0]["hidden_norm"], tensors[f"{prefix}hidden_norm.weight"]),
    ):
        assert array.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(np.asarray(array), expected.astype(jnp.dtype(dtype)))


def test_an_embedding_that_is_the_language_model_head_too_is_loaded_as_both(tmp_path):
    raw, tensors = head("safeailab", tie_word_embeddings=True, draft_vocab_size=V)
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    source, params = load_draft_files(written(tmp_path / "head", raw, tensors), TARGET)
    np.testing.assert_array_equal(params["lm_head"], tensors["embed_tokens.weight"].T)
    np.testing.assert_array_equal(params["embed"], tensors["embed_tokens.weight"])
    save_draft_files(tmp_path / "again", source, params, "float32")
    again, same = load_draft_files(tmp_path / "again", TARGET)
    assert again.cfg == source.cfg
    assert_same(same, params)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_and_biases_are_loaded_and_written(layout, tmp_path):
    sizes, prefix = {"q": 16, "k": 8, "v": 8, "o": D}, prefix_of(layout)
    raw, tensors = head(layout)
    body = raw.get("transformer_layer_config", raw)
    body |= {"attention_bias": True, "layer_types": ["sliding_attention"], "sliding_window": 2048}
    for name, size in sizes.items():
        tensors[f"{prefix}self_attn.{name}_proj.bias"] = np.full(size, size, np.float16)
    source, params = load_draft_files(written(tmp_path / "head", raw, tensors), TARGET)
    assert source.cfg.network.layers[0].mixer.window == 2048
    for name, size in sizes.items():
        np.testing.assert_array_equal(params["layers"][0][f"{name}_bias"], np.full(size, size))
    save_draft_files(tmp_path / "again", source, params, "float32")
    again, same = load_draft_files(tmp_path / "again", TARGET)
    assert again.cfg == source.cfg
    assert_same(same, params)


def test_both_layouts_give_the_same_parameters(tmp_path):
    raw, tensors = head("safeailab")
    one = load_draft_files(written(tmp_path / "a", raw, tensors), TARGET)
    two = load_draft_files(written(tmp_path / "b", *head("speculators")), TARGET)
    assert one[0] == two[0]
    assert_same(two[1], one[1])


def test_a_head_is_placed_by_slices_on_a_mesh(files):
    """Each device reads its part, and the whole is what one device reads."""
    mesh = sharding.make_mesh(sharding.MeshConfig(tp=2), jax.devices()[:2])
    source, params = load_draft_files(files, TARGET, mesh)
    assert_same(params, load_draft_files(files, TARGET)[1])
    assert params["lm_head"].sharding.mesh.shape["tp"] == 2
    shards = {shard.data.shape for shard in params["layers"][0]["q"].addressable_shards}
    assert shards == {(2 * D, 8)}
    wanted = sharding.param_shardings(mesh, params, source.axes())
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, params, wanted))


# --- what is refused ----------------------------------------------------------------------------


def test_missing_and_damaged_weights_are_named(files):
    data = (files / "model.safetensors").read_bytes()
    (files / "model.safetensors").write_bytes(data[:-50])
    with pytest.raises(CheckpointError, match="model.safetensors is damaged"):
        load_draft_files(files, TARGET)
    (files / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or"):
        load_draft_files(files, TARGET)


def test_a_head_for_another_target_is_refused(files):
    with pytest.raises(CheckpointError, match="vocab_size 40, expected 48"):
        load_draft_files(files, dense_config(48, D, 24, L, 4, 2, 4))
    with pytest.raises(CheckpointError, match=r"fc.weight, expected \[16, 72\], got"):
        load_draft_files(files, dense_config(V, 24, 24, L, 4, 2, 4))


# --- writing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_is_read_with_every_bit_the_same(tmp_path, layout, dtype):
    raw, tensors = head(layout, ml_dtypes.bfloat16, norm_before_residual=True, fc_norm=True)
    tensors |= {f"fc_norm.{i}.weight": np.full(D, i, ml_dtypes.bfloat16) for i in range(3)}
    target = TARGET.running(param_dtype=dtype)
    source, params = load_draft_files(written(tmp_path / "one", raw, tensors), target)
    save_draft_files(tmp_path / "two", source, params, dtype)
    again, same = load_draft_files(tmp_path / "two", target)
    assert again == source
    assert_same(same, params)
    saved = load_file(tmp_path / "two" / "model.safetensors")
    assert saved["d2t"].dtype == np.int64 and saved["t2d"].dtype == np.bool_
    np.testing.assert_array_equal(saved["t2d"], tensors["t2d"])
    order = np.argsort(IDS)
    np.testing.assert_array_equal(saved["d2t"] + np.arange(len(IDS)), np.sort(IDS))
    expected = tensors["lm_head.weight"][order].astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(saved["lm_head.weight"], expected)
    assert not list(tmp_path.glob(".*"))


# --- converting ---------------------------------------------------------------------------------


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "policy"
    save_checkpoint(path, TARGET, init_params(TARGET))
    return path


@pytest.fixture
def convert(capsys):
    def run(*arguments):
        return main(["convert", *map(str, arguments)]), *capsys.readouterr()

    return run


def test_a_head_is_converted_with_every_bit_the_same(files, policy, convert, tmp_path):
    status, said, _ = convert(files, tmp_path / "other", "--like", policy)
    assert status == 0 and "head 0.00 M (float16, layout" in said
    source, params = load_draft_files(files, TARGET)
    other, same = load_draft_files(tmp_path / "other", TARGET)
    assert (other, other.layout) == (source, "speculators")
    assert_same(same, params)
    stored = load_file(tmp_path / "other" / "model.safetensors")
    for name, array in load_file(files / "model.safetensors").items():
        if name not in ("d2t", "lm_head.weight"):  # their columns ascend now
            np.testing.assert_array_equal(stored[name.replace("midlayer", "layers.0")], array)


def test_a_conversion_of_a_head_that_cannot_be_is_refused(files, policy, convert, tmp_path):
    target = tmp_path / "other"
    for arguments, text in (
        ((), "expected --like DIR"),
        (("--like", policy, "--to", "orbax"), "speculators"),
        (("--like", policy, "--what", "policy"), "holds no policy"),
        (("--like", policy, "--step", 3), "no step 3"),
    ):
        status, _, errors = convert(files, target, *arguments)
        assert status == 1 and text in errors and not target.exists()
    status, _, errors = convert(policy, target, "--to", "speculators")
    assert status == 1 and "expected --to hf or orbax, got speculators" in errors
    assert convert(files, target, "--like", policy)[0] == 0
    status, _, errors = convert(files, target, "--like", policy)
    assert status == 1 and "exists; choose another target" in errors
