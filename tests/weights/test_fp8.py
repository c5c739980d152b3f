"""Checkpoints in fp8 with a scale for each block: what they are read as, and what is refused."""

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.checked_json import CheckpointError, UnsupportedModelError
from specjax.checkpoint import huggingface as hf
from specjax.parallel import sharding
from specjax.weights.safetensors import Tensor

BLOCK = [20, 24]  # neither divides the matrices
METHOD = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": BLOCK, "modules_to_not_convert": ["lm_head"],
}  # fmt: skip
NAME = "model.layers.1.mlp.gate_proj.weight"  # [48 32]
SCALE = f"{NAME}_scale_inv"
OUTPUTS = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "kv_cache_scheme": None, "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "output_activations": None,
            "weights": {
                "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8, "type": "float", "strategy": "token", "dynamic": True,
            },
        },
    },
}  # fmt: skip
WRONG = {
    "quant_method": "gptq", "fmt": "e5m2", "activation_scheme": "static",
    "weight_block_size": None, "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
    "kv_cache_scheme": {"num_bits": 8},
}  # fmt: skip


@pytest.fixture
def quantised(folder, edit_json):
    """Writes projections in fp8, and their scales to a second file; returns their exact values."""

    def write(family, **changes):
        path, rng = folder(family), np.random.default_rng(0)
        file = path / "model.safetensors"
        stored, scales = load_file(file), {}
        exact = {name: array.astype(np.float32) for name, array in stored.items()}
        of_outputs = "config_groups" in METHOD
        for name in [name for name in exact if name.endswith("proj.weight")]:
            block = [1, exact[name].shape[1]] if of_outputs else BLOCK
            counts = [-(-n // size) for n, size in zip(exact[name].shape, block, strict=True)]
            scale = rng.uniform(0.01, 0.02, counts)
            scale = scale.astype(np.float32 if "mlp" in name else ml_dtypes.bfloat16)
            wide = np.kron(scale.astype(np.float32), np.ones(block, np.float32))
            wide = wide[tuple(map(slice, exact[name].shape))]
            stored[name] = (exact[name] / wide).astype(ml_dtypes.float8_e4m3fn)
            scales[f"{name}_scale" if of_outputs else f"{name}_scale_inv"] = scale
            exact[name] = stored[name].astype(np.float32) * wide
        scales = {n: array for n, array in (scales | changes).items() if array is not None}
        files = {"model-1.safetensors": stored, "model-2.safetensors": scales}
        for file_name, tensors in files.items():
            save_file(tensors, path / file_name)
        names = {name: file_name for file_name, tensors in files.items() for name in tensors}
        hf.write_json(path / "model.safetensors.index.json", {"weight_map": names})
        edit_json(path / "config.json", quantization_config=METHOD)
        file.unlink()
        return path, exact

    return write


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("family", ["qwen3", "mimo", "qwen3_moe"])
def test_values_times_scales_in_float32_are_rounded_once_to_the_dtype_of_the_parameters(
    family, quantised, folder, tmp_path, monkeypatch, caplog
):
    path, exact = quantised(family)
    plain = path.rename(tmp_path / "fp8") and folder(family)
    save_file(exact, plain / "model.safetensors")
    read, sizes = Tensor.__getitem__, []

    def recorded(tensor, index):
        part = read(tensor, index)
        sizes.append(part.size) if tensor._name == NAME else None
        return part

    monkeypatch.setattr(Tensor, "__getitem__", recorded)
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tp=2))
    for dtype, where in (("float32", None), ("bfloat16", None), ("bfloat16", mesh)):
        caplog.clear()
        loaded = hf.load_checkpoint(tmp_path / "fp8", dtype, where)
        assert f"become {dtype}; activations are not quantised" in caplog.text
        assert_same(loaded[1:], hf.load_checkpoint(plain, dtype, where)[1:])
    assert sizes[-8:-4] == [48 * 32 // 4] * 4  # each device reads its own part
    if family == "mimo":
        assert_same(hf.load_head(tmp_path / "fp8", loaded[0]), loaded[2])
    hf.save_checkpoint(tmp_path / "out", *loaded)
    assert_same(hf.load_checkpoint(tmp_path / "out")[1:], loaded[1:])


@pytest.mark.parametrize("setting", WRONG)
def test_other_methods_are_refused_by_the_name_of_their_setting(setting, quantised, edit_json):
    path, _ = quantised("qwen3")
    method = OUTPUTS if setting in ("config_groups", "kv_cache_scheme") else METHOD
    edit_json(path / "config.json", quantization_config=method | {setting: WRONG[setting]})
    with pytest.raises(UnsupportedModelError, match=f"quantization_config: {setting}"):
        hf.load_checkpoint(path)


@pytest.mark.parametrize(
    "scales", [None, np.ones((2, 3), np.float32), np.ones((3, 2), np.int8)], ids=str
)
def test_scales_that_are_missing_or_do_not_fit_are_named(scales, quantised):
    path, _ = quantised("qwen3", **{SCALE: scales})
    got = "none" if scales is None else rf"{scales.dtype} \[{scales.shape[0]}, "
    with pytest.raises(CheckpointError, match=rf"expected {SCALE} \[3, 2\] in .* got {got}"):
        hf.load_checkpoint(path)
