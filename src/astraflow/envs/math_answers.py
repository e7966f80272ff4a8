"""Decides whether a text gives the right answer to a question of mathematics.

The final answer is found and taken apart, and its parts are compared with those of the gold, which is the
reference answer. Exact numbers must be equal exactly. A decimal of at least six significant digits also
stands for the values that round to it. Expressions with variables are equal if they agree at several points,
or if `math-verify` can show that they are equal. Names, words and dates are compared as texts, because as
formulas `east` and `seat` would be the same product.

Functions named after a kind of answer, such as `_times`, return None if the gold is not of that kind.
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
"""Number of characters, from the end of a text, in which the final answer is looked for."""
_LONGEST = 500
"""Answers with more characters are compared as texts only; parsing them as formulas takes too long."""


def is_right(gold: str, text: str) -> bool:
    """Whether the final answer of a text equals the gold.

    Example: `is_right("0.5", r"It is $\\frac12$.")`.
    """
    wanted = readable_gold(gold)
    text = text[-_TAIL:]
    if len(text) <= _LONGEST and fold(tidy(text)) == fold(wanted):
        return True
    return answers_equal(wanted, tidy(final_answer(text)))


def readable_gold(gold: str) -> str:
    """The gold answer in one spelling; empty if it holds nothing that can be compared."""
    return tidy(gold_answer(gold))


def answers_equal(gold: str, answer: str) -> bool:
    """Whether two tidy answers are equal: they must have the same shape and equal parts."""
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
    """Whether two shapes with several parts are equal. Only the parts of tuples have an order."""
    if len(wanted.items) != len(given.items):
        return False
    kinds = {wanted.kind, given.kind}
    if kinds == {"set", "value"}:
        return answers_equal(wanted.items[0], given.items[0])  # a set with one element equals the element
    if kinds == {"tuple"}:
        return wanted.brackets == given.brackets and _in_order(wanted, given)
    if kinds == {"tuple", "several"}:
        ordered = wanted if wanted.kind == "tuple" else given
        return ordered.brackets == "()" and _in_order(wanted, given)
    if kinds == {"several"} and _names(wanted) != _names(given) and (_names(wanted) or _names(given)):
        return _in_order(wanted, given)
    return kinds <= {"several", "set"} and _in_any_order(wanted, given)


def _names(shape: Shape) -> frozenset[str]:
    """The names of the parts if each part has a different one, as in `x=1, y=2`; else none."""
    names = frozenset(fold(item.partition("=")[0]) for item in shape.items if "=" in item)
    return names if len(names) == len(shape.items) else frozenset()


def _in_order(wanted: Shape, given: Shape) -> bool:
    return all(answers_equal(one, two) for one, two in zip(wanted.items, given.items, strict=True))


def _in_any_order(wanted: Shape, given: Shape) -> bool:
    unmatched = list(given.items)
    for item in wanted.items:
        match = next((other for other in unmatched if answers_equal(item, other)), None)
        if match is None:
            return False
        unmatched.remove(match)
    return True


_REGION = re.compile(r"[<>]|\\(?:le|ge|neq|cup|cap|in|setminus|mathbb)(?![A-Za-z])")
_AND = re.compile(r"(?<![A-Za-z])and(?![A-Za-z])|\\(?:land|wedge)(?![A-Za-z])|,|;")


def _same_region(gold: str, wanted: Shape, answer: str, given: Shape) -> bool:
    """Whether two answers describe the same set, written as intervals, unions or inequalities."""
    if not (_REGION.search(gold) or _REGION.search(answer)):
        return False
    regions: list[tuple[str, ...]] = []
    for text, shape in ((gold, wanted), (answer, given)):
        if shape.kind == "several":
            if _AND.search(text):
                return False  # parts joined by `and` would be an intersection, and not the union below
            regions.append(shape.items)
        else:
            regions.append((_bracketed(shape) or text,))
    return same_sets(*regions)


def _bracketed(shape: Shape) -> str:
    """A tuple or an interval as one text without the name that it may have had; empty for other shapes."""
    if shape.kind != "tuple":
        return ""
    return shape.brackets[0] + ",".join(shape.items) + shape.brackets[-1]


# --- single values ----------------------------------------------------------------------------------

_MIN_DIGITS = 6
"""A decimal with at least this many significant digits equals the values that round to it; 3.14 is not pi."""


def _values_equal(gold: str, answer: str) -> bool:
    """Whether two tidy answers, each of which is a single value, are equal.

    The kinds of values are tried in order; the first kind that the gold belongs to decides.
    """
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
    r"""A text without the command `\text{}` around its parts."""
    return _TEXT.sub(r" \1 ", text)


def _choices(gold: str, answer: str) -> bool | None:
    """Whether two choices are the same: `C`, `(C)`, `\\text{C}`, `C) 12`.

    A choice also equals its letter in lower case, and the text that stands beside its letter.
    """
    wanted = _choice(gold)
    given = _choice(answer)
    if wanted is None:
        return None
    letter, words = wanted
    if given is not None:
        return given[0] == letter
    is_small_letter = re.fullmatch(r"[a-j]", fold(answer)) is not None
    if is_small_letter and fold(answer).upper() == letter:
        return True
    return bool(words) and _values_equal(words, answer)


def _choice(text: str) -> tuple[str, str] | None:
    """The letter of a choice in upper case, and the text beside it; None if the text is not a choice."""
    match = _CHOICE.match(_plain(text).strip())
    if match is None:
        return None
    bracketed, ended, bare, rest = match.groups()
    if bare and rest:
        return None  # `A + B` is not a choice
    return (bracketed or ended or bare).upper(), rest or ""


def _dates_equal(gold: str, answer: str) -> bool | None:
    """Whether two dates name the same day, with their parts in any order."""
    wanted = _date(gold)
    given = _date(answer)
    return None if wanted is None else wanted == given


def _date(text: str) -> tuple[str, ...] | None:
    """The month and the numbers of a date, in a fixed order; None if the text is not a date."""
    plain = re.sub(r"(?<=\d)\s*(?:st|nd|rd|th)\b|\bof\b|\bthe\b", "", _plain(text).lower())
    parts = _DATE_PART.findall(plain)
    months = [part[:3] for part in parts if part[:3] in _MONTHS and part.isalpha()]
    numbers = [part for part in parts if part.isdigit()]
    if len(months) != 1 or not numbers or len(months) + len(numbers) != len(parts):
        return None
    return (months[0], *sorted(number.lstrip("0") for number in numbers))


def _times(gold: str, answer: str) -> bool | None:
    """Whether two times of day are the same. `am` or `pm` counts only if both have it.

    `3:30` may also be a ratio; it is compared as it is written.
    """
    wanted, given = (_TIME.match(re.sub(r"[\s.]", "", _plain(text).lower())) for text in (gold, answer))
    if wanted is None:
        return None
    if given is None or int(wanted[1]) != int(given[1]) or wanted[2] != given[2]:
        return False
    return wanted[3] is None or given[3] is None or wanted[3] == given[3]


def _words(gold: str, answer: str) -> bool | None:
    """Whether words and names have the same letters, in upper or lower case.

    If only the answer consists of words, it is wrong.
    """
    if not _is_words(gold):
        return False if _is_words(answer) else None
    return _letters(gold) == _letters(answer)


def _is_words(text: str) -> bool:
    r"""Whether a text consists of words: in `\text{}`, or too long to be a product of variables."""
    bare = _TEXT.sub("", text)
    if _MATHS.search(bare):
        return False
    return (bare != text and not bare.strip(" ()-'")) or _LONG_WORD.search(text) is not None


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9+-]", "", _plain(text).lower())


# --- numbers in other notations -------------------------------------------------------------------

_BASED = re.compile(r"^([0-9A-Fa-f]+(?:\.[0-9A-Fa-f]+)?)_\{?(?:\\text\{)?\s*(\d+|two|three|eight)\s*\}*$")


def _based(gold: str, answer: str) -> bool | None:
    """Whether numbers with a base, such as `1011_2`, have the same digits and base.

    If only one side names a base, it holds for the other side too.
    """
    wanted = _BASED.match(fold(gold))
    given = _BASED.match(fold(answer))
    if wanted is None and given is None:
        return None
    if wanted is not None and given is not None:
        return wanted.groups() == given.groups()
    with_base = wanted or given
    without_base = fold(answer if wanted else gold)
    return with_base is not None and with_base[1].lstrip("0").upper() == without_base.lstrip("0").upper()


_RATIO = re.compile(r"[-\d.:/\s]+|\\frac\{\d+\}\{\d+\}")


def _ratios(gold: str, answer: str) -> bool | None:
    """Whether ratios are equal: `2:3` equals its fraction; in longer ratios, all parts are in proportion."""
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
    """A number, and how exactly it was written."""

    value: Fraction
    num_decimals: int = -1
    """Number of digits after the decimal point; -1 for a number that is exact."""
    num_digits: int = 0
    """Number of significant digits of a decimal."""

    def is_equal(self, other: "_Number") -> bool:
        """Whether the values are equal, or one number is a decimal that stands for the other."""
        if self.value == other.value or _is_noise(self.value, other.value):
            return True
        return self.stands_for(other.value) or other.stands_for(self.value)

    def stands_for(self, value: Fraction) -> bool:
        """Whether this is a decimal with enough digits, to which `value` rounds."""
        if self.num_decimals < 0 or self.num_digits < _MIN_DIGITS:
            return False
        return value.denominator != 1 and abs(self.value - value) <= Fraction(1, 2 * 10**self.num_decimals)


def _is_noise(one: Fraction, two: Fraction) -> bool:
    """Whether decimals differ only by floating-point rounding, as 0.30000000000000004 and 0.3 do."""
    if one.denominator == 1 and two.denominator == 1:
        return False
    return abs(one - two) <= Fraction(1, 10**13) * max(abs(one), abs(two))


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
    """The number that a text writes in digits; None if the text needs algebra."""
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
    """A number written with digits and perhaps a decimal point."""
    value = Fraction(text.rstrip(".") if text.rstrip("-+.") else "0")
    _, point, decimals = text.partition(".")
    if not point or not decimals:
        return _Number(value)
    return _Number(value, len(decimals), len(text.replace(".", "").lstrip("-+0")))


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


# --- units ----------------------------------------------------------------------------------------

_UNIT_NAMES = (
    "cm|centimeter|centimetre mm|millimeter|millimetre km|kilometer|kilometre m|meter|metre nm|nanometer "
    "ft|foot|feet in|inch|inches yd|yard mi|mile dm g|gram kg|kilogram mg|milligram lb|pound oz|ounce ton "
    "s|sec|second min|minute h|hr|hour day week month yr|year ml|milliliter l|liter|litre gal|gallon "
    "mph kmh|kmph hz|hertz khz|kilohertz mhz j|joule kj ev kev mev w|watt kw v|volt n|newton pa|pascal "
    "k|kelvin mol|mole cent|cents dollar|dollars|usd|bucks euro degree|deg rad|radian ohm amp|ampere unit "
    "erg angstrom pc|parsec au ly c|celsius f|fahrenheit am pm"
)
"""Units, separated by blanks; `|` separates the names of one unit."""
_UNITS = {name: names.split("|")[0] for names in _UNIT_NAMES.split() for name in names.split("|")}
"""The first name of each unit, by all of its names."""
_BARE_UNITS = "cm|mm|km|kg|ft|" + "|".join(
    sorted((f"{name}s?" for name in _UNITS if len(name) > 2), key=len, reverse=True)
)
"""Units that are recognised without `\\text`. Shorter ones could be products of variables, as in `2mg`."""
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
    """The value and the unit of a text; the unit is empty if there is none."""
    # Words and signs before a value do not change it: `about 3`, `\approx 3`, `Rs. 3`.
    text = re.sub(
        r"^(?:\\approx|\\text\{[^{}]*\}|about|approximately|roughly|Rs\.?|USD)\s*(?=[\d\\(.-])", "", text
    )
    match = _UNIT.match(text)
    if match is None or not re.search(r"[\dA-Za-z]", match["value"]):
        return text, ""
    value = match["value"].strip()
    unit = match["unit"].strip()
    if unit == r"\degree" and _ANGLE_FUNCTION.search(value):
        return text, ""  # the degrees belong to the argument of the function, as in `\sin 30\degree`
    if re.search(r"[\d})]", value) is None and "\\text" not in unit and unit not in ("%", r"\degree"):
        return text, ""
    return value, unit


def _unit_name(unit: str) -> str:
    """One name for all spellings of a unit; empty if the unit is not known."""
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
    """Whether both units are known and differ. Percent signs do not count: they change the number."""
    wanted = _unit_name(gold)
    given = _unit_name(answer)
    if not wanted or not given or wanted == given or "%" in (wanted, given):
        return False
    return not ({wanted.split("^")[0], given.split("^")[0]} & {"unit"})


# --- relations ------------------------------------------------------------------------------------

_EQUALS = re.compile(r"(?<![\\<>!])(?:=|\\approx(?![A-Za-z])|\\equiv(?![A-Za-z]))(?!=)")
_ORDER = re.compile(r"[<>]|\\(?:le|ge|neq)(?![A-Za-z])")
_OPERATOR = re.compile(r"[-+*/^]|\\(?:cdot|times|frac|sqrt)(?![A-Za-z])")
"""Signs that no name contains. If the gold is `x^2 + y^2 = 1`, its right side alone is not an answer."""


def _outer(text: str) -> str:
    """The text with a blank for each character inside braces, which hides the sign in `\\sum_{k=1}`."""
    depth = 0
    outer = ""
    for char in text:
        depth -= char == "}"
        outer += char if depth == 0 else " "
        depth += char == "{"
    return outer


def _sides(text: str) -> list[str]:
    """The parts of a text between its equals signs, without empty parts."""
    sides: list[str] = []
    start = 0
    for sign in _EQUALS.finditer(_outer(text)):
        sides.append(text[start : sign.start()])
        start = sign.end()
    return [side for side in [*sides, text[start:]] if side.strip()]


def _relations(gold: str, answer: str) -> bool:
    """Whether two values, equations or inequalities are equal.

    If both are equations with the same name on the left, or only one is an equation and has a name on the
    left, their right sides are compared. Other equations and inequalities are compared as algebra.
    """
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
    """Whether the left side of an equation names what is asked for: `x`, `f(2)` or `m + n`, but not `2x`."""
    bare = re.sub(r"_\s*(?:\{[^{}]*\}|\w)|\([^()]*\)|\\text\{[^{}]*\}|\^\s*(?:\{[^{}]*\}|\w)", "", text)
    return re.search(r"\d", bare) is None and bool(text.strip())


def _amounts_equal(gold: str, answer: str) -> bool:
    """Whether numbers or expressions with units are equal. One unit may be missing, but two must be the same.

    A percentage also equals its value as a fraction: `50%` equals `0.5`.
    """
    if fold(_plain(gold)) == fold(_plain(answer)):
        return True
    wanted, wanted_unit = _split_unit(gold)
    given, given_unit = _split_unit(answer)
    if _units_differ(wanted_unit, given_unit):
        return False
    if _expressions_equal(wanted, given):
        return True
    is_gold_percent = "%" in wanted_unit
    is_answer_percent = "%" in given_unit
    if is_gold_percent == is_answer_percent:
        return False
    percent, other = (wanted, given) if is_gold_percent else (given, wanted)
    return _expressions_equal(rf"\frac{{{percent}}}{{100}}", other)


def _expressions_equal(gold: str, answer: str) -> bool:
    """Whether two expressions are equal: as texts, as numbers, or else as algebra."""
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
    # If the gold is a long decimal, its exact value is right too. The opposite does not hold: if the gold is
    # exact, an exact answer was asked for.
    exact = rational_near(answer) if wanted is not None else None
    return wanted is not None and exact is not None and wanted.stands_for(exact)


_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\\degree(?![A-Za-z])")
_ANGLE_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")


def _without_degrees(text: str) -> str:
    """The text with degrees as plain numbers, or in radians if the text contains a function of angles."""
    if _ANGLE_FUNCTION.search(text):
        return _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    return re.sub(r"\\degree(?![A-Za-z])", " ", text)
