"""A metric is (name, value, reduction). `reduce_metrics` makes one of several; sinks keep or show them.

Each `write` gives a sink the metrics of one step of one policy. A sink owns its file until `close`, and never
fetches metrics by itself.
"""

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TextIO, cast

import msgspec

from astraflow.errors import ConfigError, WireError
from astraflow.types import MetricItem, Reduction

__all__ = [
    "ConsoleSink",
    "JsonlSink",
    "TensorBoardSink",
    "reduce_metrics",
]

_log = logging.getLogger(__name__)
_RESERVED = ("policy", "step", "at_s")
"""Columns of a `JsonlSink` that no metric may be named after."""


# --- several numbers become one -------------------------------------------------------------------


def reduce_metrics(groups: Iterable[Sequence[MetricItem]]) -> tuple[MetricItem, ...]:
    """One item per name, in the order of first appearance, reduced over the groups that have the name.

    If any of the values is NaN, so is the result. The exception is `last`, which is the value of the last
    group that has the name.

    Example: `reduce_metrics(episode.metrics for episode in episodes)`.

    Raises: WireError if a name comes with two reductions.
    """
    found: dict[str, tuple[Reduction, list[float]]] = {}
    for group in groups:
        for item in group:
            reduction, values = found.setdefault(item.name, (item.reduction, []))
            if reduction != item.reduction:
                raise WireError(
                    f"metric {item.name!r} has reductions {reduction!r} and {item.reduction!r}; a name "
                    "has one"
                )
            values.append(item.value)
    return tuple(
        MetricItem(name, _reduced(reduction, values), reduction)
        for name, (reduction, values) in found.items()
    )


def _reduced(reduction: Reduction, values: Sequence[float]) -> float:
    if reduction == "last":
        return values[-1]
    # Without this, the place of a NaN would decide whether `max` and `min` return it.
    if any(math.isnan(value) for value in values):
        return math.nan
    match reduction:
        case "mean":
            return math.fsum(values) / len(values)
        case "sum":
            return math.fsum(values)
        case "max":
            return max(values)
        case "min":
            return min(values)


# --- sinks ----------------------------------------------------------------------------------------


class JsonlSink:
    """Appends one JSON object per step, `{"policy", "step", "at_s", ...metrics}`, and flushes it at once.

    A line that a crash cut short is removed when the file is opened again. JSON has neither NaN nor infinity;
    both are written as null.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self._file = path.open("ab")
        self._clock = clock

    def write(self, policy: str, step: int, metrics: Sequence[MetricItem]) -> None:
        """Appends the line of a step. Raises: WireError for a metric named like another column."""
        row: dict[str, object] = {"policy": policy, "step": step, "at_s": self._clock()}
        for item in metrics:
            if item.name in _RESERVED:
                raise WireError(
                    f"metric name {item.name!r} is the name of another column of the file; rename it"
                )
            row[item.name] = item.value
        self._file.write(msgspec.json.encode(row) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class ConsoleSink:
    """One plain line per step, for logs and pipes: `actor step 3: reward_mean 0.812 ...`."""

    def __init__(self, stream: TextIO = sys.stdout) -> None:
        self._stream = stream

    def write(self, policy: str, step: int, metrics: Sequence[MetricItem]) -> None:
        """Writes and flushes the line."""
        numbers = "  ".join(f"{item.name} {item.value:.4g}" for item in metrics)
        self._stream.write(f"{policy} step {step}: {numbers}\n")
        self._stream.flush()

    def close(self) -> None:
        """Leaves the stream open: it belongs to the caller."""


class _EventWriter(Protocol):
    """The methods of TensorBoard's event writer that are used here."""

    def add_event(self, event: object) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Event files for TensorBoard, in one folder per policy. It needs the extra `trackers`, but not torch.

    Raises: ConfigError if TensorBoard is not installed.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        _load_tensorboard()
        self._folder = folder
        self._clock = clock
        self._writers: dict[str, _EventWriter] = {}

    def write(self, policy: str, step: int, metrics: Sequence[MetricItem]) -> None:
        """Adds one scalar per metric."""
        make_writer, make_event = _load_tensorboard()
        if policy not in self._writers:
            self._writers[policy] = make_writer(str(self._folder / policy))
        values = [{"tag": item.name, "simple_value": item.value} for item in metrics]
        event = make_event(wall_time=self._clock(), step=step, summary={"value": values})
        self._writers[policy].add_event(event)
        self._writers[policy].flush()

    def close(self) -> None:
        """Closes the event files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


def _load_tensorboard() -> tuple[Callable[[str], _EventWriter], Callable[..., object]]:
    try:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer import event_file_writer
    except ImportError as err:
        raise ConfigError("TensorBoard is not installed; pip install 'astraflow[trackers]'") from err
    # TensorBoard has no type information for generated messages.
    make_event = cast("Callable[..., object]", vars(event_pb2)["Event"])
    return cast("Callable[[str], _EventWriter]", event_file_writer.EventFileWriter), make_event


def _drop_torn_line(path: Path) -> None:
    """Removes what follows the last newline of a file."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        _log.warning("%s: %d bytes of a line cut short by a crash are removed", path, len(data) - whole)
        os.truncate(path, whole)
