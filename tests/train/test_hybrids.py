"""Hybrids of recurrent layers and attention are trained, with the head of their own family."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from flax import nnx
from safetensors import safe_open

from specjax import SpecConfig
from specjax.checkpoint.huggingface import load_checkpoint
from specjax.checkpoint.weights import read_config
from specjax.decode.tree import build_tree
from specjax.interfaces import Room, Where
from specjax.memory import bytes_of, cost, empty
from specjax.models.transformer import graphdef, init_params, to_decode_layout
from train import rl, sft
from train.run.files import read_metrics
from train.schema import SFTConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    out = tmp_path_factory.mktemp("hybrid")
    return tiny_run.write_policy(out / "policy", raw=tiny_run.HYBRID)


@pytest.fixture(scope="module")
def runs(hybrid, tmp_path_factory):
    """Five steps that draft with the head, the same in two parts, and five without drafting."""
    out = tmp_path_factory.mktemp("runs")
    ways = {
        "whole": ({"checkpoint.every": 1}, (5,)),
        "resumed": ({"checkpoint.every": 1}, (3, 5)),
        "plain": ({"rollout.strategy": "off", "draft.mode": "none"}, (5,)),
    }
    with tiny_run.shared_programs():
        for name, (changes, counts) in ways.items():
            changes = {"rollout.invariant": "true", "rollout.strategy": "2x2", **changes}
            for count in counts:
                argv = tiny_run.arguments(hybrid, out / name, **changes, steps=count)
                rl.main([*argv, *["--resume"] * (count != counts[0])])
    return out


@pytest.mark.slow
def test_neither_drafting_nor_a_stop_changes_a_bit_of_what_is_learnt(runs):
    whole, *others = (read_metrics(runs / name) for name in ("whole", "resumed", "plain"))
    keys = ["rollout/tokens_sha", "train/loss", "train/grad_norm"]
    for steps, further in zip(others, (["train/mtp_loss"], []), strict=True):
        for a, b in zip(whole, steps, strict=True):
            assert all(a[key] == b[key] for key in (*keys, *further))
    policies = [load_checkpoint(runs / name / "hf")[1] for name in ("whole", "resumed", "plain")]
    for other in policies[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, policies[0])


@pytest.mark.slow
def test_the_head_learns_online_and_is_written_under_the_familys_names(runs, hybrid):
    steps = read_metrics(runs / "whole")
    assert all(step["rollout/spec_accept_length"] > 1 for step in steps)
    assert steps[-1]["train/mtp_loss"] < 0.9 * steps[0]["train/mtp_loss"]
    assert all(step["train/train_rollout_logprob_abs_diff"] < 1e-4 for step in steps)
    names = []
    for path in (hybrid, runs / "whole" / "hf"):
        with safe_open(path / "model.safetensors", "np") as file:
            names.append(set(file.keys()))
    assert names[0] == names[1] >= {"mtp.fc.weight", "model.layers.0.linear_attn.A_log"}
    (cfg, old, old_head), (new_cfg, new, new_head) = (
        load_checkpoint(path) for path in (hybrid, runs / "whole" / "hf")
    )
    assert new_cfg == cfg
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), (old, old_head), (new, new_head))
    assert all(jax.tree.leaves(moved)), moved


@pytest.mark.slow
def test_eight_devices_learn_what_one_does(hybrid, tmp_path):
    axes, runs = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tp": 2}, []
    for name, layout in (("one", {}), ("eight", axes)):
        rl.main(tiny_run.arguments(hybrid, tmp_path / name, **{"packing.rows": 4, **layout}))
        runs.append(read_metrics(tmp_path / name))
    for a, b in zip(*runs, strict=True):
        assert a["rollout/tokens_sha"] == b["rollout/tokens_sha"]
        for name in ("loss", "grad_norm", "mtp_loss"):
            assert a[f"train/{name}"] == pytest.approx(b[f"train/{name}"], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("program", [rl, sft])
def test_rows_that_are_split_over_devices_are_refused_in_one_line(hybrid, tmp_path, program):
    changes = {"mesh.cp": 2}
    argv = tiny_run.arguments(hybrid, tmp_path, **changes)
    if program is sft:
        settings = {"model": hybrid, "out": tmp_path, "steps": 1, "packing.row_length": 256}
        argv = tiny_run.with_effect(SFTConfig, settings | changes)
    with pytest.raises(SystemExit, match="error: mesh.cp: recurrent layers.*set mesh.cp=1$"):
        program.main(argv)


def test_rows_of_a_tree_keep_less_than_a_thirtieth_of_a_state_each():
    """Of a model as large as Qwen3.5-35B-A3B, by shapes alone."""
    cfg = read_config(ROOT / "assets/shapes/Qwen3.5-35B-A3B").running(scan_layers=True)
    tree = build_tree(SpecConfig("2x2").resolve())
    params = jax.eval_shape(lambda: to_decode_layout(init_params(cfg), cfg))
    memory = jax.eval_shape(lambda: empty(cfg, Room(slots=1, pages=1, page_size=128)))

    def scratch(params, memory):
        shape = tree.shape
        where = Where(
            "tree", 3 + shape.depth[None], prefix=jnp.array([3]), visible=shape.bits,
            path_rows=shape.path_rows, depth=shape.depth,
        )  # fmt: skip
        model = nnx.merge(graphdef(cfg, cfg.run.decode_layout), params)
        return model.decode(jnp.zeros((1, tree.rows), jnp.int32), where, memory).scratch

    kept = bytes_of(jax.eval_shape(scratch, params, memory))
    state = cost(cfg, 128).slot
    assert 60 * 2**20 < state < 70 * 2**20 and 0 < 30 * kept < tree.rows * state
