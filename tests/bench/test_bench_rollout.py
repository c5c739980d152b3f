"""`bench.rollout` on a tiny policy: long tails and accept lengths; no time is worth measuring."""

import copy
import json

import jax
import numpy as np
import pytest

from bench import plots
from bench.rollout import __main__ as command
from bench.rollout import acceptance, chains, longtail
from bench.rollout.acceptance import ALIGNED_SETTINGS, SETTINGS, TREES, Arm
from bench.rollout.chains import Trace
from specjax.checkpoint import huggingface as hf
from specjax.engine.request import SampleOutput, SpecStats


def figures(path):
    return json.loads(path.read_text())["figures"]


# --- long tails ------------------------------------------------------------------------------

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
        command.main(["longtail", *ARGV, "--model", str(thin_policy), "--out", str(out)])
    return out, kept[0]


@pytest.mark.slow  # a whole measurement, of half a minute
def test_arms_generate_the_same_tokens_and_the_calibration_is_charged(measured):
    found = figures(measured[0])
    for arm in ("plain", "off", "1_1_2", "goodput"):
        assert found[f"samples_different/{arm}"]["value"] == 0
    assert found["samples_unexplained"]["value"] == found["compilations"]["value"] == 0
    apart = found["wall_ratio/goodput/plain_calibration_apart"]["value"]
    shared = found["wall_ratio/goodput/plain_calibration_shared"]["value"]
    assert found["calibration_seconds"]["value"] > 0
    assert apart < shared < found["wall_ratio/goodput/plain"]["value"]
    for name in ("wall_ratio/goodput/best_static", "longest_rate_ratio/goodput/plain"):
        low, high = found[name]["interval"]
        assert 0 < low <= found[name]["value"] <= high
    assert found["best_static"]["value"] in ("off", "1_1_2")
    assert found["accept_length/plain"]["value"] == 1


@pytest.mark.slow  # a whole measurement, of half a minute
def test_chains_have_their_lengths_and_the_trace_accounts_for_every_token(measured):
    out, bench = measured
    lengths = list(bench.work.lengths)
    for arm in ("plain", "goodput"):
        for chain in bench.rollouts[arm].chains:
            assert sum(map(len, chain.turns)) == lengths[chain.index]
            for tokens in chain.turns[:-1]:
                assert tokens[-1] in bench.work.eos_ids or len(tokens) == bench.work.turn_limit
            assert 0 <= chain.admitted < chain.ended <= bench.rollouts[arm].seconds
    assert max(len(c.turns) for c in bench.rollouts["plain"].chains) > 1
    trace = Trace.read(out)
    for name in ("off", "1_1_2"):
        counts = trace.histograms[name]
        assert (counts @ np.arange(counts.shape[1])).tolist() == lengths
    for arm, spans in trace.spans.items():
        assert all(1 <= s.running <= 2 for s in spans)
        assert [s.until for s in spans] == sorted(s.until for s in spans)
        assert sum(s.slot_rounds + s.accepted for s in spans) >= sum(lengths), arm
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow  # a whole measurement, of half a minute
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


def test_no_two_turns_share_their_noise():
    jobs = [work().job(chain, turn, 4) for chain in range(4) for turn in range(6)]
    jobs += work().single_turns() + work(seed=1).single_turns()
    assert len({job.words.tobytes() for job in jobs}) == len(jobs)


def test_chained_text_that_is_not_natural_is_called_so():
    natural = np.array([[0, 1, 1, 8]] * 20)
    found = longtail.naturalness(natural, natural, "2_1_3")
    assert found["accept_length_ratio"]["value"] == 1
    assert "WARNING" not in longtail.judge_naturalness(found)
    worse = longtail.naturalness(np.array([[0, 8, 1, 1]] * 20), natural, "2_1_3")
    low, high = worse["accept_length_ratio"]["interval"]
    assert low <= 13 / 27 <= high
    assert longtail.judge_naturalness(worse).startswith("WARNING")


def test_turns_that_do_not_fit_the_policy_and_tasks_that_are_too_few_are_refused(thin_policy):
    model = ["--model", str(thin_policy)]
    with pytest.raises(SystemExit, match="positions and the policy has 256"):
        longtail.main([*ARGV, *model, "--turn_limit", "260"])
    with pytest.raises(SystemExit, match="expected 4 held-out tasks of at most 1 tokens"):
        longtail.main([*ARGV, *model, "--max_prompt_tokens", "1"])


# --- accept lengths --------------------------------------------------------------------------


def test_every_arm_drafts_as_many_nodes_as_it_says_and_is_allowed():
    listed = list(acceptance.arms(("head", "ngram", "small", "itself")))
    assert len({arm.name for arm in listed}) == len(set(listed)) == len(listed)
    for arm in listed:
        assert arm.strategy.rows == arm.nodes + 1
        assert arm.spec({"small": "a", "itself": "b"}).acceptance == arm.mode
    kinds = {(a.source, a.mode) for a in listed if a.nodes == 7 and a.source != "itself"}
    assert len(kinds) == 3 * 3  # each rule with each source
    for nodes, trees in TREES.items():
        assert {a.tree for a in listed if (a.source, a.nodes) == ("head", nodes)} <= set(trees)
    taus = {a.tau for a in listed if a.source == "head" and a.strategy.is_dynamic}
    assert taus == {0.3, 0.6, 1.0}


