"""Brings an answer into one spelling: one name per command and relation, without sizes and spacing."""

# ruff: noqa: RUF001 - characters that look like others are what this file is about

import re

__all__ = [
    "fold",
    "tidy",
]

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
