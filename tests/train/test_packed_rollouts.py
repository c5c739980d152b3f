"""Rollouts of packed weights, beside a trainer in full precision; and heads for a packed policy."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_run
from test_draft_run import arguments as draft_arguments
from test_draft_run import saved_head
from test_resume import assert_same_run, learned
from tiers import slow_but

from specjax.checkpoint import huggingface as hf
from specjax.engine.engine import Engine
from specjax.engine.weights import Weights
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params, rounded
from specjax.weights.packed import Int8
from train import draft, rl

pytestmark = pytest.mark.usefixtures("shared_programs")

PACKED = {"rollout.products": '{embed: xla, "*.down": int4, "draft.*": int8, "*": int8}'}
PLAIN = {"rollout.strategy": "off"}
KL, TOKENS = "train/train_rollout_kl", "rollout/tokens_sha"
ALARM = "rollouts come from another policy"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Doubled(Int8):
    """int8 with scales that are wrong by a factor of two."""

    @classmethod
    def pack(cls, array, table):
        packed = super().pack(array, table)
        return dataclasses.replace(packed, scales=2 * packed.scales)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """Of one layer, and wide enough for groups of 32 inputs."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1}
    return tiny_run.write_policy(tmp_path_factory.mktemp("packed") / "policy", **sizes)


def run(policy, out, *flags, **changes):
    """The directory of a run of `train.rl`, and its records but for what the clock decides."""
    rl.main([*tiny_run.arguments(policy, out, **{**PACKED, **changes}), *flags])
    return out, learned(out)


@pytest.mark.slow
def test_tis_weighs_by_the_packed_policy_and_a_stopped_run_keeps_its_formats(policy, tmp_path):
    changes = {"algo.tis": "true", "checkpoint.every": 1}
    whole, records = run(policy, tmp_path / "whole", **changes, steps=3)
    for record in records:
        assert 0.9 < record["train/tis"] < 1.1 and record["train/tis"] != 1
    assert len({record[TOKENS] for record in records}) == 3
    run(policy, tmp_path / "run", **changes, steps=2)
    reordered = '{"*": int8, "draft.*": int8, "*.down": int4, embed: xla}'
    for products in ("int8", reordered):
        other = {**PACKED, **changes, "steps": 3, "rollout.products": products}
        with pytest.raises(SystemExit, match="made with other settings of rollout"):
            rl.main([*tiny_run.arguments(policy, tmp_path / "run", **other), "--resume"])
    run(policy, tmp_path / "run", "--resume", **changes, steps=3)
    assert_same_run(tmp_path / "run", whole)


@pytest.fixture(scope="module")
def plain(policy, tmp_path_factory):
    """A run without speculation."""
    return run(policy, tmp_path_factory.mktemp("plain") / "run", **PLAIN)


def test_policies_are_the_same_bits_with_and_without_speculation(plain, policy, tmp_path):
    for record in plain[1]:  # rollouts are packed
        assert 1e-3 < record["train/train_rollout_logprob_abs_diff"] < 0.5
        assert 1e-6 < record[KL] < 0.2
    out, records = run(policy, tmp_path / "run")
    assert any(record["rollout/spec_accept_length"] > 1 for record in records)
    assert [r[TOKENS] for r in records] == [r[TOKENS] for r in plain[1]]
    mine, theirs = (hf.load_checkpoint(path / "hf")[1] for path in (out, plain[0]))
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)


PLACES = {
    "a mesh": {"mesh.fsdp": 2, "mesh.tp": 2},
    "replicas": {"mesh.fsdp": 4, "rollout.replicas": 2, "rollout.tp": 2},
    "scanned layers": {"rollout.scan_layers": "true"},
}


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("place", slow_but(PLACES))
def test_all_places_pack_the_same_weights(place, plain, policy, tmp_path):
    changes = {**PLAIN, **PLACES[place], "packing.rows": 4}
    _, records = run(policy, tmp_path / "run", **changes)
    for mine, theirs in zip(records, plain[1], strict=True):
        assert mine[TOKENS] == theirs[TOKENS]
        assert mine[KL] == pytest.approx(theirs[KL], rel=0.01)


WRONG = '"layers.0.down": "test_packed_rollouts:Doubled"'


ALARMS = {
    "honest": (PACKED["rollout.products"], 0),
    "wrong scale": (f"{{{WRONG}, '*': int8}}", 1),
    "wrong scale in full precision": (f"{{{WRONG}}}", 1),
}


@pytest.mark.parametrize("case", slow_but(ALARMS, "honest", "wrong scale"))
def test_rollouts_of_another_policy_raise_an_alarm_once(case, policy, tmp_path, capsys):
    products, warnings = ALARMS[case]
    run(policy, tmp_path / "run", **{**PLAIN, "rollout.products": products})
    printed = capsys.readouterr().out
    assert printed.count(f"WARNING: step 1: {ALARM}") == printed.count(ALARM) == warnings
    assert not warnings or "more than 1% of their entropy" in printed


@pytest.mark.parametrize("products", slow_but(["int8", "mxfp4", "xla"], "mxfp4"))
def test_new_weights_are_converted_a_layer_at_a_time(products):
    """By programs for least memory, as on GPUs and TPUs; XLA's for CPUs run layers side by side."""
    cfg = dense_config(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_layers=8, num_heads=4,
        num_kv_heads=2, head_dim=32,
    )  # fmt: skip
    how = {"products": products, "compute_dtype": "bfloat16", "fused": False}
    how["scan_layers"] = products == "mxfp4"
    params = jax.eval_shape(lambda: init_params(cfg))
    layer = sum(4 * leaf.size for leaf in jax.tree.leaves(params["layers"])) / cfg.num_layers
    lowered = Weights(cfg.running(**how), None, None, None).convert.lower(params)
    least = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    assert lowered.compile(compiler_options=least).memory_analysis().temp_size_in_bytes < layer


def test_a_head_is_trained_on_the_packed_policys_samples_and_states(policy, tmp_path, monkeypatch):
    """Those of a policy whose files hold the rounded weights."""
    engines = []
    made = lambda *args, **named: engines.append(Engine(*args, **named)) or engines[-1]  # noqa: E731
    monkeypatch.setattr(draft, "Engine", made)
    common = {"epochs": None, "steps": 2, "eval__problems": 0}
    draft.main(draft_arguments(policy, tmp_path / "packed", products="fp8", **common))
    assert {engine.runner.cfg.run.products for engine in engines} == {"fp8"}
    cfg, params, head = hf.load_checkpoint(policy, "float32")
    params = rounded(params, cfg.running(products="fp8"))
    hf.save_checkpoint(tmp_path / "rounded", cfg, params, head, policy)
    common["data__texts"] = tmp_path / "packed" / "samples"
    draft.main(draft_arguments(tmp_path / "rounded", tmp_path / "run", **common))
    for mine, theirs in zip(*map(saved_head, (tmp_path / "packed", tmp_path / "run")), strict=True):
        np.testing.assert_array_equal(mine, theirs)
