"""Whether a text answers a question of mathematics.

The final answer is found and taken apart, and its parts are compared one by one. Exact numbers must be equal
exactly. A decimal of at least six significant digits also stands for the values that round to it. Expressions
with variables are equal if they agree at several points, or if `math-verify` can show that they are. Names,
words and dates are compared as texts: as formulas, `east` and `seat` would be one product.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

from astraflow.envs.math_algebra import rational_near, same_algebra, same_sets
from astraflow.envs.math_text import Shape, final_answer, fold, gold_answer, shape_of, tidy

__all__ = [
    "answers_equal",
    "is_right",
    "readable_gold",
]

_TAIL = 20_000
"""Characters from the end of a text in which its final answer is looked for."""
_LONGEST = 500
"""Longer answers are compared as texts only: to read them as formulas takes too long."""


def is_right(gold: str, text: str) -> bool:
    """Whether the final answer of a text is the gold. Example: `is_right("0.5", r"It is $\\frac12$.")`."""
    wanted = readable_gold(gold)
    text = text[-_TAIL:]
    if len(text) <= _LONGEST and fold(tidy(text)) == fold(wanted):
        return True
    return answers_equal(wanted, tidy(final_answer(text)))


def readable_gold(gold: str) -> str:
    """The gold in one spelling; empty if nothing is left of it."""
    return tidy(gold_answer(gold))


def answers_equal(gold: str, answer: str) -> bool:
    """Whether two tidy answers are the same: in shape, and then part by part."""
    if not fold(gold) or not fold(answer):
        return False
    if fold(gold) == fold(answer):
        return True
    if max(len(gold), len(answer)) > _LONGEST:
        return False
    same_day = _dates_equal(gold, answer)
    if same_day is not None:
        return same_day
    wanted = shape_of(gold)
    given = shape_of(answer)
    if wanted.kind == given.kind == "value":
        return _values_equal(wanted.items[0], given.items[0])
    if _shapes_equal(wanted, given):
        return True
    return _same_region(gold, wanted, answer, given)


def _shapes_equal(wanted: Shape, given: Shape) -> bool:
    if len(wanted.items) != len(given.items):
        return False
    kinds = {wanted.kind, given.kind}
    if kinds == {"set", "value"}:
        return answers_equal(wanted.items[0], given.items[0])  # a set of one
    if kinds == {"tuple"}:
        return wanted.brackets == given.brackets and _in_order(wanted, given)
    if kinds == {"tuple", "several"}:
        ordered = wanted if wanted.kind == "tuple" else given
        return ordered.brackets == "()" and _in_order(wanted, given)
    if kinds == {"several"} and _names(wanted) != _names(given) and (_names(wanted) or _names(given)):
        return _in_order(wanted, given)
    return kinds <= {"several", "set"} and _in_any_order(wanted, given)


def _names(shape: Shape) -> frozenset[str]:
    """What the parts are called if each has a name of its own, as in `x=1, y=2`; else nothing."""
    names = frozenset(fold(item.partition("=")[0]) for item in shape.items if "=" in item)
    return names if len(names) == len(shape.items) else frozenset()


def _in_order(wanted: Shape, given: Shape) -> bool:
    return all(answers_equal(one, two) for one, two in zip(wanted.items, given.items, strict=True))


def _in_any_order(wanted: Shape, given: Shape) -> bool:
    left = list(given.items)
    for item in wanted.items:
        match = next((other for other in left if answers_equal(item, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


_REGION = re.compile(r"[<>]|\\(?:le|ge|neq|cup|cap|in|setminus|mathbb)(?![A-Za-z])")
_AND = re.compile(r"(?<![A-Za-z])and(?![A-Za-z])|\\(?:land|wedge)(?![A-Za-z])|,|;")


def _same_region(gold: str, wanted: Shape, answer: str, given: Shape) -> bool:
    """Intervals, unions and inequalities may describe one set in different shapes."""
    if not (_REGION.search(gold) or _REGION.search(answer)):
        return False
    regions: list[tuple[str, ...]] = []
    for text, shape in ((gold, wanted), (answer, given)):
        if shape.kind == "several":
            if _AND.search(text):
                return False
            regions.append(shape.items)
        else:
            regions.append((_bracketed(shape) or text,))
    return same_sets(*regions)


def _bracketed(shape: Shape) -> str:
    if shape.kind != "tuple":
        return ""
    return shape.brackets[0] + ",".join(shape.items) + shape.brackets[-1]


# --- single values ----------------------------------------------------------------------------------

_MIN_DIGITS = 6
"""From this number of significant digits on, a decimal equals what rounds to it; 3.14 is not pi."""


def _values_equal(gold: str, answer: str) -> bool:
    """Whether a tidy answer is worth the tidy gold. Neither is a list, a set or a tuple."""
    if not fold(gold) or not fold(answer):
        return False
    if fold(gold) == fold(answer):
        return True
    for compare in (_choices, _dates_equal, _times, _words, _based, _ratios):
        verdict = compare(gold, answer)
        if verdict is not None:
            return verdict
    return _relations(gold, answer)


# --- texts ----------------------------------------------------------------------------------------

_CHOICE = re.compile(r"^(?:\(([A-Ja-j])\)|([A-Ja-j])[).:]|([A-J]))(?:\s*(.+))?$")
_TEXT = re.compile(r"\\text\{((?:[^{}]|\{[^{}]*\})*)\}")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DATE_PART = re.compile(r"[a-z]+|\d+")
_TIME = re.compile(r"^(\d{1,2}):(\d{2})(?:([ap])m)?$")
_LONG_WORD = re.compile(
    r"(?<![\\A-Za-z])(?:[A-Za-z]{4,}|[Yy]es|[Nn]o|[Oo]dd|[Rr]ed|DNE|[A-Z][a-z]{2})(?![A-Za-z])"
)
_MATHS = re.compile(r"[\d=<>+*/^_|\\]|(?<![A-Za-z])-")


def _plain(text: str) -> str:
    return _TEXT.sub(r" \1 ", text)


def _choices(gold: str, answer: str) -> bool | None:
    """Letters of multiple choice: `C`, `(C)`, `\\text{C}`, `C) 12`. None unless the gold is one."""
    wanted = _choice(gold)
    given = _choice(answer)
    if wanted is None:
        return None
    letter, words = wanted
    if given is None:
        is_small = re.fullmatch(r"[a-j]", fold(answer)) is not None
        return (is_small and fold(answer).upper() == letter) or (bool(words) and _values_equal(words, answer))
    return given[0] == letter


def _choice(text: str) -> tuple[str, str] | None:
    match = _CHOICE.match(_plain(text).strip())
    if match is None:
        return None
    bracketed, ended, bare, rest = match.groups()
    if bare and rest:
        return None  # `A + B` is no choice
    return (bracketed or ended or bare).upper(), rest or ""


def _dates_equal(gold: str, answer: str) -> bool | None:
    """Days of a year in any order of their parts. None unless the gold is one."""
    wanted = _date(gold)
    given = _date(answer)
    return None if wanted is None else wanted == given


def _date(text: str) -> tuple[str, ...] | None:
    """Month, day and year, in whatever order they were; None if it names no month or no day."""
    plain = re.sub(r"(?<=\d)\s*(?:st|nd|rd|th)\b|\bof\b|\bthe\b", "", _plain(text).lower())
    parts = _DATE_PART.findall(plain)
    months = [part[:3] for part in parts if part[:3] in _MONTHS and part.isalpha()]
    numbers = [part for part in parts if part.isdigit()]
    if len(months) != 1 or not numbers or len(months) + len(numbers) != len(parts):
        return None
    return (months[0], *sorted(number.lstrip("0") for number in numbers))


def _times(gold: str, answer: str) -> bool | None:
    """Times of day. `3:30` alone may be a ratio, but is compared as it stands."""
    wanted, given = (_TIME.match(re.sub(r"[\s.]", "", _plain(text).lower())) for text in (gold, answer))
    if wanted is None:
        return None
    if given is None or int(wanted[1]) != int(given[1]) or wanted[2] != given[2]:
        return False
    return wanted[3] is None or given[3] is None or wanted[3] == given[3]


def _words(gold: str, answer: str) -> bool | None:
    """Words and names, letter by letter but not case by case. None if the gold is a formula or a number."""
    if not _is_words(gold):
        return False if _is_words(answer) else None
    return _letters(gold) == _letters(answer)


def _is_words(text: str) -> bool:
    bare = _TEXT.sub("", text)
    if _MATHS.search(bare):
        return False
    return (bare != text and not bare.strip(" ()-'")) or _LONG_WORD.search(text) is not None


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9+-]", "", _plain(text).lower())


# --- numbers in other notations -------------------------------------------------------------------

_BASED = re.compile(r"^([0-9A-Fa-f]+(?:\.[0-9A-Fa-f]+)?)_\{?(?:\\text\{)?\s*(\d+|two|three|eight)\s*\}*$")


def _based(gold: str, answer: str) -> bool | None:
    """`1011_2`: digits and base. A base that one side leaves out is taken to be the other's."""
    wanted = _BASED.match(fold(gold))
    given = _BASED.match(fold(answer))
    if wanted is None and given is None:
        return None
    if wanted is not None and given is not None:
        return wanted.groups() == given.groups()
    with_base = wanted or given
    bare = fold(answer if wanted else gold)
    return with_base is not None and with_base[1].lstrip("0").upper() == bare.lstrip("0").upper()


