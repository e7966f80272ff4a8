"""Event files for TensorBoard, written without torch: one folder per policy, and one per evaluation set."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer import event_file_writer

from astraflow.addons.trackers.config import TensorBoardConfig
from astraflow.metrics import MetricRow
from astraflow.recipe.trackers import TrackedRun

__all__ = ["TensorBoardTracker"]


class _EventWriter(Protocol):
    """The methods of TensorBoard's event writer that are used here."""

    def add_event(self, event: object) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


# TensorBoard has no type information for generated messages or for its writer.
_make_event = cast("Callable[..., object]", vars(event_pb2)["Event"])
_make_writer = cast("Callable[[str], _EventWriter]", event_file_writer.EventFileWriter)


class TensorBoardTracker:
    """Implements `Tracker`. Adds a file at each start; TensorBoard shows all files of a folder as one run."""

    def __init__(self, config: TensorBoardConfig, run: TrackedRun) -> None:
        self._folder = Path(config.folder).expanduser() if config.folder else run.run_folder / "tensorboard"
        self._writers: dict[Path, _EventWriter] = {}

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds one event per row, with one scalar per number."""
        for row in map(MetricRow.from_flat, rows):
            values = [
                {"tag": name, "simple_value": value}
                for name, value in row.values.items()
                if value is not None
            ]
            event = _make_event(wall_time=row.at_s, step=row.step, summary={"value": values})
            self._writer(row).add_event(event)
        for writer in self._writers.values():
            writer.flush()

    def _writer(self, row: MetricRow) -> _EventWriter:
        folder = self._folder / row.policy / (f"eval-{row.eval_set}" if row.kind == "eval" else "")
        if folder not in self._writers:
            self._writers[folder] = _make_writer(str(folder))
        return self._writers[folder]

    def close(self) -> None:
        """Closes the event files."""
        for writer in self._writers.values():
            writer.close()
