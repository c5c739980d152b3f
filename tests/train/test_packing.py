"""Packing loses nothing, keeps order and never splits or joins samples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.loss.packing import Sample, pack, pack_demonstrations

ROW_LENGTH = 16

lengths = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=25)
rows = st.sampled_from([1, 2, 3, 4, (4, 1), (6, 4, 2)])


def make_samples(sizes):
    """Every token and log-probability is unique, so that nothing can be swapped unseen."""
    samples, token = [], 1
    for i, (n_prompt, n_response) in enumerate(sizes):
        ids = list(range(token, token + n_prompt + n_response))
        token += len(ids)
        samples.append(
            Sample(
                sample_id=3 * i,
                prompt_ids=ids[:n_prompt],
                response_ids=ids[n_prompt:],
                behaviour_logprobs=[-float(t) for t in ids[n_prompt:]],
                old_logprobs=[-float(t) - 0.5 for t in ids[n_prompt:]],
                advantage=float(i + 1),
            )
        )
    return samples


@settings(max_examples=60, deadline=None)
@given(lengths, rows)
def test_every_sample_lies_whole_in_one_row_with_its_values(sizes, num_rows):
    samples = make_samples(sizes)
    batches = pack(samples, ROW_LENGTH, num_rows)
    found, allowed = {}, (num_rows,) if isinstance(num_rows, int) else num_rows
    spare = sum(not batch["segment_ids"][row].any() for batch in batches
                for row in range(len(batch["tokens"])))  # fmt: skip
    assert spare < min(allowed), "as few rows of padding as there can be"
    for batch in batches:
        shape = batch["tokens"].shape
        assert shape[0] in allowed and shape[1] == ROW_LENGTH
        assert all(x.shape == shape for x in batch.values())
        for row in range(shape[0]):
            segments = batch["segment_ids"][row]
            used = int((segments > 0).sum())
            # Contiguous from the left, numbered 1, 2, ... , padding after.
            assert (segments[used:] == 0).all() and (np.diff(segments[:used]) >= 0).all()
            assert set(segments[:used]) == set(range(1, segments.max() + 1))
            for segment in range(1, segments.max() + 1):
                part = {name: x[row][segments == segment] for name, x in batch.items()}
                assert len(set(part["sample_ids"])) == 1
                assert int(part["sample_ids"][0]) not in found
                found[int(part["sample_ids"][0])] = part
        padding = batch["segment_ids"] == 0
        assert (batch["sample_ids"][padding] == -1).all()
        assert (batch["loss_mask"][padding] == 0).all()
    assert set(found) == {s.sample_id for s in samples}
    for s in samples:
        part, prompt = found[s.sample_id], len(s.prompt_ids)
        zeros = [0.0] * prompt
        assert part["tokens"].tolist() == [*s.prompt_ids, *s.response_ids]
        assert part["positions"].tolist() == list(range(len(s)))
        assert part["loss_mask"].tolist() == zeros + [1.0] * len(s.response_ids)
        assert part["advantages"].tolist() == zeros + [s.advantage] * len(s.response_ids)
        assert part["behaviour_logprobs"].tolist() == zeros + s.behaviour_logprobs
        assert part["old_logprobs"].tolist() == zeros + s.old_logprobs


@settings(max_examples=40, deadline=None)
@given(lengths, rows, st.randoms())
def test_packing_depends_on_sample_ids_and_not_on_arrival(sizes, num_rows, random):
    samples = make_samples(sizes)
    shuffled = samples.copy()
    random.shuffle(shuffled)
    for a, b in zip(
        pack(samples, ROW_LENGTH, num_rows), pack(shuffled, ROW_LENGTH, num_rows), strict=True
    ):
        assert all((a[name] == b[name]).all() for name in a)
        for ids in a["sample_ids"]:
            assert (np.diff(ids[ids >= 0]) >= 0).all()


def test_demonstrations_can_be_learnt_from_the_response_or_from_all_tokens():
    pairs = [([1, 2, 3], [4, 5]), ([6], [7])]
    response = pack_demonstrations(pairs, 8, 1)[0]
    everything = pack_demonstrations(pairs, 8, 1, loss_on="all")[0]
    assert response["loss_mask"].tolist() == [[0, 0, 0, 1, 1, 0, 1, 0]]
    assert everything["loss_mask"].tolist() == [[0, 1, 1, 1, 1, 0, 1, 0]]


def test_samples_that_cannot_be_packed_are_refused():
    for sample in (
        Sample(7, [1] * 10, [2] * 7),
        Sample(2, [1], [2, 3], behaviour_logprobs=[-1.0] * 3),
        Sample(2, [1], [2, 3], loss_mask=[1]),
    ):
        with pytest.raises(ValueError):
            pack([sample], ROW_LENGTH, 1)