_RATIO = re.compile(r"[-\d.:/\s]+|\\frac\{\d+\}\{\d+\}")


def _ratios(gold: str, answer: str) -> bool | None:
    """`2:3` as a fraction; of more than two numbers, all are in proportion."""
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
class _Number:
    """A number as it was written."""

    value: Fraction
    num_decimals: int = -1
    """Digits after the decimal point; -1 for a number that is exact."""
    num_digits: int = 0
    """Significant digits of a decimal."""

    def is_equal(self, other: "_Number") -> bool:
        if self.value == other.value or _is_noise(self.value, other.value):
            return True
        return self.stands_for(other.value) or other.stands_for(self.value)

    def stands_for(self, value: Fraction) -> bool:
        """Whether it is a decimal, long enough, that `value` rounds to."""
        if self.num_decimals < 0 or self.num_digits < _MIN_DIGITS:
            return False
        return value.denominator != 1 and abs(self.value - value) <= Fraction(1, 2 * 10**self.num_decimals)


def _is_noise(one: Fraction, two: Fraction) -> bool:
    """Decimals that differ by the rounding of a computer's numbers, as 0.30000000000000004 and 0.3."""
    return (one.denominator != 1 or two.denominator != 1) and abs(one - two) <= Fraction(1, 10**13) * max(
        abs(one), abs(two)
    )


