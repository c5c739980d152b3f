"""`bench.control replay` through its command line and by hand, on traces that are made up."""

import json
import re

import numpy as np
import pytest

from bench.control import predict, replay
from bench.rollout import chains
from bench.rollout.chains import SUFFIX, Trace

DEEP = "2_1_3"


def trace_of(lengths, histograms, chunk_tokens=1, strategy=DEEP):
    settings = {
        "model": "made/up",
        "task": "sums",
        "slots": 2,
        "chunk_tokens": chunk_tokens,
        "samples": 1,
        "strategies": ["off", strategy],
        "lengths": lengths,
    }
    off = np.array([[0, n, 0, 0] for n in lengths])
    spans = {"plain": [chains.Span(1.5, 2, "off", 3, 6, 0)]}
    return Trace(settings, {"off": off, strategy: np.array(histograms)}, spans)


ALL_ACCEPTED = [[0, 0, 0, 2], [0, 0, 0, 1]]


def seconds(trace, table, arm, slots=2):
    run = replay.Replay(trace, predict.PartCosts.load(table), slots)
    return run.run(run.controller(arm)).seconds


def test_the_batch_shrinks_as_soon_as_a_smaller_one_will_do(table):
    trace = trace_of([6, 2], ALL_ACCEPTED)
    assert seconds(trace, table, "plain") == pytest.approx(2 * 1.5 + 4 * 1.0)
    assert seconds(trace, table, DEEP) == pytest.approx(2.4 + 1.4)


def test_samples_beyond_the_slots_wait_and_take_the_same_time_as_in_predict(table):
    trace = trace_of([2, 3], ALL_ACCEPTED)
    costs = predict.PartCosts.load(table)
    expected = predict.replay([2, 3], 1, costs.plain_step)
    assert seconds(trace, table, "plain", slots=1) == pytest.approx(expected) == pytest.approx(5.0)


def test_rates_are_those_of_the_rounds_that_came_so_deep_and_lean_on_all_samples():
    found = replay.rates(np.array([[0, 40, 40, 20], [0, 0, 0, 0]]), 2)
    assert found[1] == pytest.approx([0.6, 1 / 3])  # nothing of its own
    assert found[0] == pytest.approx([0.6, 1 / 3])
    leaning = replay.rates(np.array([[0, 0, 0, 8], [0, 8, 0, 0]]), 2)
    assert leaning[:, 0] == pytest.approx([0.75, 0.25])


def long_trace(accepted):
    """32 long-tailed samples in which a round of 4_1_5 accepts so many of four drafts."""
    histogram = [0] * 6
    histogram[accepted + 1] = 10
    return trace_of(
        chains.long_tailed(32, 64, 20, 0), [histogram] * 32, chunk_tokens=32, strategy="4_1_5"
    )


@pytest.mark.parametrize(("accepted", "low", "high"), [(4, 0.2, 0.45), (0, 0.95, 1.05)])
def test_the_real_controller_gains_by_good_drafts_and_loses_nothing_by_useless_ones(
    accepted, low, high, tmp_path
):
    path = tmp_path / f"x{SUFFIX}"
    long_trace(accepted).write(path)
    out = tmp_path / "out.json"
    chip = next(p for p in predict.default_tables() if p.stem == "h200_8b")
    replay.main([str(path), "--costs", str(chip), "--repeats", "2", "--out", str(out)])
    figures = json.loads(out.read_text())["figures"]
    ratio = figures["predicted_wall_ratio_calibration_apart/h200_8b/goodput/plain"]
    assert low < ratio["value"] < high
    assert "roofline" in ratio["unit"] and "predicted" in ratio["unit"]
    charged = figures["predicted_wall_ratio/h200_8b/goodput/plain"]["value"]
    assert charged > ratio["value"]
    best = figures["predicted_wall_ratio_calibration_apart/h200_8b/goodput/best_static"]["value"]
    assert best < 1.05
    assert figures["predicted_accept_length/h200_8b/4_1_5"]["value"] == pytest.approx(
        accepted + 1, rel=0.02
    )


def test_costs_that_were_measured_are_called_so(table, tmp_path):
    measured = tmp_path / "mine.json"
    content = json.loads(table.read_text()) | {"name": "mine", "source": "measured: by hand"}
    measured.write_text(json.dumps(content))
    found = replay.predict(
        trace_of([6, 2], ALL_ACCEPTED), predict.PartCosts.load(measured), None, 1.0, 1, 0
    )
    assert found.label == "measured"
    assert all("roofline" not in f["unit"] for f in replay.figures_of(found).values())


def test_a_stretched_rollout_takes_that_much_longer(table):
    trace = trace_of([6, 2], ALL_ACCEPTED)
    run = replay.Replay(trace, predict.PartCosts.load(table), 1, stretch=3.0)
    assert run.run(run.controller("plain")).seconds == pytest.approx(24.0)


