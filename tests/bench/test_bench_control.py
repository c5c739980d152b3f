"""`bench.control`: its arithmetic on made-up records, and both commands on a tiny policy."""

import itertools
import json

import numpy as np
import pytest

from bench.control import choices, pictures, stream, swap, sweep
from bench.control.choices import Span, Speed
from bench.control.stream import Choice, Measured, Recorder, Stream
from specjax.control import Controller, Observation, Static

# With 4 samples, plain decoding: 200 tok/s; the chain of 4 steps is 1.5 times as fast.
SPEEDS = {"off": Speed(4, 0.02), "1_1_2": Speed(6, 0.025), "4_1_5": Speed(12, 0.04)}


class Told(Controller):
    """Counts what reaches it."""

    kind = "told"

    def __init__(self):
        super().__init__(["off", "1_1_2"])
        self.asked, self.seen, self.announced = 0, [], 0

    def choose(self, batch_size):
        self.asked += 1
        self.rounds_hint = 3
        return "1_1_2"

    def learn(self, seen):
        self.seen.append(seen.strategy)

    def weights_changed(self):
        self.announced += 1


def figures(path):
    return json.loads(path.read_text())["figures"]


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


# --- the sweep's arithmetic ------------------------------------------------------------------


def test_the_oracle_is_the_best_median_and_a_bad_controller_shows_what_it_loses():
    rates = {
        "strategy/off": [100.0, 101.0, 99.0],
        "strategy/1_1_2": [50.0, 500.0, 51.0],  # one lucky measurement is no median
        "strategy/4_1_5": [200.0, 201.0, 199.0],
        "controller/goodput": [198.0, 199.995, 199.0],
        "controller/ema": [50.0, 51.0, 49.0],  # always the worst
    }
    assert sweep.oracle_of(rates) == "strategy/4_1_5"
    found = sweep.rate_figures(8, rates)
    assert found["oracle/batch_8"]["value"] == 200 and "4_1_5" in found["oracle/batch_8"]["unit"]
    # Turn by turn: 198 / 200, 199.995 / 201, 199 / 199.
    assert found["over_best/batch_8/goodput"]["value"] == pytest.approx(0.995)
    assert found["over_off/batch_8/goodput"]["value"] == pytest.approx(199.995 / 101)
    low, high = found["over_best/batch_8/ema"]["interval"]
    assert found["over_best/batch_8/ema"]["value"] == pytest.approx(0.25) and low <= 0.25 <= high
    assert high < 0.3
    summary = sweep.summary(found, "over_best", "ema")
    assert summary["over_best/within_interval/ema"]["value"] == "0 of 1"
    assert sweep.summary(found, "over_best", "goodput")[
        "over_best/within_interval/goodput"
    ]["value"] == "1 of 1"  # fmt: skip


def test_calibration_is_charged_to_goodput_for_the_sweep_as_a_whole():
    rates = {"strategy/off": [10.0], "strategy/4_1_5": [20.0], "controller/goodput": [16.0]}
    found = sweep.calibration_figures({1: rates, 2: rates}, {1: 160, 2: 320}, 2, 15.0)
    # 960 tokens: the oracle takes 48 s, goodput 60 s, and 15 s of calibration.
    assert found["whole_sweep/goodput_over_best"]["value"] == pytest.approx(48 / 60)
    charged = found["whole_sweep/goodput_over_best/calibration_charged"]
    assert charged["value"] == pytest.approx(48 / 75)
    after = found["calibration_below_1_percent_after"]["value"]
    assert 15 / (after + 15) == pytest.approx(0.01)


# --- the swap's arithmetic -------------------------------------------------------------------


def test_a_controller_that_always_picks_the_worst_shows_its_regret():
    spans = [Span("off", 32)] * 3
    # 96 rounds at 4 tokens take 1.92 s; as many tokens at 300 tok/s take 1.28 s.
    assert sum(choices.regrets(spans, SPEEDS)) == pytest.approx(1.92 - 384 / 300)
    assert choices.recovery(spans, SPEEDS) is None
    assert sum(choices.regrets([Span("4_1_5", 50)], SPEEDS)) == 0


def test_recovery_begins_with_the_first_choice_that_stays_good():
    good = [Span("4_1_5", 20)] * 10
    assert choices.recovery(good, SPEEDS) == 0
    assert choices.recovery([Span("off", 32), Span("1_1_2", 16), *good], SPEEDS) == 48


