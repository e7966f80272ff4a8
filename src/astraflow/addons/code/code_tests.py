"""The reward `code_tests`: runs the program in a completion on the test cases of its task, in a sandbox.

The column `tests` of a task is a list of cases. A case of a whole program has `input` (its standard input)
and `output` (what it should print). If the column `function` names a function, `input` has the function's
arguments as JSON, one per line, and `output` has the expected result as JSON. The text of a case with
`program` is appended to the solution; the case passes if both run without an exception. A case may have its
own `cpu_s` and `tolerance`.

Expected outputs never enter the box. The only exceptions are cases with `program`: their text is in the box
with the solution, so a solution that tries to cheat can read what they check.
"""

import json
import math
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, InvalidOperation
from itertools import zip_longest
from typing import Any, cast

from astraflow.addons.code.config import LARGEST_TOLERANCE, CodeTestsReward
from astraflow.addons.code.programs import program_of
from astraflow.addons.sandbox.pool import Sandbox
from astraflow.addons.sandbox.verdict import BoxLimits, Kind
from astraflow.errors import DataError, RolloutError, SandboxError
from astraflow.protocols import Scorer, ScoringCall
from astraflow.types import Task
from astraflow.types.row_columns import row_of

__all__ = ["MAX_CASES", "Case", "CodeTestsScorer", "cases_of", "is_same_output"]

MAX_CASES = 1_000
"""Largest number of test cases of one task."""
_LONGEST_CPU_S = 600.0
_MIB = 1 << 20
_WRONG = "wrong"
"""End of a case whose program ended normally with a different output."""
_OTHER_ENDS = (_WRONG, *(kind.value for kind in Kind if kind is not Kind.PASSED))
_OUTPUT_BYTES = 8 * _MIB
"""The columns of a task have at most 1,048,576 characters, and a character takes up to 6 bytes in a JSON
result. The rest is for anything else that a solution prints."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_WHOLE_NUMBER = re.compile(r"[+-]?\d+", re.ASCII)
_NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)
_ARITHMETIC = Context(prec=50, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
"""Arithmetic of comparisons. It never raises, whatever a program printed."""

_PREPARE = """
import builtins, importlib, json, numbers, os, sys, types
from decimal import Decimal

answer = os.dup(1)
os.dup2(2, 1)
sys.setrecursionlimit(50_000)
modules = (
    "typing string re datetime collections heapq bisect copy math random statistics itertools functools "
    "operator io sys json"
).split()
known = {}
for each in modules:
    exec(f"from {each} import *", known)
known.update((each, importlib.import_module(each)) for each in modules)
known.update(vars(builtins))
solution = types.ModuleType("solution")
sys.modules["solution"] = solution
names = vars(solution)
names.update(__file__="solution.py", __builtins__=known)

def run(path):
    with open(path, "rb") as file:
        exec(compile(file.read(), path, "exec"), names)
"""
"""Prepares the module of a solution that completes a function. The solution's own output goes to standard
error, which is not compared.

Sites with such problems provide many imports, so solutions often lack them. LiveCodeBench's grader has the
same modules and the same recursion limit. Here, names of the modules never hide those of the solution or
Python's builtins: `pow` is not that of `math`, and a solution must define the function that is called."""
_CALLER = (
    _PREPARE
    + """
def plain(value):
    if not isinstance(value, (numbers.Real, Decimal)):
        raise TypeError(f"the function returned a {type(value).__name__}, which is not JSON")
    try:
        whole = int(value)
    except (ValueError, OverflowError):
        return float(value)
    return whole if whole == value else float(value)

arguments = [json.loads(line) for line in sys.stdin.buffer.read().split(b"\\n") if line.strip()]
run("solution.py")
owner = names.get("Solution")
is_method = isinstance(owner, type) and hasattr(owner, function)
target = getattr(owner(), function) if is_method else names[function]
text = json.dumps(target(*arguments), default=plain).encode()
while text:
    text = text[os.write(answer, text):]
"""
)
"""Calls a function of the solution and writes its result as JSON, in which fractions and decimals are
numbers."""
_CHECKER = (
    _PREPARE
    + """
word = sys.stdin.readline()
sys.stdin = open(os.devnull)
run("solution.py")
if function and function not in names and "Solution" not in names:
    raise NameError(f"the solution does not define {function}")
run("check.py")
os.write(answer, word.encode())
"""
)
"""Runs a solution, and a program that checks it. It ends by writing a word that is random for each run, which
proves that the check was completed: a solution that exits early with code 0 does not pass."""


