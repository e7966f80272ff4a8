"""Which trainer shares a device with which rollout service, and how much memory each keeps between turns."""

from collections.abc import Mapping

from astraflow.addons.lending.baton import Tenant
from astraflow.recipe.recipe import Recipe
from astraflow.rollout.engine_config import EngineVariant, TorchEngineConfig
from astraflow.trainer.backend_config import torch_settings

__all__ = [
    "generate_share",
    "gpu_of_service",
    "gpu_of_trainer",
    "has_emulated_devices",
    "keep_fracs",
    "pairs_of",
    "takes_turns",
    "uses_gpus",
]


def pairs_of(recipe: Recipe) -> list[tuple[str, str]]:
    """The policies, each with the rollout service with which its trainer shares a device."""
    if stated := recipe.cluster.lending.share:
        return [(policy, service) for policy, service in stated]
    last = recipe.rollout.services - 1
    return [(policy, f"rollout-{last - idx}") for idx, policy in enumerate(recipe.trained)]


def has_emulated_devices(recipe: Recipe) -> bool:
    """Whether all devices are emulated, so that a device that isn't used takes no time from others."""
    parts = (recipe.rollout.engine, *(policy.train.backend for policy in recipe.trained.values()))
    return all(getattr(part, "time_scale", 0.0) for part in parts)


def uses_gpus(recipe: Recipe) -> bool:
    """Whether a trainer that shares its device uses a GPU."""
    return any(gpu_of_trainer(recipe, policy) for policy, _ in pairs_of(recipe))


def takes_turns(recipe: Recipe) -> bool:
    """Whether trainers and services take turns; otherwise, they use CPU cores side by side."""
    return uses_gpus(recipe) or has_emulated_devices(recipe) or recipe.cluster.lending.turns == "always"


def gpu_of_trainer(recipe: Recipe, policy: str) -> str:
    """The GPU of a trainer, as a number among those that the run sees; empty if it uses none."""
    backend = torch_settings(recipe.trained[policy].train.backend)
    kind, _, number = (backend.device if backend else "cpu").partition(":")
    return (number or "0") if kind == "cuda" else ""


def gpu_of_service(recipe: Recipe, service: str) -> str:
    """The GPUs of a rollout service, joined by commas; empty if it uses none."""
    engine = recipe.rollout.engine
    lists = recipe.rollout.gpus
    gpus = lists[int(service.rpartition("-")[2]) % len(lists)].split(",") if lists else []
    if isinstance(engine, TorchEngineConfig):
        kind, _, number = engine.device.partition(":")
        if kind != "cuda":
            return ""
        return gpus[int(number or 0)].strip() if lists else number or "0"
    return ",".join(gpu.strip() for gpu in gpus)


def generate_share(recipe: Recipe) -> float:
    """The share of a GPU's memory that the engines of a service take; 0 if it isn't stated."""
    engine = recipe.rollout.engine
    if isinstance(engine, TorchEngineConfig):
        return engine.gpu_share * len(recipe.policies)
    if isinstance(engine, EngineVariant):
        num = len(recipe.policies)
        return sum(engine.gpu_shares(num_policies=num, has_evals=bool(recipe.eval.sets)))
    return 0.0


def keep_fracs(recipe: Recipe) -> Mapping[Tenant, float]:
    """The share of the device's memory that each tenant may keep between its turns. 1: nothing is freed."""
    train = recipe.cluster.lending.train_share
    generate = generate_share(recipe)
    if not uses_gpus(recipe) or train + generate <= 1:
        return {"trainer": 1.0, "rollout": 1.0}
    return {"trainer": 1 - generate, "rollout": 1 - train}
