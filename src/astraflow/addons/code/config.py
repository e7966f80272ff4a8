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
"""Well below 1, so that no tolerance takes one whole number for another."""


class CodeTestsReward(RewardVariant):
    """Runs the program of a completion, which is its last block of code, on the test cases of its task, in a
    sandbox."""

    needs_sandbox: ClassVar[bool] = True
    is_harmless: ClassVar[bool] = True
    name: Literal["code_tests"] = "code_tests"
    pays: Literal["all", "share"] = "all"
    """`all`: 1 if all test cases pass, else 0; the first one that does not pass is the last that is run.
    `share`: the share of the test cases that pass."""
    tests: str = "tests"
    """Column of the test cases; the source's `columns` have to name it."""
    function: str = "function"
    """Column of the name of the function that is called; without one, or where it is empty, the program reads
    its standard input."""
    tolerance: float = Field(default=0.0, ge=0, le=LARGEST_TOLERANCE)
    """Error that a number in an output may have, absolute or relative to the expected value, unless the case
    has a `tolerance` of its own; whole numbers stay exact. 0: numbers have to be equal."""
    cpu_s: float = Field(default=4.0, gt=0, le=600)
    """CPU seconds of one test case, unless the case has a `cpu_s` of its own."""
    wall_s: float = Field(default=10.0, gt=0, le=600)
    """Seconds of one test case, by the clock."""
    memory_mb: int = Field(default=512, ge=64, le=65_536)
    """Memory of one test case, in MiB."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where the programs run."""

    def make(self) -> Scorer:
        """Makes the scorer, which opens its sandbox."""
        from astraflow.addons.code.code_tests import CodeTests

        return CodeTests(self)

    def checker(self, source: Config) -> Callable[[Task], object]:
        """What checks the test cases of a task."""
        from astraflow.addons.code.code_tests import cases_of

        del source
        return partial(cases_of, config=self)
