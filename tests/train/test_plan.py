"""`train.plan`: what it says of a run, and that it says it of the programs the run really has."""

import dataclasses
import importlib.util
import itertools
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from specjax import chips
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.weights import read_config
from specjax.command_line import ConfigError, parse_config
from specjax.drafts.eagle3 import Eagle3Source
from specjax.engine.options import features_of
from specjax.engine.request import make_jobs
from specjax.models.families.dense import dense_config
from specjax.parallel.sharding import MeshConfig, device_bytes, make_mesh
from train import rl
from train.collect import group_params
from train.plan import __main__ as plan
from train.plan import cost as plan_cost
from train.plan import report as plan_report
from train.plan import table as plan_table
from train.plan.hlo import Module
from train.plan.programs import SHAPES, Shapes
from train.programs import chunk_features, trains_in_replicas
from train.schema import RLConfig

ROOT = Path(__file__).resolve().parents[2]
PODS = sorted((ROOT / "configs" / "pods").glob("*.yaml"))
# Sharded over four devices, two of them for the rows of a batch.
SETTINGS = {
    "steps": 1,
    "mesh.fsdp": 2,
    "mesh.tp": 2,
}


def settings(policy: Path, out: Path, **changes) -> list[str]:
    return tiny_run.arguments(policy, out, **{**SETTINGS, **changes})


def planned(policy: Path, out: Path, *flags: str, **changes) -> dict:
    """The figures of a plan, made by the command line."""
    file = out / "plan.json"
    plan.main([*settings(policy, out, **changes), *flags, "--json", str(file)])
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def whole(tiny_policy, tmp_path_factory):
    """Figures and text of a plan of everything, compiled for eight CPU devices."""
    import contextlib
    import io

    out, text = tmp_path_factory.mktemp("plan"), io.StringIO()
    with contextlib.redirect_stdout(text):
        figures = planned(tiny_policy, out, "--topology", "cpu:8")
    return figures, text.getvalue()


def named(figures: dict, name: str) -> dict:
    return next(p for p in figures["programs"] if p["name"] == name)


def test_the_table_has_every_program_and_all_its_parts(whole):
    figures, text = whole
    names = [p["name"] for p in figures["programs"]]
    assert names == [
        "policy, a micro-batch", "policy, optimizer", "draft, a micro-batch",
        "resharding, policy", "resharding, draft", "place 1", "place 4", "chunk 1_1_2 x 1",
        "prefill 1 x 17",
    ]  # fmt: skip
    for part in (
        "policy parameters", "policy optimizer", "draft optimizer", "cache", "temporaries, at most",
        "HBM", "while it rolls out", "while it trains", "compute ms", "predicted tok/s",
        "largest batch that fits", "FITS",
        "4 chips of cpu:8 are idle", "compiled for CPU devices",
    ):  # fmt: skip
        assert part in text, part
    assert all(name in text for name in names)


def test_figures_are_those_of_one_device(whole, tiny_policy, tmp_path):
    figures, _ = whole
    cfg, _ = parse_config(RLConfig, settings(tiny_policy, tmp_path))
    trainer = rl.Trainer(cfg)
    held = {"policy parameters": trainer.params, "policy optimizer": trainer.opt_state}
    for kind, tree in held.items():
        here = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
        assert figures["resident_bytes"][kind] == here
    micro = named(figures, "policy, a micro-batch")
    model, rows, length = trainer.model, cfg.packing.rows, cfg.packing.row_length
    mixer, mlp = model.layers[0].mixer, model.layers[0].mlp
    per_token = (
        model.num_layers
        * (
            4 * model.hidden_size * mixer.num_heads * mixer.head_dim // 1
            - 2 * model.hidden_size * (mixer.num_heads - mixer.num_kv_heads) * mixer.head_dim
            + 3 * model.hidden_size * mlp.intermediate_size
        )
        + model.vocab_size * model.hidden_size
    )
    least = 3 * 2 * per_token * rows * length / 4  # forward and backward, without attention
    assert least <= micro["flops"] <= 2 * least
    assert micro["received_bytes"]["all-reduce"] > 0
    assert named(figures, "chunk 1_1_2 x 1")["received_bytes"]


def warm_up_recorded(trainer: rl.Trainer, ran: dict) -> None:
    """Warms up, and adds the text of each program of the engine and of those that move weights."""
    runner = trainer.engines[0].runner

    def build(key, lower, donate):
        program = lower()
        ran[key] = program.as_text()
        return program.compile()

    runner.executables.build = build
    trainer.warm_up()
    # These ran before anybody could look.
    for whose, program in zip(("policy", "draft"), runner._mover.programs, strict=True):
        ran["reshard", whose] = program.lower().as_text()


