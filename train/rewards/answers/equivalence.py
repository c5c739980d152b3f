"""Decides whether two answers are the same.

Rules for the structure of an answer come first, because a bare LaTeX string does not tell the
library whether it is a list, a tuple, a relation or words:

    x=5; (x,y)=(1,2)      names on the left count only if both answers have them, and give the
                          order of values without names: `y=1, x=2` is (2,1)
    x \\ge 5; 1<x<3        compared as sets, also with intervals; not with a bound alone
    3, 5, 7; 2 or 3       lists in any order, complete; so are sets {1, 2}
    (1,2); [1,2); <1,2>   in order, with the same brackets: `1, 2` is no point
    1101_2; A3_{16}       digits and base: digits without a base are decimal, so neither `1101`
                          nor `13` is `1101_2`
    3:4; 1:2:3            ratios, by proportion
    6:15; 6:15 p.m.       a gold answer that may be a time of day is one, and no ratio
    5 apples, 50%, 1,234  numbers, exactly or rounded (see `quantity`)
    2+3, 6 \\cdot 7        arithmetic that was not carried out is right only if the gold answer is
                          such arithmetic, too
    (B), June 20, Evelyn  words without regard to case, quotes and commas; numbers, signs,
                          operators and brackets among them count
    (D) 12                a choice and its text: either is enough, both have to be right

The parts between commas, brackets and relation signs are compared by `formulas`.

sympy may run forever on a policy's text: `train.rewards.builtin` calls this in a process that is
ended when the time is up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction

from train.rewards.answers.extract import LONGEST
from train.rewards.answers.formulas import same_equation, same_formula, same_sets
from train.rewards.answers.latex import (
    COMMA,
    ORDER,
    Brackets,
    brackets_of,
    clean,
    elements_of,
    is_assignment,
    relation_of,
    split,
    squeezed,
    unwrapped,
)
from train.rewards.answers.quantity import read_quantity, split_unit, without_thousands


def same_answer(gold: str, found: str) -> bool:
    """Whether the answer `found` is the right one. `$` around either does not count."""
    if max(len(gold), len(found)) > LONGEST:
        return False
    gold, found = clean(gold), clean(found)
    if squeezed(gold) == squeezed(found):  # `100,200` may be a number, and `100, 200` a list
        found = gold
    gold, found = without_thousands(gold), without_thousands(found)
    return bool(gold and found) and _same(gold, found)


def _same(gold: str, found: str) -> bool:
    """Compares by the first of `_KINDS` that applies; as formulas if none does."""
    for kind in _KINDS:
        verdict = kind(gold, found)
        if verdict is not None:
            return verdict
    if _is_undone(found) and not _is_undone(gold):
        return False
    return same_formula(gold, found)


def _matches(gold: Sequence[str], found: Sequence[str]) -> bool:
    """Whether two lists have the same elements in any order."""
    left = list(found)
    if len(gold) != len(left):
        return False
    for element in gold:
        place = next((i for i, other in enumerate(left) if _same(element, other)), None)
        if place is None:
            return False
        del left[place]
    return True


def _in_order(gold: Sequence[str], found: Sequence[str]) -> bool:
    """Whether two lists have the same elements in the same order."""
    return len(gold) == len(found) and all(map(_same, gold, found))


def _is_undone(text: str) -> bool:
    """Whether a text is arithmetic of numerals that was not carried out: `2+3`."""
    text = split_unit(text)[0]
    return bool(_ARITHMETIC.fullmatch(text) and _OPERATION.search(text))


_ARITHMETIC = re.compile(
    r"(?:[\d.+\-*/(){}%\s]|\\(?:cdot|times|div|frac)(?![a-zA-Z])|\\%)+", re.ASCII
)
_OPERATION = re.compile(r"[\d)}%]\s*[-+]|\*|\\(?:cdot|times)|[\d)]\s*\(")
# Digits and their base. A single letter is a numeral only with a base of 16 or more.
_NUMERAL = re.compile(
    r"\(?(-?(?=[A-F]*\d)[0-9A-Z]+|[A-F]+(?=_\{?1[6-9]))\)?\s*_\s*"
    r"(?:\{\s*(?:\\text\s*\{)?\s*(?:base)?\s*(\d{1,2}|[a-z]+)\s*\}?\s*\}|(\d))"
)
_BASES = {"two": "2", "three": "3", "five": "5", "eight": "8", "ten": "10", "sixteen": "16"}


def _same_numerals(gold: str, found: str) -> bool | None:
    """Compares `1101_2` with anything; None if neither has a base."""
    numerals = _NUMERAL.fullmatch(gold), _NUMERAL.fullmatch(found)
    if not any(numerals):
        return None
    bases = [m and (m[2] or m[3]) for m in numerals]
    bases = [_BASES.get(base, base) for base in bases]
    return all(numerals) and numerals[0][1] == numerals[1][1] and bases[0] == bases[1]


_LABELLED = re.compile(
    r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{\s*\(([A-Z])\)\s*\}\s*(?!,|and\b|or\b)(\S.*)"
)
_CHOICE = re.compile(r"\(\s*([A-Z])\s*\)\.?|([A-Z])\s*[).]?")


def _choice(text: str) -> tuple[list[str], str]:
    """The letters of `(C)`, `\\text{C}`, `(A), (C)` or `\\textbf{(D)} 12`, and the text behind."""
    if labelled := _LABELLED.fullmatch(text):
        return [labelled[1]], labelled[2]
    letters = [_CHOICE.fullmatch(part) for part, _ in split(unwrapped(text), COMMA)]
    return ([m[1] or m[2] for m in letters], "") if all(letters) else ([], text)


def _is_marked(text: str) -> bool:
    """Whether a capital letter is in parentheses or `\\text`, and hence no variable."""
    return unwrapped(text) != text or text.startswith("(") or text.endswith(")")


def _same_choice(gold: str, found: str) -> bool | None:
    """Compares letters of choices: `(C)`, `A and D` in any order, or a letter with its text; None
    if one side is no choice."""
    (mine, my_text), (theirs, their_text) = _choice(gold), _choice(found)
    if not (mine or theirs) or not (mine and theirs or my_text and their_text):
        return None
    if not (my_text or their_text) and not (_is_marked(gold) or _is_marked(found)):
        return None  # variables, perhaps
    if mine and theirs and sorted(mine) != sorted(theirs):
        return False
    return _same(my_text, their_text) if my_text and their_text else True


_SHORT_WORDS = frozenset("n/a no ok up in on he it we".split())


def _same_short_words(gold: str, found: str) -> bool | None:
    """Compares words that are as short as products of variables; None if one is no such word."""
    words = {unwrapped(text).casefold() for text in (gold, found)}
    return len(words) == 1 if words <= _SHORT_WORDS else None


_VARIABLE = re.compile(r"(\\?[a-zA-Z]|\\[a-z]+)(?:_\{?(\d{1,3})\}?)?")


def _named(text: str) -> dict[str, str] | None:
    """{name: value} of several different names; None if there are none.

    Variables of one letter are in the order of the alphabet and of their indices, other names in
    the order in which they are written.
    """
    relation = relation_of(text)
    if relation and len(relation) == 2 and is_assignment(relation):
        names, values = (brackets_of(side) for side, _ in relation)
        if not names or not values or len(names.elements) != len(values.elements):
            return None
        pairs = list(zip(names.elements, values.elements, strict=True))
    else:
        relations = [relation_of(part) for part, _ in split(text, COMMA)]
        if len(relations) < 2 or not all(r and len(r) == 2 and is_assignment(r) for r in relations):
            return None
        pairs = [(r[0][0], r[1][0]) for r in relations]
    pairs = [(squeezed(name), value) for name, value in pairs]
    if len({name for name, _ in pairs}) < len(pairs) or any("(" in name for name, _ in pairs):
        return None
    keys = [_VARIABLE.fullmatch(name) for name, _ in pairs]
    if all(keys):
        order = [(key[1], int(key[2] or 0)) for key in keys]
        pairs = [pair for _, pair in sorted(zip(order, pairs, strict=True))]
    return dict(pairs)


def _same_names(gold: str, found: str) -> bool | None:
    """Compares `x=1, y=2` and `(x,y)=(1,2)` with each other, or with values without names, which
    are in the order of the names; None if neither has several names."""
    mine, theirs = _named(gold), _named(found)
    if mine is None and theirs is None:
        return None
    if mine is not None and theirs is not None:
        return mine.keys() == theirs.keys() and all(_same(mine[n], theirs[n]) for n in mine)
    bare = _collection(found if theirs is None else gold)
    if bare is None or bare[:2] not in (("", ""), ("(", ")")):
        return False
    return _in_order(
        bare.elements if mine is None else list(mine.values()),
        bare.elements if theirs is None else list(theirs.values()),
    )


_UNION = re.compile(r"\\(?:cup|cap|setminus|mathbb)(?![a-zA-Z])")


def _same_relations(gold: str, found: str) -> bool | None:
    """Compares relations, and unions of sets, with anything; None if neither is one."""
    mine, theirs = relation_of(gold), relation_of(found)
    if not (mine or theirs or _UNION.search(f"{gold} {found}")):
        return None
    if mine and is_assignment(mine):
        if theirs is None:
            return _same(mine[-1][0], found)
        if is_assignment(theirs):
            same_name = squeezed(mine[0][0]) == squeezed(theirs[0][0])
            if same_name:
                return _same(mine[-1][0], theirs[-1][0])
            # `y=x` and `x=y`
            return len(mine) == len(theirs) == 2 and same_equation(mine, theirs)
    elif mine is None and theirs and all(sign not in ORDER for _, sign in theirs):
        if is_assignment(theirs):
            theirs = theirs[1:]
        # `2+3=5` says 5, `x+1=5` does not
        *steps, last = [part for part, _ in theirs]
        return _same(gold, last) and all(_same(gold, s) or same_formula(gold, s) for s in steps)
    if (verdict := same_sets(gold, found)) is not None:
        return verdict
    if not (mine and theirs and len(mine) == len(theirs) == 2):
        return False if mine or theirs else None
    if mine[0][1] == theirs[0][1] and all(
        _same(a, b) for (a, _), (b, _) in zip(mine, theirs, strict=True)
    ):
        return True
    return same_equation(mine, theirs) or same_formula(gold, found)


def _same_quantities(gold: str, found: str) -> bool | None:
    """Compares numbers with units; None if one is no number."""
    mine, theirs = read_quantity(gold), read_quantity(found)
    return mine.equals(theirs) if mine and theirs else None


_CLOCK = re.compile(
    r"(?P<hour>\d{1,2})(?::(?P<minute>[0-5]\d)(?::(?P<second>[0-5]\d))?)?"
    r"(?:\s*(?P<half>[ap])\.?\s?m\.?)?",
    re.IGNORECASE | re.ASCII,
)


def _time(text: str) -> tuple[int, str, bool] | None:
    """Reads `6:15`, `18:15:30`, `6:15 p.m.` and `6 PM`; None if it is no time of day.

    Returns:
      seconds since midnight, the half of the day if it is written, and whether it is written with
      an hour that both halves have.
    """
    match = _CLOCK.fullmatch(unwrapped(text))
    if match is None:
        return None
    hour, minute, second = (int(match[name] or 0) for name in ("hour", "minute", "second"))
    half = (match["half"] or "").lower()
    if (not half and match["minute"] is None) or hour > 24 or (half and not 1 <= hour <= 12):
        return None
    is_either = not half and 1 <= hour <= 12
    if half:
        hour = hour % 12 + 12 * (half == "p")
    return hour * 3600 + minute * 60 + second, half, is_either


def _same_times(gold: str, found: str) -> bool | None:
    """Compares a gold time of day with a time, a ratio or a number; None if it is none.

    The half of the day counts if both give one. `5:12` may be a ratio in lowest terms, so it may be
    given as a fraction.
    """
    mine, theirs = _time(gold), _time(found)
    if mine is None:
        return None
    if theirs is not None:
        one_says = bool(mine[1]) != bool(theirs[1]) and (mine[2] or theirs[2])
        return (mine[0] - theirs[0]) % (43_200 if one_says else 86_400) == 0
    may_be_ratio = math.gcd(*map(int, re.findall(r"\d+", gold))) == 1 and not _ratio(found)
    return None if mine[1] or may_be_ratio else False


_FORMULA_WORDS = frozenset(
    "and sin cos tan cot sec csc log exp sqrt frac mod gcd lcm max min".split()
)


def _is_text(text: str) -> bool:
    """Whether a text is words and no formula."""
    if text == "\\dots":
        return True
    bare = unwrapped(text)
    if "\\" in bare or "{" in bare or relation_of(text):
        return False
    if re.search(r"\d\s*(?:[ap]\.?\s?m\b\.?)", bare, re.IGNORECASE):  # a time of day
        return True
    words = [w.lower() for w in re.findall(r"[^\W\d_]{2,}", bare)]
    if bare != text and words and not re.search(r"[-+*/^=]", bare):
        return True
    return any(len(word) >= 3 and word not in _FORMULA_WORDS for word in words)


# Skipped: commas, quotes, hyphens within words, and periods or colons after words.
_TOKEN = re.compile(
    r"(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<word>[^\W\d_]+(?:[.'][^\W\d_]+)*(?:(?<=[^\W\d_]{2})')?)"
    r"(?:[.:]|(?<=[^\W\d_]{2})[-!](?=[^\W\d_]{2}|$))?|[,;\"\s]|(?<!\S)'|'(?!\S)|\.$"
    r"|(?P<sign>.)",
    re.DOTALL,
)


def _words(text: str) -> list[str | Fraction]:
    """The words of a text in lower case, with numbers, operators and brackets between them."""
    found: list[str | Fraction] = []
    for token in _TOKEN.finditer(unwrapped(text).casefold().replace("\\%", "%")):
        if token["number"]:
            found.append(Fraction(token["number"]))
        elif token["word"]:
            found.append(re.sub(r"[.'\"]", "", token["word"]))
        elif token["sign"]:
            found.append(token["sign"])
    return [word for word in found if word != "and"]


def _same_texts(gold: str, found: str) -> bool | None:
    """Compares words, or lists of them, with anything; None if neither is words."""
    if not (_is_text(gold) or _is_text(found)):
        return None
    if _words(gold) == _words(found):
        return True
    mine, theirs = elements_of(unwrapped(gold)), elements_of(unwrapped(found))
    return mine is not None and theirs is not None and _matches(mine, theirs)


def _collection(text: str) -> Brackets | None:
    """Reads a tuple, interval or set, or a list without brackets."""
    elements = elements_of(text)
    return brackets_of(text) if elements is None else Brackets("", "", elements)


def _same_collections(gold: str, found: str) -> bool | None:
    """Compares lists and sets, which have no order, tuples and intervals, and {5} with 5; None if
    neither is one of them."""
    mine, theirs = _collection(gold), _collection(found)
    if mine and theirs:
        if {mine.left, theirs.left} <= {"", "\\{"}:
            return _matches(mine.elements, theirs.elements)
        return mine[:2] == theirs[:2] and _in_order(mine.elements, theirs.elements)
    if not (mine or theirs):
        return None
    left, _, elements = mine or theirs
    return left == "\\{" and len(elements) == 1 and _same(elements[0], found if mine else gold)


def _ratio(text: str) -> list[str] | None:
    """The terms of `1:2:3`; None if it is no ratio."""
    parts = [part for part, _ in split(text, re.compile(r":"))]
    return parts if len(parts) > 1 and all(parts) else None


def _proportional(gold: list[str], found: list[str]) -> bool:
    """Whether two ratios have the same number of terms, in the same proportions."""
    if len(gold) != len(found):
        return False
    return all(
        same_formula(f"({a}) \\cdot ({d})", f"({c}) \\cdot ({b})")
        for a, b, c, d in zip(gold, gold[1:], found, found[1:], strict=False)
    )


def _same_ratios(gold: str, found: str) -> bool | None:
    """Compares ratios; None if neither is one, or for a ratio of two numbers with a number."""
    mine, theirs = _ratio(gold), _ratio(found)
    if mine and theirs:
        return _proportional(mine, theirs)
    return False if (mine or theirs) and len(mine or theirs) > 2 else None


# The kinds of answers. Each function says whether two answers are the same, or None if it does not
# apply to them; the first that applies decides.
_KINDS = (
    _same_numerals,
    _same_choice,
    _same_short_words,
    _same_names,
    _same_relations,
    _same_quantities,
    _same_times,
    _same_texts,
    _same_collections,
    _same_ratios,
)
