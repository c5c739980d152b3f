"""Arrays in files: several tensors that make one, several that are parts of one, and other names.

The families and the mlp here are from outside the package.
"""

import dataclasses
import itertools
import json
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.huggingface_names import CheckpointWeightError
from specjax.checkpoint.weights import load_model
from specjax.config.model import Layer
from specjax.drafts.mtp import init_head_params, weight_axes
from specjax.interfaces import Param, Stored, TensorSlice
from specjax.models.families import add_family
from specjax.models.families.dense import DenseFamily, dense_config
from specjax.models.mlps.dense import Dense
from specjax.models.transformer import init_params, to_decode_layout
from specjax.parallel import sharding
from specjax.registry import FAMILIES

EXPERTS = 4


@dataclasses.dataclass(frozen=True)
class AllExperts:
    """A mean of several experts; files have a tensor for each, and their shares in float32."""

    intermediate_size: int

    kind: ClassVar[str] = "all experts"

    def params(self, width):
        def experts(name):
            return tuple(
                Stored(f"mlp.experts.{e}.{name}.weight", transpose=True) for e in range(EXPERTS)
            )

        into = (EXPERTS, width, self.intermediate_size)
        out = (EXPERTS, self.intermediate_size, width)
        return {
            "up": Param(into, (None, "embed", "mlp"), experts("up")),
            "down": Param(out, (None, "mlp", "embed"), experts("down"), residual=True),
            "share": Param((EXPERTS,), (None,), Stored("mlp.share"), dtype="float32"),
        }

    def run(self, w, x, where, given=None):
        inner = jax.nn.silu(jnp.einsum("btd,edf->btef", x, w["up"].astype(x.dtype)))
        inner = inner * jax.nn.softmax(w["share"])[:, None].astype(x.dtype)
        return jnp.einsum("btef,efd->btd", inner, w["down"].astype(x.dtype)), None, None


class Boulder(DenseFamily):
    """All names are its own; q, k and v are rows of one tensor, gate and up alternate in one."""

    def stored(self, cfg, layer):
        places = dict(super().stored(cfg, layer))
        if layer is None:
            return {
                "embed": Stored("table"), "norm": Stored("end.norm"),
                "lm_head": Stored("out.head", transpose=True),
            }  # fmt: skip
        head = layer.mixer.head_dim
        q, kv = layer.mixer.num_heads * head, layer.mixer.num_kv_heads * head
        for name, start, stop in (("q", 0, q), ("k", q, q + kv), ("v", q + kv, q + 2 * kv)):
            places[name] = Stored(
                "qkv", transpose=True, part=TensorSlice(0, start, stop, q + 2 * kv)
            )
        size = 2 * layer.mlp.intermediate_size
        for start, name in enumerate(("gate", "up")):
            places[name] = Stored(
                "gate_up", part=TensorSlice(1, start, start + 1, size, groups=size // 2)
            )
        return places

    def zeros(self, cfg, layer):
        return {"nothing": (3,)}


class Gravel(DenseFamily):
    """A mixture: of config.json only the layer's mlp is another."""

    def read(self, keys):
        cfg = super().read(keys)
        layers = [Layer(la.mixer, AllExperts(la.mlp.intermediate_size)) for la in cfg.layers]
        return cfg.replace(layers=tuple(layers))

    def write(self, cfg):
        layers = [Layer(la.mixer, Dense(la.mlp.intermediate_size)) for la in cfg.layers]
        return super().write(cfg.replace(layers=tuple(layers)))


BOULDER = Boulder("boulder", "BoulderForCausalLM", qkv_bias=False, layer_prefix="rock/{}/")
GRAVEL = Gravel("gravel", "GravelForCausalLM", qkv_bias=False)
PUMICE = DenseFamily(
    "pumice", "PumiceForCausalLM", qkv_bias=False, head_style="qwen3_next", mtp_key="heads_below"
)


@pytest.fixture(autouse=True)
def families(monkeypatch):
    monkeypatch.setattr(FAMILIES, "rows", dict(FAMILIES.rows))
    for name in ("BOULDER", "GRAVEL", "PUMICE"):
        add_family(f"{__name__}:{name}")


def config(model_type, **changes):
    cfg = dense_config(
        32, 16, 24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=False,
        model_type=model_type, max_position=64, **changes,
    )  # fmt: skip
    if model_type == "gravel":
        layers = [Layer(layer.mixer, AllExperts(24)) for layer in cfg.layers]
        cfg = cfg.replace(layers=tuple(layers))
    return cfg


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("model_type", ["boulder", "gravel"])
def test_what_is_exported_loads_back_exactly_on_one_device_and_on_a_mesh(
    model_type, tmp_path, monkeypatch
):
    cfg = config(model_type, tie_embeddings=False, mtp_num_layers=2)
    params, head = init_params(cfg, 3), init_head_params(cfg, 4)
    hf.save_checkpoint(tmp_path / "out", cfg, params, head)
    meshes = None, sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tp=2))
    for mesh, small in itertools.product(meshes, (hf._SMALL_BYTES, 0)):
        monkeypatch.setattr(hf, "_SMALL_BYTES", small)  # 0: stacks are filled layer by layer
        found, *loaded = hf.load_checkpoint(tmp_path / "out", mesh=mesh)
        assert found == cfg
        assert_same(loaded, [params, head])
        if mesh is not None:
            expected = sharding.param_shardings(mesh, params, weight_axes(cfg))
            assert jax.tree.map(lambda a: a.sharding, loaded[0]) == expected
    assert_same(hf.load_head(tmp_path / "out", cfg), head)
    hf.save_checkpoint(tmp_path / "again", cfg, *loaded)
    first, second = (load_file(tmp_path / d / "model.safetensors") for d in ("out", "again"))
    assert_same(second, first)