@pytest.fixture(scope="module")
def run(tiny_policy, tmp_path_factory):
    """One step of a real run: its configuration, the text of each program that it lowered, its
    metrics, how many micro-batches and states the head's update was given, and what the engine held
    when a micro-batch of the policy ran."""
    changes = {"draft.max_microbatches": 1}
    cfg, _ = parse_config(
        RLConfig, settings(tiny_policy, tmp_path_factory.mktemp("run"), **changes)
    )
    trainer, ran, given, held = rl.Trainer(cfg), {}, [], []
    runner = trainer.engines[0].runner

    def recorded(key, jitted):
        def call(*inputs):
            ran[key] = jitted.lower(*inputs).as_text()
            held.append(jax.tree.leaves((runner.params, runner.head, runner.state, runner.kept)))
            return jitted(*inputs)

        return call

    update = trainer.draft.update

    def watched(head, opt_state, policy, batches, states):
        given.append((len(batches), len(states)))
        return update(head, opt_state, policy, batches, states)

    trainer.policy._accumulate = recorded(("accumulate",), trainer.policy._accumulate)
    trainer.policy._apply = recorded(("apply",), trainer.policy._apply)
    trainer.draft._update = recorded(("draft",), trainer.draft._update)
    trainer.draft.update = watched
    warm_up_recorded(trainer, ran)
    return cfg, ran, trainer.step(), given, held


def test_what_is_lowered_is_what_a_run_runs(run):
    cfg, ran, *_ = run
    lowered = {p.key: p.lower().as_text() for p in Shapes(cfg, jax.devices()).programs()}
    assert set(lowered) == set(ran)
    different = [key for key in ran if lowered[key] != ran[key]]
    assert not different


def test_resharding_brings_no_device_more_than_it_keeps(whole):
    figures, text = whole
    for whose in ("policy", "draft"):
        moves = named(figures, f"resharding, {whose}")
        assert moves["excess"] == []
        assert 0 < moves["brought_bytes"] < moves["kept_bytes"]
        counted = sum(moves["received_bytes"].values())  # from the same text, by other code
        assert moves["brought_bytes"] == pytest.approx(counted)
    assert text.count("of no weight, at no moment, more than its shard") == 2


def test_a_plan_is_a_row_of_the_table_in_the_docs(whole):
    row = plan_table.row("tiny", whole[0])
    cells = dict(zip(plan_table.COLUMNS, row, strict=True))
    assert cells["by"] == "cpu compiler" and cells["fits"] == "yes"
    assert cells["round"].endswith("(chunk 1_1_2 x 1)") and cells["2"]
    assert cells["resharding brings"].count(" GB") == 2


# --- what does not compile, and what need not be compiled again -----------------------------------

# As libtpu says it: of temporaries, of a whole program; and as a kernel's compiler does.
TOO_LARGE = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
TOO_LARGE += "temporaries (18.84G) exceeds available HBM (15.75G)."
LARGER = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 33.5G of 15.75G hbm."


def lowered_by(monkeypatch, errors: dict[str, Exception]) -> list[str]:
    """Has programs of these names refused with these errors; gets the names of all that are asked
    for."""
    asked = []

    def compiled(program):
        def lower():
            if program.name in errors:
                raise errors[program.name]
            return program.lower()

        asked.append(program.name)
        return plan_cost.compiled(dataclasses.replace(program, lower=lower))

    monkeypatch.setattr(plan, "compiled", compiled)
    return asked


SMALL = ("--topology", "cpu:8", "--only", "place|chunk|prefill")