@dataclass(frozen=True, slots=True)
class Case:
    """A test case."""

    given: str
    expected: str
    check: str = ""
    """Program that is appended to the solution; empty for a case that compares outputs."""
    cpu_s: float = 0.0
    """Limit of this case in CPU seconds; 0: the recipe's limit."""
    tolerance: float = 0.0
    """Error that a number may have."""


class CodeTestsScorer(Scorer):
    """Scores programs by their test cases.

    Example: `await tests(call)` is `{"score": 1.0, "passed_frac": 1.0, ...}`; at the end,
    `await tests.close()`.
    """

    def __init__(self, config: CodeTestsReward) -> None:
        self._config = config
        self._limits = BoxLimits(
            cpu_s=config.cpu_s,
            wall_s=config.wall_s,
            memory_bytes=config.memory_mb * _MIB,
            output_bytes=_OUTPUT_BYTES,
        )
        self._sandbox = Sandbox(config.sandbox)

    @property
    def is_async(self) -> bool:
        return True

    @property
    def queue(self) -> str:
        """Says how many programs wait."""
        sandbox = self._sandbox
        return f"the sandbox: {sandbox.num_waiting} programs wait, {sandbox.num_boxes} run at a time"

    async def open(self) -> None:
        """Opens the sandbox. Raises: ConfigError if this machine cannot run one."""
        await self._sandbox.open()

    async def close(self) -> None:
        """Closes the sandbox."""
        await self._sandbox.close()

    async def __call__(self, call: ScoringCall) -> object:
        """Returns the score and its parts: the share of cases that passed, and how the others ended.

        If all cases must pass, no further cases run after the first that fails.
        Raises: DataError if the task has no cases that can be run; LateScoreError if the machine was too
        busy; RolloutError if the sandbox fails, or if the machine ran out of memory.
        """
        config = self._config
        cases = cases_of(call.task, config)
        function = str(row_of(call.task).columns.get(config.function) or "")
        solution = program_of(call.text, function)
        ends = Counter[str]()
        slowest_s = 0.0
        for case in cases:
            try:
                end, cpu_s = await self._run(solution, function, case)
            except SandboxError as err:
                raise RolloutError(f"a test case could not be run: {err}") from err
            slowest_s = max(slowest_s, cpu_s)
            ends[end] += 1
            if end != Kind.PASSED and config.pays == "all":
                break
        num_run = sum(ends.values())
        share = ends[Kind.PASSED] / len(cases)
        others = {f"{end}_frac": ends[end] / num_run for end in _OTHER_ENDS}
        score = share if config.pays == "share" else float(ends[Kind.PASSED] == len(cases))
        return {"score": score, "passed_frac": share, "slowest_cpu_s": slowest_s, **others}

    async def _run(self, solution: str, function: str, case: Case) -> tuple[str, float]:
        """Runs a case. Returns `passed`, `wrong` or how the program ended, and its CPU time in seconds."""
        program = solution
        files: dict[str, str | bytes] = {}
        given = case.given
        if case.check:
            program = f"function = {function!r}\n{_CHECKER}"
            files = {"solution.py": solution, "check.py": case.check}
            given = secrets.token_hex(8)
        elif function:
            program = f"function = {function!r}\n{_CALLER}"
            files = {"solution.py": solution}
        limits = replace(self._limits, cpu_s=case.cpu_s) if case.cpu_s else self._limits
        verdict = await self._sandbox.run(program, files, given, limits)
        verdict.raise_fault("a test case")
        if not verdict.has_passed:
            return verdict.kind, verdict.cpu_s
        if case.check:
            is_right = verdict.stdout == given
        elif function:
            is_right = _is_same_value(verdict.stdout, case.expected, case.tolerance)
        else:
            is_right = is_same_output(verdict.stdout, case.expected, case.tolerance)
        return Kind.PASSED if is_right else _WRONG, verdict.cpu_s