@pytest.fixture
def growing(table, tmp_path):
    """The table, with a plain step that costs 1.0 more at 20 tokens per sample than at 10."""
    content = json.loads(table.read_text()) | {"context": 10}
    content["longer"] = {"context": 20, "plain": [2.0, None], "draft": [0.1, 0.2]}
    content["longer"]["verify"] = {"3": [1.2, None]}
    path = tmp_path / "growing.json"
    path.write_text(json.dumps(content))
    return path


def test_a_step_costs_more_as_the_samples_grow(growing):
    """Of two samples together: 0.1 for each token in their caches beyond 20, or below."""
    costs = predict.PartCosts.load(growing)
    assert costs.plain_step(1) == 1.0 and costs.plain_step(1, 25) == pytest.approx(2.5)
    assert costs.plain_step(2, 25) == pytest.approx(2.0), "as for one sample, where not measured"
    assert costs.spec_round(1, 2, 25) == costs.spec_round(1, 2) == pytest.approx(1.4)
    trace = trace_of([6, 2], ALL_ACCEPTED)
    run = replay.Replay(trace, costs, 2, prompt=10)
    steps = [1.5 + 0.1 * k for k in (0, 2)] + [1.0 + 0.1 * k for k in (2, 3, 4, 5)]
    assert run.run(run.controller("plain")).seconds == pytest.approx(sum(steps))
    assert run.run(run.controller(DEEP)).seconds == pytest.approx(2.4 + 1.4)


def test_the_real_controller_follows_the_context_of_a_replay(growing):
    """Plain steps are cheaper than drafting for short samples, and dearer for long ones."""
    trace = trace_of([6] * 30, [[0, 0, 3, 0]] * 30, chunk_tokens=3)
    costs = predict.PartCosts.load(growing)
    share = {}
    for prompt in (0, 40):
        run = replay.Replay(trace, costs, 1, prompt=prompt)
        done = run.run(run.controller("goodput"))
        share[prompt] = done.choices.get(DEEP, 0.0) / done.seconds
    assert share[40] > 0.9 > share[0]


def test_calibrating_a_long_context_takes_at_most_half_as_long_again(tmp_path):
    chip = next(p for p in predict.default_tables() if p.stem == "h200_8b")
    content = json.loads(chip.read_text())
    del content["longer"]
    flat = tmp_path / "flat.json"
    flat.write_text(json.dumps(content))
    lengths, took = [600] * 64, {}
    for path, prompt in ((chip, 0), (chip, 12000), (flat, 12000)):
        trace = trace_of(lengths, [[0, 0, 0, 200]] * 64, chunk_tokens=32)
        run = replay.Replay(trace, predict.PartCosts.load(path), 64, prompt=prompt)
        took[path.stem, prompt] = run.calibration_seconds
    short = took["h200_8b", 0]  # samples of 600 tokens have no long context
    assert short < took["h200_8b", 12000] < 1.8 * short
    assert took["flat", 12000] == pytest.approx(short, rel=0.2)


@pytest.mark.parametrize(
    ("longer", "said"),
    [
        ({"context": 10}, "a context above 10"),
        ({"verify": {"5": [1.2, 2.0]}}, r"verify costs of \[3\] rows"),
        ({"plain": [1.0]}, r"lists of \[1, 2\]"),
        ({"draft": [None, None]}, "needs a cost that is not null"),
        ({"plain": "fast"}, "not a cost table"),
    ],
)
def test_a_longer_context_that_does_not_fit_the_table_is_refused(growing, longer, said):
    content = json.loads(growing.read_text())
    content["longer"] |= longer
    growing.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=said):
        predict.PartCosts.load(growing)


def test_trees_too_many_slots_and_files_that_are_no_trace_are_refused(table, tmp_path):
    costs = predict.PartCosts.load(table)
    with pytest.raises(ValueError, match="chains only"):
        replay.Replay(trace_of([6, 2], ALL_ACCEPTED, strategy="4x2"), costs, 2)
    with pytest.raises(ValueError, match="expected 1 to 2 slots"):
        replay.Replay(trace_of([6, 2], ALL_ACCEPTED), costs, 3)
    spoilt = tmp_path / f"spoilt{SUFFIX}"
    spoilt.write_text(json.dumps({"settings": {"lengths": [1]}}) + "\n")
    with pytest.raises(ValueError, match=re.escape(str(spoilt))):
        Trace.read(spoilt)
    with pytest.raises(SystemExit, match=r"bench\.rollout longtail"):
        replay.main([str(tmp_path / "nothing.json")])


def test_a_trace_is_read_as_it_was_written_and_found_beside_its_result(tmp_path):
    trace = trace_of([6, 2], ALL_ACCEPTED)
    trace.write(tmp_path / f"run{SUFFIX}")
    again = Trace.read(tmp_path / "run.json")
    assert again.settings == trace.settings and again.spans == trace.spans
    for name, values in trace.histograms.items():
        np.testing.assert_array_equal(again.histograms[name], values)
