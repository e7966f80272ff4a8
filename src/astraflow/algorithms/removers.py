"""Which completed groups go when there are too many: the choice of removers.

Groups that are too old are no choice: every take sweeps them, whatever the remover.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from astraflow.algorithms.config import RemoverConfig
from astraflow.protocols import Completed

__all__ = ["REMOVERS", "Remover", "capacity", "keep", "make_remover"]

Remover = Callable[[Mapping[int, Completed]], tuple[int, ...]]
"""From the ready groups, in completion order, to those that are evicted."""


def make_remover(config: RemoverConfig) -> Remover:
    """The remover of a config."""
    return partial(REMOVERS[config.name], **config.model_dump(exclude={"name"}))


def keep(ready: Mapping[int, Completed]) -> tuple[int, ...]:
    """None: the tickets bound how many there are."""
    return ()


def capacity(
    ready: Mapping[int, Completed], *, num_groups: int = 128, evict: Literal["oldest", "stalest"] = "stalest"
) -> tuple[int, ...]:
    """Those above `num_groups`: first drawn first, or oldest token first.

    An evicted group gives its ticket back, so rollout goes on while the trainer is busy, and the batch is of
    the freshest groups; what that costs is counted as `evicted`.
    """
    surplus = len(ready) - num_groups
    if surplus <= 0:
        return ()
    order = sorted(ready) if evict == "oldest" else sorted(ready, key=lambda i: (ready[i].oldest_version, i))
    return tuple(order[:surplus])


REMOVERS: dict[str, Callable[..., tuple[int, ...]]] = {"capacity": capacity, "keep": keep}
"""Built-in removers by name."""
