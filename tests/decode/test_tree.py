"""Strategies are read as meant or refused, and a tree's arrays say who stands where."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.config import SpecConfig, Strategy
from specjax.decode.tree import (
    build_tree,
    grown_shape,
    pack_bits,
)
from specjax.kernels.reference import unpack_bits


def unpacked(words, columns):
    """Bit j of a row, as Python sees the row's words."""
    numbers = [sum(int(word) << (32 * i) for i, word in enumerate(row)) for row in words]
    return np.array([[bool(n >> j & 1) for j in range(columns)] for n in numbers])


@st.composite
def path_sets(draw):
    """Prefix-closed sets of paths whose siblings are numbered without gaps, in random order."""
    children = {(): draw(st.integers(1, 4))}
    paths = []
    todo = [()]
    while todo:
        node = todo.pop(0)
        for i in range(children.get(node, 0)):
            child = (*node, i)
            paths.append(child)
            if len(child) < 5 and len(paths) < 60:
                children[child] = draw(st.integers(0, 3))
                todo.append(child)
    return draw(st.permutations(paths))


@given(path_sets())
def test_arrays_of_any_tree_equal_those_found_by_comparing_paths(paths):
    tree = build_tree(Strategy.from_paths(paths))
    nodes = [(), *sorted(paths, key=lambda p: (len(p), p))]
    assert tree.rows == tree.strategy.rows == len(nodes)
    assert tree.steps == tree.strategy.steps == max(map(len, nodes))
    assert tree.is_chain == all(set(node) <= {0} for node in nodes)
    bits = unpacked(tree.shape.bits, tree.rows)
    assert tree.shape.bits.shape == (tree.rows, -(-tree.rows // 32))
    for row, node in enumerate(nodes):
        assert tree.shape.depth[row] == len(node)
        assert nodes[tree.shape.parent[row]] == node[:-1]
        sees = [node[: len(other)] == other for other in nodes]
        above = [nodes.index(node[:d]) for d in range(len(node) + 1)]
        assert tree.shape.path_rows[row, : len(above)].tolist() == above
        np.testing.assert_array_equal(bits[row], sees)
        np.testing.assert_array_equal(tree.shape.visible[row], sees)
    for depth, expansion in enumerate(tree.expansions, 1):
        assert [n for n in nodes if len(n) == depth] == nodes[slice(*expansion.children)]


@given(st.lists(path_sets(), min_size=1, max_size=3))
@settings(max_examples=6)  # each is a program of its own
def test_a_shape_grown_on_the_device_equals_the_static_one(several):
    """Three trees of one batch, cut to one number of rows."""
    trees = [build_tree(Strategy.from_paths(paths)) for paths in several]
    rows, steps = min(tree.rows for tree in trees), max(tree.steps for tree in trees)
    parent = np.stack([tree.shape.parent[:rows] for tree in trees])
    depth = np.stack([tree.shape.depth[:rows] for tree in trees])
    grown = jax.jit(grown_shape, static_argnums=2)(parent, depth, steps)
    for i, tree in enumerate(trees):
        visible = tree.shape.visible[:rows, :rows]
        np.testing.assert_array_equal(grown.visible[i], visible)
        np.testing.assert_array_equal(grown.bits[i], pack_bits(visible))
        for row in range(rows):
            path = tree.shape.path_rows[row, : depth[i, row] + 1]
            np.testing.assert_array_equal(grown.path_rows[i, row, : len(path)], path)


@pytest.mark.parametrize("columns", [1, 32, 33, 100])
def test_the_kernels_unpack_bits_as_the_tree_packed_them(columns):
    visible = np.random.default_rng(columns).random((5, columns)) < 0.5
    np.testing.assert_array_equal(unpack_bits(pack_bits(visible), columns), visible)


@pytest.mark.parametrize(
    ("spec", "rows", "steps", "chain"),
    [
        ("4_1_5", 5, 4, True),
        ("1_1_2", 2, 1, True),
        ("7_1_8", 8, 7, True),
        ("4x2x1", 1 + 4 + 8 + 8, 3, False),
        ("1x1", 3, 2, True),
        ("3", 4, 1, False),
        ("default", 13, 3, False),
        ([(0,)], 2, 1, True),
        ("8_4_32", 32, 8, False),
        ("1_4_5", 5, 1, False),
        (((0,), (1,), (1, 0)), 4, 2, False),
        ([[1, 0], [1], [0]], 4, 2, False),
    ],
)
def test_a_strategy_has_the_rows_and_steps_that_its_text_says(spec, rows, steps, chain):
    strategy = Strategy.parse(spec)
    assert (strategy.rows, strategy.steps, strategy.is_chain) == (rows, steps, chain)
    assert Strategy.parse(strategy) is strategy
    assert hash(strategy) == hash(Strategy.parse(spec))


@pytest.mark.parametrize("name", ["off", "Disable", "none"])
def test_plain_decoding_is_a_strategy_without_a_tree(name):
    off = Strategy.parse(name)
    assert off is Strategy.OFF is Strategy.chain(0) and off.is_off and str(off) == "off"
    assert (off.steps, off.rows) == (0, 1) and not Strategy.parse("1_1_2").is_off
    with pytest.raises(ValueError, match="'off' is plain decoding, which drafts no tree"):
        build_tree(off)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("8_4_8", ["8_4_8", "dynamic", "steps + 1 = 9", "117"]),
        ("2_2_8", ["2_2_8", "steps + 1 = 3", "= 7 rows"]),
        ("2_0_3", ["2_0_3", "topk >= 1"]),
        ("4_1_6", ["4_1_6", "steps + 1", "'4_1_5'"]),
        ("0_1_1", ["0_1_1", "'1_1_2'"]),
        ("0x2", ["0x2", "at least one child"]),
        ("4x", ["'4x'", "4x2x1", "default"]),
        ("", ["''", "4_1_5"]),
        ([], ["at least one path", "'off'"]),
        ([(0,), (1,), (2, 0)], ["(2, 0)", "no parent", "add (2,)"]),
        ([(0,), (2,)], ["(2,)", "better sibling", "add (1,)"]),
        ([(0,), (0, 1)], ["(0, 1)", "add (0, 0)"]),
        ([(0,), (-1,)], ["(-1,)", ">= 0"]),
        ([()], ["()", ">= 0"]),
    ],
)
def test_a_strategy_that_cannot_be_is_refused_with_what_to_do_instead(spec, said):
    with pytest.raises(ValueError) as error:
        Strategy.parse(spec)
    for words in said:
        assert words in str(error.value)


