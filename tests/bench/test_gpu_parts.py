"""The parts of the GPU queue: programs, arithmetic, scripted acceptance, and what each refuses."""

import contextlib
import fnmatch
import functools
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest
from test_bench_round import PROGRAM

from bench.gpu import dry, program, records, table
from bench.gpu.chunks import OFF, Chunk, Size, whole_model
from bench.gpu.job import Absent, Job
from bench.gpu.parts import (
    attention,
    ceilings,
    identity,
    launches,
    one_graph,
    peers,
    plain,
    rl,
    round_parts,
    rounds,
    transformers,
    values,
)
from bench.gpu.parts.rounds import Scripted, scripted_lengths
from bench.gpu.program import CARDS, Place, Program
from bench.gpu.table import PARTS, Part, named
from bench.record import figure
from bench.round import counts

ROOT = Path(__file__).resolve().parents[2]


def job_of(tmp_path, part="part", **settings):
    return Job(part, "cpu", str(tmp_path), 3600, small=True, **settings)


def record_of(tmp_path, part="part"):
    return records.read(records.path_of(tmp_path, part, "cpu"))


# --- scripted acceptance -----------------------------------------------------------------------


def chunk_of(strategy, rule=None, **sizes):
    sizes = {"context": 24, "rounds": 4} | sizes
    size = Size("tiny", 3, strategy=strategy, **sizes)
    chunk = Chunk(Place(), size, rule)
    chunk.compiled = program.build(chunk.programs("chunk"))
    chunk.load(0)
    return chunk


def run(chunk):
    chunk.prepare()
    keys = np.asarray(chunk.runner.state.keys)[: chunk.size.batch]
    return chunk.run("chunk"), keys


def test_what_is_accepted_is_what_the_script_says():
    chunk = chunk_of("4_1_5", Scripted(0.6))
    found, keys = run(chunk)
    wanted = scripted_lengths(0.6, keys, 24, 4, 4)
    assert chunk.emitted(found).tolist() == wanted.tolist()
    assert len(set(wanted)) > 1  # slots have scripts of their own


def test_a_script_accepts_with_its_probability():
    for probability in (0.6, 0.8):
        keys = np.arange(50, dtype=np.uint32)[:, None] * 7919
        length = scripted_lengths(probability, keys, 1000, 4, 200).mean() / 200
        expected = sum(probability**i for i in range(5))
        assert length == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
def test_a_script_emits_what_was_drafted_and_then_what_the_target_chose():
    """The same round by its own rule says what that is: it accepts all, by the noise that both
    share, for a random head's scores say little."""
    own, everything, nothing = (
        run(chunk_of("1_1_2", rule, rounds=1))[0] for rule in (None, Scripted(1.0), Scripted(0.0))
    )
    assert (own.length[:3] == 26).all() and (everything.length[:3] == 26).all()
    assert (nothing.length[:3] == 25).all()
    assert (everything.tokens[:3, :2] == own.tokens[:3, :2]).all()
    assert (nothing.tokens[:3, 0] == own.tokens[:3, 1]).all()


def test_a_script_takes_chains_alone():
    with pytest.raises(ValueError, match="expected a chain such as 4_1_5"):
        Chunk(Place(), Size("tiny", 1, 24, strategy="2x2", rounds=2), Scripted(0.5))._lower()


# --- chunks ------------------------------------------------------------------------------------


def test_every_run_of_a_chunk_begins_with_the_same_state_also_after_one_that_failed():
    chunk = chunk_of("2_1_3")
    first, _ = run(chunk)
    assert all(np.asarray(x.k).any() for x in chunk.runner.state.memory.pages)
    again, _ = run(chunk)
    assert (first.tokens == again.tokens).all() and (first.length == again.length).all()
    for leaf in jax.tree.leaves(chunk.runner.state):
        leaf.delete()  # as a program that was given it does, even if it runs out of memory
    again, _ = run(chunk)
    assert (first.tokens == again.tokens).all() and (first.length == again.length).all()
    shorter, _ = run(chunk.at(16))
    assert (shorter.length[:3] < first.length[:3]).all()
    with pytest.raises(ValueError, match="expected at most 24 tokens, got 25"):
        chunk.at(25)
    chunk.runner.state = None  # there was no memory for another one
    again, _ = run(chunk)
    assert (shorter.tokens == again.tokens).all() and (shorter.length == again.length).all()


