"""Strategies are read as meant or refused, and a tree's arrays say who stands where."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.config import DEFAULT_TREE_PATHS, SpecConfig, Strategy
from specjax.decode.tree import ancestors, build_tree, chain_bits, pack_bits, plain_bits
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
    bits = unpacked(tree.visible_bits, tree.rows)
    assert tree.visible_bits.shape == (tree.rows, -(-tree.rows // 32))
    for row, node in enumerate(nodes):
        assert tree.depth[row] == len(node)
        assert nodes[tree.parent[row]] == node[:-1]
        sees = [node[: len(other)] == other for other in nodes]
        np.testing.assert_array_equal(bits[row], sees)
        np.testing.assert_array_equal(tree.visible()[row], sees)
    for depth, (start, stop) in enumerate(tree.levels):
        assert [n for n in nodes if len(n) == depth] == nodes[start:stop]


@given(path_sets())
def test_expansions_draw_every_child_from_its_parent_at_its_rank(paths):
    tree = build_tree(Strategy.from_paths(paths))
    nodes = [(), *tree.strategy.paths]
    drawn = []
    for step, expansion in enumerate(tree.expansions):
        assert all(len(nodes[row]) == step for row in expansion.rows)
        start, stop = expansion.children
        for child, parent, rank in zip(
            range(start, stop), expansion.parents, expansion.ranks, strict=True
        ):
            assert nodes[child] == (*nodes[expansion.rows[parent]], rank)
            assert rank < expansion.max_children
            drawn.append(child)
    assert drawn == list(range(1, tree.rows))


@given(st.integers(1, 100), st.integers(1, 100), st.integers(0, 2**32 - 1))
def test_packed_bits_are_unpacked_to_what_they_were(rows, columns, seed):
    visible = np.random.default_rng(seed).random((rows, columns)) < 0.5
    words = pack_bits(visible)
    assert words.dtype == np.uint32 and words.shape == (rows, -(-columns // 32))
    np.testing.assert_array_equal(unpacked(words, columns), visible)


@pytest.mark.parametrize("columns", [1, 32, 33, 100])
def test_the_kernels_unpack_bits_as_the_tree_packed_them(columns):
    visible = np.random.default_rng(columns).random((5, columns)) < 0.5
    np.testing.assert_array_equal(unpack_bits(pack_bits(visible), columns), visible)


def test_a_chain_of_many_rows_sees_all_rows_before_it():
    np.testing.assert_array_equal(unpack_bits(chain_bits(70), 70), np.tri(70, dtype=bool))
    np.testing.assert_array_equal(plain_bits(), [[1]])
    np.testing.assert_array_equal(ancestors(np.array([0, 0, 1])), np.tri(3, dtype=bool))


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
        (((0,), (1,), (1, 0)), 4, 2, False),
        ([[1, 0], [1], [0]], 4, 2, False),
    ],
)
def test_a_strategy_has_the_rows_and_steps_that_its_text_says(spec, rows, steps, chain):
    strategy = Strategy.parse(spec)
    assert (strategy.rows, strategy.steps, strategy.is_chain) == (rows, steps, chain)
    assert Strategy.parse(strategy) is strategy
    assert hash(strategy) == hash(Strategy.parse(spec))


def test_the_default_tree_is_the_twelve_known_paths():
    expected = "0 1 2 3 00 01 10 11 000 010 100 110".split()
    assert ["".join(map(str, p)) for p in Strategy.parse("default").paths] == expected
    assert ["".join(map(str, p)) for p in DEFAULT_TREE_PATHS] == expected
    assert build_tree(Strategy.parse("default")).parent.tolist() == [
        0, 0, 0, 0, 0, 1, 1, 2, 2, 5, 6, 7, 8,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("8_4_32", ["8_4_32", "dynamic", "4_1_5", "4x2x1"]),
        ("4_1_6", ["4_1_6", "steps + 1", "'4_1_5'"]),
        ("0_1_1", ["0_1_1", "'1_1_2'"]),
        ("0x2", ["0x2", "at least one child"]),
        ("4x", ["'4x'", "4x2x1", "default"]),
        ("", ["''", "4_1_5"]),
        ("off", ["'off'", "plain decoding", "spec=None"]),
        ("Disable", ["'Disable'", "plain decoding"]),
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


@pytest.mark.parametrize("name", ["off", "disable", "none", "OFF"])
def test_every_name_of_plain_decoding_is_off(name):
    assert SpecConfig(strategy=name).is_off
    assert SpecConfig(strategy=name, acceptance="block").is_off


def test_a_speculation_config_refuses_what_it_cannot_do_when_it_is_made():
    with pytest.raises(ValueError, match="chains only.*'4x2x1'.*coupled"):
        SpecConfig(strategy="4x2x1", acceptance="block")
    with pytest.raises(ValueError, match="coupled, block; got 'recursive'"):
        SpecConfig(acceptance="recursive")
    with pytest.raises(ValueError, match="dynamic"):
        SpecConfig(strategy="8_4_32")
    with pytest.raises(ValueError, match="checkpoint, random; got 'mine'"):
        SpecConfig(head="mine")
    assert SpecConfig(strategy=[[0], [0, 0]], acceptance="block").resolve().steps == 2
