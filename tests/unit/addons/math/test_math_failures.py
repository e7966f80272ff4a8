"""Failures of the libraries that compare mathematics never become a score."""

import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from latex2sympy2_extended import latex2sympy2

from astraflow.addons.math.config import MathVerifyReward
from astraflow.errors import LateScoreError, RolloutError, ScorerError
from astraflow.tasks.config import JsonlSourceConfig, TasksConfig
from astraflow.tasks.rewards import make_reward
from astraflow.types import Task

REWARD = make_reward(
    TasksConfig(
        sources={"s": JsonlSourceConfig(path="x")}, reward=MathVerifyReward(), extract="boxed", format=""
    )
)
_PARSE: Any = latex2sympy2.latex2sympy


@pytest.fixture(autouse=True, scope="module")
def libraries() -> None:
    REWARD.load()


FACTORS = count(5)


def right_answer(factor: int) -> float:
    """The score of a right answer that no other test has."""
    return score(rf"\sqrt{{{2 * factor**2}}}", rf"{factor}\sqrt{{2}}")


def score(gold: str, answer: str) -> float:
    task = Task(id="sums/7", source="s", prompt="p", answer=gold)
    return REWARD(task, rf"\boxed{{{answer}}}")


def failing(monkeypatch: pytest.MonkeyPatch, fail: Callable[[], object], *, only: str = "") -> None:
    """Makes the library fail on texts that contain `only`."""

    def parse(text: str, *args: Any, **kwargs: Any) -> Any:
        if only in text:
            fail()
        return _PARSE(text, *args, **kwargs)

    monkeypatch.setattr(latex2sympy2, "latex2sympy", parse)


def raises(error: BaseException) -> Callable[[], object]:
    def fail() -> object:
        raise error

    return fail


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("partially initialized module 'sympy' has no attribute 'core'"),
        TypeError("'NoneType' object is not callable"),
        Exception("Nothing matched"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_library_that_reads_nothing_any_more_is_an_error_and_no_wrong_answer(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    factor = next(FACTORS)
    failing(monkeypatch, raises(error))
    with pytest.raises(ScorerError, match=r"sums/7.*stopped working in this process") as failure:
        right_answer(factor)
    assert failure.value.is_retryable
    monkeypatch.undo()
    assert right_answer(factor) == 1.0  # the failure was not kept


@pytest.mark.parametrize(
    "error", [OSError(24, "Too many open files"), MemoryError(), ImportError("no module"), KeyError("x")]
)
def test_an_exception_of_a_kind_that_no_text_causes_is_an_error_of_the_scorer(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    factor = next(FACTORS)
    gold = str(2 * factor**2)
    failing(monkeypatch, raises(error), only=gold)
    with pytest.raises(ScorerError, match=rf"sums/7: .* raised {type(error).__name__}(?s:.*){gold}"):
        right_answer(factor)
    monkeypatch.undo()
    assert right_answer(factor) == 1.0


@pytest.mark.parametrize("answer", [r"\frac{1}", r"\det 3", r"x <", r"3^{3^{3^{3}}}", "99999!", r"\int"])
def test_an_answer_that_cannot_be_read_is_wrong_and_counted(answer: str) -> None:
    found = score(r"x^2+1", answer)
    assert found == 0.0
    assert found.parts == {"reward/unread": 1.0}


@pytest.mark.parametrize(
    "answer",
    [
        r"(3^{9999}+1)^{9999}",
        r"\sqrt{10^{9999}+1}",
        r"\prod_{k=1}^{5000}(k^2+1)",
        r"\sum_{k=1}^{9999}\frac{1}{k^3+1}",
        r"\sum_{k=1}^{3000}k^{3000}",
    ],
)
def test_an_answer_whose_form_is_too_heavy_is_wrong_and_counted_without_being_computed(answer: str) -> None:
    found = score("7", answer)
    assert found == 0.0
    assert found.parts == {"reward/unread": 1.0}


def test_an_inequality_of_a_high_degree_is_not_solved() -> None:
    assert score("7", "x^{500}+x-1<0") == 0.0
    assert score("x^{500}<1-x", "x^{500}+x-1<0") == 1.0


@pytest.mark.parametrize(
    "answer", [r"\sum_{k=1}^{1000}k", r"\sum_{k=1}^{5000}k-12002000", "3^{9999}-3^{9999}+500500"]
)
def test_large_forms_with_a_formula_are_computed(answer: str) -> None:
    assert score("500500", answer) == 1.0


def test_an_answer_that_is_read_is_not_counted_as_unread() -> None:
    assert score("x^2+1", "x^2+2").parts == {"reward/unread": 0.0}
    assert score("x^2+1", "1+x^2").parts == {"reward/unread": 0.0}


@pytest.mark.parametrize("is_main", [True, False], ids=["main thread", "other thread"])
def test_an_answer_that_takes_too_long_is_late_and_not_wrong(
    monkeypatch: pytest.MonkeyPatch, *, is_main: bool
) -> None:
    def compute() -> None:
        while True:
            pass

    factor = next(FACTORS)
    monkeypatch.setattr("astraflow.addons.math.scorer._CPU_S", 0.5)
    failing(monkeypatch, compute, only=str(2 * factor**2))
    found: list[RolloutError] = []

    def call() -> None:
        try:
            right_answer(factor)
        except RolloutError as error:
            found.append(error)

    if is_main:
        call()
    else:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert isinstance(found[0], LateScoreError)
    assert found[0].is_retryable
    assert "sums/7" in str(found[0])
    assert "CPU time" in str(found[0])
    monkeypatch.undo()
    assert right_answer(factor) == 1.0
