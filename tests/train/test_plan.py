"""`train.plan`: what it says of a run, and that it says it of the programs the run really has."""

import contextlib
import dataclasses
import io
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from hlo import Module

from specjax.checkpoint.weights import read_config
from specjax.command_line import parse_config
from specjax.engine.request import features_of, make_jobs
from specjax.parallel.sharding import MeshConfig, device_bytes, make_mesh
from train import rl
from train.plan import __main__ as plan
from train.plan import figures as plan_figures
from train.plan.programs import SHAPES, Shapes
from train.programs import chunk_features
from train.rollout.draws import group_params
from train.schema import RLConfig

ROOT = Path(__file__).resolve().parents[2]
PODS = sorted((ROOT / "configs" / "pods").glob("*.yaml"))
# Sharded over four devices, two of them for the rows of a batch.
SETTINGS = {"steps": 1, "mesh.fsdp": 2, "mesh.tp": 2}


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
        "resharding, policy", "resharding, draft", "place 4", "chunk 1_1_2 x 1", "prefill 1 x 17",
    ]  # fmt: skip
    parts = ("policy parameters", "draft optimizer", "cache", "largest batch that fits", "FITS")
    assert all(part in text for part in (*parts, *names))


def test_figures_are_those_of_one_device(whole, tiny_policy, tmp_path):
    figures, _ = whole
    cfg, _ = parse_config(RLConfig, settings(tiny_policy, tmp_path))
    trainer = rl.Trainer(cfg)
    held = {"policy parameters": trainer.params, "policy optimizer": trainer.opt_state}
    for kind, tree in held.items():
        here = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
        assert figures["resident_bytes"][kind] == here


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
    programs = runner.weights._mover._programs.values()
    for whose, program in zip(("policy", "draft"), programs, strict=True):
        ran["reshard", whose] = program.lower().as_text()


@pytest.fixture(scope="module")
def run(tiny_policy, tmp_path_factory):
    """One step of a real run: its configuration, the text of each program that it lowered, and what
    the engine held when a micro-batch of the policy ran."""
    out = tmp_path_factory.mktemp("run")
    cfg, _ = parse_config(RLConfig, settings(tiny_policy, out, **{"draft.max_microbatches": 1}))
    trainer, ran, held = rl.Trainer(cfg), {}, []
    runner = trainer.engines[0].runner

    def recorded(key, jitted):
        def call(*inputs):
            ran[key] = jitted.lower(*inputs).as_text()
            held.append(
                jax.tree.leaves(
                    (runner.weights.policy, runner.weights.head, runner.state, runner.kept)
                )
            )
            return jitted(*inputs)

        return call

    trainer.policy._accumulate = recorded(("accumulate",), trainer.policy._accumulate)
    trainer.policy._apply = recorded(("apply",), trainer.policy._apply)
    trainer.draft._update = recorded(("draft",), trainer.draft._update)
    warm_up_recorded(trainer, ran)
    trainer.step()
    return cfg, ran, held


@pytest.mark.slow
def test_what_is_lowered_is_what_a_run_runs(run):
    cfg, ran, _ = run
    lowered = {p.key: p.lower().as_text() for p in Shapes(cfg, jax.devices()).programs()}
    assert set(lowered) == set(ran)
    different = [key for key in ran if lowered[key] != ran[key]]
    assert not different


# --- what does not compile ------------------------------------------------------------------------

# As libtpu says it.
TOO_LARGE = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
TOO_LARGE += "temporaries (18.84G) exceeds available HBM (15.75G)."


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
        return plan_figures.compiled(dataclasses.replace(program, lower=lower))

    monkeypatch.setattr(plan, "compiled", compiled)
    return asked


SMALL = ("--topology", "cpu:8", "--only", "place|chunk|prefill")


