"""The GPU queue: which part runs when, what becomes of one that ends badly, how results travel."""

import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from bench.gpu import __main__ as command
from bench.gpu import queue, records, show, table
from bench.gpu.job import Job
from bench.gpu.parts import rl
from bench.gpu.program import short_name
from bench.gpu.table import PARTS, Part
from bench.record import figure, write_json
from bench.round.parts import ROUND

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]


def part(name, how, seconds=60.0, **settings):
    return Part(name, "nothing", "gpu_fakes", {"how": how, **settings}, seconds)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs parts as a call of the queue does; returns its exit status."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(HERE)]))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))

    def call(*parts, minutes=60.0, again=()):
        return queue.run(queue.Call(str(tmp_path), minutes, parts, again, small=True))

    return call


def record_of(out, name, running=False):
    return records.read(records.path_of(out, name, "cpu", running))


def outcome(out, name):
    return records.outcome(record_of(out, name))


def made(name, date, word="done", card="h100", value=1.0, attempt=1):
    """A record without a machine."""
    figures = {"outcome": figure(word, ""), "ms": figure(value, "ms")}
    settings = {"part": name, "card": card, "attempt": attempt}
    return {"name": f"gpu/{name}", "date": date, "settings": settings, "figures": figures}


def put(out, record, running=False):
    settings = record["settings"]
    write_json(record, records.path_of(out, settings["part"], settings["card"], running))


# --- parts that end badly ----------------------------------------------------------------------


def test_a_part_that_ends_badly_is_recorded_with_its_reason_and_skipped_then(run, tmp_path, capfd):
    """And it takes no other part with it, nor what it had measured before."""
    parts = (
        part("hangs", "hangs", 8.0),
        part("aborts", "aborts"),
        part("large", "does_not_fit"),
        part("fails", "fails"),
        part("good", "ends"),
    )
    assert run(*parts) == 1
    found = {p.name: record_of(tmp_path, p.name) for p in parts}
    endings = {name: (records.outcome(r), records.reason(r)) for name, r in found.items()}
    assert endings["hangs"] == ("timed out", "it was killed after its 8 s")
    assert endings["aborts"] == ("failed", "its process was ended by SIGABRT")
    assert endings["large"][0] == "out of memory" and "99 bytes" in endings["large"][1]
    assert endings["fails"] == ("failed", "ValueError: no such kernel")
    assert endings["good"] == ("done", "")
    for record in found.values():
        assert record["figures"]["before"]["value"] == 1.0
        assert {"name", "date", "machine", "versions"} <= set(record)
    assert found["good"]["command"] == "python -m bench.gpu --again good --small"
    capfd.readouterr()
    assert run(*parts) == 0 and not capfd.readouterr().out  # nothing was begun


def test_a_part_runs_once_more_when_it_is_asked_for_and_a_measurement_is_not_given_up(
    run, tmp_path, capfd
):
    put(tmp_path, made("fails", "2026-01-01T00:00:00+00:00", card="cpu"))
    assert run(part("fails", "fails"), again=["fails"]) == 1
    assert outcome(tmp_path, "fails") == "done"
    assert "the older record is kept" in capfd.readouterr().out
    assert not record_of(tmp_path, "fails", running=True)


# --- calls that are cut off ----------------------------------------------------------------------