# --- comparing ------------------------------------------------------------------------------------


def is_same_output(printed: str, expected: str, tolerance: float = 0.0) -> bool:
    """Whether an output is right, compared almost as LiveCodeBench's grader does.

    The whole output and each line are stripped. Two lines are equal if their texts are, or if all of their
    words are numbers with equal values: `1.0 2` and `1 2.00`. Whole numbers must be written identically: `05`
    is not `5`.

    With a tolerance, words are compared one by one. A number may differ by `tolerance`, or, if the expected
    value has a decimal point or an exponent, by `tolerance` times that value if this is more.
    """
    ours = [line.strip() for line in printed.strip().split("\n")]
    theirs = [line.strip() for line in expected.strip().split("\n")]
    if len(ours) != len(theirs):
        return False
    return all(_is_same_line(*pair, tolerance) for pair in zip(ours, theirs, strict=True))


def _is_same_line(ours: str, theirs: str, tolerance: float) -> bool:
    if ours == theirs:
        return True
    words = theirs.split()
    if not tolerance and not all(_NUMBER.fullmatch(word) or _NOT_FINITE.fullmatch(word) for word in words):
        return False
    pairs = list(zip_longest(ours.split(), words, fillvalue=""))
    return all(our == their or _is_same_number(our, their, tolerance) for our, their in pairs)


def _is_same_number(ours: str, theirs: str, tolerance: float) -> bool:
    """Whether two different words are the same number."""
    if not (_NUMBER.fullmatch(ours) and _NUMBER.fullmatch(theirs)):
        return False
    is_whole = _WHOLE_NUMBER.fullmatch(theirs) is not None
    if is_whole and _WHOLE_NUMBER.fullmatch(ours):
        return False
    try:
        return _is_close(Decimal(ours), Decimal(theirs), tolerance, is_whole=is_whole)
    except InvalidOperation:  # an exponent with more than 18 digits
        return False


def _is_close(ours: Decimal, theirs: Decimal, tolerance: float, *, is_whole: bool) -> bool:
    """Whether two numbers are equal within the tolerance, which is not scaled by whole numbers: they must be
    exact, however large they are."""
    if ours == theirs:
        return True
    scale = Decimal(1) if is_whole else max(Decimal(1), theirs.copy_abs())
    most = _ARITHMETIC.multiply(Decimal(tolerance), scale)
    return _ARITHMETIC.subtract(ours, theirs).copy_abs() <= most


def _is_same_value(printed: str, expected: str, tolerance: float) -> bool:
    """Whether a function returned the expected value; tuples count as lists, as in JSON."""
    try:
        pairs = [(_parse_value(printed), _parse_value(expected))]
    except (ValueError, RecursionError):
        return False
    while pairs:
        ours, theirs = pairs.pop()
        if isinstance(ours, list) and isinstance(theirs, list):
            our_entries = cast("list[object]", ours)
            their_entries = cast("list[object]", theirs)
            if len(our_entries) != len(their_entries):
                return False
            pairs += zip(our_entries, their_entries, strict=True)
        elif isinstance(ours, dict) and isinstance(theirs, dict):
            our_items = cast("dict[str, object]", ours)
            their_items = cast("dict[str, object]", theirs)
            if our_items.keys() != their_items.keys():
                return False
            pairs += ((our_items[key], their_items[key]) for key in their_items)
        elif not _is_same_scalar(cast("object", ours), theirs, tolerance):
            return False
    return True


