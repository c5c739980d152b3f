"""An MTP head's layer is that of the model, with whatever mlp it has."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.decode.tree import chain_bits
from specjax.drafts.mtp import MTPHead
from specjax.interfaces import Param, Where
from specjax.memory import KVCache
from specjax.models.families.dense import dense_config

SEEN = []


@dataclasses.dataclass(frozen=True)
class Noting:
    """Notes where its rows stand."""

    kind: ClassVar[str] = "noting"

    def params(self, width):
        return {"scale": Param((width,), (None,), init=None)}

    def run(self, w, x, where, given=None):
        SEEN.append(where)
        return x * w["scale"], None


def test_the_mlp_of_a_head_is_told_where_its_rows_stand():
    cfg = dense_config(32, 16, 24, 1, 2, 1, 8, mtp_num_layers=1)
    cfg = cfg.replace(layers=(dataclasses.replace(cfg.layers[0], mlp=Noting()),))
    head, rng = MTPHead(cfg, nnx.Rngs(0)), np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 4, 16)), jnp.float32)
    positions, segments = jnp.arange(4)[None], jnp.array([[1, 1, 1, 0]])
    SEEN.clear()
    jax.eval_shape(lambda: head.unroll(x, [x, x], positions, segments))
    assert [where.form for where in SEEN] == ["train"] * 2
    assert all(where.segments is not None for where in SEEN)
    pages = KVCache(*(jnp.zeros((1, 1, 8, 8)) for _ in range(2)))
    where = Where("tree", positions, prefix=jnp.array([0]), visible=chain_bits(4))
    SEEN.clear()
    jax.eval_shape(lambda: head.decode(0, x, x, where, pages)[:2])
    [where] = SEEN
    assert where.form == "tree" and where.held == 0
    np.testing.assert_array_equal(where.positions, positions)
    np.testing.assert_array_equal(where.sees(4), np.tri(4, dtype=bool))
