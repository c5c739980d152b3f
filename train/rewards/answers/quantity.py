"""Reads numbers with units, and compares them.

Two quantities are equal if their numbers are, exactly, and their units agree: the text behind the
number, without regard to plurals and to the case of words. A number without a unit agrees with
every unit. A decimal may be the other number correctly rounded to at least six significant digits.
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
        if self.unit and other.unit and self.unit != other.unit:
            return False
        pairs = [(self, other)]
        if (self.unit == "%") != (other.unit == "%"):
            pairs.append((self._share(), other._share()))
        return any(a.value == b.value or a._rounds(b) or b._rounds(a) for a, b in pairs)

    def _share(self) -> Quantity:
        if self.unit != "%":
            return self
        decimals = None if self.decimals is None else self.decimals + 2
        return replace(self, value=self.value / 100, decimals=decimals)

    def _rounds(self, exact: Quantity) -> bool:
        """Whether this is another number, rounded to six significant digits or more.

        Leading zeros are not significant. Of a decimal six digits after the point have to be left.
        Integers are never taken as rounded.
        """
        if not self.decimals or (exact.decimals is not None and self.decimals < _DIGITS_LEFT):
            return False
        significant = len(str(abs(int(self.value * 10**self.decimals))))
        return significant >= _DIGITS_LEFT and self.value == round(exact.value, self.decimals)


_DIGITS_LEFT = 6
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "gbp", "¢": "cent"}
_DOLLARS_AROUND = re.compile(r"\s*\$+(.*?)(?<!\\)\$+[.\s]*", re.DOTALL)
_PERCENT = re.compile(r"\s*(?:\\?%|\bpercent)$", re.IGNORECASE)
_POWER = r"\s*(\^\s*\{?\s*[23]\s*\}?)?"
_WRAPPED_UNIT = re.compile(
    rf"(.*\S)\s*\\(?:text|textrm|textbf|textit|mathrm|mbox)\s*\{{([^{{}}\d\\]+)\}}{_POWER}"
)
_PLAIN_UNIT = re.compile(rf"(.*[\d.)}}])\s*([a-zA-Z][a-zA-Z ./'-]*){_POWER}")
# Short words after a number are units; other words of one or two letters may be variables.
_SYMBOLS = frozenset("mm cm km in ft yd mi mg kg lb oz ml hr m/s km/h".split())
# Words that continue a formula or a sentence and are no units.
_NO_UNITS = frozenset(
    "and or mod choose plus minus times over to if is not factorial squared cubed half halves "
    "thirds fourths fifths sixths sevenths eighths ninths tenths hundredths thousandths millionths "
    "below negative root than".split()
)
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_SCALES |= {"trillion": 10**12}


def split_unit(text: str) -> tuple[str, str]:
    """Cuts a unit such as `\\text{ cm}^2`, `apples` or `^\\circ` off an answer that is `clean`.

    Returns:
      (value, unit); the unit is "" if there is none.
    """
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", " degrees ", text).strip()
    wrapped = _WRAPPED_UNIT.fullmatch(text)
    match = wrapped or _PLAIN_UNIT.fullmatch(unwrapped(text))
    words = match[2].lower().split() if match else []
    if not words or _NO_UNITS & {*words}:
        return text, ""
    is_plain = words[0] in _SYMBOLS or any(len(word) >= 3 for word in words)
    if not wrapped and not (is_plain and _number(match[1])):
        return text, ""
    return match[1], f"{match[2]} {match[3] or ''}"


_SHORT = dict(
    mm="millimeter", cm="centimeter", m="meter", km="kilometer", ft="feet", foot="feet", yd="yard",
    mi="mil", mg="milligram", g="gram", kg="kilogram", oz="ounc", lb="pound", lbs="pound",
    mL="milliliter", L="liter", s="second", sec="second", min="minut", h="hour", hr="hour",
    per="/", cents="cent",
)  # fmt: skip
_SHORT["in"] = "inch"


def unit_name(unit: str) -> str:
    """One name for a unit; case counts in symbols (`mW`, `MW`), not in words."""
    words = re.findall(r"[^\W\d_]+|[/23%]", unit)
    words = (w if len(w) < 4 else w.lower().rstrip("s").rstrip("e") for w in words)
    return " ".join(_SHORT.get(word, word) for word in words)


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
    `3\\frac{1}{2}`, `2.5e3`, `3 \\times 10^8`, `5 apples`, `5\\text{ cm}^2`, `90^\\circ`.
    """
    if len(text) > LONGEST:
        return None
    around = _DOLLARS_AROUND.fullmatch(text)
    text = around[1] if around else text
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
_TENS = r"10\s*(?:\^|\*\*)\s*\{?\s*\(?([-+]?\d{1,3})\)?\s*\}?"
_TIMES_TEN = re.compile(rf"\s*(?:\\times|\\cdot|\*|x)\s*{_TENS}", re.ASCII)
_NUMBER = re.compile(
    rf"([-+]?)\s*(?:(\d+)\s+(?:and\s+)?(?=\d+\s*/))?"
    rf"(?:({_DIGITS})(?:\s*/\s*({_DIGITS})|\s*e([-+]?\d{{1,3}}))?|{_TENS})",
    re.ASCII | re.IGNORECASE,
)


def _number(text: str) -> Quantity | None:
    """Reads a number without a unit; None if it is none."""
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
