"""Hugging Face weights: errors that name them, placing without a second copy, exact round trips."""

import gc
import json
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bench.programs import change_dense
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.huggingface_names import CheckpointWeightError
from specjax.drafts.mtp import init_head_params, weight_axes
from specjax.models.families.dense import dense_config
from specjax.models.rope import RopeScaling
from specjax.models.transformer import init_params
from specjax.parallel import sharding
from specjax.weights.safetensors import Tensor

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
SMALL = dense_config(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, eos_token_ids=(2, 3), bos_token_id=1, max_position=64,
)  # fmt: skip


def make(cfg, seed=0):
    """Random parameters and head, norms and biases included."""

    def draw(tree, key):
        leaves, structure = jax.tree.flatten(tree)
        dtype = jnp.dtype(cfg.run.param_dtype)
        rng = np.random.default_rng(key)
        leaves = [jnp.asarray(rng.normal(size=leaf.shape), dtype) for leaf in leaves]
        return jax.tree.unflatten(structure, leaves)

    head = None
    if cfg.mtp_num_layers:
        head = draw(jax.eval_shape(lambda: init_head_params(cfg)), seed + 1)
    return draw(jax.eval_shape(lambda: init_params(cfg)), seed), head


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))


# --- reading weights ----------------------------------------------------------------------------


def test_every_weight_that_does_not_fit_is_named_in_one_error(folder):
    path = folder("mimo")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.bias"], tensors["lm_head.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((32, 48), np.float32)
    tensors["model.mtp_layers.0.input_proj.weight"] = np.zeros((32, 32), np.float32)
    tensors["model.norm.weight"] = np.zeros(32, np.int32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((3, 5), np.float32)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointWeightError) as caught:
        hf.load_checkpoint(path)
    for line in (
        "wrong weights: 6",
        "missing: model.layers.1.self_attn.q_proj.bias, expected [32]",
        "missing: lm_head.weight, expected [64, 32]",
        "wrong shape: model.layers.0.mlp.up_proj.weight, expected [48, 32], got [32, 48]",
        "wrong shape: model.mtp_layers.0.input_proj.weight, expected [32, 64], got [32, 32]",
        "wrong dtype: model.norm.weight",
        "unexpected: model.layers.2.mlp.up_proj.weight, [3, 5]",
    ):
        assert line in str(caught.value)


