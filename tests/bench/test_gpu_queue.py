"""The GPU queue: which part runs when, what becomes of one that ends badly, how results travel."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import gpu
from bench import gpu_process as records
from bench.gpu_parts import PARTS
from bench.gpu_process import Job, Part
from bench.programs import Place
from bench.record import figure, write_json
from specjax.chips import CARDS

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]
OLD, NEW = "2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00"


def part(name, how, seconds=60.0, **settings):
    return Part(name, "nothing", "gpu_fakes:measure", {"how": how, **settings}, seconds)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs parts as a call of the queue does; returns its exit status."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(HERE)]))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))

    def call(*parts, minutes=60.0, again=()):
        return gpu.run(gpu.Call(str(tmp_path), minutes, parts, again, small=True))

    return call


def record_of(out, name, running=False, card="cpu"):
    return records.read(records.path_of(out, name, card, running))


def made(name, date, word="done", card="cpu", value=1.0, attempt=1, **settings):
    """A record without a machine."""
    figures = {"outcome": figure(word, ""), "ms": figure(value, "ms")}
    settings |= {"part": name, "card": card, "attempt": attempt}
    return {"name": f"gpu/{name}", "date": date, "settings": settings, "figures": figures}


def put(out, record, running=False):
    settings = record["settings"]
    write_json(record, records.path_of(out, settings["part"], settings["card"], running))


@pytest.mark.slow
def test_a_part_that_ends_badly_is_recorded_with_its_reason_and_skipped_then(run, tmp_path, capfd):
    """And it takes no other part with it, nor what it had measured before."""
    parts = (
        part("hangs", "hangs", 12.0),
        part("aborts", "aborts"),
        part("large", "does_not_fit"),
        part("fails", "fails"),
    )
    assert run(*parts) == 1
    found = {p.name: record_of(tmp_path, p.name) for p in parts}
    endings = {name: (records.outcome(r), records.reason(r)) for name, r in found.items()}
    assert endings["hangs"] == ("timed out", "it was killed after its 12 s")
    assert endings["aborts"] == ("failed", "its process was ended by SIGABRT")
    assert endings["large"][0] == "out of memory" and "99 bytes" in endings["large"][1]
    assert endings["fails"] == ("failed", "ValueError: no such kernel")
    for record in found.values():
        assert record["figures"]["before"]["value"] == 1.0
        assert {"name", "date", "machine", "versions"} <= set(record)
    assert found["fails"]["command"] == "python -m bench.gpu --again fails --small"
    capfd.readouterr()
    assert run(*parts) == 0 and not capfd.readouterr().out  # nothing was begun


CALL = """
import sys
from bench import gpu
from bench.gpu_process import Part
parts = [Part("slow", "", "gpu_fakes:measure", {"how": "hangs", "say": sys.argv[2]}, 600.0)]
gpu.run(gpu.Call(sys.argv[1], 60.0, parts, small=True))
"""


def gone(pid):
    """Whether no such process runs (one that has not been asked about yet counts for nothing)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "waited for two minutes"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_part_whose_call_was_killed_runs_once_more(run, tmp_path):
    say = tmp_path / "pid"
    call = subprocess.Popen([sys.executable, "-c", CALL, str(tmp_path), str(say)], cwd=ROOT)
    wait_for(lambda: say.exists() and say.read_text())
    call.kill()
    call.wait()
    wait_for(lambda: gone(int(say.read_text())))  # no part outlives the call that ran it
    cut_off = record_of(tmp_path, "slow", running=True)
    assert records.outcome(cut_off) == "running" and "before" in cut_off["figures"]
    put(tmp_path, made("done", OLD))
    put(tmp_path, made("twice", OLD, "running", attempt=2), running=True)
    assert run(part("done", "fails"), part("slow", "ends"), part("twice", "fails")) == 0
    second = record_of(tmp_path, "slow")
    assert records.outcome(second) == "done" and second["settings"]["attempt"] == 2
    assert not record_of(tmp_path, "slow", running=True)
    assert records.outcome(record_of(tmp_path, "twice")) == "interrupted"


