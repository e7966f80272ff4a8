"""Trackers of a recipe: where the metrics of a run are shown beside `metrics.jsonl`."""

import re
from typing import Annotated, Literal

from pydantic import Field

from astraflow.config import Config, Use

__all__ = [
    "MlflowConfig",
    "TensorBoardConfig",
    "TrackerConfig",
    "TrackioConfig",
    "WandbConfig",
    "tracker_key",
]


class TensorBoardConfig(Config):
    """Event files for TensorBoard, in one folder per policy. Needs `astraflow[tensorboard]`, not torch."""

    name: Literal["tensorboard"] = "tensorboard"
    folder: str = ""
    """Folder of the event files; default: `tensorboard` in the run folder."""


class WandbConfig(Config):
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


class TrackioConfig(Config):
    """Trackio, a local dashboard (`trackio show`). Needs `astraflow[trackio]`."""

    name: Literal["trackio"] = "trackio"
    project: str = ""
    """Project; default: the recipe's name."""
    group: str = ""
    """Group of the run within the project."""
    space: str = ""
    """Id of a Hugging Face Space that shows the dashboard; default: this machine only."""


class MlflowConfig(Config):
    """MLflow. Needs `astraflow[mlflow]`."""

    name: Literal["mlflow"] = "mlflow"
    uri: str = ""
    """Tracking URI of a server or database; default: the file `mlflow.db` (SQLite) in the run folder."""
    experiment: str = ""
    """Experiment; default: the recipe's name."""


TrackerConfig = Annotated[
    TensorBoardConfig | WandbConfig | TrackioConfig | MlflowConfig | Use, Field(discriminator="name")
]


def tracker_key(config: TrackerConfig) -> str:
    """What names a tracker in messages and in the run folder, e.g. `wandb`, or `my_trackers-Board` for a
    class of the user's own."""
    return re.sub(r"[^\w.]", "-", config.use) if isinstance(config, Use) else config.name