def test_a_head_without_its_key_is_an_error_and_a_key_without_its_head_names_none(
    folder, edit_json, caplog
):
    path = folder("mimo")
    edit_json(path / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(CheckpointWeightError, match="unexpected: model.mtp_layers.0.input_proj"):
        hf.load_checkpoint(path)
    path = folder("qwen3")
    edit_json(path / "config.json", num_nextn_predict_layers=1)
    cfg, _, head = hf.load_checkpoint(path)
    assert cfg.mtp_num_layers == 0 and head is None and "hold none" in caplog.text


def test_missing_and_damaged_weight_files_are_clear_errors(folder):
    path = folder("llama")
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(hf.CheckpointError, match="model.safetensors is damaged"):
        hf.load_checkpoint(path)
    (path / "model.safetensors").unlink()
    (path / "consolidated.bin").touch()
    with pytest.raises(hf.CheckpointError, match="found neither; convert consolidated.bin"):
        hf.load_checkpoint(path)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(hf.CheckpointError, match="missing: model-00001-of-00001.safetensors"):
        hf.load_checkpoint(path)


def test_an_output_bias_is_accepted_only_when_it_is_zero(tmp_path):
    cfg = change_dense(SMALL, model_type="llama", qk_norm=False, qkv_bias=True)
    params, _ = make(cfg)
    hf.save_checkpoint(tmp_path / "out", cfg, params)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.bias"
    assert not tensors[name].any()
    assert_same(hf.load_checkpoint(tmp_path / "out")[1], params)
    tensors[name] = np.ones(16, np.float32)
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    with pytest.raises(CheckpointWeightError, match=f"{name} is not zero"):
        hf.load_checkpoint(tmp_path / "out")


def test_dtype_is_the_file_s_unless_another_is_asked_for(folder):
    path = folder("qwen2")
    cfg, params, _ = hf.load_checkpoint(path)
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert (cfg.run.param_dtype, cfg.run.compute_dtype) == ("bfloat16", "bfloat16")
    cfg, wide, _ = hf.load_checkpoint(path, param_dtype="float32")
    assert (cfg.run.param_dtype, cfg.run.compute_dtype) == ("float32", "float32")
    assert_same(wide, jax.tree.map(lambda a: a.astype(jnp.float32), params))
    with pytest.raises(ValueError, match="got 'int8'"):
        hf.load_checkpoint(path, param_dtype="int8")


def swap_concat(head):
    """Swaps the halves of every `proj` [2D, D], for the other concatenation order."""

    def swap(block):
        first, second = jnp.split(block["proj"], 2, axis=0)
        return {**block, "proj": jnp.concatenate([second, first], axis=0)}

    return {**head, "blocks": {index: swap(block) for index, block in head["blocks"].items()}}


# --- placing ------------------------------------------------------------------------------------


def test_parameters_land_sharded_and_each_read_is_one_device_s_slice_of_one_layer(monkeypatch):
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tp=2))
    plain = hf.load_checkpoint(GOLDEN / "mimo")
    reads = {}
    read = Tensor.__getitem__

    def recorded(tensor, index):
        out = read(tensor, index)
        reads.setdefault(tensor._name, []).append(out.size)
        return out

    monkeypatch.setattr(Tensor, "__getitem__", recorded)
    cfg, params, head = hf.load_checkpoint(GOLDEN / "mimo", mesh=mesh)
    assert cfg == plain[0]
    assert_same((params, head), plain[1:])
    for tree in (params, head):
        expected = sharding.param_shardings(mesh, tree, weight_axes(cfg))
        jax.tree.map(
            lambda a, s: a.sharding == s or pytest.fail(f"{a.sharding} {s}"), tree, expected
        )
    assert params["layers"]["gate"].sharding.spec == jax.P(None, ("fsdp", "expert", "cp"), ("tp",))
    # [48, 32] in quarters, each read once although two data replicas hold it
    assert reads["model.layers.1.mlp.gate_proj.weight"] == [48 * 32 // 4] * 4


@pytest.mark.parametrize("is_sharded", (False, True))
def test_loading_hundreds_of_files_holds_one_layer_of_one_stack(is_sharded, monkeypatch, tmp_path):
    monkeypatch.setattr(hf, "_SMALL_BYTES", 0)
    cfg = change_dense(SMALL, hidden_size=64, intermediate_size=1024, num_layers=32)
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tp=2)) if is_sharded else None
    params, _ = make(cfg)
    hf.save_checkpoint(tmp_path / "out", cfg, params, max_shard_bytes=1)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 300
    stack = params["layers"]["gate"].nbytes
    hf.load_checkpoint(tmp_path / "out", mesh=mesh)  # imports and caches
    gc.disable()  # a collection meanwhile would lower what is kept, and not the peak
    peaks = []
    try:
        for _ in range(3):  # other threads may allocate beside one of them
            tracemalloc.start()
            loaded = hf.load_checkpoint(tmp_path / "out", mesh=mesh)[1]
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    finally:
        tracemalloc.stop()
        gc.enable()
    # A layer, its tensor as it was read, and what Python keeps of each tensor and file.
    assert min(peaks) < 5 * stack / cfg.num_layers
    assert_same(loaded, params)


# --- round trips --------------------------------------------------------------------------------