_SCIENTIFIC = re.compile(
    r"^(?P<base>[-+]?(?:\d+\.?\d*|\.\d+))\s*(?:(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{?\s*(?P<a>[-+]?\s*\d+)\s*\}?"
    r"|[eE]\{?(?P<b>[-+]?\d+)\}?)$"
)
_REPEATING = re.compile(r"^([-+]?)(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?$")
_FRACTION = re.compile(r"^([-+]?)\\frac\{([-+]?\d+)\}\{(\d+)\}$|^([-+]?)(\d+)/(\d+)$")
_MIXED = re.compile(r"^([-+]?)(\d+)(?:\\frac\{(\d+)\}\{(\d+)\}|\s+(\d+)/(\d+))$")
_MAX_EXPONENT = 400
"""Larger powers of ten are left to the algebra."""


def _number(text: str) -> _Number | None:
    """The number that a text is; None for all that needs algebra."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.strip())
    if re.fullmatch(r"[-+]?\s*(?:\d+\.?\d*|\.\d+)", text):
        return _decimal(text.replace(" ", ""))
    if (match := _SCIENTIFIC.match(text)) is not None:
        exponent = int((match["a"] or match["b"]).replace(" ", ""))
        if abs(exponent) > _MAX_EXPONENT:
            return None
        base = _decimal(match["base"])
        return _Number(base.value * Fraction(10) ** exponent)
    exact = _fraction(text)
    return None if exact is None else _Number(exact)


def _decimal(text: str) -> _Number:
    value = Fraction(text.rstrip(".") if text.rstrip("-+.") else "0")
    _, point, decimals = text.partition(".")
    if not point or not decimals:
        return _Number(value)
    return _Number(value, len(decimals), len(text.replace(".", "").lstrip("-+0")))


def _fraction(text: str) -> Fraction | None:
    """Integers, fractions, mixed and repeating numbers."""
    text = re.sub(r"\s*(\\frac|[{}/])\s*", r"\1", text.strip())
    if re.fullmatch(r"[-+]?\d+(?:\.\d+)?", text):
        return Fraction(text)
    if (match := _FRACTION.match(text)) is not None:
        sign, above, below = (match[1], match[2], match[3]) if match[3] else (match[4], match[5], match[6])
        return None if int(below) == 0 else Fraction(int(above), int(below)) * (-1 if sign == "-" else 1)
    if (match := _MIXED.match(text)) is not None:
        above = int(match[3] or match[5])
        below = int(match[4] or match[6])
        value = None if below == 0 else int(match[2]) + Fraction(above, below)
        return None if value is None else value * (-1 if match[1] == "-" else 1)
    if (match := _REPEATING.match(text)) is not None:
        sign, whole, start, period = match.groups()
        value = Fraction(int((whole or "0") + start), 10 ** len(start))
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(start))
        return -value if sign == "-" else value
    return None


# --- units ----------------------------------------------------------------------------------------

_UNIT_NAMES = (
    "cm|centimeter|centimetre mm|millimeter|millimetre km|kilometer|kilometre m|meter|metre nm|nanometer "
    "ft|foot|feet in|inch|inches yd|yard mi|mile dm g|gram kg|kilogram mg|milligram lb|pound oz|ounce ton "
    "s|sec|second min|minute h|hr|hour day week month yr|year ml|milliliter l|liter|litre gal|gallon "
    "mph kmh|kmph hz|hertz khz|kilohertz mhz j|joule kj ev kev mev w|watt kw v|volt n|newton pa|pascal "
    "k|kelvin mol|mole cent|cents dollar|dollars|usd|bucks euro degree|deg rad|radian ohm amp|ampere unit "
    "erg angstrom pc|parsec au ly c|celsius f|fahrenheit am pm"
)
_UNITS = {name: names.split("|")[0] for names in _UNIT_NAMES.split() for name in names.split("|")}
_BARE_UNITS = "cm|mm|km|kg|ft|" + "|".join(
    sorted((f"{name}s?" for name in _UNITS if len(name) > 2), key=len, reverse=True)
)
"""Units that stand without `\\text`; shorter ones could be products of variables, as the `mg` of `2mg`."""
_UNIT = re.compile(
    r"^(?P<value>.*?[\d})\]!A-Za-z.])\s*(?P<unit>(?:"
    r"\\text\{(?:[^{}]|\{[^{}]*\})*\}(?:\^\s*\{?-?\d\}?)?"
    r"|\\degree(?:\s*[CFK](?![A-Za-z]))?"
    r"|(?<![A-Za-z\\])(?:(?:square|cubic|sq|cu)\s+)?(?:"
    + _BARE_UNITS
    + r")(?:\s*\^\s*\{?-?\d\}?)?(?![A-Za-z])"
    r"|(?<=[\d}] )[A-Za-z]{4,}(?:\s[A-Za-z]{3,})*|(?<=\d)(?:st|nd|rd|th)(?![A-Za-z])"
    r"|(?<=[\d} ])k?m\s*/\s*(?:s|h|hr|min)(?:\s*\^\s*\{?-?\d\}?)?(?![A-Za-z])"
    r"|%|\\(?:mu|Omega|AA)(?![A-Za-z])"
    r"|\s+)+)$"
)


def _split_unit(text: str) -> tuple[str, str]:
    """Value and unit of a text; the unit is empty if there is none."""
    text = re.sub(
        r"^(?:\\approx|\\text\{[^{}]*\}|about|approximately|roughly|Rs\.?|USD)\s*(?=[\d\\(.-])", "", text
    )
    match = _UNIT.match(text)
    if match is None or not re.search(r"[\dA-Za-z]", match["value"]):
        return text, ""
    value = match["value"].strip()
    unit = match["unit"].strip()
    if unit == r"\degree" and _ANGLE_FUNCTION.search(value):
        return text, ""
    if re.search(r"[\d})]", value) is None and "\\text" not in unit and unit not in ("%", r"\degree"):
        return text, ""
    return value, unit


def _unit_name(unit: str) -> str:
    """One name for a unit, empty if it is none that is known."""
    plain = _plain(unit).lower().replace("\\cdot", " ").replace("\\degree", " degree ")
    plain = re.sub(r"\bper\b", "/", plain)
    squared = "^2" if re.search(r"\bsq(?:uare)?\b|\^\{?2", plain) else ""
    cubed = "^3" if re.search(r"\bcu(?:bic)?\b|\^\{?3", plain) else ""
    names: list[str] = []
    for word in re.findall(
        r"[a-z]+|/|%", re.sub(r"\^\s*\{?-?\d\}?|\bsq(?:uare)?\b|\bcu(?:bic)?\b", "", plain)
    ):
        known = word if word in "/%" else _UNITS.get(word, _UNITS.get(word.removesuffix("s"), ""))
        if not known:
            return ""
        names.append(known)
    name = "".join(names) + squared + cubed
    return name.removeprefix("degree") if name in ("degreec", "degreef") else name


def _units_differ(gold: str, answer: str) -> bool:
    """Whether both have units that are known, and not the same."""
    wanted = _unit_name(gold)
    given = _unit_name(answer)
    if not wanted or not given or wanted == given or "%" in (wanted, given):
        return False
    return not ({wanted.split("^")[0], given.split("^")[0]} & {"unit"})


# --- relations ------------------------------------------------------------------------------------

_EQUALS = re.compile(r"(?<![\\<>!])(?:=|\\approx(?![A-Za-z])|\\equiv(?![A-Za-z]))(?!=)")
_ORDER = re.compile(r"[<>]|\\(?:le|ge|neq)(?![A-Za-z])")


_OPERATOR = re.compile(r"[-+*/^]|\\(?:cdot|times|frac|sqrt)(?![A-Za-z])")
"""What no name has: of a gold `x^2 + y^2 = 1`, the right side alone is no answer."""


def _outer(text: str) -> str:
    """The text with a blank for each character inside braces, as in `\\sum_{k=1}`."""
    depth = 0
    outer = ""
    for char in text:
        depth -= char == "}"
        outer += char if depth == 0 else " "
        depth += char == "{"
    return outer


def _sides(text: str) -> list[str]:
    """The sides of the equals signs of a text; an empty first side is left out."""
    sides: list[str] = []
    start = 0
    for sign in _EQUALS.finditer(_outer(text)):
        sides.append(text[start : sign.start()])
        start = sign.end()
    return [side for side in [*sides, text[start:]] if side.strip()]


def _relations(gold: str, answer: str) -> bool:
    """Equations by their right sides if they say what something is, or if only one is an equation."""
    if _ORDER.search(_outer(gold)) or _ORDER.search(_outer(answer)):
        return same_algebra(gold, answer)
    wanted = _sides(gold)
    given = _sides(answer)
    if not wanted or not given:
        return False
    if len(wanted) == 1 and len(given) == 1:
        return _amounts_equal(gold, answer)
    if len(wanted) > 1 and len(given) > 1:
        if fold(wanted[0]) == fold(given[0]) and _is_name(wanted[0]):
            return _amounts_equal(wanted[-1], given[-1])
        return same_algebra(gold, answer)
    if len(wanted) > 1:
        is_named = _is_name(wanted[0]) and _OPERATOR.search(wanted[0]) is None
    else:
        is_named = _is_name(given[0]) or all(_amounts_equal(given[-1], part) for part in given[:-1])
    if not is_named:
        return False
    return _amounts_equal(wanted[-1], given[-1])


def _is_name(text: str) -> bool:
    """Whether the left side of an equation names what is asked: `x`, `f(2)`, `m + n`; not `2x`."""
    bare = re.sub(r"_\s*(?:\{[^{}]*\}|\w)|\([^()]*\)|\\text\{[^{}]*\}|\^\s*(?:\{[^{}]*\}|\w)", "", text)
    return re.search(r"\d", bare) is None and bool(text.strip())


def _amounts_equal(gold: str, answer: str) -> bool:
    """Whether numbers or expressions are equal; a unit may be left out, but not be another one."""
    if fold(_plain(gold)) == fold(_plain(answer)):
        return True
    (wanted, wanted_unit) = _split_unit(gold)
    (given, given_unit) = _split_unit(answer)
    if _units_differ(wanted_unit, given_unit):
        return False
    if _expressions_equal(wanted, given):
        return True
    num_percent = ("%" in wanted_unit) - ("%" in given_unit)
    if num_percent == 0:
        return False
    percent, other = (wanted, given) if num_percent > 0 else (given, wanted)
    return _expressions_equal(rf"\frac{{{percent}}}{{100}}", other)


def _expressions_equal(gold: str, answer: str) -> bool:
    if fold(gold) == fold(answer):
        return bool(fold(gold))
    gold = _without_degrees(gold)
    answer = _without_degrees(answer)
    wanted = _number(gold)
    given = _number(answer)
    if wanted is not None and given is not None:
        return wanted.is_equal(given)
    if same_algebra(gold, answer):
        return True
    # an exact answer to a gold that is a long decimal; the other way around, the exact value was asked for
    exact = rational_near(answer) if wanted is not None else None
    return wanted is not None and exact is not None and wanted.stands_for(exact)


_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\\degree(?![A-Za-z])")
_ANGLE_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")


def _without_degrees(text: str) -> str:
    """Degrees as numbers; as radians where a function of angles is taken of them."""
    if _ANGLE_FUNCTION.search(text):
        return _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    return re.sub(r"\\degree(?![A-Za-z])", " ", text)
