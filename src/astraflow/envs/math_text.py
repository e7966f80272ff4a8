"""Finds the final answer in a text, brings it into one spelling, and determines its shape.

This file works on characters only; `math_answers` compares what two answers mean. The shape (one value,
several values, a set, or an ordered tuple or interval) is determined before any values are compared. One of
two answers is therefore not taken for both, a pair not for a number, and a closed interval not for an open
one.
"""

# ruff: noqa: RUF001 - characters that look like others are what this file is about

import re
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Shape",
    "boxes",
    "final_answer",
    "fold",
    "gold_answer",
    "shape_of",
    "tidy",
]

# --- where the final answer is --------------------------------------------------------------------

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(r"(?:[\s,;.$]|\\[,;() ]|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or|x|y|z|=))*")
"""Text that may stand between boxes that together are one answer, as in `\\boxed{1} or \\boxed{2}`."""
_JOINS = re.compile(r"[,;]|and|or")
_MAX_BOXES = 16
"""Number of boxes that are looked at, from the end of the text. Each box that is never closed costs time."""
_SAID = re.compile(
    r"(?:\b(?:final|correct)?\s*(?:answer|choice|option)(?:\s+(?:to|of|for)\b[^.\n]{0,80}?)?"
    r"\s*(?:\*\*)?\s*(?:\bis\b\s*:?|:|=)|####)(?:\*\*)?\s*",
    re.IGNORECASE,
)
_MATH_SPAN = re.compile(
    r"\$\$(?P<a>.{1,1000}?)\$\$|\\\[(?P<b>.{1,1000}?)\\\]|\\\((?P<c>.{1,1000}?)\\\)"
    r"|(?<!\\)\$(?P<d>[^$\n]{1,1000}?)(?<!\\)\$",
    re.DOTALL,
)
_BARE_NUMBER = re.compile(
    r"(?<![\w.\\])[-+−]?\d+(?:,\d{3})*(?:\.\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?(?:[eE][-+]?\d+)?(?:\s*\\?%)?"
)
_SENTENCE_END = re.compile(r"(?<=[^\d])\.(?:\s|$)|(?<=\d)\.(?:\s+[A-Z]|\s*$)|\n|\*\*")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_LEADING_WORDS = re.compile(r"\s*[A-Za-z]+,?\s+[A-Za-z]+:?\s+[^\sA-Za-z]*\d")
"""Two words before a number, as in `She pays 5` but not in `5 square feet`."""
_TEXT_GROUP = re.compile(r"\\(?:text\w*|math(?:rm|bf|it|sf)|mbox|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
_SAME_AS_NOTHING = {"and", "or"}
"""Words that may be part of an answer itself, so they do not count as words around it."""


def boxes(text: str) -> str | None:
    """The content of the last `\\boxed{}`; None without one.

    If a comma, `and` or `or` joins several boxes, all of them are the answer.
    """
    openings = list(_BOX.finditer(text))[-_MAX_BOXES:]
    found = [span for span in (_box_at(text, opening) for opening in openings) if span is not None]
    if not found:
        return None
    start, _, content = found[-1]
    contents = [content]
    for box_start, box_end, content in reversed(found[:-1]):
        if box_end > start:
            continue  # this box contains the one after it
        between = text[box_end:start]
        if not _BETWEEN_BOXES.fullmatch(between) or not _JOINS.search(between):
            break
        if content not in contents:
            contents.insert(0, content)
        start = box_start
    return ", ".join(contents)


def _box_at(text: str, opening: re.Match[str]) -> tuple[int, int, str] | None:
    """Start, end and content of a box; None if its brace is never closed."""
    position = opening.end()
    if position >= len(text):
        return None
    if text[position] != "{":  # TeX then takes the next character, as in `\boxed 5`
        return opening.start(), position + 1, text[position]
    depth = 0
    for brace in _BRACES.finditer(text, position):
        depth += (brace.group() == "{") - (brace.group() == "}")
        if depth == 0:
            return opening.start(), brace.end(), text[position + 1 : brace.start()].strip()
    return None


def gold_answer(text: str) -> str:
    """The reference answer in a data set's row: the text after `####`, that in `\\boxed{}`, or the whole."""
    _, marker, after = text.rpartition("####")
    if marker:
        return after.strip()
    boxed = boxes(text)
    return text.strip() if boxed is None else boxed


def final_answer(text: str) -> str:
    """The answer that a text ends with; empty if there is none.

    It is the content of the last box, or else what the text calls its answer, or else the last value in the
    text. A text that has no words around an answer is the answer itself.
    """
    boxed = boxes(text)
    if boxed is not None:
        return boxed
    said = _said(text)
    if said is not None:
        return said
    if not _is_prose(text):
        return text.strip()
    return _last_value(text)


def _said(text: str) -> str | None:
    """The text after the last `answer is`, `Answer:` or `####`, up to the end of the sentence; None if none.

    If a formula follows, it is the answer. From a long sentence, the first value is taken.
    """
    for said in reversed(list(_SAID.finditer(text))):
        rest = text[said.end() :].lstrip(" *:\n")
        span = _MATH_SPAN.match(rest)
        if span is not None and not _continues(rest[span.end() :]):
            return span.group(span.lastgroup or 0)
        end = _SENTENCE_END.search(rest)
        sentence = (rest[: end.start()] if end else rest).strip()
        if not sentence:
            continue
        return _first_value(sentence) if _is_long(sentence) else sentence
    return None


def _continues(rest: str) -> bool:
    """Whether an answer continues after its first formula, as in `$1$ and $2$`."""
    return re.match(r"\s*(?:,|;|and\b|or\b)\s*(?:and\b|or\b)?\s*(?:\$|\\\()", rest) is not None


def _is_long(sentence: str) -> bool:
    """Whether a sentence is too long to be an answer as a whole."""
    return len(_words(sentence)) > 4


def _is_prose(text: str) -> bool:
    """Whether words stand around the answer."""
    if "\n" in text.strip():
        return True
    words = _words(text)
    if len(words) > 2 or (words and _MATH_SPAN.search(text) is not None):
        return True
    return len(words) == 2 and _LEADING_WORDS.match(text) is not None


def _words(text: str) -> list[str]:
    """The words outside formulas and commands."""
    bare = _TEXT_GROUP.sub(" ", _MATH_SPAN.sub(" ", text))
    return [word for word in _WORD.findall(bare) if word.lower() not in _SAME_AS_NOTHING]


def _values(text: str) -> list[tuple[int, str]]:
    """The formulas and bare numbers of a text in order, each with the position at which it ends."""
    spans = [(m.start(), m.end(), m.group(m.lastgroup or 0)) for m in _MATH_SPAN.finditer(text)]
    numbers = [
        (m.start(), m.end(), m.group())
        for m in _BARE_NUMBER.finditer(text)
        if not any(start <= m.start() < end for start, end, _ in spans)
    ]
    return [(end, value) for _, end, value in sorted(spans + numbers)]


def _first_value(text: str) -> str:
    values = _values(text)
    return values[0][1] if values else text


def _last_value(text: str) -> str:
    """The last formula or number of a text; without one, the last line that is not blank."""
    values = _values(text)
    if values:
        return values[-1][1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


# --- one spelling ---------------------------------------------------------------------------------

_CHARACTERS = {
    "−": "-",
    "–": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "÷": r"\div ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\neq ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "ℚ": r"\mathbb{Q}",
    "ℕ": r"\mathbb{N}",
    "±": r"\pm ",
    "∓": r"\mp ",
    "θ": r"\theta ",
    "α": r"\alpha ",
    "β": r"\beta ",
    "γ": r"\gamma ",
    "λ": r"\lambda ",
    "φ": r"\phi ",
    "ω": r"\omega ",
    "μ": r"\mu ",
    "σ": r"\sigma ",
    "°": r"^{\circ}",
    "²": "^{2}",
    "³": "^{3}",
    "½": r"\frac{1}{2}",
    "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}",
    "，": ",",
    "（": "(",
    "）": ")",
    "’": "'",
    "≈": r"\approx ",
    "€": r"\$",
    "£": r"\$",
    "\u00a0": " ",
    "\u202f": " ",
}
"""Characters that models write instead of LaTeX commands."""
_CHARACTER = re.compile("|".join(map(re.escape, _CHARACTERS)))

_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\(?:begin|end)\{(?:aligned|align\*?|gathered|equation\*?)\}", " "),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"√\s*(\w+)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\!", ""),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|phantom\{[^{}]*\})(?![A-Za-z])", " "),
        (r"\\(?:left|right|[bB]igg?[lrm]?)\s*\.", " "),
        (r"\\(?:left|right|[bB]igg?[lrm]?|mleft|mright)(?![A-Za-z])", ""),
        (r"\\(?:quad|qquad|enspace|thinspace)(?![A-Za-z])|\\[hv]space\*?\{[^{}]*\}|\\[,;:> ]|~", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\(?:leq|leqslant|leqq)(?![A-Za-z])", r"\\le "),
        (r"\\(?:geq|geqslant|geqq)(?![A-Za-z])", r"\\ge "),
        (r"\\ne(?![A-Za-z])|\\not\s*=", r"\\neq "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=", r"\\neq "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\lbrack(?![A-Za-z])", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r"\\colon(?![A-Za-z])", ":"),
        (r"\\math(?:bb|bf|cal)\s*\{?\s*([RZQNC])\s*\}?(?![A-Za-z])", r"\\mathbb{\1}"),
        (r"\\R(?![A-Za-z])", r"\\mathbb{R}"),
        (r"\\(?:text(?:normal|bf|it|rm|sf|sc|tt)|mbox|hbox)\s*\{", r"\\text{"),
        (r"\\(?:math(?:rm|bf|it|sf)|boldsymbol|operatorname\*?|bm)\s*\{", r"\\text{"),
        (r"\{\s*\\(?:rm|bf|it)\s+([^{}]*)\}", r"\\text{\1}"),
        (r"\\text\s*\{\s*\}", " "),
        (r"\^\s*\{?\s*\\text\{\s*(st|nd|rd|th)\s*\}\s*\}?", r"\\text{\1}"),
        (r"\\text\{\s*([ei]|[-+]?[\d.,]+|[:,;])\s*\}", r" \1 "),
        (r"(?<![\d}\s])\s*\\text\{\s*([A-Za-z])\s*\}|\\text\{\s*([^\W\dmgshlJWVNKCFAT_])\s*\}", r" \1\2 "),
        (r"(?<=[\d}])\s*\\text\{\s*(hundred|thousand|million|billion|trillion|dozen)\b\s*", r" \1 \\text{"),
        (r"(?<=[\d}])\s*hundred\b", r"\\cdot 10^{2}"),
        (r"(?<=[\d}])\s*thousand\b", r"\\cdot 10^{3}"),
        (r"(?<=[\d}])\s*million\b", r"\\cdot 10^{6}"),
        (r"(?<=[\d}])\s*billion\b", r"\\cdot 10^{9}"),
        (r"(?<=[\d}])\s*trillion\b", r"\\cdot 10^{12}"),
        (r"(?<=[\d}])\s*dozen\b", r"\\cdot 12"),
        (r"\\text\{\s*\}", " "),
        (r"^\s*\\text\{([^{}]*\d[^{}]*)\}\s*$", r"\1"),
        (r"\\text\{\s*\(([A-Za-z])\)\s*\}", r" (\1) "),
        (r"\^\s*\{?\s*\\(?:circ|degree|degrees)\s*\}?", r"\\degree "),
        (r"\\(?:degrees|degree)(?![A-Za-z])\s*", r"\\degree "),
        (r"\\text\{\s*degrees?\s*\}|(?<!\\)\bdegrees?\b(?!\s*[A-Za-z])", r"\\degree "),
        (r"\\text\{\s*(?:\\?%|per\s?cent|percent(?:age)?)\s*\}|\s*\bper\s?cent\b|\\%", "%"),
        (r"\\\$|(?<!\\)\$", ""),
        (r"\\(?:ldots|dots|cdots)(?![A-Za-z])", "..."),
        (r"\\(?:infinity|infty)(?![A-Za-z])|(?<!\\)\binfinity\b", r"\\infty "),
        (r"\+\s*\\infty", r"\\infty"),
        (r"\(\s*mod\s+|\\pmod\s*", r"\\pmod "),
        (r"(?<=\d)\{,\}(?=\d{3})", ","),
        (r"(?<![\d.])(\d{1,3}) (\d{3}(?: \d{3})*)(?![\d/.])", r"\1\2"),
        (r"\*\*(?=\d|\()", "^"),
        (r"\s+", " "),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s*\{([^{}]*)\}\s*([\dA-Za-z])", r"\\frac{\1}{\2}"),
        (r"\\sqrt\s*(\d+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"\^\s*(-?\d+)(?!\d)", r"^{\1}"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"(?<![\w})])([A-Za-z]|\d+)!\s*\^", r"(\1!)^"),
        (r"_\s*(\w)(?!\w)", r"_{\1}"),
        (
            r"(?<![\\A-Za-z])(arc(?:sin|cos|tan)|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|theta)(?![A-Za-z])",
            r"\\\1",
        ),
    ]
)
"""Patterns and replacements, applied in this order: later rules rely on the spelling of earlier ones."""
_NEW_ROW = re.compile(r"\\\\(?:\[[^\]]*\])?")
_ROW = "\x00"
"""Replaces the end of a matrix row while the rules change commands, which begin with a backslash too."""
_DELIMITER = re.compile(r"\\[()\[\]]")