def test_a_lucky_probe_is_no_recovery_and_a_later_probe_no_relapse():
    good = [Span("4_1_5", 20)] * 10
    lucky = [Span("4_1_5", 5), Span("off", 40), *good]
    assert choices.recovery(lucky, SPEEDS) == 45
    later = [Span("off", 10), *good, Span("off", 4), *good]
    assert choices.recovery(later, SPEEDS) == 10
    given_up = [*good, *[Span("off", 32)] * 5]
    assert choices.recovery(given_up, SPEEDS) is None


def test_a_strategy_within_5_percent_of_the_best_is_there():
    near = SPEEDS | {"7_1_8": Speed(14.4, 0.05)}
    assert choices.recovery([Span("7_1_8", 60)], near) == 0
    assert choices.recovery([Span("1_1_2", 60)], near) is None


def test_choices_survive_the_result_file_and_neighbours_are_joined():
    spans = [Span("off", 32), Span("off", 32), Span("4_1_5", 6)]
    text = choices.to_text(spans)
    assert text == "off*64 4_1_5*6"
    assert choices.from_text(text) == [Span("off", 64), Span("4_1_5", 6)]
    assert choices.recovery([], SPEEDS) is None


def test_the_figures_of_a_controller_name_the_worst_of_its_runs():
    def phase(*spans):
        choices = [Choice(name, 4, n, 4 * n, 0, float("nan")) for name, n in spans]
        return Measured(300, 1.0, tuple(choices))

    at_once, late = phase(("4_1_5", 200)), phase(("off", 40), ("4_1_5", 200))
    never = phase(("off", 200))
    runs = [[at_once, at_once, late], [at_once, never, late], [at_once, never, at_once]]
    found = swap.run_figures("announced/x", runs, {"good": SPEEDS, "bad": SPEEDS})
    back = found["recovery_rounds/announced/x/swapped_back"]
    assert (back["value"], back["interval"]) == (40, [0, 40]) and "3 within 50" in back["unit"]
    bad = found["recovery_rounds/announced/x/swapped_for_a_bad_one"]
    assert (bad["value"], bad["interval"]) == (None, [0, None]) and "1 within 50" in bad["unit"]
    lost = sum(choices.regrets([Span("off", 40)], SPEEDS))
    assert found["regret_seconds/announced/x/swapped_back"]["value"] == pytest.approx(lost)
    assert found["measured_over_oracle/announced/x/start"]["value"] == pytest.approx(1.0)


# --- recording -------------------------------------------------------------------------------


def test_a_recorder_passes_on_and_keeps_what_its_controller_chose_and_nothing_else():
    told = Told()
    recorder = Recorder(told)
    recorder.idle = True
    assert recorder.select(2) == "off" and recorder.rounds_hint == 1
    recorder.idle = False
    assert recorder.select(2) == "1_1_2" and recorder.rounds_hint == 3
    recorder.observe(Observation(2, "off", np.zeros((1, 2), int), 0.1))
    recorder.observe(Observation(2, "1_1_2", np.array([[1, 0], [1, -1]]), 0.5))
    assert recorder.choices == [Choice("1_1_2", 2, 2, 3, 2, 0.5)]
    assert told.seen == ["1_1_2"] and told.asked == 1
    recorder.weights_changed()
    Recorder(told, announce=False).weights_changed()
    assert told.announced == 1


# --- on a policy so small that nothing is worth measuring --------------------------------------

TINY = "--strategies 1_1_2 --repeats 2 --seconds 0.01 --tokens_per_slot 8 --max_tokens 12 "
TINY += "--prompts 4 --max_prompt_tokens 12 --samples_per_prompt 2"


@pytest.fixture(scope="module")
def bench(thin_policy):
    args = sweep.parse(["--model", str(thin_policy), *TINY.split()])
    return stream.Bench(args, 2)


@pytest.fixture
def shared(bench, monkeypatch):
    """The commands measure with `bench`, whose programs are there, and leave it as it was."""
    own = bench.args

    def taken(args, most):
        assert most == bench.most
        bench.args = args
        return bench

    for command in (sweep, swap):
        monkeypatch.setattr(command, "Bench", taken)
    yield
    bench.args = own
    bench.engine.set_params(bench.llm.params, bench.llm.head)


