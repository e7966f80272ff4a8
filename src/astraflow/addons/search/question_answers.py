"""The rewards `em` and `f1`, which compare short answers to questions as SQuAD's official grader does.

Texts are compared in lower case, without punctuation, without the articles `a`, `an`, `the`, and with single
spaces. Of several right answers the best match counts.

Source: Rajpurkar et al. 2018 (arXiv:1806.03822), the evaluation script of SQuAD 2.0.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from astraflow.config import Config
from astraflow.protocols import Scorer
from astraflow.tasks.variants import RewardVariant
from astraflow.types import Task

__all__ = ["ExactMatchReward", "F1Reward", "exact_match", "normalized", "word_f1"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class ExactMatchReward(RewardVariant):
    """1 if the text equals one of the answers as SQuAD's grader compares them (without case, punctuation and
    articles); else 0."""

    name: Literal["em"] = "em"

    def make(self) -> Scorer:
        """Makes the scorer."""
        return _scorer(exact_match)

    def checker(self, source: Config) -> Callable[[Task], object] | None:
        """What checks the answers of rows."""
        return _checker(source)


class F1Reward(RewardVariant):
    """F1 of the words of the text and of the best answer, as SQuAD's grader computes it: 0 to 1."""

    name: Literal["f1"] = "f1"

    def make(self) -> Scorer:
        """Makes the scorer."""
        return _scorer(word_f1)

    def checker(self, source: Config) -> Callable[[Task], object] | None:
        """What checks the answers of rows."""
        return _checker(source)


def _scorer(compare: Callable[[str, Sequence[str]], float]) -> Scorer:
    from astraflow.tasks.answers import AnswerScorer

    return AnswerScorer(compare)


def _checker(source: Config) -> Callable[[Task], object] | None:
    from astraflow.tasks.answers import answer_checker, has_text

    return answer_checker(source, has_text, allowed=("text",))  # quotes don't matter to words


def normalized(text: str) -> str:
    """The text as it is compared. Example: `The  U.S. Army` is `us army`."""
    without_punctuation = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", without_punctuation).split())


def exact_match(text: str, answers: Sequence[str]) -> float:
    """1 if the text equals one of the answers, else 0."""
    return float(any(normalized(text) == normalized(answer) for answer in answers))


def word_f1(text: str, answers: Sequence[str]) -> float:
    """The largest F1 of the text's words with those of an answer, 0 to 1.

    F1 = 2 P R / (P + R), where P is the share of the text's words, and R the share of the answer's, that both
    have. If one of them has no words, F1 is 1 if both have none, else 0.
    """
    return max((_f1(normalized(text).split(), normalized(answer).split()) for answer in answers), default=0.0)


def _f1(words: list[str], right: list[str]) -> float:
    if not words or not right:
        return float(words == right)
    num_shared = (Counter(words) & Counter(right)).total()
    return 2 * num_shared / (len(words) + len(right))