def tidy(text: str) -> str:
    """An answer in one spelling: without delimiters, sizes and spacing, and with one name per relation."""
    text = text.replace(_ROW, " ").strip()
    text = _CHARACTER.sub(lambda match: _CHARACTERS[match.group()], text)
    text = text.replace("`", "").strip("*").strip()
    text = _DELIMITER.sub(" ", _NEW_ROW.sub(_ROW, text))
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = text.replace(_ROW, r"\\").strip()
    return text if text.endswith("...") else text.rstrip(" .,;:")


_BLANK = re.compile(r"\\text|\s+(?!\d)|(?<!\d)\s+")


def fold(text: str) -> str:
    """A tidy answer without blanks, except between digits. Two answers that are equal here are the same."""
    return _BLANK.sub("", text)


# --- what the answer consists of -------------------------------------------------------------------

_OPENING = frozenset({"(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil"})
_CLOSING = frozenset({")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil"})
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[^\\]", re.DOTALL)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_CONJUNCTION = re.compile(
    r",?\s*(?:\\text\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\(?:lor|vee|land|wedge)(?![A-Za-z]))\s*,?"
)
_MEMBER = re.compile(r"^\s*\\?[A-Za-z]+(?:_\{?\w+\}?)?\s*\\in(?![A-Za-z])\s*")
_TEXT_SPAN = re.compile(r"\\text\{[^{}]*\}")
_TEXT_CONJUNCTION = re.compile(r"(?<=\w)\s*(?:,?\s+(?:and|or)\s+|,\s*)(?=\w[^{}]*\})")
"""A comma, `and` or `or` inside `\\text{}`; each part then gets a `\\text{}` of its own."""
_SIGN = re.compile(r"\\pm(?![A-Za-z])|\\mp(?![A-Za-z])")


