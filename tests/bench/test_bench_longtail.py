"""`bench.longtail` through its command line, on a policy with which nothing is worth measuring."""

import copy
import json

import numpy as np
import pytest

from bench import chains, longtail, longtail_figures
from bench.trace import SUFFIX, Trace
from specjax.engine.request import SampleOutput, SpecStats

# No turn has more than 16 positions: the fewest programs to compile.
ARGV = (
    "--prompts 3 --samples 2 --slots 2 --median 8 --ratio 4 --repeats 2 --tasks 4 --turn_limit 10 "
    "--strategies off 1_1_2 --judge 1_1_2 --tail 1 --chunk_tokens 8 --min_terms 2 "
    "--max_prompt_tokens 6"
).split()


@pytest.fixture(scope="module")
def measured(thin_policy, tmp_path_factory):
    """The result file of a tiny run, and the bench that wrote it."""
    out = tmp_path_factory.mktemp("longtail") / "tiny.json"
    kept = []
    honest = longtail.trace_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(longtail, "trace_of", lambda b, a: kept.append(b) or honest(b, a))
        longtail.main([*ARGV, "--model", str(thin_policy), "--out", str(out)])
    return out, kept[0]


@pytest.mark.slow  # a whole bench, of half a minute
def test_every_arm_generates_the_same_tokens_and_nothing_compiles_meanwhile(measured):
    figures = json.loads(measured[0].read_text())["figures"]
    for arm in ("plain", "off", "1_1_2", "goodput"):
        assert figures[f"samples_different/{arm}"]["value"] == 0
    assert figures["samples_unexplained"]["value"] == 0
    assert figures["compilations"]["value"] == 0


@pytest.mark.slow  # a whole bench, of half a minute
def test_each_chain_has_exactly_its_length_in_turns_that_end_naturally(measured):
    bench = measured[1]
    for arm in ("plain", "goodput"):
        for chain in bench.rollouts[arm].chains:
            assert sum(map(len, chain.turns)) == bench.work.lengths[chain.index]
            for tokens in chain.turns[:-1]:
                assert tokens[-1] in bench.work.eos_ids or len(tokens) == bench.work.turn_limit
            assert 0 <= chain.admitted < chain.ended <= bench.rollouts[arm].seconds
    assert max(len(c.turns) for c in bench.rollouts["plain"].chains) > 1


@pytest.mark.slow  # a whole bench, of half a minute
def test_the_result_has_ratios_with_intervals_and_charges_the_calibration(measured):
    figures = json.loads(measured[0].read_text())["figures"]
    apart = figures["wall_ratio/goodput/plain_calibration_apart"]["value"]
    shared = figures["wall_ratio/goodput/plain_calibration_shared"]["value"]
    assert figures["calibration_seconds"]["value"] > 0
    assert apart < shared < figures["wall_ratio/goodput/plain"]["value"]
    for name in ("wall_ratio/goodput/best_static", "longest_rate_ratio/goodput/plain"):
        low, high = figures[name]["interval"]
        assert 0 < low <= figures[name]["value"] <= high
    assert figures["best_static"]["value"] in ("off", "1_1_2")
    assert figures["accept_length/plain"]["value"] == 1
    assert figures["accept_length_ratio"]["value"] > 0
    assert 0 < figures["ideal/best_static"]["value"] < 1.2
    for arm in ("plain", "off", "1_1_2", "goodput"):
        assert figures[f"prompt_reading_share/{arm}"]["value"] > 0


@pytest.mark.slow  # a whole bench, of half a minute
def test_the_trace_accounts_for_every_token_and_the_figure_is_there(measured):
    out, bench = measured
    trace = Trace.read(out)
    for name in ("off", "1_1_2"):
        counts = trace.histograms[name]
        assert (counts @ np.arange(counts.shape[1])).tolist() == list(bench.work.lengths)
    for arm, spans in trace.spans.items():
        assert all(1 <= s.running <= 2 for s in spans)
        assert [s.until for s in spans] == sorted(s.until for s in spans)
        assert sum(s.slot_rounds + s.accepted for s in spans) >= sum(bench.work.lengths), arm
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert out.with_suffix(SUFFIX).stat().st_size < 300_000


def test_the_ideal_takes_the_fastest_strategy_at_each_size_of_the_batch():
    def span(until, running, tokens):
        return chains.Span(until, running, "", tokens, tokens, 0)

    off = [[span(1.0, 4, 100), span(3.0, 1, 100)], [span(1.0, 3, 100), span(3.0, 1, 100)]]
    spans = {"off": off, "2_1_3": [[span(2.0, 4, 100), span(2.5, 1, 50)]]}
    seconds, picks = longtail_figures.ideal_seconds(spans, "off", (1, 2, 4))
    assert seconds == pytest.approx(200 / 100 + 200 / 100)
    assert picks == "1: 2_1_3, 4: off"