def test_programs_that_do_not_fit_or_are_refused_are_named_and_the_others_compiled(
    tiny_policy, tmp_path, monkeypatch, capsys
):
    errors = {
        "prefill 1 x 17": NotImplementedError("no such\nkernel"),
        "place 1": jax.errors.JaxRuntimeError(TOO_LARGE),
        "place 4": jax.errors.JaxRuntimeError(LARGER),
    }
    lowered_by(monkeypatch, errors)
    file = tmp_path / "plan.json"
    arguments = [*settings(tiny_policy, tmp_path), *SMALL, "--json", str(file)]
    assert plan.main(arguments) == plan.DOES_NOT_FIT
    figures, text = json.loads(file.read_text()), capsys.readouterr().out
    memory, held = figures["hbm_bytes"], figures["held_bytes"]["roll out"]
    assert not figures["fits"] and named(figures, "chunk 1_1_2 x 1")["flops"] > 0
    over = figures["too_large_bytes"]
    assert list(over) == ["place 4", "place 1"]
    assert over["place 1"] == pytest.approx(18.84 * 2**30 + held - memory)
    given = sum(named(figures, "place 4")["given_bytes"].values())
    assert over["place 4"] == pytest.approx(33.5 * 2**30 + held - given - memory, abs=1)
    assert figures["refused"] == {"prefill 1 x 17": "NotImplementedError: no such"}
    assert figures["worst"] == "place 4" and len(figures["advice"]) == 2
    for said in (
        "REFUSED by the compiler: RESOURCE_EXHAUSTED: Ran out of memory on HBM", "DOES NOT FIT: ",
        "  place 1: 4.", "GB too many", "  prefill 1 x 17: refused by the compiler, Not",
        "without the 5 programs left out", "What to change:",
        "'prefill 1 x 17': another rollout.tp; attention=reference",
    ):  # fmt: skip
        assert said in text, said


def test_a_fault_of_the_code_is_not_taken_for_a_refusal(tiny_policy, tmp_path, monkeypatch):
    lowered_by(monkeypatch, {"place 1": TypeError("missing 1 required positional argument")})
    with pytest.raises(TypeError, match="missing 1 required"):
        plan.main([*settings(tiny_policy, tmp_path), "--topology", "cpu:8", "--only", "place"])


def test_a_chunk_that_is_too_large_in_a_small_batch_is_not_told_to_take_fewer_slots(
    tiny_policy, tmp_path, monkeypatch
):
    changes = {"rollout.max_batch": 2, "rollout.control.strategies": "[off,1_1_2]"}
    lowered_by(monkeypatch, {"chunk off x 1": jax.errors.JaxRuntimeError(TOO_LARGE)})
    figures = planned(
        tiny_policy, tmp_path, "--topology", "cpu:8", "--only", "chunk off x 1", **changes
    )
    [advice] = figures["advice"]
    assert "'chunk off x 1': rollout.control.strategies without off" in advice


def test_a_plan_goes_on_where_its_file_ends_and_tries_again_what_failed(
    tiny_policy, tmp_path, monkeypatch
):
    errors = {"place 1": jax.errors.JaxRuntimeError(LARGER)}
    asked = lowered_by(monkeypatch, errors)
    file = tmp_path / "plan.json"
    arguments = [*settings(tiny_policy, tmp_path), "--topology", "cpu:8", "--json", str(file)]
    assert plan.main([*arguments, "--only", "place"]) == plan.DOES_NOT_FIT
    before = json.loads(file.read_text())
    assert asked == ["place 1", "place 4"] and before["left_out"] == 7
    errors.clear()
    assert plan.main([*arguments, "--only", "prefill|place", "--resume"]) == 0
    after = json.loads(file.read_text())
    assert asked[2:] == ["place 1", "prefill 1 x 17"]
    assert [p["name"] for p in after["programs"]] == ["place 1", "place 4", "prefill 1 x 17"]
    assert named(after, "place 4") == named(before, "place 4")
    assert after["fits"] and after["left_out"] == 6
    other = [*arguments, "--resume", "rollout.max_batch=2"]
    with pytest.raises(SystemExit, match="is of another plan, with other resident_bytes"):
        plan.main(other)
    other = [*arguments, "--resume", "packing.rows=4"]
    with pytest.raises(SystemExit, match="is of another plan, with other .*settings"):
        plan.main(other)
    monkeypatch.setattr(plan_report, "_sources", lambda: "of another commit")
    with pytest.raises(SystemExit, match="is of another plan, with other versions"):
        plan.main([*arguments, "--resume"])
    with pytest.raises(SystemExit, match="--resume: from which file"):
        plan.main([*arguments[:-2], "--resume"])


