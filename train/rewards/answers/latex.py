"""Gives LaTeX one spelling, and splits it at commas, brackets and relation signs.

`3, 5 and 7` has the elements 3, 5 and 7; `(1, 2)` is in brackets; `1 < x \\le 3` is a relation of
three parts. Separators inside of brackets do not split.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

_UNICODE = {
    "π": "\\pi ", "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "−": "-", "–": "-",
    "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "\\div ", "∪": "\\cup ", "∩": "\\cap ",
    "∈": "\\in ", "∅": "\\emptyset ", "°": "^\\circ ", "±": "\\pm ", "≈": "\\approx ",
    "²": "^{2}", "³": "^{3}", "⁴": "^{4}", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}",
    "¾": "\\frac{3}{4}", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "⟨": "\\langle ",
    "⟩": "\\rangle ", "ℝ": "\\mathbb{R}", "′": "'", "’": "'", "“": '"', "”": '"',
}  # fmt: skip
# (pattern, replacement), applied in this order: each brings several spellings to one.
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\s+", " "),
        (r"√\s*(\d+|[a-zA-Z]|\{[^{}]*\}|\([^()]*\))", r"\\sqrt{\1}"),
        (r"\\\$|\$|\\\(|\\\)|(?<!\\)\\\[|\\\](?!\])|\*\*", " "),
        (r"\\(?:left|right|[bB]ig+[lrm]?|displaystyle|textstyle|limits)(?![a-zA-Z])", ""),
        (r"\{,\}|,\\!", ","),
        (r"\{:\}", ":"),
        (r"(?<!\\)\\[!,;: ]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\[dt]?binom\s*(\d)\s*(\d)", r"\\binom{\1}{\2}"),
        (r"\\(?:leqslant|leq|le)(?![a-zA-Z])|<=", r"\\le "),
        (r"\\(?:geqslant|geq|ge)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:neq|ne)(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\(?:varnothing|emptyset)(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\colon(?![a-zA-Z])", ":"),
        (r"[(\[]?\s*\\begin\{array\}\s*\{[^{}]*\}", r"\\begin{pmatrix}"),
        (r"\\end\{array\}\s*[)\]]?", r"\\end{pmatrix}"),
        (r"\\(begin|end)\{[bB]?(?:small)?matrix\}", r"\\\1{pmatrix}"),
        (r"[(\[]\s*(\\begin\{pmatrix\}.*?\\end\{pmatrix\})\s*[)\]]", r"\1"),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![a-zA-Z\\])(?:infinity|infty|inf|oo)(?![a-zA-Z])", r"\\infty "),
        (r"(?<![a-zA-Z\\])sqrt\s*\{", r"\\sqrt{"),
        (r"(?<![a-zA-Z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![a-zA-Z\\])(sin|cos|tan|cot|sec|csc|ln|log|exp)(?![a-zA-Z])", r"\\\1 "),
        (r"\\(?:mathrm|text|operatorname)\s*\{\s*([ie])\s*\}", r"\1"),
        (r"\\(?:text|mathrm|mbox|textbf|textit|textrm)\s*\{(\s*,?\s*(?:and|or)\s*)\}", r" \1 "),
        (r"\\(?:ldots|cdots|dotsc)(?![a-zA-Z])|\.\.\.|…", r"\\dots "),
        (r"\\pmod\s*([a-zA-Z0-9])", r"\\pmod{\1}"),
        (r"\\mathbb\s*([A-Z])(?![a-zA-Z])", r"\\mathbb{\1}"),
        (r"^\s*(?:\\text\s*\{\s*)?(?i:all real(?: number)?s)\.?\s*\}?\.?\s*$", r"\\mathbb{R}"),
        (r"\s+", " "),
        (r"^ ?\\\{\s*[a-zA-Z]\s*(?:\\mid|\\vert|:|\|)(.*)\\\} ?$", r"\1"),
    )
]  # fmt: skip


def clean(text: str) -> str:
    """An answer in its normal spelling, without math delimiters and a final period."""
    for symbol, command in _UNICODE.items():
        text = text.replace(symbol, command)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    text = text.strip()
    while text and text[-1] in ".,;: " and not text.endswith("\\ "):
        text = text[:-1]
    return text


def squeezed(text: str) -> str:
    """A text without spaces, but for those between digits."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname)\s*"
    r"\{([^{}]*)\}"
)


def unwrapped(text: str) -> str:
    """A text without commands such as `\\text` and `\\mathrm` around its words."""
    before = None
    while text != before:
        before, text = text, _TEXT_COMMAND.sub(r"\1", text)
    return text.strip()


_OPENING, _CLOSING = ("(", "[", "\\{"), (")", "]", "\\}")
_BRACKET = re.compile(r"\\(?:begin|end)|\\.|[][(){}]", re.DOTALL)
_DEPTHS = {
    **dict.fromkeys(("{", "\\begin", *_OPENING), 1),
    **dict.fromkeys(("}", "\\end", *_CLOSING), -1),
}


