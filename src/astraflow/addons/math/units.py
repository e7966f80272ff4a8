"""Splits an answer into its value and its unit, and compares units."""

import re

from astraflow.addons.math.chinese import CHINESE, CHINESE_UNITS

__all__ = [
    "ANGLE_FUNCTION",
    "TEXT",
    "plain_text",
    "split_unit",
    "units_differ",
]

TEXT = re.compile(r"\\text\{((?:[^{}]|\{[^{}]*\})*)\}")
ANGLE_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")


def plain_text(text: str) -> str:
    r"""A text without the command `\text{}` around its parts."""
    return TEXT.sub(r" \1 ", text)


_UNIT_NAMES = (
    "cm|centimeter|centimetre mm|millimeter|millimetre km|kilometer|kilometre m|meter|metre nm|nanometer "
    "ft|foot|feet in|inch|inches yd|yard mi|mile dm g|gram kg|kilogram mg|milligram lb|pound oz|ounce ton "
    "s|sec|second min|minute h|hr|hour day week month yr|year ml|milliliter l|liter|litre gal|gallon "
    "hz|hertz khz|kilohertz mhz j|joule kj ev kev mev w|watt kw v|volt n|newton pa|pascal "
    "k|kelvin mol|mole cent|cents dollar|dollars|usd|bucks euro degree|deg rad|radian ohm amp|ampere unit "
    "yuan|rmb|cny jiao erg angstrom pc|parsec au ly c|celsius f|fahrenheit am pm"
)
"""Units, separated by blanks; `|` separates the names of one unit."""
_UNITS = {name: names.split("|")[0] for names in _UNIT_NAMES.split() for name in names.split("|")}
"""The first name of each unit, by all of its names."""
_BARE_UNITS = "cm|mm|km|kg|ft|mph|kph|kmh|USD|EUR|RMB|CNY|" + "|".join(
    sorted((f"{name}s?" for name in _UNITS if len(name) > 2), key=len, reverse=True)
)
"""Units that are recognized without `\\text`. Shorter ones could be products of variables, as in `2mg`."""
_POWER = r"(?:\s*\^\s*\{?\s*-?\d\s*\}?)?"
_LENGTH = "[kcmn]?m|mi|ft|in|yd|miles?"
_RATE = rf"(?:{_LENGTH})\s*/\s*(?:s|sec|h|hr|hour|min)|k?g\s*/\s*(?:cm|dm|m){_POWER}|mol\s*/\s*L"
_TEXT = r"\\text\{(?:[^{}]|\{[^{}]*\})*\}"
_PARTS = rf"\s*(?:(?:{_TEXT}|(?<![A-Za-z])[A-Za-z]{{1,3}}(?![A-Za-z])){_POWER}\s*(?:\\cdot(?![A-Za-z]))?\s*)+"
_UNIT = re.compile(
    r"^(?P<value>.*?[\d})\]!A-Za-z.])\s*(?P<unit>(?:"
    rf"{_TEXT}{_POWER}(?:\s*(?:/|\\cdot(?![A-Za-z]))\s*(?:(?=\\text)|[A-Za-z]{_POWER}(?![A-Za-z])))?"
    r"|\\degree(?:\s*[CFK](?![A-Za-z]))?"
    r"|(?<![A-Za-z\\])(?:(?:square|cubic|sq|cu)\.?\s+)?(?:" + _BARE_UNITS + rf"){_POWER}(?![A-Za-z])"
    r"|(?<=[\d}] )[A-Za-z]{4,}(?:\s[A-Za-z]{3,})*|(?<=\d)(?:st|nd|rd|th)(?![A-Za-z])"
    rf"|(?<=[\d}} ])(?:{_RATE}){_POWER}(?![A-Za-z])"
    rf"|\\frac\s*\{{{_PARTS}\}}\s*\{{{_PARTS}\}}"
    rf"|[{CHINESE}]+(?:\s*/\s*[{CHINESE}]+)?{_POWER}"
    r"|%|\\(?:mu|Omega|AA)(?![A-Za-z])"
    r"|\s+)+)$"
)
_BARE_FRACTION = re.compile(
    rf"\\frac\s*\{{\s*(?:{_LENGTH}|k?g)\s*\}}\s*\{{\s*(?:s|h|hr|min|cm|dm|m){_POWER}\s*\}}"
)
_RATE_OF_VALUE = re.compile(
    rf"^\\frac\s*\{{\s*(-?[\d.,]+)\s*({_TEXT}{_POWER})\s*\}}\s*\{{\s*((?:{_TEXT}|[a-z]{{1,3}}){_POWER})\s*\}}$"
)
_NO_UNIT = re.compile(
    r"(?<![A-Za-z])(?:or|more|less|least|most|than|not|no|fewer|greater|larger|smaller|at|to|between|plus|minus|times|"
    r"half|halves|thirds?|quarters?|fourths?|fifths?|and|over|above|below|except|mod|base|if|when|unless|otherwise|"
    r"only|squared|cubed|binary|tens|ones|(?:hundred|thousand|million|billion|trillion)s?|dozens?|score|gross|but|of|out|"
    r"approximately|percent(?:age)?|factorial|choose|powers?|roots?|modulo|divided|exclusive|inclusive|"
    r"tenths?|hundredths?|thousandths?|millionths?|sixths?|sevenths?|eighths?|ninths?|twelfths?)(?![A-Za-z])"
    r"|[半多余几不非没或和与分之十百千万亿至大小超约左右以]"
)
"""Words that change a number, so they aren't part of a unit."""
_LEADING = re.compile(
    r"^(?:\\approx|\\text\{\s*(?P<words>[^{}]*)\}|about|approximately|roughly|Rs\.?|USD)\s*(?=[\d\\(.-])"
)


