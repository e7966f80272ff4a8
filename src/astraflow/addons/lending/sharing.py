"""Which trainers share devices with which rollout services, and whether they take turns.

`cluster.lend` pairs each trainer with one of the last rollout services. They take turns on emulated devices.
On CPU cores, they run side by side: a trainer and an engine that compute at the same time need less time
there than in turns, because each of them leaves cores idle by itself. GPUs can't be lent yet, because
trainers and engines don't free their memory between two turns.
"""

from collections.abc import Sequence

from astraflow.addons.lending.arbiter import LendingPool
from astraflow.errors import ConfigError
from astraflow.processes.pool import Look, Pool
from astraflow.processes.supervisor import Supervisor
from astraflow.protocols import ProcessSpec
from astraflow.recipe.cluster_config import LocalLauncherConfig
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.types import StatusReply

__all__ = ["SideBySide", "check_lending", "make_lending_pool"]

_SIDE_BY_SIDE = (
    "cluster.lend: trainers and rollout services use the same CPU cores side by side, because taking turns "
    "would leave cores idle"
)


class SideBySide(Pool):
    """The rollout services of a run whose trainers share CPU cores with them, without turns."""

    def __init__(self, first_specs: Sequence[ProcessSpec]) -> None:
        super().__init__(first_specs)
        self._note = _SIDE_BY_SIDE

    @property
    def text(self) -> str:
        """Why nobody waits for a device."""
        return _SIDE_BY_SIDE

    def look(self, status: StatusReply, supervisor: Supervisor) -> Look:
        """Says once that nobody waits for a device."""
        note = self._note
        self._note = ""
        return Look(note=note)


def make_lending_pool(recipe: Recipe, folder: RunFolder, specs: Sequence[ProcessSpec]) -> Pool:
    """Makes the pool of a run with `cluster.lend`. Call it in the event loop. Raises: as `LendingPool`."""
    return LendingPool(recipe, folder, specs) if _is_emulated(recipe) else SideBySide(specs)


def _is_emulated(recipe: Recipe) -> bool:
    """Whether all devices are emulated, so that a device that isn't used takes no time from others."""
    parts = (recipe.rollout.engine, *(policy.train.backend for policy in recipe.trained.values()))
    return all(getattr(part, "time_scale", 0.0) for part in parts)


def check_lending(recipe: Recipe) -> None:
    """Raises: ConfigError if the recipe's trainers are to lend their devices, and can't."""
    if not recipe.cluster.lend:
        return
    if not isinstance(recipe.launcher, LocalLauncherConfig):
        raise ConfigError("cluster.lend works on one machine; use the launcher `local`, or leave lend out")
    if recipe.cluster.max_services:
        raise ConfigError("cluster.lend needs a fixed number of rollout services; leave out max_services")
    num_trainers = len(recipe.trained)
    if num_trainers > recipe.rollout.services:
        raise ConfigError(
            f"cluster.lend: a device has two tenants, so {num_trainers} trainers need as many rollout "
            f"services to share theirs with; raise rollout.services = {recipe.rollout.services} to "
            f"{num_trainers}"
        )
    if _is_emulated(recipe):
        return
    engine = recipe.rollout.engine
    if not isinstance(engine, TorchEngineConfig) or engine.device != "cpu" or recipe.rollout.gpus:
        raise ConfigError(
            "cluster.lend: the engine of rollout.engine can't free a GPU between two turns yet; use the "
            "torch engine on the CPU, or leave lend out"
        )
    for name, policy in recipe.trained.items():
        device = str(getattr(policy.train.backend, "device", "cpu"))
        if device != "cpu" or policy.train.ranks > 1:
            raise ConfigError(
                f"cluster.lend: the trainer of {name} can't free its devices between two steps yet; train it "
                f"on the CPU with one rank (train.ranks = {policy.train.ranks}, device {device}), or leave "
                "lend out"
            )
