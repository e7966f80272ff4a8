"""One start of an agent program, whatever it runs in: what the program is given, and how it ended."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Protocol

__all__ = ["ProgramEnded", "ProgramPlace", "ProgramStart"]


@dataclass(frozen=True, slots=True)
class ProgramStart:
    """What a program is given for an episode."""

    task: bytes
    """The task as JSON."""
    env: Mapping[str, str]
    """Its variables, without those that name files."""
    gateway: int
    """The port at which the machine's loopback has the policies."""

    def variables(self, folder: PurePath) -> dict[str, str]:
        """All of its variables. `folder`: where the program finds its files."""
        return {
            **self.env,
            "ASTRAFLOW_TASK_FILE": str(folder / "task.json"),
            "ASTRAFLOW_RESULT_FILE": str(folder / "result.json"),
        }


@dataclass(frozen=True, slots=True)
class ProgramEnded:
    """How a program ended."""

    code: int = 0
    """Exit code, or minus the signal that ended it."""
    stdout: str = ""
    """At least the end of what it printed."""
    stderr: str = ""
    result: bytes | None = None
    """The content of its result file; None if it left none."""
    is_late: bool = False
    """It was ended because its time was over."""
    is_full: bool = False
    """It was ended because it printed more than it may."""
    start_problem: str = ""
    """Why it could not be started; empty if it was."""
    box_problem: str = ""
    """Why there was no box; empty if there was one, or if none was asked for."""


class ProgramPlace(Protocol):
    """What programs run in."""

    async def is_boxed(self) -> bool:
        """Whether they run in a box. Raises: ConfigError if one is required that this machine lacks."""
        ...

    async def run(self, start: ProgramStart) -> ProgramEnded:
        """Runs a program to its end. Afterwards, nothing that it started is left, even if this is cancelled.

        Raises: ConfigError as `is_boxed`.
        """
        ...
