"""The reward `code_tests`: runs the program of a completion on the test cases of its task, in a sandbox.

The column `tests` of a task is a list of cases. A case of a whole program has `input` (its standard input)
and `output` (what it should print). If the column `function` names a function, `input` holds the function's
arguments as JSON, one per line, and `output` what it should return, as JSON. A case with `program` is text
that follows the solution; it passes if the whole ends without an exception. A case may have a `cpu_s` and a
`tolerance` of its own.

What a case should give never enters the box, except for cases with `program`: their text is in the box with
the solution, so a solution that was made to cheat can tell what they check.
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
from astraflow.addons.sandbox.pool import Sandbox
from astraflow.addons.sandbox.verdict import Kind, Limits
from astraflow.errors import DataError, RolloutError, SandboxError
from astraflow.protocols import Scorer, ScoringCall
from astraflow.types import Task
from astraflow.types.row_columns import row_of

__all__ = ["MAX_CASES", "Case", "CodeTests", "cases_of", "code_of", "is_same_output"]

MAX_CASES = 1_000
"""Test cases of one task."""
_LONGEST_CPU_S = 600.0
_MIB = 1 << 20
_WRONG = "wrong"
"""What a case is counted as whose program ended well with another output."""
_OTHER_ENDS = (_WRONG, *(kind.value for kind in Kind if kind is not Kind.PASSED))
_OUTPUT_BYTES = 8 * _MIB
"""The columns of a task have at most 1,048,576 characters; a character takes up to 6 bytes in a result as
JSON, and the rest is for what else a solution prints."""
_FENCE = re.compile(
    r"^(?P<indent>[ \t]*)(?P<fence>`{3,})[^\n`]*\n(?P<code>.*?)^[ \t]*(?P=fence)", re.DOTALL | re.MULTILINE
)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_WHOLE_NUMBER = re.compile(r"[+-]?\d+", re.ASCII)
_NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)
_ARITHMETIC = Context(prec=50, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
"""Decides whether two numbers are close. It raises nothing, whatever a program printed."""

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
"""Prepares the module of a solution that completes a function. What the solution prints goes to standard
error; nobody compares that.

Sites with such problems import much for their users, so solutions import little. LiveCodeBench's grader has
the same modules and the same recursion limit. Here, the modules' names rank below those of the solution and
below Python's own: `pow` is not that of `math`, and a solution has to define the function that is called."""
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
"""Calls a function of the solution and writes its result as JSON. Fractions and decimals are numbers."""
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
"""Runs a solution and a text that checks it. The word at the end, another one each time, shows that the check
was reached: a solution that ends the process with exit code 0 has not passed."""


@dataclass(frozen=True, slots=True)
class Case:
    """A test case."""

    given: str
    expected: str
    check: str = ""
    """Text that follows the solution; empty for a case that compares outputs."""
    cpu_s: float = 0.0
    """CPU seconds of this case; 0: those of the recipe."""
    tolerance: float = 0.0
    """Error that a number may have."""