def test_every_strategy_size_and_evaluation_of_a_run_is_planned(tiny_policy, tmp_path):
    changes = {
        "rollout.max_batch": 5, "rollout.control.strategies": "[off,1_1_2]", "eval.problems": 4,
        "eval.max_batch": 2, "rollout.max_prompt_tokens": 200, "packing.row_length": 256,
        "algo.updates_per_rollout": 2, "rollout.prefill_chunk": 64,
    }  # fmt: skip
    figures = planned(tiny_policy, tmp_path, "--topology", "h200:8", **changes)
    names = {p["name"] for p in figures["programs"]}
    # The sizes of engines on GPUs, though CPU devices stand for them.
    chunks = {f"chunk {s} x {n}" for s in ("off", "1_1_2") for n in (1, 4, 5)}
    assert {name for name in names if name.startswith("chunk")} == chunks
    assert {f"place {n}" for n in (1, 4, 5)} <= names and "policy, scoring" in names
    assert {f"evaluate: chunk off x {n}" for n in (1, 2)} <= names
    cfg, _ = parse_config(RLConfig, settings(tiny_policy, tmp_path, **changes))
    assert Shapes(cfg, jax.devices()).engine.buckets == [1, 2, 4, 5]
    engine = Shapes(cfg, jax.devices(), platform="gpu").engine
    assert engine.buckets == [1, 4, 5]
    changes["eval.max_batch"] = "null"  # then evaluation has the programs of rollouts
    cfg, _ = parse_config(RLConfig, settings(tiny_policy, tmp_path, **changes))
    planned_alike = {p.name: p.lower for p in Shapes(cfg, jax.devices()).programs()}
    assert all(planned_alike[f"evaluate: {chunk}"] is planned_alike[chunk] for chunk in chunks)
    read = {(1, width + 1) for width in engine.piece_widths}
    assert {f"prefill {r} x {n}" for r, n in read} <= names


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ([], "sampled"),
        (["rollout.temperature=0", "rollout.min_tokens=2"], "min_tokens"),
        (["rollout.top_p=0.9", "rollout.presence_penalty=1"], "sampled top_p penalties"),
        (["rollout.top_k=3", "algo.logprobs=processed"], "sampled top_k transformed_logprobs"),
    ],
)
def test_the_planned_chunks_are_those_that_a_config_samples_with(tiny_policy, changes, names):
    cfg, model = parse_config(RLConfig, changes)[0], read_config(tiny_policy)
    [job, *_] = make_jobs([1, 2], group_params(cfg, 1, 0), model.eos_token_ids)
    assert features_of(job, model.vocab_size) == chunk_features(cfg, model)
    assert set(chunk_features(cfg, model).names) == set(names.split())
    evaluating = chunk_features(cfg, model, evaluating=True)
    assert set(evaluating.names) == set(names.split()) - {"transformed_logprobs"}


def test_sampling_that_does_not_fit_the_model_is_refused_at_start(tiny_policy):
    cfg, _ = parse_config(RLConfig, ["rollout.logit_bias={99999: 1.0}"])
    with pytest.raises(ConfigError, match="logit_bias holds token id 99999; expected 0 <= id <"):
        chunk_features(cfg, read_config(tiny_policy))


def test_states_that_the_head_does_not_learn_from_are_not_kept(run):
    _, _, metrics, given, _ = run
    assert metrics["train/microbatches"] > 1
    assert given == [(1, 1)]


def test_while_it_trains_the_engine_holds_nothing_and_the_plan_counts_nothing_of_it(run, whole):
    held, figures = run[-1], whole[0]
    assert held and not any(held)
    resident, there = figures["resident_bytes"], figures["held_bytes"]
    assert resident["cache"] > 0 and resident["parameters to roll out"] > 0
    assert there["roll out"] == sum(resident.values())
    released = ("parameters to roll out", "cache", "decode state")
    assert there["train"] == there["roll out"] - sum(resident[kind] for kind in released)
    micro = named(figures, "policy, a micro-batch")
    assert there["train"] < micro["peak_bytes"] < there["train"] + 2 * micro["temporary_bytes"]
    moves = named(figures, "resharding, policy")
    brought = moves["given_bytes"]["results"]  # and no old weights beside these
    least = there["train"] + brought
    assert least <= moves["peak_bytes"] <= least + moves["temporary_bytes"] + 0.1 * brought
    moves = named(figures, "resharding, draft")
    assert moves["peak_bytes"] >= there["train"] + resident["parameters to roll out"]


def test_a_head_that_learns_in_gaps_has_rollouts_beside_it(tiny_policy, tmp_path):
    changes = {"rollout.replicas": 2, "mesh.fsdp": 1, "mesh.tp": 1, "rollout.max_batch": 1}
    update = {}
    for gaps in ("true", "false"):
        spot = {"draft.spot.enabled": gaps, "draft.mode": "online"}
        figures = planned(tiny_policy, tmp_path, "--topology", "h200:8", **changes, **spot)
        update[gaps] = named(figures, "draft, a micro-batch")["peak_bytes"]
        held = figures["held_bytes"]
    assert update["true"] >= held["roll out"] > update["false"] >= held["train"]


