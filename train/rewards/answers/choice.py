"""Finds the letter of a multiple-choice answer.

The answer of a completion is the content of the last `<answer>...</answer>`, else what
`final_answer` of `extract.py` finds, else the last line that is not empty. Its letter is the one
that it begins with: `B`, `(B)`, `b)`, `**B**`, `B. Paris`, `\\text{B}`, `option B`. An answer
of several letters, such as `A, C` or `(B) or (C)`, has none.
"""

from __future__ import annotations

import re

from train.rewards.answers.extract import final_answer, tagged_answer

_MACRO = r"(?:\\(?:text|mathrm|textbf)\s*\{)?"
_BEFORE = r"[\s*_$\"'`]*(?:(?i:option|choice|answer)\b\W{0,5})?" + _MACRO
_LETTER = re.compile(
    _BEFORE + r"(?:[(\[{]\s*([A-Z])\s*[)\]}]"  # (B)
    r"|([A-Z])\s*(?:[).:,;}\]*_$\"'`-]|$)"  # B. B) B: **B**
    r"|([B-HJ-Z])\s(?!\s*[=<>^])"  # B because .., but not E = mc^2
    r"|([AI])\s+(?:because|since|as|is|and|or)\b"  # for a sentence may begin with A and I
    r"|[(\[]\s*([a-z])\s*[)\]](?!\w)"  # (b) Paris
    r"|([a-z])\s*[).:](?=\s|$)"  # b. Paris
    r")|[\s*_$\"'`]*(?i:option|choice)\s+([a-z])(?![\w'])"  # option b
)
_ALONE = re.compile(r"\W*([a-z])\W*")  # b, (b), b.
# What follows a letter if the answer has further letters: `A, C`, `B or C`, `(A) and (C)`, `B C`.
_FURTHER = re.compile(
    r"(?:[\s)\]}*_$\"'`.]*(?:\\?[,;&/+]|\b(?:and|or)\b)(?:[\s\\,;&/+]|and\b|or\b)*|\s*[)\]]\s*(?=[(\[])|\s+)"
    r"(?:(?i:options?|choices?)\b\W{0,5})?[\s*_$\"'`]*" + _MACRO + r"(?:[(\[{]\s*[A-Za-z]\s*[)\]}]"
    r"|[B-HJ-Z](?![\w'])|[AI](?![\w']|\s+(?!and\b|or\b)[a-z]))"
)


def letter_of(text: str) -> str | None:
    """The letter that an answer begins with, as a capital.

    Returns:
      The letter; None if the answer begins with none, or with several.
    """
    alone = _ALONE.fullmatch(text)
    if alone:
        return alone[1].upper()
    text = " ".join(text.split())  # several spaces in a row would take quadratic time
    found = _LETTER.match(text)
    if found is None or _FURTHER.match(text, found.end(found.lastindex)):
        return None
    return found[found.lastindex].upper()


def chosen_letter(completion: str) -> str | None:
    """The letter of a completion's answer; None if it has none."""
    tagged = tagged_answer(completion)
    answer = final_answer(completion if tagged is None else tagged) or tagged
    if answer is None:
        lines = [line for line in completion.splitlines() if line.strip()]
        answer = lines[-1] if lines else ""
    return letter_of(answer)
