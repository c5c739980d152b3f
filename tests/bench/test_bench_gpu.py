"""`bench.gpu` tried out at small size: every part is there, and a part that fails is said to."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from test_bench_protocol import PROGRAM

from bench import gpu, gpu_job, gpu_kernels, gpu_rl, gpu_targets, gpu_torch, hlo
from bench.common import figure

ROOT = Path(__file__).resolve().parents[2]

# --- the command -------------------------------------------------------------------------------


def command(out: Path, *argv: str):
    """The finished process on a CPU, and its result."""
    # So many minutes that nothing is left out where machines are busy.
    argv = ["--small", "--minutes", "60", "--out", str(out), *argv]
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", *argv], cwd=ROOT, capture_output=True, text=True
    )
    assert out.exists(), done.stdout + done.stderr
    return done, json.loads(out.read_text())


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """All parts."""
    return command(tmp_path_factory.mktemp("gpu") / "gpu.json")


def test_the_command_measures_kernels_and_says_what_it_did_not(tmp_path):
    parts = [part for part in gpu.SHARES if part.startswith(("correctness", "bandwidth"))]
    done, result = command(tmp_path / "gpu.json", "--parts", *parts)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = result["figures"]
    outcomes = [figures[f"part/{part}"]["value"] for part in parts]
    assert outcomes == ["done", "not on this device"] * 2
    check_kernels(figures)
    assert figures["target/values/library:xla"]["value"] == gpu_targets.MET
    assert figures["target/bandwidth/reference"]["value"] != gpu_targets.UNKNOWN
    assert figures["target/draft_over_verify"]["value"] == gpu_targets.UNKNOWN


def check_kernels(figures):
    """Numbers are there for everything that the kernels' parts measure."""
    sizes = gpu_kernels.SMALL
    for t in sizes.rows:
        for prefix in sizes.prefixes:
            for batch in sizes.batches:
                at = f"reference/T_{t}/prefix_{prefix}/batch_{batch}"
                assert figures[f"bandwidth_share/{at}"]["value"] > 0
    for kernel in ("reference", "library:xla"):
        assert 0 <= figures[f"values/{kernel}/tree_of_8"]["value"] <= 1


@pytest.mark.slow
def test_the_small_command_does_every_part_and_says_what_cannot_be_there(small):
    done, result = small
    assert done.returncode == 0, done.stdout + done.stderr
    torch = "done" if importlib.util.find_spec("torch") else "not installed"
    outcomes = {part: result["figures"][f"part/{part}"]["value"] for part in gpu.SHARES}
    assert outcomes == {
        "correctness": "done",
        "correctness/experimental": "not on this device",
        "bandwidth": "done",
        "bandwidth/experimental": "not on this device",
        "round": "done",
        "protocol": "done",
        "transformers": torch,
        "train.rl": "done",
    }
    assert "compiled for GPUs" in result["figures"]["part/correctness/experimental"]["unit"]
    assert result["machine"]["platform"] == "cpu" and result["settings"]["small"]


@pytest.mark.slow
def test_its_figures_are_finite_or_say_that_they_were_left_out(small):
    figures = small[1]["figures"]
    for name, entry in figures.items():
        if isinstance(entry["value"], (int, float)):
            assert math.isfinite(entry["value"]), name
        elif entry["value"] is None:  # protocol: what a clock cannot tell of a tiny model
            assert name.startswith("protocol/") or "left out" in entry["unit"], name
    check_kernels(figures)
    assert figures["kernels_per_round"]["value"] > 10
    assert figures["round_ms/chunk"]["value"] > 0 and figures["ms/verify_16_rows"]["value"] > 0
    shares = [figures[f"share/{part}"]["value"] for part in gpu.gpu_round.ROUND]
    assert sum(shares) == pytest.approx(1)
    for workload in ("greedy", "sampled", "penalties", "long"):
        at = f"{workload}/concurrency_1"
        assert figures[f"protocol/plain_tokens_per_sec_call/{at}"]["value"] > 0
        assert figures[f"protocol/accept_length/{at}"]["value"] >= 1
    assert figures["rl/steps"]["value"] == gpu_rl.SMALL["steps"] - 1
    if importlib.util.find_spec("torch"):
        assert figures["torch_tokens_per_sec/batch_2"]["value"] > 0