def with_draft_model(policy: Path) -> dict:
    """The policy drafts for itself."""
    return {"draft.mode": "frozen", "rollout.draft": policy}


def test_a_draft_model_is_planned_with_its_weights_and_its_cache(tiny_policy, tmp_path):
    flags = ("--topology", "h200:8")
    plain = planned(tiny_policy, tmp_path, *flags, **{"draft.mode": "none"})
    bare = tiny_run.write_policy(tmp_path / "bare", with_head=False)
    drafts = planned(tiny_policy, tmp_path, *flags, **with_draft_model(bare))
    before, after = plain["resident_bytes"], drafts["resident_bytes"]
    assert "draft" not in before and after["draft"] == after["policy parameters"]
    assert after["cache"] == 2 * before["cache"]
    policy, draft = (named(drafts, f"resharding, {whose}") for whose in ("policy", "draft"))
    assert draft["given_bytes"] == policy["given_bytes"]
    round_, step = named(drafts, "chunk 1_1_2 x 1"), named(plain, "chunk off x 1")
    assert round_["flops"] >= 3 * step["flops"], "two rows verified, one drafted"


@pytest.mark.slow
def test_with_a_draft_model_too_a_run_runs_what_is_planned(tiny_policy, tmp_path):
    changes = with_draft_model(tiny_policy)
    cfg, _ = parse_config(RLConfig, settings(tiny_policy, tmp_path, **changes))
    trainer, ran = rl.Trainer(cfg), {}
    warm_up_recorded(trainer, ran)
    lowered = {p.key: p for p in Shapes(cfg, jax.devices()).programs()}
    assert not [key for key in ran if lowered[key].lower().as_text() != ran[key]]
    assert trainer.step()["rollout/spec_accept_length"] > 1.5


def test_what_does_not_fit_is_told_what_to_change(tiny_policy, tmp_path, capsys):
    flags = ("--topology", "h200:8", "--memory")
    fits = planned(tiny_policy, tmp_path, *flags, "0.001", **{"rollout.max_batch": 16})
    assert fits["fits"] and not fits["advice"]
    most = fits["largest_batch"]
    assert most > 16
    larger = planned(tiny_policy, tmp_path, *flags, "0.001", **{"rollout.max_batch": 2 * most})
    assert not larger["fits"]
    assert "DOES NOT FIT" in capsys.readouterr().out
    advice = next(line for line in larger["advice"] if " cache: " in line)
    change = int(advice.partition("rollout.max_batch=")[2].partition(" ")[0])
    assert abs(change - most) <= 1 + 0.02 * most
    again = planned(tiny_policy, tmp_path, *flags, "0.001", **{"rollout.max_batch": change})
    assert again["fits"]


def test_every_strategy_and_batch_has_a_speed_by_accept_length(tiny_policy, tmp_path):
    changes = {"rollout.max_batch": 4, "rollout.strategy": "2_1_3"}
    changes |= {"rollout.control.strategies": '["off",2_1_3]'}
    figures = planned(tiny_policy, tmp_path, "--topology", "h200:8", **changes)
    chunks = {p["name"]: p for p in figures["programs"] if "tokens_per_second" in p}
    names = {f"chunk {strategy} x {n}" for strategy in ("off", "2_1_3") for n in (1, 4)}
    assert set(chunks) == names
    four = chunks["chunk 2_1_3 x 4"]
    assert four["tokens_per_second"]["1"] == pytest.approx(4 / four["round_seconds"])
    assert four["tokens_per_second"]["3"] == pytest.approx(3 * 4 / four["round_seconds"])
    assert set(four["tokens_per_second"]) == {"1", "1.5", "2", "3"}, "it emits 3 tokens at most"
    assert set(chunks["chunk off x 4"]["tokens_per_second"]) == {"1"}
    plain = chunks["chunk off x 4"]
    model = hf.read_config(tiny_policy)
    drafting = 4 * 2 * 2 * (  # slots, steps, a product and a sum
        chips.layer_weights(model.layers[:1], model.hidden_size)
        + 2 * model.hidden_size**2
        + model.vocab_size * model.hidden_size
    )  # fmt: skip
    devices = 4  # of the mesh, which rollouts share
    assert four["flops"] == pytest.approx(3 * plain["flops"] + drafting / devices)
    # What the head reads of its cache makes a round longer than what it is given.
    assert four["round_seconds"] > plain["round_seconds"]


