"""`em` and `f1` against examples worked by hand with SQuAD's published grader."""

import pytest

from astraflow.addons.search.question_answers import exact_match, normalize, word_f1

# (prediction, right answers, exact match, F1). The grader lower-cases, removes punctuation and articles, and
# takes the best right answer; F1 is 2 * shared / (words of the prediction + words of the answer).
EXAMPLES = [
    ("Denver Broncos", ["Denver Broncos", "The Denver Broncos"], 1.0, 1.0),
    ("the denver broncos!", ["Denver Broncos"], 1.0, 1.0),
    ("The Denver Broncos football team", ["Denver Broncos"], 0.0, 2 * 2 / (4 + 2)),
    ("Broncos", ["Denver Broncos"], 0.0, 2 * 1 / (1 + 2)),
    ("Carolina Panthers", ["Denver Broncos"], 0.0, 0.0),
    ("gold", ["gold", "golden anniversary"], 1.0, 1.0),
    ("golden", ["gold", "golden anniversary"], 0.0, 2 * 1 / (1 + 2)),
    ("February 7, 2016", ["February 7", "7 February 2016"], 0.0, 1.0),  # the order of words does not count
    ("New York, New York", ["New York"], 0.0, 2 * 2 / (4 + 2)),  # a word counts as often as both have it
    ("U.S.", ["US"], 1.0, 1.0),
    ("well-known", ["well known"], 0.0, 0.0),  # punctuation is removed, not replaced by a space
    ("an apple a day", ["apple day"], 1.0, 1.0),
    ("theater", ["the ater"], 0.0, 0.0),  # an article is a whole word
    ("", ["Denver"], 0.0, 0.0),
    ("the", ["a"], 1.0, 1.0),  # nothing is left of either
    ("Ä", ["ä"], 1.0, 1.0),
]


@pytest.mark.parametrize(("text", "answers", "em", "f1"), EXAMPLES)
def test_scores_are_those_of_the_published_grader(
    text: str, answers: list[str], em: float, f1: float
) -> None:
    assert exact_match(text, answers) == em
    assert word_f1(text, answers) == pytest.approx(f1, abs=1e-12)


def test_normalization_is_that_of_the_published_grader() -> None:
    assert normalize("  The Quick, Brown Fox -- an animal. ") == "quick brown fox animal"
