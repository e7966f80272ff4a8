"""Translates Chinese words around formulas: words before the answer, `or`, units and large numbers."""

import re

__all__ = [
    "CHINESE",
    "CHINESE_UNITS",
    "without_chinese",
]

CHINESE = "\u4e00-\u9fff"
"""The range of Chinese characters in a regular expression."""
CHINESE_UNITS = {
    "平方": "square", "立方": "cubic", "每": "/",
    "毫米": "mm", "厘米": "cm", "分米": "dm", "千米": "km", "公里": "km", "米": "m",
    "毫克": "mg", "千克": "kg", "公斤": "kg", "克": "g", "吨": "ton", "毫升": "ml", "升": "l",
    "小时": "h", "时": "h", "分钟": "min", "秒": "s",
    "天": "day", "日": "day", "星期": "week", "周": "week", "个月": "month", "月": "month", "年": "year",
    "度": "degree", "摄氏": "c", "弧度": "rad", "美元": "dollar", "元": "yuan", "块": "yuan", "角": "jiao",
    "千瓦": "kw", "瓦": "w", "牛": "n", "焦": "j", "伏": "v",
}  # fmt: skip
"""The English unit for each Chinese word."""
_SCALES = {"百": 2, "千": 3, "万": 4, "百万": 6, "千万": 7, "亿": 8}
_DIGITS = {
    "二": 2,
    "三": 3,
    "四": 4,
    "五": 5,
    "六": 6,
    "七": 7,
    "八": 8,
    "九": 9,
    "十": 10,
    "十二": 12,
    "十六": 16,
}
_DENIAL = re.compile("不|非|没|至少|至多|最多|最少|大于|小于|超过|低于|多于|少于|以上|以下|以内|左右")
_STATEMENT = re.compile(
    rf"^(?=[^{CHINESE}]{{0,40}}[{CHINESE}]).*(?:是|为|等于|(?<!\d):|共有?|有|得|选|约)\s*"
    r"(?=[-+\d\\$(\[{A-Za-z√])(?P<value>.+)$"
)
_LEADING = re.compile(r"^(?:所以|因此|故|则|即|综上|答)[,:]?\s*(?=[-+\d\\$(\[{A-Za-z])")
_TEXT = re.compile(rf"\\text\{{\s*([{CHINESE}]+)\s*\}}")
_CHARACTER = re.compile(f"[{CHINESE}]")

_NUMBERS = {char: number for number, char in enumerate("一二三四五六七八九十", 1)}


def _fraction(match: re.Match[str]) -> str:
    return rf"\frac{{{_NUMBERS[match[2]]}}}{{{_NUMBERS[match[1]]}}}"


_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (
            rf"(?<![{CHINESE}])\s*(?:\\text\{{\s*)?(?:或者?|或是)(?:\s*\}})?\s*(?![{CHINESE}])",
            r" \\text{ or } ",
        ),
        (
            rf"(?<![{CHINESE}])\s*(?:\\text\{{\s*)?(?:以及|并且|和|与|及|且)(?:\s*\}})?\s*(?![{CHINESE}])",
            r" \\text{ and } ",
        ),
        (r"百分之\s*(\d+(?:\.\d+)?)", r"\1%"),
        (r"([一二三四五六七八九十])分之([一二三四五六七八九十])", _fraction),
        (r"(?<![\d])(\d+)\s*分之\s*(\d+)", r"\\frac{\2}{\1}"),
        (r"(?:无(?:实数)?解|没有(?:实数)?解|无实根|方程无解|解集为空集?|空集)", r"\\text{no solution}"),
        (r"(?:极限)?不存在", r"\\text{does not exist}"),
        (r"(?:全体|一切|所有|任意)实数", r"\\mathbb{R}"),
        (r"正无穷大?", r"\\infty "),
        (r"负无穷大?", r"-\\infty "),
        (r"^\s*(?:\\text\{)?\s*(?:是的?|对|正确)\s*\}?\s*$", "yes"),
        (r"^\s*(?:\\text\{)?\s*(?:否|不是|不对|错误?|不正确)\s*\}?\s*$", "no"),
    ]
)


def without_chinese(text: str) -> str:
    """The text with its Chinese words as LaTeX or English where they matter. Units stay."""
    if _CHARACTER.search(text) is None:
        return text
    text = _TEXT.sub(r"\1", text.strip().rstrip(".,;:!"))
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = re.sub(r"(?<=\d)\s*(?:\\text\{\s*)?(百万|千万|[百万亿]|千(?![米克瓦卡]))(\s*\})?", _scale, text)
    text = re.sub(
        r"(\w)\s*\(?\s*([二三四五六七八九]|十[二六]?|\d+)\s*进制(?:数)?\s*\)?", _convert_bases, text
    )
    if _DENIAL.search(text) is None:
        text = _LEADING.sub("", text)
        statement = _STATEMENT.match(text)
        if statement is not None and not re.search(r"\\text\{[^{}]*$", text[: statement.start("value")]):
            text = statement["value"]
    return text


def _scale(match: re.Match[str]) -> str:
    """A power of ten for `万` and the like; a unit after it in the same `\\text{}` stays there."""
    has_command = match.group().lstrip().startswith("\\text")
    rest = r"\text{" if has_command and not match[2] else ""
    return rf"\cdot 10^{{{_SCALES[match[1]]}}}{rest}"


def _convert_bases(match: re.Match[str]) -> str:
    base = match[2]
    return f"{match[1]}_{{{_DIGITS.get(base, base)}}}"
