"""Tokenizers, from Hugging Face directories, and the token ids of prompts and conversations."""

from __future__ import annotations

import datetime
import functools
import importlib
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.checked_json import CheckpointError, Keys, pointer_problem, read_json
from specjax.config import ModelConfig
from specjax.error_text import first_line

_SETTINGS = "tokenizer_config.json"
_VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "qwen.tiktoken",
)  # fmt: skip
# All files of a tokenizer, and the directory of its further chat templates.
TOKENIZER_FILES = (
    *_VOCABULARIES, _SETTINGS, "special_tokens_map.json", "added_tokens.json", "merges.txt",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
MORE_TEMPLATES = "additional_chat_templates"


def transformers_class(name: str) -> type:
    """Imports a class of transformers, without its notice that torch is missing.

    specjax does not need torch. The user's own value of `TRANSFORMERS_NO_ADVISORY_WARNINGS` stays.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    return getattr(importlib.import_module("transformers"), name)


def load_tokenizer(path: str | Path):
    """Loads the tokenizer of a local directory; returns None if it has none.

    The class is the one that `tokenizer_config.json` names: `AutoTokenizer` would rebuild a plain
    fast tokenizer as the class of the model's family, with other ids. Code in the directory is
    never run.

    Raises:
      CheckpointError: tokenizer files are damaged, Git LFS pointers, or of an unknown type.
    """
    path = Path(path)
    if not any((path / name).exists() for name in ("tokenizer.json", _SETTINGS)):
        return None
    for name in TOKENIZER_FILES:
        if problem := pointer_problem(path / name):
            raise CheckpointError(problem)
    # Without one transformers makes an empty vocabulary.
    if not any((path / name).is_file() for name in _VOCABULARIES):
        raise CheckpointError(
            f"{path} has tokenizer files and no vocabulary; expected tokenizer.json: copy the "
            "model's tokenizer files there"
        )
    file = path / _SETTINGS
    keys = Keys(file, read_json(file) if file.exists() else {})
    plain = keys.text("tokenizer_class", None) in ("PreTrainedTokenizerFast", "TokenizersBackend")
    # `AutoTokenizer` takes seconds to import where torch is installed.
    tokenizer_class = transformers_class("PreTrainedTokenizerFast" if plain else "AutoTokenizer")
    options = {} if plain else {"trust_remote_code": False}
    try:
        tokenizer = tokenizer_class.from_pretrained(path, **options)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise CheckpointError(
            f"{path}: the tokenizer cannot be read ({first_line(error)}); fetch its files again, "
            "or use versions of transformers and tokenizers that know it"
        ) from error
    wanted, bos = keys.flag("add_bos_token", None), tokenizer.bos_token_id
    # transformers 5 ignores `add_bos_token` if tokenizer.json does not add BOS itself.
    if wanted and bos is not None and tokenizer.encode("a")[:1] != [bos]:
        tokenizer.add_bos_token = True
    return tokenizer


def with_tokenizer_end(cfg: ModelConfig, tokenizer) -> ModelConfig:
    """The config with the tokenizer's end-of-sequence token beside the checkpoint's.

    Where the two files of a checkpoint differ, the model was trained to end with one of them. A
    token beyond the vocabulary, which transformers adds to a tokenizer that names none, cannot be
    generated and is left out.
    """
    end = getattr(tokenizer, "eos_token_id", None)
    if end is None or end in cfg.eos_token_ids or not 0 <= end < cfg.vocab_size:
        return cfg
    return cfg.replace(eos_token_ids=(*cfg.eos_token_ids, end))


def decode(
    tokenizer,
    ids: Sequence[int],
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> str:
    """Returns the text of token ids, in which every space stays.

    A tokenizer whose settings have `clean_up_tokenization_spaces` would remove those before
    punctuation, and the text of a sample would not grow with its tokens.
    """
    # A tokenizer of the user's own need not take an option that it does not need.
    options = {} if spaces_between_special_tokens else {"spaces_between_special_tokens": False}
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        options["clean_up_tokenization_spaces"] = False
    return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, **options)


def check_ids(where: str, ids: Sequence[int], vocab: int, tokenizer=None) -> None:
    """Checks that a model with `vocab` tokens has these ids.

    A tokenizer may have more tokens than the model; the embedding of such a token would silently be
    that of another one.

    Args:
      where: name of the prompt, row or setting in messages.
      ids: token ids.
      vocab: number of tokens of the model.
      tokenizer: the tokenizer, which gives messages the token's text; None: there is none.

    Raises:
      ValueError: an id is negative, or not below `vocab`.
    """
    wrong = next((token for token in ids if not 0 <= token < vocab), None)
    if wrong is None:
        return
    text = ""
    if tokenizer is not None and wrong >= 0:
        text = decode(tokenizer, [wrong], skip_special_tokens=False)
    raise ValueError(
        f"{where} holds token id {wrong}{f' ({text!r})' if text else ''}; expected 0 <= id < "
        f"{vocab}, for the model has {vocab} tokens: use the tokenizer files that belong to the "
        "model, or leave that token out"
    )


def prompt_ids(tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    """Encodes a prompt, with the special tokens that the tokenizer puts around a text.

    Generation, the server and training all use this function, so that prompts are the same in all.
    If the tokenizer adds a beginning-of-sequence token (by its post-processor or `add_bos_token`),
    the ids begin with it exactly once, whether or not the text has it, too. Else they have it only
    where the text has it.

    Args:
      add_special_tokens: whether the tokenizer adds special tokens; False keeps those in the text.
    """
    if not add_special_tokens:
        return list(tokenizer.encode(text, add_special_tokens=False))
    ids = list(tokenizer.encode(text))
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return ids
    if ids[:1] != [bos]:
        # transformers 4 takes `add_bos_token` of some classes alone.
        return [bos, *ids] if getattr(tokenizer, "add_bos_token", False) else ids
    if ids[:2] != [bos, bos]:
        return ids
    text_ids = list(tokenizer.encode(text, add_special_tokens=False))
    return ids[1:] if ids[1 : 1 + len(text_ids)] == text_ids else ids  # drop the second of the two


def has_chat_template(tokenizer) -> bool:
    """Whether a tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def check_options(tokenizer, options: Mapping[str, Any]) -> None:
    """Raises ValueError for settings that a chat template does not read."""
    template = str(getattr(tokenizer, "chat_template", ""))
    if unread := [name for name in options if not re.search(rf"\b{re.escape(name)}\b", template)]:
        raise ValueError(f"chat_template_kwargs: the template reads no {', '.join(unread)}")


def chat_text(
    tokenizer,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    date: str | None = None,
    continue_final_message: bool = False,
) -> str:
    """Applies the tokenizer's chat template to a conversation.

    Args:
      messages: mappings with `role`, `content`, and other keys that the template reads.
      options: further variables of the template, such as `enable_thinking`.
      add_generation_prompt: whether to end with the beginning of the assistant's message.
      tools: JSON schemas of the functions that may be called.
      date: date, as YYYY-MM-DD, that the template's `strftime_now` gives; None for today's.
      continue_final_message: whether to end within the last message, which is to be continued.

    Raises:
      ValueError: there is no template, or it does not take the messages or options.
    """
    if not has_chat_template(tokenizer):
        raise ValueError("the model has no chat template")
    arguments = dict(options or {})
    # Prompts are many, and most have no options: the signature is read for those that have some.
    names = inspect.signature(tokenizer.apply_chat_template).parameters if arguments else ()
    if taken := [name for name in arguments if name in names and name != "documents"]:
        raise ValueError(f"chat_template_kwargs: {', '.join(taken)} is no variable of a template")
    try:
        if tools:
            arguments["tools"] = list(tools)
        if continue_final_message:
            arguments["continue_final_message"] = True
        if date is not None and reads_date(tokenizer):
            template = tokenizer.get_chat_template(tools=tools or None)
            arguments["chat_template"] = _DATE_MACRO + template
            arguments["date_parts"] = _date_parts(date)
        return tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **arguments,
        )
    except Exception as error:  # a template may raise anything
        cause = " ".join(str(error).split())
        raise ValueError(
            f"the chat template does not take these messages: {type(error).__name__}: {cause}"
        ) from error