class CodeTests(Scorer):
    """Scores programs by their test cases.

    Example: `await tests(call)` is `{"score": 1.0, "passed_frac": 1.0, ...}`; at the end,
    `await tests.close()`.
    """

    def __init__(self, config: CodeTestsReward) -> None:
        self._config = config
        self._limits = Limits(
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
        """How many programs wait."""
        sandbox = self._sandbox
        return f"the sandbox: {sandbox.num_waiting} programs wait, {sandbox.num_boxes} run at a time"

    async def open(self) -> None:
        """Opens the sandbox. Raises: ConfigError if there can be none here."""
        await self._sandbox.open()

    async def close(self) -> None:
        """Ends the sandbox."""
        await self._sandbox.close()

    async def __call__(self, call: ScoringCall) -> object:
        """The score and its parts: the share of cases that passed, and how the others ended.

        If all cases have to pass, the first one that does not decides, and the rest are not run.

        Raises: DataError if the task has no cases that can be run; LateScoreError if the machine was too
        busy; RolloutError if its boxes break, or if the machine had no memory.
        """
        config = self._config
        cases = cases_of(call.task, config)
        function = str(row_of(call.task).columns.get(config.function) or "")
        solution = code_of(call.text)
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
        """`passed`, `wrong`, or how the program ended; and its CPU time in seconds."""
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


# --- completions ----------------------------------------------------------------------------------


def code_of(text: str) -> str:
    """The program in a completion: the last fenced block, or all of a text that has none.

    A block in a list is indented as its fence is; that much is removed from its lines.
    """
    blocks = list(_FENCE.finditer(text))
    if not blocks:
        return text
    indent = len(blocks[-1]["indent"])
    return re.sub(rf"^[ \t]{{0,{indent}}}", "", blocks[-1]["code"], flags=re.MULTILINE)


# --- comparing ------------------------------------------------------------------------------------


def is_same_output(printed: str, expected: str, tolerance: float = 0.0) -> bool:
    """Whether an output is right, nearly as LiveCodeBench's grader compares it.

    Lines are stripped, and so is the whole. Two lines are the same if their texts are, or if all of their
    words are numbers of the same value: `1.0 2` and `1 2.00`. Whole numbers have to be written alike: `05` is
    not `5`.

    With a tolerance, each word is compared alone, and a number may differ by `tolerance`, or by `tolerance`
    times the expected value if that is more and has a decimal point or an exponent.
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
    """Whether two words that differ are the same number."""
    if not (_NUMBER.fullmatch(ours) and _NUMBER.fullmatch(theirs)):
        return False
    is_whole = _WHOLE_NUMBER.fullmatch(theirs) is not None
    if is_whole and _WHOLE_NUMBER.fullmatch(ours):
        return False
    try:
        return _is_close(Decimal(ours), Decimal(theirs), tolerance, is_whole=is_whole)
    except InvalidOperation:  # an exponent of more than 18 digits
        return False


def _is_close(ours: Decimal, theirs: Decimal, tolerance: float, *, is_whole: bool) -> bool:
    """Whether two numbers are the same. A whole number stays exact, however large it is: no tolerance is
    relative to it."""
    if ours == theirs:
        return True
    scale = Decimal(1) if is_whole else max(Decimal(1), theirs.copy_abs())
    most = _ARITHMETIC.multiply(Decimal(tolerance), scale)
    return _ARITHMETIC.subtract(ours, theirs).copy_abs() <= most


def _is_same_value(printed: str, expected: str, tolerance: float) -> bool:
    """Whether a function returned what it should; tuples count as lists, as in JSON."""
    try:
        pairs = [(_parsed(printed), _parsed(expected))]
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


def _parsed(text: str) -> object:
    """A value from JSON. Whole numbers are decimals, which have any number of digits.

    Raises: ValueError or RecursionError if it cannot be read.
    """
    return json.loads(text, parse_int=Decimal, parse_float=_real)


def _real(text: str) -> float | Decimal:
    """The number, also if it is too large for a float: it is not infinite."""
    value = float(text)
    return value if math.isfinite(value) else Decimal(text)


# --- test cases of a task ---------------------------------------------------------------------------


def cases_of(task: Task, config: CodeTestsReward) -> list[Case]:
    """The test cases of a task. Raises: DataError that says what is wrong with them."""
    columns = row_of(task).columns
    if config.tests not in columns:
        raise DataError(
            f"task {task.id} has no column {config.tests!r} with test cases; name it in `columns` of the "
            "task source, or set tasks.reward.tests to the column that holds them"
        )
    cases: Any = columns[config.tests]
    if isinstance(cases, str):
        try:
            cases = json.loads(cases)
        except (ValueError, RecursionError) as err:
            raise DataError(f"task {task.id}: {config.tests!r} is no JSON: {err}") from err
    found = cast("Sequence[object]", cases if isinstance(cases, list) else ())
    if not found:
        shown = _shown(columns[config.tests])
        raise DataError(f"task {task.id}: {config.tests!r} holds no list of test cases: {shown}")
    if len(found) > MAX_CASES:
        raise DataError(f"task {task.id} has {len(found)} test cases; at most {MAX_CASES} are run")
    function = bool(columns.get(config.function))
    return [
        _case(case, f"task {task.id}, test case {number}", config, is_call=function)
        for number, case in enumerate(found, start=1)
    ]


def _case(case: object, where: str, config: CodeTestsReward, *, is_call: bool) -> Case:
    if not isinstance(case, Mapping):
        raise DataError(f"{where} is {_shown(case)}; expected a mapping with `input` and `output`")
    fields = cast("Mapping[str, Any]", case)
    cpu_s = _number(fields.get("cpu_s", 0.0), _LONGEST_CPU_S, f"{where}: cpu_s", "seconds")
    check = fields.get("program")
    if check is not None:
        return Case("", "", _text(check, "program", where), cpu_s)
    expected = fields.get("output")
    if expected is None:
        raise DataError(f"{where} has no `output`, so nothing says which program is right")
    given = fields.get("input")
    # A file with the line ends of Windows reads as any other there; a pipe on Linux would show `\r`.
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
        raise DataError(f"{what} = {_shown(value)}; expected {expected} from 0 to {most:g}")
    return float(value)


def _check_json(texts: Sequence[str], where: str) -> None:
    for text in texts:
        try:
            _parsed(text)
        except (ValueError, RecursionError) as err:
            raise DataError(f"{where}: arguments and result are no JSON: {err}: {_shown(text)}") from err


def _text(value: object, key: str, where: str) -> str:
    """A text; lines that are given as a list are joined."""
    if isinstance(value, list):
        return "\n".join(str(line) for line in cast("list[object]", value))
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} is {_shown(value)}; expected a text")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
