"""Tokenizers as checkpoints have them, built anew and saved."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

BOS, EOS, END = "<s>", "</s>", "<|im_end|>"
SPECIAL = ["<unk>", BOS, EOS, END]
WITH_BOS = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
WITHOUT_BOS = WITH_BOS.removeprefix("{{ bos_token }}")


def sentencepiece_like(byte_fallback: bool = True) -> Tokenizer:
    """`▁` for spaces, and `<0x0A>` for the bytes of what has no token."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.:", "th", "▁th", "▁the", "he", "é"]
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("h", "e")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=byte_fallback))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def byte_level() -> Tokenizer:
    """GPT-2's alphabet: `Ġ` is a space."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate([*SPECIAL, *alphabet, "th", "Ġth", "Ġthe"])}
    merges = [("t", "h"), ("Ġ", "th"), ("Ġth", "e")]
    made = Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def metaspace() -> Tokenizer:
    """`▁` for spaces as newer conversions write it, without bytes."""
    made = sentencepiece_like(byte_fallback=False)
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made


KINDS = {"sentencepiece": sentencepiece_like, "byte level": byte_level, "metaspace": metaspace}


def save(
    folder: Path,
    kind: str,
    prepends: bool = False,
    template: str | None = None,
    **settings,
) -> Path:
    """Writes a tokenizer of `KINDS`.

    Args:
      prepends: its post-processor puts BOS in front. settings: of `tokenizer_config.json`.
    """
    made = KINDS[kind]()
    made.add_special_tokens(SPECIAL)
    if prepends:
        made.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A",
            pair=f"{BOS} $A {BOS} $B",
            special_tokens=[(BOS, made.token_to_id(BOS))],
        )
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        **({} if template is None else {"chat_template": template}),
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder
