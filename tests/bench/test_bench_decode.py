"""`bench.decode identity` finds no difference, and finds one when the decoder is broken."""

import json

import jax
import pytest

from bench import decode
from specjax import memory


@pytest.fixture
def identity(monkeypatch, tmp_path):
    """Compares 40 tokens of a tree; returns the figures."""
    monkeypatch.setattr(decode, "RANDOM_SETUPS", (decode.Setup("2x1", 4, "fair"),))
    monkeypatch.setattr(decode, "MAX_TOKENS", 24)
    monkeypatch.setattr(decode, "LONGEST_PROMPT", 12)

    def run():
        try:
            decode.main(["identity", "--tokens", "40", "--out", str(tmp_path / "x.json")])
        finally:
            result = json.loads((tmp_path / "x.json").read_text())
            found = {name: entry["value"] for name, entry in result["figures"].items()}
        assert found["tokens_compared"] >= 40
        assert result["settings"]["setups"][0]["accept_length"] > 1
        return found

    return run


@pytest.mark.slow
def test_tokens_are_those_of_plain_decoding(identity):
    assert identity()["differences_unexplained"] == 0


@pytest.mark.slow
def test_wrong_rows_that_are_committed_are_found(identity, monkeypatch):
    def wrong(rows, index):
        return jax.tree.map(lambda x: x[..., : index.shape[1], :], rows)

    monkeypatch.setattr(memory, "take_rows", wrong)
    with pytest.raises(SystemExit, match="differ, expected none"):
        identity()
