"""Tokenizers of GGUF files: text is cut and merged as by the tokenizers that they come from."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from specjax.checked_json import CheckpointError, UnsupportedModelError
from specjax.tokenizer import transformers_class
from specjax.weights.gguf_tokenizer import tokenizer_of
from tests.weights import gguf_files

FILE = Path("some/model.gguf")
TEXTS = st.text(
    st.one_of(
        st.sampled_from(list("the and in ab12345\n\n\t  's'LL.,!?-é中文ぁ٣½\u0301\u200d😀▁")),
        st.characters(codec="utf-8"),
    ),
    max_size=24,
)
SAMPLE = "I'm WE'LL 12345½ foo_bar\r\n\n  naïve 中文ー!!/\n x"


def made(metadata):
    return tokenizer_of(FILE, metadata, 64)


def cuts(name):
    """The pieces that a text is cut into before BPE, as text again."""
    core = made(gguf_files.byte_level(**{"tokenizer.ggml.pre": name})).backend_tokenizer

    def cut(text):
        text = core.normalizer.normalize_str(text) if core.normalizer else text
        pieces = core.pre_tokenizer.pre_tokenize_str(text)
        return [text[start:end] for _, (start, end) in pieces]

    return cut


# --- how text is cut ----------------------------------------------------------------------------

GPT2 = ["I", "'m", " WE", "'", "LL", " 12345½", " foo", "_", "bar", "\r\n\n ", " naïve", " 中文ー",
        "!!/", "\n", " x"]  # fmt: skip
DIGITS = ["I", "'m", " WE", "'", "LL", " ", "1", "2", "3", "4", "5", "½", " foo", "_", "bar",
          "\r\n\n ", " naïve", " 中文ー", "!!/", "\n", " x"]  # fmt: skip
LLAMA3 = ["I", "'m", " WE", "'LL", " ", "123", "45½", " foo", "_bar", "\r\n\n", " ", " naïve",
          " 中文ー", "!!/\n", " x"]  # fmt: skip
QWEN2 = ["I", "'m", " WE", "'LL", " ", "1", "2", "3", "4", "5", "½", " foo", "_bar", "\r\n\n", " ",
         " naïve", " 中文ー", "!!/\n", " x"]  # fmt: skip
TEKKEN = ["I", "'m", " WE", "'LL", " ", "1", "2", "3", "4", "5", "½", " foo", "_bar", "\r\n\n", " ",
          " naïve", " 中文ー", "!!/\n", " x"]  # fmt: skip
DEEPSEEK3 = ["I", "'m", " WE", "'LL", " ", "123", "45½", " foo", "_bar", "\r\n\n", " ", " naïve",
             " ", "中文ー", "!!/\n", " x"]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("gpt-2",), GPT2),
        (("smollm", "starcoder", "refact"), DIGITS),
        (("llama-bpe", "llama-v3", "llama3"), LLAMA3),
        (("qwen2",), QWEN2),
        (("tekken",), TEKKEN),
        (("deepseek-v3",), DEEPSEEK3),
    ],
)
def test_a_text_is_cut_as_its_pre_tokenizer_does(names, expected):
    for name in names:
        assert cuts(name)(SAMPLE) == expected, name


@given(TEXTS)
def test_llama_cpp_s_own_cut_of_smollm_is_the_same(text):
    """It splits digits off and then by GPT-2's expression, which it writes without `|\\s+`."""
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
    theirs = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex(gpt2), "isolated"),
        ]
    )
    found = [text[start:end] for _, (start, end) in theirs.pre_tokenize_str(text)]
    assert cuts("smollm")(text) == found


@given(TEXTS)
def test_qwen2_and_gpt2_are_those_of_transformers(text):
    for name, cls in (("qwen2", "Qwen2Tokenizer"), ("gpt-2", "GPT2Tokenizer")):
        metadata = gguf_files.byte_level(**{"tokenizer.ggml.pre": name})
        vocab = {t: i for i, t in enumerate(metadata["tokenizer.ggml.tokens"])}
        merges = [tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"]]
        theirs = transformers_class(cls)(vocab=vocab, merges=merges)
        ids = theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert made(metadata).encode(text, add_special_tokens=False) == ids


# --- byte-level BPE -----------------------------------------------------------------------------


@given(TEXTS)
def test_byte_level_text_comes_back_whatever_it_is(text):
    tokenizer = made(gguf_files.byte_level())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_taken_whole_and_user_s_own_are_not_left_out():
    tokenizer = made(gguf_files.byte_level())
    ids = tokenizer.encode("the<|im_end|><tool>the")
    assert len(ids) == 6 and 3 in ids and 4 in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the<tool>the"
    named = tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token
    assert named == ("<s>", "</s>", "<unk>") and tokenizer.model_max_length == 64


def test_a_piece_that_is_a_token_needs_no_merges_where_the_name_says_so():
    metadata = gguf_files.byte_level()
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.merges"][:1]
    whole = made(metadata | {"tokenizer.ggml.pre": "llama-bpe"})
    assert len(whole.encode("abc", add_special_tokens=False)) == 1
    assert len(made(metadata | {"tokenizer.ggml.pre": "qwen2"}).encode("abc")) == 3


@pytest.mark.parametrize(
    ("changes", "first", "last"),
    [
        ({}, None, None),
        ({"tokenizer.ggml.add_bos_token": True}, 1, None),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, 1, 2),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": None}, 1, None),
        ({"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.add_bos_token": None}, None, None),
    ],
    ids=str,
)
def test_what_stands_around_a_text_is_what_the_file_says(changes, first, last):
    metadata = {k: v for k, v in gguf_files.byte_level(**changes).items() if v is not None}
    ids, inside = (made(metadata).encode("ab", add_special_tokens=x) for x in (True, False))
    assert ids == [*([first] if first else []), *inside, *([last] if last else [])]