def test_a_model_takes_what_its_layers_take_and_the_rest_once():
    rest, layer = 2.0, 0.5
    many, few = [rest + 12 * layer, 1 + rest + 12 * layer], [rest + 4 * layer] * 2
    assert whole_model(many, few, (12, 4), 36) == pytest.approx([rest + 36 * layer, 24.0])


def test_arms_of_one_program_are_traced_once_and_one_that_does_not_compile_leaves_the_others():
    chunk = Chunk(Place(), Size("tiny", 1, 24, rounds=2))
    traced = []
    lower = chunk._lower
    chunk._lower = lambda: traced.append(1) or lower()
    arms = {"good": {}, "bad": {"xla_no_such_option": 1}}
    built = program.build(chunk.programs("", arms))
    assert len(traced) == 1 and built["good"].as_text()
    with pytest.raises(Exception, match="xla_no_such_option"):
        built["bad"]


def test_rows_are_programs_or_say_why_not_and_no_two_of_a_part_have_one_name():
    for part in PARTS:
        module = part.load()
        if reason := getattr(module, "NOT_AHEAD", None):
            assert isinstance(reason, str)
            continue
        try:
            found = module.programs(Place(), True, **part.settings)
        except Absent:
            assert part.name in ("values/own", "values/triton")  # nothing of them is for CPUs
            continue
        assert found and len({p.name for p in found}) == len(found)


# --- figures -----------------------------------------------------------------------------------


def test_the_cards_own_rates_are_taken_from_its_record_or_measured_in_the_process(tmp_path):
    assert job_of(tmp_path, "ceilings").run(ceilings.measure)
    figures = record_of(tmp_path, "ceilings")["figures"]
    job = job_of(tmp_path, "plain/1")
    assert ceilings.copy_rate(job) == 1e9 * figures["copy"]["value"]
    assert figures["matmul"]["value"] > 0
    assert job.record()["settings"]["copy"].startswith("of the part")
    other = Job("plain/1", "other", str(tmp_path), 60, small=True)
    assert ceilings.copy_rate(other) > 0
    assert "measured in this process" in other.record()["settings"]["copy"]


def test_what_attention_reads_does_not_depend_on_the_length_of_its_table():
    short, long = (attention.Cell(5, (2048,) * 8, table) for table in (2048, 16_384))
    assert short.bytes(attention.Sizes()) == long.bytes(attention.Sizes())
    keys = 2 * 8 * 8 * (2048 + 5) * 128 * 2
    assert short.bytes(attention.Sizes()) == keys + 2 * 8 * 32 * 5 * 128 * 2


L2 = 50e6  # bytes of the cache of an H100 or H200
FASTEST = 5e12  # bytes per second, more than either reads


@pytest.mark.parametrize("batch", (1, 8, 64, "mixed"))
def test_attention_reads_more_than_a_cache_holds_and_for_longer_than_starting_it_takes(batch):
    """What counts is what calls read of their tables, which may be much longer."""
    sizes = attention.Sizes()
    for cell in attention.cells(sizes, batch):
        assert cell.sets(sizes) * cell.bytes(sizes) > 8 * L2, cell.name
        assert cell.calls(sizes) * cell.bytes(sizes) / FASTEST > 5e-3, cell.name


