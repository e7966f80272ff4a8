"""Builds the trackers that a recipe names, and finds out beforehand whether they can be built.

The libraries are imported in the process of the tracker, nowhere else.
"""

import importlib
from importlib.util import find_spec

from astraflow.addons.trackers.config import TrackerConfig
from astraflow.addons.trackers.tracked_run import TrackedRun
from astraflow.config import Use, check_args, load_attr
from astraflow.errors import ConfigError
from astraflow.protocols import Tracker

__all__ = ["TRACKERS", "check_tracker", "make_tracker"]

TRACKERS = {
    "tensorboard": "TensorBoardTracker",
    "wandb": "WandbTracker",
    "trackio": "TrackioTracker",
    "mlflow": "MlflowTracker",
}
"""Name of a tracker -> its class, in the module of the same name here. The library has that name, too."""


def check_tracker(config: TrackerConfig) -> None:
    """Raises: ConfigError if the tracker's library is not installed here, or a class of the user's own cannot
    be loaded or does not take its arguments."""
    if isinstance(config, Use):
        check_args(load_attr(config.use, where="trackers.use"), config.args, where="trackers.args")
    # A folder of that name, such as W&B makes, would be found as a package without a file.
    elif (spec := find_spec(config.name)) is None or spec.origin is None:
        raise ConfigError(
            f"trackers: {config.name} is not installed where the run is started; pip install "
            f"'astraflow[{config.name}]', or leave it out with trackers=[]"
        )


def make_tracker(config: TrackerConfig, run: TrackedRun) -> Tracker:
    """The tracker, with its run open. Raises: ConfigError as `check_tracker`, and whatever its library
    raises."""
    check_tracker(config)
    if isinstance(config, Use):
        return load_attr(config.use, where="trackers.use")(run, **config.args)
    module = importlib.import_module(f"astraflow.addons.trackers.{config.name}")
    return getattr(module, TRACKERS[config.name])(config, run)
