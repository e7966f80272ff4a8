"""Compares answers that are words: names, dates, times, choices, and phrases such as `no solution`.

Words are compared as texts, because as formulas `east` and `seat` would be the same product. Functions return
None if the gold is not of their kind.
"""

import re
import unicodedata

from astraflow.addons.math.units import TEXT, plain_text

__all__ = [
    "absences_equal",
    "choice_of",
    "dates_equal",
    "times_equal",
    "words_equal",
]

_CHOICE = re.compile(r"^(?:\(([A-Ja-j])\)|([A-Ja-j])[).:]|([A-J]))(?:\s*(.+))?$")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DATE_PART = re.compile(r"[a-z]+|\d+")
_TIME = re.compile(r"^(\d{1,2}):(\d{2})(?:([ap])m)?$")
_LONG_WORD = re.compile(
    r"(?<![\\A-Za-z])(?:[A-Za-z]{4,}|[Yy]es|[Nn]o|[Oo]dd|[Rr]ed|DNE|[A-Z][a-z]{2})(?![A-Za-z])"
)
_MATHS = re.compile(r"[\d=<>+*/^_|\\]|(?<![A-Za-z])-")


def choice_of(text: str) -> tuple[str, str] | None:
    """The letter of a choice in upper case, and the rest of the text; None if the text is not a choice."""
    match = _CHOICE.match(plain_text(text).strip())
    if match is None:
        return None
    bracketed, ended, bare, rest = match.groups()
    if bare and rest:
        return None  # `A + B` is not a choice
    return (bracketed or ended or bare).upper(), rest or ""


_EMPTY = re.compile(r"(?:[A-Za-z]\s*(?:\\in|=)\s*)?\\emptyset\s*")
_FILLERS = re.compile(
    r"there|is|are|exists?|the|equation|has|have|an?|any|it|this|system|inequality|to|that|real|such"
)
_NOTHING = frozenset(
    {"none", "no solution", "no root", "no answer", "no value", "empty set", "no number", "null set"}
)


def absences_equal(gold: str, answer: str) -> bool | None:
    """Whether both answers say that nothing is a solution, or that something does not exist."""
    wanted = _absence(gold)
    given = _absence(answer)
    return None if wanted is None and given is None else wanted == given


def _absence(text: str) -> str | None:
    """What a text such as `no real solutions`, `\\emptyset` or `DNE` says; None for other texts."""
    if _EMPTY.fullmatch(text):
        return "nothing"
    spoken = plain_text(text).lower()
    if re.search(r"[^a-z\s.,!'-]", spoken):
        return None
    words = re.findall(r"[a-z]+", spoken)
    sentence = " ".join(words)
    if re.search(r"(?:(?:does|do) not|doesn t) exist$|^dne$", sentence):
        return "does not exist"
    if re.search(r"set is empty$", sentence):
        return "nothing"
    if re.match(r"infinitely many|(?:an )?infinite number", sentence):
        return "infinitely many"
    if re.search(r"\bno (?:there|it|the|this|that|is|are|has|have)\b", sentence):
        return None  # `No, there are solutions`
    is_such = "such" in words
    bare = [word.removesuffix("s") for word in words if not _FILLERS.fullmatch(word)]
    if bare[:1] == ["no"] and len(bare) == 2 and (is_such or " ".join(bare) in _NOTHING):
        return "nothing"
    return "nothing" if " ".join(bare) in _NOTHING else None


def dates_equal(gold: str, answer: str) -> bool | None:
    """Whether two dates name the same day, with their parts in any order."""
    wanted = _date(gold)
    given = _date(answer)
    return None if wanted is None else wanted == given


def _date(text: str) -> tuple[str, ...] | None:
    """The month and the numbers of a date, in a fixed order; None if the text is not a date."""
    plain = re.sub(r"(?<=\d)\s*(?:st|nd|rd|th)\b|\bof\b|\bthe\b", "", plain_text(text).lower())
    parts = _DATE_PART.findall(plain)
    months = [part[:3] for part in parts if part[:3] in _MONTHS and part.isalpha()]
    numbers = [part for part in parts if part.isdigit()]
    if len(months) != 1 or not numbers or len(months) + len(numbers) != len(parts):
        return None
    return (months[0], *sorted(number.lstrip("0") for number in numbers))


def times_equal(gold: str, answer: str) -> bool | None:
    """Whether two times of day are the same. `am` or `pm` counts only if both have it.

    `3:30` may also be a ratio; it is compared as it is written.
    """
    wanted, given = (_TIME.match(re.sub(r"[\s.]", "", plain_text(text).lower())) for text in (gold, answer))
    if wanted is None:
        return None
    if given is None or int(wanted[1]) != int(given[1]) or wanted[2] != given[2]:
        return False
    return wanted[3] is None or given[3] is None or wanted[3] == given[3]


def words_equal(gold: str, answer: str) -> bool | None:
    """Whether words and names have the same letters, in upper or lower case.

    If only the answer consists of words, it is wrong.
    """
    if not _is_words(gold):
        return False if _is_words(answer) else None
    letters = _letters(gold)
    return bool(letters) and letters == _letters(answer)


def _is_words(text: str) -> bool:
    r"""Whether a text consists of words: in `\text{}`, or too long to be a product of variables."""
    bare = TEXT.sub("", text)
    if _MATHS.search(bare):
        return False
    return (bare != text and not bare.strip(" ()-'")) or _LONG_WORD.search(text) is not None


def _letters(text: str) -> str:
    """The letters, digits and signs of words in any alphabet, in lower case. Marks belong to letters."""
    plain = unicodedata.normalize("NFC", plain_text(text)).casefold()
    return "".join(
        char for char in plain if char.isalnum() or char in "+-" or unicodedata.category(char)[0] == "M"
    )
