"""N-gram drafting against a plain Python search."""

import math

import drive
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode.state import EMPTY, STOPPED
from specjax.drafts.ngram import HALF_FULL, OCCURRENCES, PER_TOKEN, NgramSource, prompt_hash

MAX_LEN = 24


def searched(source, state, b):
    """(tokens, where continuations begin) of slot b and of the other samples of its prompt."""
    tokens, length = np.asarray(state.tokens), np.asarray(state.length)
    group, keys = np.asarray(state.draft.slots.group), np.asarray(state.keys)
    finish, prompt = np.asarray(state.finish), int(state.options.prompt_len[b])
    sequences = [(tokens[b, : length[b]].tolist(), 0)]
    others = [
        c
        for c in sorted(range(len(length)), key=lambda c: -length[c])
        if (group[c] == group[b]).all()
        and group[b].any()
        and (keys[c] != keys[b]).any()
        and finish[c] != EMPTY
    ]
    if source.siblings:
        sequences += [(tokens[c, : length[c]].tolist(), prompt) for c in others]
    return sequences


def common_suffix(a, b, longest):
    n = 0
    while n < min(len(a), len(b), longest) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n


def expected(source, sequences, context):
    """{token: log-weight} of what followed `context`."""
    found = []
    for tokens, first in sequences:
        for at in range(max(first, 1), len(tokens)):
            size = common_suffix(tokens[:at], context, source.longest)
            late = np.float32(0.5 * at) / np.float32(len(tokens)) + np.float32(0.45)
            if size >= source.shortest:
                found.append((size, late, tokens[at]))
    found = sorted(found, key=lambda f: (-f[0], -f[1]))[:OCCURRENCES]
    logits = {}
    for size, _, token in found:
        best = max(s for s, _, t in found if t == token)
        often = sum(late for s, late, t in found if t == token and s == best)
        if size == best:
            logits[token] = best * math.log(PER_TOKEN) + math.log(often / (1 + often / HALF_FULL))
    return logits


def check(source, state, grown, found, vocab):
    for b, length in enumerate(np.asarray(state.length)):
        sequences = searched(source, state, b)
        context = sequences[0][0]
        rows = [([], found[0][b, 0])]
        for i, logits in enumerate(found[1:]):
            rows += zip(drive.paths_of(grown, i)[b].tolist(), logits[b], strict=True)
        assert length == len(context)
        for path, got in rows:
            want = expected(source, sequences, context + path)
            assert np.flatnonzero(~np.isneginf(got)).tolist() == sorted(want)
            np.testing.assert_allclose(got[sorted(want)], [want[t] for t in sorted(want)], 1e-4)


@pytest.mark.parametrize("siblings", [False, True])
@pytest.mark.parametrize(
    ("vocab", "longest", "shortest"), [(3, 4, 1), (3, 5, 3), (12, 2, 1), (200, 4, 1)]
)
def test_every_row_is_looked_up_as_a_plain_search_does(siblings, vocab, longest, shortest):
    """Branches by their own suffix, matches across the prompt's end, rows that are found nowhere,
    siblings that run, have finished, or hold the very same request."""
    rng = np.random.default_rng(vocab + longest)
    source = NgramSource(vocab, longest, shortest, siblings)
    same = rng.integers(0, vocab, 5).tolist()
    prompts = [same, same, rng.integers(0, vocab, 5).tolist(), same, same, [1]]
    batch, steps = len(prompts), 3
    state = drive.empty_state(source, batch, MAX_LEN, steps)
    state = drive.place(state, source, {}, prompts, width=8)
    state = state._replace(
        finish=state.finish.at[1].set(STOPPED).at[4].set(EMPTY),
        keys=state.keys.at[3].set(state.keys[0]),
    )
    grown = drive.random_tree(rng, batch, (3, 4), vocab, False)
    for _ in range(4):
        grown = drive.relabelled(rng, grown, vocab)
        found, work = drive.propose(source, {}, state, grown, False)
        check(source, state, grown, found, vocab)
        count = rng.integers(0, steps + 2, batch)
        emitted = rng.integers(0, vocab, (batch, steps + 1))
        state = drive.accept(state, source, work, emitted, count)


def drafted(source, tokens):
    """Logits below the last of some tokens, all of them the prompt."""
    state = drive.empty_state(source, 1, MAX_LEN, 2)
    state = drive.place(state, source, {}, [tokens], len(tokens))
    return np.asarray(drive.begin(source, {}, state, 2, 0)[0])[0, 0]


def test_the_longest_match_wins_over_many_short_ones():
    source = NgramSource(9)
    logits = drafted(source, [1, 2, 5] + [2, 6] * 8 + [1, 2])
    assert np.argmax(logits) == 5 and np.isfinite(logits[6])


def test_a_row_without_a_token_has_no_draft():
    source = NgramSource(5)
    state = drive.empty_state(source, 1, MAX_LEN, 2)
    state = drive.place(state, source, {}, [[1, 2, 1, 2]], 4)
    rng = np.random.default_rng(0)
    grown = drive.random_tree(rng, 1, (2,), 5, True)._replace(tokens=[np.array([[1, -1]])])
    below = drive.propose(source, {}, state, grown, True)[0][1][0]
    assert np.argmax(below[0]) == 2 and np.all(np.isneginf(below[1]))


def test_a_prompt_has_one_group_however_it_is_padded():
    rng = np.random.default_rng(0)
    prompts = [[0], [0, 0], [1], [1, 0], [0, 1], [2, 1], [1, 2], *rng.integers(0, 3, (40, 6))]
    prompts = [tuple(int(t) for t in p) for p in prompts]

    def groups(width, fill):
        tokens = np.full((len(prompts), width), fill, np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        lengths = jnp.array([len(p) for p in prompts])
        return [tuple(g) for g in np.asarray(prompt_hash(jnp.asarray(tokens), lengths)).tolist()]

    assert groups(8, 0) == groups(16, 2)
    assert len(set(groups(8, 0))) == len(set(prompts))
    assert all(any(g) for g in groups(8, 0))


def test_lengths_out_of_order_are_refused():
    with pytest.raises(ValueError, match="expected 1 <= shortest <= longest <= 127.*got 3 and 2"):
        NgramSource(8, longest=2, shortest=3)