def test_what_needs_more_time_than_is_left_is_not_started_and_a_shorter_part_is(run, tmp_path):
    short = made("short", OLD, "done in part", left_over=1)
    put(tmp_path, short)
    assert run(part("long", "ends", 180.0), part("short", "is_short"), minutes=2.0) == 0
    assert not record_of(tmp_path, "long") and record_of(tmp_path, "short")["date"] > OLD
    with gpu._alone(records.directory(tmp_path)):
        with pytest.raises(ValueError, match="another call of bench.gpu runs"):
            run(part("long", "ends"))


def test_one_measurement_that_fails_or_has_no_memory_is_recorded_and_the_others_go_on(tmp_path):
    def breaks():
        raise RuntimeError("no such kernel")

    def does_not_fit():
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    items = [("a", breaks), ("b", does_not_fit), ("c", lambda: {"c": figure(1.0, "ms")})]
    job = Job("part", "cpu", str(tmp_path), 60.0, small=True)
    assert not job.run(lambda job: job.each(items))
    figures = record_of(tmp_path, "part")["figures"]
    assert figures["outcome"] == figure("failed", "a: RuntimeError: no such kernel")
    assert figures["a"]["value"] is figures["b"]["value"] is None and figures["c"]["value"] == 1.0
    assert "left out: out of memory" in figures["b"]["unit"]
    job = Job("late", "cpu", str(tmp_path), 0.0, small=True)
    assert not job.run(lambda job: job.each(items))
    assert records.outcome(record_of(tmp_path, "late")) == "no time"


@pytest.mark.parametrize(
    "old, new, kept",
    [
        (made("a", OLD, value=1.0), made("a", NEW, value=2.0), 2.0),
        (made("a", OLD, value=1.0), made("a", NEW, "failed", value=2.0), 1.0),
        (made("a", OLD, value=1.0), made("a", NEW, "failed", value=2.0, wrong=["tokens"]), 2.0),
        (made("a", OLD, "failed", value=1.0), made("a", NEW, "failed", value=None), 1.0),
    ],
    ids=["newer", "newer failed", "newer is a wrong result", "newer without figures"],
)
def test_merging_keeps_what_is_newer_and_what_was_measured_in_any_order(tmp_path, old, new, kept):
    files = []
    for name, record in (("a", old), ("b", new)):
        put(tmp_path / name, record)
        files.append(tmp_path / f"{name}.json")
        gpu.act(gpu.parse(["--pack", str(files[-1]), "--out", str(tmp_path / name)]))
    for out, order in (("c", files), ("d", [*files[::-1], *files])):
        gpu.merge(tmp_path / out, order)
        [(_, record)] = records.every(tmp_path / out)
        assert record["figures"]["ms"]["value"] == kept


def test_a_small_run_and_what_is_committed_are_shown_with_targets(tmp_path, capsys):
    argv = ["--small", "--parts", "ceilings", "--out", str(tmp_path)]
    assert gpu.act(gpu.parse(argv)) == 0
    assert record_of(tmp_path, "ceilings")["figures"]["copy"]["value"] > 0
    capsys.readouterr()
    assert gpu.act(gpu.parse(["--status"])) == 0
    shown = capsys.readouterr().out
    assert "h200" in shown and "met" in shown and "missed" in shown and "not measured" in shown
    assert max(part.seconds for part in PARTS) <= 480
    with pytest.raises(ValueError, match="there is no part 'nothing'"):
        gpu.named(["nothing"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows/1", "top_p/8", "plain_oss/1", "round_oss_penalties/1"])
def test_parts_that_measure_rounds_run(name, tmp_path):
    gpu.act(gpu.parse(["--small", "--parts", name, "--out", str(tmp_path)]))
    assert record_of(tmp_path, name)["figures"]["outcome"]["value"] == "done"


@pytest.mark.slow
def test_programs_of_parts_compile_without_being_run(monkeypatch, capsys):
    class Here(Place):
        """This machine's device in place of a card that is not there."""

        def __init__(self, name):
            self.card = CARDS[name]

    monkeypatch.setattr(records, "Ahead", Here)
    parts = gpu.named(
        ["ceilings", "values", "attention/8", "plain/1", "rows/1", "round/1", "top_p"]
    )
    assert records.dry(parts, ["h100"], True, None) == 0
    shown = capsys.readouterr().out
    assert "copy: 0.00 GB" in shown and "reference/8/32/64" in shown and "2_1_3/halvings" in shown
