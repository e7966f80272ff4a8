"""The base class of a launcher's config that an installed package adds to the section `launcher`."""

from typing import ClassVar

from astraflow.config import Variant
from astraflow.protocols import Launcher

__all__ = ["LauncherVariant"]


class LauncherVariant(Variant):
    """Base of the config of a launcher that an installed package adds."""

    spans_machines: ClassVar[bool] = True
    """Whether rollout services run on other machines. If not, a run checks before it starts that this machine
    has their devices and their engine."""

    def make(self) -> Launcher:
        """Makes the launcher. A launcher that spans machines is also a `MultiMachineLauncher`.

        Raises: ConfigError if it can't start processes.
        """
        raise NotImplementedError
