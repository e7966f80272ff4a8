"""Event files for TensorBoard, written without torch: one folder per policy, and one per evaluation set."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from astraflow.addons.trackers.library_tracker import LibraryTracker
from astraflow.metrics import MetricRow
from astraflow.recipe.trackers import TrackedRun

__all__ = ["TensorBoardConfig", "TensorBoardTracker"]


class _EventWriter(Protocol):
    """The methods of TensorBoard's event writer that are used here."""

    def add_event(self, event: object) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class TensorBoardConfig(LibraryTracker):
    """Event files for TensorBoard, in one folder per policy. Needs `astraflow[tensorboard]` but not torch."""

    name: Literal["tensorboard"] = "tensorboard"
    folder: str = ""
    """Folder of the event files; default: `tensorboard` in the run folder."""

    def make(self, run: TrackedRun) -> "TensorBoardTracker":
        """Makes the tracker, and opens its run."""
        return TensorBoardTracker(self, run)


class TensorBoardTracker:
    """Implements `Tracker`. Adds a file at each start; TensorBoard shows all files of a folder as one run."""

    def __init__(self, config: TensorBoardConfig, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer import event_file_writer

        # TensorBoard has no type information for generated messages or for its writer.
        self._make_event = cast("Callable[..., object]", vars(event_pb2)["Event"])
        self._make_writer = cast("Callable[[str], _EventWriter]", event_file_writer.EventFileWriter)
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
            event = self._make_event(wall_time=row.at_s, step=row.step, summary={"value": values})
            folder = self._folder / row.policy / (f"eval-{row.eval_set}" if row.kind == "eval" else "")
            if folder not in self._writers:
                self._writers[folder] = self._make_writer(str(folder))
            self._writers[folder].add_event(event)
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Closes the event files."""
        for writer in self._writers.values():
            writer.close()
