"""Implements `astraflow traces`: follows a run folder and sends spans and metrics to a collector."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from astraflow.addons.view.log_tail import LogEntry, LogTail
from astraflow.addons.view.traces import Span, TraceMaker
from astraflow.dataflow.journal.records import decode_records
from astraflow.dataflow.journal.segments import RECORDS
from astraflow.errors import Error, JournalError
from astraflow.recipe.run_folder import RunFolder
from astraflow.report.ending import known_end
from astraflow.user_input.user_files import read_part

__all__ = ["Takes", "TraceExport", "follow"]

_BATCH = 512
"""Maximum number of spans per request."""
_PAUSE_S = 1.0
"""Time between two reads of a live run."""


class Takes(Protocol):
    """Receives spans and rows. `otlp.Collector` is an implementation."""

    def send(self, spans: Sequence[Span]) -> None:
        """Receives spans."""
        ...

    def send_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Receives lines of `metrics.jsonl`."""
        ...


class TraceExport:
    """Sends the spans and metrics of a run as they appear.

    Example: `TraceExport(RunFolder(path), collector, run_id="r1").take()`, repeated while the run continues.
    """

    def __init__(self, folder: RunFolder, takes: Takes, *, run_id: str, every: int = 1) -> None:
        self._folder = folder
        self._takes = takes
        self._maker = TraceMaker(run_id, every=every)
        self._tail = LogTail(folder.journal / "segments", (0, 0))
        self._last_seq = 0
        self._metrics_at = 0
        self.num_spans = 0
        """Number of spans sent so far."""
        self.problems: list[str] = []
        """Descriptions of what couldn't be read."""

    def take(self) -> None:
        """Sends what is new. Raises: whatever the collector raises."""
        waiting: list[Span] = []
        for item in self._tail.read():
            if not isinstance(item, LogEntry):
                self.problems.append(item.text)
                continue
            if item.kind == RECORDS:
                waiting += self._spans(item)
            if len(waiting) >= _BATCH:
                self._send(waiting)
                waiting = []
        self._send(waiting)
        self._take_rows()

    def _spans(self, entry: LogEntry) -> list[Span]:
        spans: list[Span] = []
        try:
            for record in decode_records(entry.data):
                if record.seq > self._last_seq:
                    self._last_seq = record.seq
                    spans += self._maker.spans(record)
        except JournalError as err:
            self.problems.append(str(err))
        return spans

    def _send(self, spans: Sequence[Span]) -> None:
        for start in range(0, len(spans), _BATCH):
            self._takes.send(spans[start : start + _BATCH])
        self.num_spans += len(spans)

    def _take_rows(self) -> None:
        while True:
            data = read_part(self._folder.metrics, "metrics", self._metrics_at)
            whole = [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
            if not whole:
                return
            rows: list[dict[str, Any]] = []
            for line in whole:
                try:
                    rows.append(msgspec.json.decode(line, type=dict[str, Any]))
                except (msgspec.MsgspecError, RecursionError) as err:
                    self.problems.append(f"a line of metrics.jsonl is not a row: {err}")
            if rows:
                self._takes.send_rows(rows)
            self._metrics_at += sum(map(len, whole))


def follow(export: TraceExport, run_dir: Path, *, until_end: bool) -> None:
    """Sends what exists now and, with `until_end`, everything new until the run has ended."""
    is_over = False
    while not is_over:
        is_over = not until_end or not _is_running(run_dir)  # before reading, so that nothing is missed
        export.take()
        if not is_over:
            time.sleep(_PAUSE_S)


def _is_running(run_dir: Path) -> bool:
    try:
        return known_end(RunFolder(run_dir)).state == "running"
    except (Error, OSError):
        return False