# Hides transformers' `strftime_now`, which gives the time of now in the zone of the machine.
_DATE_MACRO = (
    "{%- macro strftime_now(format) -%}{%- set date = namespace(text=format) -%}"
    "{%- for code, part in date_parts.items() -%}"
    "{%- set date.text = date.text.replace(code, part) -%}"
    "{%- endfor -%}{{ date.text }}{%- endmacro %}\n"
)


@functools.lru_cache(maxsize=8)
def _date_parts(date: str) -> dict[str, str]:
    """Returns what each format code of `strftime` writes at midnight of a date, in UTC."""
    day = datetime.datetime.fromisoformat(date).replace(tzinfo=datetime.UTC)
    codes = [
        f"%{flag}{letter}" for letter in "aAwdbBmyYHIpMSfzZjUWcxXGuVeFDTR" for flag in ("-", "")
    ]
    return {code: day.strftime(code) for code in codes}


def reads_date(tokenizer) -> bool:
    """Whether a chat template can write the date: it reads `strftime_now`."""
    template = getattr(tokenizer, "chat_template", None)
    several = template.values() if isinstance(template, Mapping) else [template]
    return any("strftime_now" in (one or "") for one in several)


def chat_ids(
    tokenizer,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
    **arguments: Any,
) -> list[int]:
    """Encodes a conversation by the tokenizer's chat template.

    As in transformers and vLLM, the template writes the special tokens, BOS included, and none are
    added.

    Args:
      messages, options, add_generation_prompt: see `chat_text`, also for errors.
      add_special_tokens: whether to add the tokenizer's special tokens to the template's text.
      arguments: further arguments of `chat_text`.
    """
    text = chat_text(tokenizer, messages, options, add_generation_prompt, **arguments)
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
