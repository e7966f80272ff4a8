"""Which policies share a base, and the engines of a rollout service that follow from it. Imports no torch."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from astraflow.models.images import reads_images
from astraflow.protocols import Engine
from astraflow.recipe.recipe import Recipe
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.trainer.backend_config import torch_settings
from astraflow.types.host_tensors import WeightSnapshot

if TYPE_CHECKING:
    from astraflow.addons.lora.engine import AdapterEngine

__all__ = ["SharedBases", "base_notes", "is_shareable", "served_with", "shared_bases"]

_log = logging.getLogger(__name__)


def shared_bases(recipe: Recipe) -> dict[str, list[str]]:
    """The models on which several policies train adapters, and these policies, in the recipe's order.

    A rollout service has one base and one engine for them, if it generates with the torch engine. Policies
    that follow one of them belong to them. On lent devices, each policy keeps an engine of its own, because
    memory is freed engine by engine.
    """
    engine = recipe.rollout.engine
    if not isinstance(engine, TorchEngineConfig) or engine.record_experts or recipe.cluster.lend:
        return {}
    groups: dict[str, list[str]] = {}
    for name, policy in recipe.policies.items():
        source = recipe.trained.get(policy.follows or name)
        settings = None if source is None else torch_settings(source.train.backend)
        lora = None if settings is None else settings.lora
        if source is not None and lora is not None and lora.rank and lora.publish == "adapters":
            groups.setdefault(source.model, []).append(name)
    several = {model: names for model, names in groups.items() if len(names) > 1}
    return {model: names for model, names in several.items() if _may_be_shareable(Path(model).expanduser())}


def base_notes(recipe: Recipe) -> Iterator[str]:
    """Yields a message for each base that policies share."""
    for model, names in shared_bases(recipe).items():
        yield (
            f"{', '.join(names)}: train adapters of one base, {model}, which each rollout service loads once "
            "and serves with one engine"
        )


def served_with(recipe: Recipe) -> dict[str, str]:
    """Policy without an engine of its own -> the policy whose engine serves it, in a rollout service."""
    return {name: names[0] for names in shared_bases(recipe).values() for name in names[1:]}


def _may_be_shareable(model_dir: Path) -> bool:
    """`is_shareable`, if the model is on this machine. A rollout service checks the one that it fetches."""
    return not (model_dir / "config.json").is_file() or is_shareable(model_dir)


def is_shareable(model_dir: Path) -> bool:
    """Whether policies can share the model of a folder. Mixtures of experts and models that read images keep
    an engine per policy: adapters may change more than their linear layers, or not all of them row by row."""
    config = json.loads((model_dir / "config.json").read_bytes())
    return not reads_images(config) and not any("expert" in key for key in config)


class SharedBases:
    """Makes the engines of a rollout service. Policies that share a base get views of one engine.

    `make` makes all other engines. Calls must not overlap.
    Example: `make_engine = SharedBases(recipe, engine_maker(recipe.rollout.engine))`.
    """

    def __init__(self, recipe: Recipe, make: Callable[[WeightSnapshot], Engine]) -> None:
        self._config = recipe.rollout.engine
        self._make = make
        self._sharing = {
            recipe.policies[n].follows or n for names in shared_bases(recipe).values() for n in names
        }
        self._engines: dict[str, AdapterEngine] = {}

    def __call__(self, snapshot: WeightSnapshot) -> Engine:
        """Makes the engine of one policy. Raises: as `make`."""
        config = self._config
        is_shared = snapshot.base and snapshot.policy in self._sharing and is_shareable(snapshot.model_dir)
        if not is_shared or not isinstance(config, TorchEngineConfig):
            return self._make(snapshot)
        from astraflow.addons.lora.engine import AdapterEngine, AdapterView  # loads torch

        engine = self._engines.get(snapshot.base)
        if engine is None or not engine.views:  # the last view has closed it
            engine = self._engines[snapshot.base] = AdapterEngine(config, snapshot)
        _log.info("policy %s is served by the engine of %s", snapshot.policy, snapshot.base)
        return AdapterView(engine, snapshot.policy)
