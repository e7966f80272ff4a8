"""Compares the reward `math_verify` with plain `math-verify` on answers in many notations.

    recall                right answers that the reward accepts, as a share of all right answers
    wrong_paid            wrong answers that the reward accepts
    plain_recall          the same as `recall`, for plain `math-verify` with its defaults
    plain_wrong_paid      the same as `wrong_paid`, for plain `math-verify`
    us_per_answer         median time of a comparison by the reward, in microseconds
    plain_us_per_answer   the same for `math-verify`

The answers are those of `tests/golden`: `math_forms.jsonl`, whose rows name their notation, and
`math_answers.jsonl`, in the notations of public datasets. Each answer is in a box at the end of a sentence.
The labels are written by hand, and the reward is tested with them. The figures therefore show where the two
graders differ, but don't estimate results on any dataset.
"""

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from astraflow.addons.math.answers import is_right
from harness import report, show_table

_GOLDEN = Path(__file__).parent.parent / "tests" / "golden"


@dataclass(frozen=True, slots=True)
class _Case:
    form: str
    gold: str
    answer: str
    is_right: bool


@dataclass(frozen=True, slots=True)
class _Verdict:
    case: _Case
    is_paid: bool
    seconds: float


def main() -> None:
    """Measures and prints; the last line has the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--show", action="store_true", help="print each answer that one of the two gets wrong"
    )
    options = parser.parse_args()
    cases = _cases()
    graders = {"ours": _ours, "plain": _plain()}
    verdicts = {name: _judged(grader, cases) for name, grader in graders.items()}
    if options.show:
        for name, judged in verdicts.items():
            for verdict in judged:
                if verdict.is_paid != verdict.case.is_right:
                    print(f"{name} {'pays' if verdict.is_paid else 'refuses'} {verdict.case}")
    forms = list(dict.fromkeys(case.form for case in cases))
    rows = [_row(form, verdicts, lambda case, form=form: case.form == form) for form in forms]
    rows.append(_row("all", verdicts, lambda case: True))
    show_table(
        f"The reward math_verify and plain math-verify {version('math-verify')}",
        ["form", "right", "ours pays", "plain pays", "wrong", "ours pays", "plain pays"],
        rows,
    )
    total = rows[-1]
    report(
        {
            "right": total[1],
            "wrong": total[4],
            "recall": total[2] / total[1],
            "wrong_paid": total[5],
            "plain_recall": total[3] / total[1],
            "plain_wrong_paid": total[6],
            "us_per_answer": _median_us(verdicts["ours"]),
            "plain_us_per_answer": _median_us(verdicts["plain"]),
        },
        at_least={"recall": 1.0},
        at_most={"wrong_paid": 0},
    )


def _cases() -> list[_Case]:
    cases: list[_Case] = []
    for name in ("math_answers.jsonl", "math_forms.jsonl"):
        for line in (_GOLDEN / name).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            form = row.get("form", "forms of data sets")
            for key in ("right", "wrong"):
                cases += [_Case(form, row["gold"], answer, key == "right") for answer in row[key]]
    return cases


def _ours(gold: str, text: str) -> bool:
    return is_right(gold, text)


def _plain() -> Callable[[str, str], bool]:
    """Makes `math-verify` as its README calls it, with the gold answer as a formula if possible."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    library = cast("Any", math_verify)

    def grade(gold: str, text: str) -> bool:
        wanted = library.parse(f"${gold}$") or library.parse(gold)
        return bool(library.verify(wanted, library.parse(text)))

    return grade


def _judged(grader: Callable[[str, str], bool], cases: list[_Case]) -> list[_Verdict]:
    grader("1", "\\boxed{\\sqrt{2}}")  # imports what the grader needs
    verdicts: list[_Verdict] = []
    for case in cases:
        start = time.perf_counter()
        is_paid = grader(case.gold, f"So the answer is $\\boxed{{{case.answer}}}$.")
        verdicts.append(_Verdict(case, is_paid, time.perf_counter() - start))
    return verdicts


def _row(form: str, verdicts: dict[str, list[_Verdict]], has_form: Callable[[_Case], bool]) -> list[Any]:
    """Returns the form, right answers, those that each grader accepts, wrong answers, and those that each
    grader accepts."""
    row: list[Any] = [form]
    for is_right_answer in (True, False):
        cells = [
            [
                verdict.is_paid
                for verdict in judged
                if has_form(verdict.case) and verdict.case.is_right is is_right_answer
            ]
            for judged in verdicts.values()
        ]
        row += [len(cells[0]), *map(sum, cells)]
    return row


def _median_us(verdicts: list[_Verdict]) -> float:
    return statistics.median(verdict.seconds for verdict in verdicts) * 1e6


if __name__ == "__main__":
    main()