def test_aligned_arms_are_pairs_that_differ_in_nothing_else():
    arms = list(acceptance.aligned_arms())
    on, off = ([a for a in arms if a.aligned is side] for side in (True, False))
    assert [a.name for a in on] == [a.name for a in off]
    assert all(a.spec({}).aligned is False for a in off)


def test_accept_length_is_of_sums_and_its_interval_resamples_prompts():
    counts = acceptance.Counts(np.array([9, 0]), np.array([3, 9]))
    assert counts.accept_length == pytest.approx(1 + 9 / 12)  # a mean of means would be 2.5
    assert counts.interval() == [1.0, 4.0]
    same = acceptance.Counts(np.array([4, 4]), np.array([2, 2]))
    assert same.interval() == [3.0, 3.0]


def test_ratios_resample_the_same_prompts_on_both_sides():
    low = acceptance.Counts(np.array([10, 90]), np.array([10, 10]))
    high = acceptance.Counts(np.array([30, 190]), np.array([10, 10]))  # twice the accept length
    value, interval = acceptance.mean_ratio([(high, low)])
    assert value == pytest.approx(2.0)
    assert interval == pytest.approx([2.0, 2.0])


def made_up():
    """Counts of all arms: the coupled chain accepts 2 per round, the others 3."""
    found, aligned = {}, {}
    for arm in acceptance.arms(("head", "ngram")):
        per_round = 2 if (arm.mode, arm.tree) == ("coupled", "chain") else 3
        for setting in SETTINGS:
            found["sums", setting, arm] = acceptance.Counts(
                np.array([10, 20]) * per_round, np.array([10, 20])
            )
    for arm in acceptance.aligned_arms():
        for setting in ALIGNED_SETTINGS:
            aligned["sums", setting, arm] = acceptance.Counts(
                np.array([10, 20]) * (2 + arm.aligned), np.array([10, 20])
            )
    return found, aligned


def test_figures_compare_with_the_coupled_chain_and_aligned_with_not_aligned():
    result = acceptance.figures(*made_up())
    assert result["accept_length/sums/T_0.7/head/coupled/chain/nodes_7"]["value"] == 3.0
    assert result["relative/head/coupled/chain/nodes_7"]["value"] == 1.0
    assert result["relative/head/block/chain/nodes_15"]["value"] == pytest.approx(4 / 3)
    gains = [v["value"] for k, v in result.items() if k.startswith("aligned_gain/")]
    assert len(gains) == len(ALIGNED_SETTINGS) * 3 and gains == pytest.approx([4 / 3] * len(gains))


def test_the_picture_shows_every_accept_length_of_the_file(tmp_path):
    result = acceptance.figures(*made_up())
    path = tmp_path / "acceptance.json"
    path.write_text(json.dumps({"name": "acceptance", "figures": result}))
    points = plots.acceptance_points(result)
    assert len(points) == sum(key.startswith("accept_length/") for key in result)
    assert {p.row.mode for p in points} == set(plots.MODES)
    assert plots.draw(path).read_bytes().startswith(b"\x89PNG")


def test_acceptance_measures_its_arms_and_draws_them(thin_policy, tmp_path, monkeypatch):
    arm = Arm("head", "recursive", 1, "chain")
    monkeypatch.setitem(TREES, 1, {"chain": "1_1_2"})
    monkeypatch.setattr(acceptance, "arms", lambda sources: [arm])
    monkeypatch.setattr(acceptance, "aligned_arms", lambda: [])
    out = tmp_path / "acceptance.json"
    command.main(["acceptance", "--quick", "--embedded", str(thin_policy), "--out", str(out)])
    result = figures(out)
    assert set(result) == {f"accept_length/sums/{setting}/{arm.name}" for setting in SETTINGS}
    for entry in result.values():
        low, high = entry["interval"]
        assert 1 <= low <= entry["value"] <= high <= 2
    assert out.with_suffix(".png").exists()


def test_an_arm_that_does_not_exist_is_an_error(thin_policy, tmp_path):
    argv = ["--quick", "--embedded", str(thin_policy), "--only", "none_such"]
    with pytest.raises(SystemExit, match="none_such"):
        acceptance.main([*argv, "--out", str(tmp_path / "x.json")])


def test_the_truncated_draft_model_is_the_policys_first_layers(thin_policy, tmp_path):
    cfg, params, _ = hf.load_checkpoint(thin_policy, "float32")
    acceptance.truncated(cfg, params, 1, thin_policy, tmp_path / "first")
    small, first, head = hf.load_checkpoint(tmp_path / "first", "float32")
    assert small.num_layers == 1 and head is None
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b[:1]), first["layers"], params["layers"]
    )
    np.testing.assert_array_equal(first["embed"], params["embed"])
    assert Arm("first", "coupled", 7, "chain").spec({"first": "dir"}).draft == "dir"
