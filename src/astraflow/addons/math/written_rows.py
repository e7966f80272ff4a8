r"""Reads what is written in rows: matrices, functions defined by cases, and systems of equations.

A matrix may be an environment of LaTeX, `\pmatrix{...}`, or lists such as `[[1,2],[3,4]]` and `[1 2; 3 4]`.
"""

import re

from astraflow.tasks.answers import group_end

__all__ = ["cases_of", "is_matrix", "matrix_of", "plain_system", "scaled_tuple"]

_NAME = r"^\s*(?:[^=<>&\\]{1,24}=\s*)?"
_ENVIRONMENT = re.compile(
    _NAME
    + r"(?P<opening>[(\[]|\\\{|\\lbrace)?\s*\\begin\{(?P<name>[A-Za-z]+)\*?\}\s*(?:\{[^{}]*\}|\[[^\[\]]*\])?"
    r"(?P<rows>(?:(?!\\begin).)*?)\\end\{(?P=name)\*?\}\s*(?P<closing>[)\]]|\\\}|\\rbrace)?\s*$",
    re.DOTALL,
)
_PLAIN = re.compile(_NAME + r"\\[pb]?matrix\s*(?=\{)")
_MATRICES = (
    "matrix",
    "pmatrix",
    "bmatrix",
    "Bmatrix",
    "smallmatrix",
    "psmallmatrix",
    "bsmallmatrix",
    "array",
)
_CASES = ("cases", "dcases", "rcases", "numcases", "array", "matrix", "aligned", "split")
_NEW_ROW = re.compile(r"\\\\(?:\s*\[[^\[\]]*\])?|\\cr(?![A-Za-z])|\\newline(?![A-Za-z])")
_LIST_NAME = re.compile(
    _NAME
    + r"(?:\\text\{\s*)?(?:np\.array|numpy\.array|sp\.Matrix|[Mm]atrix|array|Array)\s*\}?\s*\((?P<list>.*)\)$"
)
_TRANSPOSED = re.compile(r"(?<=\))\s*\^\s*\{?\s*(?:T|\\top|\\intercal|\\text\{\s*T\s*\})\s*\}?\s*$")
_SCALED = re.compile(
    r"(?P<factor>(?:[-+\d.\s/{}()^]|\\(?:frac|sqrt|pi|cdot|times)(?![A-Za-z]))+?)\s*"
    r"(?P<tuple>\((?P<round>[^()]*(?:\([^()]*\)[^()]*)*)\)|\\langle(?P<angle>.*)\\rangle)"
)
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+")
_PRODUCT = re.compile(r"(?:\\(?:cdot|times))\s*$")
_ROW_OF_LIST = re.compile(r"(?:\[([^\[\]]*)\]|\(([^()]*)\)|\\\{([^{}]*)\\\})")
_WORDS_OF_CASE = re.compile(
    r"\\text\{\s*(?:,?\s*(?:if|when|for|where|as|当|若|时)\s*)+\}|(?<![A-Za-z\\])(?:if|when|for|where)(?![A-Za-z])|[当若时]|\\text\{\s*\}"
)
_OTHERWISE = re.compile(r"(?:\\text\{)?\s*(?:otherwise|else(?:where)?|其他|其它|否则)\s*\}?", re.IGNORECASE)


def is_matrix(text: str) -> bool:
    """Whether a text writes a matrix as such: lists may also be tuples and intervals."""
    match = _ENVIRONMENT.match(text)
    if match is None:
        return _PLAIN.match(text) is not None
    return match["name"] in _MATRICES and not _is_open(match)


def matrix_of(text: str) -> tuple[tuple[str, ...], ...] | None:
    """The rows of a matrix, each a tuple of cells; None for other texts. A list of numbers is one row."""
    match = _ENVIRONMENT.match(text)
    if match is not None:
        return _cells(match["rows"]) if is_matrix(text) else None
    plain = _PLAIN.match(text)
    if plain is not None:
        end = group_end(text, plain.end())
        return _cells(text[plain.end() + 1 : -1]) if end == len(text) else None
    text = _TRANSPOSED.sub("", text)
    match = _LIST_NAME.match(text)
    return _lists(match["list"] if match else re.sub(r"^[A-Za-z]\s*=\s*", "", text))


