"""When a process that crashed is started again, and how it ended, in words."""

import io
import math
import os
import signal
from collections import deque
from pathlib import Path

from astraflow.service.memory import MemoryRecord

__all__ = ["RETIRED_CODE", "SIGKILL_CODES", "Backoff", "code_text", "end_text", "last_lines"]

SIGKILL_CODES = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a process that SIGKILL ended. A shell or a container reports the second."""

RETIRED_CODE = 90
"""Exit code of a rollout service that left because the dataflow asked it to. It isn't started again."""

_TAIL_BYTES = 65_536
"""Size of the end of a log in which `last_lines` looks. A whole log may have gigabytes."""


class Backoff:
    """Delays between restarts. The first is `first_s`. Each further one is twice as long, up to `longest_s`.
    At most `limit` crashes in a row are followed by a restart.

    Example: `Backoff(limit=2).next_delay_s()` returns 0.5, then 1.0, then None.
    """

    def __init__(self, *, limit: float = math.inf, first_s: float = 0.5, longest_s: float = 15.0) -> None:
        self._limit = limit
        self._first_s = first_s
        self._longest_s = longest_s
        self.num_crashes = 0

    def next_delay_s(self) -> float | None:
        """Counts a crash. Returns: seconds until the next start; None after too many crashes in a row."""
        self.num_crashes += 1
        return self.delay_s

    @property
    def delay_s(self) -> float | None:
        """The delay after the newest crash; 0 if there was none; None after too many crashes in a row."""
        if self.num_crashes > self._limit:
            return None
        if self.num_crashes == 0:
            return 0.0
        doublings = min(self.num_crashes - 1, 60)  # more would overflow
        return min(self._first_s * 2.0**doublings, self._longest_s)

    def reset(self) -> None:
        """Forgets earlier crashes, because the process works again."""
        self.num_crashes = 0


def code_text(code: int) -> str:
    """The exit code or, if it is negative, the signal, such as `signal 9 (SIGKILL)`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def end_text(code: int, memory: MemoryRecord | None = None, advice: str = "") -> str:
    """How a process ended, as the rest of a sentence, such as `ended with exit code 3`.

    `memory`: the record of its machine's memory, which tells why SIGKILL ended it. If memory was the cause,
    `advice` is added.
    """
    if memory is not None and code in SIGKILL_CODES:
        return f"was {memory.cause(0.0, 0, advice)}"
    return f"was killed by {code_text(code)}" if code < 0 else f"ended with {code_text(code)}"


def last_lines(log: Path, num_lines: int) -> str:
    """The last lines at the end of a log that aren't blank, indented. Reads at most `_TAIL_BYTES`."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            end = file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return "  (no log)"
    lines = deque(filter(str.strip, io.StringIO(end, newline=None)), maxlen=num_lines)
    return "".join(f"  {line}" for line in lines).rstrip("\n")
