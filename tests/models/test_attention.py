"""The three forms of an attention layer give one row the same output, with a window and without."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import RunConfig
from specjax.decode.tree import chain_bits
from specjax.interfaces import Memory, Room, Where
from specjax.memory import KVCache
from specjax.models.mixers.attention import Attention

WIDTH, LENGTH, HELD = 16, 13, 8


@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_rows_behind_a_prefix_are_those_of_training(window):
    mixer = Attention(num_heads=4, num_kv_heads=2, head_dim=8, window=window)
    rng = np.random.default_rng(0)
    shapes = {name: row.shape for name, row in mixer.params(WIDTH).items()}
    w = {n: jnp.asarray(rng.normal(size=s), jnp.float32) / 4 for n, s in shapes.items()}
    x = jnp.asarray(rng.normal(size=(1, LENGTH, WIDTH)), jnp.float32)
    positions = jnp.arange(LENGTH)[None]

    def where(form, first, **what):
        at = positions[:, first:]
        return Where(form, at, angles=((mixer.rotation, mixer.angles(at)),), **what)

    trained, scratch = mixer.run(
        w, x, where("train", 0, segments=jnp.ones((1, LENGTH), int)), None, None
    )
    pages = mixer.empty(RunConfig(), Room(slots=1, pages=1, page_size=16)).pages
    held = zip(pages, scratch.pages, strict=True)
    pages = KVCache(*(page.at[:, :, :HELD].set(kv[:, :, :HELD]) for page, kv in held))
    memory, prefix, rows = Memory(pages, None), jnp.array([HELD]), LENGTH - HELD
    chain = np.arange(rows)
    forms = (
        where("tree", HELD, prefix=prefix, visible=chain_bits(rows)),
        where(
            "by_position", HELD, prefix=prefix, visible=chain_bits(rows),
            path_rows=np.tile(chain, (rows, 1)), depth=chain,
        ),
    )  # fmt: skip
    for form in forms:
        found, _ = mixer.run(w, x[:, HELD:], form, memory, None)
        np.testing.assert_allclose(found, trained[:, HELD:], atol=1e-5)
    if window is not None:
        everything = Attention(num_heads=4, num_kv_heads=2, head_dim=8)
        other, _ = everything.run(
            w, x, where("train", 0, segments=jnp.ones((1, LENGTH), int)), None, None
        )
        assert abs(other - trained)[:, window:].max() > 1e-2, "the window leaves something out"
