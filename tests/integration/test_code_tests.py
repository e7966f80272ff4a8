"""The reward `code_tests` with real boxes."""

import sys
from collections.abc import AsyncIterator

import pytest

from astraflow.addons.code.config import CodeTestsReward
from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.errors import ConfigError
from astraflow.protocols import Score
from astraflow.rollout.scoring import ScoringPool
from astraflow.tasks.config import JsonlSourceConfig, SingleRewardConfig, TasksConfig, Use, WeightedReward
from astraflow.tasks.rewards import make_reward
from astraflow.types import Task
from astraflow.types.row_columns import Row, with_row

pytestmark = pytest.mark.xdist_group("sandbox")

SUMS = [{"input": f"{n} {n}", "output": str(2 * n)} for n in range(5)]
RIGHT = "Here it is:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```"
WRONG_FROM_3 = "```python\na, b = map(int, input().split())\nprint(a * b + (a == 1))\n```"

CACHED_CALLS = 30_000 if sys.version_info < (3, 12) else 5_000
"""Nested calls of a cached function. Each needs stack of the process; newer Pythons limit their number."""
READERS = [
    "print(open('/dev/stdin').read().strip())",
    "print(open('/dev/fd/0', 'rb').readline().decode().strip())",
    "print(open(0).read())",
    "import sys\nprint(sys.stdin.buffer.read().decode())",
    "import os, sys\nsys.stdout.write(os.read(0, os.fstat(0).st_size).decode())",
    "import fileinput\nprint(*fileinput.input())",
    "print(input())\nprint(open('/dev/stdin').read()[:0])",
]
"""Each prints its standard input."""
RIGHT_PROGRAMS = [
    ("print(10**5000)", "", "1" + "0" * 5000),
    ("print(int(input()) + 1)", "9" * 5000, "1" + "0" * 5000),
    (f"print({'7' * 5000})", "", "7" * 5000),
    ("print('\u4e2d' * 400_000)", "", "\u4e2d" * 400_000),
    ("a = input()\nb = input()\nprint(a + b)", "x\r\ny\r\n", "xy\r\n"),
    ("out = open(1, 'w')\nout.write('4')", "", "4"),
    ("import io, sys\nold, sys.stdout = sys.stdout, io.StringIO()\nold.write('4')", "", "4"),
    ("import sys\nprint(3)\nsys.exit()", "", "3"),
    ("import os\nprint(3, flush=True)\nos._exit(0)", "", "3"),
    ("\ufeffprint(1)", "", "1"),
    (
        "import sys\nfrom functools import cache\nsys.setrecursionlimit(10**6)\n@cache\n"
        f"def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f({CACHED_CALLS}))",
        "",
        str(CACHED_CALLS),
    ),
    (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\n"
        "threading.Thread(target=lambda: print(input())).start()",
        "x",
        "x",
    ),
    (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\n"
        "class P:\n    x: int\nif __name__ == '__main__':\n    print(P(3).x)",
        "",
        "3",
    ),
]
"""Program, input and output."""
RIGHT_FUNCTIONS = [
    ("def f(a): return pow(a, -1, 7)", "3", "5"),
    ("def f(a): return pow(3, a)", "40", str(3**40)),
    ("def f(a): return [sum(map(abs, a)), open is __import__('builtins').open]", "[1, -2]", "[3, true]"),
    ("def gcd(a, b): return 'mine'\ndef f(a): return gcd(a, 1)", "1", '"mine"'),
    ("def f(a): return [bisect.bisect_left(a, 2), bisect_left(a, 2)]", "[1, 2]", "[1, 1]"),
    ("def f(a): return [deepcopy(a), copy.copy(a), mean(a), math.gcd(*a)]", "[2]", "[[2], [2], 2, 2]"),
    ("def f(a): return isinstance(Counter(a), Counter) and datetime.date(2020, 1, 1).day", '"a"', "1"),
    ("def f(n): return 0 if n == 0 else 1 + f(n - 1)", "5000", "5000"),
    (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\n"
        "class N:\n    v: int\n    n: Optional[N] = None\nclass Solution:\n"
        "    @lru_cache\n    def f(self, a: int) -> int:\n        return N(a).v",
        "4",
        "4",
    ),
    ("class Solution:\n    pass\ndef f(a: List[int]): return a", "[1]", "[1]"),
    ("def f(a): return len(a)", '"a\u2028\u2029\x85b"', "5"),
    ("def f(a): return 10**a", "5000", "1" + "0" * 5000),
    ("def f(a): return a % 10", "7" * 5000, "7"),
    ("def f(a): return [float('nan'), float('-inf')]", "1", "[NaN, -Infinity]"),
    (
        "from fractions import Fraction\ndef f(a): return [Fraction(a, 2), Fraction(4, 2)]",
        "1",
        "[0.5, 2]",
    ),
    ("from decimal import Decimal\ndef f(a): return Decimal(10) ** 25 + a", "1", str(10**25 + 1)),
    ("\ufeffdef f(a): return a", "1", "1"),
    ("def f(a):\n    print('x' * 2_000_000)\n    return a", "1", "1"),
]
"""Solution, arguments and result."""
WRONG_FUNCTIONS = [
    ("gcd", "pass", "2"),  # known to solutions, but this one does not define it
    ("f", "def f(a, b): return float('inf')", "1e400"),
    ("f", "def f(a, b): return float(10**18)", str(10**18 + 1)),
    ("f", "from decimal import Decimal\ndef f(a, b): return Decimal(10) ** 25", str(10**25 + 1)),
    ("f", "def f(a, b): return {2}", "[2]"),
    ("f", "def f(a, b):\n    yield 2", "[2]"),
    ("f", "def f(a, b): return float('nan')", "2"),
    ("f", "import sys\ndef f(a, b): sys.exit(0)", "2"),
]
"""Name, solution and result, for the arguments 4 and 6."""


