"""Mixtures of experts are trained with the experts that the rollout chose."""

import jax
import numpy as np
import pytest
import tiny_run
from safetensors import safe_open

from specjax.checkpoint.huggingface import load_checkpoint, save_checkpoint
from specjax.command_line import parse_config
from train import rl
from train.run.files import read_metrics
from train.schema import RLConfig

MIXTURE = {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "norm_topk_prob": True,
}  # fmt: skip
GLM = {
    "model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 32,
    "sliding_window": 6, "swiglu_limit": 1.0,
}  # fmt: skip
DIFFERENCE = "train/train_rollout_logprob_abs_diff"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return tiny_run.write_policy(tmp_path_factory.mktemp("mixture") / "policy", raw=MIXTURE)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """A policy whose experts are in MXFP4."""
    path = tmp_path_factory.mktemp("gpt_oss")
    exact = tiny_run.write_policy(path / "exact", raw=GPT_OSS)
    cfg, params, head = load_checkpoint(exact, "float32")
    save_checkpoint(path / "policy", cfg, params, head, exact, "mxfp4")
    return path / "policy"


def trainer_of(model, out, **changes):
    return rl.Trainer(parse_config(RLConfig, tiny_run.arguments(model, out, **changes))[0])


def changed_routers(params, change):
    def one(path, array):
        return jax.device_put(change(np.array(array))) if path[-1].key == "router" else array

    return jax.tree_util.tree_map_with_path(one, params)


def twins(router):
    """Four experts each have one router: ties, which the first two of them win."""
    return np.repeat(router[..., ::4], 4, axis=-1)


def nudged(router):
    """The last two of four experts win, by less than rounding moves a log-probability."""
    return router * np.where(np.arange(8) % 4 < 2, 1 - 1e-6, 1).astype(router.dtype)


@pytest.mark.parametrize("partial", [False, True])
def test_a_router_that_moved_since_the_rollout_makes_no_difference_with_replay(
    mixture, tmp_path, partial, monkeypatch
):
    changes = {"rollout.partial": "true", "rollout.over_sample": 2} if partial else {}
    trainer = trainer_of(mixture, tmp_path, **changes, **{"algo.dynamic_sampling": "false"})
    trainer.params = changed_routers(trainer.params, twins)
    trainer.sync_weights()
    roll_out = trainer._roll_out

    def then_nudge(step):
        result = roll_out(step)
        trainer.params = changed_routers(trainer.params, nudged)
        return result

    monkeypatch.setattr(trainer, "_roll_out", then_nudge)
    metrics = trainer.step()
    assert metrics[f"{DIFFERENCE}_without_replay"] > 0.05
    assert metrics[DIFFERENCE] < 1e-4
    assert trainer.step()[DIFFERENCE] < 1e-4  # carried tokens, too


@pytest.mark.usefixtures("shared_programs")
def test_speculation_and_replicas_change_no_bit_of_what_is_learnt(mixture, tmp_path):
    ways = {
        "plain": {"rollout.strategy": "off", "draft.mode": "none"},
        "drafted": {"rollout.strategy": "2x2"},
        "replicas": {"rollout.strategy": "2x2", "rollout.replicas": 2},
    }
    runs = {}
    for name, changes in ways.items():
        trainer = trainer_of(mixture, tmp_path / name, **{"rollout.invariant": "true", **changes})
        runs[name] = [trainer.step() for _ in range(2)], jax.device_get(trainer.params)
    steps, params = runs.pop("plain")
    assert steps[0]["train/router_entropy"] > 0
    for others, learnt in runs.values():
        assert others[1]["rollout/spec_accept_length"] > 1
        for a, b in zip(steps, others, strict=True):
            assert a["rollout/tokens_sha"] == b["rollout/tokens_sha"]
        jax.tree.map(np.testing.assert_array_equal, learnt, params)


