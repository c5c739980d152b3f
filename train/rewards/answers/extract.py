"""Finds the final answer of a text.

The answer of a completion is the content of the last `\\boxed{}` or `\\fbox{}` with balanced
braces; else the text after the last `####`, unless that line is a heading (more text follows on
later lines); else the text after the last "answer is" or "answer:".
"""

from __future__ import annotations

import re
from typing import Any

ANSWER_MARK = "####"
LONGEST = 1000  # characters; a longer text is not parsed and counts as no answer
# `\{` is no grouping brace. `\boxed 5` is a box as in TeX, but holds all digits that follow.
_TOKEN = re.compile(
    r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\(?:boxed|fbox)\s+(?P<bare>[^\s${}\\]+)"
    r"|(?P<escaped>\\.)|(?P<open>\{)|(?P<close>\})",
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
        kind = token.lastgroup
        if kind == "box":
            opened.append((token.end(), True))
        elif kind == "open":
            opened.append((token.end(), False))
        elif kind == "bare":
            start = token.start("bare")
            if content := token["bare"].rstrip(".,;"):
                found = start, start + len(content)
        elif kind == "close" and opened:
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