def _is_same_scalar(ours: object, theirs: object, tolerance: float) -> bool:
    if ours == theirs:
        return True
    if not (isinstance(ours, Decimal | float) and isinstance(theirs, Decimal | float)):
        return False
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return math.isnan(ours) and math.isnan(theirs)
    return _is_close(Decimal(ours), Decimal(theirs), tolerance, is_whole=isinstance(theirs, Decimal))


def _parse_value(text: str) -> object:
    """Parses JSON. Whole numbers become decimals, which can have any number of digits.

    Raises: ValueError or RecursionError if the text cannot be read.
    """
    return json.loads(text, parse_int=Decimal, parse_float=_real)


def _real(text: str) -> float | Decimal:
    """Parses a number as a float, or as a decimal if it is too large for a float, which would be infinite."""
    value = float(text)
    return value if math.isfinite(value) else Decimal(text)


# --- test cases of a task ---------------------------------------------------------------------------


def cases_of(task: Task, config: CodeTestsReward) -> list[Case]:
    """Reads the test cases of a task. Raises: DataError that says what is wrong with them."""
    columns = row_of(task).columns
    if config.tests not in columns:
        raise DataError(
            f"task {task.id} has no column {config.tests!r} with test cases; name it in `columns` of the "
            "task source, or set tasks.reward.tests to the column that has them"
        )
    cases: Any = columns[config.tests]
    if isinstance(cases, str):
        try:
            cases = json.loads(cases)
        except (ValueError, RecursionError) as err:
            raise DataError(f"task {task.id}: {config.tests!r} is not valid JSON: {err}") from err
    listing = cast("Sequence[object]", cases if isinstance(cases, list) else ())
    if not listing:
        text = _format_value(columns[config.tests])
        raise DataError(f"task {task.id}: {config.tests!r} is {text}; expected a list of test cases")
    if len(listing) > MAX_CASES:
        raise DataError(f"task {task.id} has {len(listing)} test cases; the limit is {MAX_CASES}")
    function = bool(columns.get(config.function))
    return [
        _case(case, f"task {task.id}, test case {number}", config, is_call=function)
        for number, case in enumerate(listing, start=1)
    ]


def _case(case: object, where: str, config: CodeTestsReward, *, is_call: bool) -> Case:
    if not isinstance(case, Mapping):
        raise DataError(f"{where} is {_format_value(case)}; expected a mapping with `input` and `output`")
    fields = cast("Mapping[str, Any]", case)
    cpu_s = _number(fields.get("cpu_s", 0.0), _LONGEST_CPU_S, f"{where}: cpu_s", "seconds")
    check = fields.get("program")
    if check is not None:
        return Case("", "", _text(check, "program", where), cpu_s)
    expected = fields.get("output")
    if expected is None:
        raise DataError(f"{where} has no `output`, so there is nothing to compare with")
    given = fields.get("input")
    # Programs were written for text input, where Windows' line ends read as `\n`; a pipe would keep the `\r`.
    read = _text("" if given is None else given, "input", where).replace("\r\n", "\n")
    output = _text(expected, "output", where)
    if is_call:
        _check_json([*filter(str.strip, read.split("\n")), output], where)
    most = LARGEST_TOLERANCE
    tolerance = _number(fields.get("tolerance", config.tolerance), most, f"{where}: tolerance", "a number")
    return Case(read, output, "", cpu_s, tolerance)


def _number(value: object, most: float, what: str, expected: str) -> float:
    # A comparison with NaN is false, so NaN is refused as well.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise DataError(f"{what} = {_format_value(value)}; expected {expected} from 0 to {most:g}")
    return float(value)


def _check_json(texts: Sequence[str], where: str) -> None:
    for text in texts:
        try:
            _parse_value(text)
        except (ValueError, RecursionError) as err:
            raise DataError(
                f"{where}: an argument or result is not valid JSON: {err}: {_format_value(text)}"
            ) from err


def _text(value: object, key: str, where: str) -> str:
    """Returns text; joins a list of lines."""
    if isinstance(value, list):
        return "\n".join(str(line) for line in cast("list[object]", value))
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} is {_format_value(value)}; expected a text")
    return value


def _format_value(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
