"""`bench.quantised` measures what packing changes apart from what speculation changes."""

import json

import pytest
import tiny_run

from bench import quantised
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.draft_files import save_draft_files
from specjax.drafts.eagle3 import Eagle3Source


def test_a_difference_is_between_the_same_draws_of_prompts():
    counts = [(number, 4) for number in range(4, 14)]
    low, high = quantised.interval(counts, "")["interval"]
    difference = quantised.interval([(a + 2, b) for a, b in counts], "", counts)
    assert [difference["value"], *difference["interval"]] == pytest.approx([0.5] * 3)
    assert low < high - 0.5


@pytest.mark.slow
def test_all_arms_are_measured_and_no_drafter_changes_a_sample(tmp_path):
    path = tiny_run.write_policy(tmp_path / "tiny")
    head = Eagle3Source.new(hf.read_config(path), policy=hf.load_checkpoint(path)[1])
    save_draft_files(tmp_path / "head", *head, "float32")
    sizes = {"prompts": 3, "max_tokens": 8, "max_prompt_tokens": 32, "batch": 2}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    words += ["--formats", "int8", "--aligned", "int8", "--draft", str(tmp_path / "head")]
    quantised.main([str(path), *words, "--out", str(tmp_path / "quantised.json")])
    figures = json.loads((tmp_path / "quantised.json").read_text())["figures"]
    ends = {key.removeprefix("accept_length/") for key in figures if key.startswith("accept_")}
    arms = {end.removesuffix("/temperature_1") for end in ends if end.endswith("_1")}
    both = {"head/4_1_5", "head/4_4_16", "head_int8/4_1_5", "ngram/4_1_5"}
    aligned = {"scales", "temperature", "all", "bias"}
    of_mtp = {f"int8/head+{name}/4_1_5" for name in aligned}
    of_mtp |= {"int8_taps/head/4_1_5", "int8_tables/head/4_1_5"}
    of_eagle = of_mtp | {f"{name}/head/4_1_5" for name in ("full", "int8")}
    expected = {f"tiny/{arm}" for arm in of_mtp}
    expected |= {f"tiny/{policy}/{arm}" for policy in ("full", "int8") for arm in both}
    expected |= {f"tiny+draft/{arm}" for arm in of_eagle | {"int8/head+norm/4_1_5"}}
    assert arms == expected and len(ends) == 2 * len(arms)
    different = [figure for key, figure in figures.items() if key.startswith("samples_different")]
    assert different and all(figure["value"] == 0 for figure in different)
    assert all("plain decoding" in figure["unit"] for figure in different)
    assert figures["kl/tiny/full"]["value"] == 0 < figures["kl/tiny/int8"]["value"]
    assert figures["bytes/tiny/int8"]["value"] < figures["bytes/tiny/full"]["value"] / 2
    low, high = figures["accept_length/tiny/int8/head/4_1_5/temperature_1"]["interval"]
    assert 1 <= low <= high <= 5
    lengths = [f"accept_length/tiny/{name}/head/4_1_5/temperature_0" for name in ("int8", "full")]
    one, other = (figures[key]["value"] for key in lengths)
    assert figures[f"difference/{lengths[0]}/full"]["value"] == pytest.approx(one - other)
    assert figures["difference/reward/tiny/int8/temperature_1"]["interval"]
    compared = {key.rpartition("/")[0] for key in figures if key.startswith("difference/accept_")}
    full = {f"{name}/full/head" for name in ("tiny", "tiny+draft")}
    apart = {end for end in ends if "/".join(end.split("/")[:3]) not in full}
    assert compared == {f"difference/accept_length/{end}" for end in apart}
    assert all(figure["interval"] for key, figure in figures.items() if key.startswith("depth_"))
    causes = [figures[key]["value"] for key in figures if key.startswith("cause_")]
    assert sum(causes) == pytest.approx(2)  # of both heads
