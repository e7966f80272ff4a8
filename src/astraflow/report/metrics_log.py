"""`metrics.jsonl`: one line per committed step or finished evaluation, each exactly once, across restarts.

Each line is one flat JSON object, the columns of a `MetricRow`; `pandas.read_json(path, lines=True)` reads
them.
"""

import errno
import os
from collections import Counter, deque
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from astraflow.errors import DataError
from astraflow.metrics import MetricRow, eval_of, row_of
from astraflow.recipe.run_folder import write_atomic
from astraflow.types import EvalRecord, StepRecord

__all__ = ["MetricsLog"]


class MetricsLog:
    """Appends the rows of records to the run's `metrics.jsonl`; `close` it.

    Opening reads the file: `last_step` and `num_evals` say where to continue. A last line that a crash cut
    short is dropped, to be written again.
    Raises: DataError if any other line is not a row.
    """

    def __init__(self, path: Path) -> None:
        self.earlier_evals: list[EvalRecord] = []
        """The evaluations that the file held when it was opened."""
        self.num_evals = 0
        self._path = path
        self._num_steps: Counter[str] = Counter()
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if len(whole) < len(lines):
            write_atomic(path, b"".join(whole))
        for number, line in enumerate(whole, start=1):
            try:
                self._take(cast("dict[str, Any]", msgspec.json.decode(line)))
            except (ValueError, TypeError, msgspec.DecodeError) as err:
                raise DataError(
                    f"{path}: line {number} is not a step or evaluation of this version of AstraFlow: {err}; "
                    "delete the file, so that it is written again from the journal"
                ) from err
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._end = self._file.tell()
        """Up to this position the file holds whole lines."""
        self._unwritten: deque[bytes] = deque()
        self.failure: OSError | None = None
        """Why lines wait for the disk; None if no line waits."""

    def _take(self, columns: dict[str, Any]) -> None:
        row = MetricRow.from_flat(columns)
        self._note(row)
        if row.kind == "eval":
            self.earlier_evals.append(eval_of(columns))

    def last_step(self, policy: str) -> int:
        """Number of the newest step of a policy in the file, as its record counts them: from 0; -1 without
        one."""
        return self._num_steps.get(policy, 0) - 1

    def write(self, record: StepRecord | EvalRecord) -> None:
        """Adds a line. While the disk is full, lines wait in memory for the next call, and `failure` is
        set."""
        row = row_of(record)
        self._unwritten.append(msgspec.json.encode(row.flat) + b"\n")
        self._note(row)
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

    def _note(self, row: MetricRow) -> None:
        if row.kind == "step":
            self._num_steps[row.policy] = row.step
        else:
            self.num_evals += 1
