"""Converts rows of data sets of programming problems: prompt, and test cases in one form.

The column `tests` is a list of cases. A case of a whole program has `input` (stdin) and `output` (stdout). If
the column `function` names a function, `input` holds its arguments as JSON, one per line, and `output` the
result as JSON. A case with `program` has neither: its text follows the solution, and the case is passed if
the whole ends without an exception.

Test cases travel with a task, so they are limited: from a row that has more, the largest cases are left out,
and `tests_left_out` says how many. Such a row is easier to pass than the published one.
"""

import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from astraflow.addons.code.code_tests import MAX_CASES
from astraflow.addons.data_sets.converted import LeftOut, PreparedRow, RawRow, needed, needed_text
from astraflow.errors import DataError

__all__ = ["CODE_COLUMNS", "MAX_TESTS_CHARS", "deepcoder_row", "human_eval_row", "live_code_bench_row"]

CODE_COLUMNS = ("tests", "function", "tests_left_out")
"""Columns that travel with a task of code."""
MAX_TESTS_CHARS = 512 * 1024
"""Characters of the test cases of one task, as JSON."""
_MAX_SOLUTION_CHARS = 32 * 1024
"""Characters of a right program."""
_MAX_UNPACKED = 512 * 1024 * 1024
"""Bytes of one row's packed test cases."""
_FIRST_DATE = "2024-08-01"
_END_DATE = "2025-02-01"
"""Problems from the first date on and before the end: the 279 of LiveCodeBench v5 that papers report."""

_WHOLE = (
    "\n\nWrite a Python program that reads the input from stdin and writes the answer to stdout. Put the "
    "whole program into one block of code:\n```python\n# your program\n```"
)
_STARTED = (
    "\n\nSolve the problem in Python by completing this code. Put the whole of it into one block of code:\n"
    "```python\n{}\n```"
)
_FUNCTION = (
    "Complete this Python function. Put all of it into one block of code, with the imports that it needs:\n"
    "```python\n{}\n```"
)


def deepcoder_row(row: RawRow) -> PreparedRow | LeftOut:
    """A row of DeepCoder: `problem`, and `tests` as JSON in the form of one of its parts. The answer is
    the first published solution, by which the cases of a test writer are judged.

    Rows that call a function are left out: their outputs may be wrapped in a list or not, and nothing says
    which.
    """
    tests: Any = json.loads(needed_text(row, "tests"))
    if isinstance(tests, dict):  # the form of TACO: two lists
        lists = cast("Mapping[str, Any]", tests)
        if lists.get("fn_name"):
            return LeftOut("it calls a function")
        pairs = zip(needed(lists, "inputs"), needed(lists, "outputs"), strict=False)
        tests = [{"input": given, "output": expected} for given, expected in pairs]
    cases = cast("Sequence[Mapping[str, Any]]", tests)
    kinds = {str(case.get("type", case.get("testtype", "stdin"))) for case in cases}
    if not kinds <= {"stdin", "stdin_stdout"}:
        return LeftOut("it calls a function")
    made = _row(row.get("id"), needed_text(row, "problem").strip() + _WHOLE, cases)
    if isinstance(made, LeftOut):
        return made
    return {**made, "answer": _solution(row.get("solutions"))}


def _solution(solutions: object) -> str:
    """The first published solution that is not too long to travel with each task; empty if there is none."""
    listed = cast("list[object]", solutions) if isinstance(solutions, list) else []
    texts = (text for text in listed if isinstance(text, str) and 0 < len(text) <= _MAX_SOLUTION_CHARS)
    return next(texts, "")


def live_code_bench_row(row: RawRow) -> PreparedRow | LeftOut:
    """A row of LiveCodeBench: public cases as JSON, private ones as packed JSON."""
    date = needed_text(row, "contest_date")
    if not _FIRST_DATE <= date < _END_DATE:
        return LeftOut(f"its contest was not between {_FIRST_DATE} and {_END_DATE}")
    public: list[Any] = json.loads(needed_text(row, "public_test_cases"))
    private = _unpacked(needed_text(row, "private_test_cases"))
    about: dict[str, Any] = json.loads(needed_text(row, "metadata") or "{}")
    starter = needed_text(row, "starter_code").rstrip()
    asked = needed_text(row, "question_content").strip()
    prompt = asked + (_STARTED.format(starter) if starter else _WHOLE)
    function = str(about.get("func_name") or "")
    return _row(needed(row, "question_id"), prompt, [*public, *private], function=function)


def human_eval_row(row: RawRow) -> PreparedRow | LeftOut:
    """A row of HumanEval: the beginning of a function, and a `check` that asserts what it returns."""
    name = needed_text(row, "entry_point")
    return {
        "id": needed_text(row, "task_id"),
        "prompt": _FUNCTION.format(needed_text(row, "prompt").rstrip()),
        "answer": "",
        "function": name,
        "tests": [{"program": f"{needed_text(row, 'test').rstrip()}\n\ncheck({name})\n"}],
        "tests_left_out": 0,
    }


def _row(
    own_id: object, prompt: str, cases: Sequence[Mapping[str, Any]], *, function: str = ""
) -> PreparedRow | LeftOut:
    tests: list[dict[str, str]] = []
    for case in cases:
        given = case.get("input")
        expected = case.get("output")
        if given is None or expected is None:
            return LeftOut("a test case has no input or no output")
        tests.append({"input": _joined(given), "output": _joined(expected)})
    if not tests:
        return LeftOut("it has no test cases")
    kept = _limited(tests)
    if not kept:
        return LeftOut("each of its test cases is too large")
    made: PreparedRow = {
        "prompt": prompt,
        "answer": "",
        "function": function,
        "tests": kept,
        "tests_left_out": len(tests) - len(kept),
    }
    return made if own_id is None else {"id": str(own_id), **made}


def _joined(value: object) -> str:
    """A text; lines that are given as a list are joined."""
    if isinstance(value, list):
        return "\n".join(str(line) for line in cast("list[object]", value))
    return str(value)


def _limited(tests: list[dict[str, str]]) -> list[dict[str, str]]:
    """The test cases in order, without the largest ones if all together are too many."""
    sizes = [len(json.dumps(case, ensure_ascii=False)) + 2 for case in tests]
    from_smallest = sorted(range(len(tests)), key=lambda idx: sizes[idx])
    total = 0
    chosen: set[int] = set()
    for idx in from_smallest[:MAX_CASES]:
        total += sizes[idx]
        if total > MAX_TESTS_CHARS:
            break
        chosen.add(idx)
    return [case for idx, case in enumerate(tests) if idx in chosen]


# --- packed test cases ----------------------------------------------------------------------------


class _TextUnpickler(pickle.Unpickler):
    """Reads pickled texts only: a pickle that names any class or function is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def _unpacked(text: str) -> list[Any]:
    """Private test cases: JSON, or base64 of the compressed pickle of a JSON text.

    Raises: DataError if the text is neither.
    """
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        unpacker = zlib.decompressobj()
        packed = unpacker.decompress(base64.b64decode(text, validate=True), _MAX_UNPACKED)
        if unpacker.unconsumed_tail:
            raise DataError(f"its private test cases have more than {_MAX_UNPACKED} bytes")
        return json.loads(_TextUnpickler(io.BytesIO(packed)).load())
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, TypeError, ValueError) as err:
        if isinstance(err, DataError):
            raise
        raise DataError(f"its private test cases cannot be unpacked: {err}") from err
