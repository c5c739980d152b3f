"""Tokens of log-probabilities as text and bytes, for every way that vocabularies are spelt."""

import json

import pytest
import small_tokenizers
from small_tokenizers import END, KINDS

from serve.responses import MIN_LOGPROB, ChatResponse, CompletionResponse, TokenTexts
from specjax.tokenizer import load_tokenizer

TEXTS = ("the thé cat", "naïve\n日本 🙂", "a\tb\r\n", "the  the", f"end.{END}")


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return load_tokenizer(small_tokenizers.save(folder, request.param))


def test_bytes_of_a_text_are_those_of_its_tokens_one_after_the_other(tokenizer):
    pieces = TokenTexts(tokenizer)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        if tokenizer.unk_token_id in ids:  # without bytes some texts have no tokens
            continue
        assert b"".join(map(pieces.bytes_of, ids)).decode().removeprefix(" ") == text


def test_no_two_tokens_share_a_key(tokenizer):
    pieces = TokenTexts(tokenizer)
    entry = {token: -float(token) for token in range(len(tokenizer) + 5)}
    for chosen in (4 + ord("a"), len(tokenizer) + 1, 0):
        found = pieces.by_text(entry, chosen)
        assert len(found) == len(entry) and list(found.values()) == list(entry.values())
        assert found[pieces.text(chosen)] == -chosen


def test_the_generated_token_keeps_its_text_where_another_has_the_same(tmp_path):
    made = load_tokenizer(small_tokenizers.save(tmp_path, "sentencepiece"))
    byte, letter, other = (made.convert_tokens_to_ids(p) for p in ("<0x61>", "a", "b"))
    top = [{byte: -0.5, other: -1.0, letter: -2.0}, {byte: -0.5, letter: -float("inf")}]
    reply = CompletionResponse("m", TokenTexts(made))
    said = reply.logprobs([letter, byte], [-2.0, -0.5], top, [0, 1], 2)
    assert said["top_logprobs"] == [
        {f"token_id:{byte}": -0.5, "b": -1.0, "a": -2.0},
        {"a": -0.5, f"token_id:{letter}": MIN_LOGPROB},
    ]
    assert said["tokens"] == ["a", "a"]
    chat = ChatResponse("m", TokenTexts(made)).logprobs([letter], [-2.0], top, [0], 3)
    entries = chat["content"][0]["top_logprobs"]
    assert [entry["bytes"] for entry in entries] == [[0x61], [0x62], [0x61]]
    json.dumps([said, chat], allow_nan=False)
