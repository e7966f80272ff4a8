"""The reward `code_tests` of a recipe."""

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal

from pydantic import Field

from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.config import Config
from astraflow.protocols import Scorer
from astraflow.tasks.variants import RewardVariant
from astraflow.types import Task

__all__ = ["LARGEST_TOLERANCE", "CodeTestsReward"]

LARGEST_TOLERANCE = 0.1
"""Well below 1, so no tolerance makes two different whole numbers equal."""


class CodeTestsReward(RewardVariant):
    """Runs the program in a completion, which is its last whole block of Python, on the test cases of its
    task, in a sandbox."""

    needs_sandbox: ClassVar[bool] = True
    is_harmless: ClassVar[bool] = True
    name: Literal["code_tests"] = "code_tests"
    pays: Literal["all", "share"] = "all"
    """`all`: 1 if all test cases pass, else 0; no further cases run after the first that fails. `share`: the
    share of the test cases that pass."""
    tests: str = "tests"
    """Column with the test cases; the source's `columns` must name it."""
    function: str = "function"
    """Column with the name of the function to call. If the task has no such column, or if it is empty, the
    program reads its standard input."""
    tolerance: float = Field(default=0.0, ge=0, le=LARGEST_TOLERANCE)
    """Error that a number in an output may have, absolute or relative to the expected value, unless the case
    has its own `tolerance`; whole numbers must be exact. 0: numbers must be equal."""
    cpu_s: float = Field(default=4.0, gt=0, le=600)
    """Limit of one test case, in CPU seconds, unless the case has its own `cpu_s`."""
    wall_s: float = Field(default=10.0, gt=0, le=600)
    """Limit of one test case, in seconds of elapsed time."""
    memory_mb: int = Field(default=512, ge=64, le=65_536)
    """Memory that one test case may use, in MiB."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where the programs run."""

    def make(self) -> Scorer:
        """Makes the scorer, which opens its own sandbox."""
        from astraflow.addons.code.code_tests import CodeTestsScorer

        return CodeTestsScorer(self)

    def checker(self, source: Config) -> Callable[[Task], object]:
        """Makes the check of a task's test cases."""
        from astraflow.addons.code.code_tests import cases_of

        del source
        return partial(cases_of, config=self)
