"""The benches of acceptance, parts of a round, `invariant` and CPU kernels; nothing is timed."""

import json

import jax
import numpy as np
import pytest

from bench import acceptance, acceptance_plot, cpu, full_batch, invariant, round_parts
from bench import round as bench_round
from bench.acceptance_arms import ALIGNED_SETTINGS, SETTINGS, TREES, Arm, aligned_arms, arms
from specjax import SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.decode.chunk import Until
from specjax.decode.options import Features
from specjax.drafts.mtp import init_head_params
from specjax.engine.pages import NOBODYS
from specjax.engine.runner import Runner
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params

SMALL = dense_config(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mtp_num_layers=1,
)


def figures(path):
    return json.loads(path.read_text())["figures"]


# --- accept lengths --------------------------------------------------------------------------


def test_every_arm_drafts_as_many_nodes_as_it_says_and_is_allowed():
    listed = list(arms(("head", "ngram", "small", "itself")))
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
    on, off = ([a for a in aligned_arms() if a.aligned is side] for side in (True, False))
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
    for arm in arms(("head", "ngram")):
        per_round = 2 if (arm.mode, arm.tree) == ("coupled", "chain") else 3
        for setting in SETTINGS:
            found["sums", setting, arm] = acceptance.Counts(
                np.array([10, 20]) * per_round, np.array([10, 20])
            )
    for arm in aligned_arms():
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
    path.write_text(json.dumps({"figures": result}))
    points = acceptance_plot.points(result)
    assert len(points) == sum(key.startswith("accept_length/") for key in result)
    assert {p.row.mode for p in points} == set(acceptance_plot.COLORS)
    assert acceptance_plot.draw(path).read_bytes().startswith(b"\x89PNG")


def test_bench_acceptance_measures_its_arms_and_writes_table_and_figure(
    thin_policy, tmp_path, capsys, monkeypatch
):
    arm = Arm("head", "recursive", 1, "chain")
    monkeypatch.setitem(TREES, 1, {"chain": "1_1_2"})
    monkeypatch.setattr(acceptance, "arms", lambda sources: [arm])
    monkeypatch.setattr(acceptance, "aligned_arms", lambda: [])
    out = tmp_path / "acceptance.json"
    acceptance.main(["--quick", "--embedded", str(thin_policy), "--out", str(out)])
    result = figures(out)
    assert set(result) == {f"accept_length/sums/{setting}/{arm.name}" for setting in SETTINGS}
    for entry in result.values():
        low, high = entry["interval"]
        assert 1 <= low <= entry["value"] <= high <= 2
    assert out.with_suffix(".png").exists()
    assert "sums: accept length" in capsys.readouterr().out


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
    assert Arm("first", "coupled", 7, "chain").spec({"first": "dir"}).source == "model"


# --- the parts of a round --------------------------------------------------------------------


def test_a_full_batch_runs_every_slot_in_pages_of_its_own_and_can_be_filled_again():
    runner = Runner(SMALL.replace(max_position=48), None, 3, 48, chunk_tokens=4, page_size=16)
    runner.set_params(init_params(runner.cfg, 0), None)
    rows = full_batch.everyone(runner)
    table = rows.table
    pages = table[:, :3].ravel().tolist()
    assert len(set(pages)) == 9 and min(pages) > NOBODYS and max(pages) < runner.pages
    assert (table[:, 3] == NOBODYS).all()
    found = []
    for _ in range(2):
        full_batch.fill(runner, 20, {"temperature": 0.5})
        result = runner.chunk("off", Features(), runner.alone(rows), Until.of(4)).open()
        assert result.rounds == 4 and result.length[:3].tolist() == [24] * 3
        found.append(result.tokens[:3])
    np.testing.assert_array_equal(*found)


def test_the_parts_in_order_do_what_a_round_does():
    # The sizes of the run below, whose programs these are.
    cfg = SMALL.replace(max_position=76)
    runner = Runner(cfg, SpecConfig("2x1"), 2, cfg.max_position)
    runner.set_params(init_params(cfg, 0), init_head_params(cfg, 1))
    wanted = bench_round.FEATURES["temperature"]
    parts = round_parts.Parts(runner, *wanted, context=12, emitted=2)
    by_parts, side = parts.programs["commit"]()
    whole, whole_side = parts.programs["round"]()
    assert (by_parts.length > 12).all()
    for name in ("tokens", "length", "finish"):
        np.testing.assert_array_equal(getattr(by_parts, name), getattr(whole, name))
    for name in ("counts", "accepted"):
        found, expected = (getattr(s.report, name) for s in (side, whole_side))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow  # a whole bench, of half a minute
