"""Converts rows of data sets of programming problems to a prompt, and test cases in one form.

The column `tests` is a list of cases. A case of a whole program has `input` (stdin) and `output` (stdout). If
the column `function` names a function, `input` has its arguments as JSON, one per line, and `output` its
result as JSON. A case with `program` has neither: its text is appended to the solution, and the case passes
if both run without an exception.

A task carries its test cases, so their size is limited: the largest cases of a row are left out until the
rest fits, and `tests_left_out` says how many. Such a row is easier to pass than the published one.
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
from astraflow.addons.data_sets.converted import LeftOut, PreparedRow, RawRow, read_column, read_text_column
from astraflow.errors import DataError

__all__ = [
    "CODE_COLUMNS",
    "MAX_TESTS_CHARS",
    "deepcoder_row",
    "human_eval_row",
    "live_code_bench_row",
    "live_code_bench_v5_row",
]

CODE_COLUMNS = ("tests", "function", "tests_left_out")
"""Columns that a programming task carries."""
MAX_TESTS_CHARS = 512 * 1024
"""Largest number of characters of a task's test cases, as JSON."""
_MAX_SOLUTION_CHARS = 32 * 1024
"""Largest number of characters of a right program."""
_MAX_UNPACKED = 512 * 1024 * 1024
"""Largest number of bytes of a row's test cases after unpacking, so a small file cannot fill the memory."""
_FIRST_DATE = "2024-08-01"
_END_DATE = "2025-02-01"
"""Problems from the first date up to, but excluding, the end date: the 279 of LiveCodeBench v5 that papers
report."""

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
    """Converts a row of DeepCoder: `problem`, and `tests` as JSON in the form of one of its parts. The answer
    is the first published solution, which decides whether the cases of a test writer are valid.

    Rows that call a function are left out: their outputs may or may not be wrapped in a list, and nothing
    says which.
    """
    tests: Any = json.loads(read_text_column(row, "tests"))
    if isinstance(tests, dict):  # the form of TACO: two lists
        lists = cast("Mapping[str, Any]", tests)
        if lists.get("fn_name"):
            return LeftOut("it calls a function")
        pairs = zip(read_column(lists, "inputs"), read_column(lists, "outputs"), strict=False)
        tests = [{"input": given, "output": expected} for given, expected in pairs]
    cases = cast("Sequence[Mapping[str, Any]]", tests)
    kinds = {str(case.get("type", case.get("testtype", "stdin"))) for case in cases}
    if not kinds <= {"stdin", "stdin_stdout"}:
        return LeftOut("it calls a function")
    prepared = _row(row.get("id"), read_text_column(row, "problem").strip() + _WHOLE, cases)
    if isinstance(prepared, LeftOut):
        return prepared
    solutions = row.get("solutions")
    listed = cast("list[object]", solutions) if isinstance(solutions, list) else []
    texts = (text for text in listed if isinstance(text, str) and 0 < len(text) <= _MAX_SOLUTION_CHARS)
    return {**prepared, "answer": next(texts, "")}


def live_code_bench_v5_row(row: RawRow) -> PreparedRow | LeftOut:
    """Converts a row of LiveCodeBench if its problem is one of the 279."""
    date = read_text_column(row, "contest_date")
    if not _FIRST_DATE <= date < _END_DATE:
        return LeftOut(f"its contest was not between {_FIRST_DATE} and {_END_DATE}")
    return live_code_bench_row(row)


def live_code_bench_row(row: RawRow) -> PreparedRow | LeftOut:
    """Converts a row of LiveCodeBench: public cases are JSON, private ones are packed JSON."""
    public: list[Any] = json.loads(read_text_column(row, "public_test_cases"))
    private = _unpack(read_text_column(row, "private_test_cases"))
    about: dict[str, Any] = json.loads(read_text_column(row, "metadata") or "{}")
    starter = read_text_column(row, "starter_code").rstrip()
    question = read_text_column(row, "question_content").strip()
    prompt = question + (_STARTED.format(starter) if starter else _WHOLE)
    function = str(about.get("func_name") or "")
    return _row(read_column(row, "question_id"), prompt, [*public, *private], function=function)


def human_eval_row(row: RawRow) -> PreparedRow | LeftOut:
    """Converts a row of HumanEval: the start of a function, and a `check` that asserts what it returns."""
    name = read_text_column(row, "entry_point")
    return {
        "id": read_text_column(row, "task_id"),
        "prompt": _FUNCTION.format(read_text_column(row, "prompt").rstrip()),
        "answer": "",
        "function": name,
        "tests": [{"program": f"{read_text_column(row, 'test').rstrip()}\n\ncheck({name})\n"}],
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
        tests.append({"input": _join_lines(given), "output": _join_lines(expected)})
    if not tests:
        return LeftOut("it has no test cases")
    fitting = _limit_tests(tests)
    if not fitting:
        return LeftOut("each of its test cases is too large")
    prepared: PreparedRow = {
        "prompt": prompt,
        "answer": "",
        "function": function,
        "tests": fitting,
        "tests_left_out": len(tests) - len(fitting),
    }
    return prepared if own_id is None else {"id": str(own_id), **prepared}


def _join_lines(value: object) -> str:
    """Converts a value to text; joins a list of lines."""
    if isinstance(value, list):
        return "\n".join(str(line) for line in cast("list[object]", value))
    return str(value)


def _limit_tests(tests: list[dict[str, str]]) -> list[dict[str, str]]:
    """The test cases in order, without the largest ones if there are too many or they are too long."""
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
    """Unpickles only text and plain containers: refuses a pickle that names any class or function, because
    calling one could run any code."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def _unpack(text: str) -> list[Any]:
    """Decodes private test cases: JSON text, or base64 of a compressed pickle of JSON text.

    Raises: DataError if the text is neither.
    """
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(base64.b64decode(text, validate=True), _MAX_UNPACKED)
        if unpacker.unconsumed_tail:
            raise DataError(f"its private test cases have more than {_MAX_UNPACKED} bytes")
        return json.loads(_TextUnpickler(io.BytesIO(content)).load())
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, TypeError, ValueError) as err:
        if isinstance(err, DataError):
            raise
        raise DataError(f"its private test cases cannot be unpacked: {err}") from err