def test_an_array_has_a_dtype_of_its_own_in_memory_in_files_and_where_it_decodes(tmp_path):
    cfg = config("gravel").running(param_dtype="bfloat16", compute_dtype="bfloat16")
    params = init_params(cfg, 3)
    hf.save_checkpoint(tmp_path / "out", cfg, params, dtype="bfloat16")
    loaded = hf.load_checkpoint(tmp_path / "out", "bfloat16")[1]
    assert_same(loaded, params)
    for tree in (params, load_model(tmp_path / "out", "bfloat16").policy):
        decoded = to_decode_layout(tree, cfg)["layers"][0]
        for arrays in (tree["layers"], decoded):
            assert arrays["share"].dtype == jnp.float32 and arrays["up"].dtype == jnp.bfloat16


def test_a_head_and_its_layer_have_prefixes_of_their_own(tmp_path):
    cfg = config("pumice", mtp_num_layers=1)
    params, head = init_params(cfg, 3), init_head_params(cfg, 4)
    hf.save_checkpoint(tmp_path / "out", cfg, params, head)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["heads_below"] == 1
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} < names
    found, *loaded = hf.load_checkpoint(tmp_path / "out")
    assert found == cfg
    assert_same(loaded, [params, head])


def test_tensors_hold_experts_one_by_one_and_projections_together(tmp_path):
    for model_type in ("boulder", "gravel"):
        cfg = config(model_type)
        params = init_params(cfg, 3)
        hf.save_checkpoint(tmp_path / model_type, cfg, params)
        tensors, arrays = load_file(tmp_path / model_type / "model.safetensors"), params["layers"]
        if model_type == "gravel":
            found = tensors["model.layers.1.mlp.experts.2.up.weight"]
            np.testing.assert_array_equal(found, arrays["up"][1, 2].T)
            continue
        assert all(n.startswith("rock/") or n in ("table", "end.norm") for n in tensors)
        qkv = jnp.concatenate([arrays[n][1] for n in "qkv"], axis=-1)
        np.testing.assert_array_equal(tensors["rock/1/qkv"], qkv.T)
        np.testing.assert_array_equal(tensors["rock/1/gate_up"][:, 1::2], arrays["up"][1])
        np.testing.assert_array_equal(tensors["rock/2/nothing"], np.zeros(3))


def edited(source, target, edit):
    """A checkpoint with other tensors."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def test_what_does_not_fit_is_named_by_its_tensor(tmp_path):
    for model_type in ("boulder", "gravel"):
        cfg = config(model_type)
        hf.save_checkpoint(tmp_path / model_type, cfg, init_params(cfg))

    def without_an_expert(tensors):
        del tensors["model.layers.2.mlp.experts.3.down.weight"]

    def with_one_of_another_size(tensors):
        tensors["rock/0/qkv"] = np.zeros((65, 16), np.float32)
        tensors["rock/0/nothing"] = np.ones(3, np.float32)

    source = edited(tmp_path / "gravel", tmp_path / "one", without_an_expert)
    lacks = r"missing: model\.layers\.2\.mlp\.experts\.3\.down\.weight, expected \[16, 24\]"
    with pytest.raises(CheckpointWeightError, match=lacks):
        hf.load_checkpoint(source)
    source = edited(tmp_path / "boulder", tmp_path / "two", with_one_of_another_size)
    with pytest.raises(CheckpointWeightError) as error:
        hf.load_checkpoint(source)
    assert "wrong shape: rock/0/qkv, expected [64, 16], got [65, 16]" in str(error.value)
    assert "not supported: rock/0/nothing is not zero" in str(error.value)
