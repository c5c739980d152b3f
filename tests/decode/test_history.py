"""Counts and last tokens of a node, however its history is split into context and path."""

import jax
import numpy as np
import pytest
from transform_cases import rows_of

from specjax.decode.options import BAD_WORD_LENGTH, Features
from specjax.decode.sampling import (
    Context,
    Rows,
    add_tokens,
    context_of,
    count_tokens,
    last_tokens,
)

VOCAB = 11
count = jax.jit(count_tokens, static_argnums=3)


def random_sequences(seed, batch=5, width=20):
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, VOCAB, (batch, width)).astype(np.int32)
    length = generator.integers(1, width + 1, batch).astype(np.int32)
    prompt_len = generator.integers(1, length + 1).astype(np.int32)
    return tokens, length, prompt_len


@pytest.mark.parametrize("seed", range(5))
def test_counts_split_prompt_from_output_and_ignore_what_lies_past_the_length(seed):
    tokens, length, prompt_len = random_sequences(seed)
    counts = count(tokens, length, prompt_len, VOCAB)
    for b in range(len(tokens)):
        prompt, output = tokens[b, : prompt_len[b]], tokens[b, prompt_len[b] : length[b]]
        np.testing.assert_array_equal(counts.prompt[b], np.isin(np.arange(VOCAB), prompt))
        np.testing.assert_array_equal(counts.output[b], np.bincount(output, minlength=VOCAB))


@pytest.mark.parametrize("seed", range(5))
def test_adding_emitted_tokens_equals_counting_again(seed):
    tokens, length, prompt_len = random_sequences(seed)
    emitted = np.random.default_rng(seed).integers(0, 4, len(tokens)).astype(np.int32)
    emitted = np.minimum(emitted, length - prompt_len)
    before = length - emitted
    window = np.stack([np.resize(tokens[b, before[b] :], 4) for b in range(len(tokens))])
    counts = jax.jit(add_tokens)(count(tokens, before, prompt_len, VOCAB), window, emitted)
    again = count(tokens, length, prompt_len, VOCAB)
    jax.tree.map(np.testing.assert_array_equal, counts, again)


def test_the_context_holds_only_what_the_features_ask_for():
    tokens, length, prompt_len = random_sequences(0)
    counts = count(tokens, length, prompt_len, VOCAB)
    plain = context_of(tokens, length, Features(), counts)
    assert plain.counts is None and plain.suffix is None
    np.testing.assert_array_equal(plain.root, length - 1)
    assert context_of(tokens, length, Features(penalties=True), counts).counts is counts
    assert context_of(tokens, length, Features(bad_words=True), None).suffix is not None


def test_penalties_without_counts_are_refused():
    tokens, length, _ = random_sequences(0)
    with pytest.raises(ValueError, match="needs counts, got None: pass count_tokens"):
        context_of(tokens, length, Features(penalties=True), None)


@pytest.mark.parametrize("seed", range(5))
def test_the_suffix_ends_with_the_root_and_is_padded_before_the_start(seed):
    tokens, length, _ = random_sequences(seed)
    suffix = np.asarray(context_of(tokens, length, Features(bad_words=True), None).suffix)
    for b in range(len(tokens)):
        known = [-1] * BAD_WORD_LENGTH + tokens[b, : length[b]].tolist()
        assert suffix[b].tolist() == known[-(BAD_WORD_LENGTH - 1) :]


@pytest.mark.parametrize("per_slot_depth", [True, False])
def test_last_tokens_of_a_row_end_with_its_own_path(per_slot_depth):
    suffix = np.array([[-1, -1, -1, 1, 2, 3, 4], [7, 6, 5, 4, 3, 2, 1]], np.int32)
    paths = [[[], [5], [6], [5, 8], [6, 8, 9]]] * 2
    rows = rows_of(paths)
    if not per_slot_depth:
        rows = Rows(rows.depth[0], rows.path)
    context = Context(np.array([3, 9]), None, suffix)
    last = np.asarray(last_tokens(context, rows))
    for b in range(2):
        for r, path in enumerate(paths[b]):
            assert last[b, r].tolist() == [*suffix[b].tolist(), *path][-7:]
