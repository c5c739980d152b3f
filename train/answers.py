"""Final answers: where they stand in a text, and which of them are plain numbers with units.

What counts as the answer of a completion: the last `\\boxed{}` or `\\fbox{}` with balanced braces,
wherever it stands; else what follows the last `####`, unless that line is a heading (text follows
on later lines); else what follows the last "answer is" or "answer:".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

ANSWER_MARK = "####"
LONGEST = 1000  # characters; what is longer is no answer worth a parser's time

# `\{` is no brace; `\boxed 5` is a box, as TeX reads it, but with all its digits.
_TOKEN = re.compile(
    r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\(?:boxed|fbox)\s+(?P<bare>[^\s${}\\]+)"
    r"|(?P<escaped>\\.)|(?P<open>\{)|(?P<close>\})",
    re.DOTALL,
)
_STATED = re.compile(r"\banswer(?:\s+is\b|\s*\**\s*:)[\s:*=]*", re.IGNORECASE)
_MATH_IN_TEXT = re.compile(r"\$\$(.+?)\$\$|\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")


def last_line_answer(text: str) -> str | None:
    """The rest of the line after the last `####`, stripped; None if there is no such mark."""
    _, mark, rest = text.rpartition(ANSWER_MARK)
    if not mark:
        return None
    lines = rest.strip().splitlines()
    return lines[0].strip() if lines else ""


def boxed(text: str) -> str | None:
    """What the last box with balanced braces holds; None without one that holds anything.

    Of boxes within a box the outer one is the answer. Takes time linear in the text.
    """
    found, opened = None, []  # where braces were opened: (start of what they hold, whether a box)
    for token in _TOKEN.finditer(text):
        kind = token.lastgroup
        if kind == "box":
            opened.append((token.end(), True))
        elif kind == "open":
            opened.append((token.end(), False))
        elif kind == "bare":
            found = token["bare"].rstrip(".,;") or found
        elif kind == "close" and opened:
            start, is_box = opened.pop()
            if is_box and (content := text[start : token.start()].strip()):
                found = content
    if found is None:
        return None
    inner = re.sub(r"\\(?:boxed|fbox)\s*(?=\{)", "", found)
    while inner != found and inner.startswith("{") and inner.endswith("}"):
        found = inner = inner[1:-1].strip()
    return inner


def final_answer(completion: str) -> str | None:
    """The answer of a completion by the rule in the module's docstring, stripped; None: no answer.

    The text after "answer is" ends with its sentence; where a formula stands in it (`$...$`,
    `\\(...\\)`), the answer is the formula.
    """
    found = boxed(completion)
    if found is None:
        found = _marked(completion)
    if found is None:
        found = _stated(completion)
    return found if found and len(found) <= LONGEST else None


def _marked(text: str) -> str | None:
    """After the last `####`: on its line, or alone on the next one; None for a heading."""
    _, mark, rest = text.rpartition(ANSWER_MARK)
    lines = [line.strip() for line in rest.splitlines() if line.strip()]
    if not mark or len(lines) != 1:
        return None
    return _stated(lines[0]) or lines[0]  # `#### The answer is 5`


def _stated(text: str) -> str | None:
    places = list(_STATED.finditer(text))
    if not places:
        return None
    rest = text[places[-1].end() :].lstrip()[: 2 * LONGEST]
    end = _SENTENCE_END.search(rest)
    sentence = rest[: end.start()] if end else rest
    formula = _MATH_IN_TEXT.search(rest)
    if formula and formula.start() < len(sentence):
        before = rest[: formula.start()].strip(" *")
        if not re.search(r"\d", before):  # the formula is the answer, not a part of it
            return next(group for group in formula.groups() if group is not None).strip()
    return sentence.strip().strip("*").strip()


def gold_answer(answer: str) -> str:
    """The answer that a row of data gives: boxed, after the last `####`, or else all of it."""
    found = boxed(answer)
    if found is None:
        found = last_line_answer(answer)
    return answer.strip() if found is None else found


# --- numbers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantity:
    """A number as somebody wrote it.

    Attributes:
      value: exactly. decimals: digits after the point; None: it was written as a fraction, whole.
      percent: a percent sign followed. unit: the word that followed, in lower case; "" without.
    """

    value: Fraction
    decimals: int | None = None
    percent: bool = False
    unit: str = ""

    def equals(self, other: Quantity) -> bool:
        """Whether both are the same number, one of them perhaps correctly rounded to six decimals
        or more. `50%` is both 50 and 1/2. Units do not count, unless both are known and differ."""
        mine, theirs = known_unit(self.unit), known_unit(other.unit)
        if mine and theirs and mine != theirs:
            return False
        pairs = [(self.value, other.value)]
        if self.percent != other.percent:
            pairs.append((self._share(), other._share()))
        return any(
            a == b or _rounds_to(a, b, other.decimals) or _rounds_to(b, a, self.decimals)
            for a, b in pairs
        )

    def _share(self) -> Fraction:
        return self.value / 100 if self.percent else self.value


def _rounds_to(exact: Fraction, rounded: Fraction, decimals: int | None) -> bool:
    return decimals is not None and decimals >= 6 and round(exact, decimals) == rounded


_THOUSANDS = re.compile(
    r"(?<![\d.,/])\d{1,3}(?:(?:(?:,|\{,\}|,\\!)\d{3})+(?![\d,])|(?:(?: |\\,)\d{3})+(?! ?[\d,/]))"
)
_DIGITS = r"(?:\d+(?:\.\d*)?|\.\d+)"
_SIGN = r"[-+]?"
_NUMBER_FORMS = {
    "repeating": re.compile(r"(\d*)\.(\d*)\\overline\s*\{(\d+)\}", re.ASCII),
    "power": re.compile(
        rf"({_DIGITS})\s*(?:[eE]|(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*)"
        r"(?:\{\s*([-+]?\d{1,3})\s*\}|\(?([-+]?\d{1,3})\)?)",
        re.ASCII,
    ),
    "mixed": re.compile(
        r"(\d+)(?:\s+(?:and\s+)?(\d+)\s*/\s*(\d+)"
        r"|\s*\\frac\s*(?:\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d)))",
        re.ASCII,
    ),
    "fraction": re.compile(
        rf"\\frac\s*(?:\{{\s*({_SIGN}{_DIGITS})\s*\}}\s*\{{\s*({_SIGN}{_DIGITS})\s*\}}"
        r"|\{\s*(\d+)\s*\}\s*(\d)|(\d)\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))",
        re.ASCII,
    ),
    "slash": re.compile(rf"\(?\s*({_DIGITS})\s*\)?\s*/\s*\(?\s*({_DIGITS})\s*\)?", re.ASCII),
    "plain": re.compile(rf"({_DIGITS})", re.ASCII),
}  # fmt: skip
_SIGNED = re.compile(r"(?:\(\s*(?P<inner>.*)\s*\)|(?P<sign>[-+]?)\s*(?P<rest>.*))", re.DOTALL)
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:percent|\\?%)\s*\}|\bpercent\b)$", re.I)
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|°)\s*(?:\\text\s*\{\s*)?[CF]?\s*\}?$")
_WRAPPED_UNIT = re.compile(
    r"^(?P<value>.*\S)\s*\\(?:text|textrm|textbf|textit|mathrm|mbox|rm)\s*"
    r"\{(?P<unit>[^{}\\\d]*[a-zA-Z][^{}\\\d]*)\}\s*(?P<power>\^\s*\{?\s*[23]\s*\}?|[²³])?$",
    re.DOTALL,
)
_PLAIN_UNIT = re.compile(
    r"^(?P<value>.*[\d.)}])(?P<space>\s*)(?P<unit>[a-zA-Z][a-zA-Z. /'-]*)"
    r"(?P<power>\s*(?:\^\s*\{?\s*[23]\s*\}?|[²³]))?$",
    re.DOTALL,
)
# Words that continue a formula and are no units.
_NO_UNITS = frozenset(
    "and or pi sqrt log ln sin cos tan cot sec csc exp mod choose plus minus times over to inf "
    "infinity infty oo if is not".split()
)
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_KNOWN_UNITS = {
    alias: name
    for name, aliases in {
        "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre",
        "km": "kilometer kilometre", "in": "inch inches", "ft": "foot feet", "yd": "yard",
        "mi": "mile", "mg": "milligram", "g": "gram", "kg": "kilogram", "lb": "pound",
        "oz": "ounce", "ml": "milliliter millilitre", "l": "liter litre", "s": "sec second",
        "min": "minute",
        "h": "hr hour", "day": "", "week": "", "month": "", "year": "yr", "mph": "",
        "kmh": "kph",
        "dollar": "usd", "cent": "", "degree": "deg", "radian": "rad", "unit": "",
    }.items()
    for alias in (name, *aliases.split())
}  # fmt: skip


def known_unit(unit: str) -> str | None:
    """The one name of a unit of measurement with many (`centimeters`, `cm`, `miles per hour`);
    None: not known."""
    unit = unit.lower().replace(".", "")
    parts = [_known_unit(part.split()) for part in re.split(r"\s+per\s+|\s*/\s*", unit)]
    if not all(parts):
        return None
    name = "/".join(parts)
    return {"mi/h": "mph", "km/h": "kmh"}.get(name, name)


def _known_unit(words: list[str]) -> str | None:
    power = ""
    if words and words[-1] in ("^2", "^3"):
        power = words.pop()
    if words and words[0] in ("square", "sq", "cubic", "cu"):
        power = "^2" if words.pop(0) in ("square", "sq") else "^3"
    if len(words) != 1:
        return None
    word = words[0]
    name = _KNOWN_UNITS.get(word) or _KNOWN_UNITS.get(word.removesuffix("s"))
    return f"{name}{power}" if name else None


def split_unit(text: str) -> tuple[str, str]:
    """(value, unit): cuts a unit such as `\\text{ cm}^2`, `apples` or `^\\circ` off; the unit is ""
    where nothing after the value is one."""
    degrees = _DEGREES.search(text)
    if degrees and degrees.start():
        return text[: degrees.start()], "degree"
    for pattern in (_WRAPPED_UNIT, _PLAIN_UNIT):
        match = pattern.match(text)
        if match is None:
            continue
        unit = match["unit"].strip()
        words = unit.replace(".", " ").lower().split()
        if not words or _NO_UNITS & set(words):
            continue
        power = "^" + re.sub(r"\D", "", _digits(match["power"])) if match["power"] else ""
        if pattern is _PLAIN_UNIT and not known_unit(unit):
            # `2 xy` and `2abc` are products; `5 apples` is not
            if not match["space"] or not any(len(word) >= 3 for word in words):
                continue
        if pattern is _PLAIN_UNIT and len(unit) == 1 and not match["space"]:
            continue  # `5m` may be five times m
        return match["value"].strip(), f"{unit.lower()} {power}".strip()
    return text, ""


def _digits(text: str) -> str:
    return text.replace("²", "2").replace("³", "3")


def without_thousands(text: str) -> str:
    """`1,234,567`, `1{,}234`, `1,\\!234` and `1\\,234` without separators; not
    inside of brackets, where commas separate the elements of tuples, intervals and sets."""
    return _THOUSANDS.sub(
        lambda m: m[0] if _in_brackets(text, m.start()) else re.sub(r"[^\d]", "", m[0]), text
    )


def _in_brackets(text: str, place: int) -> bool:
    before = text[:place]
    opened = len(re.findall(r"[(\[]|\\\{", before))
    return opened > len(re.findall(r"[)\]]|\\\}", before))


def read_quantity(text: str) -> Quantity | None:
    """Reads a number with what may surround it: `1,234`, `$ 5.50`, `-$3`, `40%`, `7.`, `1/2`,
    `\\frac{1}{2}`, `3 1/2`, `3\\frac{1}{2}`, `2.5e3`, `3 \\times 10^8`, `0.\\overline{3}`,
    `5 apples`, `5\\text{ cm}^2`, `90^\\circ`; None if it is anything else."""
    text = without_thousands(_stripped(text))
    currency = "dollar" if _DOLLARS.match(text) else ""
    text = re.sub(r"\\?[$€£]", " ", text).strip()
    percent = _PERCENT.search(text)
    if percent and percent.start():
        text = text[: percent.start()]
        return _number(text, percent=True)
    if (found := _number(text, unit=currency)) is not None:
        return found
    value, unit = split_unit(text)
    found = _number(value, unit=unit) if unit else None
    scale, _, rest = unit.partition(" ")
    if found is not None and scale in _SCALES:
        found = replace(found, value=found.value * _SCALES[scale], decimals=None, unit=rest)
    return found


_DOLLARS = re.compile(r"[-+]?\s*\\?\$[^$]*$")


_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"))


def _stripped(text: str) -> str:
    """Without spaces, math delimiters around all of it, emphasis and a final period."""
    before = None
    while text != before:
        before, text = text, text.strip().rstrip(".;").strip()
        for left, right in _DELIMITERS:
            inside = text[len(left) : -len(right)]
            whole = len(text) > len(left) + len(right) and left not in inside
            if whole and text.startswith(left) and text.endswith(right):
                text = inside if text[-len(right) - 1] != "\\" else text
    text = text.replace("−", "-").replace("–", "-").replace("\\dfrac", "\\frac")
    text = text.replace("\\tfrac", "\\frac").replace("\\cfrac", "\\frac")
    return re.sub(r"\\[,;: ]|\\!|~", " ", text.replace(",\\!", ",")).strip()


def _number(text: str, percent: bool = False, unit: str = "") -> Quantity | None:
    match = _SIGNED.fullmatch(text.strip())
    if match["inner"] is not None:
        return _number(match["inner"], percent, unit)
    sign, rest = (-1 if match["sign"] == "-" else 1), match["rest"].strip()
    for form, pattern in _NUMBER_FORMS.items():
        found = pattern.fullmatch(rest)
        if found is None:
            continue
        groups = [g for g in found.groups() if g is not None]
        try:
            value, decimals = _VALUES[form](groups)
        except ZeroDivisionError:
            return None
        return Quantity(sign * value, decimals, percent, unit)
    return None


def _plain(groups: list[str]) -> tuple[Fraction, int]:
    return Fraction(groups[0].removesuffix(".")), len(groups[0].partition(".")[2])


def _ratio(groups: list[str]) -> tuple[Fraction, None]:
    return Fraction(groups[0].removesuffix(".")) / Fraction(groups[1].removesuffix(".")), None


def _mixed(groups: list[str]) -> tuple[Fraction, None]:
    return int(groups[0]) + Fraction(int(groups[1]), int(groups[2])), None


def _power(groups: list[str]) -> tuple[Fraction, None]:
    return Fraction(groups[0].removesuffix(".")) * Fraction(10) ** int(groups[1]), None


def _repeating(groups: list[str]) -> tuple[Fraction, None]:
    whole, fixed, repeated = groups
    scale = 10 ** len(fixed)
    period = Fraction(int(repeated), (10 ** len(repeated) - 1) * scale)
    return int(whole or "0") + Fraction(int(fixed or "0"), scale) + period, None


_VALUES = {
    "repeating": _repeating, "power": _power, "mixed": _mixed, "fraction": _ratio,
    "slash": _ratio, "plain": _plain,
}  # fmt: skip
