"""Tokenizers, from Hugging Face directories."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from specjax.checkpoint_files import Keys, pointer_problem, read_json
from specjax.checkpoint_format import CheckpointError, first_line
from specjax.config import ModelConfig

# Read by transformers when it is imported.
_NO_NOTICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
_SETTINGS = "tokenizer_config.json"
# Each holds a vocabulary on its own, or with files beside it.
_VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "qwen.tiktoken",
)  # fmt: skip
_OBJECTS = ("special_tokens_map.json", "added_tokens.json")
_OTHERS = (_SETTINGS, *_OBJECTS, "merges.txt", "chat_template.jinja", "chat_template.json")
_MODELS = ("BPE", "Unigram", "WordLevel", "WordPiece")


def transformers_class(name: str) -> type:
    """A class of transformers, imported without its notice that torch is missing.

    Nothing here needs torch, so the notice would only mislead. The user's own value of
    `TRANSFORMERS_NO_ADVISORY_WARNINGS` is left as it is.
    """
    before = os.environ.get(_NO_NOTICE)
    os.environ.setdefault(_NO_NOTICE, "1")
    try:
        return getattr(importlib.import_module("transformers"), name)
    finally:
        if before is None:
            del os.environ[_NO_NOTICE]


def load_tokenizer(path: str | Path, required: bool = True):
    """The tokenizer of a local directory, or None when it has none and `required` is false.

    The class named in `tokenizer_config.json` is taken at its word: `AutoTokenizer` would rebuild a
    plain fast tokenizer as the class of the model's family, with other ids. Code that lies in the
    directory is never run.

    Raises:
      FileNotFoundError: there is no tokenizer and it is required.
      CheckpointError: its files are damaged, Git LFS pointers, or of a type that is not known.
    """
    path = Path(path)
    if not any((path / name).exists() for name in ("tokenizer.json", _SETTINGS)):
        if not required:
            return None
        raise FileNotFoundError(
            f"{path} has no tokenizer.json; copy the model's tokenizer files there"
        )
    _check_contents(path)
    named = _checked_settings(path)
    plain = named in ("PreTrainedTokenizerFast", "TokenizersBackend")
    # The second takes seconds to import where torch is installed.
    tokenizer = transformers_class("PreTrainedTokenizerFast" if plain else "AutoTokenizer")
    options = {} if plain else {"trust_remote_code": False}
    try:
        return tokenizer.from_pretrained(path, **options)
    except Exception as error:  # tokenizers raises what it finds, down to bare Exceptions
        _diagnose(path)
        raise CheckpointError(
            f"{path}: the tokenizer cannot be read ({first_line(error)}); fetch its files again, "
            "or use versions of transformers and tokenizers that know it"
        ) from error


def check_files(path: Path) -> None:
    """Checks what can be said of tokenizer files without transformers, for those that copy them.

    Raises:
      CheckpointError: one of them is damaged, a Git LFS pointer, or of a type that is not known.
    """
    _check_contents(path)
    _checked_settings(path)
    _diagnose(path)


def _check_contents(path: Path) -> None:
    """Raises `CheckpointError` for a pointer in place of a file, or a missing vocabulary."""
    for name in (*_VOCABULARIES, *_OTHERS):
        problem = pointer_problem(path / name)
        if problem:
            raise CheckpointError(problem)
    if not any((path / name).is_file() for name in _VOCABULARIES):
        raise CheckpointError(
            f"{path} has tokenizer files and no vocabulary; expected tokenizer.json: copy the "
            "model's tokenizer files there"
        )


def _checked_settings(path: Path) -> str | None:
    """The class that tokenizer_config.json names, once its keys have been checked."""
    file = path / _SETTINGS
    if not file.exists():
        return None
    keys = Keys(file, read_json(file))
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        if isinstance(keys.raw.get(name), dict):
            keys.within(name).text("content")
        else:
            keys.text(name, None)
    template = keys.raw.get("chat_template")
    named = isinstance(template, list) and all(isinstance(item, dict) for item in template)
    if not named and not isinstance(template, str | None):
        raise keys.error("chat_template", "a template, a list of named templates, or null")
    for name in ("add_bos_token", "add_eos_token"):
        keys.flag(name, None)
    for token in keys.within("added_tokens_decoder").raw:
        keys.within("added_tokens_decoder").within(token).text("content")
    return keys.text("tokenizer_class", None)


def _diagnose(path: Path) -> None:
    """Raises `CheckpointError` where it is plain what is wrong with files that cannot be read."""
    for name in ("tokenizer.json", *_OBJECTS):
        if (path / name).exists():
            read_json(path / name)
    if (path / "tokenizer.json").exists():
        keys = Keys(path / "tokenizer.json", read_json(path / "tokenizer.json"))
        keys.within("model").text("type", None, _MODELS)


def with_tokenizer_end(cfg: ModelConfig, tokenizer) -> ModelConfig:
    """The config whose end-of-sequence tokens are the checkpoint's and the tokenizer's.

    Where the two files of a checkpoint disagree, what the model was trained to end with is one of
    them. A token beyond the vocabulary, as transformers adds one to a tokenizer that names none,
    cannot be generated, and is left out.
    """
    end = getattr(tokenizer, "eos_token_id", None)
    if end is None or end in cfg.eos_token_ids or not 0 <= end < cfg.vocab_size:
        return cfg
    return cfg.replace(eos_token_ids=(*cfg.eos_token_ids, end))