def test_attention_compares_every_kernel_with_the_last_and_compiles_equal_lengths_at_once(
    tmp_path, monkeypatch
):
    small, counts = attention.SMALL._replace(lengths=((32, 64), (16, 32))), []
    monkeypatch.setattr(attention, "SMALL", small)

    def build(programs):
        counts.append(len(programs))
        return attention_build(programs)

    attention_build = attention.build
    monkeypatch.setattr(attention, "build", build)
    monkeypatch.setattr(attention, "copy_rate", lambda job: 1e9)
    assert job_of(tmp_path).run(lambda job: attention.measure(job, 1))
    assert counts == [4, 4], "two numbers of rows and two kernels at a time"
    found = record_of(tmp_path)["figures"]
    cells = "8/32/64", "1/32/64", "8/16/32", "1/16/32"
    assert {f"over/reference/{cell}" for cell in cells} == {k for k in found if "over" in k}
    assert all(found[f"share/best/{cell}"]["value"] > 0 for cell in cells)
    assert attention.Sizes().kernels[-1] == "library:cudnn", "Pallas kernels first"


class Runs:
    """Chunks that run by nothing: tokens by arm, or an error."""

    size = Size("tiny", 2, 24, rounds=3)

    def __init__(self, **by_arm):
        self.by_arm, self.loaded = by_arm, 0

    def load(self, seed):
        self.loaded += 1

    def prepare(self):
        assert self.loaded

    def job(self, name):
        return self.prepare, lambda: self.run(name)

    def run(self, name):
        found = self.by_arm[name.rpartition("/")[2]]
        if isinstance(found, Exception):
            raise found
        return SimpleNamespace(tokens=np.array(found), length=np.full(2, 27))


def test_a_token_that_one_graph_changes_fails_its_part(tmp_path):
    same, other = [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 7]]
    for tokens, differ, word in ((same, 0, table.MET), (other, 1, table.MISSED)):
        job = job_of(tmp_path, "one_graph")
        chunk = Runs(default=same, **{"while": tokens})
        inputs = job, one_graph.SMALL, "off/kernel", chunk, {}
        items = [("differ/off/kernel", functools.partial(one_graph._differ, *inputs))]
        assert job.run(functools.partial(Job.each, items=items)) == (not differ)
        record = record_of(tmp_path, "one_graph")
        assert record["figures"]["differ/off/kernel"]["value"] == differ
        assert len(job.failures) == differ and chunk.loaded == 2  # each from the same state
        assert word_of("one graph per chunk", {"one_graph": record}) == word


def test_a_graph_that_does_not_run_leaves_the_other_arms_their_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(launches.counts, "round_kernels", lambda text: Counter(fusion=7))
    good, bad = [[1], [2]], RuntimeError("no such graph")
    chunk = Runs(default=good, min_graph_size=good, **{"while": bad})
    chunk.load(0)
    job, built = job_of(tmp_path), {"2/default": SimpleNamespace(as_text=lambda: "")}
    found = launches._figures(job, launches.SMALL, chunk, built, 2)
    assert job.figures["ms/batch_2/while"]["unit"] == "failed: RuntimeError: no such graph"
    assert found["ms/batch_2/default"]["value"] > 0 and found["kernels/batch_2"]["value"] == 7
    assert found["over_default/batch_2/min_graph_size"]["value"] > 0
    assert found["ms/batch_2/best"]["value"] > 0 and job.failures and not job.no_room
    chunk.by_arm["while"] = RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    job = job_of(tmp_path)
    launches._figures(job, launches.SMALL, chunk, built, 2)
    assert job.no_room == 1 and not job.failures  # as any measurement without memory
    chunk.by_arm |= dict.fromkeys(launches.SAFE, bad)
    with pytest.raises(RuntimeError, match="no such graph"):
        launches._figures(job, launches.SMALL, chunk, built, 2)