@pytest.mark.slow  # a whole bench, of half a minute
def test_a_changed_token_is_found_and_not_explained_away(measured):
    bench = measured[1]
    plain, changed = bench.rollouts["plain"], copy.deepcopy(bench.rollouts["plain"])
    turn = changed.chains[3].turns[0]
    turn[0] = (turn[0] + 1) % 256
    ((x, y, at),) = chains.differing(plain, changed)
    assert (x.index, y.index, at) == (3, 3, 0)
    bench.different["off"] = [(x, y, at)]
    try:
        ((arm, judged),) = bench.explain()
    finally:
        bench.different["off"] = []
    assert arm == "off" and not judged.explained
    assert (judged.request, judged.sample) == (1, 1)


def test_lengths_have_the_median_and_the_tail_that_was_asked_for_whatever_the_seed():
    lengths = chains.long_tailed(256, 64, 20, 0)
    assert np.median(lengths) == pytest.approx(64, rel=0.02)
    assert np.quantile(lengths, 0.99, method="hazen") == pytest.approx(20 * 64, rel=0.02)
    other = chains.long_tailed(256, 64, 20, 1)
    assert lengths == chains.long_tailed(256, 64, 20, 0) != other
    assert sorted(lengths) == sorted(other)


def test_lengths_come_from_a_file_and_one_that_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text("[3, 1, 2]")
    assert chains.read_lengths(path, 3) == [3, 1, 2]
    for text in ("[3, 1]", "[3, 1, 0]", '{"a": 1}', "[1, 2, 2.5]"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"lengths\.json: expected a JSON list of 3 lengths"):
            chains.read_lengths(path, 3)


def work(**changes):
    settings = {"tasks": [[10], [11], [12]], "lengths": [9, 9, 9, 9], "samples": 2, "eos_ids": [1]}
    return chains.Work(**settings | {"turn_limit": 4} | changes)


def sample(tokens):
    return SampleOutput(tokens, None, [], "stop", SpecStats(1, 0, 0, (0, 1, 0)))


def prompts_of(work, index):
    """Prompts and limits of a chain whose turns have 3 tokens."""
    chain, found = chains.Chain(work, index), []
    while chain.left > 0:
        job = chain.next_turn()
        found.append((list(job.prompt), job.limit - len(job.prompt)))
        count = min(3, found[-1][1])
        chain.take(sample([len(found) * 100] * count))
    return found


def test_a_turn_reads_its_own_task_and_the_last_one_is_cut_to_what_is_left():
    assert prompts_of(work(lengths=[8] * 4), 0) == [([10], 4), ([12], 4), ([11], 2)]
    assert prompts_of(work(lengths=[8] * 4), 2)[0] == ([11], 4)


def test_earlier_turns_are_read_again_where_they_are_asked_for():
    found = prompts_of(work(keep_turns=1), 0)
    assert [prompt for prompt, _ in found] == [
        [10],
        [10, 100, 100, 100, 12],
        [12, 200, 200, 200, 11],
    ]
    assert work(keep_turns=1).longest_prompt == 1 + 1 + 4


def test_no_two_turns_share_their_noise():
    jobs = [work().job(chain, turn, 4, ()) for chain in range(4) for turn in range(6)]
    jobs += work().single_turns() + work(seed=1).single_turns()
    assert len({job.words.tobytes() for job in jobs}) == len(jobs)


def test_chained_text_that_is_not_natural_is_called_so():
    natural = np.array([[0, 1, 1, 8]] * 20)
    found = longtail_figures.naturalness(natural, natural, "2_1_3")
    assert found["accept_length_ratio"]["value"] == 1
    assert "WARNING" not in longtail_figures.judge_naturalness(found)
    worse = longtail_figures.naturalness(np.array([[0, 8, 1, 1]] * 20), natural, "2_1_3")
    low, high = worse["accept_length_ratio"]["interval"]
    assert low <= 13 / 27 <= high
    assert longtail_figures.judge_naturalness(worse).startswith("WARNING")


def test_turns_that_do_not_fit_the_policy_and_tasks_that_are_too_few_are_refused(thin_policy):
    model = ["--model", str(thin_policy)]
    with pytest.raises(SystemExit, match="positions and the policy has 256"):
        longtail.main([*ARGV, *model, "--turn_limit", "260"])
    with pytest.raises(SystemExit, match="expected 4 held-out tasks of at most 1 tokens"):
        longtail.main([*ARGV, *model, "--max_prompt_tokens", "1"])
