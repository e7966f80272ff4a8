"""MLflow: one run of an experiment, on a server or in a database of the run folder."""

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from astraflow.addons.trackers.library_tracker import LibraryTracker
from astraflow.metrics import MetricRow
from astraflow.recipe.trackers import TrackedRun

__all__ = ["MlflowConfig", "MlflowTracker"]

_MOST_METRICS = 1000
_MOST_PARAMS = 100
"""MLflow's limits for one request."""
_LONGEST_NAME = 250
_LONGEST_PARAM = 500


class MlflowConfig(LibraryTracker):
    """MLflow. Needs `astraflow[mlflow]`."""

    name: Literal["mlflow"] = "mlflow"
    uri: str = ""
    """Tracking URI of a server or database; default: the file `mlflow.db` (SQLite) in the run folder."""
    experiment: str = ""
    """Experiment; default: the recipe's name."""
    group: str = ""
    """Group of the run within the experiment: the value of its tag `group`."""
    tags: tuple[str, ...] = ()
    """Tags of the run. `lr=0.1` sets the tag `lr`; a tag without a value has the value `true`."""

    def make(self, run: TrackedRun) -> "MlflowTracker":
        """Makes the tracker, and opens its run."""
        return MlflowTracker(self, run)


class MlflowTracker:
    """Implements `Tracker`. Keys of the recipe become parameters of the run when it is created."""

    def __init__(self, config: MlflowConfig, run: TrackedRun) -> None:
        # Any: the library is not installed where types are checked.
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient(config.uri or f"sqlite:///{run.run_folder / 'mlflow.db'}")
        experiment = config.experiment or run.project
        found = self._client.get_experiment_by_name(experiment)
        # Only an experiment on this machine must be given the location of its files; a server knows its own.
        artifacts = None if config.uri else (run.folder / "artifacts").as_uri()
        experiment_id = (
            found.experiment_id if found else self._client.create_experiment(experiment, artifacts)
        )
        path = run.folder / "run_id"
        if path.is_file():
            self._run_id = path.read_text(encoding="utf-8")
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            created = self._client.create_run(experiment_id, run_name=run.name)
            self._run_id = run.keep("run_id", created.info.run_id)
            params = [
                self._entities.Param(_key(path), value[:_LONGEST_PARAM])
                for path, value in _leaves(run.recipe)
            ]
            for batch in _batches(params, _MOST_PARAMS):
                self._client.log_batch(self._run_id, params=batch)
        tags = [f"group={config.group}"] if config.group else []
        for name, _, value in (tag.partition("=") for tag in [*tags, *config.tags]):
            self._client.set_tag(self._run_id, _key(name), value or "true")

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs each number at its policy's step."""
        metrics = [
            self._entities.Metric(_key(name), value, round(row.at_s * 1000), row.step)
            for row in map(MetricRow.from_flat, rows)
            for name, value in row.named.items()
        ]
        for batch in _batches(metrics, _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=batch)

    def close(self) -> None:
        """Ends the run."""
        self._client.set_terminated(self._run_id)


def _batches(items: list[Any], most: int) -> Iterator[list[Any]]:
    return (items[first : first + most] for first in range(0, len(items), most))


def _key(name: str) -> str:
    """Returns a name with only the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:_LONGEST_NAME]


def _leaves(node: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted path, value as text) for each key of the recipe."""
    if not isinstance(node, Mapping):
        yield path, str(node)
        return
    for key, value in cast("Mapping[str, object]", node).items():
        yield from _leaves(value, f"{path}.{key}" if path else key)
