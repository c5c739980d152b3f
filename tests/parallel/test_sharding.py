"""On 8 fake devices, data 2 x fsdp 2 x tp 2, everything is split and nothing else changes."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.store import Checkpointer
from specjax.checkpoint.weights import read_config
from specjax.command_line import parse_config
from specjax.config import Strategy
from specjax.decode.state import Plan, RowMap, StateSizes, empty_state, per_slot, take_slots
from specjax.decode.tree import build_tree
from specjax.drafts.mtp import MTPSource
from specjax.engine import llm as llm_module
from specjax.memory import bytes_of
from specjax.models.rows import param_axes
from specjax.models.transformer import init_params
from specjax.parallel import sharding
from specjax.parallel.sharding import MeshConfig, make_mesh, replicated_dims
from train import rl
from train.heads.training import DraftConfig, DraftTrainer
from train.loss.algo import algo
from train.loss.optim import OptimConfig
from train.loss.packing import Sample, pack
from train.loss.policy import PolicyTrainer
from train.loss.terms import count_denominators, rl_loss
from train.run.files import read_metrics
from train.run.start import restore
from train.schema import RLConfig

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(data=2, fsdp=2, tp=2))


def shard(array) -> tuple[int, ...]:
    return array.addressable_shards[0].data.shape


@pytest.fixture(scope="module")
def batches():
    """Packed samples with made-up advantages and log-probabilities: two micro-batches [4 32]."""
    rng = np.random.default_rng(0)
    samples = []
    for i in range(16):
        length = int(rng.integers(3, 20))
        logprobs = rng.uniform(-6, -3, length)
        samples.append(
            Sample(
                i, rng.integers(0, 272, 4), rng.integers(0, 272, length), logprobs, logprobs,
                float(rng.normal()),
            )
        )  # fmt: skip
    return pack(samples, 32, 4)


# --- parameters and states ------------------------------------------------------------------------


def test_parameters_and_moments_are_split_by_the_table(tiny_policy, mesh):
    model, params, head = hf.load_checkpoint(tiny_policy, "float32", mesh)
    assert shard(params["embed"]) == (272 // 2, 16 // 2)  # vocab over tp, width over fsdp
    layers = params["layers"]
    assert layers["q"].shape == (2, 16, 32) and shard(layers["q"]) == (2, 8, 16)
    assert shard(layers["o"]) == (2, 16, 8) and shard(layers["down"]) == (2, 16, 8)
    assert shard(layers["input_norm"]) == layers["input_norm"].shape
    assert shard(head["blocks"][0]["proj"]) == (16, 8)
    optimizer = OptimConfig().build(())
    trainer = PolicyTrainer(model, rl_loss(algo()), optimizer, mesh)
    moments = [x for x in jax.tree.leaves(trainer.init_opt_state(params)) if x.ndim == 3]
    assert moments and all(shard(x)[1:] == (x.shape[1] // 2, x.shape[2] // 2) for x in moments)
    one_device = sum(x.size for x in jax.tree.leaves(params))
    here = sum(np.prod(shard(x)) for x in jax.tree.leaves(params))
    assert here < 0.3 * one_device


def test_dimensions_that_do_not_divide_are_kept_whole_and_reported(tiny_policy):
    cfg, params, _ = hf.load_checkpoint(tiny_policy, "float32")
    axes = param_axes(cfg)
    assert replicated_dims(None, params, axes) == []
    assert replicated_dims(make_mesh(MeshConfig(data=2, fsdp=2, tp=2)), params, axes) == []
    odd = make_mesh(MeshConfig(fsdp=2, tp=3))
    lines = replicated_dims(odd, params, axes)
    assert "['embed']: vocab of size 272 does not divide by 3" in lines
    assert any("mlp of size 32" in line for line in lines)
    assert not any("embed of size" in line for line in lines)
    placed = jax.device_put(params, sharding.param_shardings(odd, params, axes))
    assert shard(placed["embed"]) == (272, 8)


# --- training -------------------------------------------------------------------------------------


@pytest.mark.slow  # test_context has this layout, gradients included
def test_losses_and_gradient_norms_equal_those_of_one_device(tiny_policy, mesh, batches):
    results = []
    for place in (None, mesh):
        model, params, head = hf.load_checkpoint(tiny_policy, "float32", place)
        policy = PolicyTrainer(model, rl_loss(algo()), OptimConfig().build(()), place)
        draft = DraftTrainer(model, DraftConfig(optim=OptimConfig(lr=1e-4)), mesh=place)
        placed = [policy.place(b) for b in batches]
        opt, draft_opt = policy.init_opt_state(params), draft.init_opt_state(head)
        numbers = []
        for _ in range(2):
            params, opt, states, sums = policy.update(
                params, opt, placed, count_denominators(batches)
            )
            head, draft_opt, draft_sums = draft.update(head, draft_opt, params, placed, states)
            numbers += [sums["loss"], sums["entropy"] / sums["tokens"], sums["grad_norm"]]
            numbers.append(draft_sums["mtp_loss_sum"] / draft_sums["mtp_tokens"])
        results.append(numbers)
        if place is not None:
            assert shard(params["layers"]["q"]) == (2, 8, 16), "the update lost the sharding"
            assert shard(head["blocks"][0]["proj"]) == (16, 8)
            assert shard(placed[0]["tokens"]) == (1, 32)
    for one, eight in zip(*results, strict=True):
        np.testing.assert_allclose(eight, one, rtol=1e-4, atol=1e-4)


# --- decoding -------------------------------------------------------------------------------------


def split_heads(shape) -> tuple[int, ...]:
    """Pages are on every device, each with its share of the key/value heads."""
    return (*shape[:-3], shape[-3] // 2, *shape[-2:])


def test_slots_are_split_over_the_data_axes_and_pages_by_heads(tiny_policy, mesh):
    cfg = hf.load_checkpoint(tiny_policy, "float32")[0]
    plan = Plan(cfg, build_tree(Strategy.parse("2_1_3")), MTPSource(cfg))
    empty = empty_state(plan, StateSizes(slots=9, max_len=32, stop_width=2, pages=5, page_size=16))
    placed = jax.device_put(empty, sharding.state_shardings(mesh, empty))
    assert shard(placed.tokens) == (9, 32), "between chunks slots are whole: 9 do not divide"

    @jax.jit
    def chunk(state):
        table = jnp.zeros((8, 3), jnp.int32)
        here = take_slots(state, RowMap(jnp.arange(8), jnp.ones(8, bool), table))
        return sharding.pin_slots(mesh, here)

    here = chunk(placed)
    for leaf in jax.tree.leaves((per_slot(here), here.table)):
        assert shard(leaf) == (2, *leaf.shape[1:])
    for leaf in jax.tree.leaves((placed.memory.pages, here.memory.pages, here.draft.pages)):
        assert shard(leaf) == split_heads(leaf.shape)


@pytest.mark.parametrize(
    "heads",
    [
        {"attention": {"num_kv_heads": 1}, "gated_delta": {}},
        {"attention": {}, "gated_delta": {"num_k_heads": 3, "num_v_heads": 3}},
    ],
    ids=["pages are whole", "states are whole"],
)
def test_pages_and_recurrent_states_fill_what_a_device_has_for_them(monkeypatch, heads):
    cfg = read_config(Path(__file__).resolve().parents[1] / "golden" / "qwen3_5_text")
    layers = [
        dataclasses.replace(
            layer, mixer=dataclasses.replace(layer.mixer, **heads[layer.mixer.kind])
        )
        for layer in cfg.layers
    ]
    cfg = cfg.replace(layers=tuple(layers), max_position=2**15)
    share = 2**21
    total = 16 * jax.local_device_count() * share
    monkeypatch.setattr(llm_module, "host_memory", lambda: total)
    shapes = jax.eval_shape(lambda: init_params(cfg))
    params = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
    llm = LLM((cfg, params, None), None, max_batch=64, tp=2)
    runner = llm.engine.runner
    runner.hold_shapes(llm.params, None)
    taken = sharding.device_bytes((runner.state.memory, runner.kept.slots))
    assert llm.max_len < 2**15 and 0.95 * share < taken <= share


GATHERED = r"= (.*?) (?:all-gather|all-to-all|collective-permute)(?:-start)?\("


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "repeats"), [({"data": 2, "fsdp": 2, "tp": 2}, 1), ({"data": 2, "tp": 4}, 2)]
)
def test_heads_of_recurrent_states_are_split_and_never_gathered(tmp_path, axes, repeats):
    """Layers are unrolled with `repeats` 1, else scanned; two key heads do not divide by four."""
    kinds, scan, tp = tiny_run.HYBRID["layer_types"] * repeats, repeats > 1, axes["tp"]
    raw = {"num_key_value_heads": 4, "layer_types": kinds, "num_hidden_layers": len(kinds)}
    policy = tiny_run.write_policy(tmp_path / "hybrid", raw={**tiny_run.HYBRID, **raw})
    rng, outputs = np.random.default_rng(1), []
    prompts = [rng.integers(2, 272, n).tolist() for n in (2, 8, 5, 7)]
    for place in (None, make_mesh(MeshConfig(**axes))):
        llm = LLM(
            policy, SpecConfig("2x2"), max_batch=4, max_len=40, mesh=place,
            scan_layers=scan and place is not None,
        )  # fmt: skip
        samples = llm.generate(prompts, SamplingParams(max_tokens=24, seed=4, n=2))
        outputs.append([s.token_ids for output in samples for s in output.samples])
    assert outputs[0] == outputs[1] and llm.totals.accepted > 20
    runner = llm.engine.runner
    slots = runner.state.memory.slots, runner.kept.slots
    assert sharding.device_bytes(slots) * tp == bytes_of(slots) > 0
    programs = [p for key, p in runner.executables.by_key.items() if key[0] == "chunk"]
    made = re.findall(GATHERED, "".join(program.as_text() for program in programs))
    # States of all rows come together where they are put back into slots: a device's own heads.
    rows = (4, *[repeats] * scan, 4 // tp, 12, 20)
    matrices = {shape for text in made for shape in re.findall(r"\[([\d,]*,12,20)\]", text)}
    assert len(programs) == 1 and matrices <= {",".join(map(str, rows))}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("off", "4_1_5", "4x2x1", "6_1_7")]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["2_1_3", *SLOW])
def test_sharded_decoding_emits_the_same_tokens(thin_policy, mesh, strategy):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, 272, n).tolist() for n in (2, 8, 5, 7)]
    params = SamplingParams(max_tokens=24, seed=4, n=2)
    outputs = []
    for place in (None, mesh):
        batch = 4 if place is not None else 1  # fewer sizes to compile
        llm = LLM(thin_policy, SpecConfig(strategy), max_batch=batch, max_len=40, mesh=place)
        outputs.append([s for o in llm.generate(prompts, params) for s in o.samples])
        if place is not None:
            runner = llm.engine.runner
            assert shard(runner.weights.policy["layers"][0]["q"]) == (8, 16)
            if strategy != "off":
                assert shard(runner.weights.head["blocks"][0]["proj"]) == (16, 8)
            caches = jax.tree.leaves((runner.state.memory.pages, runner.state.draft))
            caches = [x for x in caches if x.ndim >= 4]
            assert len(caches) == (2 if strategy == "off" else 4)  # the head's, too
            assert all(shard(x) == split_heads(x.shape) for x in caches)
    # No rounding is near a decision here: equality, not merely explained differences.
    assert [s.token_ids for s in outputs[0]] == [s.token_ids for s in outputs[1]]
    for one, eight in zip(*outputs, strict=True):
        np.testing.assert_allclose(eight.logprobs, one.logprobs, atol=1e-4)


# --- the whole job --------------------------------------------------------------------------------


RUN = {"packing.rows": 4}


@pytest.fixture(scope="module")
def runs(thin_policy, tmp_path_factory):
    """The same two steps on one device and on eight."""
    out = tmp_path_factory.mktemp("sharded")
    axes = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tp": 2}
    for name, extra in (("one", {}), ("eight", axes)):
        rl.main(tiny_run.arguments(thin_policy, out / name, **RUN, **extra))
    return out


def test_the_main_job_learns_the_same_on_eight_devices(runs):
    one, eight = read_metrics(runs / "one"), read_metrics(runs / "eight")
    assert len(one) == len(eight) == 2
    for a, b in zip(one, eight, strict=True):
        assert a["rollout/tokens_sha"] == b["rollout/tokens_sha"]
        for name in ("rollout/reward", "train/loss", "train/grad_norm", "train/mtp_loss"):
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-4), name
        assert b["time/sync"] > 0
        assert b["rollout/tokens_per_gpu_per_sec"] * 8 == pytest.approx(b["rollout/tokens_per_sec"])


@pytest.mark.parametrize(
    ("saved", "axes"), [pytest.param("eight", 1, marks=pytest.mark.slow), ("one", 2)]
)
def test_checkpoints_move_between_one_device_and_a_mesh(thin_policy, tmp_path, runs, saved, axes):
    changes = RUN | {"mesh.data": axes, "mesh.fsdp": axes, "mesh.tp": axes}
    argv = tiny_run.arguments(thin_policy, tmp_path, **changes)
    trainer = rl.Trainer(parse_config(RLConfig, argv)[0])
    trainer.warm_up = lambda: None  # nothing is run
    with Checkpointer(runs / saved / "checkpoints") as checkpoints:
        restore(trainer, checkpoints, None)
    assert trainer.done_steps == 2
    _, policy, head = hf.load_checkpoint(runs / saved / "hf", "float32")
    pairs = zip(
        jax.tree.leaves((trainer.params, trainer.head)),
        jax.tree.leaves((policy, head)),
        strict=True,
    )
    assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)
    assert shard(trainer.params["layers"]["q"]) == (1, 16 // axes, 32 // axes)
    moments = [x for x in jax.tree.leaves(trainer.opt_state) if x.ndim == 3]
    assert all(shard(x)[2] == x.shape[2] // axes for x in moments)


@pytest.mark.slow
def test_a_run_on_eight_devices_goes_on_on_one(thin_policy, tmp_path, runs):
    import shutil

    out = shutil.copytree(runs / "eight", tmp_path / "run")
    changes = RUN | {"steps": 3}
    rl.main([*tiny_run.arguments(thin_policy, out, **changes), "--resume"])
    rl.main(tiny_run.arguments(thin_policy, tmp_path / "whole", **changes))
    moved, whole = read_metrics(out)[-1], read_metrics(tmp_path / "whole")[-1]
    assert moved["rollout/tokens_sha"] == whole["rollout/tokens_sha"]
    assert moved["train/loss"] == pytest.approx(whole["train/loss"], rel=1e-3, abs=1e-4)
