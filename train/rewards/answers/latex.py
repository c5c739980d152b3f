"""Gives LaTeX one spelling, and cuts it at commas and signs outside of its brackets."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

_UNICODE = {
    "π": "\\pi ", "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "−": "-", "–": "-",
    "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "\\div ", "∪": "\\cup ", "∩": "\\cap ",
    "∈": "\\in ", "∅": "\\emptyset ", "°": "^\\circ ", "±": "\\pm ", "²": "^{2}", "³": "^{3}",
    "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "θ": "\\theta ",
    "ℝ": "\\mathbb{R}", "′": "'", "’": "'", "“": '"', "”": '"',
}  # fmt: skip
_BASES = {"two": 2, "three": 3, "five": 5, "eight": 8, "ten": 10, "twelve": 12, "sixteen": 16}
# (pattern, replacement), applied in this order: each brings several spellings to one.
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"√\s*(\d+|[a-zA-Z]|\{[^{}]*\}|\([^()]*\))", r"\\sqrt{\1}"),
        (r"\\\$|\$|\\\(|\\\)|(?<!\\)\\\[|\\\](?!\])|\*\*", " "),
        (r"\\(?:left|right|[bB]ig+[lrm]?|displaystyle|textstyle)(?![a-zA-Z])", ""),
        (r"\{,\}|,\\!", ","),
        (r"(?<!\\)\\[!,;: ]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\[dt]?binom\s*(\d)\s*(\d)", r"\\binom{\1}{\2}"),
        (r"\\(?:leqslant|leq|le)(?![a-zA-Z])|<=", r"\\le "),
        (r"\\(?:geqslant|geq|ge)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\(?:neq|ne)(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\(?:varnothing|emptyset)(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\colon(?![a-zA-Z])|\{:\}", ":"),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![a-zA-Z\\])(?:infinity|infty|inf|oo)(?![a-zA-Z])", r"\\infty "),
        (r"(?<![a-zA-Z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![a-zA-Z\\])(sin|cos|tan|cot|sec|csc|ln|log|exp)(?![a-zA-Z]|\s*$)", r"\\\1 "),
        (r"\\(?:text|mathrm|mbox)\s*\{(\s*,?\s*(?:and|or)\s*)\}", r" \1 "),
        (r"\\(?:ldots|cdots)(?![a-zA-Z])|\.\.\.|…", r"\\dots "),
        (r"\(\s*(\\p?mod(?![a-zA-Z])[^()]*)\)", r"\1"),
        (r"\\p?mod(?![a-zA-Z])\s*(?:\{\s*(\w+)\s*\}|(\w+))", r"\\pmod{\1\2}"),
        (r"\\lg(?![a-zA-Z])", r"\\log_{10} "),
        (r"\\pounds(?![a-zA-Z])", "£"),
        (r"(?<![a-zA-Z\d])(?<!\d )USD\s*(-?\d[\d,]*(?:\.\d+)?)(?<!,)", r"\1 USD"),
        (r"(?:\\\\\s*)+$", ""),
        (r"_\s*\{\s*\\text\s*\{\s*(?:base )?\s*(\w+)\s*\}\s*\}", r"_{\1}"),
        *((rf"_\{{{word}\}}", f"_{{{base}}}") for word, base in _BASES.items()),
        (r"_\s*\{\s*(\w)\s*\}", r"_\1"),
        (r"\\(?:text|mathrm|mathit)\s*\{\s*([ie])\s*\}", r" \1 "),
        (r"(?<![a-zA-Z\\_])i(?![a-zA-Z])", " i "),  # else math-verify takes i of `4i` for real
        (r"\\mathbb\s*([A-Z])(?![a-zA-Z])", r"\\mathbb{\1}"),
        (r"^\s*(?:\\text\s*\{\s*)?(?i:all real(?: number)?s)\.?\s*\}?\.?\s*$", r"\\mathbb{R}"),
        (r"^\s*\\\{\s*[a-zA-Z]\s*(?:\\mid|\\vert|:|\|)(.*)\\\}\s*$", r"\1"),
        (r"\s+", " "),
    )
]  # fmt: skip


def clean(text: str) -> str:
    """An answer in its normal spelling, without math delimiters and a final period."""
    for symbol, command in _UNICODE.items():
        text = text.replace(symbol, command)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return text.strip().rstrip(".,;: ")


def squeezed(text: str) -> str:
    """A text without spaces, but for those between digits."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname)\s*"
    r"\{([^{}]*)\}"
)


