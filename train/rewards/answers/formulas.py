"""Parses one formula with math-verify, and compares formulas, equations and sets with sympy.

Nothing here limits the time that sympy takes.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from train.rewards.answers.latex import COMMA, ORDER, is_assignment, is_balanced, relation_of, split
from train.rewards.answers.quantity import TRIGONOMETRY, read_quantity, same_unit, split_unit


@functools.lru_cache(maxsize=64)
def formula_of(text: str) -> Any:
    """The sympy expression, set or relation of one formula; None if it does not parse."""
    text = re.sub(r"(?<![a-zA-Z\\])i(?![a-zA-Z])", " i ", split_unit(text)[0])
    config = LatexExtractionConfig(
        boxed_match_priority=-1,
        # `split_unit` removed the unit; the library would take the t of `2x+3t` for one.
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
        ),
    )
    if not is_balanced(text) or _MISREAD.search(text):
        return None
    if TRIGONOMETRY.search(text):
        text = _DEGREE.sub(r"(\1\\cdot\\frac{\\pi}{180})", text)
    text = _MIXED.sub(_mixed, text)
    found = parse(f"${text}$", [config], fallback_mode="no_fallback", parsing_timeout=None)
    if not found:
        return None
    imaginary = [s for s in getattr(found[0], "free_symbols", ()) if s.name == "i"]
    return found[0].subs({symbol: sympy.I for symbol in imaginary}) if imaginary else found[0]


# The library reads `1 2` and `1_2` as 12, and `= =` as `=`.
_MISREAD = re.compile(r"(?<!\\frac )(?<!_)\d\s+\d|\d\s*_|[=<>]\s+[=<>]")
_PRIMES = re.compile(r"'|\\prime(?![a-zA-Z])")
_DEGREE = re.compile(r"(\d+(?:\.\d+)?|[a-zA-Z])\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))")
# A whole number directly before a proper fraction of numbers: `2\frac{1}{3}\pi` is 7/3 of pi.
_MIXED = re.compile(
    r"(?<![\d.^_}\w])(\d+)\s*\\frac\s*(?:\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))"
)


def _mixed(match: re.Match) -> str:
    """Writes a mixed number as a sum; leaves a factor before an improper fraction as it is."""
    whole, over, under = (group for group in match.groups() if group is not None)
    return f"({whole}+\\frac{{{over}}}{{{under}}})" if int(over) < int(under) else match[0]


def same_formula(gold: str, found: str) -> bool:
    """Whether two formulas are mathematically equal, with units that agree."""
    (mine, my_unit), (theirs, their_unit) = split_unit(gold), split_unit(found)
    if not same_unit(my_unit, their_unit):
        return False
    if _PRIMES.findall(mine) != _PRIMES.findall(theirs):  # the library drops them
        return False
    mine, theirs = _told_apart(mine, theirs)
    sides = formula_of(mine), formula_of(theirs)
    if sides[0] is None or sides[1] is None:
        return False
    endless = (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)
    if all(isinstance(x, sympy.Expr) and x.is_number and not x.has(*endless) for x in sides):
        if _same_number(*sides):
            return True
        return _is_rounded(theirs, sides[0]) or _is_rounded(mine, sides[1])
    return bool(
        verify(
            [sides[0]],
            [sides[1]],
            float_rounding=_DIGITS,
            timeout_seconds=None,
            allow_set_relation_comp=True,
        )
    )


_DIGITS = 12  # relative precision at which numbers written with a decimal point are equal


def _same_number(gold: Any, found: Any) -> bool:
    """Whether two numbers are equal to 40 digits, or to 12 if one has a decimal point."""
    gold, found = gold.doit(), found.doit()
    if gold == found:
        return True
    if gold.is_Rational and found.is_Rational:
        return False
    digits = _DIGITS if gold.has(sympy.Float) or found.has(sympy.Float) else 40
    values = [sympy.N(side, digits + 10) for side in (gold, found)]
    if not all(value.is_number and value.is_finite for value in values):
        return False
    difference = abs(sympy.N(values[0] - values[1], digits + 10))
    return bool(difference <= abs(values[0]) * sympy.Rational(1, 10**digits))


def _is_rounded(text: str, exact: Any) -> bool:
    """Whether the decimal `text` is the number `exact`, rounded to enough digits."""
    quantity = read_quantity(text)
    if quantity is None or not quantity.decimals:
        return False
    value = sympy.N(exact.doit(), quantity.decimals + 40)
    if not value.is_Float:
        return False
    return quantity.rounds(Fraction(str(sympy.Rational(value))))


def _told_apart(*texts: str) -> list[str]:
    """Renames capital letters whose small letter occurs, too.

    The library takes both for one variable, and `R - r` for 0.
    """
    letters = {m[1] for text in texts for m in _LETTER.finditer(text) if m[1]}
    both = sorted(letter for letter in letters if letter.isupper() and letter.lower() in letters)
    unused = [c for c in "kpqrstuvwzabcmnxylj" if not {c, c.upper()} & letters]
    names = dict(zip(both, unused, strict=False))
    return [_LETTER.sub(lambda m: names.get(m[1], m[0]), text) for text in texts]


_LETTER = re.compile(
    r"\\(?:mathbb|begin|end|text\w*|math\w+|mbox|operatorname)\s*\{[^{}]*\}|\\[a-zA-Z]+|([a-zA-Z])"
)


def same_equation(mine: list, theirs: list) -> bool:
    """Whether two equations, split at their signs, are multiples of each other."""
    if mine[0][1] != "=" or theirs[0][1] != "=":
        return False
    texts = mine[0][0], mine[1][0], theirs[0][0], theirs[1][0]
    sides = [formula_of(text) for text in _told_apart(*texts)]
    if any(side is None or not isinstance(side, sympy.Expr) for side in sides):
        return False
    one, other = sides[0] - sides[1], sides[2] - sides[3]
    ratio = sympy.simplify(one.doit() / other.doit())
    return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)


def same_sets(gold: str, found: str) -> bool | None:
    """Whether two answers describe the same set of numbers; None if one describes none, or their
    variables differ."""
    names = _variables(gold), _variables(found)
    if names[0] and names[1] and names[0] != names[1]:
        return None
    mine, theirs = _as_set(gold), _as_set(found)
    if mine is None or theirs is None:
        return None
    return bool(mine == theirs or mine.symmetric_difference(theirs).is_empty)


def _variables(text: str) -> set[str]:
    """Names of the variables in the relations of a text."""
    found = set()
    for part, _ in split(text, COMMA):
        for side, _ in relation_of(part) or ():
            found |= {symbol.name for symbol in getattr(formula_of(side), "free_symbols", ())}
    return found


def _as_set(text: str) -> Any:
    """The set of numbers that inequalities or intervals describe; None for anything else."""
    parts = split(text, COMMA)
    if len(parts) > 1 and all(relation_of(part) for part, _ in parts):
        sets = [_as_set(part) for part, _ in parts]
        if any(s is None for s in sets):
            return None
        both = any(sign.endswith("and") for _, sign in parts)
        return sympy.Intersection(*sets) if both else sympy.Union(*sets)
    relation = relation_of(text)
    if relation and is_assignment(relation) and relation[0][1] == "\\in":
        return _as_set(relation[-1][0])
    found = formula_of(text)
    if isinstance(found, sympy.Set):
        return found
    if relation and found is not None and any(sign in ORDER for _, sign in relation):
        if len(symbols := getattr(found, "free_symbols", ())) == 1:
            real = found.subs(*symbols, sympy.Symbol("x", real=True))  # which `as_set` needs
            try:
                return real.doit().as_set()
            except (NotImplementedError, TypeError, ValueError, AttributeError):
                return None
    return None
