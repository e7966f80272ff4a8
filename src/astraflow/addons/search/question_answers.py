"""The rewards `em` and `f1`, which compare short answers to questions, as SQuAD's official grader does.

Texts are compared in lower case, without punctuation, without the articles `a`, `an` and `the`, and with
single spaces. If there are several right answers, the best match counts. Unlike SQuAD's grader:

- Forms of Unicode that look the same are the same, and punctuation of all languages is ignored.
- Signs that carry meaning stay: `-5`, `3.5`, `<5`, `C++`, `C#`, and blood group `A-` or `A+`.
- An article at the end isn't an article: the answer may be the choice `A`, or `Vitamin A`.
- Nothing equals an empty text. Answers without letters or digits are compared with their punctuation.
- For `f1`, each Chinese character, hiragana and katakana is a word, as in MLQA's grader.

Sources: Rajpurkar et al. 2018 (arXiv:1806.03822), the evaluation script of SQuAD 2.0; Lewis et al. 2020
(arXiv:1910.07475) for languages without spaces.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from astraflow.config import Config
from astraflow.protocols import Scorer
from astraflow.tasks.variants import RewardVariant
from astraflow.types import Task

__all__ = ["ExactMatchReward", "F1Reward", "exact_match", "normalize", "word_f1"]

_ARTICLE = re.compile(r"(?<!\S)(?:a|an|the)\s(?=\S)")
_WIDE_OR_NARROW = re.compile("[\u3000\uff00-\uffef]+")
_HYPHENS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe58\ufe63"), "-")
_THOUSANDS = re.compile(r"(?<![\w.,])(-?\d{1,3}(?:,\d{3})+)(?![\w,])")
_SIGN = re.compile(
    r"(?P<kept>(?<![\w.])-(?=[$\u20ac\u00a3]?\.?\d)|(?<!\w)\.(?=\d)"  # -5, .5
    r"|(?<=\d)[-./:'](?=\d)|(?<=\w)[+*/^=](?=\d)|(?<=\d)[+*/^=](?=\w)"  # 3.5, 1/2, 9:30, x+5
    r"|(?<!\w\w)[<>]=?(?=-?\.?\d)"  # <5, but not the end of a tag
    r"|(?<=[^\W_])\+\+|(?<=[^\W_])[+#](?!\w)"  # C++, C#, A+
    r"|(?<=\b[a-z])-(?!\w)|(?<=\b[a-z]{2})-(?!\w))"  # A-, AB-
    r"|(?P<comma>(?<=\d),(?=\d))|[^\w\s]|_"
)
_ONE_CHARACTER_WORDS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_ONE_CHARACTER_WORDS}]|[^\s{_ONE_CHARACTER_WORDS}]+")


class ExactMatchReward(RewardVariant):
    """1 if the text equals one of the answers as SQuAD's grader compares them (ignoring case, punctuation and
    articles); else 0."""

    name: Literal["em"] = "em"

    def make(self) -> Scorer:
        """Makes the scorer."""
        return _make_scorer(exact_match)

    def checker(self, source: Config) -> Callable[[Task], object] | None:
        """What checks the answers of rows."""
        return _make_checker(source)


class F1Reward(RewardVariant):
    """F1 score (0 to 1) of the text's words and the words of the best answer, as SQuAD's grader computes
    it."""

    name: Literal["f1"] = "f1"

    def make(self) -> Scorer:
        """Makes the scorer."""
        return _make_scorer(word_f1)

    def checker(self, source: Config) -> Callable[[Task], object] | None:
        """What checks the answers of rows."""
        return _make_checker(source)


def _make_scorer(compare: Callable[[str, Sequence[str]], float]) -> Scorer:
    from astraflow.tasks.answers import AnswerScorer

    return AnswerScorer(compare)


def _make_checker(source: Config) -> Callable[[Task], object] | None:
    from astraflow.tasks.answers import answer_checker

    def is_comparable(answer: str) -> bool:
        return bool(normalize(answer))

    return answer_checker(source, is_comparable, allowed=("text",))  # quotes don't matter to words


def normalize(text: str) -> str:
    """Normalizes a text for comparison. Example: `The  U.S. Army` becomes `us army`.

    The result is empty for a text that is only punctuation.
    """
    text = re.sub(r"([<>]=?)\s+(?=-?\.?\d)", r"\1", _lower(text))
    text = _THOUSANDS.sub(lambda number: number.group().replace(",", ""), text)
    return _ARTICLE.sub("", " ".join(_SIGN.sub(_sign, text).split()))


def _sign(match: re.Match[str]) -> str:
    """What replaces a sign: itself if it carries meaning, or if it is neither punctuation nor ASCII."""
    sign = match.group()
    if match["kept"]:
        return sign
    if match["comma"]:
        return " "
    is_dropped = sign in string.punctuation or unicodedata.category(sign).startswith("P")
    return "" if is_dropped else sign


def _lower(text: str) -> str:
    """A text in lower case and one form of Unicode, with one kind of hyphen and single spaces."""
    text = _WIDE_OR_NARROW.sub(lambda chars: unicodedata.normalize("NFKC", chars.group()), text)
    text = "".join(char for char in text if unicodedata.category(char) != "Cf")  # invisible
    text = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())
    return " ".join(text.translate(_HYPHENS).split())


def _key(text: str) -> str:
    """What is compared of a text: its normalized form, or if nothing is left of it, its punctuation."""
    return normalize(text) or _lower(text)


def exact_match(text: str, answers: Sequence[str]) -> float:
    """1 if the text equals one of the answers, else 0."""
    key = _key(text)
    return float(bool(key) and any(key == _key(answer) for answer in answers))


def word_f1(text: str, answers: Sequence[str]) -> float:
    """The largest F1 score (0 to 1) of the text's words and the words of an answer.

    F1 = 2 P R / (P + R), where P is the share of the text's words that the answer has, and R is the share of
    the answer's words that the text has. F1 is 0 if one of the two has no words.
    """
    words = _WORD.findall(_key(text))
    return max((_f1(words, _WORD.findall(_key(answer))) for answer in answers), default=0.0)


def _f1(words: list[str], right: list[str]) -> float:
    if not words or not right:
        return 0.0
    num_shared = (Counter(words) & Counter(right)).total()
    return 2 * num_shared / (len(words) + len(right))