@dataclass(frozen=True, slots=True)
class Shape:
    """An answer taken apart. Example: `(1, 2]` is `Shape("tuple", ("1", "2"), "(]")`."""

    kind: Literal["value", "several", "set", "tuple"]
    items: tuple[str, ...]
    """The texts of the parts; a value has one part, itself."""
    brackets: str = ""
    """The opening and closing bracket of a tuple; empty for other shapes."""


def shape_of(text: str) -> Shape:
    """The shape of a tidy answer. Outside brackets, a comma before three digits separates thousands."""
    text = _TEXT_SPAN.sub(lambda group: _TEXT_CONJUNCTION.sub(r"}; \\text{", group.group()), text)
    text = _named(_MEMBER.sub("", text).strip())
    while (inner := _inside(text)) is not None:
        brackets, content = inner
        if brackets == r"\{\}":
            return _set(content)
        items = _parts(content)
        if len(items) > 1:
            return Shape("tuple", items, brackets)
        if brackets != "()" or not content.strip():
            return Shape("value", (text,))
        text = content.strip()
    several = _parts(_CONJUNCTION.sub(";", _THOUSANDS.sub(_joined, text)))
    if len(several) == 1:
        several = _both_signs(several[0])
    elif any(_SIGN.search(part) for part in several):
        several = tuple(value for part in several for value in _both_signs(part))
    return Shape("several" if len(several) > 1 else "value", several)