def scaled_tuple(text: str) -> str:
    r"""A number times a tuple, such as `\frac{1}{3}(1,2)`, as one tuple; other texts are unchanged."""
    name, equals, value = text.rpartition("=")
    match = _SCALED.fullmatch(value.strip())
    if match is None:
        return text
    entries = _split(match["round"] or match["angle"] or "")
    factor = _PRODUCT.sub("", match["factor"].strip()).strip()
    if (
        len(entries) < 2
        or _THOUSANDS.fullmatch(match["round"] or "")
        or factor.count("(") != factor.count(")")
        or not factor
    ):
        return text
    sign = "" if factor in ("-", "+") else r"\cdot "
    return f"{name}{equals}({','.join(f'{factor}{sign}({entry.strip()})' for entry in entries)})"


def cases_of(text: str) -> tuple[tuple[str, str], ...] | None:
    """The value and the condition of each case, which is empty for `otherwise`; None for other texts."""
    match = _ENVIRONMENT.match(text)
    if match is None or not _is_cases(match):
        return None
    cases: list[tuple[str, str]] = []
    for row in _rows(match["rows"]):
        value, separator, condition = row.partition("&")
        if not separator or "&" in condition or condition.lstrip()[:1] == "=":
            return None
        condition = _WORDS_OF_CASE.sub(" ", condition).strip(" .,;:&")
        cases.append((value.strip(" .,;:"), "" if _OTHERWISE.fullmatch(condition) else condition))
    return tuple(cases) if len(cases) > 1 else None


def plain_system(text: str) -> str:
    r"""Rewrites a system of equations as `x=1, y=2`; other texts are unchanged."""
    if "\\\\" not in text or ("=" not in text and "<" not in text and ">" not in text):
        return text
    match = _ENVIRONMENT.match(text)
    if match is not None and _is_cases(match) and cases_of(text) is None:
        return ", ".join(row.replace("&", " ").strip(" .,;") for row in _rows(match["rows"]))
    if match is None and re.match(r"\s*\\\{(?!.*\\begin)(?!.*\\\}\s*$)", text, re.DOTALL):
        rows = _rows(text.strip().removeprefix("\\{"))
        return ", ".join(row.replace("&", " ").strip(" .,;") for row in rows)
    return text


def _is_open(match: re.Match[str]) -> bool:
    """Whether a brace opens before the rows and none closes after them."""
    return match["opening"] in ("\\{", "\\lbrace") and match["closing"] is None


def _is_cases(match: re.Match[str]) -> bool:
    return match["name"] in _CASES and (match["name"].endswith("cases") or _is_open(match))


def _rows(text: str) -> list[str]:
    rows = [row.replace("\\hline", " ").strip() for row in _NEW_ROW.split(text)]
    return [row for row in rows if row]


def _cells(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(cell.strip(" ,;") for cell in row.split("&")) for row in _rows(text))


def _lists(text: str) -> tuple[tuple[str, ...], ...] | None:
    """The rows of `[[1,2],[3,4]]`, `[1 2; 3 4]` or `(1,2)`; None for other texts."""
    text = text.strip()
    for opening, closing in (("[", "]"), ("(", ")"), ("\\{", "\\}"), ("\\langle", "\\rangle")):
        if not (text.startswith(opening) and text.endswith(closing)):
            continue
        content = text[len(opening) : -len(closing)].strip()
        rows = _ROW_OF_LIST.sub("", content)
        if content and not rows.strip(" ,;"):
            return tuple(
                tuple(cell.strip() for cell in (row[1] or row[2] or row[3]).split(","))
                for row in _ROW_OF_LIST.finditer(content)
            )
        if opening == "[" and ";" in content and not _ROW_OF_LIST.search(content):
            separator = "," if "," in content else None
            return tuple(
                tuple(c.strip() for c in row.split(separator)) for row in content.split(";") if row.strip()
            )
        if opening != "\\{":
            return (tuple(cell.strip() for cell in _split(content)),)
    return None


def _split(content: str) -> list[str]:
    """The parts of a text between its outermost commas."""
    parts = [""]
    depth = 0
    for char in content:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts
