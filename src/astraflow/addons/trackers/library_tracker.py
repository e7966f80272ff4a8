"""The trackers that come with AstraFlow.

Each has the name of its library and of the extra that installs it. Only the tracker's own process imports the
library.
"""

from importlib.util import find_spec
from typing import Literal

from astraflow.errors import ConfigError
from astraflow.protocols import Tracker
from astraflow.recipe.trackers import TrackedRun, TrackerVariant

__all__ = [
    "MlflowConfig",
    "TensorBoardConfig",
    "TrackioConfig",
    "WandbConfig",
]


class _LibraryTracker(TrackerVariant):
    def check(self) -> None:
        """Raises ConfigError if the library is not installed here."""
        # Python would find a folder of that name, such as the one that W&B creates, as a package without a
        # file.
        if (spec := find_spec(self.name)) is None or spec.origin is None:
            raise ConfigError(
                f"trackers: {self.name} is not installed where the run is started; pip install "
                f"'astraflow[{self.name}]', or leave it out with trackers=[]"
            )


class TensorBoardConfig(_LibraryTracker):
    """Event files for TensorBoard, in one folder per policy. Needs `astraflow[tensorboard]` but not torch."""

    name: Literal["tensorboard"] = "tensorboard"
    folder: str = ""
    """Folder of the event files; default: `tensorboard` in the run folder."""

    def make(self, run: TrackedRun) -> Tracker:
        """Makes the tracker, and opens its run."""
        from astraflow.addons.trackers.tensorboard import TensorBoardTracker

        return TensorBoardTracker(self, run)


class WandbConfig(_LibraryTracker):
    """Weights & Biases. Needs `astraflow[wandb]`, and for `mode: online` an API key in `WANDB_API_KEY` or
    from `wandb login`."""

    name: Literal["wandb"] = "wandb"
    project: str = ""
    """Project; default: the recipe's name."""
    entity: str = ""
    """User or team; default: that of the API key."""
    group: str = ""
    """Group of the run within the project."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files to `trackers/wandb` in the run folder; `wandb sync` uploads them later."""

    def make(self, run: TrackedRun) -> Tracker:
        """Makes the tracker, and opens its run."""
        from astraflow.addons.trackers.wandb import WandbTracker

        return WandbTracker(self, run)


class TrackioConfig(_LibraryTracker):
    """Trackio, a local dashboard (`trackio show`). Needs `astraflow[trackio]`."""

    name: Literal["trackio"] = "trackio"
    project: str = ""
    """Project; default: the recipe's name."""
    group: str = ""
    """Group of the run within the project."""
    space: str = ""
    """Id of a Hugging Face Space that shows the dashboard; default: this machine only."""

    def make(self, run: TrackedRun) -> Tracker:
        """Makes the tracker, and opens its run."""
        from astraflow.addons.trackers.trackio import TrackioTracker

        return TrackioTracker(self, run)


class MlflowConfig(_LibraryTracker):
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

    def make(self, run: TrackedRun) -> Tracker:
        """Makes the tracker, and opens its run."""
        from astraflow.addons.trackers.mlflow import MlflowTracker

        return MlflowTracker(self, run)
