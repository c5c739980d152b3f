"""A tokenizer that is trained on the texts that a policy from nothing is trained on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from specjax.tokenizer import transformers_class

PAD_TOKEN, EOS_TOKEN = "<|pad|>", "<|eos|>"


def train_bpe_tokenizer(texts: Iterable[str], vocab_size: int, out_dir: str | Path):
    """Trains a byte-level BPE tokenizer with single digits, and saves it for `AutoTokenizer`.

    Args:
      texts: training texts; prompts and responses are separate items, as they are encoded.
      vocab_size: largest size of the vocabulary, special tokens and the 256 bytes included.
      out_dir: directory for `tokenizer.json` and `tokenizer_config.json`.

    Returns:
      The `transformers.PreTrainedTokenizerFast`, with `<|pad|>` as id 0 and `<|eos|>` as id 1.

    Raises:
      ValueError: the vocabulary is too small for bytes and special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = [PAD_TOKEN, EOS_TOKEN]
    if vocab_size < 256 + len(special):
        raise ValueError(
            f"vocab_size must be at least {256 + len(special)} (256 bytes and {len(special)} "
            f"special tokens), got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = transformers_class("PreTrainedTokenizerFast")(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(out_dir)
    # transformers 5 writes a class name that 4 does not know; both know this one.
    config_path = Path(out_dir) / "tokenizer_config.json"
    config = json.loads(config_path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return fast
