"""Tables of step costs, and what `bench.control predict` makes of them."""

import json

import pytest

from bench.control import costs, predict

# Two samples: 6 tokens in rounds of 1, 2 and 3, and 2 tokens in one round.
ROLLOUT = {"rows": 3, "draft_steps": 2, "samples": {"histograms": [[0, 1, 1, 1], [0, 0, 1, 0]]}}


def test_a_prediction_is_what_one_computes_by_hand(table):
    found = predict.predict(predict.PartCosts.load(table), "online", [ROLLOUT])
    assert found.tokens == 8
    assert found.plain_seconds == pytest.approx(2 * 1.5 + 4 * 1.0)
    assert found.spec_seconds == pytest.approx((2.0 + 2 * 0.2) + 2 * (1.2 + 2 * 0.1))
    assert found.ratio == pytest.approx(7.0 / 5.2)


def test_samples_beyond_the_slots_wait_their_turn(table):
    found = predict.predict(predict.PartCosts.load(table), "online", [ROLLOUT, ROLLOUT], slots=1)
    assert found.plain_seconds == pytest.approx(2 * 8 * 1.0)
    assert found.spec_seconds == pytest.approx(2 * 4 * 1.4)
    # Jobs of 5, 1 and 2 rounds on two slots: two run until round 3, one until round 5.
    assert predict.replay([5, 1, 2], 2, lambda n: 10.0 if n == 2 else 1.0) == pytest.approx(32.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plain": [1.0]}, "as many costs in every list"),
        ({"source": "somewhere"}, "'measured' or 'modelled'"),
        ({"verify": None}, "not a cost table"),
    ],
)
def test_a_table_that_is_none_is_refused_by_name(table, tmp_path, change, message):
    spoilt = tmp_path / "spoilt.json"
    spoilt.write_text(json.dumps(json.loads(table.read_text()) | change))
    with pytest.raises(ValueError, match=message) as error:
        predict.PartCosts.load(spoilt)
    assert "spoilt.json" in str(error.value)


def test_more_rows_than_a_table_has_are_an_error_that_says_how_to_measure_them(table):
    deeper = {"samples": {"histograms": [[0, 0, 0, 0, 0, 1]]}}
    with pytest.raises(ValueError, match="bench.control costs"):
        predict.predict(predict.PartCosts.load(table), "online", [deeper])


def test_the_shipped_tables_load_and_the_modelled_ones_are_what_costs_writes(tmp_path):
    costs.main(["model", "--out", str(tmp_path)])
    for path in predict.default_tables():
        table = predict.PartCosts.load(path)
        assert (table.seconds.plain > 0).all()
        if table.kind == "modelled":
            assert (tmp_path / path.name).read_text() == path.read_text()


@pytest.mark.slow
def test_measured_costs_are_a_table_that_predict_takes(thin_policy, tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "DRAFT_CHAIN", 2)
    out = tmp_path / "here.json"
    argv = "measure --batches 1 2 --rows 2 3 --context 8 --longer 24 --rounds 2 --repeats 1".split()
    argv.append("--random")
    costs.main([*argv, "--model", str(thin_policy), "--out", str(out)])
    table = predict.PartCosts.load(out)
    assert table.kind == "measured" and table.name == "here"
    assert table.context == 8 and (table.rises.plain >= 0).all()
    assert (table.seconds.plain > 0).all() and (table.seconds.draft > 0).all()
    assert predict.predict(table, "online", [ROLLOUT]).ratio > 0
