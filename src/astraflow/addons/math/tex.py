r"""Removes TeX that only changes how an answer looks, and writes old forms of fractions as `\frac`.

Color, underlining, sizes, bold type and empty space mean nothing. `{7 \over 3}` means `\frac{7}{3}`.
"""

import re

from astraflow.tasks.answers import group_end

__all__ = [
    "plain_tex",
]

_LOOKS = {
    **dict.fromkeys(
        [
            "underline",
            "underbar",
            "uline",
            "uuline",
            "uwave",
            "emph",
            "hl",
            "ensuremath",
            "mathord",
            "mathop",
            "mathrel",
            "mathbin",
            "mathstrut",
            "strut",
            "smash",
            "bbox",
            "framebox",
            "boxed",
            "fbox",
            "underbrace",
            "overbrace",
            "tiny",
            "scriptsize",
            "footnotesize",
            "small",
            "normalsize",
            "large",
            "Large",
            "LARGE",
            "huge",
            "Huge",
            "boldmath",
            "unboldmath",
            "centering",
            "noindent",
            "displaystyle",
            "textstyle",
            "scriptstyle",
            "scriptscriptstyle",
            "limits",
            "nolimits",
            "bfseries",
            "itshape",
            "rmfamily",
            "upshape",
            "nonumber",
            "notag",
            "hfill",
        ],
        0,
    ),
    **dict.fromkeys(
        [
            "color",
            "textcolor",
            "colorbox",
            "style",
            "class",
            "cssId",
            "href",
            "htmlClass",
            "htmlStyle",
            "htmlId",
            "phantom",
            "hphantom",
            "vphantom",
            "tag",
            "label",
            "footnote",
            "hspace",
            "vspace",
            "raisebox",
            "mathchoice",
        ],
        1,
    ),
    "fcolorbox": 2,
}
"""Commands without a meaning, by the number of their arguments that are dropped. An argument after these is
the content, which stays."""
_LOOK = re.compile(rf"\\({'|'.join(sorted(_LOOKS, key=len, reverse=True))})\*?(?![A-Za-z])\s*")
_OPTION = re.compile(r"\[[^\[\]]*\]\s*")
_FONT = re.compile(r"\\(?:mathbf|mathit|mathsf|boldsymbol|bm|pmb|bold|textbf|textit|text)\s*(?=\{)")
_OLD_FONT = re.compile(r"\{\s*\\(?:rm|bf|it|sf|tt|em)(?![A-Za-z])\s*([^{}]*)\}")
_HTML = re.compile(r"<(b|i|u|em|strong|span|font|mark)(?:\s[^<>]*)?>(.*?)</\1>", re.DOTALL | re.IGNORECASE)
_FORMULA_IN_FONT = re.compile(r"\\(?:[dt]?frac|sqrt|hat|vec|imath|jmath|text|math|left)|[$\d]")
_OVER = re.compile(r"\\(over|atop)(?![A-Za-z])")
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[^\\\s]", re.DOTALL)
_NO_ARGUMENT = re.compile(r"\\(?:cdot|times|div|pm|mp|leq?|geq?|left|right|q?quad|[,;:! ])$")


def plain_tex(text: str) -> str:
    """The text without commands that change only its look, and without braces that group nothing."""
    if "<" in text:
        text = _HTML.sub(r"\2", text)
    if "\\" not in text and "{" not in text:
        return text
    before = text
    text = _OLD_FONT.sub(r"{\\text{\1}}", text)
    text = _without_fonts(_without_looks(text))
    while (sign := _OVER.search(text)) is not None:
        text = _fraction(text, sign)
    return _without_loose_braces(text) if text != before or text.lstrip().startswith("{") else text


def _without_looks(text: str) -> str:
    while (look := _LOOK.search(text)) is not None:
        end = look.end()
        option = _OPTION.match(text, end)
        if option is not None:
            end = option.end()
        for _ in range(_LOOKS[look[1]]):
            argument = group_end(text, end) if text[end : end + 1] == "{" else None
            end = argument or end
        if look[1] in ("underbrace", "overbrace"):
            end, text = _without_label(text, end)
        start = look.start()
        joins_words = text[:start][-1:].isalpha() and text[end : end + 1].isalpha()
        text = text[:start] + (" " if joins_words else "") + text[end:]
    return text


def _without_label(text: str, start: int) -> tuple[int, str]:
    """The text without the label below or above a brace, as in `\\underbrace{5}_{\\text{sum}}`."""
    end = group_end(text, start) if text[start : start + 1] == "{" else None
    if end is None:
        return start, text
    label = re.compile(r"\s*[_^]\s*(?=\{)").match(text, end)
    label_end = group_end(text, label.end()) if label else None
    return start, text[:end] + text[label_end:] if label_end else text


def _without_fonts(text: str) -> str:
    """The text without bold and italic type around formulas. Around words, they are left."""
    position = 0
    while (font := _FONT.search(text, position)) is not None:
        position = font.end()
        end = group_end(text, font.end())
        if end is None:
            return text
        content = text[font.end() + 1 : end - 1]
        is_formula = _FORMULA_IN_FONT.search(content) is not None
        if font.group().startswith("\\text"):
            is_formula = content.strip()[:1] == "$" == content.strip()[-1:]
        if is_formula:
            text = text[: font.start()] + text[font.end() :]
            position = font.start()
    return text


def _fraction(text: str, sign: re.Match[str]) -> str:
    r"""The text with `A \over B` as `\frac{A}{B}`. `A \atop B` in parentheses is a binomial."""
    start = 0
    starts: list[int] = []
    for token in _TOKEN.finditer(text, 0, sign.start()):
        if token.group() in "{([":
            starts.append(start)
            start = token.end()
        elif token.group() in "})]" and starts:
            start = starts.pop()
        elif token.group() in "=,;<>":
            start = token.end()
    end = len(text)
    depth = 0
    for token in _TOKEN.finditer(text, sign.end()):
        depth += (token.group() in "{([") - (token.group() in "})]")
        if depth < 0 or (depth == 0 and token.group() in "=,;<>"):
            end = token.start()
            break
    above = re.sub(r"^\s*\\left\s*$", "", text[start : sign.start()]).strip()
    below = re.sub(r"\\right\s*$", "", text[sign.end() : end]).strip()
    tail = text[end:] if not text[:end].rstrip().endswith("\\right") else "\\right" + text[end:]
    name = "frac"
    if sign[1] == "atop":
        name = "binom" if re.search(r"\(\s*\{?\s*$", text[:start]) else "stacked"
    return rf"{text[:start]}\{name}{{{above}}}{{{below}}}{tail}"


def _without_loose_braces(text: str) -> str:
    """The text without groups that aren't arguments, such as `2{x}`. `{n \\choose k}` and `{,}` stay."""
    dropped: set[int] = set()
    groups: list[tuple[int, bool]] = []
    previous = ""
    for token in _TOKEN.finditer(text):
        name = token.group()
        if name == "{":
            is_argument = previous in ("^", "_", "]", "argument") or (
                previous.startswith("\\") and _NO_ARGUMENT.match(previous) is None
            )
            groups.append((token.start(), is_argument))
        elif name == "}" and groups:
            start, is_argument = groups.pop()
            content = text[start + 1 : token.start()]
            if is_argument:
                name = "argument"
            elif content.strip() not in ("", ",") and not re.search(
                r"\\(?:choose|brace|brack)(?!\w)", content
            ):
                dropped |= {start, token.start()}
        previous = name
    return "".join(char for position, char in enumerate(text) if position not in dropped)
