"""Checks which trainers share devices with which rollout services, and makes the pool of such a run.

They take turns on GPUs and emulated devices. On CPU cores, they run side by side unless the recipe says
otherwise: a trainer and an engine that compute at the same time need less time there than in turns, because
each of them leaves cores idle by itself.
"""

from collections import Counter
from collections.abc import Sequence

from astraflow.addons.lending.arbiter import LendingPool
from astraflow.addons.lending.pairs import (
    generate_share,
    gpu_of_service,
    gpu_of_trainer,
    has_emulated_devices,
    pairs_of,
    takes_turns,
    uses_gpus,
)
from astraflow.config import Use
from astraflow.errors import ConfigError
from astraflow.processes.pool import Look, Pool
from astraflow.processes.supervisor import Supervisor
from astraflow.protocols import ProcessSpec
from astraflow.recipe.cluster_config import LendingConfig, LocalLauncherConfig
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.trainer.backend_config import TorchBackendConfig
from astraflow.types import StatusReply
from astraflow.user_input.mistakes import as_written, hint

__all__ = ["SideBySide", "check_lending", "make_lending_pool"]

_SIDE_BY_SIDE = (
    "cluster.lend: trainers and rollout services use the same CPU cores side by side, because taking turns "
    "would leave cores idle"
)
_SLEEP_OPTION = "--enable-sleep-mode"


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
    return LendingPool(recipe, folder, specs) if takes_turns(recipe) else SideBySide(specs)


def check_lending(recipe: Recipe) -> None:
    """Raises: ConfigError if the recipe's trainers are to lend their devices, and can't."""
    if not recipe.cluster.lend:
        if recipe.cluster.lending != LendingConfig():
            raise ConfigError(
                "cluster.lending has settings, but nothing is lent; set cluster.lend: true, too"
            )
        return
    if not isinstance(recipe.launcher, LocalLauncherConfig):
        raise ConfigError("cluster.lend works on one machine; use the launcher `local`, or leave lend out")
    if recipe.cluster.max_services:
        raise ConfigError("cluster.lend needs a fixed number of rollout services; leave out max_services")
    _check_pairs(recipe)
    if has_emulated_devices(recipe):
        return
    for policy, service in pairs_of(recipe):
        _check_trainer(recipe, policy)
        _check_devices(recipe, policy, service)
    if uses_gpus(recipe):
        _check_engine(recipe)


def _check_pairs(recipe: Recipe) -> None:
    """Raises: ConfigError if a device doesn't have exactly one trainer and one rollout service."""
    num_services = recipe.rollout.services
    stated = recipe.cluster.lending.share
    if not stated and len(recipe.trained) > num_services:
        raise ConfigError(
            f"cluster.lend: a device has two tenants, so {len(recipe.trained)} trainers need as many rollout "
            f"services to share theirs with; raise rollout.services = {num_services} to "
            f"{len(recipe.trained)}"
        )
    services = [f"rollout-{idx}" for idx in range(num_services)]
    for pair in stated:
        where = f"cluster.lending.share: [{', '.join(pair)}]"
        if len(pair) != 2:
            raise ConfigError(
                f"{where} has {len(pair)} tenants, but a device has two: a policy, for its trainer, and a "
                "rollout service, e.g. [actor, rollout-1]"
            )
        policy, service = pair
        if policy in recipe.policies and policy not in recipe.trained:
            raise ConfigError(
                f"{where}: policy {policy} is frozen, so it has no trainer that could lend a device"
            )
        if policy not in recipe.trained:
            raise ConfigError(
                f"{where}: no trained policy is called {policy!r}{hint(policy, list(recipe.trained))}"
            )
        if service not in services:
            raise ConfigError(
                f"{where}: {service!r} is not one of the {num_services} rollout services"
                f"{hint(service, services)}"
            )
    for name, num in Counter(name for pair in stated for name in pair).items():
        if num > 1:
            raise ConfigError(
                f"cluster.lending.share: {name} is in {num} pairs, but a device has two tenants, and each "
                "tenant one device"
            )


def _check_trainer(recipe: Recipe, policy: str) -> None:
    """Raises: ConfigError if a trainer can't take turns."""
    train = recipe.trained[policy].train
    if train.ranks > 1:
        raise ConfigError(
            f"cluster.lend: the trainer of {policy} has train.ranks = {train.ranks}, and several ranks can't "
            "free their devices together; set train.ranks: 1 (enough up to 4B on a GPU of 80 GB), or "
            "cluster.lend: false with rollout services on GPUs of their own (rollout.gpus)"
        )
    if gpu_of_trainer(recipe, policy) and not isinstance(train.backend, TorchBackendConfig):
        name = train.backend.use if isinstance(train.backend, Use) else train.backend.name
        raise ConfigError(
            f"cluster.lend: the trainer of {policy} can't free its GPU between two steps, because its "
            f"backend is {name}; use the torch backend, or leave lend out"
        )


def _check_devices(recipe: Recipe, policy: str, service: str) -> None:
    """Raises: ConfigError if a trainer and a service don't use the same device."""
    mine = gpu_of_trainer(recipe, policy)
    theirs = gpu_of_service(recipe, service)
    if mine == theirs:
        return
    key = as_written(f"policies.{policy}.train.backend.device")
    used = [f"GPU {gpu}" if gpu else "no GPU" for gpu in (mine, theirs)]
    raise ConfigError(
        f"cluster.lend: the trainer of {policy} uses {used[0]} and {service} uses {used[1]}, so they share "
        f"no device; give both the same one: {key}, and rollout.gpus or rollout.engine.device"
    )


def _check_engine(recipe: Recipe) -> None:
    """Raises: ConfigError if the engine can't free a GPU."""
    engine = recipe.rollout.engine
    name = engine.use if isinstance(engine, Use) else engine.name
    if not 0 < generate_share(recipe) <= 1:
        raise ConfigError(
            f"cluster.lend: the engines of a service take {generate_share(recipe):g} of their GPU's memory; "
            "state a share above 0 and at most 1: rollout.engine.gpu_share, or the option of the server in "
            "rollout.engine.args"
        )
    if name == "torch":
        return
    if name != "vllm":
        raise ConfigError(
            f"cluster.lend: the engine {name} can't free a GPU between two turns; use torch or vllm, or "
            "leave lend out"
        )
    if _SLEEP_OPTION not in getattr(engine, "args", ()):
        raise ConfigError(
            f"cluster.lend: vLLM frees its GPU only in sleep mode; add {_SLEEP_OPTION} to rollout.engine.args"
        )
