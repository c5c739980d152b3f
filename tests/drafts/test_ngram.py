"""N-gram drafting against a plain Python search."""

import math

import drive
import numpy as np
import pytest

from specjax.decode.state import EMPTY, STOPPED
from specjax.drafts.ngram import HALF_FULL, OCCURRENCES, PER_TOKEN, NgramSource

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
