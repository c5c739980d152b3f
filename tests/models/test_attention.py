"""The three forms of an attention layer give one row the same output, whatever its fields."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import RunConfig
from specjax.decode.tree import chain_bits
from specjax.interfaces import Memory, Room, Where
from specjax.memory import KVCache
from specjax.models.mixers.attention import Attention
from specjax.models.rope import Rope, apply_rope, rope_tables
from specjax.models.rows import fuse

WIDTH, LENGTH, HELD = 16, 13, 8


FIELDS = {
    "plain": {}, "window 1": {"window": 1}, "window 3": {"window": 3}, "window 6": {"window": 6},
    "soft-cap": {"soft_cap": 0.5}, "scale": {"scale": 2.0}, "gate": {"gate": True},
    "sinks": {"sinks": True}, "norms": {"qk_norm": True}, "o_bias": {"o_bias": True},
    "norms with offset": {"qk_norm": True, "norm_offset": True},
    "norms over all heads": {"qk_norm": True, "wide_norm": True},
    "half of a head": {"rope": Rope(share=0.5)}, "no rotation": {"rope": Rope(share=0.0)},
    "interleaved": {"rope": Rope(interleaved=True)},
    "all": {
        "rope": Rope(share=0.5, interleaved=True), "gate": True, "sinks": True, "scale": 1.0,
        "qkv_bias": True, "qk_norm": True, "wide_norm": True, "norm_offset": True, "window": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_rows_behind_a_prefix_are_those_of_training(name):
    mixer = Attention(num_heads=4, num_kv_heads=2, head_dim=8, **FIELDS[name])
    rng = np.random.default_rng(0)
    shapes = {name: row.shape for name, row in mixer.params(WIDTH).items()}
    w = {n: jnp.asarray(rng.normal(size=s), jnp.float32) / 4 for n, s in shapes.items()}
    x = jnp.asarray(rng.normal(size=(1, LENGTH, WIDTH)), jnp.float32)
    positions = jnp.arange(LENGTH)[None]

    def where(form, first, **what):
        at = positions[:, first:]
        angles = [(m.rotation, m.angles(at)) for m in (mixer, Attention(4, 2, 8)) if m.rotation]
        return Where(form, at, angles=tuple(angles), **what)

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
        for arrays in (w, fuse(w, mixer.params(WIDTH))):
            found, _ = mixer.run(arrays, x[:, HELD:], form, memory, None)
            np.testing.assert_allclose(found, trained[:, HELD:], atol=1e-5)
    if name != "plain":
        plain = Attention(num_heads=4, num_kv_heads=2, head_dim=8)
        if mixer.gate:
            w["q"] = w["q"].reshape(WIDTH, 4, 2, 8)[:, :, 0].reshape(WIDTH, 32)
        w = {name: array for name, array in w.items() if name in plain.params(WIDTH)}
        other, _ = plain.run(
            w, x, where("train", 0, segments=jnp.ones((1, LENGTH), int)), None, None
        )
        assert abs(other - trained).max() > 0.1, "the field changes something"


def test_interleaved_rotation_is_that_of_halves_with_the_numbers_of_a_head_in_another_order():
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(1, 2, 5, 8)).astype(np.float32), jnp.arange(5)[None]
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    halves = apply_rope(x[..., order], *rope_tables(Rope(), 8, positions))
    pairs = apply_rope(x, *rope_tables(Rope(interleaved=True), 8, positions), interleaved=True)
    np.testing.assert_allclose(pairs[..., order], halves, atol=1e-6)
