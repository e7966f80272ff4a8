"""The base class of the configs of losses that installed packages add. Imports no torch."""

from collections.abc import Callable
from typing import Any, ClassVar

from astraflow.config import Variant

__all__ = ["LossVariant"]


class LossVariant(Variant):
    """Base of a loss's config that an installed package adds. Its fields are the loss's keyword arguments."""

    learns_from_rewards: ClassVar[bool] = True
    """False: it needs no advantages, so a group may be one episode."""

    def make(self) -> Callable[..., Any]:
        """Imports the loss: a function of `LossInputs` and the arguments, which returns a `LossOutput`."""
        raise NotImplementedError