def test_the_best_of_the_arms_is_one_that_is_safe(tmp_path, monkeypatch):
    monkeypatch.setattr(launches.counts, "round_kernels", lambda text: Counter(fusion=7))
    times = {"default": [3.0] * 3, "min_graph_size": [2.0] * 3, "while": [1.0] * 3}
    monkeypatch.setattr(launches, "milliseconds_per_round", lambda *_: times)
    chunk = Runs(**dict.fromkeys(times, [[1], [2]]))
    chunk.load(0)
    built = {"2/default": SimpleNamespace(as_text=lambda: "")}
    found = launches._figures(job_of(tmp_path), launches.SMALL, chunk, built, 2)
    assert (
        found["ms/batch_2/best"]["value"] == 2.0 and "min_graph" in found["ms/batch_2/best"]["unit"]
    )
    assert found["ms/batch_2/while"]["value"] == 1.0


def test_a_steps_bytes_are_those_of_the_whole_model():
    """Weights and caches of 36 layers, embedding and language-model head counted once."""
    chunks = {n: Chunk(Place(), Size("8B", 2, 1024, n, rounds=2)) for n in (2, 1)}
    for chunk in chunks.values():
        chunk.runner.params = jax.tree.map(
            lambda x: SimpleNamespace(nbytes=x.size * x.dtype.itemsize), chunk.shapes[0]
        )
    found = plain.whole_bytes(chunks, (2, 1), 36, 1024)
    norms = 2 * 4096 + (32 + 8) * 128
    layer = 2 * (4096 * (32 + 8 + 8) * 128 + 32 * 128 * 4096 + 3 * 4096 * 12_288 + norms)
    head = 2 * (151_936 * 4096 + 4096 + 2 * 4096)  # and two rows of the embedding
    assert found == 36 * (layer + 2 * 1025 * 4096) + head


@pytest.mark.slow
def test_a_round_is_measured_against_a_plain_one(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "SMALL", rounds.SMALL._replace(acceptance=(0.6,)))
    assert job_of(tmp_path).run(lambda job: rounds.measure(job, 2))
    figures = record_of(tmp_path)["figures"]
    for arm in (OFF, 0.6):
        found = figures[f"ms/2_layers/{arm}"]
        assert found["value"] > 0 and found["interval"][0] <= found["value"]
    assert math.isfinite(figures["speedup/0.6"]["value"])
    length = figures["accept_length/0.6"]["value"]
    assert length == pytest.approx(1 + 0.6 + 0.36)  # whatever the slots' own scripts gave
    assert 1 <= figures["script_length/0.6"]["value"] <= 3 != length
    speedup = figures["ms/2_layers/off"]["value"] * length / figures["ms/2_layers/0.6"]["value"]
    assert figures["speedup/0.6"]["value"] == pytest.approx(speedup, rel=0.5)
    assert "round_over_plain" in figures


def test_a_kernel_with_wrong_values_fails_its_part(tmp_path, monkeypatch):
    case = {"tree_of_8": values.SMALL_CASES["tree_of_8"]}
    real = values.dispatch.tree_attention

    def wrong(q, k, v, *rest, kernel, **options):
        return real(q, k, v * (wrongly if kernel == "library:xla" else 1), *rest, **options)

    monkeypatch.setattr(values, "SMALL_CASES", case)
    monkeypatch.setattr(values.dispatch, "tree_attention", wrong)
    kernels = ("reference", "library:xla")
    for factor in (1.5, math.nan):
        wrongly = factor
        assert not job_of(tmp_path, "values").run(lambda job: values.measure(job, kernels))
        record = record_of(tmp_path, "values")
        figures = record["figures"]
        assert "library:xla/tree_of_8" in figures["outcome"]["unit"]
        assert figures["values/reference/tree_of_8"]["value"] <= 1
        assert figures["values/library:xla/tree_of_8"]["value"] > 1
        assert word_of("kernels equal", {"values": record}) == table.MISSED