@pytest.mark.slow
def test_every_target_has_a_verdict_and_what_was_measured(small):
    done, result = small
    verdicts = {n: e for n, e in result["figures"].items() if n.startswith("target/")}
    wanted = {f"target/values/{kernel}" for kernel in ("reference", "library:xla")}
    wanted |= {"target/bandwidth/reference", *(f"target/{name}" for name in gpu_targets.CEILINGS)}
    assert set(verdicts) == wanted
    for name, entry in verdicts.items():
        assert entry["value"] in (gpu_targets.MET, gpu_targets.MISSED, gpu_targets.UNKNOWN)
        assert entry["value"] == gpu_targets.UNKNOWN or "measured" in entry["unit"], name
        assert name.removeprefix("target/") in done.stdout
    assert verdicts["target/values/library:xla"]["value"] == gpu_targets.MET


def test_without_a_gpu_only_the_small_command_runs(tmp_path):
    with pytest.raises(SystemExit, match="expected a GPU, got platform 'cpu'.*--small"):
        gpu.main(["--out", str(tmp_path / "gpu.json")])


# --- parts that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, seconds, says",
    [
        ("import os; os.abort()", 60, "exit status -6"),
        ("import time; time.sleep(99)", 2, "it was ended after its 2 s"),
    ],
    ids=["dies", "hangs"],
)
def test_a_process_that_does_not_end_well_fails_its_parts_and_keeps_what_was_measured(
    tmp_path, monkeypatch, script, seconds, says
):
    start = subprocess.Popen

    def instead(_, **options):
        return start([sys.executable, "-c", script], **options)

    job = gpu_job.Job("round", tmp_path, 60, True, 0)
    job.add({"ms/verify": figure(2.0, "ms")})  # before it died
    monkeypatch.setattr(subprocess, "Popen", instead)
    args = gpu.parse(["--small", "--parts", "round", "protocol"])
    args.minutes = (gpu.LAST + seconds) / 60
    records = gpu.run_parts(tmp_path, args, gpu.environment(True))
    assert [record["outcome"] for record in records.values()] == ["failed", "failed"]
    assert says in records["round"]["failures"][-1]
    assert records["round"]["figures"]["ms/verify"]["value"] == 2.0


def test_one_measurement_that_fails_is_recorded_and_the_others_go_on(tmp_path):
    job = gpu_job.Job("round", tmp_path, 60, True, 0)

    def breaks():
        raise RuntimeError("no such kernel")

    def does_not_fit():
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    items = [("a", breaks), ("b", does_not_fit), ("c", lambda: {"c": figure(1.0, "ms")})]
    job.run(lambda job: job.each(items))
    record = json.loads(job.path.read_text())
    assert record["outcome"] == "failed" and record["failures"] == [
        "a: RuntimeError: no such kernel"
    ]
    assert "failed: RuntimeError" in record["figures"]["a"]["unit"]
    assert "does not fit" in record["figures"]["b"]["unit"]
    assert record["figures"]["c"]["value"] == 1.0


def test_what_there_is_no_time_for_is_left_out_and_said_to_be(tmp_path):
    job = gpu_job.Job("round", tmp_path, 0.0, True, 0)
    job.run(lambda job: job.each([("a", lambda: pytest.fail("there is no time"))]))
    assert job.outcome == "no time" and job.figures["a"]["unit"] == "left out: no time left"


def test_a_kernel_with_wrong_values_fails_its_part(tmp_path, monkeypatch):
    case = {"tree_of_8": gpu_kernels.SMALL_CASES["tree_of_8"]}
    real = gpu_kernels.dispatch.tree_attention

    def wrong(q, k, v, *rest, kernel, **options):
        return real(q, k, v * (1.5 if kernel == "library:xla" else 1), *rest, **options)

    monkeypatch.setattr(gpu_kernels, "SMALL_CASES", case)
    monkeypatch.setattr(gpu_kernels.dispatch, "tree_attention", wrong)
    job = gpu_job.Job("correctness", tmp_path, 3600, True, 0)
    job.run(gpu_kernels.values)
    assert job.outcome == "failed" and "library:xla/tree_of_8" in job.failures[0]
    verdicts = gpu_targets.verdicts(job.figures)
    assert verdicts["target/values/library:xla"]["value"] == gpu_targets.MISSED
    assert verdicts["target/values/reference"]["value"] == gpu_targets.MET


def test_torch_that_is_not_there_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_torch.importlib.util, "find_spec", lambda name: None)
    job = gpu_job.Job("transformers", tmp_path, 3600, True, 0)
    job.run(gpu_torch.beside)
    assert job.outcome == "not installed"


