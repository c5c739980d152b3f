"""Reads numbers with units, and compares them.

Two quantities are equal if their numbers are, exactly, and their units agree: the text behind the
number, without regard to plurals and to the case of words. A number without a unit agrees with
every unit. A decimal may be the other number correctly rounded to at least six significant digits,
or cut off after at least seven. Cents are hundredths of dollars.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from train.rewards.answers.extract import LONGEST
from train.rewards.answers.latex import clean, unwrapped


@dataclass(frozen=True)
class Quantity:
    """A number as it is written in a text.

    Attributes:
      value: the exact number.
      decimals: number of digits after the point; None if it was written as a fraction or a power.
      unit: the words that followed, or the name of a currency ("dollar", "euro", "gbp", "cent") if
        its sign was written, or "%"; "" if there was none.
    """

    value: Fraction
    decimals: int | None = None
    unit: str = ""

    def equals(self, other: Quantity) -> bool:
        """Whether both are the same amount; `50%` equals 50 and 1/2."""
        if {self.unit.split(" ")[0], other.unit.split(" ")[0]} == {"dollar", "cent"}:
            return self._in_dollars().equals(other._in_dollars())
        if self.unit and other.unit and self.unit != other.unit:
            return False
        pairs = [(self, other)]
        if (self.unit == "%") != (other.unit == "%"):
            shares = (x._hundredth(x.unit) if x.unit == "%" else x for x in (self, other))
            pairs.append(tuple(shares))
        return any(a.value == b.value or a._rounds(b) or b._rounds(a) for a, b in pairs)

    def _in_dollars(self) -> Quantity:
        name, _, rest = self.unit.partition(" ")
        return self._hundredth(f"dollar {rest}".strip()) if name == "cent" else self

    def _hundredth(self, unit: str) -> Quantity:
        decimals = None if self.decimals is None else self.decimals + 2
        return Quantity(self.value / 100, decimals, unit)

    def _rounds(self, exact: Quantity) -> bool:
        if exact.decimals is not None and (self.decimals or 0) < _DIGITS_LEFT:
            return False  # $12,345.70 is not $12,345.67
        return self.rounds(exact.value)

    def rounds(self, exact: Fraction) -> bool:
        """Whether this is another number, rounded or cut off.

        Rounded it needs six significant digits, cut off seven, which is as near. Leading zeros are
        not significant. Integers are never taken as rounded.
        """
        if not self.decimals:
            return False
        scale = 10**self.decimals
        significant = len(str(abs(int(self.value * scale))))
        cut_off = significant > _DIGITS_LEFT and self.value * scale == int(exact * scale)
        rounded = significant >= _DIGITS_LEFT and self.value == round(exact, self.decimals)
        return rounded or cut_off


_DIGITS_LEFT = 6
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "gbp", "¢": "cent"}
_DOLLARS_AROUND = re.compile(r"\s*\$+(.*?)(?<!\\)\$+[.\s]*", re.DOTALL)
_CENT = re.compile(r"\\(?:text)?cent(?![a-zA-Z])")
_PERCENT = re.compile(r"\s*(?:\\?%|\bpercent)$", re.IGNORECASE)
_POWER = r"\s*(?:\^\s*\{?\s*[23]\s*\}?)?"
_WRAPPED_UNIT = re.compile(
    r"(?P<value>.*\S)\s*\\(?:text|textrm|textbf|textit|mathrm|mbox)\s*"
    rf"\{{(?P<unit>[^{{}}\d\\]+)\}}(?P<power>{_POWER})"
)
_PLAIN_UNIT = re.compile(
    rf"(?P<value>.*[\d.)}}])(?P<space>\s*)(?P<unit>[a-zA-Z][a-zA-Z ./'-]*)(?P<power>{_POWER})"
)
# Words that continue a formula or a sentence and are no units.
_NO_UNITS = frozenset(
    "and or mod choose plus minus times over to if is not factorial half halves thirds fourths "
    "fifths sixths sevenths eighths ninths tenths hundredths thousandths millionths below negative "
    "root than".split()
)
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_SCALES |= {"trillion": 10**12}
_CIRCLE = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")


def in_radians(text: str) -> str:
    """A formula with sines whose angles in degrees are written in radians."""
    return _CIRCLE.sub(r"\\cdot\\frac{\\pi}{180}", text) if _TRIGONOMETRY.search(text) else text


def split_unit(text: str) -> tuple[str, str]:
    """Cuts a unit such as `\\text{ cm}^2`, `apples` or `^\\circ` off an answer that is `clean`.

    Without `\\text`, words are a unit behind a plain number, and behind any formula if they are
    names of units that are no product of variables (`10\\sqrt{3} units`).

    Returns:
      (value, unit); the unit is "" if there is none.
    """
    if _CIRCLE.search(text) and not _TRIGONOMETRY.search(text):
        text = unwrapped(_CIRCLE.sub(" degrees ", text))
    wrapped = _WRAPPED_UNIT.fullmatch(text)
    match = wrapped or _PLAIN_UNIT.fullmatch(unwrapped(text))
    words = match["unit"].lower().split() if match else []
    if not words or words[0] in ("squared", "cubed") or _NO_UNITS & {*words}:
        return text, ""
    unit = f"{match['unit']} {match['power'] or ''}"
    if not (wrapped or _is_plain_unit(match["value"], match["space"], match["unit"].strip())):
        return text, ""
    return match["value"].strip(), unit


def _is_plain_unit(value: str, space: str, unit: str) -> bool:
    known, words = _NAMES.issuperset(unit_name(unit).split()), unit.split()
    if _number(value) is None:
        return known and all(len(word) >= 4 for word in words)
    if not known:  # `2 xy` and `2abc` are products
        return bool(space) and any(len(word) >= 3 for word in words)
    return len(unit) > 1 or (bool(space) and "\\" not in value)  # `5m` may be five times m


def _stem(word: str) -> str:
    """A word without regard to case and plurals; symbols, which are short, as they are."""
    if len(word) < 4:
        return word
    return re.sub(r"y$", "i", re.sub(r"(?:e?(?<!s)s|e)$", "", word.lower()))


_UNITS = {
    _stem(alias): " ".join(map(_stem, name.split()))
    for name, aliases in {
        "millimeter": "mm", "centimeter": "cm", "meter": "m", "kilometer": "km", "inch": "in",
        "foot": "ft feet", "yard": "yd", "mile": "mi", "milligram": "mg", "gram": "g",
        "kilogram": "kg", "ounce": "oz", "pound": "lb lbs", "milliliter": "mL ml", "liter": "L l",
        "gallon": "gal", "quart": "qt", "millisecond": "ms", "second": "s sec", "minute": "min",
        "hour": "h hr hrs", "day": "", "week": "wk", "month": "", "year": "yr", "unit": "",
        "degree": "deg", "radian": "rad", "celsius": "C", "fahrenheit": "F", "kelvin": "K",
        "newton": "N", "kilonewton": "kN", "joule": "J", "kilojoule": "kJ", "watt": "W",
        "milliwatt": "mW", "kilowatt": "kW", "megawatt": "MW", "pascal": "Pa",
        "kilopascal": "kPa", "hertz": "Hz", "volt": "V", "ampere": "A", "dollar": "USD",
        "cent": "", "euro": "EUR", "/": "per", "2": "squared", "3": "cubed", "%": "",
        "mile / hour": "mph", "kilometer / hour": "kph kmh",
    }.items()
    for alias in (name, *aliases.split())
}  # fmt: skip
_NAMES = frozenset(" ".join(_UNITS.values()).split())


def unit_name(unit: str) -> str:
    """One name for a unit; case counts in symbols (`mW`, `MW`), not in words."""
    for word, power in (("square", 2), ("sq", 2), ("cubic", 3), ("cu", 3)):
        unit = re.sub(rf"(?i)\b{word}\.?\s+(\w+)", rf"\1 {power}", unit)
    words = re.findall(r"[^\W\d_]+|[/23%]", unit)
    return " ".join(_UNITS.get(stem, stem) for stem in map(_stem, words))


_THOUSANDS = re.compile(
    r"(?<![\d.,/])(?<!\d )(?<!\d\\,)\d{1,3}"
    r"(?:(?:(?:,|\{,\}|,\\!)\d{3})+(?![\d,])|(?:(?: |\\,)\d{3})+(?! ?[\d,/]))"
)
_BRACKET_OR_THOUSANDS = re.compile(
    rf"(?P<open>[(\[]|\\\{{)|(?P<close>[)\]]|\\\}})|{_THOUSANDS.pattern}"
)


def without_thousands(text: str) -> str:
    """A text with `1,234,567`, `1{,}234`, `1,\\!234` and `1\\,234` written without separators.

    Brackets are left as they are, for commas in them separate elements.
    """
    depth = 0

    def joined(match: re.Match) -> str:
        nonlocal depth
        if match["open"] or match["close"]:
            depth += 1 if match["open"] else -1
            return match[0]
        return match[0] if depth > 0 else re.sub(r"[^\d]", "", match[0])

    return _BRACKET_OR_THOUSANDS.sub(joined, text)


def read_quantity(text: str) -> Quantity | None:
    """Reads a number with its unit; None if the text is anything else.

    Examples: `1,234`, `$ 5.50`, `-$3`, `40%`, `7.`, `1/2`, `\\frac{1}{2}`, `3 1/2`,
    `3\\frac{1}{2}`, `2.5e3`, `3 \\times 10^8`, `0.\\overline{3}`, `5 apples`,
    `5\\text{ cm}^2`, `90^\\circ`.
    """
    if len(text) > LONGEST:
        return None
    around = _DOLLARS_AROUND.fullmatch(text)
    text = _CENT.sub("¢", around[1] if around else text)
    currency = next((name for sign, name in _CURRENCIES.items() if sign in text), "")
    text = without_thousands(clean(re.sub("[€£¢]", " ", text)))
    plain = unwrapped(text)
    if percent := _PERCENT.search(plain):
        number = _number(plain[: percent.start()])
        return number and replace(number, unit="%")
    value, unit = (plain, "") if _number(plain) else split_unit(text)
    number, words = _number(value), unit.split()
    while number and words and words[0].lower() in _SCALES:
        scale = _SCALES[words.pop(0).lower()]
        number = replace(number, value=number.value * scale, decimals=None)
    if currency:
        words = [currency, *(words[words.index("per") :] if "per" in words else ())]
    return number and replace(number, unit=unit_name(" ".join(words)))


_DIGITS = r"(?:\d+(?:\.\d*)?|\.\d+)"
_FRACTION = re.compile(r"\\frac\s*\{\s*([\d.]+)\s*\}\s*\{\s*([\d.]+)\s*\}(?![\d.])", re.ASCII)
_REPEATING = re.compile(r"\s*([-+]?)(\d*)\.(\d*)\\overline\s*\{(\d+)\}\s*", re.ASCII)
_TENS = r"10\s*(?:\^|\*\*)\s*\{?\s*\(?([-+]?\d{1,3})\)?\s*\}?"
_TIMES_TEN = re.compile(rf"\s*(?:\\times|\\cdot|\*|x)\s*{_TENS}", re.ASCII)
_NUMBER = re.compile(
    rf"([-+]?)\s*(?:(\d+)\s+(?:and\s+)?(?=\d+\s*/))?"
    rf"(?:({_DIGITS})(?:\s*/\s*({_DIGITS})|\s*e([-+]?\d{{1,3}}))?|{_TENS})",
    re.ASCII | re.IGNORECASE,
)


def _number(text: str) -> Quantity | None:
    """Reads a number without a unit; None if it is none."""
    if match := _REPEATING.fullmatch(text):
        sign, whole, fixed, repeated = match.groups()
        value = Fraction(int(repeated), 10 ** len(repeated) - 1) + int(whole + fixed or "0")
        return Quantity(Fraction(f"{sign}1") * value / 10 ** len(fixed))
    text = _TIMES_TEN.sub(r"e\1", _FRACTION.sub(r" \1/\2", text)).strip()
    if (match := _NUMBER.fullmatch(text)) is None:
        return None
    sign, whole, over, under, exponent, tens = match.groups()
    power = Fraction(10) ** int(exponent or tens or 0)
    try:
        value = int(whole or 0) + Fraction(over or 1) * power / Fraction(under or 1)
    except ZeroDivisionError:
        return None
    is_decimal = over is not None and not (under or exponent)
    decimals = len(over.partition(".")[2]) if is_decimal else None
    return Quantity(Fraction(f"{sign}1") * value, decimals)
