"""Experts in MXFP4: what files of gpt-oss are read as, what is written, and what is refused."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from serve.cli.main import main
from specjax.checked_json import CheckpointError
from specjax.checkpoint import huggingface as hf
from specjax.parallel import sharding
from specjax.weights import mxfp4, open_checkpoint

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
DOWN = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture
def packed(tmp_path):
    """The golden checkpoint as the command writes it in MXFP4."""
    assert (
        main(["convert", str(GOLDEN / "gpt_oss"), str(tmp_path / "packed"), "--dtype=mxfp4"]) == 0
    )
    return tmp_path / "packed"


@pytest.fixture
def blocks():
    """Blocks [2 3 4 16] of all bytes, and scales of all exponents that bfloat16 has."""
    rng = np.random.default_rng(0)
    scales = rng.integers(2, 252, (2, 3, 4))
    return rng.integers(0, 256, (2, 3, 4, 16)).astype(np.uint8), scales.astype(np.uint8)


def test_the_low_half_of_a_byte_comes_first_and_scales_are_powers_of_two():
    block = np.array([[[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2] * 2], np.uint8)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    wanted = np.tile(np.r_[magnitudes, -magnitudes], 4) * np.repeat([0.25, 4], 32)
    values = mxfp4.unpack_blocks(block, np.array([[125, 129]], np.uint8))
    np.testing.assert_array_equal(values.astype(np.float64), wanted[None])


def test_a_part_of_a_stack_is_that_of_the_whole(blocks):
    stack = mxfp4.Stack(*blocks)
    whole = stack[:]
    assert whole.shape == stack.shape == (2, 128, 3)
    for index in ((slice(1), slice(30, 70)), (slice(0, 2), slice(64, 96), slice(1, 3))):
        np.testing.assert_array_equal(stack[index], whole[index])


@pytest.mark.torch
def test_values_are_those_of_transformers_bit_for_bit(blocks):
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs = convert_moe_packed_tensors(*map(torch.as_tensor, blocks))
    np.testing.assert_array_equal(
        mxfp4.Stack(*blocks)[:].view(np.uint16), theirs.view(torch.uint16).numpy()
    )


@pytest.mark.parametrize(
    ("largest", "values", "wanted"),
    [
        (4, [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], [0, 1, 1, 2, 2, 4, 4]),  # ties to even codes
        (4, [0.3, -0.3, 5.1, -7.9, 7.99], [0.5, -0.5, 6, -6, 6]),
        (2.0**-90, [2.0**-91, 3 * 2.0**-92], [2.0**-91, 3 * 2.0**-92]),
        (0, [0.0, -0.0], [0, 0]),
        (np.nan, [0.0, -0.0], [np.nan, np.nan]),  # what shares its block is spoilt, too
    ],
)
def test_values_are_rounded_to_the_nearest_and_what_is_too_large_to_the_largest(
    largest, values, wanted
):
    block = np.zeros(32, np.float32)
    block[: len(values)], block[-1] = values, largest
    found = mxfp4.unpack_blocks(*(part[None] for part in mxfp4.pack_blocks(block)))[0]
    np.testing.assert_array_equal(found[: len(values)].astype(np.float64), wanted)
    np.testing.assert_equal(found[-1], np.float32(largest))


def test_what_is_read_from_mxfp4_is_written_as_it_was_and_rounded_from_anything_else(
    packed, tmp_path
):
    config = json.loads((packed / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert config["dtype"] == "bfloat16"
    exact, stored = (open_checkpoint(path).tensors() for path in (GOLDEN / "gpt_oss", packed))
    assert {*exact} == {*stored} and isinstance(stored[DOWN], mxfp4.Stack)
    for name, tensor in exact.items():
        one, other = (a[:].astype(np.float32) for a in (tensor, stored[name]))
        error = np.abs(one - other).max() / np.abs(one).max()
        assert 0.01 < error <= 0.25 if isinstance(stored[name], mxfp4.Stack) else error == 0
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tp=2))
    for where in (None, mesh):
        cfg, params, _ = hf.load_checkpoint(packed, "float32", where)
        hf.save_checkpoint(tmp_path / "again", cfg, params, dtype="mxfp4")
        again, first = (load_file(d / "model.safetensors") for d in (tmp_path / "again", packed))
        jax.tree.map(np.testing.assert_array_equal, again, first)
    target = tmp_path / "wide"
    assert main(["convert", str(packed), str(target), "--to=hf", "--dtype=bfloat16"]) == 0
    jax.tree.map(np.testing.assert_array_equal, hf.load_checkpoint(target, "float32")[1], params)
    assert "quantization_config" not in json.loads((target / "config.json").read_text())


@pytest.mark.torch
def test_transformers_reads_every_bit_of_what_is_written(packed):
    import torch
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        packed, output_loading_info=True, dtype=torch.float32,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )  # fmt: skip
    assert not any(report.values()), report
    for name, tensor in open_checkpoint(packed).tensors().items():
        np.testing.assert_array_equal(model.get_parameter(name).detach(), tensor[:], name)


@pytest.mark.parametrize("scales", [None, np.zeros((8, 32, 2), np.uint8), np.zeros(3, np.int8)])
def test_scales_that_are_missing_or_do_not_fit_are_named(scales, packed):
    file = packed / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"{DOWN}_scales"]
    save_file(tensors | ({} if scales is None else {f"{DOWN}_scales": scales}), file)
    with pytest.raises(CheckpointError, match=rf"{DOWN}_scales uint8 \[8, 32, 1\], got"):
        hf.load_checkpoint(packed)


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [("gpt_oss", "--to=orbax", "--to hf"), ("mixtral", "--to=hf", "experts of gpt_oss")],
)
def test_what_cannot_be_written_in_mxfp4_is_refused(family, more, message, tmp_path, capsys):
    argv = ["convert", str(GOLDEN / family), str(tmp_path / "out"), "--dtype=mxfp4", more]
    assert main(argv) != 0
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
