"""Tokenizers, from Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path


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
    if named in ("PreTrainedTokenizerFast", "TokenizersBackend"):
        from transformers import PreTrainedTokenizerFast as Tokenizer
    else:  # takes seconds to import where torch is installed
        from transformers import AutoTokenizer as Tokenizer
    return Tokenizer.from_pretrained(path)