CALL = """
import sys
from bench.gpu import queue
from bench.gpu.table import Part
parts = [Part("good", "", "gpu_fakes", {"how": "ends"}, 60.0)]
parts += [Part("slow", "", "gpu_fakes", {"how": "hangs", "say": sys.argv[2]}, 600.0)]
queue.run(queue.Call(sys.argv[1], 60.0, parts, small=True))
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
def test_a_call_that_is_killed_goes_on_where_it_was_and_tries_the_part_that_ran_once_more(
    run, tmp_path, capfd
):
    say = tmp_path / "pid"
    call = subprocess.Popen([sys.executable, "-c", CALL, str(tmp_path), str(say)], cwd=ROOT)
    wait_for(lambda: say.exists() and say.read_text())
    call.kill()
    call.wait()
    wait_for(lambda: gone(int(say.read_text())))  # no part outlives the call that ran it
    done = record_of(tmp_path, "good")
    cut_off = record_of(tmp_path, "slow", running=True)
    assert records.outcome(done) == "done" and records.outcome(cut_off) == "running"
    assert cut_off["figures"]["before"]["value"] == 1.0
    parts = part("good", "ends"), part("slow", "ends")
    assert run(*parts) == 0
    assert record_of(tmp_path, "good") == done
    second = record_of(tmp_path, "slow")
    assert records.outcome(second) == "done" and second["settings"]["attempt"] == 2
    assert not record_of(tmp_path, "slow", running=True)


def test_a_part_that_was_cut_off_twice_is_recorded_as_interrupted_and_skipped(run, tmp_path, capfd):
    put(tmp_path, made("slow", "2026-01-01T00:00:00+00:00", "running", "cpu", attempt=2), True)
    assert run(part("slow", "ends")) == 0
    record = record_of(tmp_path, "slow")
    assert records.outcome(record) == "interrupted" and "--again slow" in records.reason(record)
    assert record["figures"]["ms"]["value"] == 1.0  # what it had measured
    assert not record_of(tmp_path, "slow", running=True)


def test_a_part_that_wrote_its_record_is_judged_by_it_even_if_its_process_does_not_end(
    run, tmp_path, monkeypatch, capfd
):
    """Such a process is ended at its limit, and the call goes on although it may still be there."""
    assert run(part("stays", "stays", 8.0), part("good", "ends")) == 0
    assert outcome(tmp_path, "stays") == outcome(tmp_path, "good") == "done"

    class Held:
        pid = 7

        def wait(self, seconds):
            raise subprocess.TimeoutExpired("python", seconds)

    queue._reap(part("held", "ends"), Held())
    assert "held: its process 7 was killed and still exists" in capfd.readouterr().out


def test_two_calls_do_not_run_on_the_same_records(run, tmp_path):
    with queue._alone(records.directory(tmp_path)):
        with pytest.raises(ValueError, match="another call of bench.gpu runs"):
            run(part("good", "ends"))


# --- time ----------------------------------------------------------------------------------------


def test_what_needs_more_time_than_is_left_is_not_started_and_a_shorter_part_is(
    run, tmp_path, capfd
):
    assert run(part("long", "ends", 180.0), part("short", "ends", 60.0), minutes=2.0) == 0
    assert not record_of(tmp_path, "long") and outcome(tmp_path, "short") == "done"
    assert "long: not started: it may take 180 s, and 1" in capfd.readouterr().out


@pytest.mark.slow
def test_a_part_that_was_short_of_time_runs_again_in_every_call_and_behind_the_others(
    run, tmp_path, capfd
):
    for name, left_over in (("short", 1), ("large", 0)):
        record = made(name, "2026-01-01T00:00:00+00:00", "done in part", "cpu")
        record["settings"] |= {"left_over": left_over, "no_room": 1 - left_over}
        put(tmp_path, record)
    parts = part("short", "is_short"), part("large", "ends"), part("new", "ends")
    for began in (["new", "short"], ["short"]):
        assert run(*parts) == 0
        lines = [line for line in capfd.readouterr().out.splitlines() if " at most " in line]
        assert [line.split()[1] for line in lines] == began
        assert outcome(tmp_path, "short") == "done in part"


def test_no_part_takes_more_than_its_share_of_a_call():
    longer = {part.name for part in PARTS if part.seconds > 180}
    assert longer == {"protocol", "own_model/head", "own_model/rl"}
    assert max(part.seconds for part in PARTS) <= 480
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_a_part_has_an_environment_of_its_own_and_the_users_flags(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "--user=1")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    own = {"XLA_FLAGS": "--own=2", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    env = queue._environment(Part("a", "", "", environment=own), "h100", small=False)
    assert env["XLA_FLAGS"] == "--user=1 --own=2"
    assert env["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert env["JAX_COMPILATION_CACHE_DIR"].endswith(".cache/gpu/h100")
    assert env["JAX_COMPILATION_CACHE_MAX_SIZE"] == str(queue.CACHE_BYTES)
    # A cache that others use as well is not cut down to what can be carried along.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # of this process
    env = queue._environment(Part("a", "", ""), "h100", small=False)
    assert "JAX_COMPILATION_CACHE_MAX_SIZE" not in env
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in env


def test_parts_are_named_alone_or_all_of_a_kind():
    assert [p.name for p in table.named(["rows/8", "rows/1"])] == ["rows/1", "rows/8"]
    assert len(table.named(["round"])) == 4
    with pytest.raises(ValueError, match="there is no part 'nothing'; the parts are ceilings"):
        table.named(["nothing"])


# --- what a part measures ------------------------------------------------------------------------


def job_of(tmp_path, seconds=60.0):
    return Job("part", "cpu", str(tmp_path), seconds, small=True)


def test_one_measurement_that_fails_is_recorded_and_the_others_go_on(tmp_path):
    def breaks():
        raise RuntimeError("no such kernel")

    def does_not_fit():
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    items = [("a", breaks), ("b", does_not_fit), ("c", lambda: {"c": figure(1.0, "ms")})]
    assert not job_of(tmp_path).run(lambda job: job.each(items))
    figures = record_of(tmp_path, "part")["figures"]
    assert figures["outcome"] == figure("failed", "a: RuntimeError: no such kernel")
    assert "failed: RuntimeError" in figures["a"]["unit"]
    assert "left out: out of memory" in figures["b"]["unit"]
    assert figures["c"]["value"] == 1.0


@pytest.mark.parametrize(
    "measured, word", [(False, "out of memory"), (True, "done in part")], ids=["none", "one"]
)
def test_what_there_is_no_memory_for_is_missing_from_what_the_part_did(tmp_path, measured, word):
    def does_not_fit():
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    items = [(("a", "b"), does_not_fit)]
    items += [("c", lambda: {"c": figure(1.0, "ms")})] if measured else []
    assert job_of(tmp_path).run(lambda job: job.each(items)) == measured
    record = record_of(tmp_path, "part")
    assert records.outcome(record) == word and "no memory for 1" in records.reason(record)
    assert record["figures"]["a"]["value"] is record["figures"]["b"]["value"] is None
    assert not records.wants_time(record)


def test_a_wrong_result_takes_the_place_of_an_older_measurement(tmp_path):
    """However its run ended, and whatever ran before; what is right and newer takes its place."""

    def wrong(job):
        job.add({"differ": figure(3, "samples")})
        job.refute("tokens of 3 samples differ")
        raise RuntimeError("and then no more")

    put(tmp_path, made("part", "2026-01-01T00:00:00+00:00", card="cpu"))
    assert not job_of(tmp_path).run(wrong)
    found = record_of(tmp_path, "part")
    assert records.outcome(found) == "failed" and found["figures"]["differ"]["value"] == 3
    put(tmp_path / "there", made("part", "2026-01-01T00:00:00+00:00", card="cpu"))
    for first, second in (("", "there"), ("there", "")):
        here = tmp_path / f"here{first}"
        for place in (first, second):
            records.pack(tmp_path / place, tmp_path / "packed.json")
            records.merge(here, [tmp_path / "packed.json"])
        assert record_of(here, "part") == found
    assert job_of(tmp_path).run(lambda job: job.add({"differ": figure(0, "samples")}))
    assert outcome(tmp_path, "part") == "done"


def test_what_there_is_no_time_for_is_left_out_and_said_to_be(tmp_path):
    job = job_of(tmp_path, 0.0)
    assert not job.run(lambda job: job.each([("a", lambda: pytest.fail("there is no time"))]))
    figures = record_of(tmp_path, "part")["figures"]
    assert figures["outcome"]["value"] == "no time"
    assert figures["a"]["unit"] == "left out: no time left"


# --- packing and merging -------------------------------------------------------------------------

OLD, NEW = "2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00"


def contents(out):
    return {path.name: record for path, record in records.every(out)}


def test_results_travel_in_one_file_and_merging_them_again_changes_nothing(tmp_path):
    there, here, file = tmp_path / "there", tmp_path / "here", tmp_path / "packed.json"
    put(there, made("rows/1", OLD))
    put(there, made("rows/8", OLD, "timed out"))
    put(there, made("round/1", OLD, "running", attempt=1), running=True)
    assert records.pack(there, file) == 3
    lines = records.merge(here, [file])
    assert [line.rpartition(": ")[2] for line in lines] == ["new, running", "new, done"] + [
        "new, timed out"
    ]
    assert contents(here) == contents(there)
    assert all("identical record exists" in line for line in records.merge(here, [file, file]))
    assert contents(here) == contents(there)


@pytest.mark.parametrize(
    "old, new, kept",
    [
        (made("a", OLD, value=1.0), made("a", NEW, value=2.0), 2.0),
        (made("a", NEW, value=1.0), made("a", OLD, value=2.0), 1.0),
        (made("a", OLD, value=1.0), made("a", NEW, "failed", value=2.0), 1.0),
        (made("a", OLD, "failed", value=1.0), made("a", NEW, "timed out", value=2.0), 2.0),
        (made("a", OLD, value=1.0), made("a", NEW, "done in part", value=2.0), 1.0),
        (made("a", OLD, "failed", value=1.0), made("a", NEW, "failed", value=None), 1.0),
    ],
    ids=[
        "newer",
        "older",
        "newer failed",
        "both failed",
        "newer in part",
        "newer without figures",
    ],
)
def test_merging_keeps_what_is_newer_and_what_was_measured_in_any_order(tmp_path, old, new, kept):
    file, first = tmp_path / "packed.json", tmp_path / "first.json"
    put(tmp_path / "a", old)
    put(tmp_path / "b", new)
    records.pack(tmp_path / "a", first)
    records.pack(tmp_path / "b", file)
    for out, order in (("c", [first, file]), ("d", [file, first])):
        records.merge(tmp_path / out, order)
        [record] = contents(tmp_path / out).values()
        assert record["figures"]["ms"]["value"] == kept


def test_a_run_that_was_cut_off_does_not_come_back_after_the_part_has_ended(tmp_path):
    there, here, file = tmp_path / "there", tmp_path / "here", tmp_path / "packed.json"
    put(there, made("a", OLD, "running"), running=True)
    records.pack(there, file)
    put(here, made("a", NEW))
    before = contents(here)
    assert "kept the record of a later run" in records.merge(here, [file])[0]
    assert contents(here) == before


def test_merging_takes_nothing_but_what_was_packed(tmp_path):
    for text in ("{}", "no JSON", "[]"):
        file = tmp_path / "other.json"
        file.write_text(text)
        with pytest.raises(ValueError, match="pack"):
            records.merge(tmp_path, [file])


# --- status --------------------------------------------------------------------------------------


def shown(out):
    console = Console(width=200, file=io.StringIO())
    show.tables(out, console=console)
    return console.file.getvalue()


def row(text, *begins):
    """The cells of the one row that begins so."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    [found] = [cells for cells in rows if cells[: len(begins)] == list(begins)]
    return found


