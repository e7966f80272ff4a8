"""Reads numbers that are written with digits: decimals, fractions, ratios and numbers in another base."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

from astraflow.addons.math.spelling import fold

__all__ = [
    "Number",
    "based_equal",
    "modulus_of",
    "number_of",
    "ratios_equal",
]

_MIN_DIGITS = 6
"""A decimal with at least this many significant digits equals the values that round to it; 3.14 is not pi."""

_BASES = {
    name: base
    for base, names in {
        2: "two binary bin", 3: "three ternary", 4: "four quaternary", 5: "five quinary", 6: "six senary",
        7: "seven septenary", 8: "eight octal oct", 9: "nine nonary", 10: "ten decimal dec",
        11: "eleven undecimal", 12: "twelve duodecimal", 16: "sixteen hexadecimal hex",
    }.items()
    for name in names.split()
}  # fmt: skip
"""Bases by their names in words."""
_PREFIXES = {"b": 2, "x": 16}
_BASE_NAME = rf"(?P<base>\d{{1,2}}|{'|'.join(_BASES)})"
_BASED = re.compile(
    r"^\(?\s*(?P<digits>-?[0-9A-Fa-f]+(?:\.[0-9A-Fa-f]+)?)\s*\)?\s*(?:"
    rf"_\s*[{{(\s]*(?:base\s*)?{_BASE_NAME}[}})\s]*|\(?\s*(?:in\s+)?(?:base|binary|ternary|octal|hex\w*)\b.*)$",
    re.IGNORECASE,
)
_BASE_AFTER = re.compile(
    rf"^\(?\s*(?:in\s+)?(?:base\s*[-{{]?\s*)?{_BASE_NAME}\s*}}?(?:\s*(?:notation|form|system|number))?\s*\)?$",
    re.IGNORECASE,
)


def based_equal(gold: str, answer: str) -> bool | None:
    """Whether numbers with a base, such as `1011_2`, have the same digits and base.

    If only one side names a base, it holds for the other side too.
    """
    wanted = _parse_based(gold)
    given = _parse_based(answer)
    if wanted is None and given is None:
        return None
    if wanted is not None and given is not None:
        return wanted == given
    with_base = wanted or given
    without_base = fold(answer if wanted else gold)
    return with_base is not None and with_base[0] == (without_base.lstrip("0") or "0").upper()


def _parse_based(text: str) -> tuple[str, int] | None:
    """The digits and the base of a number that names its base; None for other texts."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).strip()
    prefixed = re.fullmatch(r"0([bBxX])([0-9A-Fa-f]+)", text)
    if prefixed is not None:
        text = f"{prefixed[2]}_{_PREFIXES[prefixed[1].lower()]}"
    match = _BASED.match(text)
    if match is None:
        return None
    name = match["base"]
    if name is None:
        after = _BASE_AFTER.match(text[match.end("digits") :].strip(" )"))
        if after is None:
            return None
        name = after["base"]
    base = int(name) if name.isdigit() else _BASES[name.lower()]
    digits = match["digits"].lstrip("0").upper() or "0"
    if not 2 <= base <= 16 or any(int(digit, 16) >= base for digit in re.sub(r"[-.]", "", digits)):
        return None
    return digits, base


_MODULUS = re.compile(
    r"^(?P<residue>.*?\S)\s*\(?\s*(?:\\[pb]?mod(?![A-Za-z])|\\text\{\s*\(?\s*mod(?:ulo)?\s*\}|(?<![A-Za-z\\])mod(?:ulo)?(?![A-Za-z]))"
    r"\s*[({]*\s*(?P<modulus>[^(){}=<>]+?)\s*[)}]*$"
)


def modulus_of(text: str) -> tuple[str, str] | None:
    r"""The residue and the modulus of `3 \pmod 7` or `x \equiv 3 \pmod{7}`; None for other texts."""
    match = _MODULUS.match(re.sub(r"\\text\{(\s*\(?\s*\\?p?mod(?:ulo)?\b[^{}]*)\}", r" \1 ", text))
    return None if match is None else (match["residue"], match["modulus"])


_RATIO = re.compile(r"[-\d.:/\s]+|\\frac\{\d+\}\{\d+\}")


