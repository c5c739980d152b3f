"""Finds the final answer of a text.

The answer of a completion is the content of the last `\\boxed{}` or `\\fbox{}` with balanced
braces; else the text after the last `####`, unless that line is a heading (more text follows on
later lines); else the text after the last "answer is" or "answer:".

The letter of a multiple-choice answer is the one that it begins with: `B`, `(B)`, `b)`, `**B**`,
`B. Paris`, `\\text{B}`, `option B`. An answer of several letters, such as `A, C`, has none.
"""

from __future__ import annotations

import re
from typing import Any

ANSWER_MARK = "####"
LONGEST = 1000  # characters; a longer text is not parsed and counts as no answer
# `\{` is no grouping brace. `\boxed 5` is a box as in TeX, but holds all digits that follow.
_TOKEN = re.compile(
    r"(?P<open>(?P<box>\\(?:boxed|fbox)\s*)?\{)|\\(?:boxed|fbox)\s+(?P<bare>[^\s${}\\]*[^\s${}\\.,;])"
    r"|\\.|(?P<close>\})",
    re.DOTALL,
)
_NOT_SPACE = re.compile(r"\S")
_TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL | re.IGNORECASE)
_STATED = re.compile(r"\banswer(?:\s{1,20}is\b|[\s*]{0,20}:)[\s:*=]*", re.IGNORECASE)  # linear
# A formula in a text, or the end of the statement: of its sentence or line, or before a remark.
_MATH_OR_END = re.compile(
    r"\$\$([^$]+)\$\$|\$([^$\n]+)(?<!\\)\$(?!\d)|\\\((.+?)\\\)|\\\[((?s:.)+?)\\\]"
    r"|(?P<end>[.!?](?=\s|$|\*)|\n|,\s+(?:which|since|because|as|so|hence)\b)"
)


def last_line_answer(text: str) -> str | None:
    """The rest of the line after the last `####`, stripped; None if there is no such mark."""
    _, mark, rest = text.rpartition(ANSWER_MARK)
    if not mark:
        return None
    lines = rest.strip().splitlines()
    return lines[0].strip() if lines else ""


def boxed(text: str) -> str | None:
    """The content of the last box with balanced braces that is not empty; None without one.

    Of nested boxes the outer one is the answer. The time is linear in the length of the text.
    """
    found, opened = None, []  # open braces: (start of their content, whether they are a box's)
    for token in _TOKEN.finditer(text):
        if token["open"]:
            opened.append((token.end(), token["box"]))
        elif token["bare"]:
            found = token.span("bare")
        elif token["close"] and opened:
            start, is_box = opened.pop()
            if is_box and _NOT_SPACE.search(text, start, token.start()):
                found = start, token.start()
    if found is None:
        return None
    found = text[slice(*found)].strip()
    inner = re.sub(r"\\(?:boxed|fbox)\s*(?=\{)", "", found)
    while inner != found and inner.startswith("{") and inner.endswith("}"):
        found = inner = inner[1:-1].strip()
    return inner


def tagged_answer(text: str) -> str | None:
    """The content of the last `<answer>...</answer>`, or of a box in it; None without the tags."""
    tagged = _TAGGED.findall(text)
    if not tagged:
        return None
    found = boxed(tagged[-1])
    return tagged[-1].strip() if found is None else found


def last_part(completion: str) -> str | None:
    """The last `tagged_answer`, else the `final_answer`, else the last line that is not empty."""
    for read in (tagged_answer, final_answer):
        if (answer := read(completion)) is not None:
            return answer
    return next((x.strip() for x in reversed(completion.splitlines()) if x.strip()), None)


def final_answer(completion: str) -> str | None:
    """The answer of a completion by the module's rule, stripped; None if it has none.

    The text after "answer is" ends with its sentence. If the sentence ends in a single formula
    (`$...$`, `\\(...\\)`), the answer is that formula; with several formulas it is all the text.
    """
    found = boxed(completion)
    if found is None:
        found = _marked(completion)
    if found is None:
        found = _stated(completion)
    return found if found and len(found) <= LONGEST else None


def _marked(text: str) -> str | None:
    """The only line after the last `####`; None if more lines follow, as after a heading."""
    _, mark, rest = text.rpartition(ANSWER_MARK)
    lines = [line.strip() for line in rest.splitlines() if line.strip()]
    if not mark or len(lines) != 1:
        return None
    return _stated(lines[0]) or lines[0]  # `#### The answer is 5`


def _stated(text: str) -> str | None:
    """The text after the last "answer is" or "answer:"; None without these words."""
    places = list(_STATED.finditer(text))
    if not places:
        return None
    rest = text[places[-1].end() :].lstrip()[: 2 * LONGEST]
    formulas, end = [], len(rest)
    for piece in _MATH_OR_END.finditer(rest):
        if piece["end"] is not None:
            end = piece.start()
            break
        formulas.append(piece)
    sentence = rest[:end]
    if formulas and not re.search(r"\d", rest[: formulas[0].start()]):
        # With a number before the formula, both belong to the answer.
        sentence = sentence[formulas[0].start() :]
        if not sentence[len(formulas[0][0]) :].strip(" *.,;:"):
            return next(g for g in formulas[0].groups() if g is not None).strip()
    return sentence.strip().strip("*").strip()


# One gold answer, or several, of which any is right.
Gold = str | tuple[str, ...]


def each_gold(answer: Any) -> tuple[str, ...]:
    """A row's gold answers as a tuple; any of them is right. Empty for what is no `Gold`."""
    if isinstance(answer, str):
        return (answer,)
    several = isinstance(answer, (list, tuple)) and all(isinstance(one, str) for one in answer)
    return tuple(answer) if several else ()


def gold_answer(answer: str) -> str:
    """The answer in a row's text: its last box, the line after the last `####`, or all of it."""
    found = boxed(answer)
    if found is None:
        found = last_line_answer(answer)
    return answer.strip() if found is None else found


def stated_gold(answer: str) -> str:
    """`gold_answer` without an introductory phrase: 42 for `Final Answer: 42`."""
    gold = gold_answer(answer)
    return (_stated(gold) or gold) if _ANNOUNCED.match(gold) else gold


_ANNOUNCED = re.compile(r"\W{0,9}(?:the )?(?:final |correct )?answer\b", re.IGNORECASE)


# --- multiple choice -----------------------------------------------------------------------------

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
    """The letter of a completion's answer, the `last_part` of it; None if it has none."""
    part = last_part(completion) or ""
    return letter_of(final_answer(part) or part)