@pytest.mark.parametrize("arm, refuted", [("invariant", 1), ("default", 0)])
def test_invariant_mode_is_refuted_by_a_bit_of_a_log_probability(tmp_path, arm, refuted):
    plain, drafted = (
        [SimpleNamespace(token_ids=[1, 2], logprobs=[-0.5, last])] for last in (-0.25, -0.26)
    )
    engine = SimpleNamespace(
        sizes=identity.SMALL, run=lambda strategy, _: plain if strategy == "off" else drafted
    )
    job = job_of(tmp_path)
    found = identity._differing(job, engine, f"{arm}/batch_1")
    assert found[f"differ/{arm}/batch_1"]["value"] == 0
    assert found[f"logprobs_differ/{arm}/batch_1"]["value"] == 1
    assert len(job.failures) == refuted


def test_a_program_that_all_strategies_share_is_timed_and_then_out_of_use():
    seen, own = [], {"features"}
    engine = SimpleNamespace(
        runner=SimpleNamespace(exact_plain=own), run=lambda *_: seen.append(set(own))
    )
    identity.Engine.shared(engine, 8)
    assert seen == [set()] and own == {"features"}


def test_rates_of_peers_are_compared_turn_by_turn_unless_the_clock_is_too_coarse():
    found = peers.figures("jax", [0.02, 0.04], [0.01, 0.01], peers.FULL, 8)
    assert found["jax_tokens_per_sec/batch_8"]["value"] == pytest.approx(37.5)
    assert found["specjax_over_jax/batch_8"]["interval"] == pytest.approx([2, 4])
    found = peers.figures("jax", [0.0, 0.04], [0.01, 0.01], peers.FULL, 8)
    assert found["specjax_over_jax/batch_8"]["value"] is None
    assert found["specjax_tokens_per_sec/batch_8"]["value"] == 100


def test_torch_that_is_not_there_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.importlib.util, "find_spec", lambda name: None)
    assert job_of(tmp_path).run(transformers.measure)
    assert records.outcome(record_of(tmp_path)) == "not installed"


def test_times_of_parts_are_added_up_with_transforms_in_acceptance():
    times = dict.fromkeys(("noise", "transform", "accept", "commit"), (1.0, 1.0, 2.0))
    times |= {"draft": (2.0, 2.0, 3.0), "verify": (14.0, 14.0, 15.0), "round": (20.0, 22.0, 26.0)}
    found = round_parts.part_figures(times)
    assert found["ms/accept"] == figure(2.0, "ms, median", [2.0, 4.0])  # not the least
    assert found["noise_and_accept_share"]["value"] == pytest.approx(3 / 20)
    assert found["draft_over_verify"]["value"] == pytest.approx(1 / 7)
    assert found["draft_over_verify"]["interval"] == pytest.approx([1 / 7, 1 / 5])
    assert found["sum_of_parts"]["value"] == pytest.approx(1)
    assert found["us_beside_parts"]["value"] == pytest.approx(0)
    assert found["us_beside_parts"]["interval"] == pytest.approx([0, 2000])
    shares = [found[f"share/{name}"]["value"] for name in round_parts.ROUND]
    assert sum(shares) == pytest.approx(1)
    some = {name: times[name] for name in ("noise", "draft", "verify", "transform")}
    assert set(round_parts.part_figures(some)) == {
        "ms/noise", "ms/draft", "ms/verify", "draft_over_verify"
    }  # fmt: skip


