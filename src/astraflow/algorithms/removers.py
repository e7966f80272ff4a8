"""Which complete groups are evicted when more wait than a batch holds: the choice of removers.

Every take drops groups that are too stale, whatever the remover.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from astraflow.algorithms.own import own_object
from astraflow.config import Config, Use
from astraflow.protocols import CompleteGroup, Remover

__all__ = ["CapacityRemover", "KeepRemover", "RemoverConfig", "make_remover"]


class KeepRemover(Config):
    """Evicts nothing; the number of tickets bounds how many groups wait."""

    name: Literal["keep"] = "keep"

    def remove(self, ready: Mapping[int, CompleteGroup], num_groups: int) -> tuple[int, ...]:
        """None."""
        return ()


class CapacityRemover(Config):
    """Evicts complete groups above a given number; rollout continues, and batches consist of the freshest
    groups."""

    name: Literal["capacity"] = "capacity"
    num_groups: int = Field(default=128, ge=1)
    """Number of complete groups that may wait; at least `groups_per_batch`."""
    evict: Literal["oldest", "stalest"] = "stalest"
    """`oldest`: the group that was drawn first goes first. `stalest`: the group with the oldest token goes
    first."""

    def remove(self, ready: Mapping[int, CompleteGroup], num_groups: int) -> tuple[int, ...]:
        """Those above the capacity: first drawn first, or oldest token first.

        An evicted group gives its ticket back, so rollout continues while the trainer is busy; what that
        costs is counted as `evicted`.
        """
        surplus = max(0, len(ready) - self.num_groups)
        if self.evict == "oldest":
            return tuple(sorted(ready)[:surplus])
        return tuple(sorted(ready, key=lambda i: (ready[i].oldest_version, i))[:surplus])


RemoverConfig = Annotated[KeepRemover | CapacityRemover | Use, Field(discriminator="name")]


def make_remover(config: RemoverConfig) -> Remover:
    """The remover of a table. Raises: ConfigError if the user's own cannot be made."""
    if isinstance(config, Use):
        return own_object(config, where="table.remover", methods=("remove",))
    return config