def _depths(text: str) -> Iterator[tuple[int, int]]:
    """Yields the end of each bracket or command, and the depth of brackets behind it."""
    depth = 0
    for token in _BRACKET.finditer(text):
        depth += _DEPTHS.get(token[0], 0)
        yield token.end(), depth


def split(text: str, separator: re.Pattern) -> list[tuple[str, str]]:
    """Cuts a text at separators outside of all brackets and environments.

    Returns:
      (part, the separator after it) in order; the last separator is "".
    """
    parts, start, depth = [], 0, 0
    depths = list(_depths(text))
    for match in separator.finditer(text):
        while depths and depths[0][0] <= match.start():
            depth = depths.pop(0)[1]
        if depth == 0 and match.start() > start:
            parts.append((text[start : match.start()].strip(), match[0].strip()))
            start = match.end()
    return [*parts, (text[start:].strip(), "")]


def is_balanced(text: str) -> bool:
    """Whether brackets are closed as often as they are opened, and never before.

    Kinds of brackets are not told apart, because `[1, 2)` is a half-open interval.
    """
    depths = [0, *(depth for _, depth in _depths(text))]
    return min(depths) == depths[-1] == 0


COMMA = re.compile(r",\s*(?:and\s|or\s)?|\s(?:and|or)\s|;")


def elements_of(text: str) -> list[str] | None:
    """The elements of `3, 5 and 7`, `1 \\pm \\sqrt{2}` or `(\\pm 1, 2)`; None if it is no list."""
    parts = [part for part, _ in split(text, COMMA)]
    if not all(parts):
        return None
    parts = [element for part in parts for element in _both_signs(part)]
    return parts if len(parts) > 1 else None


_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-zA-Z])")


def _both_signs(text: str) -> list[str]:
    """The formulas that one with `\\pm` stands for.

    Several signs are independent, unless a `\\mp` among them couples them. More than three are
    left as they are.
    """
    signs = _PLUS_MINUS.findall(text)
    bracketed = brackets_of(text)
    if not signs or len(signs) > 3 or (bracketed and bracketed.left == "\\{"):
        return [text]
    if "mp" in signs:
        choices = zip(*("+-" if sign == "pm" else "-+" for sign in signs), strict=True)
    else:
        choices = itertools.product("+-", repeat=len(signs))
    found = []
    for choice in map(iter, choices):
        signed = _PLUS_MINUS.sub(lambda _, choice=choice: next(choice), text)
        found.append(_LEADING_PLUS.sub(r"\1", signed).strip())
    return found


_LEADING_PLUS = re.compile(r"(^|[(\[{,])\s*\+\s*")


class Brackets(NamedTuple):
    """A tuple, interval or set: its brackets and its elements."""

    left: str
    right: str
    elements: list[str]


def brackets_of(text: str) -> Brackets | None:
    """Reads `(1, 2)`, `[1, 2)` and `\\{5\\}`; None if it is anything else, as `(5)` is."""
    left = next((b for b in _OPENING if text.startswith(b)), None)
    right = next((b for b in _CLOSING if text.endswith(b)), None)
    if left is None or right is None:
        return None
    if (left == "\\{") != (right == "\\}"):
        return None
    inside = text[len(left) : -len(right)]
    if not is_balanced(inside):
        return None
    parts = [part for part, _ in split(inside, COMMA)]
    if left == "\\{":
        parts = elements_of(inside) or parts
    elif len(parts) == 1:
        return None
    return Brackets(left, right, parts)


_RELATION = re.compile(
    r"\\(?:le|ge|ne|in|approx|equiv|sim|to)(?![a-zA-Z])|(?<![<>=!])=(?!=)|==|[<>]"
)
ORDER = ("\\le", "\\ge", "<", ">", "\\ne")


def relation_of(text: str) -> list[tuple[str, str]] | None:
    """Splits `1 < x \\le 3` at its signs: [(part, the sign after it), ...].

    None if there is no sign outside of brackets, or if it is a list of several relations.
    """
    parts = split(text, _RELATION)
    if len(parts) < 2 or not all(part and len(split(part, COMMA)) == 1 for part, _ in parts):
        return None
    return parts


_NAME = re.compile(
    r"(?:\\?[a-zA-Z]+|\\(?:text|mathrm|mathbf|vec|hat|bar|overline|angle)\s*\{?[^{}=]*\}?)"
    r"(?:_(?:\{[^{}]*\}|\w))?'*(?:\([\w\s,]*\))?|[A-Za-z][A-Za-z ]*"
)


def is_assignment(parts: list[tuple[str, str]]) -> bool:
    """Whether a relation gives a name, or a tuple of names, a value: `x = 5`, `x \\in [1, 2]`."""
    left, sign = parts[0]
    if sign not in ("=", "==", "\\approx", "\\in", "\\to"):
        return False
    if any(sign in ORDER for _, sign in parts):
        return False
    names = brackets_of(left)
    names = names.elements if names else [left]
    return all(_NAME.fullmatch(name) for name in names)