def brief(task: Task, text: str) -> float:
    """A reward of a user's own."""
    return float(len(text) < 1000)


def make_task(tests: object, **columns: object) -> Task:
    return with_row(Task(id="t1", source="s", prompt="Add."), Row(columns={"tests": tests, **columns}))


def make_pool(pays: str = "all", **fields: object) -> ScoringPool:
    reward = CodeTestsReward.model_validate(
        {"pays": pays, "wall_s": 5.0, "cpu_s": 2.0, "sandbox": SandboxConfig(num_boxes=2), **fields}
    )
    return ScoringPool(tasks_with(reward))


def tasks_with(reward: SingleRewardConfig | WeightedReward) -> TasksConfig:
    return TasksConfig(sources={"s": JsonlSourceConfig(path="x", columns=("tests",))}, reward=reward)


@pytest.fixture
async def pool() -> AsyncIterator[ScoringPool]:
    made = make_pool()
    await started(made)
    yield made
    await made.close()


async def started(pool: ScoringPool) -> None:
    try:
        await pool.start()
    except ConfigError as err:
        pytest.skip(str(err))


async def test_a_right_program_gets_all(pool: ScoringPool) -> None:
    score = await pool.score(make_task(SUMS), RIGHT)
    assert score == 1.0
    assert score.parts["reward/passed_frac"] == 1.0
    assert score.parts["reward/wrong_frac"] == 0.0
    assert pool.calls.num == 0


async def test_all_cases_have_to_pass(pool: ScoringPool) -> None:
    score = await pool.score(make_task(SUMS), WRONG_FROM_3)
    assert score == 0.0
    # The fourth one decided, and the fifth was not run.
    assert score.parts["reward/passed_frac"] == 0.6
    assert score.parts["reward/wrong_frac"] == 0.25


async def test_how_programs_end_is_a_metric(pool: ScoringPool) -> None:
    ends = {
        "1 / 0": "failed",
        "import socket\nsocket.socket()": "refused",
        "while True: print('x' * 100_000)": "output",
        "x = []\nwhile True: x.append(bytearray(10 ** 8))": "memory",
        "import ctypes\nctypes.string_at(0)": "crash",
        "print(float('nan'))": "wrong",
    }
    for program, end in ends.items():
        score = await pool.score(make_task(SUMS), program)
        assert score == 0.0
        assert score.parts[f"reward/{end}_frac"] == 1.0, (program, score.parts)


async def test_each_case_has_a_limit_of_its_own(pool: ScoringPool) -> None:
    program = (
        "import time\nuntil = time.process_time() + 0.5\nwhile time.process_time() < until: pass\nprint(1)"
    )
    slow = await pool.score(make_task([{"input": "", "output": "1", "cpu_s": 0.1}]), program)
    assert slow.parts["reward/timeout_frac"] == 1.0
    assert await pool.score(make_task([{"input": "", "output": "1"}]), program) == 1.0


async def test_the_share_of_the_cases_is_paid() -> None:
    pool = make_pool("share")
    await started(pool)
    score = await pool.score(make_task(SUMS), WRONG_FROM_3)
    await pool.close()
    assert score == 0.6
    assert score.parts["reward/wrong_frac"] == 0.4