def test_status_names_every_part_and_target_before_anything_is_measured(tmp_path):
    text = shown(tmp_path)
    for p in PARTS:
        assert row(text, p.name)[3:5] == ["-", "not measured"]
    assert text.count("at most 5.9 ms") == 1 and text.count("at most 4.1 ms") == 1
    assert " met" not in text and "missed" not in text and "figures not" not in text


def test_status_says_what_is_measured_where_and_which_targets_are_met(tmp_path):
    good, bad = made("plain/1", OLD), made("rows/1", OLD, card="h200")
    good["figures"] |= {"ms/36_layers/1024/best": figure(5.5, "ms")}
    good["figures"] |= {f"share/36_layers/{c}/best": figure(v, "") for c, v in ((1, 0.9), (4, 0.8))}
    bad["figures"] |= {"rows_over_1/16": figure(1.06, "times"), "gone": figure(None, "left out")}
    put(tmp_path, good)
    put(tmp_path, bad)
    put(tmp_path, made("rows/8", OLD, "timed out"))
    put(tmp_path, made("round/1", OLD, "running", attempt=1), running=True)
    put(tmp_path, made("longer", OLD))
    text = shown(tmp_path)
    assert row(text, "plain/1", "share of the roofline")[3:] == [
        "h100", "done", OLD, "1 met, 1 missed"
    ]  # fmt: skip
    assert row(text, "rows/1")[3:] == ["h200", "done (1 figures left out)", OLD, "1 missed"]
    assert row(text, "rows/8")[3:5] == ["h100", "timed out"]
    assert row(text, "round/1")[3:5] == ["h100", "cut off (attempt 1)"]
    assert row(text, "longer")[1] == "(no longer a part)"
    assert row(text, "plain 8B step, batch 1", "plain/1", "at most 5.9 ms")[3:] == [
        "h100", "5.5", "met"
    ]  # fmt: skip
    assert row(text, "verify 16 rows / 1, batch 1", "rows/1", "at most 1.05 times", "h200")[4:] == [
        "1.06", "missed"
    ]  # fmt: skip


