"""`bench.identity` counts tokens and differences, and fails on one that is not rounding."""

import json

import jax
import pytest

from bench import identity
from specjax.decode import round as decode_round

SETUPS = (identity.Setup("2x1", 4, "fair"),)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the bench on one small setup: exit status and result file."""
    monkeypatch.setattr(identity, "RANDOM_SETUPS", SETUPS)
    monkeypatch.setattr(identity, "MAX_TOKENS", 40)
    monkeypatch.setattr(identity, "LONGEST_PROMPT", 12)

    def run(tokens):
        path = tmp_path / "identity.json"
        status = identity.main(["--tokens", str(tokens), "--out", str(path)])
        return status, json.loads(path.read_text())

    return run


@pytest.mark.slow
def test_the_bench_compares_as_many_tokens_as_asked_and_finds_no_difference(run):
    status, result = run(500)
    assert status == 0
    assert result["name"] == "identity" and result["command"] and result["machine"]["cores"]
    figures = result["figures"]
    assert figures["tokens_compared"]["value"] >= 500
    assert figures["tokens_compared"]["unit"] == "tokens"
    assert figures["differences_unexplained"]["value"] == 0
    assert result["settings"]["setups"][0]["accept_length"] > 1.3


@pytest.mark.slow
def test_the_bench_fails_when_the_wrong_rows_are_committed(run, monkeypatch, capsys):
    monkeypatch.setattr(
        decode_round,
        "take_rows",
        lambda rows, index: jax.tree.map(lambda x: x[..., : index.shape[1], :], rows),
    )
    status, result = run(40)
    assert status == 1
    assert result["figures"]["differences_unexplained"]["value"] > 0
    assert "NOT explained" in capsys.readouterr().out


def test_the_bench_refuses_to_compare_nothing():
    with pytest.raises(SystemExit):
        identity.main(["--tokens", "0"])