_INTRODUCTION = re.compile(
    r"(?:about|around|approximately|approx\.?|roughly|nearly|exactly|Rs\.?|USD|EUR|[^{}]*(?:\b(?:is|are|equals)|[:=]))?\s*"
)


def _is_introduction(words: str) -> bool:
    """Whether words before a number don't change it: `about`, `the value is`, but not `twice`."""
    return _INTRODUCTION.fullmatch(words) is not None and re.search(r"\b(?:not|never|no)\b", words) is None


def split_unit(text: str) -> tuple[str, str]:
    """The value and the unit of a text; the unit is empty if there is none."""
    # Words and signs before a value do not change it: `about 3`, `\approx 3`, `Rs. 3`.
    leading = _LEADING.match(text)
    if leading is not None and (leading["words"] is None or _is_introduction(leading["words"])):
        text = text[leading.end() :]
    text = _RATE_OF_VALUE.sub(r"\1 \\frac{\2}{\3}", text)
    match = _UNIT.match(text)
    if match is None or not re.search(r"[\dA-Za-z]", match["value"]):
        return text, ""
    value = match["value"].strip()
    unit = match["unit"].strip()
    if unit == r"\degree" and ANGLE_FUNCTION.search(value):
        return text, ""  # the degrees belong to the argument of the function, as in `\sin 30\degree`
    if re.search(r"[\d})]", value) is None and "\\text" not in unit and unit not in ("%", r"\degree"):
        return text, ""
    if unit.startswith("\\frac") and "\\text" not in unit and _BARE_FRACTION.fullmatch(unit) is None:
        return text, ""  # a fraction of variables
    if _NO_UNIT.search(unit) and _dimensions(unit) is None:
        return text, ""
    return value, unit


_WORD = re.compile(
    r"\^\s*\{?\s*(-?\d)\s*\}?|[a-z]+|[/%()]|"
    + "|".join(sorted(CHINESE_UNITS, key=len, reverse=True))
    + f"|[{CHINESE}]"
)
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SPELLINGS = (
    (re.compile(r"\\frac\s*\{((?:[^{}]|\{[^{}]*\})*)\}\s*\{((?:[^{}]|\{[^{}]*\})*)\}"), r" \1 / \2 "),
    (re.compile(r"\\text(?![a-z])|\\cdot"), " "),
    (re.compile(r"\\degree"), " degree "),
    (re.compile(r"\bmph\b"), "mi/h"),
    (re.compile(r"\b(?:kmh|kph|kmph)\b"), "km/h"),
    (re.compile(r"\bsquared\b"), "^2"),
    (re.compile(r"\bcubed\b"), "^3"),
)


def _dimensions(unit: str) -> dict[str, int] | None:
    """The power of each unit by its name, such as `{"m": 1, "s": -2}`; None if a word is not known."""
    text = unit.lower()
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    powers: dict[str, int] = {}
    sign = 1
    power = 1
    last = ""
    for match in _WORD.finditer(text):
        word = CHINESE_UNITS.get(match.group(), match.group())
        if match[1] is not None:
            if not last:
                return None
            powers[last] += (int(match[1]) - 1) * sign
        elif word in ("/", "per"):
            sign = -1
        elif word in _POWERS:
            power = _POWERS[word]
        elif word not in "(){}":
            last = word if word == "%" else _UNITS.get(word, _UNITS.get(word.removesuffix("s"), ""))
            if not last:
                return None
            powers[last] = powers.get(last, 0) + sign * power
            power = 1
    if powers.get("degree") and powers.keys() & {"c", "f"}:
        del powers["degree"]
    return powers or None


def units_differ(gold: str, answer: str) -> bool:
    """Whether both units are known and differ. Percent signs do not count: they change the number."""
    wanted = _dimensions(gold)
    given = _dimensions(answer)
    if wanted is None or given is None or wanted == given or "%" in wanted or "%" in given:
        return False
    return "unit" not in wanted and "unit" not in given
