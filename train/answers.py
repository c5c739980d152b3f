"""Final answers: where they stand in a text, and which of them are plain numbers with units.

What counts as the answer of a completion: the last `\\boxed{}` or `\\fbox{}` with balanced braces,
wherever it stands; else what follows the last `####`, unless that line is a heading (text follows
on later lines); else what follows the last "answer is" or "answer:".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
_STATED = re.compile(r"\banswer(?:\s{1,20}is\b|[\s*]{0,20}:)[\s:*=]*", re.IGNORECASE)  # linear
# A formula in a text, or the end of what a sentence says, where a remark may follow.
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

    The text after "answer is" ends with its sentence; where one formula ends it (`$...$`,
    `\\(...\\)`), the answer is the formula, and of several all that is said.
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
    formulas, end = [], len(rest)
    for piece in _MATH_OR_END.finditer(rest):
        if piece["end"] is not None:
            end = piece.start()
            break
        formulas.append(piece)
    sentence = rest[:end]
    if formulas and not re.search(r"\d", rest[: formulas[0].start()]):
        # Else the formula is a part of the answer; so is what follows it.
        sentence = sentence[formulas[0].start() :]
        if not sentence[len(formulas[0][0]) :].strip(" *.,;:"):
            return next(g for g in formulas[0].groups() if g is not None).strip()
    return sentence.strip().strip("*").strip()


# One gold answer, or several of which any is right.
Gold = str | tuple[str, ...]


def each_gold(answer: str | Sequence[str]) -> tuple[str, ...]:
    """The gold answers, of which any is right."""
    return (answer,) if isinstance(answer, str) else tuple(answer)


def gold_answer(answer: str) -> str:
    """The answer that a row of data gives: boxed, after the last `####`, or else all of it."""
    found = boxed(answer)
    if found is None:
        found = last_line_answer(answer)
    return answer.strip() if found is None else found


def stated_gold(answer: str) -> str:
    """The same without a phrase that announces it: `Final Answer: 42` is 42."""
    gold = gold_answer(answer)
    return (_stated(gold) or gold) if _ANNOUNCED.match(gold) else gold


_ANNOUNCED = re.compile(r"\W{0,9}(?:the )?(?:final |correct )?answer\b", re.IGNORECASE)


# --- numbers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantity:
    """A number as it is written in a text.

    Attributes:
      value: exactly. decimals: digits after the point; None: it was written as a fraction, whole.
      percent: a percent sign followed. unit: the words that followed, or the name of a currency
        ("dollar", "euro", "gbp") for its sign; "" without.
    """

    value: Fraction
    decimals: int | None = None
    percent: bool = False
    unit: str = ""

    def equals(self, other: Quantity) -> bool:
        """Whether both are the same number, one of them perhaps correctly rounded to six
        significant digits or more (see `rounds`). `50%` is both 50 and 1/2, but no number of
        anything else. Two units have to be the same one, but for dollars and cents; a number
        without a unit may be of any."""
        self, other = _in_one_currency(self, other)
        if not same_unit("%" if self.percent else self.unit, "%" if other.percent else other.unit):
            return False
        pairs = [(self, other)]
        if self.percent != other.percent:
            pairs.append((self._share(), other._share()))
        return any(a.value == b.value or b._rounds(a) or a._rounds(b) for a, b in pairs)

    def _share(self) -> Quantity:
        return _hundredth(self, self.unit) if self.percent else self

    def _rounds(self, exact: Quantity) -> bool:
        if exact.decimals is not None and (self.decimals or 0) < SIGNIFICANT_DIGITS:
            return False  # $12,345.70 is not $12,345.67
        return self.rounds(exact.value)

    def rounds(self, exact: Fraction) -> bool:
        """Whether this is `exact` rounded to the digits that are written, at least six significant
        ones of them, or cut off after at least seven, which is as near; leading zeros are not
        significant, and integers are exact."""
        if not self.decimals:
            return False
        scale = 10**self.decimals
        significant = len(str(abs(int(self.value * scale))))
        if significant < SIGNIFICANT_DIGITS:
            return False
        if self.value == round(exact, self.decimals):
            return True
        return significant > SIGNIFICANT_DIGITS and self.value * scale == int(exact * scale)


SIGNIFICANT_DIGITS = 6
_THOUSANDS = re.compile(
    r"(?<![\d.,/])(?<!\d )(?<!\d\\,)\d{1,3}"
    r"(?:(?:(?:,|\{,\}|,\\!)\d{3})+(?![\d,])|(?:(?: |\\,)\d{3})+(?! ?[\d,/]))"
)
_BRACKET_OR_THOUSANDS = re.compile(
    rf"(?P<open>[(\[]|\\\{{)|(?P<close>[)\]]|\\\}})|{_THOUSANDS.pattern}"
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
    "ten": re.compile(r"10\s*(?:\^|\*\*)\s*(?:\{\s*([-+]?\d{1,3})\s*\}|\(?([-+]?\d)\)?)", re.ASCII),
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
_DEGREES = re.compile(
    r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|°)\s*(?:\\(?:text|mathrm)\s*\{\s*)?(?P<scale>[CF])?\s*\}?$"
)
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
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
# Words that continue a formula or a sentence and are no units.
_NO_UNITS = frozenset(
    "and or pi sqrt log ln sin cos tan cot sec csc exp mod choose plus minus times over to inf "
    "infinity infty oo if is not factorial halves thirds fourths fifths sixths sevenths eighths "
    "ninths tenths hundredths thousandths millionths below negative root than".split()
)
_POWERS = {"squared": "^2", "cubed": "^3"}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_SCALES |= {"trillion": 10**12}
_KNOWN_UNITS = {
    alias: name
    for name, aliases in {
        "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre",
        "km": "kilometer kilometre", "in": "inch inches", "ft": "foot feet", "yd": "yard",
        "mi": "mile", "mg": "milligram", "g": "gram", "kg": "kilogram", "lb": "pound",
        "oz": "ounce", "ml": "mL milliliter millilitre", "l": "L liter litre", "s": "sec second",
        "ms": "millisecond", "min": "minute", "h": "hr hour", "day": "", "week": "wk",
        "month": "", "year": "yr", "mph": "", "kmh": "kph", "gal": "gallon", "qt": "quart",
        "tsp": "teaspoon", "tbsp": "tablespoon", "dollar": "usd USD", "cent": "¢",
        "euro": "eur EUR", "degree": "deg", "radian": "rad", "unit": "", "N": "newton",
        "kN": "kilonewton", "J": "joule", "kJ": "kilojoule", "W": "watt", "mW": "milliwatt",
        "kW": "kilowatt", "MW": "megawatt",
        "Pa": "pascal", "kPa": "kilopascal", "Hz": "hertz", "V": "volt", "A": "amp ampere",
        "K": "kelvin", "mol": "mole", "C": "celsius", "F": "fahrenheit", "%": "percent",
    }.items()
    for alias in (name, *aliases.split())
}  # fmt: skip


def same_unit(mine: str, theirs: str) -> bool:
    """Whether two units of measurement are the same one; "" may be any."""
    if not mine or not theirs:
        return True
    one, other = _unit_name(mine), _unit_name(theirs)
    if "degree" in (one, other):  # of an angle or of a temperature
        return one.split()[0] == other.split()[0]
    return one == other


def _in_one_currency(one: Quantity, other: Quantity) -> tuple[Quantity, Quantity]:
    """Both in dollars, if one of them is and the other is in cents: `5¢` is `$0.05`."""
    units = [_unit_name(amount.unit).partition("/") for amount in (one, other)]
    if {unit[0] for unit in units} != {"dollar", "cent"}:
        return one, other
    if units[0][0] == "cent":
        return _hundredth(one, f"dollar{''.join(units[0][1:])}"), other
    return one, _hundredth(other, f"dollar{''.join(units[1][1:])}")


def _hundredth(amount: Quantity, unit: str) -> Quantity:
    decimals = None if amount.decimals is None else amount.decimals + 2
    return replace(amount, value=amount.value / 100, decimals=decimals, unit=unit)


def known_unit(unit: str) -> bool:
    """Whether every word of it names a unit of measurement (`square centimeters`, `m/s`)."""
    parts = _unit_parts(unit)
    return all(words and all(word in _NAMES for word in words) for words, _ in parts)


_NAMES = frozenset(_KNOWN_UNITS.values())


def _unit_name(unit: str) -> str:
    """The one name of a unit with many (`centimeters` and `cm`, `miles per hour` and `mph`). Words
    that are not known are themselves, in the singular."""
    name = "/".join(f"{' '.join(words)}{power}" for words, power in _unit_parts(unit))
    return {"mi/h": "mph", "km/h": "kmh"}.get(name, name)


def _unit_parts(unit: str) -> list[tuple[list[str], str]]:
    """(words, "^2", "^3" or "") on each side of `per` or a slash."""
    spaced = re.sub(r"\^\s*\{?\s*([23])\s*\}?", r" ^\1", unit.replace(".", "")).strip()
    parts = re.split(r"(?:^|\s+)per\s+|\s*/\s*", spaced)
    return [_unit_part(part.split()) for part in parts]


def _unit_part(words: list[str]) -> tuple[list[str], str]:
    power = ""
    if len(words) > 1 and (words[-1] in ("^2", "^3") or words[-1].lower() in _POWERS):
        power = _POWERS.get(words[-1].lower(), words[-1])
        words = words[:-1]
    if len(words) > 1 and words[0].lower() in ("square", "sq", "cubic", "cu"):
        power = "^2" if words[0].lower() in ("square", "sq") else "^3"
        words = words[1:]
    return [_unit_word(word) for word in words], power


def _unit_word(word: str) -> str:
    """Upper and lower case differ in symbols (`mW`, `MW`) and not in words."""
    lower = word.lower()
    spelled = [word] if len(word) < 4 and not (word.isupper() and len(word) > 1) else [word, lower]
    if len(word) == 3 and word.istitle():
        spelled.append(lower)
    for name in spelled:
        for singular in (name, name.removesuffix("s"), name.removesuffix("es")):
            if singular in _KNOWN_UNITS:
                return _KNOWN_UNITS[singular]
    if len(word) < 4:
        return word
    if lower.endswith("ies"):
        return f"{lower[:-3]}y"
    if re.search(r"(?:s|x|z|ch|sh|o)es$", lower):
        return lower[:-2]
    return lower[:-1] if lower.endswith("s") and not lower.endswith("ss") else lower


def split_unit(text: str) -> tuple[str, str]:
    """(value, unit): cuts a unit such as `\\text{ cm}^2`, `apples` or `^\\circ` off; the unit is ""
    where nothing after the value is one.

    Letters that are not wrapped in `\\text` or `\\mathrm` are a unit after a plain number alone:
    in `\\pi r^2 h` they are a factor. Names of units that cannot be meant as a product
    (`10\\sqrt{3} units`) are one after any value.
    """
    degrees = _DEGREES.search(text)
    if degrees and degrees.start() and not _TRIGONOMETRY.search(text):
        return text[: degrees.start()], f"degree {degrees['scale'] or ''}".strip()
    for pattern in (_WRAPPED_UNIT, _PLAIN_UNIT):
        match = pattern.match(text)
        if match is None:
            continue
        unit = match["unit"].strip()
        words = unit.replace(".", " ").lower().split()
        if not words or words[0] in _POWERS or _NO_UNITS & set(words):
            continue
        if pattern is _PLAIN_UNIT and not _is_plain_unit(match["value"], match["space"], unit):
            continue
        power = (match["power"] or "").replace("²", "2").replace("³", "3")
        power = f"^{re.sub(r'[^23]', '', power)}" if power else ""
        return match["value"].strip(), f"{unit} {power}".strip()
    return text, ""


def _is_plain_unit(value: str, space: str, unit: str) -> bool:
    known = known_unit(unit)
    if _number(value) is None:
        return known and all(len(word) >= 4 for word in unit.split() if word != "per")
    if not known:
        # `2 xy` and `2abc` are products; `5 apples` is not
        return bool(space) and any(len(word) >= 3 for word in unit.split())
    # `5m` may be five times m, and `\\frac{1}{2} g` is a formula
    return len(unit) > 1 or (bool(space) and "\\" not in value)


def without_thousands(text: str) -> str:
    """`1,234,567`, `1{,}234`, `1,\\!234` and `1\\,234` without separators; not
    inside of brackets, where commas separate the elements of tuples, intervals and sets."""
    depth = 0

    def joined(match: re.Match) -> str:
        nonlocal depth
        if match["open"] or match["close"]:
            depth += 1 if match["open"] else -1
            return match[0]
        return match[0] if depth > 0 else re.sub(r"[^\d]", "", match[0])

    return _BRACKET_OR_THOUSANDS.sub(joined, text)


def read_quantity(text: str) -> Quantity | None:
    """Reads a number with what may surround it: `1,234`, `$ 5.50`, `-$3`, `40%`, `7.`, `1/2`,
    `\\frac{1}{2}`, `3 1/2`, `3\\frac{1}{2}`, `2.5e3`, `3 \\times 10^8`, `0.\\overline{3}`,
    `5 apples`, `5\\text{ cm}^2`, `90^\\circ`; None if it is anything else."""
    if len(text) > LONGEST:
        return None
    text = without_thousands(_stripped(text))
    currency = next((_CURRENCIES[sign] for sign in text if sign in _CURRENCIES), "")
    text = re.sub(r"\\?[$€£¢]", " ", text).strip()
    percent = _PERCENT.search(text)
    if percent and percent.start():
        text = text[: percent.start()]
        return _number(text, percent=True)
    if (found := _number(text, unit=currency)) is not None:
        return found
    value, unit = split_unit(text)
    found = _number(value, unit=unit) if unit else None
    first, _, rest = unit.partition(" ")
    while found is not None and first.lower() in _SCALES:
        found = replace(found, value=found.value * _SCALES[first.lower()], decimals=None)
        found, unit = replace(found, unit=rest), rest
        first, _, rest = unit.partition(" ")
    if found is not None and currency:
        per = unit[unit.index("per ") :] if re.match(r"(?:\w+ )?per ", unit) else ""
        found = replace(found, unit=f"{currency} {per}".strip())
    return found


_CURRENCIES = {"$": "dollar", "€": "euro", "£": "gbp", "¢": "cent"}


_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"))


_SPACES = re.compile(r"\s+")
_WHOLE_TEXT = re.compile(r"^\\(?:text|textrm|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}$")


def _stripped(text: str) -> str:
    """Without spaces, math delimiters around all of it, emphasis and a final period."""
    before = None
    while text != before:
        before, text = text, _SPACES.sub(" ", text).strip().rstrip(".; ")
        text = _WHOLE_TEXT.sub(r"\1", text)
        for left, right in _DELIMITERS:
            inside = text[len(left) : -len(right)]
            whole = len(text) > len(left) + len(right) and left not in inside
            if whole and text.startswith(left) and text.endswith(right):
                text = inside if text[-len(right) - 1] != "\\" else text
    text = text.replace("−", "-").replace("–", "-").replace("\\dfrac", "\\frac")
    text = text.replace("\\tfrac", "\\frac").replace("\\cfrac", "\\frac")
    text = _CENTS.sub("¢", text)
    return re.sub(r"\\[,;: ]|\\!|~", " ", text.replace(",\\!", ",")).strip()


_CENTS = re.compile(r"\\(?:text|mathrm)\s*\{\s*¢\s*\}|\\(?:text)?cent(?![a-zA-Z])")


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


def _ten(groups: list[str]) -> tuple[Fraction, None]:
    return Fraction(10) ** int(groups[0]), None


def _repeating(groups: list[str]) -> tuple[Fraction, None]:
    whole, fixed, repeated = groups
    scale = 10 ** len(fixed)
    period = Fraction(int(repeated), (10 ** len(repeated) - 1) * scale)
    return int(whole or "0") + Fraction(int(fixed or "0"), scale) + period, None


_VALUES = {
    "repeating": _repeating, "power": _power, "ten": _ten, "mixed": _mixed, "fraction": _ratio,
    "slash": _ratio, "plain": _plain,
}  # fmt: skip