def test_a_resumed_run_replays_the_routing_of_tokens_that_were_carried(mixture, tmp_path):
    changes = {
        "rollout.partial": "true", "rollout.over_sample": 2, "rollout.prompts": 2,
        "rollout.chunk_tokens": 4, "algo.dynamic_sampling": "false", "checkpoint.every": 1,
        "checkpoint.keep_last": 3,
    }  # fmt: skip
    for name, steps in (("whole", (3,)), ("stopped", (2, 3))):
        for count in steps:
            argv = tiny_run.arguments(mixture, tmp_path / name, **changes, steps=count)
            rl.main([*argv, *["--resume"] * (count != steps[0])])
    whole, resumed = (read_metrics(tmp_path / name) for name in ("whole", "stopped"))
    assert whole[1]["rollout/groups_carried"] > 0
    for a, b in zip(whole, resumed, strict=True):
        same = {k for k in a if k == "rollout/tokens_sha" or k.startswith("train/")}
        assert {k: a[k] for k in same} == {k: b[k] for k in same}
        assert a[DIFFERENCE] < 1e-4
    paths = (tmp_path / name / "hf" for name in ("whole", "stopped"))
    jax.tree.map(np.testing.assert_array_equal, *(load_checkpoint(path)[1] for path in paths))


def test_glms_head_is_trained_online_and_written_under_its_own_names(tmp_path):
    policy = tiny_run.write_policy(tmp_path / "policy", raw=GLM)
    rl.main(tiny_run.arguments(policy, tmp_path / "run", **{"algo.router_aux_loss_coef": 0.01}))
    steps = read_metrics(tmp_path / "run")
    assert steps[-1]["train/mtp_loss"] < steps[0]["train/mtp_loss"]
    assert steps[-1][DIFFERENCE] < 1e-4 and steps[-1]["rollout/spec_accept_length"] > 1
    (_, old, old_head), (cfg, new, new_head) = (
        load_checkpoint(path) for path in (policy, tmp_path / "run" / "hf")
    )
    mixture = list(new["layers"])[-1]
    for name, array in new["layers"][mixture].items():
        is_buffer = name == "router_bias"  # exported, and not trained
        assert np.array_equal(array, old["layers"][mixture][name]) == is_buffer, name
    assert not np.array_equal(new_head["blocks"][0]["proj"], old_head["blocks"][0]["proj"])
    with safe_open(tmp_path / "run" / "hf" / "model.safetensors", "np") as file:
        names = set(file.keys())
    assert {f"model.layers.{cfg.num_layers}.{n}.weight" for n in ("eh_proj", "mlp.gate")} <= names


@pytest.mark.slow
def test_all_arrays_of_gpt_oss_learn_from_mxfp4_files_and_speculation_changes_no_bit(
    gpt_oss, tmp_path
):
    learnt = []
    for strategy in ("off", "2x2"):
        changes = {"rollout.strategy": strategy, "rollout.invariant": "true"}
        trainer = trainer_of(gpt_oss, tmp_path / strategy, **changes)
        steps = [trainer.step() for _ in range(2)]
        assert all(step[DIFFERENCE] < 1e-4 for step in steps)
        learnt.append(jax.device_get(trainer.params))
    jax.tree.map(np.testing.assert_array_equal, *learnt)
    assert steps[-1]["rollout/spec_accept_length"] > 1
    for stack, arrays in load_checkpoint(gpt_oss, "float32")[1]["layers"].items():
        for name, array in arrays.items():
            assert (learnt[0]["layers"][stack][name] != array).any(), name


@pytest.mark.parametrize(
    ("model", "axes"),
    [
        ("mixture", {"fsdp": 2, "expert": 2, "tp": 2}),
        pytest.param("gpt_oss", {"fsdp": 2, "expert": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("mixture", {"expert": 4, "cp": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_mixture_learns_the_same_with_its_experts_on_eight_devices(
    model, request, tmp_path, axes
):
    mixture = request.getfixturevalue(model)
    layouts = {"one": {}, "eight": {f"mesh.{axis}": ways for axis, ways in axes.items()}}
    steps = {}
    for name, layout in layouts.items():
        trainer = trainer_of(mixture, tmp_path / name, **{"packing.rows": 4, **layout})
        steps[name] = [trainer.step() for _ in range(2)], jax.device_get(trainer.params)
        if name == "eight":
            layers = trainer.params["layers"]
            stack = layers.get("0_0", layers)["experts_up"]
            assert stack.sharding.shard_shape(stack.shape)[1] * axes["expert"] <= 8
    (one, params), (eight, others) = steps.values()
    for a, b in zip(one, eight, strict=True):
        assert a["rollout/tokens_sha"] == b["rollout/tokens_sha"]
        for name in ("loss", "grad_norm", "mtp_loss", "router_entropy", "expert_load_max"):
            assert a[f"train/{name}"] == pytest.approx(b[f"train/{name}"], rel=1e-4, abs=1e-5)
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-3)  # Adam divides by small moments