def test_a_speculation_config_refuses_what_it_cannot_do_when_it_is_made():
    refused = [
        (dict(strategy="4x2x1", acceptance="block"), "chains only.*4x2x1.*recursive.*coupled"),
        (dict(strategy="4_4_16", acceptance="block"), "chains only.*coupled"),
        (dict(strategy="4_4_16", acceptance="recursive"), "re-ranking is biased.*coupled.*4x2x1"),
        (dict(acceptance="typical"), "coupled, block, recursive, greedy; got 'typical'"),
        (
            dict(acceptance="block", exact_mode=True),
            "exact_mode.*in distribution only; use .*coupled",
        ),
        (
            dict(acceptance="recursive", invariant=True),
            "invariant.*distribution only; use .*coupled",
        ),
        (dict(ngram_max=300), "ngram_max <= 127, got ngram_min=1 and ngram_max=300"),
        (dict(tau=float("inf")), "finite number greater than 0, got inf"),
        (dict(draft="random", draft_kind="medusa"), "draft_kind must be one of mtp, eagle3"),
        (dict(ngram_min=3, ngram_max=2), "ngram_max <= 127, got ngram_min=3 and ngram_max=2"),
        (dict(tau=0.0), "tau must be a finite number greater than 0, got 0"),
        (dict(strategy="4x4x4"), "85 rows.*spec_verify_tokens=48"),
    ]
    for settings_, said in refused:
        with pytest.raises(ValueError, match=said):
            SpecConfig(**settings_)
    assert SpecConfig(strategy=[[0], [0, 0]], acceptance="block").resolve().steps == 2


def test_rows_of_a_dynamic_tree_are_cut_to_spec_verify_tokens():
    assert SpecConfig("8_4_60").resolve().rows == 48
    assert SpecConfig("8_4_32", spec_verify_tokens=16).resolve().name == "8_4_16"
    assert SpecConfig("8_4_32").resolve().rows == 32
