"""Brings an answer into one spelling: one name per command and relation, without sizes and spacing."""

# ruff: noqa: RUF001 - characters that look like others are what this file is about

import math
import re
import unicodedata

from astraflow.addons.math.chinese import without_chinese
from astraflow.addons.math.regions import plain_regions
from astraflow.addons.math.tex import plain_tex
from astraflow.addons.math.written_rows import plain_system

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
    "’": "'",
    "≈": r"\approx ",
    "€": r"\$",
    "£": r"\$",
    "¥": "",
    "￥": "",
    "₹": "",
    "。": ".",
    "、": ",",
    "∶": ":",
    "⁄": "/",
    "∕": "/",
    "∙": r"\cdot ",
    "•": r"\cdot ",
    "∗": "*",
    "‐": "-",
    "‑": "-",
    "‒": "-",
    "﹣": "-",
    "≦": r"\le ",
    "≧": r"\ge ",
    "⩽": r"\le ",
    "⩾": r"\ge ",
    "≡": r"\equiv ",
    "≃": r"\approx ",
    "≒": r"\approx ",
    "∖": r"\setminus ",
    "∣": r"\mid ",
    "∧": r"\land ",
    "∨": r"\lor ",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
    "…": "...",
    "′": "'",
    "‘": "'",
    "℃": r"\degree C",
    "℉": r"\degree F",
    "∠": r"\angle ",
    "△": r"\triangle ",
    "δ": r"\delta ",
    "ε": r"\epsilon ",
    "ρ": r"\rho ",
    "τ": r"\tau ",
    "Δ": r"\Delta ",
    "Ω": r"\Omega ",
}
"""Characters that models write instead of LaTeX commands."""
_SPACES = "\t\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
_INVISIBLE = "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\u2061\u2062\u2063\u2064\ufe0f\ufeff"
_TRANSLATED = {
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5E)},  # full-width forms of ASCII
    **{ord(char): text for char, text in _CHARACTERS.items()},
    **dict.fromkeys(map(ord, _SPACES), " "),
    **dict.fromkeys([*map(ord, _INVISIBLE), *range(0x202A, 0x202F)], ""),
}
_SCRIPTS = {
    "^": str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni"),
    "_": str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙₖᵢ", "0123456789+-=()nki"),
}
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙₖᵢ]+")
_VULGAR = re.compile("[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒]")
_ALPHABETS = re.compile("[\U0001d400-\U0001d7ff]")


def _ascii(text: str) -> str:
    """Replaces known characters by LaTeX and ASCII."""
    text = unicodedata.normalize("NFC", text)
    text = _RAISED.sub(lambda match: f"^{{{match.group().translate(_SCRIPTS['^'])}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{match.group().translate(_SCRIPTS['_'])}}}", text)
    text = _VULGAR.sub(_as_fraction, text)
    text = _ALPHABETS.sub(lambda match: unicodedata.normalize("NFKC", match.group()), text)
    return without_chinese(text.translate(_TRANSLATED))


def _as_fraction(match: re.Match[str]) -> str:
    """`\\frac{1}{2}` for the character of one half."""
    above, _, below = unicodedata.normalize("NFKC", match.group()).partition("\u2044")
    return rf"\frac{{{above}}}{{{below}}}"


