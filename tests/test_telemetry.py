"""Telemetry on the host: what is collected, summed up and written."""

import dataclasses
import json

import numpy as np
import pytest

from specjax.decode.report import Rejections
from specjax.telemetry import (
    CAUSES,
    Collector,
    Rejection,
    SlotInfo,
)

SLOTS = (
    SlotInfo("a", 0, 3, ("temperature", "top_p")),
    SlotInfo("a", 1, 3, ("temperature", "top_p")),
    None,
)


def chunk(rounds: int = 4, **changes) -> Rejections:
    """Slot 0 is rejected at depth 1, 2, 3, ..; slot 1 takes three drafts, down to a leaf, is
    rejected at depth 1 next, and ends; slot 2 is empty."""
    shape = (rounds, 3)
    accepted = np.full(shape, -1)
    accepted[:, 0] = np.arange(rounds)
    accepted[:2, 1] = (3, 0)
    accepted[:, 2] = 1
    valid = np.zeros(shape, bool)
    valid[:, 0] = valid[1, 1] = valid[:, 2] = True
    fields = {
        "accepted": accepted,
        "valid": valid,
        "emitted": np.ones(shape, bool),
        "position": 5 + accepted,
        "depth": accepted + 1,
        "draft_token": np.full(shape, 7),
        "target_token": np.full(shape, 8),
        "draft_logprob": np.full(shape, -0.5, np.float32),
        "target_logprob": np.full(shape, -1.25, np.float32),
        "draft_token_target_logprob": np.full(shape, -2.0, np.float32),
        "entropy": np.full(shape, 0.6, np.float32),
        "top_p_mass": np.full(shape, 0.75, np.float32),
        "outside_mask": np.zeros(shape, bool),
        "outside_filter": np.zeros(shape, bool),
        "penalty_changed": np.zeros(shape, bool),
    }
    return Rejections(**{**fields, **changes})


def collected(*chunks: Rejections, **options) -> Collector:
    collector = Collector(**options)
    for one in chunks or (chunk(),):
        collector.add(one, SLOTS)
    return collector


def test_a_record_holds_what_the_device_said_and_who_ran_in_the_slot():
    first, second, last = (collected().records[i] for i in (0, 1, -1))
    assert first == Rejection(
        request="a", sample=0, prompt_len=3, transforms=("temperature", "top_p"), position=5,
        depth=1, draft_token=7, target_token=8, draft_logprob=-0.5, target_logprob=-1.25,
        draft_token_target_logprob=-2.0, entropy=first.entropy, top_p_mass=0.75,
        outside_mask=False, outside_filter=False, penalty_changed=False, emitted=True,
    )  # fmt: skip
    assert first.entropy == pytest.approx(0.6)
    assert (second.sample, second.position, second.depth) == (0, 6, 2)
    assert (last.sample, last.position, last.depth) == (0, 8, 4)
    assert [r.sample for r in collected().records].count(1) == 1  # its round to a leaf is none


def test_acceptance_per_depth_counts_leaves_as_accepted_and_rejections_as_tried():
    summary = collected().summary()
    # Rounds: accepted 0, 1, 2, 3 and rejected (slot 0); 3 to a leaf, 0 and rejected (slot 1).
    assert summary.rounds == 6 and summary.rejections == 5
    assert summary.attempts == {1: 6, 2: 4, 3: 3, 4: 1}
    assert summary.accepts == {1: 4, 2: 3, 3: 2}
    assert summary.acceptance_per_depth == pytest.approx([4 / 6, 3 / 4, 2 / 3, 0])


def test_causes_are_exclusive_in_order_and_sum_to_one():
    def flag(*rounds):
        return np.isin(np.arange(4), rounds)[:, None] & np.ones((1, 3), bool)

    flags = chunk(
        outside_mask=flag(0), outside_filter=flag(2), penalty_changed=flag(0, 1, 2)
    )  # round 0: mask and penalty; 1: penalty; 2: filter and penalty; 3: none
    collector = collected(flags)
    causes = {(r.sample, r.depth): r.cause for r in collector.records}
    assert causes == {
        (0, 1): "mask", (0, 2): "penalty", (0, 3): "filter", (0, 4): "disagreement",
        (1, 1): "penalty",
    }  # fmt: skip
    shares = {name: collector.summary().share(name) for name in CAUSES}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares == pytest.approx(
        {"mask": 0.2, "filter": 0.2, "penalty": 0.4, "disagreement": 0.2}
    )


def test_memory_is_bounded_and_dropped_records_are_counted_and_said():
    bounded = collected(chunk(), chunk(), max_records=2)
    assert "8 of their records were dropped" in str(bounded.summary())
    whole = collected(chunk(), chunk()).summary()
    assert bounded.records == collected().records[:2]
    assert bounded.summary() == dataclasses.replace(whole, dropped=8)
    counted = collected(chunk(), chunk(), max_records=0)
    assert counted.summary() == dataclasses.replace(whole, dropped=10)
    assert counted.records == [] and counted.summary().causes["disagreement"] == 10


def test_what_several_collected_does_not_depend_on_who_collected_which():
    one, other = Collector(), Collector()
    others = tuple(slot and dataclasses.replace(slot, request="b") for slot in SLOTS)
    one.add(chunk(), others)
    other.add(chunk(), SLOTS)
    whole, same = Collector.joined([one, other]), Collector.joined([other, one])
    assert whole.records == same.records and whole.summary() == same.summary()
    assert [r.request for r in whole.records] == ["a"] * 5 + ["b"] * 5
    places = [(r.request, r.sample, r.position) for r in whole.records]
    assert places == sorted(places) and whole.summary().rejections == 10


# --- files ---------------------------------------------------------------------------------------


def lines_of(path) -> list[dict]:
    """The objects of a file of strict JSON: no Infinity."""
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_what_is_written_is_json_infinities_included(tmp_path):
    masked = np.full((4, 3), -np.inf, np.float32)
    collector = collected(chunk(draft_token_target_logprob=masked))
    tally, *lines = lines_of(collector.write_jsonl(tmp_path / "deep" / "run.jsonl"))
    first = collector.records[0]
    assert len(lines) == len(collector.records) and tally["kind"] == "tally"
    assert lines[0]["draft_token_target_logprob"] is None
    assert lines[0]["entropy"] == first.entropy and lines[0]["kind"] == "rejection"
    assert tally["rejections"] == collector.summary().rejections
    assert tally["attempts"] == {"1": 6, "2": 4, "3": 3, "4": 1}


def test_a_last_line_that_a_kill_cut_short_is_removed(tmp_path):
    path = collected().write_jsonl(tmp_path / "run.jsonl")
    whole = lines_of(path)
    path.write_bytes(path.read_bytes()[:-40])
    collected().write_jsonl(path, append=True)
    assert lines_of(path) == whole[:-1] + whole


def test_the_sums_are_printed():
    printed = str(collected().summary())
    for text in ("6 rounds, 5 ended", "depth 1: 66.7% accepted", "100.0% disagreement"):
        assert text in printed
