"""The state of one process of a run, as its supervisor sees it, `run.json` stores it, and reports show it."""

from typing import Literal

from astraflow.protocols import MACHINE_LOST
from astraflow.types import Item

__all__ = ["TROUBLE_AFTER_S", "ServiceState"]

TROUBLE_AFTER_S = 8.0
"""A process is reported once it has been stopped, or has hung, for this long."""


class ServiceState(Item, frozen=True):
    """The state of one process."""

    name: str
    state: Literal["waiting", "running", "restarting", "ended", "stopped", "failed"] = "waiting"
    pid: int = 0
    port: int = 0
    """The port at which it listens; 0 if it doesn't, or outside `run.json`."""
    restarts: int = 0
    """Number of restarts since the launcher started."""
    exit_code: int = 0
    """Exit code when it last ended; negative for a signal, `MACHINE_LOST` if there is none."""
    last_line: str = ""
    """Why it last ended: that it was silent or lost its machine, or the last line of its log if it failed."""
    age_s: float = 0.0
    """Seconds since it was started."""
    silent_s: float | None = None
    """Seconds since its last sign of life; None before the first one, or if the launcher can't tell."""
    is_silent: bool = False
    """Whether it has been stopped, or has hung, for `TROUBLE_AFTER_S`."""
    trouble: str = ""
    """What is wrong with it, or with a process that it started, and what to do; empty if nothing is known to
    be wrong."""
    is_starved: bool = False
    """Whether its only trouble is that its machine gives it no processor time."""

    @property
    def code_text(self) -> str:
        """The exit code for a message, as in "ended with code 1"; empty if there is none."""
        return "" if self.exit_code == MACHINE_LOST else f" with code {self.exit_code}"
