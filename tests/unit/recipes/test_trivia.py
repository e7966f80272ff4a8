"""Questions of general knowledge, and completions that name their answers."""

import pytest
from recipes.real.trivia import FACTS, REQUESTS, everyday_requests, facts, knows_fact, names_answer

from astraflow.types import Task


def tasks() -> list[Task]:
    source = facts(source="trivia")
    return [source.task(idx) for idx in range(len(source))]


def test_there_are_50_questions_and_none_contains_its_answer() -> None:
    assert len(tasks()) == len({question for question, _ in FACTS}) == 50
    for question, answers in FACTS:
        assert not names_answer(question, answers), question


def test_no_everyday_question_is_one_about_facts() -> None:
    asked = {question.casefold() for question, _ in FACTS}
    assert len({request.casefold() for request in REQUESTS}) == len(REQUESTS) == 164
    assert not asked & {request.casefold() for request in REQUESTS}
    source = everyday_requests(source="everyday")
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
    assert knows_fact(tasks()[0], text) == float(is_right)


def test_each_of_several_answers_is_right() -> None:
    for task, (_, answers) in zip(tasks(), FACTS, strict=True):
        for answer in answers:
            assert knows_fact(task, f"It is {answer}.") == 1.0