STEPS = """
import json, pathlib, sys, time
out = pathlib.Path(sys.argv[1])
out.mkdir()
names = "step", "wall_time", "rollout/reward", "time/train"
steps = [dict(zip(names, (n, 0.5 * n, 0.25, 0.1))) for n in range(int(sys.argv[2]))]
(out / "new").write_text("".join(json.dumps(step) + "\\n" for step in steps))
(out / "new").rename(out / "metrics.jsonl")
"""


def test_a_run_is_ended_when_its_time_is_over_and_steps_behind_the_first_count(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(gpu_rl, "SECONDS", 0.2)
    job, out = gpu_job.Job("train.rl", tmp_path, 3600, True, 0), tmp_path / "run"
    script = [sys.executable, "-c", STEPS + "time.sleep(3600)", str(out), "5"]
    records = gpu_rl.watched(script, {}, out, job)  # comes back: it did not wait for an hour
    found = gpu_rl.rl_figures(records)  # step 0 is the evaluation before the first one
    assert found["rl/steps"]["value"] == 3 and found["rl/step_seconds"]["value"] == 0.5
    assert found["rl/time/train"]["interval"] == [0.1, 0.1]
    records[1]["nonfinite"] = ["train/loss"]
    with pytest.raises(FloatingPointError, match="step 2: train/loss not finite"):
        gpu_rl.rl_figures(records)


@pytest.mark.parametrize(
    "steps, end, says", [("5", "sys.exit(3)", "status 3"), ("2", "", "logged 1 steps")]
)
def test_a_run_that_fails_or_learns_nothing_is_an_error(tmp_path, steps, end, says):
    job, out = gpu_job.Job("train.rl", tmp_path, 3600, True, 0), tmp_path / "run"
    with pytest.raises(RuntimeError, match=says):
        gpu_rl.watched([sys.executable, "-c", STEPS + end, str(out), steps], {}, out, job)


# --- targets -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, verdict",
    [
        ({8192: 0.8, 32_768: 0.75, 1024: 0.1}, gpu_targets.MET),
        ({8192: 0.8, 32_768: 0.74}, gpu_targets.MISSED),
        ({8192: 0.7, 32_768: None}, gpu_targets.MISSED),
        ({8192: 0.8, 32_768: None}, gpu_targets.UNKNOWN),
    ],
)
def test_bandwidth_counts_from_long_prefixes_on(values, verdict):
    figures = {
        f"bandwidth_share/gpu/T_16/prefix_{prefix}/batch_8": figure(value, "")
        for prefix, value in values.items()
    }
    assert gpu_targets.verdicts(figures)["target/bandwidth/gpu"]["value"] == verdict


def test_ceilings_are_met_missed_or_unknown():
    figures = {
        "draft_over_verify": figure(0.45, ""),
        "verify_16_rows_over_1": figure(1.15, ""),
    }
    found = gpu_targets.verdicts(figures)
    said = {name: found[f"target/{name}"]["value"] for name in gpu_targets.CEILINGS}
    assert list(said.values()) == [gpu_targets.MISSED, gpu_targets.MET, gpu_targets.UNKNOWN]
    assert "measured 0.45" in found["target/draft_over_verify"]["unit"]
    assert found["target/bandwidth"]["value"] == gpu_targets.UNKNOWN


def test_times_of_parts_are_added_up_with_transforms_in_acceptance():
    times = dict.fromkeys(("noise", "transform", "accept", "commit"), (1.0, 2.0))
    times |= {"draft": (2.0, 3.0), "verify": (14.0, 15.0), "round": (22.0, 23.0)}
    found = gpu.gpu_round.part_figures(times)
    assert found["ms/accept"]["interval"] == [2.0, 4.0]
    assert found["noise_and_accept_share"]["value"] == pytest.approx(3 / 20)
    assert found["draft_over_verify"]["value"] == pytest.approx(1 / 7)
    assert found["sum_of_parts"]["value"] == pytest.approx(20 / 22)


def test_kernels_are_counted_where_the_rounds_lie_in_a_graph_that_the_entry_calls():
    before, entry = PROGRAM.split("ENTRY %main")
    graph = "%command_buffer" + entry
    calls = """ENTRY %outer (a: (s32[], f32[4])) -> (s32[], f32[4]) {
  %a.9 = (s32[], f32[4]{0}) parameter(0)
  ROOT %graph = (s32[], f32[4]{0}) call(%a.9), to_apply=%command_buffer
}
"""
    assert hlo.round_kernels(before + graph + calls) == hlo.round_kernels(PROGRAM)
