"""One run of an agent program, inside or outside of a box: what the program gets, and how it ends."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Protocol

__all__ = ["ProgramEnd", "ProgramPlace", "ProgramStart"]


@dataclass(frozen=True, slots=True)
class ProgramStart:
    """What a program gets for an episode."""

    task: bytes
    """The task as JSON."""
    env: Mapping[str, str]
    """Its environment variables, without those that name files."""
    gateway: int
    """Port of the gateway on the machine's loopback interface."""

    def variables(self, folder: PurePath) -> dict[str, str]:
        """All its environment variables. `folder`: the folder with the program's files."""
        return {
            **self.env,
            "ASTRAFLOW_TASK_FILE": str(folder / "task.json"),
            "ASTRAFLOW_RESULT_FILE": str(folder / "result.json"),
        }


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a program ended."""

    code: int = 0
    """Exit code, or the negative number of the signal that ended it."""
    stdout: str = ""
    """At least the end of its output."""
    stderr: str = ""
    result: bytes | None = None
    """The content of its result file; None if there is no such file."""
    is_late: bool = False
    """Whether it was ended because it exceeded its time limit."""
    is_full: bool = False
    """Whether it was ended because it printed too much."""
    start_problem: str = ""
    """Why it could not be started; empty if it was."""
    box_problem: str = ""
    """Why there was no box; empty if there was one, or none was requested."""


class ProgramPlace(Protocol):
    """Where programs run: in the sandbox, or on this machine."""

    async def is_boxed(self) -> bool:
        """Whether programs run in a box. Raises: ConfigError if a required box cannot be made."""
        ...

    async def run(self, start: ProgramStart) -> ProgramEnd:
        """Runs a program to its end. Afterwards, nothing that it started is left, even if this is cancelled.

        Raises: ConfigError, like `is_boxed`.
        """
        ...