def test_a_picture_shows_what_is_measured(tmp_path):
    assert not show.draw(tmp_path)
    attention, parts = made("attention/8", OLD), made("round_parts", OLD)
    cells = {"gpu/16/8192/8192": 0.7, "best/16/8192/8192": 0.7, "gpu/1/mixed_8/8192": None}
    attention["figures"] |= {f"share/{name}": figure(v, "") for name, v in cells.items()}
    parts["figures"] |= {"ms/verify": figure(5.0, "ms")}
    put(tmp_path, attention)
    put(tmp_path, parts)
    found = show.by_card(tmp_path)["h100"]
    assert show.shares_of(found) == {("gpu", "8"): {"16/8192/8192": 0.7}}
    assert [path.name for path in show.draw(tmp_path)] == ["h100.png"]
    assert len(list(records.every(tmp_path))) == 2


# --- the command ---------------------------------------------------------------------------------


def test_without_a_gpu_nothing_is_measured(tmp_path):
    with pytest.raises(SystemExit, match="expected a GPU, got platform 'cpu'.*--small"):
        command.main(["--out", str(tmp_path)])


def test_small_numbers_do_not_go_where_results_are():
    assert command.parse(["--small"]).out == command.SMALL_OUT != command.parse([]).out


def test_dry_says_where_the_compiler_comes_from(monkeypatch):
    def none(*_, **__):
        raise RuntimeError("unknown platform cuda")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", none)
    with pytest.raises(SystemExit, match="make gpu-check.*unknown platform cuda"):
        command.main(["--dry", "--parts", "ceilings"])


