"""Layers of different kinds: segments, stacks, and the tree of their parameters."""

import dataclasses

import jax
import numpy as np
import pytest

from specjax.config.model import Layer
from specjax.config.stacks import Segment, part_of, segments, stacks
from specjax.models.families.dense import dense_config
from specjax.models.mlps.dense import Dense
from specjax.models.transformer import init_params, unroll_layers

CFG = dense_config(32, 16, 24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
FULL = CFG.layers[0]
SLIDING = dataclasses.replace(FULL, mixer=dataclasses.replace(FULL.mixer, window=4))
WIDE = Layer(FULL.mixer, Dense(40))


@pytest.mark.parametrize(
    "layers, expected",
    [
        ((FULL,) * 5, [(1, 5)]),
        ((FULL,) * 3 + (WIDE,) * 58, [(1, 3), (1, 58)]),
        (((SLIDING,) * 5 + (FULL,)) * 4 + (SLIDING,) * 2, [(6, 4), (1, 2)]),
        ((SLIDING, FULL) * 12, [(2, 12)]),
        # The third sliding layer begins the next pattern, and does not end the first.
        ((SLIDING,) * 3 + (FULL,) + (SLIDING, FULL) * 2, [(1, 2), (2, 3)]),
        ((FULL, SLIDING, WIDE), [(3, 1)]),
    ],
)
def test_layers_are_divided_into_repeating_patterns(layers, expected):
    found = segments(layers)
    assert [(len(s.pattern), s.repeats) for s in found] == expected
    assert sum((s.pattern * s.repeats for s in found), ()) == layers
    assert all(isinstance(s, Segment) for s in found)


def test_stacks_hold_every_layer_once_and_by_its_kind():
    layers = ((SLIDING,) * 2 + (FULL,)) * 3 + (WIDE,)
    found = stacks(layers)
    assert [stack.key for stack in found] == ["0_0", "0_1", "0_2", "1_0"]
    assert [stack.numbers for stack in found] == [(0, 3, 6), (1, 4, 7), (2, 5, 8), (9,)]
    for stack in found:
        assert {layers[number] for number in stack.numbers} == {stack.layer}
    (alone,) = stacks((FULL,) * 4)
    assert alone.key is None and alone.numbers == (0, 1, 2, 3)


def test_unrolled_parameters_are_in_the_order_of_the_layers():
    layers = (SLIDING, WIDE, SLIDING, WIDE, FULL)
    cfg = CFG.replace(layers=layers)
    params = init_params(cfg, seed=1)
    assert set(params["layers"]) == {"0_0", "0_1", "1_0"}
    assert params["layers"]["0_1"]["gate"].shape == (2, 16, 40)
    unrolled = unroll_layers(params, cfg)["layers"]
    assert list(unrolled) == [0, 1, 2, 3, 4]
    for stack in stacks(layers):
        for row, number in enumerate(stack.numbers):
            expected = part_of(params["layers"], stack)["down"][row]
            np.testing.assert_array_equal(unrolled[number]["down"], expected)
            assert unrolled[number]["gate_up"].shape[-1] == 2 * stack.layer.mlp.intermediate_size
    assert len(jax.tree.leaves(unrolled)) == 5 * len(unrolled[0])
