"""Weights go from the training layout to that of rollouts without a byte too many."""

import functools
import math
import re

import jax
import numpy as np
import pytest
from hlo import Collective, received

from specjax.config import RunConfig
from specjax.engine.engine import Engine
from specjax.engine.hosts import Hosts
from specjax.engine.replicas import Replicas
from specjax.engine.runner import Runner
from specjax.models.families.dense import dense_config
from specjax.models.rows import param_axes
from specjax.models.transformer import init_params, split_layout
from specjax.parallel import sharding
from specjax.parallel.copies import Copies
from specjax.parallel.reshard import Mover, Reshard
from specjax.parallel.sharding import MeshConfig, make_mesh, rollout_mesh

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

TINY = dense_config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, tie_embeddings=False,
    run=RunConfig(scan_layers=True),
)  # fmt: skip
AXES = param_axes(TINY)  # and of any model with such layers
split = functools.partial(sharding.param_shardings, axes=AXES)
QWEN3_8B = dense_config(
    vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32,
    num_kv_heads=8, head_dim=128, tie_embeddings=False,
    run=RunConfig(scan_layers=True),
)  # fmt: skip

# Axes of training, and tp of rollouts: the same, more from any other axis, fewer.
CASES = [
    ({"fsdp": 8}, 1),
    ({"fsdp": 8}, 4),
    ({"fsdp": 4, "cp": 2}, 2),
    ({"data": 2, "fsdp": 2, "tp": 2}, 8),
    ({"data": 2, "cp": 2, "tp": 2}, 4),
    ({"fsdp": 2, "tp": 4}, 2),
    ({"data": 8}, 4),
    ({"fsdp": 2, "tp": 4}, 4),
]


UNNAMED = "an operation that belongs to no weight"
# A collective of the program itself is named by its scope. One that the compiler adds has, with jax
# 0.10, the scope of the operation that needs it, and with later versions the scope of its operand;
# for an argument that is the argument's path.
SCOPE = re.compile(r'op_name="[^"]*?/(weight\.[^/"]+)')
ARGUMENT = re.compile(r'op_name="\w+((?:\[[^]"]+\])+)"')
KEY = re.compile(r"\[[\\']*([^]\\']+)[\\']*\]")


@functools.cache
def cast(dtype: str):
    """A jitted `convert` that casts weights to the dtype of rollouts."""
    return jax.jit(lambda params: jax.tree.map(lambda x: x.astype(dtype), params))


def collectives_in(hlo: str) -> list[tuple[str, Collective]]:
    """The collectives of a program, each with the name of the weight that it belongs to."""
    found = []
    for line in hlo.splitlines():
        name = UNNAMED
        if scope := SCOPE.search(line):
            name = scope[1]
        elif argument := ARGUMENT.search(line):
            name = ".".join(["weight", *KEY.findall(argument[1])])
        found += [(name, c) for c in received(line)]
    return found


def collectives(program: Reshard) -> list[tuple[str, Collective]]:
    return collectives_in(program.compiled.as_text())


def received_by(program: Reshard) -> int:
    """The bytes that a device receives from others."""
    return sum(c.received for _, c in collectives(program))


