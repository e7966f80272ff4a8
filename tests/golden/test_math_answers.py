"""The reward `math_verify` on right, equivalent and wrong answers in the forms of public data sets.

`math_answers.jsonl` and `math_forms.jsonl` hold what stands in a box, `math_responses.jsonl` whole responses,
each with the gold of a data set's row (MATH, GSM8K, AIME, DAPO, DeepScaleR, Minerva, Olympiad) and labels
written by hand. The rows of `math_forms.jsonl` also name their form of writing.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from astraflow.addons.math.config import MathVerifyReward
from astraflow.tasks.config import JsonlSourceConfig, TasksConfig
from astraflow.tasks.rewards import make_reward
from astraflow.types import Task

FOLDER = Path(__file__).parent
EXTRACTS = ("boxed", "whole", "answer_tag")


def labeled(name: str) -> Iterator[tuple[str, str, float]]:
    """Gold, answer and the score that it must get."""
    for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield from ((row["gold"], text, 1.0) for text in row["right"])
        yield from ((row["gold"], text, 0.0) for text in row["wrong"])


def missed(
    pairs: list[tuple[str, str, float]], extract: Literal["boxed", "whole", "answer_tag"]
) -> list[str]:
    config = TasksConfig(
        sources={"s": JsonlSourceConfig(path="unused.jsonl")}, reward=MathVerifyReward(), extract=extract
    )
    score = make_reward(config)
    return [
        f"gold {gold!r}, text {text!r}: expected {expected}"
        for gold, text, expected in pairs
        if score(Task(id="t", source="s", prompt="p", answer=gold), text) != expected
    ]


def wrapped(extract: str, answer: str) -> str:
    if extract == "answer_tag":
        return f"<answer>\\boxed{{{answer}}}</answer>"
    return f"Now $2 + 3 = 5$, so the answer is $\\boxed{{{answer}}}$. This can be checked in 7 ways."


@pytest.mark.timeout(120)
@pytest.mark.parametrize("extract", EXTRACTS)
def test_answers_in_boxes_are_paid_if_and_only_if_they_are_right(
    extract: Literal["boxed", "whole", "answer_tag"],
) -> None:
    pairs = [
        (gold, wrapped(extract, answer), expected) for gold, answer, expected in labeled("math_answers.jsonl")
    ]
    assert len(pairs) > 1200
    if extract != "boxed":  # finding the answer does not depend on what it is: a tenth of them will do
        pairs = pairs[EXTRACTS.index(extract) :: 10]
    assert missed(pairs, extract) == []


@pytest.mark.timeout(120)
def test_every_form_of_a_right_answer_is_paid_and_no_wrong_answer_is() -> None:
    pairs = [
        (gold, wrapped("boxed", answer), expected) for gold, answer, expected in labeled("math_forms.jsonl")
    ]
    assert len(pairs) > 1000
    assert missed(pairs, "boxed") == []


def test_whole_responses_are_paid_for_their_final_answer() -> None:
    assert missed(list(labeled("math_responses.jsonl")), "whole") == []


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^9}}",
        "x^{9999999}+9^{99999999999}",
        "99999999!",
        "3!!!!!",
        r"\binom{999999999}{99999999}",
        "(" * 1500,
        r"\frac{1}{" * 100 + "2" + "}" * 100,
        r"\sum_{k=1}^{10^{9}} \frac{1}{k^3}",
        r"\[" * 9000,
        r"\begin{pmatrix}"
        + r"\\".join("&".join("abcdefg"[i:] + "xyzuvwt"[:i]) for i in range(7))
        + r"\end{pmatrix}^{-1}",
        r"\begin{pmatrix}1&1\\1&0\end{pmatrix}^{999999999}",
        "sqrt(" * 390,
    ],
)
def test_an_answer_that_would_take_for_ever_is_wrong(answer: str) -> None:
    assert (
        missed([("7", f"\\boxed{{{answer}}}", 0.0), ("x^2 + 1", f"\\boxed{{{answer}}}", 0.0)], "boxed") == []
    )