@pytest.mark.slow  # a whole bench, of half a minute
def test_a_measurement_counts_every_token_of_so_many_samples_at_once(bench):
    recorder = Recorder(Static("1_1_2"))
    for slots in (1, 2):
        found = stream.measure(bench.engine, recorder, bench.jobs(), slots, 60)
        assert found.seconds > 0 and found.tokens >= 30
        assert {c.strategy for c in found.choices} == {"1_1_2"}
        assert max(c.running for c in found.choices) == slots
        emitted = sum(c.slot_rounds + c.accepted for c in found.choices)
        assert found.tokens <= emitted, "stops and limits cut tokens, nothing adds any"
        assert not bench.engine.has_work and bench.engine.scheduler.pool.used == 0


@pytest.mark.slow  # a whole bench, of half a minute
def test_a_stream_emits_the_samples_that_generate_gives(bench):
    """Whatever chooses, cut short or not: the first samples are those of a plain call."""
    groups = list(itertools.islice(bench.jobs(), 3))
    jobs = [job for group in groups for job in group]
    wanted = [s.token_ids for s in bench.engine.generate(jobs)[0]]
    stream = Stream(bench.engine, Recorder(bench.controller("bandit")), bench.jobs(), 2)
    finished = {}
    step = bench.engine.step

    def watched():
        events = step()
        for event in events:  # prompts come again, with other seeds: the first time counts
            job = event.sequence.job
            finished.setdefault((job.request, job.sample), event.sample.token_ids)
        return events

    stream.engine.step = watched
    try:
        stream.fill()
        found = stream.run(lambda tokens, rounds: len(finished) < 7)
        stream.close()
    finally:
        del stream.engine.step
    assert found.tokens > 0
    for job, tokens in zip(jobs, wanted, strict=True):
        key = (job.request, job.sample)
        assert finished.get(key, tokens) == tokens
    assert len(finished) >= 6


@pytest.mark.slow  # a whole bench, of half a minute
def test_the_sweep_measures_all_arms_at_all_batch_sizes_and_compiles_nothing_more(
    thin_policy, shared, tmp_path
):
    out = tmp_path / "control_tiny.json"
    sweep.main(["--model", str(thin_policy), "--out", str(out), "--batches", "1", "2",
                *TINY.split()])  # fmt: skip
    found = figures(out)
    arms = ["strategy/off", "strategy/1_1_2"]
    arms += [f"controller/{kind}" for kind in ("goodput", "bandit", "ema")]
    for batch, arm in itertools.product((1, 2), arms):
        low, high = found[f"tokens_per_sec/batch_{batch}/{arm}"]["interval"]
        assert 0 < low <= found[f"tokens_per_sec/batch_{batch}/{arm}"]["value"] <= high
    for batch in (1, 2):
        for arm in ("goodput", "off"):
            assert found[f"useless_head/batch_{batch}/{arm}_over_plain"]["value"] > 0
        assert 0 < found[f"running/batch_{batch}"]["value"] <= batch
    assert found["calibration_seconds"]["value"] > 0
    assert found["compilations"]["value"] == 0
    assert is_png(out.with_suffix(".png"))


@pytest.mark.slow  # a whole bench, of half a minute
def test_the_swap_follows_each_controller_through_both_swaps_and_compiles_nothing(
    thin_policy, shared, tmp_path
):
    out = tmp_path / "control_swap_tiny.json"
    argv = "--batch 2 --rounds 30 --runs 1 --static 1_1_2 --controllers goodput static".split()
    swap.main(["--model", str(thin_policy), "--out", str(out), *argv, *TINY.split()])
    found = figures(out)
    for variant, kind in itertools.product(swap.VARIANTS, ("goodput", "static")):
        for event in choices.EVENTS:
            spans = choices.from_text(found[f"choices/{variant}/{kind}/{event}"]["value"])
            assert sum(s.rounds for s in spans) > 15, "30, up to the last chunk's"
            assert found[f"regret_seconds/{variant}/{kind}/{event}"]["value"] >= 0
            assert {s.strategy for s in spans} <= {"off", "1_1_2"}
    static = found["choices/announced/static/start"]["value"].split("*")[0]
    assert static == "1_1_2"
    assert found["compilations"]["value"] == 0
    again = pictures.draw(out)
    assert is_png(again)


def test_what_cannot_be_measured_is_refused_at_once(thin_policy, capsys):
    with pytest.raises(SystemExit):
        swap.parse(["--static", "9_1_10"])
    assert "none of --strategies" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="at least one that drafts"):
        sweep.main(["--model", str(thin_policy), "--strategies", "off"])