def test_parts_of_a_round_that_there_was_time_for_are_measured(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(Job, "time_for", lambda *_: asked.append(1) or len(asked) < 4)
    assert job_of(tmp_path).run(round_parts.measure)
    record = record_of(tmp_path)
    figures = record["figures"]
    assert records.outcome(record) == "done in part" and records.wants_time(record)
    assert {"ms/noise", "ms/draft", "ms/verify"} <= figures.keys() and "ms/accept" not in figures
    for name in ("ms/round", "us_beside_parts", "round_ms/chunk"):
        assert figures[name] == figure(None, "left out: no time left")


def test_kernels_are_counted_where_the_rounds_lie_in_a_graph_that_the_entry_calls():
    before, entry = PROGRAM.split("ENTRY %main")
    graph = "%command_buffer" + entry
    calls = """ENTRY %outer (a: (s32[], f32[4])) -> (s32[], f32[4]) {
  %a.9 = (s32[], f32[4]{0}) parameter(0)
  ROOT %graph = (s32[], f32[4]{0}) call(%a.9), to_apply=%command_buffer
}
"""
    assert counts.round_kernels(before + graph + calls) == counts.round_kernels(PROGRAM)


# --- train.rl ----------------------------------------------------------------------------------

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
    monkeypatch.setattr(rl, "SECONDS", 0.2)
    job, out = job_of(tmp_path, "train.rl"), tmp_path / "run"
    script = [sys.executable, "-c", STEPS + "time.sleep(3600)", str(out), "5"]
    steps = rl.watched(script, {}, out, job)  # comes back: it did not wait for an hour
    found = rl.rl_figures(steps)  # step 0 is the evaluation before the first one
    assert found["rl/steps"]["value"] == 3 and found["rl/step_seconds"]["value"] == 0.5
    assert found["rl/time/train"]["interval"] == [0.1, 0.1]
    steps[1]["nonfinite"] = ["train/loss"]
    with pytest.raises(FloatingPointError, match="step 2: train/loss not finite"):
        rl.rl_figures(steps)


@pytest.mark.parametrize(
    "steps, end, says", [("5", "sys.exit(3)", "status 3"), ("2", "", "logged 1 steps")]
)
def test_a_run_that_fails_or_learns_nothing_is_an_error(tmp_path, steps, end, says):
    job, out = job_of(tmp_path, "train.rl"), tmp_path / "run"
    with pytest.raises(RuntimeError, match=says):
        rl.watched([sys.executable, "-c", STEPS + end, str(out), steps], {}, out, job)


# --- targets -----------------------------------------------------------------------------------

SHARE = table.Target("share", "attention/*", "share/best/*/8192/8192", {"h100": 0.8}, False, "")
SHARES = [Part("attention/a", "", ""), Part("attention/b", "", ""), Part("rows/8", "", "")]
MOST = table.Target("rows", "rows/8", "rows_over_1/16", {"h100": 1.12, "h200": 1.15}, True, "")


def shares(**found):
    return {
        f"attention/{part}": {
            "figures": {f"share/best/{t}/8192/8192": figure(v, "") for t, v in by_rows.items()}
            | {"share/best/1/2048/2048": figure(0.1, "")}
        }
        for part, by_rows in found.items()
    }


@pytest.mark.parametrize(
    "found, word",
    [
        (shares(a={1: 0.9}, b={16: 0.8}), table.MET),
        (shares(a={1: 0.9}, b={16: 0.79}), table.MISSED),
        (shares(a={1: 0.7}, b={16: None}), table.MISSED),
        (shares(a={1: 0.9}, b={16: None}), table.UNKNOWN),
        (shares(a={1: 0.9}), table.UNKNOWN),
        (shares(a={1: 0.9}, b={}), table.UNKNOWN),
        ({}, table.UNKNOWN),
    ],
)
def test_the_worst_figure_counts_and_what_is_met_needs_every_one_of_every_part(found, word):
    assert table.verdict(SHARE, "h100", found, SHARES).word == word


def word_of(target, found, card="h100"):
    """The verdict of the one target whose name begins so."""
    [word] = [v.word for v in table.verdicts(card, found) if v.target.name.startswith(target)]
    return word


class Hopper(Place):
    """A card that programs are built for and not compiled."""

    platform, kind, card = "gpu", CARDS["h100"].kind, CARDS["h100"]

    def seen(self):
        device = SimpleNamespace(platform=self.platform, device_kind=self.kind)
        return mock.patch("jax.devices", lambda *_: [device])


JUDGED = [p for p in PARTS if any(fnmatch.fnmatchcase(p.name, t.part) for t in table.TARGETS)]


@pytest.mark.parametrize("part", JUDGED, ids=lambda part: part.name)
def test_the_figures_that_targets_name_are_those_that_parts_say_are_missing(
    part, tmp_path, monkeypatch
):
    """At full size: each is there before anything is measured, so that none is overlooked."""
    module, here = part.load(), Hopper()
    # Figures of these have the same names at any size, and they make weights.
    small = part.name.startswith(("round_parts", "identity"))
    if not small:
        names = {"Place": Hopper, "build": lambda ps: {p.name: None for p in ps}}
        for name, instead in names.items() | {"copy_rate": lambda job: 1.0}.items():
            monkeypatch.setattr(module, name, instead, raising=False)
        monkeypatch.setattr(Chunk, "load", lambda *_: None)
    job = Job(part.name, "h100", str(tmp_path), 0.0, small=small)
    with contextlib.nullcontext() if small else here.seen():
        module.measure(job, **part.settings)
    assert job.left_over and not job.failures
    for target in table.TARGETS:
        if fnmatch.fnmatchcase(part.name, target.part):
            found = fnmatch.filter(job.figures, target.figures)
            assert found and all(job.figures[name]["value"] is None for name in found), target.name


def test_targets_are_those_of_the_card():
    found = {"rows/8": {"figures": {"rows_over_1/16": figure(1.14, "")}}}
    words = [table.verdict(MOST, card, found).word for card in ("h100", "h200", "cpu")]
    assert words == [table.MISSED, table.MET, table.UNKNOWN]


# --- ahead of time -----------------------------------------------------------------------------


class Fake:
    """A module of a part."""

    @staticmethod
    def programs(place, small):
        def breaks():
            raise RuntimeError("no such instruction")

        chunk = Chunk(Place(), Size("tiny", 1, 24, rounds=2))
        options = {"": {}, "_bad": {"xla_no_such_option": 1}}
        return [Program("broken", breaks), *chunk.programs("chunk", options)]


@pytest.mark.slow
def test_what_is_not_traced_does_not_compile_or_does_not_fit_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECJAX_DRY_KNOWN", str(tmp_path))
    monkeypatch.setattr(Part, "load", lambda self: Fake)
    place = Known()
    for fits in (True, True, False):  # compiled, and known from before
        place.card = CARDS["h100"]._replace(memory=10**11 if fits else 1000)
        late, failed = dry._part(Part("fake", "", ""), place, True, math.inf)
        problems = dict(line.split(": ", 1) for line in failed)
        assert problems.pop("broken") == "is not traced: RuntimeError: no such instruction"
        bad = problems.pop("chunk_bad")
        assert "does not compile" in bad and "xla_no_such_option" in bad
        assert not late and len(problems) == (not fits)
    assert problems["chunk"].startswith("needs 0.0 GB, and the card has")
    assert len(list(tmp_path.iterdir())) == 2, "one for each card"


def test_what_there_was_no_time_to_compile_is_named():
    late, failed = dry._part(named(["ceilings"])[0], Known(), True, 0.0)
    assert late == ["copy", "matmul"] and not failed


class Known(Place):
    card = CARDS["h100"]


@pytest.mark.slow
@pytest.mark.skipif(
    "SPECJAX_GPU_PYTHON" not in os.environ,
    reason="SPECJAX_GPU_PYTHON names no Python with jax's CUDA plugin (`make gpu-check` has one)",
)
def test_parts_compile_for_cards_that_are_not_there():
    env = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "XLA_FLAGS": ""}
    argv = ["-m", "bench.gpu", "--dry", "--cards", "h100", "--parts", "ceilings", "one_graph"]
    done = subprocess.run(
        [os.environ["SPECJAX_GPU_PYTHON"], *argv],
        cwd=ROOT,
        env={**os.environ, **env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "4_1_5/gpu/while" in done.stdout and "matmul" in done.stdout
