"""Finds the final answer in a text, and the reference answer in a data set's row."""

# ruff: noqa: RUF001 - characters that look like others are what this file is about

import re

__all__ = [
    "boxes",
    "final_answer",
    "gold_answer",
    "stated_value",
]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(r"(?:[\s,;.$]|\\[,;() ]|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or|x|y|z|=))*")
"""Text that may separate boxes that together are one answer, as in `\\boxed{1} or \\boxed{2}`."""
_JOINS = re.compile(r"[,;]|and|or")
_MAX_BOXES = 16
"""Largest number of boxes to read, from the end of the text. Each box that is never closed costs time."""
_SAID = re.compile(
    r"(?:\b(?:final|correct)?\s*(?:answer|choice|option)(?:\s+(?:to|of|for)\b[^.\n]{0,80}?)?"
    r"\s*(?:\*\*)?\s*(?:\bis\b\s*:?|:|=)|####|答案\s*(?:应?[是为]|等于|[:：])|[应故]选|选择?(?=\s*[(（]?[A-J]))"
    r"(?:\*\*)?\s*",
    re.IGNORECASE,
)
_MATH_SPAN = re.compile(
    r"\$\$(?P<a>.{1,1000}?)\$\$|\\\[(?P<b>.{1,1000}?)\\\]|\\\((?P<c>.{1,1000}?)\\\)"
    r"|(?<!\\)\$(?P<d>[^$\n]{1,1000}?)(?<!\\)\$",
    re.DOTALL,
)
_BARE_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.\\])[-+−]?\d+(?:,\d{3})*(?:\.\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?(?:[eE][-+]?\d+)?(?:\s*\\?%)?"
)
_SENTENCE_END = re.compile(r"(?<=[^\d])\.(?:\s|$)|(?<=\d)\.(?:\s+[A-Z]|\s*$)|[。\n]|\*\*")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_LEADING_WORDS = re.compile(r"\s*[A-Za-z]+,?\s+[A-Za-z]+:?\s+[^\sA-Za-z]*\d")
"""Two words before a number, as in `She pays 5` but not in `5 square feet`."""
_TEXT_GROUP = re.compile(r"\\(?:text\w*|math(?:rm|bf|it|sf)|mbox|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
_SAME_AS_NOTHING = {"and", "or"}
"""Words that may be part of an answer itself, so they do not count as words around it."""


def boxes(text: str) -> str | None:
    """The content of the last `\\boxed{}`; None if there is none.

    If a comma, `and` or `or` joins several boxes, all of them are the answer.
    """
    openings = list(_BOX.finditer(text))[-_MAX_BOXES:]
    spans = [span for span in (_box_at(text, opening) for opening in openings) if span is not None]
    if not spans:
        return None
    start, _, content = spans[-1]
    contents = [content]
    for box_start, box_end, content in reversed(spans[:-1]):
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
    return stated_value(text.strip() if boxed is None else boxed)


def final_answer(text: str) -> str:
    """Finds the answer that a text ends with; empty if there is none.

    This is the content of the last box, or else what the text calls its answer, or else the last value in the
    text, or else its last line. A text without words around an answer is the answer itself.
    """
    boxed = boxes(text)
    if boxed is not None:
        return stated_value(boxed)
    answer = _find_said_answer(text)
    if answer is not None:
        return stated_value(answer)
    if not _is_prose(text):
        return stated_value(text.strip())
    values = _values(text)
    if values:
        return values[-1][1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


_LONGEST_SENTENCE = 500
_DELIMITERS = re.compile(r"\\[()\[\]]|(?<!\\)\$")
_TEXT_COMMAND = re.compile(r"\\(?:text(?:rm|bf|it|normal)?|mathrm|mbox)\s*\{([^{}]*)\}")
_OPENING_WORDS = re.compile(
    r"(?:(?:so|thus|hence|therefore|then|finally|and|it follows that"
    r"|we (?:have|get|find|obtain|conclude)(?: that)?"
    r"|(?:the )?(?:final |correct )?(?:answer|solution|result)\s*[:=])\s*,?\s+)+",
    re.IGNORECASE,
)
_IS = (
    r"\s+(?:is|are|was|equals|has the value|is equal to|are equal to|is given by|is exactly|must be)\s*:?\s+"
)
_VALUE = r"[-+]?(?:\d|\\(?!text)|[(\[{.√π]|[A-Za-z](?![A-Za-z]))"
_STATED = re.compile(rf"^(?P<subject>(?=.*[A-Za-z]{{2}}).+){_IS}(?P<value>{_VALUE}.*)$", re.DOTALL)
_STATED_FIRST = re.compile(
    r"^(?P<value>[^A-Za-z\\]*\d[^A-Za-z]*|\\.*?|\S+\s*=\s*\S+)"
    r"\s+(?:is|are)\s+(?:the|our|a|an)\s+(?P<rest>[^\d]*)$"
)
_COUNTED = re.compile(
    r"^there\s+(?:is|are|exists?|were)\s+(?:exactly|only|a total of)?\s*"
    r"(?P<value>\d[\d,.]*)(?P<rest>\s[^\d]*)?$",
    re.IGNORECASE,
)
_AFTER_VALUE = re.compile(
    r"(?:,\s*|\s+)(?:when|where|attained|achieved|occurring|which|because|since|as|at)\s.*$"
    r"|[,.;]\s+[a-z]{3,}\s.*$",
    re.DOTALL,
)
_CONTRADICTION = re.compile(
    r"\b(?:not|never|no|neither|nor|except|unless|cannot|isn't|aren't|if|but|while|than|at least|at most"
    r"|or more|or less|between|impossible|wrong|false|incorrect)\b",
    re.IGNORECASE,
)
_OTHER_STATEMENT = re.compile(
    r"(?:\b(?:is|are|equals)\b|=)\s*[^\s,;]+\s*(?:,|;|\b(?:and|but|or|while)\b)|\b(?:not|never|n't)\s*$",
    re.IGNORECASE,
)


def stated_value(text: str) -> str:
    r"""The value that a sentence states, such as 34 in `The largest $n$ is 34.`; other texts are unchanged.

    A sentence that also states another value, or denies this one, is unchanged too, so it equals no value.
    """
    if len(text) > _LONGEST_SENTENCE or _WORD.search(text) is None:
        return text
    plain = " ".join(_DELIMITERS.sub(" ", _TEXT_COMMAND.sub(r" \1 ", text)).split()).strip(" .")
    opening = _OPENING_WORDS.match(plain)
    plain = plain[opening.end() :] if opening else plain
    count = _COUNTED.match(plain)
    if count is not None:
        rest = count["rest"] or ""
        return text if _CONTRADICTION.search(rest) else count["value"]
    statement = _STATED.match(plain)
    if statement is not None:
        value = _AFTER_VALUE.sub("", statement["value"])
        if _WORD.search(statement["subject"]) is None:
            return f"{statement['subject']} = {statement['value']}"
        is_clear = not (_CONTRADICTION.search(value) or _OTHER_STATEMENT.search(statement["subject"]))
        return value if is_clear and not _is_long(value) else text
    first = _STATED_FIRST.match(plain)
    if first is not None and not _CONTRADICTION.search(first["rest"]):
        return first["value"].strip()
    return plain if opening else text


def _find_said_answer(text: str) -> str | None:
    """The text after the last `answer is`, `Answer:` or `####`, up to the end of the sentence; else None.

    If a formula follows, it is the answer. The answer of a long sentence is its first value.
    """
    for statement in reversed(list(_SAID.finditer(text))):
        rest = text[statement.end() :].lstrip(" *:\n")
        span = _MATH_SPAN.match(rest)
        if span is not None and not _continues(rest[span.end() :]):
            return span.group(span.lastgroup or 0)
        end = _SENTENCE_END.search(rest)
        sentence = (rest[: end.start()] if end else rest).strip()
        if not sentence:
            continue
        values = _values(sentence) if _is_long(sentence) else []
        return values[0][1] if values else sentence
    return None


def _continues(rest: str) -> bool:
    """Whether an answer continues after its first formula, as in `$1$ and $2$`."""
    return re.match(r"\s*(?:,|;|and\b|or\b)\s*(?:and\b|or\b)?\s*(?:\$|\\\()", rest) is not None


def _is_long(sentence: str) -> bool:
    """Whether a sentence is too long to be an answer as a whole."""
    return len(_words(sentence)) > 4


def _is_prose(text: str) -> bool:
    """Whether words surround the answer."""
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