def test_bench_round_reports_shares_and_that_noise_is_drawn_once(
    thin_policy, tmp_path, monkeypatch
):
    monkeypatch.setitem(bench_round.SHAPES, "small", SMALL)
    out = tmp_path / "round.json"
    argv = "--shapes small --strategies 2x1 --features temperature --repeats 1 --window 0".split()
    argv += "--batch 2 --context 12 --emitted 2 --max_tokens 6".split()
    argv += ["--model", str(thin_policy), "--out", str(out)]
    bench_round.main(argv)
    result = figures(out)
    shares = [result[f"share/small/2x1/temperature/{part}"]["value"] for part in round_parts.PARTS]
    assert sum(shares) == pytest.approx(1)
    assert result["noise_rows_drawn_twice/policy/2x1"]["value"] == 0
    assert result["noise_rows_per_token/policy/2x1"]["value"] >= 1


def test_shares_are_of_the_sum_and_noise_is_left_out_where_it_says_so():
    ms = {"noise": 10, "draft": 20, "verify": 60, "transform": 2, "accept": 5, "commit": 3}
    times = {name: (float(value), float(value)) for name, value in ms.items()}
    result = bench_round.part_figures("x", times | {"round": (80.0, 90.0)})
    assert result["share/x/verify"]["value"] == pytest.approx(0.6)
    assert result["share_without_noise/x/accept_and_commit"]["value"] == pytest.approx(8 / 90)
    assert result["sum_of_parts/x"]["value"] == pytest.approx(1.25)


# --- invariant -------------------------------------------------------------------------------


def test_differences_are_counted_up_to_the_first_and_in_all():
    same, other, short = [1, 2, 3], [1, 9, 9], [1, 2]
    found = invariant.differences([same, other, short], [same, same, same])
    assert (found.samples, found.tokens, found.compared) == (2, 3, 3 + 2 + 3)


@pytest.mark.slow
def test_bench_invariant_finds_no_difference_in_invariant_mode(thin_policy, tmp_path):
    out = tmp_path / "invariant.json"
    argv = "--batches 2 --dtypes bfloat16 --prompts 2 --samples 1 --max_tokens 8 --repeats 1"
    argv = [*argv.split(), "--strategy", "1_1_2", "--max_prompt_tokens", "24"]
    argv += ["--model", str(thin_policy), "--out", str(out)]
    invariant.main(argv)
    result = figures(out)
    assert result["samples_different/bfloat16/batch_2/invariant"]["value"] == 0
    assert result["tokens_compared/bfloat16/batch_2/normal"]["value"] > 2
    assert result["cost/bfloat16/batch_2/plain_invariant"]["value"] > 0


def test_a_difference_in_invariant_mode_is_a_failure(thin_policy, tmp_path, monkeypatch):
    def decode(self, repeats):
        samples = {"speculative": [[1]], "plain": [[1]], "invariant": [[1]]}
        self.tokens = samples | {"plain_invariant": [[2]]}
        return {name: [1.0] for name in self.tokens}

    monkeypatch.setattr(invariant.Decodings, "__init__", lambda self, *_: None)
    monkeypatch.setattr(invariant.Decodings, "measure", decode)
    argv = ["--model", str(thin_policy), "--batches", "1", "--dtypes", "float32", "--prompts", "1"]
    with pytest.raises(SystemExit, match="1 samples differ in invariant mode"):
        invariant.main([*argv, "--out", str(tmp_path / "x.json")])


# --- CPU kernels -----------------------------------------------------------------------------


def test_bench_cpu_compares_the_kernels_with_xla_and_finds_their_bits_equal(cpu_kernels, tmp_path):
    out = tmp_path / "cpu.json"
    argv = "--batches 2 --repeats 1 --fewest 2 --max_tokens 8 --strategy 1_1_2 --out".split()
    cpu.main([*argv, str(out)])
    result = json.loads(out.read_text())["figures"]
    assert result["bits_different/batch_2/kernels"]["value"] == 0
    assert result["bits_different/batch_2/xla"]["unit"].startswith("samples of 2")
    for what in ("kernels/xla/off", "kernels/xla/1_1_2", "1_1_2/off/kernels", "1_1_2/off/xla"):
        assert result[f"ratio/batch_2/{what}"]["value"] > 0
