"""Reads numbers with units, and compares them.

Two quantities are equal if their numbers are, exactly, and their units agree. A decimal may be the
other number correctly rounded to at least six significant digits, or cut off after seven.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from train.rewards.answers.extract import LONGEST


@dataclass(frozen=True)
class Quantity:
    """A number as it is written in a text.

    Attributes:
      value: the exact number.
      decimals: number of digits after the point; None if it was written as a fraction or a power.
      percent: whether a percent sign followed.
      unit: the words that followed, or the name of a currency ("dollar", "euro", "gbp") if its
        sign was written; "" if there was neither.
    """

    value: Fraction
    decimals: int | None = None
    percent: bool = False
    unit: str = ""

    def equals(self, other: Quantity) -> bool:
        """Whether both are the same amount.

        One of the numbers may be the other rounded, see `rounds`. `50%` equals 50 and 1/2, but no
        number with a unit. Two units have to be the same, except that cents are converted to
        dollars; a number without a unit agrees with every unit.
        """
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
        """Whether this is `exact` rounded to the digits that are written.

        At least six of them have to be significant, which leading zeros are not. Cut off instead
        of rounded it needs seven, which is as near. Integers are never taken as rounded.
        """
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
_NAMES = frozenset(_KNOWN_UNITS.values())


def same_unit(mine: str, theirs: str) -> bool:
    """Whether two units of measurement agree; "" agrees with every unit."""
    if not mine or not theirs:
        return True
    one, other = _unit_name(mine), _unit_name(theirs)
    if "degree" in (one, other):  # of an angle or of a temperature
        return one.split()[0] == other.split()[0]
    return one == other


def _in_one_currency(one: Quantity, other: Quantity) -> tuple[Quantity, Quantity]:
    """Converts cents to dollars where the other amount is in dollars: `5¢` is `$0.05`."""
    units = [_unit_name(amount.unit).partition("/") for amount in (one, other)]
    if {unit[0] for unit in units} != {"dollar", "cent"}:
        return one, other
    if units[0][0] == "cent":
        return _hundredth(one, f"dollar{''.join(units[0][1:])}"), other
    return one, _hundredth(other, f"dollar{''.join(units[1][1:])}")


def _hundredth(amount: Quantity, unit: str) -> Quantity:
    """A hundredth of an amount, in another unit."""
    decimals = None if amount.decimals is None else amount.decimals + 2
    return replace(amount, value=amount.value / 100, decimals=decimals, unit=unit)


def _is_known_unit(unit: str) -> bool:
    """Whether every word names a unit of measurement (`square centimeters`, `m/s`)."""
    sides = [[word.partition("^")[0] for word in words] for words in _unit_words(unit)]
    return all(words and _NAMES.issuperset(words) for words in sides)


def _unit_name(unit: str) -> str:
    """One name for all names of a unit: "cm" for `centimeters`, "mph" for `miles per hour`.

    The name of a word that is not in the table is its singular.
    """
    name = "/".join(" ".join(words) for words in _unit_words(unit))
    return {"mi/h": "mph", "km/h": "kmh"}.get(name, name)


def _unit_words(unit: str) -> list[list[str]]:
    """The words of each side of `per` or a slash, with their powers: `m^2`."""
    text = unit.replace(".", "").strip()
    for pattern, power in _POWER_FORMS:
        text = pattern.sub(power, text)
    words = (side.split() for side in re.split(r"(?:^|\s+)per\s+|\s*/\s*", text))
    return [[_unit_word(*word.partition("^")) for word in side] for side in words]


_POWERS = ("squared", "cubed")
_POWER_FORMS = [
    (re.compile(pattern, re.IGNORECASE), power)
    for pattern, power in (
        (r"\s*\^\s*\{?\s*([23])\s*\}?", r"^\1"),
        (r"(\S+)\s+squared\b", r"\1^2"),
        (r"(\S+)\s+cubed\b", r"\1^3"),
        (r"\b(?:square|sq)\s+(\S+)", r"\1^2"),
        (r"\b(?:cubic|cu)\s+(\S+)", r"\1^3"),
    )
]


_PLURAL = re.compile(r"(ies)$|(s|x|z|ch|sh|o)es$|([^s])s$")


def _unit_word(word: str, caret: str = "", power: str = "") -> str:
    """The name of one word of a unit; case counts in symbols (`mW`, `MW`), not in words."""
    lower = word.lower()
    spelled = [word] if len(word) < 4 and not (word.isupper() and len(word) > 1) else [word, lower]
    if len(word) == 3 and word.istitle():
        spelled.append(lower)
    for name in spelled:
        for singular in (name, name.removesuffix("s"), name.removesuffix("es")):
            if singular in _KNOWN_UNITS:
                return _KNOWN_UNITS[singular] + caret + power
    if len(word) >= 4:
        word = _PLURAL.sub(lambda end: "y" if end[1] else end[2] or end[3], lower)
    return word + caret + power


_DEGREES = re.compile(
    r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|°)\s*(?:\\(?:text|mathrm)\s*\{\s*)?(?P<scale>[CF])?\s*\}?$"
)
TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
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


def split_unit(text: str) -> tuple[str, str]:
    """Cuts a unit such as `\\text{ cm}^2`, `apples` or `^\\circ` off.

    Letters outside of `\\text` and `\\mathrm` are a unit only after a plain number: in
    `\\pi r^2 h` they are a factor. Names of units that cannot be a product of variables
    (`10\\sqrt{3} units`) are a unit after any value.

    Returns:
      (value, unit); the unit is "" if there is none.
    """
    degrees = _DEGREES.search(text)
    if degrees and degrees.start() and not TRIGONOMETRY.search(text):
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
    known = _is_known_unit(unit)
    if _number(value) is None:
        return known and all(len(word) >= 4 for word in unit.split() if word != "per")
    if not known:
        # `2 xy` and `2abc` are products; `5 apples` is not
        return bool(space) and any(len(word) >= 3 for word in unit.split())
    # `5m` may be five times m, and `\\frac{1}{2} g` is a formula
    return len(unit) > 1 or (bool(space) and "\\" not in value)


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


_SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_SCALES |= {"trillion": 10**12}
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:percent|\\?%)\s*\}|\bpercent\b)$", re.I)


def read_quantity(text: str) -> Quantity | None:
    """Reads a number with its unit; None if the text is anything else.

    Examples: `1,234`, `$ 5.50`, `-$3`, `40%`, `7.`, `1/2`, `\\frac{1}{2}`, `3 1/2`,
    `3\\frac{1}{2}`, `2.5e3`, `3 \\times 10^8`, `0.\\overline{3}`, `5 apples`, `5\\text{ cm}^2`,
    `90^\\circ`.
    """
    if len(text) > LONGEST:
        return None
    text = without_thousands(_stripped(text))
    currency = next((_CURRENCIES[sign] for sign in text if sign in _CURRENCIES), "")
    text = _SPACES.sub(" ", re.sub(r"\\?[$€£¢]", " ", text)).strip()
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
_CENTS = re.compile(r"\\(?:text|mathrm)\s*\{\s*¢\s*\}|\\(?:text)?cent(?![a-zA-Z])")


def _stripped(text: str) -> str:
    """A text without math delimiters and emphasis around it, and without a final period."""
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


_DIGITS = r"(?:\d+(?:\.\d*)?|\.\d+)"
_PART = r"(?:\{\s*([-+]?" + _DIGITS + r")\s*\}|(\d))\s*"
_FRACTION = re.compile(rf"\\frac\s*{_PART}{_PART}(?![\d.])", re.ASCII)
_TENS = r"10\s*(?:\^|\*\*)\s*(?:\{\s*([-+]?\d{1,3})\s*\}|\(?([-+]?\d"
_POWERS_OF_TEN = (
    (re.compile(rf"\s*(?:\\times|\\cdot|\*|x)\s*{_TENS}{{1,3}})\)?)", re.ASCII), r"e\1\2"),
    (re.compile(rf"(?<![\d.]){_TENS})\)?)(?!\d)", re.ASCII), r"1e\1\2"),
)
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\overline\s*\{(\d+)\}", re.ASCII)
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)\s*(?:(?P<whole>\d+)\s+(?:and\s+)?(?=\d+\s*/\s*\d+$))?"
    rf"(?:(?P<left>\(\s*)?(?P<over>{_DIGITS})(?(left)\s*\))\s*/\s*"
    rf"(?P<right>\(\s*)?(?P<under>{_DIGITS})(?(right)\s*\))"
    rf"|(?P<plain>{_DIGITS})(?:\s*[eE](?P<exponent>[-+]?\d{{1,3}}))?)",
    re.ASCII,
)


def _slash(match: re.Match) -> str:
    """Writes `\\frac{1}{2}` as `1/2`, with the sign first."""
    over, under = (part for part in match.groups() if part is not None)
    if under.startswith("-"):
        over, under = f"-{over}".removeprefix("--"), under[1:]
    return f" {over}/{under}"


def _number(text: str, percent: bool = False, unit: str = "") -> Quantity | None:
    """Reads a number without a unit; None if it is none."""
    text = text.strip()
    if match := _REPEATING.fullmatch(text):
        sign, first, fixed, repeated = match.groups()
        value = Fraction(int(repeated), 10 ** len(repeated) - 1) + int(first + fixed or "0")
        return Quantity(Fraction(f"{sign}1") * value / 10 ** len(fixed), None, percent, unit)
    text = _FRACTION.sub(_slash, text)
    for pattern, power in _POWERS_OF_TEN:
        text = pattern.sub(power, text)
    text = text.strip()
    match = _NUMBER.fullmatch(text)
    if match is None:
        inside = text[1:-1] if text.startswith("(") and text.endswith(")") else None
        return _number(inside, percent, unit) if inside else None
    sign, whole, over, under, plain, exponent = match.group(
        "sign", "whole", "over", "under", "plain", "exponent"
    )
    decimals = None if plain is None or exponent else len(plain.partition(".")[2])
    if plain is not None:
        value = _decimal(plain) * Fraction(10) ** int(exponent or 0)
    elif (divisor := _decimal(under)) != 0:
        value = int(whole or 0) + _decimal(over) / divisor
    else:
        return None
    return Quantity(Fraction(f"{sign}1") * value, decimals, percent, unit)


def _decimal(text: str) -> Fraction:
    return Fraction(text.removesuffix("."))
