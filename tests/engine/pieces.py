"""A tokenizer of 64 pieces: most are one letter, some two or three, token 0 is special."""

import string

SPECIAL = "<s>"
PIECES = (
    [SPECIAL, *string.ascii_lowercase, " ", ".", "\n"]
    + ["ab", "bc", "cd", "abc", "bcd", " a", " b", "e.", "st", "op", "sto", "top"]
    + list(string.ascii_uppercase[:22])
)
assert len(PIECES) == len(set(PIECES)) == 64


class Pieces:
    """As much of a Hugging Face tokenizer as `LLM` uses; encoding takes the longest piece."""

    chat_template = None

    def encode(self, text, add_special_tokens=True):
        ids, at = [0] if add_special_tokens else [], 0
        while at < len(text):
            piece = max((p for p in PIECES[1:] if text.startswith(p, at)), key=len)
            ids.append(PIECES.index(piece))
            at += len(piece)
        return ids

    def decode(self, ids, skip_special_tokens=False):
        return "".join(PIECES[i] for i in ids if i or not skip_special_tokens)