def ratios_equal(gold: str, answer: str) -> bool | None:
    """Whether ratios are equal: `2:3` equals its fraction; in longer ratios, all parts are in proportion."""
    gold, answer = (
        re.sub(r"(?<=\d)\s*(?:\\text\{\s*)?to(?:\s*\})?\s*(?=\d)", ":", text) for text in (gold, answer)
    )
    if ":" not in gold + answer or not all(_RATIO.fullmatch(text) for text in (gold, answer)):
        return None
    wanted, given = ([_fraction(part) for part in text.split(":")] for text in (gold, answer))
    if any(part is None or part == 0 for part in wanted + given):
        return None
    if len(wanted) != len(given):
        return False if max(len(wanted), len(given)) > 2 else None
    firsts = (cast("Fraction", wanted[0]), cast("Fraction", given[0]))
    return all(
        cast("Fraction", w) / firsts[0] == cast("Fraction", g) / firsts[1]
        for w, g in zip(wanted, given, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Number:
    """A number, and how exactly it was written."""

    value: Fraction
    last_place: Fraction = Fraction(0)
    """The value of 1 in the last place of a decimal: 0.01 for `3.14`. It is 0 for a number that is exact."""
    num_digits: int = 0
    """Number of significant digits of a decimal."""

    def is_equal(self, other: "Number") -> bool:
        """Whether the values are equal, or one number is a decimal that stands for the other."""
        if self.value == other.value or self._is_noise_of(other) or other._is_noise_of(self):
            return True
        return self.stands_for(other.value) or other.stands_for(self.value)

    def stands_for(self, value: Fraction) -> bool:
        """Whether this is a decimal with enough digits, to which `value` rounds."""
        if self.last_place == 0 or self.num_digits < _MIN_DIGITS or value.denominator == 1:
            return False
        return abs(self.value - value) <= self.last_place / 2

    def rounds(self, value: Fraction) -> bool:
        """Whether this is `value`, rounded or cut off after any number of digits."""
        last_place = self.last_place or 1
        is_cut_off = 0 <= abs(value) - abs(self.value) < last_place and value * self.value >= 0
        return is_cut_off or abs(self.value - value) <= last_place / 2

    def _is_noise_of(self, other: "Number") -> bool:
        """Whether this is what a computer prints for the other number, as 0.30000000000000004 for 0.3."""
        if self.num_digits not in (16, 17) or other.num_digits > 15:
            return False
        return abs(self.value - other.value) <= Fraction(1, 10**14) * abs(other.value)


_SCIENTIFIC = re.compile(
    r"^(?P<base>[-+]?(?:\d+\.?\d*|\.\d+))\s*(?:(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{?\s*(?P<a>[-+]?\s*\d+)\s*\}?"
    r"|[eE]\{?(?P<b>[-+]?\d+)\}?)$"
)
_REPEATING = re.compile(r"^([-+]?)(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?$")
_FRACTION = re.compile(r"^([-+]?)\\frac\{([-+]?\d+)\}\{(\d+)\}$|^([-+]?)(\d+)/(\d+)$")
_MIXED = re.compile(r"^([-+]?)(\d+)(?:\\frac\{(\d+)\}\{(\d+)\}|\s+(\d+)/(\d+))$")
_POWER_OF_TEN = re.compile(r"^(?P<sign>[-+]?)10\s*\^\s*\{?\s*(?P<a>[-+]?\d+)\s*\}?$")
_MAX_EXPONENT = 10_000
"""Larger powers of ten are equal only if they are written alike."""


def number_of(text: str) -> Number | None:
    """The number that a text writes in digits; None if the text needs algebra."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.strip())
    if re.fullmatch(r"[-+]?\s*(?:\d+\.?\d*|\.\d+)", text):
        return _decimal(text.replace(" ", ""))
    if (match := _SCIENTIFIC.match(text)) is not None:
        exponent = int((match["a"] or match["b"]).replace(" ", ""))
        base = _decimal(match["base"])
    elif (match := _POWER_OF_TEN.match(text)) is not None:
        exponent = int(match["a"])
        base = Number(Fraction(f"{match['sign']}1"))
    else:
        exact = _fraction(text)
        return None if exact is None else Number(exact)
    if abs(exponent) > _MAX_EXPONENT:
        return None
    power = Fraction(10) ** exponent
    return Number(base.value * power, base.last_place * power, base.num_digits)


def _decimal(text: str) -> Number:
    """A number written with digits and perhaps a decimal point."""
    value = Fraction(text.rstrip(".") if text.rstrip("-+.") else "0")
    _, point, decimals = text.partition(".")
    if not point or not decimals:
        return Number(value)
    return Number(value, Fraction(1, 10 ** len(decimals)), len(text.replace(".", "").lstrip("-+0")))


def _fraction(text: str) -> Fraction | None:
    """The value of an integer, a decimal, a fraction, a mixed or a repeating number; None for other texts."""
    text = re.sub(r"\s*(\\frac|[{}/])\s*", r"\1", text.strip())
    if re.fullmatch(r"[-+]?\d+(?:\.\d+)?", text):
        return Fraction(text)
    if (match := _FRACTION.match(text)) is not None:
        is_latex = match[3] is not None
        sign, above, below = match.group(1, 2, 3) if is_latex else match.group(4, 5, 6)
        if int(below) == 0:
            return None
        value = Fraction(int(above), int(below))
        return -value if sign == "-" else value
    if (match := _MIXED.match(text)) is not None:
        above = int(match[3] or match[5])
        below = int(match[4] or match[6])
        if below == 0:
            return None
        value = int(match[2]) + Fraction(above, below)
        return -value if match[1] == "-" else value
    if (match := _REPEATING.match(text)) is not None:
        sign, whole, start, period = match.groups()
        value = Fraction(int((whole or "0") + start), 10 ** len(start))
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(start))
        return -value if sign == "-" else value
    return None
