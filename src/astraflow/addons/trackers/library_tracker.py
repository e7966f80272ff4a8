"""The base of the trackers that come with AstraFlow.

Each has the name of its library and of the extra that installs it. Only the tracker's own process imports the
library.
"""

from importlib.util import find_spec

from astraflow.errors import ConfigError
from astraflow.recipe.trackers import TrackerVariant

__all__ = ["LibraryTracker"]


class LibraryTracker(TrackerVariant):
    """Base of the config of a tracker that needs a library of the same name."""

    def check(self) -> None:
        """Raises ConfigError if the library is not installed here."""
        # Python would find a folder of that name, such as the one that W&B creates, as a package without a
        # file.
        if (spec := find_spec(self.name)) is None or spec.origin is None:
            raise ConfigError(
                f"trackers: {self.name} is not installed where the run is started; pip install "
                f"'astraflow[{self.name}]', or leave it out with trackers=[]"
            )