# --- SentencePiece ------------------------------------------------------------------------------


def by_score(metadata, text):
    """SentencePiece's choice of pieces: again and again the adjacent pair whose union has the
    highest score, the leftmost of equals; characters that are no token become bytes."""
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds, scores = metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.scores"]
    text_ids = {t: i for i, t in enumerate(tokens) if kinds[i] == 1}
    parts = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        pairs = [
            (scores[text_ids[a + b]], -i)
            for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
            if a + b in text_ids
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = []
    for part in parts:
        bytes_of = [tokens.index(f"<0x{byte:02X}>") for byte in part.encode("utf-8")]
        ids += [text_ids[part]] if part in text_ids else bytes_of
    return ids


@given(st.one_of(TEXTS, st.text("theandilg ", max_size=24)))
def test_pieces_are_those_of_the_highest_scores(text):
    metadata = gguf_files.sentencepiece()
    tokenizer = made(metadata)
    assert tokenizer.encode(text, add_special_tokens=False) == by_score(metadata, text)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_behind_a_special_token_a_space_is_put_as_llama_cpp_does():
    tokenizer = made(gguf_files.sentencepiece())
    ids = tokenizer.encode("the<|im_end|>the")
    the = tokenizer.convert_tokens_to_ids("▁the")
    assert ids == [1, the, 3, the]
    bare = made(gguf_files.sentencepiece(**{"tokenizer.ggml.add_space_prefix": False}))
    assert bare.convert_ids_to_tokens(bare.encode("the")) == ["<s>", "t", "he"]


def test_merges_of_the_file_come_before_those_of_scores():
    metadata = gguf_files.sentencepiece(**{"tokenizer.ggml.merges": ["h e", "t h"]})
    tokens = made(metadata).tokenize("the")
    assert tokens == ["▁", "t", "he"]


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (
            gguf_files.byte_level(**{"tokenizer.ggml.pre": "gpt-4o"}),
            'pre "gpt-4o" is not',
        ),
        (gguf_files.byte_level(**{"tokenizer.ggml.pre": "default"}), 'pre "default" is not'),
        (gguf_files.byte_level(**{"tokenizer.ggml.pre": None}), "pre is absent"),
        (gguf_files.byte_level(**{"tokenizer.ggml.model": "t5"}), 'model "t5" is not supported'),
        (gguf_files.byte_level(**{"tokenizer.ggml.add_space_prefix": True}), "add_space_prefix"),
        (gguf_files.byte_level(**{"tokenizer.ggml.merges": ["ab"]}), "pairs of pieces ('ab' is"),
        (gguf_files.byte_level(**{"tokenizer.ggml.merges": ["q zz"]}), "cannot be built"),
        (gguf_files.byte_level(**{"tokenizer.ggml.token_type": [1]}), "integers, one per token"),
        (gguf_files.byte_level(**{"tokenizer.ggml.tokens": ["a", "a"]}), "'a' occurs twice"),
        (gguf_files.byte_level(**{"tokenizer.ggml.bos_token_id": 9999}), "bos_token_id"),
        (gguf_files.sentencepiece(**{"tokenizer.ggml.pre": "qwen2"}), "expected default"),
        (gguf_files.sentencepiece(**{"tokenizer.ggml.scores": [0.0]}), "numbers, one per token"),
        (gguf_files.sentencepiece(**{"tokenizer.ggml.remove_extra_whitespaces": True}), "extra"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tokenizer_that_is_not_known_exactly_is_refused(metadata, words):
    metadata = {k: v for k, v in metadata.items() if v is not None}
    with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        made(metadata)
    assert words in str(caught.value) and str(FILE) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_what_is_built_is_a_tokenizer_json_that_the_library_writes_again():
    """No part of the description is dropped or replaced on the way through the library."""
    core = made(gguf_files.sentencepiece()).backend_tokenizer
    assert isinstance(core.model, models.BPE) and isinstance(core.normalizer, normalizers.Sequence)
    assert Tokenizer.from_str(core.to_str()).to_str() == core.to_str()