def shards_of(program: Reshard) -> dict[str, int]:
    """The bytes of each weight that a device keeps, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(program.made)
    return {
        "weight." + jax.tree_util.keystr(path, simple=True, separator="."): size_of_shard(leaf)
        for path, leaf in leaves
    }


def excess(program: Reshard, named: list[tuple[str, Collective]]) -> list[str]:
    """The weights of which a device receives, or briefly holds, more than it keeps."""
    got: dict[str, int] = {}
    most: dict[str, int] = {}
    for name, c in named:
        got[name] = got.get(name, 0) + c.received
        most[name] = max(most.get(name, 0), c.result)
    shards = shards_of(program)  # an operation without a name keeps nothing
    return sorted(n for n in got if max(got[n], most[n]) > shards.get(n, 0))


def bytes_missing(tree, shardings) -> int:
    """Returns the largest number of bytes of its shards that a device does not hold yet.

    Args:
      tree: the arrays.
      shardings: their new shardings.
    """
    missing: dict = {}
    for leaf, new in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True):
        held = leaf.sharding.devices_indices_map(leaf.shape)
        for device, wanted in new.devices_indices_map(leaf.shape).items():
            there = _shared(wanted, held[device], leaf.shape) if device in held else 0
            size = _shared(wanted, wanted, leaf.shape) - there
            missing[device] = missing.get(device, 0) + size * leaf.dtype.itemsize
    return max(missing.values(), default=0)


def _shared(one, other, shape) -> int:
    """Returns the number of elements that two slices of an array have in common."""
    pairs = zip(one, other, shape, strict=True)
    bounds = [(*a.indices(n)[:2], *b.indices(n)[:2]) for a, b, n in pairs]
    return math.prod(max(0, min(b, d) - max(a, c)) for a, b, c, d in bounds)


def size_of_shard(leaf) -> int:
    return int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize


@pytest.mark.parametrize(("axes", "tp"), CASES)
def test_weights_arrive_whole_and_a_device_receives_no_more_than_it_lacks(axes, tp):
    mesh = make_mesh(MeshConfig(**axes))
    target = rollout_mesh(mesh, tp)
    params = init_params(TINY, 0)
    placed = jax.device_put(params, split(mesh, params))
    program = Reshard(placed, target, AXES)
    moved = program(placed)
    expected = split(target, params)
    assert jax.tree.map(lambda x: x.sharding, moved) == expected
    assert target.shape["tp"] == tp and target.shape["data"] == 8 // tp
    for new, old in zip(jax.tree.leaves(moved), jax.tree.leaves(params), strict=True):
        for shard in new.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(old)[shard.index])
    assert sum(shards_of(program).values()) == sum(map(size_of_shard, jax.tree.leaves(moved)))
    assert {name for name, _ in collectives(program)} <= shards_of(program).keys(), (
        "some have no name"
    )
    assert not excess(program, collectives(program)), "more than what is kept"
    assert received_by(program) == bytes_missing(placed, expected)


@pytest.mark.parametrize(
    ("axes", "tp"),
    [
        ({"fsdp": 2, "expert": 4}, 4),
        ({"expert": 2, "fsdp": 4}, 2),
        ({"expert": 2, "cp": 2, "tp": 2}, 4),
        ({"fsdp": 2, "expert": 2, "cp": 2}, 2),
        ({"expert": 4, "cp": 2}, 2),
    ],
)
@pytest.mark.parametrize("count", [8, 12])
def test_experts_arrive_as_they_left(axes, tp, count):
    mesh = make_mesh(MeshConfig(**axes))
    of_stack = {"experts_up": ("expert", "expert_embed", None)}
    stack = np.arange(2 * count * 16 * 4, dtype=np.float32).reshape(2, count, 16, 4)
    where = sharding.param_shardings(mesh, {"experts_up": stack}, of_stack)
    sent = jax.device_put({"experts_up": stack}, where)
    received = Mover(rollout_mesh(mesh, tp), of_stack)(sent)["experts_up"]
    np.testing.assert_array_equal(received, stack)
    assert received.sharding.shard_shape(stack.shape) == (2, count // tp, 16, 4)


def test_a_weight_of_which_a_device_gets_more_than_its_shard_is_named():
    mesh = make_mesh(MeshConfig(fsdp=4, tp=2))
    params = init_params(TINY, 0)
    placed = jax.device_put(params, split(mesh, params))
    program = Reshard(placed, rollout_mesh(mesh, 4), AXES)

    def gathered(tree):  # whole, to be cut up afterwards
        with jax.named_scope("weight.embed"):
            whole = jax.lax.with_sharding_constraint(tree["embed"], sharding.replicated(mesh))
            return whole * 2

    wrong = jax.jit(gathered, out_shardings=sharding.replicated(mesh)).lower(placed).compile()
    found = collectives_in(wrong.as_text())
    whole = params["embed"].nbytes
    # fsdp first, of the half that a device has by tp; then tp.
    assert [(c.result, c.received) for _, c in found] == [
        (whole // 2, whole // 2 * 3 // 4),
        (whole, whole // 2),
    ]
    assert excess(program, found) == ["weight.embed"]
    assert excess(program, [(UNNAMED, c) for _, c in found]) == [UNNAMED]
    assert excess(program, [(UNNAMED, found[0][1]), found[1]]) == [UNNAMED, "weight.embed"]
    assert not excess(program, collectives(program))


def test_hosts_get_their_weights_by_the_same_program_where_tp_is_the_same():
    mesh = make_mesh(MeshConfig(fsdp=2, tp=4))
    params = init_params(TINY, 0)
    placed = jax.device_put(params, split(mesh, params))
    copies = Copies(sharding.replica_meshes(2, 4))
    for here, place in zip(copies(placed, AXES, cast("bfloat16")), copies.own, strict=True):
        assert jax.tree.map(lambda x: x.sharding, here) == split(place, params)
        for new, old in zip(jax.tree.leaves(here), jax.tree.leaves(params), strict=True):
            np.testing.assert_array_equal(new, old.astype("bfloat16"))
    [program] = copies._programs.values()
    assert not excess(program, collectives(program))
    assert 0 < received_by(program) < sum(shards_of(program).values())
    cfg = TINY.running(compute_dtype="bfloat16")
    engines = Replicas([Engine(cfg, None, 1, 32, mesh=place) for place in copies.own])
    Hosts(engines, copies).set_params(placed)
    for engine in engines.engines:
        leaves = jax.tree.leaves(engine.runner.weights.policy)
        for new, old in zip(leaves, jax.tree.leaves(params), strict=True):
            np.testing.assert_array_equal(new, old.astype("bfloat16"))
    other = Copies(sharding.replica_meshes(4, 2))  # each of 4 devices has a half of what 2 want
    for here in other(placed, AXES):
        for new, old in zip(jax.tree.leaves(here), jax.tree.leaves(params), strict=True):
            np.testing.assert_array_equal(new, old)


def test_replicas_get_their_weights_by_one_program_and_hold_them_where_they_arrived():
    mesh = make_mesh(MeshConfig(fsdp=4, tp=2))
    params = init_params(TINY, 0)
    placed = jax.device_put(params, split(mesh, params))
    cfg = TINY.running(compute_dtype="bfloat16")
    meshes = sharding.replica_meshes(2, 4, training=mesh)
    assert sharding.joined_mesh(meshes) == rollout_mesh(mesh, 4)
    replicas = Replicas([Engine(cfg, None, 1, 32, mesh=place) for place in meshes])
    replicas.set_params(placed)
    for place, engine in zip(meshes, replicas.engines, strict=True):
        runner = engine.runner
        expected = split(place, params)
        assert jax.tree.map(lambda x: x.sharding, runner.weights.policy) == expected
        for new, old in zip(
            jax.tree.leaves(runner.weights.policy), jax.tree.leaves(params), strict=True
        ):
            np.testing.assert_array_equal(new, old.astype("bfloat16"))


def test_one_program_moves_weights_and_lays_them_out_layer_by_layer():
    mesh = make_mesh(MeshConfig(fsdp=4, tp=2))
    params = init_params(TINY, 0)
    placed = jax.device_put(params, split(mesh, params))
    mover = Mover(rollout_mesh(mesh, 4), AXES)
    cfg = TINY.running(scan_layers=False, compute_dtype="bfloat16")
    moved = mover(placed, split_layout(cfg, 4))
    [program] = mover._programs.values()
    assert not excess(program, collectives(program))
    assert {name for name, _ in collectives(program)} <= shards_of(program).keys(), (
        "some have no name"
    )
    assert sorted(moved["layers"]) == [0, 1]
    for number, layer in moved["layers"].items():
        assert layer["q"].sharding.shard_shape((32, 32)) == (32, 8)
        for name, array in layer.items():
            expected = params["layers"][name][number].astype("bfloat16")
            np.testing.assert_array_equal(array, expected)
    np.testing.assert_array_equal(moved["lm_head"], params["lm_head"].astype("bfloat16"))
    other = jax.device_put(params, sharding.replicated(mesh))
    assert mover.program(other, split_layout(cfg, 4)) is None  # split in another way: by shards


def test_a_mesh_decodes_with_layers_that_are_neither_stacked_nor_fused():
    cfg = TINY.running(scan_layers=False)
    for tp, fused in ((1, True), (2, False)):
        [mesh] = sharding.replica_meshes(1, tp)
        run = Runner(cfg, None, 1, 32, mesh=mesh).cfg.run
        assert not run.scan_layers and run.fused == fused
    assert Runner(cfg, None, 1, 32).cfg.run.fused


@pytest.mark.parametrize(
    ("axes", "tp"),
    [({"fsdp": 4, "tp": 2}, 4), pytest.param({"fsdp": 8}, 4, marks=pytest.mark.slow)],
)
def test_no_weight_of_an_8b_policy_is_gathered_whole(axes, tp):
    mesh = make_mesh(MeshConfig(**axes))
    shapes = jax.eval_shape(functools.partial(init_params, QWEN3_8B))
    placed = sharding.shapes(shapes, mesh, split)
    program = Reshard(placed, rollout_mesh(mesh, tp), AXES, cast("bfloat16"))
    assert len(shards_of(program)) == len(jax.tree.leaves(shapes))
    assert not excess(program, collectives(program))
    assert 0 < received_by(program) < sum(shards_of(program).values()) < 2 * 8.2e9 / tp
