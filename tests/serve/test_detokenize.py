"""The text of a growing sample: in whole characters, and never a part of a stop string."""

from hypothesis import given
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