def test_a_cache_of_its_own_size_is_told_how_large_it_could_be(tiny_policy, tmp_path, capsys):
    flags = ("--topology", "h200:8", "--memory", "0.001")
    small = {"rollout.max_batch": 4, "rollout.cache_bytes": 200_000}
    figures = planned(tiny_policy, tmp_path, *flags, **small)
    slots, size = figures["largest_cache"]
    assert slots > figures["largest_batch"] and size > 200_000
    assert f"{slots} with all memory, rollout.cache_bytes={size}" in capsys.readouterr().out
    grown = {"rollout.max_batch": slots, "rollout.cache_bytes": size}
    grown = planned(tiny_policy, tmp_path, *flags[:-1], "0.00102", **grown)  # but for 2%
    assert grown["fits"] and 0.9 * slots <= grown["largest_batch"] <= 1.1 * slots


# --- counting ------------------------------------------------------------------------------------


def test_every_matrix_of_an_eagle_3_head_counts():
    """Its first layer takes states and embeddings, and `fc` the target's states, once a token."""
    target = dense_config(64, 16, 24, 12, 4, 2, 8)
    source = Eagle3Source.of(target)
    arrays = jax.eval_shape(lambda: source.init(0))
    shapes = SimpleNamespace(source=source, head=arrays, model=target)
    fused = arrays["fc"].size
    matrices = sum(a.size for a in jax.tree.leaves(arrays) if a.ndim == 2)
    assert plan_cost.fused_weights(shapes) == fused == 3 * 16 * 16
    assert plan_cost.draft_weights(shapes) == matrices - fused


