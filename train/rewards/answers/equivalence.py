"""Decides whether two answers are the same.

Rules for the structure of an answer come first, because LaTeX does not tell math-verify whether it
is a list, a tuple, a ratio or words:

    1101_2                  digits and base, written the same
    (B); A and D; (D) 12    letters of choices in any order; of a letter and its text either
    x=1, y=2; (x,y)=(1,2)   the values in the order of the names: `y=1, x=2` is (2,1)
    x=5; 2+3=5              the value; steps before it have to be right
    5 apples, 50%, 1,234    numbers with units (see `quantity`)
    12/25/2020              a gold answer that is a date with its year is no arithmetic
    6:15; 6:15 p.m.         a gold answer that may be a time of day is one, and no ratio
    3:4; 1:2:3              ratios, by proportion
    June 20, Evelyn         words without regard to case, quotes and commas; numbers, operators and
                            brackets among them count
    3, 5, 7; 2 or 3; {1,2}  lists in any order, complete
    (1,2); [1,2)            in order, with the same brackets
    2+3, 6 \\cdot 7          arithmetic that was not carried out is right only if the gold answer is
                            such arithmetic, too
    anything else           one formula, as math-verify says; rational numbers are equal to
                            2,000 decimals, others to 100, or rounded as in `quantity`

sympy may run forever on a policy's text: worker processes that call this are ended when the time is
up.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from train.rewards.answers.extract import LONGEST
from train.rewards.answers.latex import (
    COMMA,
    TEXT_COMMAND,
    brackets_of,
    clean,
    is_balanced,
    split,
    squeezed,
    unwrapped,
)
from train.rewards.answers.quantity import (
    in_radians,
    read_quantity,
    split_unit,
    unit_name,
    without_thousands,
)

# The library warns that its timeouts are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def same_answer(gold: str, found: str) -> bool:
    """Whether the answer `found` is the right one. `$` around either does not count."""
    if max(len(gold), len(found)) > LONGEST:
        return False
    gold, found = clean(gold), clean(found)
    if squeezed(gold) == squeezed(found):  # `100,200` may be a number, and `100, 200` a list
        found = gold
    return _same(without_thousands(gold), without_thousands(found))


def _same(gold: str, found: str) -> bool:
    """Compares by the first of `_RULES` that applies; as formulas if none does."""
    if not all(
        text and is_balanced(text) and not _UNFINISHED.search(text) for text in (gold, found)
    ):
        return False
    for rule in _RULES:
        if (verdict := rule(gold, found)) is not None:
            return verdict
    return _is_undone(gold) >= _is_undone(found) and _same_formula(gold, found)


_UNFINISHED = re.compile(r"[=<>]\s+[=<>]")


def _in_order(gold: Sequence[str], found: Sequence[str]) -> bool:
    return len(gold) == len(found) and all(map(_same, gold, found))


def _in_any_order(gold: Sequence[str], found: Sequence[str]) -> bool:
    if len(gold) != len(found):
        return False
    left = list(found)
    for element in gold:
        place = next((i for i, other in enumerate(left) if _same(element, other)), None)
        if place is None:
            return False
        del left[place]
    return True


_NUMERAL = re.compile(r"\(?-?[0-9A-F]+\)?_(?:\d|\{\d+\})")


def _same_numerals(gold: str, found: str) -> bool | None:
    """Compares `1101_2` with anything; None if neither has a base."""
    either = _NUMERAL.fullmatch(gold) or _NUMERAL.fullmatch(found)
    return gold == found if either else None


# A choice with its text: `\\textbf{(D)}\\ 12`, and if no formula follows `(D) 12` or `D. 12`.
_LABELLED = (
    re.compile(
        r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{\s*\(([A-Z])\)\s*\}\s*"
        r"(?!,|and\b|or\b)(\S.*)"
    ),
    re.compile(r"\(([A-J])\) ((?:-?[.\d]|\\(?:frac|sqrt|pi|text)(?![a-z])|[a-z]{3}).*)"),
    re.compile(r"([A-J])[.:] ((?:-?[.\d]|\\(?:frac|sqrt|pi|text)(?![a-z])).*)"),
)
_SECOND = re.compile(r"\([A-Z]+\)|(?<![a-zA-Z\\])[A-Z]+[.:]\s")
_LETTER = re.compile(r"\(\s*([A-Z])\s*\)\.?|([A-Z])\s*[).]?")


def _choice(text: str) -> tuple[list[str], str]:
    """The letters of `(C)`, `\\text{C}` or `A and D`, in order, and the text behind one."""
    for pattern in _LABELLED:
        labelled = pattern.fullmatch(text)
        if labelled and not _SECOND.search(labelled[2]):
            return [labelled[1]], labelled[2]
    letters = [_LETTER.fullmatch(part) for part in split(unwrapped(text), COMMA)]
    return (sorted(m[1] or m[2] for m in letters), "") if all(letters) else ([], text)


def _same_choice(gold: str, found: str) -> bool | None:
    """Compares letters, with or without their texts; None if one side is no choice."""
    (mine, my_text), (theirs, their_text) = _choice(gold), _choice(found)
    if not (mine or theirs) or not (mine and theirs or my_text and their_text):
        return None
    if mine and theirs and mine != theirs:
        return False
    if not (my_text and their_text):
        return True
    # `(A) 3` may still be a product.
    return _same(my_text, their_text) or (False if mine and theirs else None)


_EQUALS = r"=+|\\(?:approx|in|to)(?![a-zA-Z])"
_ORDER = r"[<>]|\\(?:le|ge|ne|equiv)(?![a-zA-Z])"
_NAME = re.compile(
    r"\\?[a-zA-Z][a-zA-Z\\{} ]*(?:_(?:\{[^{}]*\}|\w))?\}?'*(?:\([\w\s,]*\))?|\([\w\s,]*\)"
)


def _steps(text: str) -> tuple[str, list[str]]:
    """The name and the values of `x = 5`, of `f(x) = 2 + 3 = 5`, or of `5`, which has no name."""
    steps = split(text, _EQUALS)
    if len(steps) == 1 or not all(steps) or len(split(text, _ORDER)) + len(split(text, COMMA)) > 2:
        return "", [text]
    return (squeezed(steps[0]), steps[1:]) if _NAME.fullmatch(steps[0]) else ("", steps)


_VARIABLE = re.compile(r"(\\?[a-zA-Z]|\\[a-z]+)(?:_\{?(\d{1,3})\}?)?")


def _named(text: str) -> dict[str, str]:
    """{name: value} of several names in the order of the alphabet; empty if there are none.

    Names that are words stay in the order in which they are written.
    """
    name, values = _steps(text)
    names, tuples = brackets_of(name), brackets_of(values[0])
    pairs = [_steps(part) for part in split(text, COMMA)]
    pairs = [(name, values[-1]) for name, values in pairs]
    if names and tuples and len(names.elements) == len(tuples.elements):
        pairs = list(zip(names.elements, tuples.elements, strict=True))
    if len({name for name, _ in pairs if name}) < max(2, len(pairs)):
        return {}
    variables = [_VARIABLE.fullmatch(name) for name, _ in pairs]
    if all(variables):
        order = [(variable[1], int(variable[2] or 0)) for variable in variables]
        pairs = [pair for _, pair in sorted(zip(order, pairs, strict=True))]
    return dict(pairs)


def _same_names(gold: str, found: str) -> bool | None:
    """Compares values of several names with each other, or with values without names; None if
    neither has several names."""
    mine, theirs = _named(gold), _named(found)
    if not (mine or theirs):
        return None
    if mine and theirs:
        return mine.keys() == theirs.keys() and all(_same(mine[n], theirs[n]) for n in mine)
    bare = brackets_of(found if mine else gold)
    if bare is None or bare.left not in ("", "(") or bare.right == "]":
        return False
    named = list((mine or theirs).values())
    return _in_order(named, bare.elements) if mine else _in_order(bare.elements, named)


def _same_values(gold: str, found: str) -> bool | None:
    """Compares `x=5` or `2+3=5` with a value, or two values of one name; None for anything else."""
    (mine, my_steps), (theirs, their_steps) = _steps(gold), _steps(found)
    if mine and theirs:
        return _same(my_steps[-1], their_steps[-1]) if mine == theirs else None
    if mine and len(their_steps) == 1:
        return _same(my_steps[-1], found)
    if not mine and len(my_steps) == 1 and (theirs or len(their_steps) > 1):  # not `x+1=5` for 5
        *steps, last = their_steps
        return _same(gold, last) and all(_same_formula(gold, step) for step in steps)
    return None


def _same_quantities(gold: str, found: str) -> bool | None:
    """Compares numbers with units; None if one is no number."""
    mine, theirs = read_quantity(gold), read_quantity(found)
    return mine.equals(theirs) if mine and theirs else None


_DATE = re.compile(r"(\d{1,4})([-/])(\d{1,2})\2(\d{1,4})", re.ASCII)


def _same_dates(gold: str, found: str) -> bool | None:
    """Compares a date with anything; None if the gold answer is none."""
    mine, theirs = (_DATE.fullmatch(unwrapped(text)) for text in (gold, found))
    if mine is None or 4 not in (len(mine[1]), len(mine[4])):
        return None
    if theirs is None or mine[2] != theirs[2]:
        return False
    return all(int(mine[place]) == int(theirs[place]) for place in (1, 3, 4))


_CLOCK = re.compile(
    r"(\d{1,2})(?::([0-5]\d)(?::([0-5]\d))?)?(?:\s*([ap])\.?\s?m\.?)?", re.IGNORECASE | re.ASCII
)


def _time(text: str) -> tuple[int, str, bool] | None:
    """Reads `6:15`, `18:15:30`, `6:15 p.m.` and `6 PM`; None if it is no time of day.

    Returns:
      seconds since midnight, the half of the day if it is written, and whether both halves have
      such an hour.
    """
    match = _CLOCK.fullmatch(unwrapped(text))
    if match is None:
        return None
    hour, minute, second = (int(match[place] or 0) for place in (1, 2, 3))
    half = (match[4] or "").lower()
    if (not half and match[2] is None) or hour > 24 or (half and not 1 <= hour <= 12):
        return None
    is_either = not half and 1 <= hour <= 12
    if half:
        hour = hour % 12 + 12 * (half == "p")
    return hour * 3600 + minute * 60 + second, half, is_either


def _same_times(gold: str, found: str) -> bool | None:
    """Compares a time of day with anything; None if the gold answer is none, or may be a ratio."""
    mine, theirs = _time(gold), _time(found)
    if mine is None:
        return None
    if theirs is not None:
        one_says = bool(mine[1]) != bool(theirs[1]) and (mine[2] or theirs[2])
        return (mine[0] - theirs[0]) % (43_200 if one_says else 86_400) == 0
    may_be_ratio = math.gcd(*map(int, re.findall(r"\d+", gold))) == 1 and ":" not in found
    return None if may_be_ratio and not mine[1] else False


def _same_ratios(gold: str, found: str) -> bool | None:
    """Compares ratios by proportion, and those of two terms with fractions; None if neither is
    one."""
    mine, theirs = split(gold, ":"), split(found, ":")
    if len(mine) == len(theirs) == 1 or not all(mine + theirs) or _is_text(gold + found):
        return None
    if len(mine) == len(theirs):
        (a, *rest), (b, *others) = mine, theirs
        crossed = [
            _same_formula(f"({a}) \\cdot ({d})", f"({b}) \\cdot ({c})")
            for c, d in zip(rest, others, strict=True)
        ]
        return all(crossed) and _same_formula(a, "0") == _same_formula(b, "0")
    if {len(mine), len(theirs)} != {1, 2}:
        return False
    return _same_formula(
        *(f"\\frac{{{x[0]}}}{{{x[1]}}}" if x[1:] else x[0] for x in (mine, theirs))
    )


_SHORT_WORDS = frozenset("n/a no ok up in on he it we".split())
_FORMULA_WORDS = frozenset("and mod gcd lcm max min".split())


def _is_text(text: str) -> bool:
    """Whether an answer is words and no formula."""
    bare = unwrapped(text)
    words = {word.lower() for word in re.findall(r"[^\W\d_]{3,}", bare)}
    return not re.search(r"[\\{=<>]", bare) and bool(words - _FORMULA_WORDS)


def _words(text: str) -> list[str]:
    """The elements of a list of words, or a single one, sorted and without what does not count."""
    text = re.sub(r"[\"!?]|(?<!\d)\.|\.(?!\d)|(?<!\w)'|'(?!\w)", "", unwrapped(text).casefold())
    text = re.sub(r"\s*([^\w\s,;])\s*", r"\1", text)
    return sorted(split(" ".join(text.split()), COMMA))


def _same_texts(gold: str, found: str) -> bool | None:
    """Compares words, or lists of them, with anything; None if neither is words."""
    short = {unwrapped(text).casefold() for text in (gold, found)}  # as products of variables
    if short <= _SHORT_WORDS:
        return len(short) == 1
    if not (_is_text(gold) or _is_text(found)):
        return None
    mine, theirs = _words(gold), _words(found)
    return mine == theirs or " ".join(mine) == " ".join(theirs)


def _same_collections(gold: str, found: str) -> bool | None:
    """Compares lists and sets, which have no order, tuples and intervals, and {5} with 5; None if
    neither is one of them."""
    if any(split(text, _ORDER)[1:] or _SETS.search(text) for text in (gold, found)):
        return None
    mine, theirs = brackets_of(gold), brackets_of(found)
    if mine and theirs:
        if {mine.left, theirs.left} <= {"", "\\{"}:
            return _in_any_order(mine.elements, theirs.elements)
        same = (mine.left, mine.right) == (theirs.left, theirs.right)
        return same and _in_order(mine.elements, theirs.elements)
    left, elements, _ = mine or theirs or ("", [], "")
    if left != "\\{":
        return False if elements else None
    return len(elements) == 1 and _same(
        elements[0] if mine else gold, found if mine else elements[0]
    )


_SETS = re.compile(r"\\(?:cup|cap|setminus|mathbb|emptyset)(?![a-zA-Z])")
_RULES = (
    _same_numerals,
    _same_choice,
    _same_names,
    _same_values,
    _same_dates,
    _same_quantities,
    _same_times,
    _same_ratios,
    _same_texts,
    _same_collections,
)

_ARITHMETIC = re.compile(
    r"(?:[\d.+\-*/(){}%\s]|\\(?:cdot|times|div|frac)(?![a-zA-Z])|\\%)+", re.ASCII
)
_OPERATION = re.compile(r"[\d)}%]\s*[-+]|\*|\\(?:cdot|times)|[\d)]\s*\(")


def _is_undone(text: str) -> bool:
    """Whether a text is arithmetic of numerals that was not carried out: `2+3`."""
    text = split_unit(text)[0]
    return bool(_ARITHMETIC.fullmatch(text) and _OPERATION.search(text))


# --- one formula ---------------------------------------------------------------------------------

_CONFIG = LatexExtractionConfig(
    boxed_match_priority=-1,
    # `split_unit` removes the unit; the library would take the t of `2x+3t` for one.
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
    ),
)
# `2\frac{1}{3}\pi` is 7/3 of pi.
_MIXED = re.compile(r"(?<![\d.^_}\w)])(\d+) ?\\frac ?\{(\d+)\} ?\{(\d+)\}")
_SUM = r"(\1+\\frac{\2}{\3})"


# Two numbers side by side, derivatives, congruences, endless lists: math-verify reads `1 2` as 12.
_MISREAD = re.compile(r"(?<!_)\d\s+\d|\d\s*_|'|\\(?:prime|equiv|dots)(?![a-zA-Z])")


def _same_formula(gold: str, found: str) -> bool:
    """Whether two formulas are mathematically equal, with units that agree."""
    if _MISREAD.search(gold) or _MISREAD.search(found):
        return gold == found
    (gold, unit), (found, other) = split_unit(gold), split_unit(found)
    if unit and other and unit_name(unit) != unit_name(other):
        return False
    mine, theirs = map(_parsed, _told_apart(gold, found))
    if mine is None or theirs is None:
        return False
    if all(isinstance(x, sympy.Expr) and x.is_number and x.is_finite for x in (mine, theirs)):
        return _same_number(mine, theirs) or _rounds(found, mine) or _rounds(gold, theirs)
    sets = [_as_set(x) for x in (mine, theirs)]
    if all(sets) and mine.free_symbols == theirs.free_symbols:
        mine, theirs = sets
    return verify(
        [mine], [theirs], allow_set_relation_comp=True, float_rounding=12, timeout_seconds=None
    )


_MOST_DIGITS = 20_000  # of an integer


def _same_number(gold: Any, found: Any) -> bool:
    """Whether two numbers are equal to many decimals, or to 12 digits if one has a decimal point.

    Rational numbers are compared to 2,000 decimals, for 1 - 2^{-2019} is not 1, and others to 100.
    Numbers of more than `_MOST_DIGITS` digits before the point have to be written the same.
    """
    if gold == found or (gold.is_Rational and found.is_Rational):
        return gold == found
    size = max(abs(sympy.N(gold, 20)), abs(sympy.N(found, 20)))
    if gold.has(sympy.Float) or found.has(sympy.Float):
        return bool(abs(sympy.N(gold - found, 22)) <= size * sympy.Rational(1, 10**12))
    length = int(sympy.log(size, 10)) if size > 1 else 0
    if length > _MOST_DIGITS:
        return False
    digits = 2_000 if gold.is_rational and found.is_rational else 100
    difference = abs(sympy.N(gold - found, 20, maxn=length + digits + 20))
    return bool(difference <= sympy.Rational(1, 10**digits) * min(size, 1))


def _rounds(text: str, exact: Any) -> bool:
    """Whether the decimal `text` is the number `exact`, rounded to enough digits."""
    quantity, value = read_quantity(text), sympy.N(exact, 60)
    if not quantity or not value.is_Float:
        return False
    exact = sympy.Rational(value)
    return quantity.rounds(Fraction(int(exact.p), int(exact.q)))


_LETTERS = re.compile(
    rf"{TEXT_COMMAND.pattern}|\\(?:mathbb|begin|end)\s*\{{\w+\}}|\\[a-zA-Z]+|([a-zA-Z])"
)


def _told_apart(*texts: str) -> list[str]:
    """Renames capital letters whose small letter occurs, too: the library reads `R - r` as 0."""
    letters = {m[2] for text in texts for m in _LETTERS.finditer(text) if m[2]}
    both = sorted(letter for letter in letters if letter.isupper() and letter.lower() in letters)
    unused = (c for c in "kpqrstuvwzabcmnxylj" if not {c, c.upper()} & letters)
    names = dict(zip(both, unused, strict=False))
    return [_LETTERS.sub(lambda m: names.get(m[2], m[0]), text) for text in texts]


def _as_set(read: Any) -> Any:
    """The set of numbers that inequalities of one variable describe; None for anything else."""
    if not isinstance(read, sympy.logic.boolalg.Boolean) or read.has(sympy.Eq):
        return None
    try:
        return read.as_set()
    except (NotImplementedError, TypeError, ValueError, AttributeError):
        return None


def _parsed(text: str) -> Any:
    """The sympy expression, set or relation of a formula; None if it does not parse."""
    latex = f"${_MIXED.sub(_SUM, in_radians(text))}$"
    [read] = parse(latex, [_CONFIG], fallback_mode="no_fallback", parsing_timeout=None) or [None]
    parts = getattr(read, "args", ())
    inequalities = [isinstance(x, sympy.Rel) and not isinstance(x, sympy.Eq) for x in parts]
    if " or " in text and parts and all(inequalities):
        return sympy.Union(*(part.as_set() for part in parts))
    imaginary = [symbol for symbol in getattr(read, "free_symbols", ()) if symbol.name == "i"]
    return read.subs({symbol: sympy.I for symbol in imaginary}) if imaginary else read