def unwrapped(text: str) -> str:
    """A text without commands such as `\\text` and `\\mathrm` around its words."""
    before = None
    while text != before:
        before, text = text, TEXT_COMMAND.sub(r"\1", text)
    return text.strip()


_OPENING, _CLOSING = ("(", "[", "\\{"), (")", "]", "\\}")
_DEPTHS = {
    **dict.fromkeys(("{", "\\begin", *_OPENING), 1),
    **dict.fromkeys(("}", "\\end", *_CLOSING), -1),
}
COMMA = r",\s*(?:(?:and|or)\s)?|\s(?:and|or)\s|;"


def split(text: str, separator: str) -> list[str]:
    """Cuts a text at a pattern where it is outside of all brackets and environments."""
    parts, start, depth = [], 0, 0
    tokens = rf"(?P<separator>{separator})|\\(?:begin|end)|\\.|[][(){{}}]"
    for token in re.finditer(tokens, text, re.DOTALL):
        if token["separator"] is None:
            depth += _DEPTHS.get(token[0], 0)
        elif depth == 0:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    return [*parts, text[start:].strip()]


class Brackets(NamedTuple):
    """A tuple, interval or set with its brackets, or a list, which has none."""

    left: str
    elements: list[str]
    right: str


def brackets_of(text: str) -> Brackets | None:
    """Reads `(1, 2)`, `[1, 2)`, `\\{5\\}` and `3, 5`; None for anything else, as `(5)` is."""
    elements = _elements(text)
    if len(elements) > 1:
        return Brackets("", elements, "") if all(elements) else None
    left = next((b for b in _OPENING if text.startswith(b)), None)
    right = next((b for b in _CLOSING if text.endswith(b)), None)
    if left is None or right is None or (left == "\\{") != (right == "\\}"):
        return None
    inside = text[len(left) : -len(right)]
    elements = _elements(inside) if left == "\\{" else split(inside, COMMA)
    if not is_balanced(inside) or (len(elements) == 1 and left != "\\{"):
        return None
    return Brackets(left, elements, right)


def _elements(text: str) -> list[str]:
    """The elements of `3, 5 and 7`, `1 \\pm \\sqrt{2}` or `(\\pm 1, 2)`."""
    return [element for part in split(text, COMMA) for element in _both_signs(part)]


_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-zA-Z])")


def _both_signs(text: str) -> list[str]:
    """The formulas that one with `\\pm` stands for; that of a set stands for one set.

    Several signs are independent, unless a `\\mp` among them couples them. More than three are left
    as they are.
    """
    signs = _PLUS_MINUS.findall(text)
    if not signs or len(signs) > 3 or text.startswith("\\{"):
        return [text]
    choices = itertools.product("+-", repeat=len(signs))
    if "mp" in signs:
        choices = zip(*("+-" if sign == "pm" else "-+" for sign in signs), strict=True)
    found = []
    for choice in map(iter, choices):
        signed = _PLUS_MINUS.sub(lambda _, choice=choice: next(choice), text)
        found.append(re.sub(r"(^|[(\[{,])\s*\+\s*", r"\1", signed).strip())
    return found


def is_balanced(text: str) -> bool:
    """Whether brackets are closed as often as they are opened, and never before.

    Kinds of brackets are not told apart, because `[1, 2)` is a half-open interval.
    """
    depths = [0, *itertools.accumulate((c in "([{") - (c in ")]}") for c in text)]
    return min(depths) == depths[-1] == 0