def test_a_loop_counts_as_often_as_it_runs():
    def program(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    x, w = jnp.ones((8, 16)), jnp.ones((7, 16, 16))
    cost = Module(jax.jit(program).lower(x, w).compile().as_text()).cost
    assert cost.flops == 7 * 2 * 8 * 16 * 16
    # Of the stacked weights each turn reads its own slice, not all of them.
    assert cost.bytes < 7 * 4 * (2 * 16 * 16 + 8 * 8 * 16) + 4 * 7 * 16 * 16


SLICED = """HloModule sliced

ENTRY %main (p: f32[64,16]) -> f32[4,16] {
  %p = f32[64,16]{1,0} parameter(0)
  %s = ((f32[64,16]{1,0}), f32[4,16]{1,0PLACE}, s32[]{:S(2)}) slice-start(%p), slice={[0:4], [0:16]}
  ROOT %d = f32[4,16]{1,0PLACE} slice-done(%s)
}
"""


@pytest.mark.parametrize("place, times", [(":S(1)", 1), ("", 2)], ids=["on the chip", "in memory"])
def test_of_an_asynchronous_slice_the_piece_is_counted_and_not_the_whole(place, times):
    """It is read, and where it does not stay on the chip written as well."""
    assert Module(SLICED.replace("PLACE", place)).cost.bytes == times * 4 * 16 * 4


def test_a_loop_that_data_end_counts_once_and_is_given_by_itself():
    def program(x, w):
        y = x @ w @ w
        return jax.lax.while_loop(lambda y: y.sum() < 100, lambda y: jnp.tanh(y @ w), y)

    module = Module(
        jax.jit(program).lower(jnp.ones((8, 16)), jnp.ones((16, 16))).compile().as_text()
    )
    assert module.cost.flops == 3 * 2 * 8 * 16 * 16
    assert module.turn.flops == 2 * 8 * 16 * 16


def test_a_round_without_products_is_counted_too():
    """As TPUs compute plain decoding of one sequence: by multiplying and adding up."""

    def program(x, w):
        y = jnp.tanh(w).sum(0) + x
        return jax.lax.while_loop(lambda y: y.sum() < 100, lambda y: (y[:, None] * w).sum(0), y)

    module = Module(jax.jit(program).lower(jnp.ones(64), jnp.ones((64, 64))).compile().as_text())
    assert module.cost.flops == module.turn.flops == 0
    assert 4 * 64 * 64 <= module.turn.bytes < module.cost.bytes


def test_collectives_are_counted_by_kind_and_as_rings_move_them():
    mesh = make_mesh(MeshConfig(tp=4))

    def compiled(x, w, out):
        spec = jax.NamedSharding(mesh, out)
        placed = [jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in (x, w)]
        jitted = jax.jit(lambda x, w: x @ w, out_shardings=spec)
        return Module(jitted.lower(*placed).compile().as_text()).cost

    x, w = np.ones((8, 64), np.float32), np.ones((64, 32), np.float32)
    summed = compiled((x, jax.P(None, "tp")), (w, jax.P("tp", None)), jax.P())
    assert summed.flops == 2 * 8 * 16 * 32
    assert summed.received == {"all-reduce": 2 * 4 * 8 * 32 * 3 / 4}
    gathered = compiled((x, jax.P()), (w, jax.P(None, "tp")), jax.P())
    assert gathered.received == {"all-gather": 4 * 8 * 32 * 3 / 4}


def test_products_that_tpus_write_as_convolutions_are_counted():
    text = """
HloModule jit_f, is_scheduled=true

ENTRY %main (a: bf16[4,8,16], b: bf16[4,16,32]) -> bf16[4,8,32] {
  %a = bf16[4,8,16]{2,1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[4,16,32]{2,1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %c = bf16[4,8,32]{2,1,0:T(8,128)(2,1)} convolution(%a, %b), WINDOW, dim_labels=0bf_0io->0bf
}
"""
    # A batch of products: positions of the window that meet padding multiply nothing.
    text = text.replace("WINDOW", "window={size=4 stride=3 lhs_dilate=4}")
    cost = Module(text).cost
    assert cost.flops == 4 * 2 * 8 * 16 * 32
    assert cost.bytes == 2 * (4 * 8 * 16 + 4 * 8 * 32)  # %b lies in the chip's own memory, S(1)


def test_a_collective_that_tpus_spread_over_fusions_counts_once():
    part = """
%part.NUMBER (p: f32[4,8]) -> f32[16,8] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %g.NUMBER = f32[16,8]{1,0} all-gather(%p), channel_id=7, GROUPS, CHAIN
}
"""
    text = (
        "HloModule jit_f\n"
        + part.replace("NUMBER", "1")
        + part.replace("NUMBER", "2")
        + """
ENTRY %main (a: f32[4,8]) -> f32[16,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %x = f32[16,8]{1,0} fusion(%a), kind=kCustom, calls=%part.1
  ROOT %y = f32[16,8]{1,0} fusion(%a), kind=kCustom, calls=%part.2
}
"""
    )
    text = text.replace("GROUPS", "replica_groups=[1,4]<=[4], dimensions={0}")
    once = 4 * 4 * 8 * 3
    chained = text.replace("CHAIN", 'frontend_attributes={chain_id="0"}')
    assert Module(chained).cost.received == {"all-gather": once}
    assert Module(text.replace("CHAIN", "x=y")).cost.received == {"all-gather": 2 * once}


# --- configurations and topologies ---------------------------------------------------------------


# Each alone, and all together: what pod jobs are asked for beside what their configs say.
SWITCHES = {
    "tis": "algo.tis=true",
    "spot": "draft.spot.enabled=true",
    "telemetry": "rollout.telemetry=true",
    "invariant": "rollout.invariant=true",
    "dynamic sampling": "algo.dynamic_sampling=true",
}
# The layouts of 64 chips on eight devices.
ON_EIGHT = {
    "v5e_8x8": ("mesh.fsdp=1", "mesh.cp=2", "rollout.replicas=2"),
    "v5p_4x4x4": ("mesh.fsdp=2", "packing.rows=2", "rollout.replicas=2"),
}


@pytest.mark.parametrize("config", PODS, ids=lambda path: path.stem)
def test_a_pod_config_uses_its_pod_wholly_and_takes_every_switch(config):
    cfg, _ = parse_config(RLConfig, ["--config", str(config)])
    chips = {"v5e_8x8": 64, "v5p_4x4x4": 64, "h100_8": 8, "h200_8": 8}
    count = next(n for name, n in chips.items() if config.stem.endswith(name))
    assert cfg.mesh.size == cfg.rollout_devices == count
    assert (ROOT / SHAPES / Path(cfg.model).name / "config.json").is_file()
    assert f"--config configs/pods/{config.name} --topology " in config.read_text()
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    for switch in SWITCHES.values():
        parse_config(RLConfig, ["--config", str(config), switch])
    fewer = next((more for end, more in ON_EIGHT.items() if config.stem.endswith(end)), ())
    arguments = ["--config", str(config), *fewer, *SWITCHES.values()]
    cfg, _ = parse_config(RLConfig, arguments)
    shapes = Shapes(cfg, jax.devices()[:8], platform="cpu")
    piece, engine = shapes.built.replica_drafts[0], shapes.engine
    assert piece.mesh.size == cfg.rollout.tp and shapes.built.policy.mesh.size == 8
    assert engine.telemetry is not None and engine.spec.invariant and cfg.algo.tis
    update = next(p for p in shapes.training() if p.key == ("draft",))
    assert device_bytes(update.given["copies"]) > device_bytes((shapes.head, shapes.draft_opt))


def test_spot_training_takes_replicas_of_one_device_each_beside_a_mesh():
    config = ROOT / "configs" / "pods" / "mimo_7b_h200_8.yaml"
    more = ["draft.spot.enabled=true", "rollout.replicas=8", "rollout.tp=1"]
    cfg, _ = parse_config(RLConfig, ["--config", str(config), *more])
    assert cfg.mesh.size == 8 and trains_in_replicas(cfg, object())
    assert cfg.draft.spot.buffer_tokens == 4 * cfg.packing.rows * cfg.packing.row_length


PLANS = sorted((ROOT / "bench" / "results" / "pods").glob("*.json"))


def test_the_table_in_the_docs_is_made_of_the_plans_that_lie_beside_them(tmp_path):
    docs = ROOT / "docs" / "pods.md"
    copy = tmp_path / "pods.md"
    copy.write_text(docs.read_text(encoding="utf-8"), encoding="utf-8")
    plan_table.main([*map(str, PLANS), "--into", str(copy)])
    assert copy.read_text(encoding="utf-8") == docs.read_text(encoding="utf-8")


@pytest.mark.parametrize("file", PLANS, ids=lambda path: path.stem)
def test_everything_that_was_planned_of_a_pod_config_fits(file):
    figures = json.loads(file.read_text(encoding="utf-8"))
    assert figures["fits"] and not any(p["failed"] for p in figures["programs"])
    cfg, _ = parse_config(RLConfig, ["--config", str(ROOT / figures["config"])])
    names = {p["name"] for p in figures["programs"]}
    ends = itertools.product(cfg.rollout.control.strategies, (1, cfg.rollout.max_batch))
    assert {f"chunk {strategy} x {slots}" for strategy, slots in ends} <= names


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--topology", "v9:8x8"], "--topology: expected one of v5e"),
        (["--topology", "cpu:2"], "needs 4 devices, got 2"),
        (["--topology", "cpu:8", "--only", "nonsense"], "--only: no program's name has"),
        (["--topology", "cpu:8", "--only", "chunk ("], "--only: expected a regular expression"),
        (["--topology", "cpu:8", "model=nowhere/Llama-9"], "no shapes of that name"),
    ],
)
def test_mistakes_are_told_in_one_line(tiny_policy, tmp_path, flags, said):
    with pytest.raises(SystemExit, match=said):
        plan.main([*settings(tiny_policy, tmp_path), *flags])


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_the_tpu_compiler_it_says_where_to_get_it(tiny_policy, tmp_path):
    with pytest.raises(SystemExit, match="make plan"):
        plan.main([*settings(tiny_policy, tmp_path), "--topology", "v5e:2x2"])


