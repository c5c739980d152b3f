"""`bench.draft losses`: figures by entropy, resuming loss by loss, and a whole tiny run."""

import json

import numpy as np
import pytest

from bench.draft import __main__ as command
from bench.draft import losses
from bench.record import figure

ARGV = (
    "--updates 2 --points 1 --train_prompts 3 --train_samples 1 --prompts 2 --samples 1 "
    "--max_tokens 8 --max_batch 2 --rows 1 --row_length 64"
).split()


def test_acceptance_is_averaged_by_entropy_and_a_line_goes_through_all_tokens():
    entropy = np.linspace(0, 2.5, 1000)
    found = losses.of_entropy("tv", entropy, 1 - 0.2 * entropy)
    assert found["line_slope/tv"]["value"] == pytest.approx(-0.2)
    assert found["line_level/tv"]["value"] == pytest.approx(1)
    assert found["line_correlation/tv"]["value"] == pytest.approx(-1)
    keys = [key.removeprefix("tokens/") for key in found if key.startswith("tokens/")]
    assert "tv/entropy_0_to_0.01" not in keys  # four tokens: too few for a mean
    assert "tv/entropy_2_to_inf" in keys
    for key in keys:
        mean = found[f"mean_entropy/{key}"]["value"]
        assert found[f"acceptance/{key}"]["value"] == pytest.approx(1 - 0.2 * mean)
    inside = (entropy >= losses.EDGES[1]).sum()
    assert sum(found[f"tokens/{key}"]["value"] for key in keys) == inside


def test_losses_that_a_file_has_are_not_measured_again(monkeypatch, tmp_path, capsys):
    measured = []

    def measure(bench, loss, args):
        measured.append(loss)
        points = {
            f"accept_length/{loss}/{name}/tokens_{tokens}": figure(1.5, "tokens", [1.4, 1.6])
            for name in losses.TEMPERATURES
            for tokens in (0, 100)
        }
        entropy = np.linspace(0, 2, 100)
        return points | losses.of_entropy(loss, entropy, np.exp(-entropy))

    monkeypatch.setattr(losses, "prepare", lambda args: None)
    monkeypatch.setattr(losses, "measure", measure)
    out = tmp_path / "found.json"
    given = ["losses", "--out", str(out), *ARGV]
    command.main([*given, "--losses", "ce"])
    command.main([*given, "--losses", "ce", "tv"])
    assert measured == ["ce", "tv"]
    assert {"line_slope/ce", "line_slope/tv"} <= json.loads(out.read_text())["figures"].keys()
    assert out.with_suffix(".png").stat().st_size > 1000
    with pytest.raises(SystemExit, match="figures with other lr"):
        command.main([*given, "--losses", "kl", "--lr", "1e-4"])


@pytest.mark.slow  # compiles an engine and a training program
def test_a_run_measures_the_start_and_the_trained_head(thin_policy, tmp_path):
    out = tmp_path / "tiny.json"
    given = ["--model", str(thin_policy), "--out", str(out), "--losses", "tv_e2e"]
    command.main(["losses", *ARGV, *given])
    result = json.loads(out.read_text())
    lengths = {k: v for k, v in result["figures"].items() if k.startswith("accept_length/")}
    assert len(lengths) == 4
    assert all(1 <= v["interval"][0] <= v["value"] <= v["interval"][1] for v in lengths.values())
    tokens = {int(key.rpartition("_")[2]) for key in lengths}
    assert min(tokens) == 0 and max(tokens) > 0
