"""The tokenizer of a GGUF file.

`tokenizer.ggml.model` is `gpt2`, byte-level BPE with merges, or `llama`, SentencePiece's BPE whose
merges follow from scores. The file does not hold the rules that split text before BPE:
`tokenizer.ggml.pre` names them, and `PRE` has them as in the tokenizer.json of those models.
Unknown names are refused, because other rules would silently give other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from specjax.checked_json import CheckpointError, Keys, UnsupportedModelError, shown
from specjax.error_text import first_line
from specjax.tokenizer import transformers_class

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # `tokenizer.ggml.token_type`
# Tokens that end a turn or a message wherever a file has them, as in llama.cpp (`llama-vocab.cpp`):
# many files name only one of theirs as `eos_token_id`.
END_NAMES = frozenset(
    (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
        "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
        "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
        "<｜end▁of▁sentence｜>", "[e~[",
    )
)  # fmt: skip
_SPACE = "\u2581"  # SentencePiece's symbol for a space
_IDS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
_REMEDY = (
    "put the model's own tokenizer.json into a directory with the file, and name the directory"
)


class Pre(NamedTuple):
    """How text is split and BPE applied.

    Attributes:
      splits: expressions whose matches are pieces of their own, in order; where there is none,
        GPT-2's expression splits the text.
      digits: whether each digit is a piece of its own.
      nfc: whether Unicode's normal form C is applied first.
      ignore_merges: whether a piece that is a token is used without applying merges.
      add_bos: whether to add a begin token if the file does not say.
    """

    splits: tuple[str, ...] = ()
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_STARCODER = Pre(digits=True)
_LLAMA_BPE = Pre((_LLAMA3,), ignore_merges=True, add_bos=True)
PRE = {
    "gpt-2": Pre(),
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "llama-bpe": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "tekken": Pre((_TEKKEN,), ignore_merges=True, add_bos=True),
    "qwen2": Pre((_QWEN2,), nfc=True),
    "deepseek-v3": Pre((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)),
}


class _Vocabulary(NamedTuple):
    """The tokens, and the kind of each."""

    tokens: list[str]
    kinds: Sequence[int]

    @property
    def ids(self) -> dict[str, int]:
        """Returns the ids of tokens, without those that only pad the embedding."""
        pairs = enumerate(zip(self.tokens, self.kinds, strict=True))
        return {
            token: i for i, (token, kind) in pairs if not (kind == _UNUSED and token == f"[PAD{i}]")
        }


def tokenizer_of(file: Path, metadata: Mapping[str, Any], most: int) -> Any:
    """Makes a `transformers.PreTrainedTokenizerFast` from a file's metadata.

    Args:
      file: path of the file, for messages.
      metadata: the file's keys and values.
      most: largest number of tokens in the model's context.

    Raises:
      CheckpointError: a key is absent, or its value is invalid.
      UnsupportedModelError: the kind of tokenizer, or the rules that split text, are unknown.
    """
    keys = Keys(file, metadata)
    kind = keys.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{file}: tokenizer.ggml.model {shown(kind)} is not supported; expected gpt2 or llama"
        )
    vocabulary = _vocabulary(keys)
    tokens = vocabulary.tokens
    named = {
        name: tokens[token]
        for name, key in _IDS.items()
        for token in keys.token_ids(f"tokenizer.ggml.{key}_token_id", len(tokens))
    }
    try:
        build = _byte_level if kind == "gpt2" else _sentencepiece
        core = build(keys, vocabulary)
        for content, kind in zip(tokens, vocabulary.kinds, strict=True):
            if kind == _USER_DEFINED:
                core.add_tokens([AddedToken(content, normalized=False)])
            elif kind in (_UNKNOWN, _CONTROL):
                core.add_special_tokens([AddedToken(content, normalized=False)])
        found = transformers_class("PreTrainedTokenizerFast")(
            tokenizer_object=core,
            model_max_length=most,
            clean_up_tokenization_spaces=False,
            **named,
        )
    except (CheckpointError, UnsupportedModelError):
        raise
    except Exception as error:  # tokenizers raises many types, bare Exception included
        raise CheckpointError(
            f"{file}: its tokenizer cannot be built ({first_line(error)}); fetch the file again, "
            f"or {_REMEDY}"
        ) from error
    found.chat_template = _templates(keys)
    return found


def _vocabulary(keys: Keys) -> _Vocabulary:
    tokens = keys.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise keys.error("tokenizer.ggml.tokens", "a list of tokens")
    if len(set(tokens)) != len(tokens):
        twice = next(t for i, t in enumerate(tokens) if tokens.index(t) != i)
        raise keys.error("tokenizer.ggml.tokens", f"distinct tokens ({twice!r} occurs twice)")
    kinds = keys.raw.get("tokenizer.ggml.token_type")
    if kinds is None:
        kinds = [1] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise keys.error("tokenizer.ggml.token_type", f"{len(tokens)} integers, one per token")
    ends = end_names(tokens)
    kinds = [_CONTROL if t in ends else kind for t, kind in zip(tokens, kinds, strict=True)]
    return _Vocabulary(tokens, kinds)


def end_names(tokens: Sequence[str]) -> frozenset[str]:
    """Returns the tokens that end a turn by their names.

    In vocabularies with `<|return|>` and `<|call|>`, or `<|flush|>`, `<|end|>` ends a part of one.
    """
    found = END_NAMES & {*tokens}
    harmony = {"<|call|>", "<|calls|>"} & found and {"<|return|>", "<|flush|>"} & found
    return found - {"<|end|>"} if harmony else found


def _byte_level(keys: Keys, vocabulary: _Vocabulary) -> Tokenizer:
    """Makes BPE over bytes that are written as characters."""
    name = keys.text("tokenizer.ggml.pre", None)
    if name not in PRE:
        said = "is absent" if name is None else f"{shown(name)} is not supported"
        raise UnsupportedModelError(
            f"{keys.file}: tokenizer.ggml.pre {said}, and other rules split text into other "
            f"tokens; expected one of {', '.join(PRE)}: {_REMEDY}"
        )
    if keys.flag("tokenizer.ggml.add_space_prefix", None):
        raise UnsupportedModelError(
            f"{keys.file}: tokenizer.ggml.add_space_prefix true is not supported beside "
            f"tokenizer.ggml.model gpt2; {_REMEDY}"
        )
    pre = PRE[name]
    bpe = models.BPE(vocab=vocabulary.ids, merges=_merges(keys), ignore_merges=pre.ignore_merges)
    core = Tokenizer(bpe)
    if pre.nfc:
        core.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    steps += [pre_tokenizers.Split(Regex(regex), "isolated") for regex in pre.splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pre.splits))
    core.pre_tokenizer = pre_tokenizers.Sequence(steps)
    core.decoder = decoders.ByteLevel()
    _add_ends(core, keys, vocabulary, pre.add_bos)
    return core


def _sentencepiece(keys: Keys, vocabulary: _Vocabulary) -> Tokenizer:
    """Makes SentencePiece's BPE.

    Spaces become `_SPACE`, one is added before every text after a special token, and characters
    without a token become bytes.
    """
    name = keys.text("tokenizer.ggml.pre", "default")
    if name != "default":
        raise UnsupportedModelError(
            f"{keys.file}: tokenizer.ggml.pre {shown(name)} is not supported beside "
            f"tokenizer.ggml.model llama; expected default: {_REMEDY}"
        )
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        value = keys.raw.get(f"tokenizer.ggml.{key}")
        if value:
            raise UnsupportedModelError(
                f"{keys.file}: tokenizer.ggml.{key} {shown(value)} is not supported; {_REMEDY}"
            )
    prefix = keys.flag("tokenizer.ggml.add_space_prefix", True)
    merges = _merges(keys) if "tokenizer.ggml.merges" in keys.raw else _by_score(keys, vocabulary)
    (unknown,) = keys.token_ids("tokenizer.ggml.unknown_token_id", len(vocabulary.tokens)) or [0]
    core = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=merges,
            unk_token=vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in vocabulary.kinds,
        )
    )
    before = [normalizers.Prepend(_SPACE)] if prefix else []
    core.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if prefix else []
    core.decoder = decoders.Sequence(steps)
    _add_ends(core, keys, vocabulary, True)
    return core


def _merges(keys: Keys) -> list[tuple[str, str]]:
    """Reads the merges of a file, each as two pieces with a space between them."""
    pairs = []
    for merge in keys.texts("tokenizer.ggml.merges"):
        cut = merge.find(" ", 1)
        if cut < 0:
            raise keys.error("tokenizer.ggml.merges", f"pairs of pieces ({merge!r} is none)")
        pairs.append((merge[:cut], merge[cut + 1 :]))
    return pairs


def _by_score(keys: Keys, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Makes the merges of SentencePiece: all pairs whose union is a piece, by descending score."""
    scores = keys.raw.get("tokenizer.ggml.scores")
    count = len(vocabulary.tokens)
    numbers = isinstance(scores, list) and all(isinstance(s, (int, float)) for s in scores)
    if not numbers or len(scores) != count:
        raise keys.error("tokenizer.ggml.scores", f"{count} numbers, one per token")
    text = {
        token: i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind not in (_UNKNOWN, _CONTROL, _BYTE) and token in vocabulary.ids
    }
    longer = [token for token in text if len(token) > 1]
    if len(longer) > 1 and len({scores[text[token]] for token in longer}) == 1:
        raise UnsupportedModelError(
            f"{keys.file}: tokenizer.ggml.scores are all equal and give no order of merges; "
            f"{_REMEDY}"
        )
    pairs = [
        (-scores[i], text[token[:cut]], text[token[cut:]], token[:cut], token[cut:])
        for token, i in text.items()
        for cut in range(1, len(token))
        if token[:cut] in text and token[cut:] in text
    ]
    return [(left, right) for *_, left, right in sorted(pairs)]


