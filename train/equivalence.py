"""Whether two final answers say the same: structure by rules of our own, formulas by math-verify.

The library compares expressions well, but what a bare LaTeX string is as a whole (a list, a tuple,
a relation, words) it guesses from context that an answer does not have. So that is decided here:

    x=5; (x,y)=(1,2)      names on the left count only where both answers have them
    x \\ge 5; 1<x<3        as sets; an interval says the same, a bound alone does not
    3, 5, 7; 2 or 3       lists in any order, all of them; so are sets {1, 2}
    (1,2); [1,2); <1,2>   in order, with the brackets that they have
    3:4; 1:2:3            ratios, by proportion
    5 apples, 50%, 1,234  numbers, exactly (see `train.answers`)
    (B), June 20, Evelyn  words, whatever their case and punctuation

and the parts between commas, brackets and relation signs go to the library, each as one formula.

Nothing here bounds how long sympy takes: callers run it where it can be killed
(`train.math_worker`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from train.answers import read_quantity, split_unit, without_thousands

_UNICODE = {
    "π": "\\pi ", "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "−": "-", "–": "-",
    "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "\\div ", "∪": "\\cup ", "∩": "\\cap ",
    "∈": "\\in ", "∅": "\\emptyset ", "°": "^\\circ ", "±": "\\pm ", "≈": "\\approx ",
    "²": "^{2}", "³": "^{3}", "⁴": "^{4}", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}",
    "¾": "\\frac{3}{4}", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "⟨": "\\langle ",
    "⟩": "\\rangle ", "ℝ": "\\mathbb{R}", "′": "'", "’": "'", "“": '"', "”": '"',
}  # fmt: skip
# (pattern, replacement), in this order: one spelling of what LaTeX has several for.
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"√\s*(\d+|[a-zA-Z]|\{[^{}]*\}|\([^()]*\))", r"\\sqrt{\1}"),
        (r"\\\$|\$|\\\(|\\\)|(?<!\\)\\\[|\\\](?!\])|\*\*", " "),
        (r"\\(?:left|right|[bB]ig+[lrm]?|displaystyle|textstyle|limits)(?![a-zA-Z])", ""),
        (r"\{,\}|,\\!", ","),
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
        (r"\s+", " "),
        (r"^ ?\\\{\s*[a-zA-Z]\s*(?:\\mid|\\vert|:|\|)(.*)\\\} ?$", r"\1"),
    )
]  # fmt: skip
_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname)\s*"
    r"\{([^{}]*)\}"
)
_RELATION = re.compile(
    r"\\(?:le|ge|ne|in|approx|equiv|sim|to)(?![a-zA-Z])|(?<![<>=!])=(?!=)|==|[<>]"
)
_ORDER = ("\\le", "\\ge", "<", ">", "\\ne")
_NAME = re.compile(
    r"(?:\\?[a-zA-Z]+|\\(?:text|mathrm|mathbf|vec|hat|bar|overline|angle)\s*\{?[^{}=]*\}?)"
    r"(?:_(?:\{[^{}]*\}|\w))?'*(?:\([\w\s,]*\))?|[A-Za-z][A-Za-z ]*"
)
_CONNECTIVE = re.compile(r"\s*,?\s+(?:and|or)\s+|\s*;\s*")
_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-zA-Z])")
_OPENING, _CLOSING = ("(", "[", "\\{"), (")", "]", "\\}")
_FORMULA_WORDS = frozenset(
    "and sin cos tan cot sec csc log exp sqrt frac mod gcd lcm max min".split()
)
_CHOICE = re.compile(r"\(?\s*([A-Z])\s*[).]?")


def same_answer(gold: str, found: str) -> bool:
    """Whether an answer that was found is the right one. Neither has to be wrapped in `$`."""
    gold, found = _clean(gold), _clean(found)
    if not gold or not found or not is_readable(gold):
        return False
    if _squeezed(gold) == _squeezed(found):
        return True
    return _same(without_thousands(gold), without_thousands(found))


def is_readable(gold: str) -> bool:
    """Whether a right answer in another spelling could be told from a wrong one."""
    gold = without_thousands(_clean(gold))
    return bool(gold) and _reads(gold)


def _clean(text: str) -> str:
    for symbol, command in _UNICODE.items():
        text = text.replace(symbol, command)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    text = text.strip()
    while text and text[-1] in ".,;: " and not text.endswith("\\ "):
        text = text[:-1]
    return text


def _squeezed(text: str) -> str:
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


# --- structure ------------------------------------------------------------------------------------


def _same(gold: str, found: str) -> bool:
    mine, theirs = _relation(gold), _relation(found)
    if mine or theirs:
        return _same_relation(gold, found, mine, theirs)
    if (_is_union(gold) or _is_union(found)) and (sets := _as_sets(gold, found)) is not None:
        return _same_sets(*sets)
    numbers = read_quantity(gold), read_quantity(found)
    if numbers[0] and numbers[1]:
        return numbers[0].equals(numbers[1])
    if _is_text(gold) or _is_text(found):
        listed = _list(gold), _list(found)
        both = listed[0] is not None and listed[1] is not None
        return _words(gold) == _words(found) or (both and _matches(*listed))
    if (choice := _CHOICE.fullmatch(_bare(gold))) and _is_choice(gold, found):
        other = _CHOICE.fullmatch(_bare(found))
        return other is not None and other[1] == choice[1]
    listed = _list(gold), _list(found)
    if listed[0] or listed[1]:
        return _same_lists(gold, found, *listed)
    bracketed = _bracketed(gold), _bracketed(found)
    if bracketed[0] and bracketed[1]:
        (left, right, mine), (other_left, other_right, theirs) = bracketed
        if left == other_left == "\\{":
            return _matches(mine, theirs)
        return (left, right) == (other_left, other_right) and _in_order(mine, theirs)
    if bracketed[0] or bracketed[1]:
        one = bracketed[0] or bracketed[1]
        other = found if bracketed[0] else gold
        if one[0] == "\\{" and len(one[2]) == 1:  # {5} is 5
            return _same(one[2][0], other)
        return False
    ratios = _ratio(gold), _ratio(found)
    if ratios[0] and ratios[1]:
        return _proportional(*ratios)
    if (ratios[0] or ratios[1]) and len(ratios[0] or ratios[1]) > 2:
        return False
    return _same_formula(gold, found)


def _split(text: str, separator: re.Pattern) -> list[tuple[str, str]]:
    """(part, separator after it), cut outside of all brackets and environments."""
    parts, depth, start, at = [], 0, 0, 0
    while at < len(text):
        if text.startswith("\\begin{", at):
            depth += 1
        elif text.startswith("\\end{", at):
            depth -= 1
        token = text[at : at + 2] if text[at] == "\\" else text[at]
        if token in ("{", *_OPENING):
            depth += 1
        elif token in ("}", *_CLOSING):
            depth -= 1
        match = separator.match(text, at) if depth == 0 and start < at else None
        if match and match.end() > at:
            parts.append((text[start:at].strip(), match[0].strip()))
            start = at = match.end()
        else:
            at += len(token)
    return [*parts, (text[start:].strip(), "")]


_COMMA = re.compile(r",\s*(?:and\s|or\s)?|\s(?:and|or)\s|;")


def _list(text: str) -> list[str] | None:
    """The elements of `3, 5 and 7`, or of `1 \\pm \\sqrt{2}`; None: it is no list."""
    parts = [part for part, _ in _split(text, _COMMA)]
    if len(parts) > 1:
        return parts if all(parts) else None
    if len(_PLUS_MINUS.findall(text)) == 1 and not _bracketed(text):
        plus, minus = (_PLUS_MINUS.sub(lambda m, s=s: s, text) for s in "+-")
        return [plus.strip().removeprefix("+"), minus]
    return None


def _bracketed(text: str) -> tuple[str, str, list[str]] | None:
    """(left, right, elements) of what stands whole in brackets with a comma in them, or braces."""
    left = next((b for b in _OPENING if text.startswith(b)), None)
    right = next((b for b in _CLOSING if text.endswith(b)), None)
    if left is None or right is None:
        return None
    if (left == "\\{") != (right == "\\}"):
        return None
    inside = text[len(left) : -len(right)]
    if not _is_balanced(inside):
        return None
    parts = [part for part, _ in _split(inside, _COMMA)]
    if left != "\\{" and len(parts) == 1:
        return None
    return left, right, parts


def _is_balanced(text: str) -> bool:
    """Whether every bracket that is closed in it was opened in it, and the other way round; of
    half-open intervals each closes the other."""
    depth, at = 0, 0
    while at < len(text):
        token = text[at : at + 2] if text[at] == "\\" else text[at]
        depth += (token in ("{", *_OPENING)) - (token in ("}", *_CLOSING))
        if depth < 0:
            return False
        at += len(token)
    return depth == 0


def _matches(gold: Sequence[str], found: Sequence[str]) -> bool:
    """Whether the elements are the same in some order."""
    left = list(found)
    if len(gold) != len(left):
        return False
    for element in gold:
        place = next((i for i, other in enumerate(left) if _equal(element, other)), None)
        if place is None:
            return False
        del left[place]
    return True


def _in_order(gold: Sequence[str], found: Sequence[str]) -> bool:
    return len(gold) == len(found) and all(map(_equal, gold, found))


def _equal(gold: str, found: str) -> bool:
    return _squeezed(gold) == _squeezed(found) or _same(gold, found)


def _same_lists(gold: str, found: str, mine: list[str] | None, theirs: list[str] | None) -> bool:
    if mine and theirs:
        names = [_names(parts) for parts in (mine, theirs)]
        # `x=1, y=2` and `2, 1` say different things, `x=1, x=2` and `2, 1` do not.
        if any(len(set(found)) > 1 for found in names) and len({bool(n) for n in names}) == 2:
            return _in_order(mine, theirs)
        return _matches(mine, theirs)
    bracketed = _bracketed(found if mine else gold)
    if bracketed is None:
        return False
    left, right, elements = bracketed
    if left == "\\{":
        return _matches(mine or elements, elements if mine else theirs)
    return (left, right) == ("(", ")") and _in_order(mine or elements, elements if mine else theirs)


def _names(parts: Sequence[str]) -> list[str]:
    found = [_relation(part) for part in parts]
    return [_squeezed(r[0][0]) for r in found if r and _is_assignment(r)]


def _ratio(text: str) -> list[str] | None:
    parts = [part for part, _ in _split(text, re.compile(r":"))]
    return parts if len(parts) > 1 and all(parts) else None


def _proportional(gold: list[str], found: list[str]) -> bool:
    if len(gold) != len(found):
        return False
    return all(
        _same_formula(f"({a}) \\cdot ({d})", f"({c}) \\cdot ({b})")
        for a, b, c, d in zip(gold, gold[1:], found, found[1:], strict=False)
    )


def _is_union(text: str) -> bool:
    """Whether it is a set that no pair of brackets describes."""
    return re.search(r"\\(?:cup|cap|setminus|mathbb)(?![a-zA-Z])", text) is not None


# --- words ----------------------------------------------------------------------------------------


def _bare(text: str) -> str:
    before = None
    while text != before:
        before, text = text, _TEXT_COMMAND.sub(r"\1", text)
    return text.strip()


def _is_text(text: str) -> bool:
    """Whether it is words and no formula."""
    bare = _bare(text)
    if "\\" in bare or "{" in bare or _relation(text):
        return False
    if re.search(r"\d\s*(?:[ap]\.?\s?m\b\.?)", bare, re.IGNORECASE):  # of the clock
        return True
    words = [w.lower() for w in re.findall(r"[^\W\d_]{2,}", bare)]
    if bare != text and words and not re.search(r"[-+*/^=]", bare):
        return True
    return any(len(word) >= 3 and word not in _FORMULA_WORDS for word in words)


def _words(text: str) -> list[str]:
    words = re.findall(r"[\w']+", _bare(text).casefold().replace(".", ""))
    return [word for word in words if word != "and"]


def _is_choice(gold: str, found: str) -> bool:
    """Whether a capital letter is that of a choice: one of both is in parentheses, or text."""
    return any(_bare(t) != t or t.startswith("(") or t.endswith(")") for t in (gold, found))


# --- relations ------------------------------------------------------------------------------------


def _relation(text: str) -> list[tuple[str, str]] | None:
    """[(part, sign after it), ...] of `1 < x \\le 3`; None: there is no sign outside of brackets,
    or it is a list of several relations."""
    parts = _split(text, _RELATION)
    if len(parts) < 2 or any(len(_split(part, _COMMA)) > 1 for part, _ in parts):
        return None
    return parts


def _is_assignment(parts: list[tuple[str, str]]) -> bool:
    """A name, or a tuple of names, and what it is."""
    left, sign = parts[0]
    if sign not in ("=", "==", "\\approx", "\\in", "\\to"):
        return False
    names = _bracketed(left)
    names = names[2] if names else [left]
    return all(_NAME.fullmatch(name) for name in names)


def _same_relation(gold: str, found: str, mine: list | None, theirs: list | None) -> bool:
    if mine and _is_assignment(mine):
        if theirs is None:
            return _equal(mine[-1][0], found)
        if _is_assignment(theirs):
            same_name = _squeezed(mine[0][0]) == _squeezed(theirs[0][0])
            return same_name and _equal(mine[-1][0], theirs[-1][0])
    elif mine is None and theirs and all(sign not in _ORDER for _, sign in theirs):
        if _is_assignment(theirs):
            theirs = theirs[1:]
        return all(_equal(gold, part) for part, _ in theirs)  # `2+3=5` says 5, `x+1=5` does not
    if (sets := _as_sets(gold, found)) is not None:
        return _same_sets(*sets)
    if mine and theirs and len(mine) == len(theirs) == 2:
        return _same_equation(mine, theirs) or _same_formula(gold, found)
    return False


def _same_equation(mine: list, theirs: list) -> bool:
    """Whether one is a multiple of the other."""
    if mine[0][1] != "=" or theirs[0][1] != "=":
        return False
    import sympy

    sides = [_formula(part) for part in (mine[0][0], mine[1][0], theirs[0][0], theirs[1][0])]
    if any(side is None or not isinstance(side, sympy.Expr) for side in sides):
        return False
    one, other = sides[0] - sides[1], sides[2] - sides[3]
    ratio = sympy.simplify(one.doit() / other.doit())
    return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)


def _as_sets(gold: str, found: str) -> tuple[Any, Any] | None:
    """The sets that both describe; None: one describes none, or they are of different variables."""
    names = _variables(gold), _variables(found)
    if names[0] and names[1] and names[0] != names[1]:
        return None
    sets = _as_set(gold), _as_set(found)
    return None if sets[0] is None or sets[1] is None else sets


def _variables(text: str) -> set[str]:
    """Names of the variables in the relations of a text."""
    found = set()
    for part, _ in _split(text, _COMMA):
        for side, _ in _relation(part) or ():
            found |= {symbol.name for symbol in getattr(_formula(side), "free_symbols", ())}
    return found


def _as_set(text: str) -> Any:
    """The set of numbers that inequalities, intervals or their union describe; None: neither."""
    import sympy

    parts = _split(text, _COMMA)
    if len(parts) > 1 and all(_relation(part) for part, _ in parts):
        sets = [_as_set(part) for part, _ in parts]
        if any(s is None for s in sets):
            return None
        both = any(sign.endswith("and") for _, sign in parts)
        return sympy.Intersection(*sets) if both else sympy.Union(*sets)
    relation = _relation(text)
    if relation and _is_assignment(relation) and relation[0][1] == "\\in":
        return _as_set(relation[-1][0])
    found = _formula(text)
    if isinstance(found, sympy.Set):
        return found
    if relation and found is not None and any(sign in _ORDER for _, sign in relation):
        if len(getattr(found, "free_symbols", ())) == 1:
            try:
                return _renamed(found).as_set()
            except (NotImplementedError, TypeError, ValueError, AttributeError):
                return None
    return None


def _renamed(relation: Any) -> Any:
    """With a real variable: what sympy makes sets of."""
    import sympy

    symbol = next(iter(relation.free_symbols))
    return relation.subs(symbol, sympy.Symbol("x", real=True)).doit()


def _same_sets(gold: Any, found: Any) -> bool:
    return bool(gold == found or gold.symmetric_difference(found).is_empty)


# --- formulas -------------------------------------------------------------------------------------


def _reads(text: str) -> bool:
    """Whether every part of an answer is a number, words, or a formula that the library parses."""
    if not _is_balanced(text) or text.count("\\begin{") != text.count("\\end{"):
        return False
    if read_quantity(text) or _is_text(text):
        return True
    relation = _relation(text)
    if relation:
        names = _is_assignment(relation)
        parts = [part for part, _ in (relation[1:] if names else relation)]
        return all(part and _reads(part) for part in parts)
    parts = _list(text)
    bracketed = _bracketed(text) if parts is None else None
    parts = parts or (bracketed[2] if bracketed else None) or _ratio(text)
    if parts:
        return all(part and _reads(part) for part in parts)
    return _formula(text) is not None


def _same_formula(gold: str, found: str) -> bool:
    from math_verify import verify

    gold, found = split_unit(gold)[0], split_unit(found)[0]
    sides = _formula(gold), _formula(found)
    if sides[0] is None or sides[1] is None:
        return False
    return bool(
        verify(
            [sides[0]],
            [sides[1]],
            timeout_seconds=None,
            allow_set_relation_comp=True,
        )
    )


@functools.lru_cache(maxsize=64)
def _formula(text: str) -> Any:
    """What the library reads in one formula; None: nothing."""
    import sympy
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    text = re.sub(r"(?<![a-zA-Z\\])i(?![a-zA-Z])", " i ", split_unit(text)[0])
    config = LatexExtractionConfig(
        boxed_match_priority=-1,
        # Units are cut off here already: the library takes the t of `2x+3t` for one.
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
        ),
    )
    if _APART.search(text):  # the library reads `1 2` as 12
        return None
    found = parse(f"${text}$", [config], fallback_mode="no_fallback", parsing_timeout=None)
    if not found:
        return None
    imaginary = [s for s in getattr(found[0], "free_symbols", ()) if s.name == "i"]
    return found[0].subs({symbol: sympy.I for symbol in imaginary}) if imaginary else found[0]


_APART = re.compile(r"(?<!\\frac )(?<!_)\d\s+\d")
