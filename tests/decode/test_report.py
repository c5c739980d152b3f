"""What a chunk reports, against a plain recomputation in numpy, slot by slot."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from report_oracle import Case, Slot, V, make_plan, random_case

from specjax.decode import report
from specjax.decode.options import Features
from specjax.decode.state import Plan


@functools.partial(jax.jit, static_argnums=1)
def write_one(buffers, plan, index, begin, view):
    return report.write(buffers, plan, index, begin, view)


def written(case: Case, plan: Plan, rounds=2, at=1):
    view = case.view(plan)
    buffers = report.start(plan, len(case.slots), rounds)
    return jax.device_get(write_one(buffers, plan, jnp.int32(at), view.state.length, view))


def check_records(case: Case, rejections: report.Rejections, at=1) -> list[dict]:
    """Compares round `at` with the oracle; returns the rejections there."""
    found = []
    for b, slot in enumerate(case.slots):
        expected = case.expected(b)
        ran = slot.running and slot.speculate
        assert rejections.accepted[at, b] == (len(case.walk(b)[0]) - 1 if ran else -1)
        assert rejections.valid[at, b] == (expected is not None)
        if expected is None:
            continue
        found.append(expected)
        for name, value in expected.items():
            got = getattr(rejections, name)[at, b]
            if isinstance(value, (float, np.floating)):
                np.testing.assert_allclose(got, value, rtol=2e-4, atol=2e-5, err_msg=name)
            else:
                assert got == value, (name, got, value)
    return found


# --- rejections ----------------------------------------------------------------------------------


def test_records_equal_a_plain_recomputation_and_every_cause_occurs():
    plan, found = make_plan(), []
    for seed in range(40):
        case = random_case(seed)
        found += check_records(case, written(case, plan).rejections)
    assert len(found) > 100
    for name in ("outside_mask", "outside_filter", "penalty_changed"):
        assert 5 < sum(r[name] for r in found) < len(found) - 5, name
    assert {r["depth"] for r in found} == {1, 2}
    assert {r["emitted"] for r in found} == {True, False}
    assert any(math.isinf(r["draft_token_target_logprob"]) for r in found)


def test_rounds_that_did_not_run_hold_nothing_and_others_are_left_alone():
    case, plan = random_case(3), make_plan()
    rejections = written(case, plan, rounds=3, at=2).rejections
    assert rejections.valid[2].any() and not rejections.valid[:2].any()
    assert (rejections.accepted[:2] == -1).all()


def plain_case(**options) -> Case:
    """One slot under a chain of one step that drafts token 1 where the target prefers token 0."""
    case = random_case(0, batch=1, tree="1_1_2")
    case.slots = [Slot(prompt=[5, 6], output=[7], **options)]
    case.tokens[0] = (7, 1)
    case.logits[0, :] = [4.0, 3.0, 2.0, 1.0] + [-4.0] * (V - 4)
    case.noise[:] = 0.0
    case.cut = 9
    return case


@pytest.mark.parametrize("part", ["masks", "filters"])
def test_masks_and_filters_are_told_apart_when_only_one_of_them_is_compiled_in(part):
    masks = part == "masks"
    options = {"allowed": frozenset(range(V)) - {1}} if masks else {"top_k": 1}
    features = Features(allowed=masks, top_k=not masks)
    rejections = written(plain_case(**options), make_plan("1_1_2", features)).rejections
    assert rejections.outside_mask[1, 0] == masks
    assert rejections.outside_filter[1, 0] == (not masks)


@pytest.mark.parametrize("mode", ["block", "recursive"])
def test_without_common_noise_a_penalty_is_judged_by_the_most_likely_token(mode):
    case = plain_case(repetition=2.0)
    case.slots[0].prompt = [1, 6]
    case.noise[0, 0, 3] = 9.0
    case.logits[0, 0, 1] = 5.0
    assert written(case, make_plan("1_1_2", mode=mode)).rejections.penalty_changed[1, 0]


def test_a_tree_whose_shape_differs_by_slot_is_read_by_slot():
    plan, case = make_plan(), random_case(5)
    view = case.view(plan)
    parent = np.broadcast_to(case.shape.parent, case.tokens.shape).copy()
    where = next(b for b in range(len(case.slots)) if case.expected(b))
    parent[where] = 99  # this slot has no children anywhere
    view = view._replace(
        draft=view.draft._replace(shape=case.shape._replace(parent=jnp.asarray(parent)))
    )
    buffers = report.start(plan, len(case.slots), 1)
    rejections = write_one(buffers, plan, 0, view.state.length, view).rejections
    expected = [b != where and case.expected(b) is not None for b in range(len(case.slots))]
    assert rejections.valid[0].tolist() == expected


# --- counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("telemetry", [True, False])
def test_every_round_says_what_was_emitted_and_what_was_accepted_before_the_cut(telemetry):
    plan, differ = make_plan(telemetry=telemetry), 0
    for seed in range(10):
        case = random_case(seed)
        got = written(case, plan, rounds=3, at=1)
        for b, slot in enumerate(case.slots):
            length = len(case.walk(b)[0])
            assert got.counts[1, b] == (min(length, case.cut) if slot.running else 0)
            drafts = length - 1 if slot.running and slot.speculate else -1
            assert got.accepted[1, b] == drafts
            differ += got.counts[1, b] not in (0, drafts + 1)
        assert (got.counts[::2] == 0).all() and (got.accepted[::2] == -1).all()
    assert differ > 5


# --- logprobs ------------------------------------------------------------------------------------


def test_logprobs_of_every_kind_lie_at_the_positions_of_their_tokens():
    plan = make_plan()
    case = random_case(11)
    view = case.view(plan)
    buffers = report.start(plan, len(case.slots), 3)
    ahead = np.arange(len(case.slots)) % 3  # tokens that the chunk has emitted already
    got = jax.device_get(write_one(buffers, plan, 1, view.state.length - ahead, view))
    assert got.transformed.shape == (len(case.slots), 9)
    assert got.top.ids.shape == (len(case.slots), 9, V)  # 20 at most
    for b, slot in enumerate(case.slots):
        rows, emitted = case.walk(b)
        count = min(len(rows), case.cut) if slot.running else 0
        filled = [int(ahead[b]) + i for i in range(count)]
        empty = np.setdiff1d(np.arange(9), filled)
        assert (got.transformed[b, empty] == 0).all() and (got.top.ids[b, empty] == -1).all()
        assert (got.logprobs[b, empty] == 0).all()
        for row, token, k in zip(rows, emitted, filled, strict=False):
            logp = slot.log_softmax(slot.scores(case.logits[b, row], case.path(b, row)))
            scaled = slot.log_softmax(slot.tempered(case.logits[b, row]))
            np.testing.assert_allclose(got.transformed[b, k], logp[token], rtol=2e-4, atol=2e-5)
            np.testing.assert_allclose(got.logprobs[b, k], scaled[token], rtol=2e-4, atol=2e-5)
            for expected, ids, values in (
                (scaled, got.top.ids, got.top.logprobs),
                (logp, got.top.transformed_ids, got.top.transformed_logprobs),
            ):
                np.testing.assert_allclose(values[b, k], -np.sort(-expected), rtol=2e-4, atol=2e-5)
                np.testing.assert_allclose(values[b, k], expected[ids[b, k]], rtol=2e-4, atol=2e-5)


def test_plain_decoding_reports_logprobs_and_has_no_rejections():
    plan = make_plan(None)
    case = random_case(2, tree="1_1_2")
    view = case.view(make_plan("1_1_2"))
    first = view._replace(
        draft=None,
        accepted=view.accepted._replace(
            tokens=view.accepted.tokens[:, :1], count=jnp.ones_like(view.count)
        ),
        count=jnp.minimum(view.count, 1),
        logits=view.logits[:, :1],
        scores=view.scores[:, :1],
    )
    buffers = report.start(plan, len(case.slots), 2)
    assert buffers.rejections is None and buffers.transformed.shape == (len(case.slots), 2)
    got = write_one(buffers, plan, 0, view.state.length, first)
    for b, slot in enumerate(case.slots):
        token = case.walk(b)[1][0]
        for values, scores in (
            (got.transformed, slot.scores(case.logits[b, 0], [])),
            (got.logprobs, slot.tempered(case.logits[b, 0])),
        ):
            expected = slot.log_softmax(scores)[token] if slot.running else 0.0
            np.testing.assert_allclose(values[b, 0], expected, rtol=2e-4, atol=2e-5)
            assert values[b, 1] == 0
    running = [slot.running for slot in case.slots]
    assert True in running and False in running
    assert got.counts.tolist() == [[int(r) for r in running], [0] * len(running)]
    assert got.accepted.tolist() == [[int(r) - 1 for r in running], [-1] * len(running)]


# --- free when off -------------------------------------------------------------------------------


def jaxpr_of(plan: Plan):
    """What `write` does, and which fields of a round it reads for that."""
    case = random_case(0)
    view = case.view(make_plan())
    inputs = {"index": 0, "begin": view.state.length, "step": view}
    inputs["report"] = report.start(plan, len(case.slots), 2)
    jaxpr = jax.make_jaxpr(functools.partial(report.write, plan=plan))(**inputs).jaxpr
    names = [path for path, _ in jax.tree_util.tree_leaves_with_path(inputs)]
    used = {id(var) for equation in jaxpr.eqns for var in equation.invars}
    pairs = zip(names, jaxpr.invars, strict=True)
    read = [path for path, var in pairs if id(var) in used and path[0].key == "step"]
    return jaxpr, {path[1].name for path in read}


ALWAYS = ["logprobs", "counts", "accepted"]


def test_what_is_off_has_no_buffers_no_outputs_and_no_operations():
    off = make_plan(features=Features(penalties=True, top_p=True), telemetry=False)
    buffers = report.start(off, 4, 2)
    assert [name for name, x in buffers._asdict().items() if x is not None] == ALWAYS
    jaxpr, read = jaxpr_of(off)
    assert len(jaxpr.outvars) == len(ALWAYS)
    assert read == {"state", "accepted", "count", "logits"}
    nothing, _ = jaxpr_of(make_plan(features=Features.none(), telemetry=False))
    assert str(jaxpr) == str(nothing)


def test_each_part_costs_only_where_it_is_asked_for():
    def primitives(**changes):
        features = Features(**{k: v for k, v in changes.items() if k != "telemetry"})
        plan = make_plan(features=features, telemetry=changes.get("telemetry", False))
        jaxpr, read = jaxpr_of(plan)
        return len(jaxpr.outvars) - len(ALWAYS), str(jaxpr), read

    outputs, text, read = primitives(transformed_logprobs=True)
    assert outputs == 1 and "top_k" not in text and "scores" in read
    outputs, text, read = primitives(top_logprobs=True)
    assert outputs == 2 and "top_k" in text and "scores" not in read
    assert primitives(top_logprobs=True, transformed_logprobs=True)[0] == 5
    outputs, text, read = primitives(telemetry=True)
    assert outputs == len(report.Rejections._fields) and "top_k" not in text and "draft" in read
