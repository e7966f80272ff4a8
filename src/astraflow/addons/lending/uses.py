"""`lending.jsonl`: what each shared device was used for. The uses of a device have no gap in a session.

Each use has a line when it begins and one when it ends. A session is one start of the launcher. If the
launcher is killed, the uses in progress have no end, and the beginning of a line may be left at the end of
the file. The next session removes the latter, and ends the former at the last time in the file, because their
own end isn't known.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from astraflow.addons.lending.baton import Use
from astraflow.errors import DataError
from astraflow.recipe.run_folder import set_aside
from astraflow.types import Item

__all__ = ["DeviceUse", "UseBegin", "UseLog", "find_problems", "read_uses", "seconds_by_use"]

_log = logging.getLogger(__name__)


class UseBegin(Item, frozen=True, kw_only=True):
    """A line of the file: the begin of a use. Times are nanoseconds since 1970."""

    device: str
    """The policy whose trainer owns the device."""
    session_ns: int
    """When the session began."""
    use: Use
    begin_ns: int


class DeviceUse(UseBegin, frozen=True, kw_only=True):
    """A line of the file: a time in which a device had one use."""

    end_ns: int
    why: str
    """Why the device was lent or not, as of the end of this use."""
    is_end_known: bool = True
    """False if the launcher was killed meanwhile. The use then ended at this time or later."""


class UseLog:
    """Appends uses. A line that can't be written waits for the next one. Example: `log.add(use)`."""

    def __init__(self, path: Path, write: Callable[[int, bytes, int], int] = os.pwrite) -> None:
        """Removes the beginning of a line at the end of the file. Sets the file aside if another line is
        damaged: the run doesn't need it.

        `write`: writes bytes to a descriptor at an offset, and returns how many.
        """
        self._path = path
        self._write = write
        self.problem = ""
        """What was set aside, and why; empty if nothing was."""
        try:
            lines = _read_lines(path)
        except DataError as err:
            self.problem = set_aside(path, str(err))
            lines = []
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._size = path.read_bytes().rfind(b"\n") + 1
            os.ftruncate(self._fd, self._size)
        except OSError:
            os.close(self._fd)
            raise
        self._unwritten = b""
        ends_ns = (line.end_ns if isinstance(line, DeviceUse) else line.begin_ns for line in lines)
        self.end_ns = max(ends_ns, default=0)
        """The latest time in the file, as of its opening."""
        for begun in _unended(lines):
            fields = msgspec.structs.asdict(begun)
            self.add(DeviceUse(**fields, end_ns=self.end_ns, why="the launcher ended", is_end_known=False))

    def begin(self, begin: UseBegin) -> None:
        """Writes that a use begins."""
        self._write_line(begin)

    def add(self, use: DeviceUse) -> None:
        """Writes a use that has ended."""
        self._write_line(use)

    def _write_line(self, line: UseBegin) -> None:
        self._unwritten += msgspec.json.encode(line) + b"\n"
        try:
            num = self._write(self._fd, self._unwritten, self._size)
        except OSError as err:
            _log.warning("%s cannot be written: %s", self._path, err)
            return
        self._size += num
        self._unwritten = self._unwritten[num:]

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)


def read_uses(path: Path) -> list[DeviceUse]:
    """Reads the uses that have ended; none if there is no file. Raises: DataError if a line is damaged."""
    return [line for line in _read_lines(path) if isinstance(line, DeviceUse)]


def _read_lines(path: Path) -> list[UseBegin]:
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    uses: list[UseBegin] = []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            break
        kind = DeviceUse if b'"end_ns"' in line else UseBegin
        try:
            uses.append(msgspec.json.decode(line, type=kind))
        except ValueError as err:
            raise DataError(f"{path}: line {number} is not the use of a device: {err}") from err
    return uses


def _unended(lines: Sequence[UseBegin]) -> list[UseBegin]:
    """The uses that have begun and not ended."""
    begun: dict[str, UseBegin] = {}
    for line in lines:
        if isinstance(line, DeviceUse):
            begun.pop(line.device, None)
        else:
            begun[line.device] = line
    return list(begun.values())


def seconds_by_use(uses: Sequence[DeviceUse]) -> dict[Use, float]:
    """Sums the times of each use."""
    total_ns: Counter[Use] = Counter(dict.fromkeys(get_args(Use), 0))
    for each in uses:
        total_ns[each.use] += each.end_ns - each.begin_ns
    return {use: ns / 1e9 for use, ns in total_ns.items()}


def find_problems(uses: Sequence[DeviceUse]) -> list[str]:
    """Returns where the uses break a rule: each begins when the previous one of its device ended, the first
    of a session begins with it, and a session begins after the end of the one before."""
    problems: list[str] = []
    last: dict[str, DeviceUse] = {}
    for use in uses:
        before = last.get(use.device)
        end_ns = before.end_ns if before else use.session_ns
        if before and before.session_ns != use.session_ns:
            if use.session_ns < end_ns:
                problems.append(f"device of {use.device}: session {use.session_ns} begins before {end_ns}")
            end_ns = use.session_ns
        if use.begin_ns != end_ns or use.end_ns < use.begin_ns:
            problems.append(f"device of {use.device}: {use.use} at {use.begin_ns} follows {end_ns}")
        last[use.device] = use
    return problems
