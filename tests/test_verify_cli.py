"""`python -m specjax.verify`: what it says of an exact and a biased decoder, and of bad input."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specjax import verify as checker
from specjax.checkpoint import huggingface as hf
from specjax.decode import accept
from specjax.drafts import ngram
from specjax.drafts.mtp import init_head_params
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params
from specjax.verify.__main__ import main
from specjax.verify.chi_square import goodness_of_fit

CFG = dense_config(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position=64,
    eos_token_ids=(3,),
    mtp_num_layers=1,
)
SMALL = ["--samples", "1000", "--requests", "6", "--strategy", "1_1_2"]


@pytest.fixture(autouse=True)
def few_slots(monkeypatch):
    """All checks in batches of one size, which is compiled once."""
    monkeypatch.setattr(checker, "LARGEST_BATCH", 16)


@pytest.fixture(scope="module")
def weights():
    return init_params(CFG, 0), init_head_params(CFG, 1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, weights):
    path = tmp_path_factory.mktemp("verify") / "model"
    hf.save_checkpoint(path, CFG, *weights)
    return str(path)


def test_an_exact_decoder_passes_and_the_table_and_json_say_so(checkpoint, tmp_path, capsys):
    file = tmp_path / "verdict.json"
    assert main(["--model", checkpoint, *SMALL, "--tokens", "1,5,9", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert "verdict: lossless" in said and "FAILED" not in said and "random head" not in said
    verdict = json.loads(file.read_text())
    assert verdict["ok"] and verdict["model"] == checkpoint and verdict["strategy"] == "1_1_2"
    identity, alone, every = verdict["checks"]
    assert identity["figures"]["unexplained"] == 0 and identity["figures"]["tokens"] > 100
    for check in (alone, every):
        assert check["name"] in said
        assert check["figures"]["samples"] == 1000 and check["figures"]["p_value"] > 1e-6
        assert check["figures"]["cells"] >= 10


@pytest.mark.slow
def test_a_biased_decoder_fails_both_checks(checkpoint, tmp_path, capsys, monkeypatch):
    """The token after the last accepted draft is one too high now and then."""
    exact = accept.accept_coupled

    def biased(tokens, shape, chosen):
        return exact(tokens, shape, jnp.where(tokens % 3 == 1, (chosen + 1) % 32, chosen))

    monkeypatch.setattr(accept, "accept_coupled", biased)
    file = tmp_path / "verdict.json"
    assert main(["--model", checkpoint, *SMALL, "--json", str(file)]) == 1
    said = capsys.readouterr().out
    assert "verdict: NOT lossless" in said and "NOT explained" in said
    verdict = json.loads(file.read_text())
    assert not verdict["ok"]
    assert [check["status"] for check in verdict["checks"]] == ["FAILED"] * 3


@pytest.mark.slow  # a third engine
def test_where_hardly_any_draft_is_accepted_the_verdict_is_inconclusive(
    weights, tmp_path, capsys, monkeypatch
):
    """A drafter that never has a draft: nothing can go wrong, and nothing is proven."""
    monkeypatch.setattr(ngram.NgramSource, "begin", no_drafts(ngram.NgramSource.begin))
    monkeypatch.setattr(ngram.NgramSource, "step", no_drafts(ngram.NgramSource.step))
    hf.save_checkpoint(tmp_path / "model", CFG, *weights)
    few = ["--samples", "600", "--requests", "2", "--strategy", "1_1_2", "--draft", "ngram"]
    file = tmp_path / "verdict.json"
    assert main(["--model", str(tmp_path / "model"), *few, "--json", str(file)]) == 3
    said = capsys.readouterr().out
    assert "verdict: INCONCLUSIVE" in said and "lossless" not in said and "FAILED" not in said
    verdict = json.loads(file.read_text())
    assert verdict["ok"] and not verdict["conclusive"]


def no_drafts(propose):
    def silent(*args):
        proposal, work = propose(*args)
        return proposal._replace(scores=jnp.full_like(proposal.scores, -jnp.inf)), work

    return silent


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "/no/such/directory"], "/no/such/directory"),
        (["--strategy", "off"], "nothing to check"),
        (["--prompt", "hello"], "no tokenizer"),
        (["--tokens", "31,32"], "token id 32"),
        (["--samples", "0"], "got 0"),
    ],
)
def test_bad_input_is_refused_with_status_2_before_anything_runs(
    checkpoint, arguments, said, capsys
):
    if "--model" not in arguments:
        arguments = ["--model", checkpoint, *arguments]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err and not captured.out


# --- its statistics -------------------------------------------------------------------------------


def test_the_p_value_is_that_of_scipy_where_no_cell_is_small():
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.full(10, 5.0))
    counts = rng.multinomial(10_000, probabilities)
    expected = stats.chisquare(counts, probabilities * 10_000)
    fit = goodness_of_fit(counts, probabilities)
    assert fit.cells == 10 and fit.samples == 10_000
    np.testing.assert_allclose([fit.statistic, fit.p_value], expected, rtol=1e-9)


def test_p_values_of_right_counts_are_uniform_with_small_cells_too():
    rng = np.random.default_rng(1)
    probabilities = rng.dirichlet(np.full(60, 0.3))
    counts = rng.multinomial(3000, probabilities, size=999)
    fits = [goodness_of_fit(row, probabilities) for row in counts]
    assert fits[0].cells < 60
    assert stats.kstest([f.p_value for f in fits], "uniform").pvalue > 1e-3


def test_a_single_outcome_of_probability_zero_fails():
    assert goodness_of_fit([50, 50, 1], [0.5, 0.5, 0.0]).p_value == 0
    assert goodness_of_fit([50, 51, 0], [0.5, 0.5, 0.0]).p_value > 0.5


def test_small_cells_count_together():
    probabilities = np.array([0.5, 0.49, *[0.001] * 10])
    fit = goodness_of_fit(np.r_[500, 440, [6] * 10], probabilities)
    assert fit.cells == 3 and fit.p_value < 1e-6
    assert goodness_of_fit(np.r_[500, 490, [2] * 5, [0] * 5], probabilities).p_value > 0.99