ROUND_TRIPS = {
    "qwen3 with an embedding-first head": change_dense(SMALL, mtp_num_layers=1),
    "qwen3 with two hidden-first modules": change_dense(SMALL,
        mtp_num_layers=2, mtp_concat="hidden_first", mtp_recycle="pre_norm",
        mtp_target_hidden="pre_norm", tie_embeddings=False,
    ),
    "llama with llama3 scaling": change_dense(SMALL,
        model_type="llama", qk_norm=False, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16)
    ),
    "llama with biases and a head": change_dense(SMALL,
        model_type="llama", qk_norm=False, qkv_bias=True, mtp_num_layers=1
    ),
    "qwen2": change_dense(
        SMALL, model_type="qwen2", qk_norm=False, qkv_bias=True, eos_token_ids=(2,)
    ),
    "mimo": change_dense(SMALL,
        model_type="mimo", qk_norm=False, qkv_bias=True, mtp_num_layers=1, tie_embeddings=False,
        mtp_concat="hidden_first", rope_theta=640_000.0,
    ),
    "bfloat16": SMALL.running(param_dtype="bfloat16", compute_dtype="bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_saved_checkpoints_load_back_equal(name, tmp_path):
    cfg = ROUND_TRIPS[name]
    params, head = make(cfg)
    hf.save_checkpoint(tmp_path / "out", cfg, params, head)
    loaded_cfg, *loaded = hf.load_checkpoint(tmp_path / "out")
    assert loaded_cfg == cfg
    assert_same(loaded, [params, head])
    own_file = head is not None and cfg.model_type != "mimo"
    assert (tmp_path / "out" / "mtp.safetensors").exists() == own_file
    if head is not None:
        assert_same(hf.load_head(tmp_path / "out", cfg), head)


def test_mimo_held_in_the_other_order_is_exported_bit_for_bit_as_it_came(folder, tmp_path):
    path = folder("mimo")
    ours = hf.load_checkpoint(path)
    cfg, params, head = hf.load_checkpoint(path, mtp_concat="embedding_first")
    assert cfg.mtp_concat == "embedding_first"
    assert_same(swap_concat(head), ours[2])
    assert not np.array_equal(head["blocks"][0]["proj"], ours[2]["blocks"][0]["proj"])
    hf.save_checkpoint(tmp_path / "out", cfg, params, head)
    theirs, exported = (load_file(p / "model.safetensors") for p in (path, tmp_path / "out"))
    assert_same(exported, theirs)
    assert hf.read_config(tmp_path / "out").mtp_concat == "hidden_first"


def test_large_checkpoints_are_written_in_shards_with_an_index(tmp_path):
    cfg = change_dense(SMALL, mtp_num_layers=1)
    params, head = make(cfg)
    hf.save_checkpoint(tmp_path / "out", cfg, params, head, max_shard_bytes=4000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 3
    total = 0
    for file in files:
        tensors = load_file(tmp_path / "out" / file)
        assert sum(t.nbytes for t in tensors.values()) <= 4000
        assert {index["weight_map"][name] for name in tensors} == {file}
        total += sum(t.nbytes for t in tensors.values())
    assert index["metadata"]["total_size"] == total
    assert_same(hf.load_checkpoint(tmp_path / "out")[1:], (params, head))


def test_export_replaces_a_checkpoint_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    out = tmp_path / "out"
    first, second = make(SMALL, seed=0)[0], make(SMALL, seed=5)[0]
    hf.save_checkpoint(out, SMALL, first, max_shard_bytes=4000)

    def fail(*args, **kwargs):
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr("safetensors.numpy.save_file", fail)
        with pytest.raises(OSError, match="disk full"):
            hf.save_checkpoint(out, SMALL, second)
    assert_same(hf.load_checkpoint(out)[1], first)
    hf.save_checkpoint(out, SMALL, second)
    assert_same(hf.load_checkpoint(out)[1], second)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert not list(out.glob("model-*"))


def test_tokenizer_files_are_copied_and_their_absence_is_an_error(tmp_path):
    params, _ = make(SMALL)
    source = tmp_path / "tokenizer"
    source.mkdir()
    with pytest.raises(hf.CheckpointError, match="holds no tokenizer"):
        hf.save_checkpoint(tmp_path / "out", SMALL, params, tokenizer_dir=source)
    assert not (tmp_path / "out").exists()
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors"):
        (source / name).write_text(name)
    hf.save_checkpoint(tmp_path / "out", SMALL, params, tokenizer_dir=source)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "chat_template.jinja"
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert_same(hf.load_checkpoint(tmp_path / "out")[1], params)


# --- a head alone -------------------------------------------------------------------------------


def test_a_head_that_fits_in_shape_only_is_refused(tmp_path):
    cfg = change_dense(SMALL, mtp_num_layers=1)
    hf.save_head(tmp_path / "head.safetensors", cfg, make(cfg)[1])
    with pytest.raises(hf.CheckpointError, match="trained with recycle 'post_norm'.*'pre_norm'"):
        hf.load_head(tmp_path / "head.safetensors", cfg.replace(mtp_recycle="pre_norm"))
    with pytest.raises(CheckpointWeightError, match="missing: model.layers.3.eh_proj.weight"):
        hf.load_head(tmp_path / "head.safetensors", cfg.replace(mtp_num_layers=2))
    with pytest.raises(hf.CheckpointError, match="does not exist"):
        hf.load_head(tmp_path / "none.safetensors", cfg)


# --- tied embeddings ----------------------------------------------------------------------------


def with_lm_head(path: Path, change: float) -> np.ndarray:
    """Adds a language-model head to a tied checkpoint: the embedding times a number."""
    tensors = load_file(path / "model.safetensors")
    embed = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = (embed * embed.dtype.type(change)).astype(embed.dtype)
    save_file(tensors, path / "model.safetensors")
    return tensors["lm_head.weight"]


@pytest.mark.parametrize("family", ("qwen2", "qwen3"))
def test_a_head_that_differs_from_the_embedding_is_used_with_a_warning(
    family, folder, edit_json, caplog, tmp_path
):
    path = folder(family)
    _, tied, _ = hf.load_checkpoint(path)
    head = with_lm_head(path, -2.0)
    cfg, params, _ = hf.load_checkpoint(path)
    assert not cfg.tie_embeddings and "tie_word_embeddings is true" in caplog.text
    np.testing.assert_array_equal(np.asarray(params["lm_head"]), head.T)
    assert_same({k: v for k, v in params.items() if k != "lm_head"}, tied)
    edit_json(path / "config.json", tie_word_embeddings=False)
    caplog.clear()
    assert_same(hf.load_checkpoint(path)[1], params)
    hf.save_checkpoint(tmp_path / "out", cfg, params)
    assert_same(hf.load_checkpoint(tmp_path / "out")[1], params)
    assert not caplog.text


def test_a_head_without_an_embedding_is_both(folder):
    path = folder("qwen3")
    before = hf.load_checkpoint(path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path / "model.safetensors")
    after = hf.load_checkpoint(path)
    assert after[0] == before[0]
    assert_same(after[1], before[1])