def _named(text: str) -> str:
    """The right side of an equation that names brackets, as `(x, y) = (1, 2)`; any other text as it is."""
    name, _, content = text.rpartition("=")
    content = content.strip()
    if name and len(_parts(name)) == 1 and _inside(content) is not None:
        return content
    return text


def _joined(number: re.Match[str]) -> str:
    """A number without the commas between its thousands."""
    return number.group().replace(",", "")


def _set(content: str) -> Shape:
    """The shape of a set in braces. A set that is given by a condition is a single value."""
    if re.search(r"\\mid(?![A-Za-z])|[|:]", content):
        return Shape("value", (rf"\{{{content}\}}",))
    items = _parts(_CONJUNCTION.sub(";", content))
    return Shape("set", tuple(value for item in items for value in _both_signs(item)))


def _both_signs(text: str) -> tuple[str, ...]:
    """Both values of `a \\pm b`; a `\\mp` beside it takes the opposite sign. Other texts are one value."""
    if not re.search(r"\\pm(?![A-Za-z])", text):
        return (text,)
    plus = re.sub(r"\\mp(?![A-Za-z])", "-", re.sub(r"\\pm(?![A-Za-z])", "+", text))
    minus = re.sub(r"\\mp(?![A-Za-z])", "+", re.sub(r"\\pm(?![A-Za-z])", "-", text))
    return (re.sub(r"(^|=)\s*\+", r"\1 ", plus).strip(), minus)


def _inside(text: str) -> tuple[str, str] | None:
    """The brackets and the content of a text that one pair of brackets encloses; None for other texts."""
    tokens = [(token.group(), token.start(), token.end()) for token in _TOKEN.finditer(text)]
    if len(tokens) < 2 or tokens[0][0] not in ("(", "[", r"\{", r"\langle"):
        return None
    closing = tokens[-1][0]
    if closing not in (")", "]", r"\}", r"\rangle"):
        return None
    depth = 0
    for token, _, end in tokens:
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0 and end != len(text):
            return None
    brackets = tokens[0][0] + closing
    content = text[tokens[0][2] : tokens[-1][1]]
    return ("()" if brackets == r"\langle\rangle" else brackets), content


def _parts(text: str) -> tuple[str, ...]:
    """The parts of a text between its outermost commas and semicolons."""
    parts: list[str] = [""]
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0 and token in (",", ";"):
            parts.append("")
        else:
            parts[-1] += token
    return tuple(part.strip() for part in parts if part.strip()) or (text.strip(),)
