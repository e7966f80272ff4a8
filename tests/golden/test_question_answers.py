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
    ("Ä", ["ä"], 1.0, 1.0),
]


# Where the rewards differ from the grader on purpose: (prediction, right answer, exact match).
DIFFERENCES = [
    # An article at the end is none, and nothing equals an empty text.
    ("A.", "A", 1.0),
    ("the A", "A", 1.0),
    ("(a)", "A", 1.0),
    *((text, "A", 0.0) for text in ("", "The", "...", "an", " ", "?", "\u200b", "B")),
    ("vitamin", "Vitamin A", 0.0),
    ("Vitamin A", "Vitamin A", 1.0),
    ("?", "?", 1.0),
    ("", "?", 0.0),
    ("!", "?", 0.0),
    ("", "\u200b", 0.0),
    # Signs that carry meaning stay.
    ("5", "-5", 0.0),
    ("-5", "5", 0.0),
    ("\u22125", "-5", 1.0),
    ("-$5", "-5", 1.0),
    ("35", "3.5", 0.0),
    ("12", "1/2", 0.0),
    ("930", "9:30", 0.0),
    ("x-5", "x+5", 0.0),
    (">5", "<5", 0.0),
    ("< 5", "<5", 1.0),
    ("5", ".5", 0.0),
    ("31", "3-1", 0.0),
    ("3\u20131", "3-1", 1.0),
    ("+5", "5", 1.0),
    ("$1,000.", "1000", 1.0),
    ("1,2", "12", 0.0),
    ("C#", "C++", 0.0),
    ("C", "C++", 0.0),
    ("C++.", "C++", 1.0),
    ("**C#**", "C#", 1.0),
    ("A-", "A+", 0.0),
    ("AB\u2212", "AB-", 1.0),
    ("x2", "x\u00b2", 0.0),
    ("COVID 19", "COVID-19", 0.0),
    ("COVID19", "COVID-19", 1.0),
    # Forms that look alike, and punctuation of other languages.
    ("Peru\u0301", "Per\u00fa", 1.0),
    ("Peru", "Per\u00fa", 0.0),
    ("STRASSE", "Stra\u00dfe", 1.0),
    ("\uff30\uff41\uff52\uff49\uff53\uff0e", "Paris", 1.0),
    ("\uff0d\uff15", "-5", 1.0),
    ("\u5317\u4eac\u3002", "\u5317\u4eac", 1.0),
    ("\u300a\u7ea2\u697c\u68a6\u300b", "\u7ea2\u697c\u68a6", 1.0),
    ("\u201cParis\u201d", "Paris", 1.0),
    ("\u00abParis\u00bb\u2026", "Paris", 1.0),
    ("O\u2019Neill", "O'Neill", 1.0),
    ("\u00a1Hola!", "hola", 1.0),
    ("Pa\u00adris\u200b", "Paris", 1.0),
    ("New\u00a0York", "New York", 1.0),
    ("\uff76\uff9e", "\u30ac", 1.0),
]


@pytest.mark.parametrize(("text", "answer", "em"), DIFFERENCES)
def test_signs_forms_and_empty_texts_are_compared_by_what_they_mean(
    text: str, answer: str, em: float
) -> None:
    assert exact_match(text, [answer]) == em
    assert (word_f1(text, [answer]) == 1.0) == bool(em)


def test_each_chinese_character_is_a_word_for_f1() -> None:
    assert word_f1("\u5317\u4eac\u5e02", ["\u5317\u4eac"]) == pytest.approx(2 * 2 / (3 + 2))
    assert word_f1("\u4e0a\u6d77", ["\u5317\u4eac"]) == 0.0
    assert word_f1("in \u5317\u4eac", ["\u5317\u4eac"]) == pytest.approx(2 * 2 / (3 + 2))


@pytest.mark.parametrize(("text", "answers", "em", "f1"), EXAMPLES)
def test_scores_are_those_of_the_published_grader(
    text: str, answers: list[str], em: float, f1: float
) -> None:
    assert exact_match(text, answers) == em
    assert word_f1(text, answers) == pytest.approx(f1, abs=1e-12)


def test_normalization_is_that_of_the_published_grader() -> None:
    assert normalize("  The Quick, Brown Fox -- an animal. ") == "quick brown fox animal"