@pytest.mark.parametrize(
    "kind, name",
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA L4", "nvidia-l4")],
)
def test_cards_have_short_names(kind, name):
    assert short_name(kind) == name


@pytest.mark.slow
def test_the_small_command_measures_every_part(tmp_path):
    argv = [sys.executable, "-m", "bench.gpu", "--small", "--out", str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = show.by_card(tmp_path)["cpu"]
    excused = dict.fromkeys(("values/own", "values/triton"), "not on this device")
    excused |= dict.fromkeys(("own_model/head", "own_model/rl"), "not given")
    # Some times are too short for the clock, and a CPU has no peak.
    may_lack = ("protocol", "transformers", "jax_sampler", "identity/1.7B", "identity/8B")
    may_lack += ("round_parts", "round_parts_32k", "train_step/1.7B")
    for p in PARTS:
        record = found[p.name]
        words = ("done", excused.get(p.name), "not installed" if p.name == "transformers" else None)
        assert records.outcome(record) in words, (p.name, records.reason(record))
        json.dumps(record, allow_nan=False)
        for name, entry in record["figures"].items():
            if entry["value"] is None:
                assert p.name in may_lack, (p.name, name)
    check_small({name: record["figures"] for name, record in found.items()})


def check_small(figures):
    """What is known of these figures whatever the machine."""

    def value(part, name):
        return figures[part][name]["value"]

    shares = [value("round_parts", f"share/{name}") for name in ROUND]
    # A clock may not tell the parts of a tiny model.
    assert None in shares or sum(shares) == pytest.approx(1)
    assert value("round_parts", "kernels_per_round") > 10
    for name in ("round_ms/chunk", "ms/verify_16_rows"):
        assert value("round_parts", name) > 0
    for workload in ("greedy", "sampled", "penalties", "long"):
        at = f"{workload}/concurrency_1"
        assert value("protocol", f"protocol/plain_tokens_per_sec_call/{at}") > 0
        assert value("protocol", f"protocol/accept_length/{at}") >= 1
    assert value("train.rl", "rl/steps") == rl.SMALL["steps"] - 1
    if importlib.util.find_spec("torch"):
        assert value("transformers", "torch_tokens_per_sec/batch_2") > 0
