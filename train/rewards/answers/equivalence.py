"""Decides whether two answers are the same: numbers, choices, words, and formulas by math-verify.

    5 apples, 50%, 1,234    numbers with units (see `quantity`)
    (B); A and D            letters of choices, in any order
    June 20, Evelyn         words without regard to case, quotes and commas; numbers, operators and
                            brackets among them count; lists in any order
    x=1, y=2                is (1,2): the values in the order of the names
    1101_2; 3:4; 6:15; y'   what math-verify misreads, and formulas with a letter in both cases, are
                            the same if they are written the same
    2+3, 6 \\cdot 7          arithmetic that was not carried out is right only if the gold answer is
                            such arithmetic, too
    anything else           as math-verify says, but a tuple or an interval is no set and no list

sympy may run forever on a policy's text: worker processes that call this are ended when the time is
up.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from train.rewards.answers.extract import LONGEST
from train.rewards.answers.latex import TEXT_COMMAND, clean, is_balanced, squeezed, unwrapped
from train.rewards.answers.quantity import read_quantity, split_unit, unit_name, without_thousands

# The library warns that its timeouts are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def same_answer(gold: str, found: str) -> bool:
    """Whether the answer `found` is the right one. `$` around either does not count."""
    if max(len(gold), len(found)) > LONGEST:
        return False
    gold, found = clean(gold), clean(found)
    if labelled := _LABELLED.fullmatch(gold):
        either = any(same_answer(part, found) for part in labelled.groups())
        return either or squeezed(gold) == squeezed(found)
    if not (gold and found and _is_whole(gold) and _is_whole(found)):
        return False
    if squeezed(gold) == squeezed(found):  # `100,200` may be a number, and `100, 200` a list
        found = gold
    gold, found = without_thousands(gold), without_thousands(found)
    numbers = read_quantity(gold), read_quantity(found)
    if all(numbers):
        return numbers[0].equals(numbers[1])
    choices = _letters(gold), _letters(found)
    if all(choices):
        return choices[0] == choices[1]
    if _is_text(gold) or _is_text(found):
        mine, theirs = _words(gold), _words(found)
        return mine == theirs or " ".join(mine) == " ".join(theirs)
    if _is_misread(gold, found):
        return gold == found
    return _is_undone(gold) >= _is_undone(found) and _same_formula(gold, found)


# A choice with its text, as `\\textbf{(D)}\\ 12`: either is enough.
_LABELLED = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf)\s*\{\s*\(([A-Z])\)\s*\}\s*(?!,|and\b|or\b)(\S.*)"
)


def _is_whole(text: str) -> bool:
    return is_balanced(text) and not re.search(r"[=<>]\s+[=<>]", text)


_SEPARATOR = re.compile(r"\s*(?:[,;]\s*(?:and\b|or\b)?|\b(?:and|or)\b)\s*")


def _letters(text: str) -> list[str]:
    """The letters of `(C)`, `\\text{C}` or `A and D`, in order; none if it is no choice."""
    parts = _SEPARATOR.split(unwrapped(text))
    letters = [re.fullmatch(r"\(\s*([A-Z])\s*\)|([A-Z])", part) for part in parts]
    return sorted(m[1] or m[2] for m in letters) if all(letters) else []


_SHORT_WORDS = frozenset("n/a no ok up in on he it we".split())
_FORMULA_WORDS = frozenset("and mod gcd lcm max min".split())


def _is_text(text: str) -> bool:
    """Whether an answer is words and no formula."""
    bare = unwrapped(text)
    if bare.casefold() in _SHORT_WORDS:
        return True
    words = {word.lower() for word in re.findall(r"[^\W\d_]{3,}", bare)}
    return not re.search(r"[\\{=<>]", bare) and bool(words - _FORMULA_WORDS)


def _words(text: str) -> list[str]:
    """The elements of a list of words, or a single one, sorted and without what does not count."""
    text = re.sub(r"[\"!?]|(?<!\d)\.|\.(?!\d)|(?<!\w)'|'(?!\w)", "", unwrapped(text).casefold())
    text = re.sub(r"\s*([^\w\s,;])\s*", r"\1", text)
    return sorted(_SEPARATOR.split(" ".join(text.split())))


# Two numbers side by side, bases, ratios, times of day, derivatives, congruences, endless lists.
_MISREAD = re.compile(r"(?<!_)\d\s+\d|\d\s*[_:]\s*[\d{]|'|\\(?:prime|equiv|dots)(?![a-zA-Z])")


_WORD = re.compile(r"\\?[a-zA-Z]+")


def _is_misread(*texts: str) -> bool:
    """Whether math-verify would take different answers for one: it reads `1 2` and `1_2` as 12, and
    `R - r` as 0."""
    letters = {word for text in texts for word in _WORD.findall(TEXT_COMMAND.sub("", text))}
    letters = {letter for word in letters if word[0] != "\\" for letter in word}
    both = any(letter.isupper() and letter.lower() in letters for letter in letters)
    return both or any(map(_MISREAD.search, texts))


_ARITHMETIC = re.compile(
    r"(?:[\d.+\-*/(){}%\s]|\\(?:cdot|times|div|frac)(?![a-zA-Z])|\\%)+", re.ASCII
)
_OPERATION = re.compile(r"[\d)}%]\s*[-+]|\*|\\(?:cdot|times)|[\d)]\s*\(")


def _is_undone(text: str) -> bool:
    """Whether a text is arithmetic of numerals that was not carried out: `2+3`."""
    parts = split_unit(text)[0].split(",")
    values = [part.rpartition("=")[2].strip("()[] ") for part in parts]
    return any(_ARITHMETIC.fullmatch(value) and _OPERATION.search(value) for value in values)


_CONFIG = LatexExtractionConfig(
    boxed_match_priority=-1,
    # `split_unit` removes the unit; the library would take the t of `2x+3t` for one.
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
    ),
)
_NAMED = re.compile(r"\s*(\\?[a-zA-Z]\w*)\s*=([^,=<>]+)(?:,|$)")
# `2\frac{1}{3}\pi` is 7/3 of pi.
_MIXED = re.compile(r"(?<![\d.^_}\w)])(\d+) ?\\frac ?\{(\d+)\} ?\{(\d+)\}")
_SUM = r"(\1+\\frac{\2}{\3})"


def _same_formula(gold: str, found: str) -> bool:
    (gold, unit), (found, other) = split_unit(gold), split_unit(found)
    if unit and other and unit_name(unit) != unit_name(other):
        return False
    named = _values(gold), _values(found)
    if bool(named[0]) != bool(named[1]):
        gold, found = named[0] or gold, named[1] or found
    mine, theirs = _parsed(gold), _parsed(found)
    tuples = (sympy.Tuple, sympy.Interval)
    for one, other in ((mine, theirs), (theirs, mine)):
        if isinstance(one, tuples) and isinstance(other, sympy.FiniteSet):
            return False
    if mine is None or theirs is None:
        return False
    return verify([mine], [theirs], allow_set_relation_comp=True, timeout_seconds=None)


def _values(text: str) -> str:
    """The tuple of the values of `x=1, y=2` in the order of the names; "" for anything else."""
    pairs = _NAMED.findall(text)
    if len({name for name, _ in pairs}) < 2 or _NAMED.sub("", text).strip():
        return ""
    return f"({','.join(value for _, value in sorted(pairs))})"


def _parsed(text: str) -> Any:
    """The sympy expression, set or relation of a formula; None if it does not parse."""
    latex = f"${_MIXED.sub(_SUM, text)}$"
    [read] = parse(latex, [_CONFIG], fallback_mode="no_fallback", parsing_timeout=None) or [None]
    parts = getattr(read, "args", ())
    inequalities = [isinstance(x, sympy.Rel) and not isinstance(x, sympy.Eq) for x in parts]
    if " or " in text and parts and all(inequalities):
        return sympy.Union(*(part.as_set() for part in parts))
    return read