def planned_for_tpus(out: Path, *arguments) -> dict:
    """The figures of a plan by the TPU compiler, which lives in an environment of its own."""
    python = ROOT / os.environ.get("PLAN_VENV", ".venv-plan") / "bin" / "python"
    if not python.exists():
        pytest.skip("needs libtpu, in the environment that `make plan` sets up")
    file = out / "plan.json"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "XLA_FLAGS": ""}
    env |= {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    env |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # another test may be compiling
    command = [python, "-m", "train.plan", *arguments, "--json", file]
    subprocess.run(command, check=True, cwd=ROOT, env=env)
    return json.loads(file.read_text())


@pytest.mark.slow
def test_the_tpu_compiler_takes_every_program_of_a_run(tiny_policy, tmp_path):
    figures = planned_for_tpus(tmp_path, *settings(tiny_policy, tmp_path), "--topology", "v5e:2x2")
    assert figures["fits"] and all(p["failed"] is None for p in figures["programs"])
    assert all(p["flops"] > 0 for p in figures["programs"] if "chunk" in p["name"])


@pytest.mark.slow
@pytest.mark.parametrize("pod", ["v5e:8x8", "v5p:4x4x4"])
def test_an_8b_policy_reaches_its_engines_without_a_byte_too_many(tmp_path, pod):
    config = f"configs/pods/qwen3_8b_{pod.replace(':', '_')}.yaml"
    figures = planned_for_tpus(
        tmp_path, "--config", config, "--topology", pod, "--only", "resharding"
    )
    moves = named(figures, "resharding, policy")
    assert moves["excess"] == []
    assert 0 < moves["brought_bytes"] < moves["kept_bytes"] < 2 * 8.8e9 / 4
    assert moves["brought_bytes"] == pytest.approx(sum(moves["received_bytes"].values()), rel=1e-3)