def _add_ends(core: Tokenizer, keys: Keys, vocabulary: _Vocabulary, add_bos: bool) -> None:
    """Lets a tokenizer add tokens before and after every text, as the file says.

    Args:
      add_bos: whether to add a begin token if the file does not say.
    """
    tokens = {}
    for name, default in (("bos", add_bos), ("eos", False)):
        found = keys.token_ids(f"tokenizer.ggml.{name}_token_id", len(vocabulary.tokens))
        if keys.flag(f"tokenizer.ggml.add_{name}_token", default):
            if not found:
                raise keys.error(
                    f"tokenizer.ggml.{name}_token_id", f"a token, because add_{name}_token is true"
                )
            tokens[name] = vocabulary.tokens[found[0]], found[0]
    if tokens:
        begin, end = ([tokens[n][0]] if n in tokens else [] for n in ("bos", "eos"))
        second = [f"{piece}:1" for piece in (*begin, "$B", *end)]
        core.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end],
            pair=[*begin, "$A", *end, *second],
            special_tokens=[*tokens.values()],
        )


def _templates(keys: Keys) -> str | dict[str, str] | None:
    """Returns the chat template, or several of them by name."""
    default = keys.text("tokenizer.chat_template", None)
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): keys.text(key) for key in keys.raw if key.startswith(prefix)}
    if not named:
        return default
    return named if default is None else {"default": default, **named}
