"""Finds the letter of a multiple-choice answer.

The answer of a completion is the content of the last `<answer>...</answer>`, else what
`train.answers.extract.final_answer` finds, else the last line that is not empty. Its letter is the
one that it begins with: `B`, `(B)`, `b)`, `**B**`, `B. Paris`, `\\text{B}`, `option B`.
"""

from __future__ import annotations

import re

from train.answers.extract import final_answer

_TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL | re.IGNORECASE)
_BEFORE = r"[\s*_$\"'`]*(?:(?i:option|choice|answer)\b\W{0,5})?(?:\\(?:text|mathrm|textbf)\s*\{)?"
_LETTER = re.compile(
    _BEFORE + r"(?:[(\[{]\s*([A-Z])\s*[)\]}]"  # (B)
    r"|([A-Z])\s*(?:[).:,}\]*_$\"'`-]|$)"  # B. B) B: **B**
    r"|([B-HJ-Z])\s"  # B because ..; a sentence may begin with A and I
    r"|([AI])\s+(?:because|since|as|is|and)\b)"
)
_ALONE = re.compile(r"\W*([a-z])\W*")  # b, (b), b.


def letter_of(text: str) -> str | None:
    """The letter that an answer begins with, as a capital; None if it begins with none."""
    alone = _ALONE.fullmatch(text)
    if alone:
        return alone[1].upper()
    found = _LETTER.match(text.strip())
    return None if found is None else next(group for group in found.groups() if group)


def chosen_letter(completion: str) -> str | None:
    """The letter of a completion's answer; None if it has none."""
    tagged = _TAGGED.findall(completion)
    answer = tagged[-1] if tagged else final_answer(completion)
    if answer is None:
        lines = [line for line in completion.splitlines() if line.strip()]
        answer = lines[-1] if lines else ""
    return letter_of(answer)
