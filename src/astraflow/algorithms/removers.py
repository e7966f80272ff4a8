"""Removers: decide which complete groups are evicted when too many wait.

Every take drops groups that are too stale, whatever the remover.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from astraflow.config import Config, Use
from astraflow.protocols import CompleteGroup

__all__ = ["CapacityRemover", "KeepRemover", "RemoverConfig"]


class KeepRemover(Config):
    """Evicts nothing; the number of tickets bounds how many groups wait."""

    name: Literal["keep"] = "keep"

    def remove(self, ready: Mapping[int, CompleteGroup], num_groups: int) -> tuple[int, ...]:
        """Always empty."""
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
        """The groups in excess of the capacity, in the order of `evict`.

        An evicted group returns its ticket, so rollout continues while the trainer is busy. The metric
        `evicted` counts the groups that this wastes.
        """
        surplus = max(0, len(ready) - self.num_groups)
        if self.evict == "oldest":
            return tuple(sorted(ready)[:surplus])
        return tuple(sorted(ready, key=lambda i: (ready[i].oldest_version, i))[:surplus])


RemoverConfig = Annotated[KeepRemover | CapacityRemover | Use, Field(discriminator="name")]
