"""Tokenizers, from Hugging Face directories."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

# Read by transformers when it is imported.
_NO_NOTICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


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
    plain fast tokenizer as the class of the model's family, with other ids.

    Raises:
      FileNotFoundError: there is no tokenizer and it is required.
    """
    path = Path(path)
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        if not required:
            return None
        raise FileNotFoundError(
            f"{path} has no tokenizer.json; copy the model's tokenizer files there"
        )
    settings = path / "tokenizer_config.json"
    named = json.loads(settings.read_text()).get("tokenizer_class") if settings.exists() else None
    plain = named in ("PreTrainedTokenizerFast", "TokenizersBackend")
    # The second takes seconds to import where torch is installed.
    tokenizer = transformers_class("PreTrainedTokenizerFast" if plain else "AutoTokenizer")
    return tokenizer.from_pretrained(path)
