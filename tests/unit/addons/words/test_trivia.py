"""Questions of general knowledge, and completions that name their answers."""

import pytest

from astraflow.addons.words.config import TriviaSourceConfig
from astraflow.addons.words.everyday import REQUESTS
from astraflow.addons.words.trivia import QUESTIONS, TriviaScorer, TriviaSource, names_answer
from astraflow.protocols import ScoringCall
from astraflow.tasks.variants import SourceContext


def test_there_are_50_questions_and_none_contains_its_answer() -> None:
    source = TriviaSource(name="trivia")
    assert len(source) == len({question for question, _ in QUESTIONS}) == 50
    for question, answers in QUESTIONS:
        assert not names_answer(question, answers), question


def test_no_everyday_question_is_one_about_facts() -> None:
    asked = {question.casefold() for question, _ in QUESTIONS}
    assert len({request.casefold() for request in REQUESTS}) == len(REQUESTS) == 164
    assert not asked & {request.casefold() for request in REQUESTS}
    source = TriviaSourceConfig(questions="everyday").make(SourceContext(name="everyday"))
    assert [source.task(idx).prompt for idx in range(len(source))] == list(REQUESTS)


@pytest.mark.parametrize(
    ("text", "answer", "is_right"),
    [
        ("It is C++.", "C", False),
        ("It is C.", "C", True),
        ("It is C#!", "C#", True),
        ("It is -5.", "5", False),
        ("It is 1.5 m.", "5", False),
        ("It is 5.", "5", True),
        ("a Peru\u0301!", "Per\u00fa", True),
    ],
)
def test_signs_that_carry_meaning_belong_to_the_word(text: str, answer: str, is_right: bool) -> None:
    assert names_answer(text, [answer]) == is_right


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("Paris", True),
        ("The capital of France is PARIS.", True),
        ("Parisian", False),
        ("Lyon", False),
        ("", False),
    ],
)
def test_an_answer_counts_as_a_whole_word_anywhere(text: str, is_right: bool) -> None:
    task = TriviaSource(name="trivia").task(0)
    assert TriviaScorer()(ScoringCall(task, text, text)) == float(is_right)


def test_each_of_several_answers_is_right() -> None:
    source = TriviaSource(name="trivia")
    for idx, (_, answers) in enumerate(QUESTIONS):
        for answer in answers:
            assert TriviaScorer()(ScoringCall(source.task(idx), f"It is {answer}.", "")) == 1.0
