"""The pool: the rollout services of a run. Here, their number stays the same.

Add-ons have subclasses: `pool` one that sizes itself, and `lending` one whose trainers lend their devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from astraflow import added
from astraflow.processes.supervisor import Supervisor
from astraflow.protocols import ProcessSpec
from astraflow.recipe.cluster_config import ClusterConfig
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.types import StatusReply

__all__ = ["Look", "Pool", "Seat", "make_pool", "seats_of"]


@dataclass(frozen=True, slots=True)
class Seat:
    """A service that the pool may have: its name, its kind, and what it costs and generates."""

    name: str
    kind: str = ""
    price: float = 1.0
    """Cost of a unit of speed."""
    speed: float = 1.0


def seats_of(cluster: ClusterConfig) -> tuple[Seat, ...]:
    """The services that a pool may have, kind by kind: `rollout-0`, `rollout-1`, and so on."""
    kinds = [(name, kind) for name, kind in cluster.kinds.items() for _ in range(kind.most)]
    return tuple(
        Seat(f"rollout-{idx}", name, kind.price, kind.speed) for idx, (name, kind) in enumerate(kinds)
    )


@dataclass(frozen=True, slots=True)
class Look:
    """The results of a look at the pool."""

    note: str = ""
    """The decision, in words; empty if there was none."""
    asked_to_leave: tuple[str, ...] = ()
    """Handles of the services that the dataflow must ask to leave."""


class Pool:
    """The rollout services of a run.

    Example: start `pool.first_specs`, then call `pool.look(status, supervisor)` every few seconds.
    """

    def __init__(self, first_specs: Sequence[ProcessSpec]) -> None:
        self.first_specs = tuple(first_specs)
        """The processes with which the run starts."""

    @property
    def text(self) -> str:
        """The pool's size, and the last decision with its reason; empty if the size is fixed."""
        return ""

    def look(self, status: StatusReply, supervisor: Supervisor) -> Look:
        """Makes at most one decision, and starts and stops processes. Returns what is left to the caller."""
        return Look()

    def close(self) -> None:
        """Ends the pool, after all processes have ended."""


def make_pool(
    recipe: Recipe, folder: RunFolder, specs: Sequence[ProcessSpec], clock: Callable[[], float]
) -> Pool:
    """Makes the pool of a run. `specs`: all processes, including every service that the pool may ever have.

    Raises: ConfigError if the pool sizes itself or lends devices, and this installation cannot do that.
    """
    if recipe.cluster.lend:
        return added.make_lending_pool(recipe, folder, specs)
    if not recipe.cluster.max_services:
        return Pool(specs)
    return added.SizedPool(recipe, folder, specs, clock)