def test_programs_that_do_not_fit_or_are_refused_are_named_and_the_others_compiled(
    tiny_policy, tmp_path, monkeypatch, capsys
):
    errors = {
        "prefill 1 x 17": NotImplementedError("no such\nkernel"),
        "place 4": jax.errors.JaxRuntimeError(TOO_LARGE),
    }
    lowered_by(monkeypatch, errors)
    file = tmp_path / "plan.json"
    arguments = [*settings(tiny_policy, tmp_path), *SMALL, "--json", str(file)]
    assert plan.main(arguments) == plan.DOES_NOT_FIT
    figures, text = json.loads(file.read_text()), capsys.readouterr().out
    memory, held = figures["hbm_bytes"], figures["held_bytes"]["roll out"]
    assert not figures["fits"] and named(figures, "chunk 1_1_2 x 1")["peak_bytes"] > 0
    assert figures["too_large_bytes"]["place 4"] == pytest.approx(18.84 * 2**30 + held - memory)
    assert figures["refused"] == {"prefill 1 x 17": "NotImplementedError: no such"}
    assert figures["worst"] == "place 4" and len(figures["advice"]) == 2
    for said in ("DOES NOT FIT: ", "  prefill 1 x 17: refused by the compiler", "What to change:"):
        assert said in text, said


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
    assert {f"place {n}" for n in (4, 5)} <= names and "policy, scoring" in names
    assert {f"evaluate: chunk off x {n}" for n in (1, 2)} <= names


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


def test_while_it_trains_the_engine_holds_nothing_and_the_plan_counts_nothing_of_it(run, whole):
    held, figures = run[-1], whole[0]
    assert held and not any(held)
    resident, there = figures["resident_bytes"], figures["held_bytes"]
    assert resident["cache"] > 0 and resident["parameters to roll out"] > 0
    assert there["roll out"] == sum(resident.values())
    released = ("parameters to roll out", "cache", "decode state")
    assert there["train"] == there["roll out"] - sum(resident[kind] for kind in released)
    micro = named(figures, "policy, a micro-batch")
    assert there["train"] < micro["peak_bytes"] < there["train"] + 2 * micro["temporaries"]


# --- counting ------------------------------------------------------------------------------------


def test_a_loop_counts_as_often_as_it_runs():
    def program(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    x, w = jnp.ones((8, 16)), jnp.ones((7, 16, 16))
    cost = Module(jax.jit(program).lower(x, w).compile().as_text()).cost
    assert cost["launched"].total() >= 7


def test_collectives_are_counted_by_kind_and_as_rings_move_them():
    mesh = make_mesh(MeshConfig(tp=4))

    def compiled(x, w, out):
        spec = jax.NamedSharding(mesh, out)
        placed = [jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in (x, w)]
        jitted = jax.jit(lambda x, w: x @ w, out_shardings=spec)
        return Module(jitted.lower(*placed).compile().as_text()).cost

    x, w = np.ones((8, 64), np.float32), np.ones((64, 32), np.float32)
    summed = compiled((x, jax.P(None, "tp")), (w, jax.P("tp", None)), jax.P())
    assert summed["received"] == {"all-reduce": 2 * 4 * 8 * 32 * 3 / 4}
    gathered = compiled((x, jax.P()), (w, jax.P(None, "tp")), jax.P())
    assert gathered["received"] == {"all-gather": 4 * 8 * 32 * 3 / 4}


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
    "oss_120b_v5p_2x4x4": ("mesh.fsdp=1", "packing.rows=1", "rollout.replicas=2"),
    "5_35b_a3b_v5p_2x4x4": ("mesh.fsdp=4", "packing.rows=4", "rollout.replicas=4"),
    "v5e_8x8": ("mesh.fsdp=1", "mesh.cp=2", "rollout.replicas=2"),
    "v5p_4x4x4": ("mesh.fsdp=2", "packing.rows=2", "rollout.replicas=2"),
    "v5p_2x4x4": ("mesh.fsdp=2", "packing.rows=2", "rollout.replicas=2"),
}


@pytest.mark.parametrize("config", PODS, ids=lambda path: path.stem)
def test_a_pod_config_uses_its_pod_wholly_and_takes_every_switch(config):
    cfg, _ = parse_config(RLConfig, ["--config", str(config)])
    chips = {"v5e_8x8": 64, "v5p_4x4x4": 64, "v5p_2x4x4": 32, "h100_8": 8, "h200_8": 8}
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
    assert device_bytes(update.passing) > device_bytes((shapes.head, shapes.draft_opt))


PLANS = sorted((ROOT / "bench" / "results" / "pods").glob("*.json"))


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
    ],
)
def test_mistakes_are_told_in_one_line(tiny_policy, tmp_path, flags, said):
    with pytest.raises(SystemExit, match=said):
        plan.main([*settings(tiny_policy, tmp_path), *flags])
