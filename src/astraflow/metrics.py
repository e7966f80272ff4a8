"""Metrics: a metric is (name, value, reduction); several become one, and sinks show or keep them.

`reduce_metrics` is pure. A sink takes the metrics of one step of one policy and owns its file or stream until
`close`; sinks never fetch metrics by themselves.
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

from astraflow.errors import ConfigError, DataError, WireError
from astraflow.protocols import MetricSink
from astraflow.types import MetricItem

__all__ = [
    "ConsoleSink",
    "JsonlSink",
    "MetricRow",
    "MultiSink",
    "TensorBoardSink",
    "load_jsonl",
    "reduce_metrics",
]

_log = logging.getLogger(__name__)
_RESERVED = ("policy", "step", "at_s")


# --- several numbers become one -------------------------------------------------------------------


def reduce_metrics(
    groups: Iterable[Sequence[MetricItem]], weights: Sequence[float] | None = None
) -> tuple[MetricItem, ...]:
    """One item a name, in the order of first appearance.

    `mean` is weighted by the group's weight (1 without `weights`): sum(w * x) / sum(w); `sum`, `max`, `min`
    take no weights; `last` is the value of the last group that has the name. A name that only groups of
    weight 0 have gets NaN as its mean. NaN in gives NaN out.

    Example: `reduce_metrics([a.metrics, b.metrics], weights=[a.num_tokens, b.num_tokens])`.
    Raises: WireError if a name comes with two reductions, or the number of weights is wrong.
    """
    groups = [tuple(group) for group in groups]
    if weights is not None and len(weights) != len(groups):
        raise WireError(f"{len(weights)} weights for {len(groups)} groups of metrics")
    found: dict[str, tuple[MetricItem, list[float], list[float]]] = {}
    for idx, group in enumerate(groups):
        weight = 1.0 if weights is None else weights[idx]
        for item in group:
            first, values, value_weights = found.setdefault(item.name, (item, [], []))
            if first.reduction != item.reduction:
                raise WireError(
                    f"metric {item.name!r} has reductions {first.reduction!r} and {item.reduction!r}; a name "
                    "has one"
                )
            values.append(item.value)
            value_weights.append(weight)
    return tuple(
        MetricItem(name, _reduced(item.reduction, values, value_weights), item.reduction)
        for name, (item, values, value_weights) in found.items()
    )


def _reduced(reduction: str, values: Sequence[float], weights: Sequence[float]) -> float:
    if reduction == "mean":
        total = math.fsum(weights)
        return math.fsum(w * x for w, x in zip(weights, values, strict=True)) / total if total else math.nan
    if any(math.isnan(x) for x in values) and reduction != "last":
        return math.nan
    choose: dict[str, Callable[[Sequence[float]], float]] = {"sum": math.fsum, "max": max, "min": min}
    return choose[reduction](values) if reduction in choose else values[-1]


# --- sinks ----------------------------------------------------------------------------------------


class JsonlSink:
    """Appends one JSON object a step: `{"policy", "step", "at_s", ...metrics}`; flushed at once.

    A line that a crash cut short is removed when the file is opened again. JSON has no NaN and no infinity:
    they are written as null.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self._file = path.open("ab")
        self._clock = clock

    def write(self, policy: str, step: int, metrics: Sequence[MetricItem]) -> None:
        """Appends the line of a step. Raises: WireError for a metric named like a column of its own."""
        row: dict[str, object] = {"policy": policy, "step": step, "at_s": self._clock()}
        for item in metrics:
            if item.name in _RESERVED:
                raise WireError(f"metric name {item.name!r} is taken by the file's own column; rename it")
            row[item.name] = item.value
        self._file.write(msgspec.json.encode(row) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class ConsoleSink:
    """One plain line a step, for logs and pipes: `actor step 3: reward_mean 0.812 ...`."""

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
    """The part of TensorBoard's event writer that is used here."""

    def add_event(self, event: object) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Event files for TensorBoard, one folder a policy; needs the extra `trackers`, not torch.

    Raises: ConfigError if TensorBoard is not installed.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        _load_tensorboard()
        self._folder = folder
        self._clock = clock
        self._writers: dict[str, _EventWriter] = {}

    def write(self, policy: str, step: int, metrics: Sequence[MetricItem]) -> None:
        """Adds one scalar a metric."""
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


class MultiSink:
    """Writes to several sinks in order; owns them."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, policy: str, step: int, metrics: Sequence[MetricItem]) -> None:
        """Hands the metrics to every sink; the first failure is raised."""
        for sink in self._sinks:
            sink.write(policy, step, metrics)

    def close(self) -> None:
        """Closes every sink."""
        for sink in self._sinks:
            sink.close()


# --- reading back ---------------------------------------------------------------------------------


class MetricRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a `JsonlSink`. Example: `load_jsonl(path)[-1].metrics["reward_mean"]`."""

    policy: str
    step: int
    at_s: float
    metrics: dict[str, float]
    """NaN where the file says null."""


def load_jsonl(path: Path) -> tuple[MetricRow, ...]:
    """The rows of a `JsonlSink`, in file order; a last line without its end is left out.

    Raises: DataError if the file cannot be read or a line is broken.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as err:
        raise DataError(f"{path} cannot be read: {err.strerror}") from err
    return tuple(_row(path, number, line) for number, line in enumerate(lines[:-1], start=1))


def _row(path: Path, number: int, line: bytes) -> MetricRow:
    try:
        raw = msgspec.json.decode(line, type=dict[str, str | int | float | None])
        metrics = {name: math.nan if x is None else x for name, x in raw.items() if name not in _RESERVED}
        head = {name: raw.get(name) for name in _RESERVED}
        return msgspec.convert({**head, "metrics": metrics}, MetricRow)
    except msgspec.MsgspecError as err:
        raise DataError(f"{path}, line {number}: {err}") from err


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        _log.warning("%s: %d bytes of a line cut short by a crash are removed", path, len(data) - whole)
        os.truncate(path, whole)
