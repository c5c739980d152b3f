"""Matrices in any number format multiply alike, and only matrices are put into one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiers import slow_but

from specjax.interfaces import Param
from specjax.models.families.dense import dense_config
from specjax.models.mlps.moe import Mixture
from specjax.models.rows import param_axes
from specjax.models.transformer import graphdef, init_params, to_decode_layout
from specjax.parallel import sharding
from specjax.weights import matrix
from specjax.weights.panels import Panels

CFG = dense_config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16,
)  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Halves:
    """A matrix as the sum of two equal ones, tables too: exact, and stays what it is in a scan."""

    exact = True
    line = "halves"
    half: jax.Array

    @classmethod
    def refuses(cls, device, cfg):
        return None

    @classmethod
    def pack(cls, array, table):
        return cls(array / 2)

    @property
    def shape(self):
        return self.half.shape

    def unpack(self):
        return self.half * 2

    def part_axes(self, axes):
        return Halves(axes)

    def dot(self, x):
        return x @ self.half * 2

    def dot_t(self, x):
        return x @ self.half.T * 2

    def rows(self, ids):
        return self.half[ids] * 2


HALVES = f"{__name__}:Halves"
FORMATS = {
    "array": lambda a: a,
    "panels": lambda a: Panels.pack(a, table=False),
    "halves": lambda a: Halves.pack(a, table=False),
    "transposed": lambda a: matrix.transposed(Halves.pack(a.T, table=False)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_multiplies_and_is_looked_up_like_its_array(name, monkeypatch):
    monkeypatch.setattr(matrix.dispatch, "PANELS", "reference")
    rng = np.random.default_rng(0)
    array, x, y = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((24, 48), (2, 3, 24), (5, 48))
    )
    made = FORMATS[name](array)
    assert tuple(made.shape) == (24, 48)
    np.testing.assert_allclose(matrix.dot(x, made), x @ array, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(matrix.dot(x, made, jnp.float32), x @ array, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(matrix.unpack(made), array)
    turned = matrix.transposed(made)
    assert tuple(turned.shape) == (48, 24)
    np.testing.assert_allclose(matrix.dot(y, turned), y @ array.T, rtol=1e-5, atol=1e-5)
    ids = jnp.array([[0, 5], [23, 1]])
    if name != "transposed":
        np.testing.assert_array_equal(matrix.rows(made, ids), array[ids])


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_multiplied_with_the_experts_that_they_choose(name, monkeypatch):
    monkeypatch.setattr(matrix.dispatch, "PANELS", "reference")
    rng = np.random.default_rng(2)
    arrays, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((5, 24, 48), (2, 3, 24)))
    ids = jnp.asarray(rng.integers(0, 5, (2, 3, 2)), jnp.int32)
    stack = jax.tree.map(lambda *parts: jnp.stack(parts), *map(FORMATS[name], arrays))
    assert tuple(stack.shape) == (5, 24, 48)
    np.testing.assert_array_equal(matrix.unpack(stack), arrays)
    ids, x = ids.reshape(-1, 2), x.reshape(-1, 24)

    @jax.jit
    def there_and_back(x, stack, ids):
        chosen = matrix.Choices.of(ids, 5)
        out = matrix.experts(chosen.sort(x), stack, chosen.sizes)
        turned = jax.vmap(matrix.transposed)(stack)
        return chosen.restore(out), chosen.restore(matrix.experts(out, turned, chosen.sizes))

    out, back = there_and_back(x, stack, ids)
    wanted = jnp.einsum("ti,teio->teo", x, arrays[ids])
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)
    wanted = jnp.einsum("teo,teio->tei", wanted, arrays[ids])
    np.testing.assert_allclose(back, wanted, rtol=1e-4, atol=1e-4)


def test_a_format_may_have_experts_of_its_own():
    class Own(Halves):
        def experts(self, x, sizes, kernel):
            return jnp.full((len(x), self.shape[-1]), 7.0)

    out = matrix.experts(jnp.ones((2, 4)), Own(jnp.ones((3, 4, 8))), jnp.array([1, 0, 1]))
    assert out.shape == (2, 8) and (out == 7).all()


def test_matrices_and_tables_are_put_into_a_format_and_nothing_else():
    rows = {
        "a": Param((4, 16), (None, None), matrix=True),
        "odd": Param((4, 15), (None, None), matrix=True),
        "table": Param((8, 16), (None, None), table=True),
        "scale": Param((16,), (None,)),
        "square": Param((16, 16), (None, None)),
    }
    arrays = {name: jnp.ones(row.shape) for name, row in rows.items()}
    panels = matrix.pack({"in": arrays}, {"in": rows}, CFG.running(products="panels"))["in"]
    assert {name for name, m in panels.items() if isinstance(m, Panels)} == {"a"}
    own = matrix.pack(arrays, rows, CFG.running(products=HALVES))
    assert {name for name, m in own.items() if isinstance(m, Halves)} == {"a", "odd", "table"}
    again = matrix.pack(matrix.cast(own, "float32"), rows, CFG.running(products="panels"))
    assert again["a"] is not own["a"] or isinstance(again["a"], Halves)
    assert jax.tree.structure(again) == jax.tree.structure(own), "what is in a format stays in it"
    stacked = {"a": jnp.ones((3, 4, 16))}
    assert matrix.pack(stacked, rows, CFG.running(products=HALVES))["a"].half.shape == (3, 4, 16)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scan", [True, False])
def test_a_model_in_a_format_computes_what_its_arrays_do(scan, tied):
    """Through jit, scan, split and merge, with the embedding as a table and as the head."""
    plain = dataclasses.replace(CFG, tie_embeddings=tied).running(scan_layers=scan)
    params, tokens = init_params(plain, 3), jnp.arange(12).reshape(2, 6)
    positions, segments = jnp.broadcast_to(jnp.arange(6), (2, 6)), jnp.ones((2, 6), jnp.int32)

    def logits(cfg):
        made = jax.jit(to_decode_layout, static_argnums=1)(params, cfg)
        graph = graphdef(cfg, cfg.run.decode_layout)

        @jax.jit
        def run(params):
            model = nnx.merge(graph, params)
            return model.logits(model.hidden(tokens, positions, segments).x)

        return made, run(made)

    arrays, expected = logits(plain)
    halves, found = logits(plain.running(products=HALVES))
    np.testing.assert_array_equal(found, expected)
    kinds = jax.tree.leaves(halves, is_leaf=lambda m: isinstance(m, Halves))
    assert sum(isinstance(m, Halves) for m in kinds) >= 8
    assert isinstance(halves["embed"], Halves) and ("lm_head" in halves) == (not (scan and tied))
    assert arrays["embed"].shape == halves["embed"].shape


@pytest.mark.parametrize("products", ["panels", HALVES])
@pytest.mark.parametrize("scan", slow_but([True, False], False))
def test_experts_are_one_file_in_any_format(products, scan, monkeypatch):
    monkeypatch.setattr(matrix.dispatch, "PANELS", "reference")
    layers = tuple(dataclasses.replace(layer, mlp=Mixture(4, 2, 48)) for layer in CFG.layers)
    cfg = CFG.replace(layers=layers).running(scan_layers=scan)
    params, tokens = init_params(cfg, 3), jnp.arange(12).reshape(2, 6)
    positions, segments = jnp.broadcast_to(jnp.arange(6), (2, 6)), jnp.ones((2, 6), jnp.int32)

    def states(cfg, params, layout):
        model = nnx.merge(graphdef(cfg, layout), params)
        found = model.hidden(tokens, positions, segments)
        return found.x, found.records

    made = to_decode_layout(params, cfg.running(products=products))
    stack = made["layers"]["experts_down"] if scan else made["layers"][0]["experts_down"]
    assert not matrix.is_array(stack)
    assert tuple(stack.shape) == ((2,) if scan else ()) + (4, 48, 32)
    wanted, chosen = states(cfg, params, "stacked")
    found, same = states(cfg.running(products=products), made, cfg.run.decode_layout)
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    np.testing.assert_array_equal(same, chosen)
    assert len(np.unique(chosen)) == 4

    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tp=2))
    split, whole = (
        sharding.param_shardings(mesh, {"experts_down": stack}, param_axes(cfg))["experts_down"]
        for stack in (stack, jnp.zeros((4, 48, 32)))
    )
    [split] = jax.tree.leaves(split)
    there = [jax.P(*filter(None, one.spec)) for one in (split, whole)]
    assert there == [jax.P(("tp", "expert"), ("fsdp", "cp"))] * 2


def test_a_matrix_in_a_format_is_split_over_devices_like_its_array():
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tp=2))
    cfg, axes = CFG.running(scan_layers=True), param_axes(CFG)
    params = init_params(cfg)
    split = sharding.param_shardings(mesh, params, axes)
    made = to_decode_layout(params, cfg.running(products=HALVES))
    found = sharding.param_shardings(mesh, made, axes)
    assert found["layers"]["q"].half == split["layers"]["q"] != split["norm"]
    assert found["embed"].half == split["embed"]
    placed = jax.device_put(made, found)
    assert placed["layers"]["down"].half.sharding == split["layers"]["down"]
    panels = sharding.param_shardings(mesh, {"q": Panels(jnp.zeros((4, 8, 16)))}, axes)
    assert panels["q"].packed.spec == jax.P(("tp",), ("fsdp", "expert", "cp"), None)
