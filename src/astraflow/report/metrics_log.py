"""Writes `metrics.jsonl`: one line per committed step or finished evaluation, each exactly once, even across
restarts.

Each line is a flat JSON object with the columns of a `MetricRow`; `pandas.read_json(path, lines=True)` reads
the file.
"""

import errno
import os
from collections import Counter, deque
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from astraflow.metrics import MetricRow, eval_from_columns, row_from_record
from astraflow.recipe.run_folder import set_aside, write_atomic
from astraflow.types import EvalRecord, StepRecord

__all__ = ["MetricsLog"]


class MetricsLog:
    """Appends rows to a run's `metrics.jsonl`. Close it after use.

    The constructor reads the file, so that `last_step` and `num_evals` say where to continue. A last line
    that a crash cut short is dropped and written again. If any other line is not a row, the file is set
    aside, and the rows come again from the journal.
    """

    def __init__(self, path: Path) -> None:
        self.earlier_evals: list[EvalRecord] = []
        """The evaluations that were in the file when it was opened."""
        self.num_evals = 0
        self._path = path
        self._num_steps: Counter[str] = Counter()
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if len(whole) < len(lines):
            write_atomic(path, b"".join(whole))
        try:
            for line in whole:
                columns = cast("dict[str, Any]", msgspec.json.decode(line))
                row = MetricRow.from_flat(columns)
                self._note(row)
                if row.kind == "eval":
                    self.earlier_evals.append(eval_from_columns(columns))
        except (ValueError, TypeError) as err:
            set_aside(path, f"{path}: a line is not a step or evaluation: {err}")
            self.earlier_evals = []
            self.num_evals = 0
            self._num_steps.clear()
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._end = self._file.tell()
        """The file has whole lines up to this position."""
        self._unwritten: deque[bytes] = deque()
        self.failure: OSError | None = None
        """Why lines wait in memory; None if no line waits."""

    def last_step(self, policy: str) -> int:
        """Newest step of a policy in the file, counted from 0 like the records; -1 if there is none."""
        return self._num_steps.get(policy, 0) - 1

    def write(self, record: StepRecord | EvalRecord) -> None:
        """Appends a line. While the disk is full, lines stay in memory until the next call, and `failure` is
        set."""
        row = row_from_record(record)
        self._unwritten.append(msgspec.json.encode(row.flat) + b"\n")
        self._note(row)
        self.retry()

    def retry(self) -> None:
        """Writes waiting lines, as far as the disk has space."""
        try:
            while self._unwritten:
                self._write_line(self._unwritten[0])
                self._unwritten.popleft()
        except OSError as err:
            self.failure = err
        else:
            self.failure = None

    def _write_line(self, line: bytes) -> None:
        """Writes a whole line or nothing: if only a part fits on the disk, it is cut off again.

        Raises: OSError.
        """
        written = self._file.write(line)
        if written != len(line):
            os.ftruncate(self._file.fileno(), self._end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._end += len(line)

    def close(self) -> None:
        """Tries once more to write waiting lines, then closes the file. A resumed run writes what is
        missing."""
        self.retry()
        self._file.close()

    def _note(self, row: MetricRow) -> None:
        if row.kind == "step":
            self._num_steps[row.policy] = row.step
        else:
            self.num_evals += 1
