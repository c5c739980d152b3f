"""The text of a growing sample: in whole characters, and never a part of a stop string."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from specjax.engine.text import StopStrings, TextPieces


def decode(ids):
    return bytes(ids).decode(errors="replace")


def pieces(tokens, cuts, stops, min_tokens=0):
    """(pieces as they are given out, the text of the sample) as the server makes them."""
    search = StopStrings(stops, decode, min_tokens=min_tokens)
    detokenizer, given, at = TextPieces(decode), [], 0
    for end in [*sorted(cuts), len(tokens)]:
        if at >= end and end < len(tokens):
            continue
        new, at = tokens[at:end], end
        cut = search.feed(new)
        if cut is not None:
            given.append(detokenizer.finish(new, cut.text))
            return given, cut.text
        if end < len(tokens):
            given.append(detokenizer.push(new, search.text if stops else None))
    whole = decode(tokens)
    given.append(detokenizer.finish(new, whole))
    return given, whole


texts = st.text(alphabet="abüΩ日🙂 ", max_size=30)
stops = st.lists(st.text(alphabet="abü🙂", min_size=1, max_size=4), max_size=3)


@given(texts, st.lists(st.integers(1, 60)), stops, st.integers(0, 4))
def test_pieces_are_whole_characters_that_make_up_the_text(text, cuts, stops, min_tokens):
    tokens = list(text.encode())
    given, whole = pieces(tokens, [c for c in cuts if c < len(tokens)], stops, min_tokens)
    assert "".join(given) == whole
    assert not any("\ufffd" in piece for piece in given)


@given(texts, st.lists(st.integers(1, 60)), stops)
def test_no_stop_string_is_ever_seen_not_even_by_its_beginning(text, cuts, stops):
    tokens = list(text.encode())
    given, whole = pieces(tokens, [c for c in cuts if c < len(tokens)], stops)
    ends = [text.find(s) for s in stops if s in text]
    assert not any(stop in whole for stop in stops)
    for i in range(len(given)):
        assert text.startswith("".join(given[:i]))
        assert all(len("".join(given[:i])) <= end for end in ends)


def test_a_character_that_is_never_completed_comes_at_the_end():
    detokenizer = TextPieces(decode)
    tokens = list("ab🙂".encode())[:-1]
    assert detokenizer.push(tokens) == "ab"
    assert detokenizer.finish([], decode(tokens)) == decode(tokens)[2:] != ""


# --- stop strings that hold special tokens --------------------------------------------------------

NAMED = ["a", "b", "<", ">", "e", "ab", "<e>", "<p>"]  # the last two are special


def named_text(tokens, skip=True) -> str:
    return "".join(NAMED[t] for t in tokens if t < 6 or not skip)


def name_of(token) -> str:
    return NAMED[token] * (token >= 6)


def first_cut(tokens, strings):
    """(tokens kept, text) by a search in both texts from the start, token by token; None: none."""
    for count in range(1, len(tokens) + 1):
        begins = []
        for skip in (True, False):
            before, now = (named_text(tokens[:n], skip) for n in (count - 1, count))
            for string in strings:
                for at in range(max(0, len(before) - len(string) + 1), len(now)):
                    inside = range(at, at + len(string))
                    if now.startswith(string, at) and (skip or names_are_whole(tokens, inside)):
                        begins.append(at if skip else visible(tokens, at))
        if begins:
            return count, named_text(tokens)[: min(begins)]
    return None


def names_are_whole(tokens, inside) -> bool:
    """Whether of each special token all characters are inside, or none."""
    owners = [(i, t) for i, t in enumerate(tokens) for _ in NAMED[t]]
    return all(
        sum(owners[at][0] == i for at in inside) in (0, len(NAMED[t]))
        for i, t in enumerate(tokens)
        if t >= 6
    )


def visible(tokens, at) -> int:
    """How many of the first `at` characters are not of a special token's name."""
    shown = [t < 6 for t in tokens for _ in NAMED[t]]
    return sum(shown[:at])


@settings(max_examples=400, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 7), max_size=14),
    strings=st.lists(st.text("ab<>ep", min_size=1, max_size=6), min_size=1, max_size=3),
    chunks=st.randoms(use_true_random=False),
)
@example([0, 6, 1], ["<e>"], None)
@example([0, 1, 6, 0], ["b<e>"], None)
@example([0, 6, 0, 1, 4], ["<e>ab"], None)
@example([0, 7, 6, 0], ["><e"], None)
@example([2, 4, 6, 1], ["<e<"], None)
@example([0, 6, 1], ["ab"], None)
@example([0, 6, 1, 4], ["e"], None)
@example([0, 7, 1, 7], [">b<p"], None)
@example([0, 7, 6, 6], ["><e>", "e><e>"], None)
@example([7, 6, 0, 1], [">ab"], None)
def test_stop_strings_are_found_with_and_without_the_names_of_special_tokens(
    tokens, strings, chunks
):
    expected = first_cut(tokens, strings)
    search = StopStrings(strings, named_text, name=name_of)
    shown, stream, at, cut = "", TextPieces(named_text), 0, None
    while at < len(tokens) and cut is None:
        end = at + (1 if chunks is None else chunks.randint(1, 3))
        cut = search.feed(tokens[at:end])
        if cut is None:
            shown += stream.push(tokens[at:end], search.text)
        at = end
    assert cut == expected
    text = named_text(tokens) if cut is None else cut.text
    shown += stream.finish(tokens[at:], text, search.text)
    assert shown == text, "what is given out is never taken back"
    kept = StopStrings(strings, named_text, include=True, name=name_of).feed(tokens)
    if cut is not None:
        assert kept.tokens == cut.tokens
        assert any(kept.text == cut.text + string for string in strings)
