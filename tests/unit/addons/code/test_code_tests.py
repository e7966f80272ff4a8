"""Test cases of programs: how they are read, and how outputs are compared."""

import json

import pytest

from astraflow.addons.code.code_tests import cases_of, is_same_output
from astraflow.addons.code.config import CodeTestsReward
from astraflow.errors import DataError
from astraflow.types import Task
from astraflow.types.row_columns import Row, with_row

STDIN = [{"input": "1 2\n", "output": "3\n"}]


def make_task(tests: object, **columns: object) -> Task:
    task = Task(id="t1", source="s", prompt="Add.")
    return with_row(task, Row(columns={"tests": tests, **columns}))


# Worked examples of the rule of LiveCodeBench's grader: stripped lines, and numbers by their value.
@pytest.mark.parametrize(
    ("printed", "expected", "is_right"),
    [
        ("3\n", "3", True),
        ("  3 \n\n", "3\n", True),
        ("a  \n b\n", "a\nb", True),
        ("1.0 2", "1 2.00", True),
        ("0.1", "0.10000000000000000000001", False),
        ("1e3", "1000", True),
        ("a 1.0", "a 1", False),
        ("1\n2", "1 2", False),
        ("1 2", "1  2", True),
        ("yes", "YES", False),
        ("", "", True),
        ("", "0", False),
        ("nan", "nan", True),
        ("nan 1.0", "nan 1", True),
        ("INF", "inf", False),
        ("1_000", "1000", False),
        ("\u0661", "1", False),
        ("5 7", "05 07", False),
        ("10", "0010", False),
        ("1e99999999999999999999", "1e99999999999999999998", False),
        ("9" * 5000, "9" * 5000 + ".0", True),
        ("9" * 5000 + ".0", "9" * 4999 + "8", False),
        ("1", "nan", False),
    ],
)
def test_outputs_are_compared_line_by_line(printed: str, expected: str, is_right: bool) -> None:
    assert is_same_output(printed, expected) is is_right


@pytest.mark.parametrize(
    ("printed", "expected", "is_right"),
    [
        ("0.14285714", "0.142857143", True),
        ("0.1428", "0.142857143", False),
        ("Case #1: 0.3333333", "Case #1: 0.33333333", True),
        ("Case #2: 0.3333333", "Case #1: 0.33333333", False),
        ("12345678.9", "12345679.1", True),
        ("2.9999999", "3", True),
        ("0.0000001", "0", True),
        ("1e18", "1000000000000000001", False),
        ("1000000008.0", "1000000007", False),
        ("1000000008", "1000000007", False),
        ("1000000007.4", "1000000007.0", True),
        ("nan", "0.5", False),
        ("0.5", "nan", False),
        ("inf", "1e300", False),
        ("1e999999999999999999", "1.5", False),
        ("1.5", "1e999999999999999999", False),
        ("0.5 0.5", "0.5", False),
        ("a", "b", False),
    ],
)
def test_a_tolerance_applies_to_numbers_but_not_between_whole_numbers(
    printed: str, expected: str, is_right: bool
) -> None:
    assert is_same_output(printed, expected, 1e-6) is is_right


def test_cases_are_a_list_or_its_json() -> None:
    cases = cases_of(make_task(STDIN), CodeTestsReward())
    assert [(case.given, case.expected) for case in cases] == [("1 2\n", "3\n")]
    assert cases_of(make_task(json.dumps(STDIN)), CodeTestsReward()) == cases


def test_a_case_may_have_a_limit_and_lines_of_its_own() -> None:
    (case,) = cases_of(make_task([{"input": ["1", "2"], "output": ["3"], "cpu_s": 2}]), CodeTestsReward())
    assert (case.given, case.expected, case.cpu_s) == ("1\n2", "3", 2.0)


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "expected a list of test cases"),
        ("{", "is not valid JSON"),
        ({"inputs": []}, "expected a list of test cases"),
        ([3], "test case 1 is 3"),
        ([*STDIN, {"input": "1"}], "test case 2 has no `output`"),
        ([{"input": "1", "output": None}], "has no `output`"),
        ([{"input": {"a": 1}, "output": "1"}], "'input' is"),
        ([{"input": "", "output": "1", "cpu_s": -1}], "cpu_s = -1"),
        ([{"input": "", "output": "1", "cpu_s": True}], "cpu_s = True"),
        ([{"input": "", "output": "1", "tolerance": 1}], r"tolerance = 1; expected a number from 0 to 0\.1"),
        ([{"input": "", "output": "1", "tolerance": "1e-6"}], "tolerance = '1e-6'"),
        (STDIN * 1001, "1001 test cases; the limit is 1000"),
    ],
)
def test_errors_about_invalid_test_cases_name_the_task(tests: object, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        cases_of(make_task(tests), CodeTestsReward())
    assert "task t1" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_arguments_and_result_of_a_function_are_json() -> None:
    for given, output in [("1 2", "3"), ("1\n2", ""), ("[" * 100_000, "3"), ("1", "x")]:
        with pytest.raises(DataError, match="test case 1: an argument or result is not valid JSON"):
            cases_of(make_task([{"input": given, "output": output}], function="add"), CodeTestsReward())


@pytest.mark.parametrize("text", ['"a\u2028b"', '"a\x85b"', '"a\u2029b"', "7" * 5000])
def test_unicode_line_separators_do_not_split_an_argument(text: str) -> None:
    (case,) = cases_of(
        make_task([{"input": f"{text}\r\n\n1\n", "output": text}], function="f"), CodeTestsReward()
    )
    assert (case.given, case.expected) == (f"{text}\n\n1\n", text)


def test_a_case_has_the_tolerance_of_the_recipe_or_its_own() -> None:
    tests = [{"input": "", "output": "1"}, {"input": "", "output": "1", "tolerance": 0.01}]
    assert [case.tolerance for case in cases_of(make_task(tests), CodeTestsReward(tolerance=1e-6))] == [
        1e-6,
        0.01,
    ]
    assert [case.tolerance for case in cases_of(make_task(tests), CodeTestsReward())] == [0.0, 0.01]


def test_a_task_without_the_column_is_named() -> None:
    with pytest.raises(DataError, match="no column 'cases'"):
        cases_of(make_task(STDIN), CodeTestsReward(tests="cases"))


def test_ten_megabytes_of_tests_are_refused() -> None:
    with pytest.raises(DataError, match="the largest: tests"):
        make_task([{"input": "x" * 10_000_000, "output": "1"}])
