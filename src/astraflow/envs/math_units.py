"""Splits an answer into its value and its unit, and tells whether two units are the same."""

import re

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


def split_unit(text: str) -> tuple[str, str]:
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
    if unit == r"\degree" and ANGLE_FUNCTION.search(value):
        return text, ""  # the degrees belong to the argument of the function, as in `\sin 30\degree`
    if re.search(r"[\d})]", value) is None and "\\text" not in unit and unit not in ("%", r"\degree"):
        return text, ""
    return value, unit


def _unit_name(unit: str) -> str:
    """One name for all spellings of a unit; empty if the unit is not known."""
    plain = plain_text(unit).lower().replace("\\cdot", " ").replace("\\degree", " degree ")
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


def units_differ(gold: str, answer: str) -> bool:
    """Whether both units are known and differ. Percent signs do not count: they change the number."""
    wanted = _unit_name(gold)
    given = _unit_name(answer)
    if not wanted or not given or wanted == given or "%" in (wanted, given):
        return False
    return not ({wanted.split("^")[0], given.split("^")[0]} & {"unit"})