async def test_functions_are_called_with_json(pool: ScoringPool) -> None:
    cases = [{"input": "[1, 2]\n10", "output": "[11, 12]"}, {"input": "[]\n1", "output": "[]"}]
    task = make_task(cases, function="added")
    method = (
        "class Solution:\n    def added(self, xs: List[int], n):\n"
        "        print('note')\n        return [x + n for x in xs]"
    )
    assert await pool.score(task, f"```python\n{method}\n```") == 1.0
    assert await pool.score(task, "def added(xs, n):\n    return tuple(x + n for x in xs)") == 1.0
    assert await pool.score(task, "def added(xs, n):\n    return xs") == 0.0
    assert (await pool.score(task, "def other(): pass")).parts["reward/failed_frac"] == 1.0


async def test_standard_input_can_be_read_by_each_of_its_names(pool: ScoringPool) -> None:
    task = make_task([{"input": "3 4", "output": "3 4"}])
    for program in READERS:
        assert await pool.score(task, program) == 1.0, program


async def test_a_right_program_passes_however_it_is_written(pool: ScoringPool) -> None:
    for program, given, expected in RIGHT_PROGRAMS:
        task = make_task([{"input": given, "output": expected}])
        assert await pool.score(task, f"```python\n{program}\n```") == 1.0, program


async def test_a_right_function_passes_however_it_is_written(pool: ScoringPool) -> None:
    for solution, given, expected in RIGHT_FUNCTIONS:
        task = make_task([{"input": given, "output": expected}], function="f")
        assert await pool.score(task, f"```python\n{solution}\n```") == 1.0, solution


async def test_a_wrong_function_is_not_paid(pool: ScoringPool) -> None:
    for function, solution, expected in WRONG_FUNCTIONS:
        task = make_task([{"input": "4\n6", "output": expected}], function=function)
        assert await pool.score(task, f"```python\n{solution}\n```") == 0.0, solution


async def test_a_check_does_not_take_a_function_that_the_solution_lacks(pool: ScoringPool) -> None:
    task = make_task([{"program": "assert gcd(4, 6) == 2\n"}], function="gcd")
    assert await pool.score(task, "x = 1") == 0.0
    assert await pool.score(task, "from math import gcd") == 1.0


async def test_numbers_may_differ_by_a_tolerance_only_where_one_is_set(pool: ScoringPool) -> None:
    printed = [{"input": "", "output": "0.142857143"}]
    returned = [{"input": "1", "output": "[0.3333333333, 0.3]"}]
    program, function = "print(1/7)", "def f(a): return [a/3, 0.1+0.2]"
    # Off by default: an output that is nearly right is wrong, unless the data set says how near is enough.
    assert await pool.score(make_task(printed), program) == 0.0
    assert await pool.score(make_task(returned, function="f"), function) == 0.0
    assert await pool.score(make_task([{**printed[0], "tolerance": 1e-6}]), program) == 1.0
    assert await pool.score(make_task([{**returned[0], "tolerance": 1e-6}], function="f"), function) == 1.0
    tolerant = make_pool(tolerance=1e-6)
    await started(tolerant)
    try:
        assert await tolerant.score(make_task(printed), program) == 1.0
        assert await tolerant.score(make_task(returned, function="f"), function) == 1.0
        assert await tolerant.score(make_task([{**printed[0], "tolerance": 0}]), program) == 0.0
    finally:
        await tolerant.close()


async def test_a_check_has_to_be_reached(pool: ScoringPool) -> None:
    task = make_task([{"program": "assert add(1, 2) == 3\n"}], function="add")
    assert await pool.score(task, "def add(a, b):\n    return a + b") == 1.0
    assert await pool.score(task, "def add(a, b):\n    return a") == 0.0
    assert await pool.score(task, "import sys\nsys.exit(0)") == 0.0
    assert await pool.score(task, "import os\nprint('passed')\nos._exit(0)") == 0.0


async def test_test_cases_stand_beside_rewards_of_your_own() -> None:
    tests = CodeTestsReward(sandbox=SandboxConfig(num_boxes=1))
    both = WeightedReward(
        rewards={"tests": tests, "brief": Use(use=f"{__name__}:brief")}, weights={"brief": 0.5}
    )
    pool = ScoringPool(tasks_with(both))
    await started(pool)
    scores = [await pool.score(make_task(SUMS), text) for text in (RIGHT, "print(1)")]
    await pool.close()
    assert scores == [1.5, 0.5]
    assert scores[0].parts["reward/tests/passed_frac"] == 1.0


def test_a_reward_can_be_called_without_a_service() -> None:
    tests = CodeTestsReward(sandbox=SandboxConfig(num_boxes=1))
    reward = make_reward(tasks_with(tests))
    try:
        scores = [reward(make_task(SUMS), RIGHT), reward(make_task(SUMS), "print(1)")]
    except ConfigError as err:
        pytest.skip(str(err))
    assert scores == [Score(1.0), Score(0.0)]
