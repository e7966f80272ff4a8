"""The rewards `em` and `f1`, which compare short answers to questions as SQuAD's official grader does.

Texts are compared in lower case, without punctuation, without the articles `a`, `an` and `the`, and with
single spaces. If there are several right answers, the best match counts.

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

__all__ = ["ExactMatchReward", "F1Reward", "exact_match", "normalize", "word_f1"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


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
    from astraflow.tasks.answers import answer_checker, has_text

    return answer_checker(source, has_text, allowed=("text",))  # quotes don't matter to words


def normalize(text: str) -> str:
    """Normalizes a text for comparison. Example: `The  U.S. Army` becomes `us army`."""
    without_punctuation = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", without_punctuation).split())


def exact_match(text: str, answers: Sequence[str]) -> float:
    """1 if the text equals one of the answers, else 0."""
    return float(any(normalize(text) == normalize(answer) for answer in answers))


def word_f1(text: str, answers: Sequence[str]) -> float:
    """The largest F1 score (0 to 1) of the text's words and the words of an answer.

    F1 = 2 P R / (P + R), where P is the share of the text's words that the answer has, and R is the share of
    the answer's words that the text has. If neither has words, F1 is 1; if only one has none, F1 is 0.
    """
    return max((_f1(normalize(text).split(), normalize(answer).split()) for answer in answers), default=0.0)


def _f1(words: list[str], right: list[str]) -> float:
    if not words or not right:
        return float(words == right)
    num_shared = (Counter(words) & Counter(right)).total()
    return 2 * num_shared / (len(words) + len(right))
