"""`metrics.jsonl`: one line per committed step or finished evaluation, each exactly once, across restarts."""

import errno
import json
import os
from collections import Counter, deque
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from astraflow.errors import DataError
from astraflow.launch.folder import write_atomic
from astraflow.types import EvalRecord, StepRecord

__all__ = ["MetricsLog"]


class MetricsLog:
    """Appends records to the run's `metrics.jsonl`; `close` it.

    Opening reads the file: `last_step` and `num_evals` say where to continue. A last line that a crash cut
    short is dropped, to be written again.
    Raises: DataError if any other line is not a record.
    """

    def __init__(self, path: Path) -> None:
        self.earlier_evals: list[EvalRecord] = []
        """The evaluations that the file held when it was opened."""
        self.num_evals = 0
        self._path = path
        self._last_steps: Counter[str] = Counter()
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if len(whole) < len(lines):
            write_atomic(path, b"".join(whole))
        for number, line in enumerate(whole, start=1):
            try:
                self._take(cast("dict[str, Any]", json.loads(line)))
            except (ValueError, TypeError, LookupError, msgspec.ValidationError) as err:
                raise DataError(
                    f"{path}: line {number} is not a step or evaluation: {err}; delete the file, so that it "
                    "is written again from the journal"
                ) from err
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._end = self._file.tell()
        """Up to this position the file holds whole lines."""
        self._unwritten: deque[bytes] = deque()
        self.failure: OSError | None = None
        """Why lines wait for the disk; None if no line waits."""

    def _take(self, fields: dict[str, Any]) -> None:
        self._note(fields)
        if fields["kind"] == "eval":
            record = {key: value for key, value in fields.items() if key != "kind"}
            self.earlier_evals.append(msgspec.convert(record, EvalRecord))

    def last_step(self, policy: str) -> int:
        """The newest step of a policy in the file; -1 without one."""
        return self._last_steps.get(policy, -1)

    def write(self, record: StepRecord | EvalRecord) -> None:
        """Adds a line. While the disk is full, lines wait in memory for the next call, and `failure` is
        set."""
        kind = "step" if isinstance(record, StepRecord) else "eval"
        fields = {"kind": kind, **msgspec.to_builtins(record)}
        self._unwritten.append(msgspec.json.encode(fields) + b"\n")
        self._note(fields)
        self.retry()

    def retry(self) -> None:
        """Writes waiting lines, as far as the disk has room."""
        try:
            while self._unwritten:
                self._write_line(self._unwritten[0])
                self._unwritten.popleft()
        except OSError as err:
            self.failure = err
        else:
            self.failure = None

    def _write_line(self, line: bytes) -> None:
        """Writes a line whole or not at all: the part of a line that still fitted on a full disk is cut off
        again. Raises: OSError."""
        written = self._file.write(line)
        if written != len(line):
            os.ftruncate(self._file.fileno(), self._end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._end += len(line)

    def close(self) -> None:
        """Tries once more to write waiting lines, and closes the file. A resumed run writes the missing
        lines."""
        self.retry()
        self._file.close()

    def _note(self, fields: dict[str, Any]) -> None:
        if fields["kind"] == "step":
            self._last_steps[str(fields["policy"])] = int(fields["step"])
        else:
            self.num_evals += 1