_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\(?:begin|end)\{(?:aligned|align\*?|gathered|equation\*?)\}", " "),
        (r"√\s*(\w+)", r"\\sqrt{\1}"),
        (r"\\!", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?)\s*\.", " "),
        (r"\\(?:left|right|[bB]igg?[lrm]?|mleft|mright)(?![A-Za-z])", ""),
        (r"\\(?:quad|qquad|enspace|thinspace)(?![A-Za-z])|\\[,;:> ]|~", " "),
        (r"\\(?:[dtcs]|nice)frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\(?:leq|leqslant|leqq)(?![A-Za-z])", r"\\le "),
        (r"\\(?:geq|geqslant|geqq)(?![A-Za-z])", r"\\ge "),
        (r"\\ne(?![A-Za-z])|\\not\s*(?:=|\\(?:equiv|approx|sim)(?![A-Za-z]))", r"\\neq "),
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
        (r"\\(?:colon|ratio)(?![A-Za-z])|\{\s*:\s*\}", ":"),
        (r"\\math(?:bb|bf|cal)\s*\{?\s*([RZQNC])\s*\}?(?![A-Za-z])", r"\\mathbb{\1}"),
        (r"\\R(?![A-Za-z])", r"\\mathbb{R}"),
        (r"\\(?:text(?:normal|bf|it|rm|sf|sc|tt)|mbox|hbox)\s*\{", r"\\text{"),
        (r"\\(?:math(?:rm|bf|it|sf)|boldsymbol|operatorname\*?|bm)\s*\{", r"\\text{"),
        (r"\{\s*\\(?:rm|bf|it)\s+([^{}]*)\}", r"\\text{\1}"),
        (r"\\text\s*\{\s*\}", " "),
        (r"\^\s*\{?\s*\\text\{\s*(st|nd|rd|th)\s*\}\s*\}?", r"\\text{\1}"),
        (r"\\text\{\s*([ei]|[-+]?[\d.,]+|[:,;])\s*\}", r" \1 "),
        (r"(?<![\d}\s/])\s*\\text\{\s*([A-Za-z])\s*\}|\\text\{\s*([^\W\dmgshlJWVNKCFAT_])\s*\}", r" \1\2 "),
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
        (r"\\text\{\s*(?:\\?%|(?i:per\s?cent|percent(?:age)?|pct)\.?)\s*\}", "%"),
        (r"\s*(?<![A-Za-z])(?i:per\s?cent|pct)(?![A-Za-z])\.?|\\%", "%"),
        (r"\\\$|(?<!\\)\$", ""),
        (r"\\(?:ldots|dots|cdots)(?![A-Za-z])", "..."),
        (r"\\(?:infinity|infty)(?![A-Za-z])|(?<!\\)\binfinity\b", r"\\infty "),
        (r"\+\s*\\infty", r"\\infty"),
        (r"\(\s*mod\s+|\\pmod\s*", r"\\pmod "),
        (r"(?<=\d)\{,\}(?=\d{3}(?!\d))(?<!(?<!\d)0\{,\})", ","),
        (r"(?<=\d)\{,\}(?=\d)", "."),
        (r"^([-+]?\d{1,3})\.(\d{3})\.(\d{3})(?:\.(\d{3}))?$", r"\1\2\3\4"),
        (r"\*\*(?=\d|\()", "^"),
        (
            r"^\s*(?:\\text\{)?\s*(?:[Ff]or\s+)?(?:[Aa]ll|[Aa]ny|[Ee]very)\s+reals?(?:\s+numbers?|\s+values?)?"
            r"(?:\s+of)?\s*\}?\s*[a-z]?\s*\.?$",
            r"\\mathbb{R}",
        ),
        (r"\s+", " "),
        (r"\\lg(?![A-Za-z])|(?<![\\A-Za-z])lg(?=[\s(]*\d)", r"\\log_{10} "),
        (r"\\tg(?![A-Za-z])", r"\\tan "),
        (r"\\c(?:o?tg|otan)(?![A-Za-z])", r"\\cot "),
        (r"\\arc?tg(?![A-Za-z])", r"\\arctan "),
        (r"\\cosec(?![A-Za-z])", r"\\csc "),
        (r"\\([ij])math(?![A-Za-z])", r"\1"),
        (
            r"\\(?:wide)?(?:hat|vec)\s*(?:\{\s*(?:\\text\s*\{\s*)?([ijk])\s*\}?\s*\}|\s([ijk])(?![A-Za-z]))",
            r" \1\2 ",
        ),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s*\{([^{}]*)\}\s*([\dA-Za-z])", r"\\frac{\1}{\2}"),
        (r"\\sqrt\s*(\d+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"\^\s*(-?\d+)(?!\d)", r"^{\1}"),
        (r"\\binom\s*(\d)\s*(\d)", r"\\binom{\1}{\2}"),
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
_ROOT = re.compile(r"(?:√|\\sqrt|(?<![\\A-Za-z])sqrt)\s*(?P<degree>\[[^\[\]]*\])?\s*(?=\()")
_OVERLINED = re.compile(r"\\overline\s*\{\s*(\d{2,})\s*\}")
_NEW_ROW = re.compile(r"\\\\(?:\[[^\]]*\])?")
_ROW = "\x00"
"""Replaces the end of a matrix row while the rules change commands, which begin with a backslash too."""
_DELIMITER = re.compile(r"\\[()\[\]]")
_BRACKETS = re.compile(r"[(){}]")
_LONGEST = 2_000
"""In texts with more characters, only names of commands and the like change: they are compared as texts."""
_PLAIN_NUMBER = re.compile(r"-?[1-9]\d*(?:\.\d*[1-9])?")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:([ '])\d{3})(?:\1\d{3})*(?![\d/])")
_FACTOR = re.compile(r"(\d|(?:\\binom|\\frac)\{[^{}]*\}\{[^{}]*\})\s*(?=\\binom)")
_PLAIN_SET = re.compile(r"^\{(\s*[A-Za-z]\s*(?:\\in[^|:{}]*)?(?:\||:|\\mid|\\vert).*)\}$")
_BINOMIAL = re.compile(
    r"(?<![A-Za-z\\])(?:\\text\{\s*)?([CAP])(?:\s*\})?\s*"
    r"(?:_\s*(?:\{([^{}]+)\}|(\w))\s*\^\s*(?:\{([^{}]+)\}|(\w))|\^\s*(?:\{([^{}]+)\}|(\w))\s*_\s*(?:\{([^{}]+)\}|(\w)))"
)
_CHOOSE = re.compile(
    r"(?<![\w})!])(?:\{\s*\}\s*)?[_^]\s*\{?(\w+)\}?\s*(?:\\text\{\s*)?C(?:\s*\})?\s*_\s*\{?(\w+)\}?|(?<![\w\\])(\d+)\s*C\s*(\d+)(?!\w)"
    r"|(?<![\w\\])C\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)"
)


def tidy(text: str) -> str:
    """An answer in one spelling: without delimiters, sizes and spacing, and with one name per relation."""
    text = text.strip()
    if _PLAIN_NUMBER.fullmatch(text):
        return text
    text = text.replace(_ROW, " ")
    is_short = len(text) <= _LONGEST
    if not text.isascii():
        text = _ascii(text)
    text = text.replace("`", "").strip("*").strip()
    if text.startswith("{"):
        text = _PLAIN_SET.sub(r"\\{\1\\}", text)
    text = _DELIMITER.sub(" ", _NEW_ROW.sub(_ROW, text))
    if is_short:
        text = plain_tex(text)
    if is_short:
        text = _with_braced_roots(text)
    text = _OVERLINED.sub(_digits, text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match.group()), text)
    if "C" in text or "A" in text or "P" in text:
        text = _without_binomials(text)
    if "\\binom" in text:
        text = _FACTOR.sub(r"\1\\cdot ", text)  # the parser would read the sum of both, as of `2\frac{1}{2}`
    text = text.replace(_ROW, r"\\").strip()
    if not text.endswith("..."):
        text = text.rstrip(" .,;:")
    return plain_regions(plain_system(text)) if is_short else text


def _with_braced_roots(text: str) -> str:
    r"""The text with roots of parentheses, such as `\sqrt(2)` and `√(2)`, as `\sqrt{2}`."""
    position = 0
    while (root := _ROOT.search(text, position)) is not None:
        depth = 0
        for bracket in _BRACKETS.finditer(text, root.end()):
            depth += 1 if bracket.group() in "({" else -1
            if depth == 0:
                content = text[root.end() + 1 : bracket.start()]
                command = rf"\sqrt{root['degree'] or ''}{{"
                text = f"{text[: root.start()]}{command}{content}}}{text[bracket.end() :]}"
                position = root.start() + len(command)
                break
        else:
            position = root.end()
    return text


def _digits(overlined: re.Match[str]) -> str:
    r"""The digits of `\overline{12}`, unless they repeat, as in `0.\overline{12}`."""
    before = overlined.string[: overlined.start()].rstrip()[-1:]
    return overlined.group() if before.isdigit() or before in {".", ",", "}", "{"} else overlined[1]


def _without_binomials(text: str) -> str:
    """The text with `C_n^k` and `{}^nC_k` as binomials, and with permutations `A_n^k` as factorials."""
    text = _CHOOSE.sub(
        lambda match: r"\binom{{{}}}{{{}}}".format(*(part for part in match.groups() if part)), text
    )
    matches = list(_BINOMIAL.finditer(text))
    for match in reversed(matches):
        letter, *parts = (part for part in match.groups() if part)
        below, above = parts if match[2] or match[3] else reversed(parts)
        is_number = below.isdigit() and above.isdigit()
        if is_number and int(above) > int(below):
            return text  # a constant $C_1$, squared
        if letter == "C" and (is_number or re.fullmatch(r"[\w+-]+", below + above)):
            value = rf"\binom{{{below}}}{{{above}}}"
        elif is_number:
            value = f"({math.perm(int(below[:4]), int(above[:4]))})"
        else:
            continue
        text = text[: match.start()] + value + text[match.end() :]
    return text


_BLANK = re.compile(r"\\text|\s+(?!\d)|(?<!\d)\s+")


def fold(text: str) -> str:
    """A tidy answer without blanks, except between digits. Two answers that are equal here are the same."""
    return _BLANK.sub("", text)
