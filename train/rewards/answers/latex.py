"""Gives LaTeX one spelling."""

from __future__ import annotations

import itertools
import re

_UNICODE = {
    "π": "\\pi ", "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "−": "-", "–": "-",
    "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "\\div ", "∪": "\\cup ", "∩": "\\cap ",
    "∈": "\\in ", "∅": "\\emptyset ", "°": "^\\circ ", "±": "\\pm ", "²": "^{2}", "³": "^{3}",
    "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "θ": "\\theta ",
    "ℝ": "\\mathbb{R}", "′": "'", "’": "'", "“": '"', "”": '"',
}  # fmt: skip
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
        (r"(?<![a-zA-Z\\])(sin|cos|tan|cot|sec|csc|ln|log|exp)(?![a-zA-Z])", r"\\\1 "),
        (r"\\(?:text|mathrm|mbox)\s*\{(\s*,?\s*(?:and|or)\s*)\}", r" \1 "),
        (r"\\(?:ldots|cdots)(?![a-zA-Z])|\.\.\.|…", r"\\dots "),
        (r"\\pmod\s*(\w)", r"\\pmod{\1}"),
        (r"_\s*\{\s*(\w)\s*\}", r"_\1"),
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


def is_balanced(text: str) -> bool:
    """Whether brackets are closed as often as they are opened, and never before.

    Kinds of brackets are not told apart, because `[1, 2)` is a half-open interval.
    """
    depths = [0, *itertools.accumulate((c in "([{") - (c in ")]}") for c in text)]
    return min(depths) == depths[-1] == 0
