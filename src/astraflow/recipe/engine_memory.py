"""The host memory of KV caches, and how many slots an engine gets if the recipe names none.

The embedded engine reserves a slot's keys and values for the whole `max_context` when it starts. Each policy
has its own cache, and an evaluation uses a second one. A recipe that leaves `num_slots` open gets the largest
number of `_STEPS` with which the caches of all rollout services of this machine take at most half of the
memory that is available when the run starts. If the services run on GPUs or on other machines, `num_slots`
stays open, and each engine chooses by the memory of its own device.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from astraflow.models.families import cached_values
from astraflow.recipe.recipe import Recipe
from astraflow.rollout.engine_config import SLOT_STEPS, TorchEngineConfig
from astraflow.service.memory import available_bytes

__all__ = ["choose_slots", "model_config", "slot_bytes"]

_SHARE = 0.5
"""Largest share of the available memory for caches. Weights, gradients, and optimizers need the rest."""


def slot_bytes(recipe: Recipe, *, with_evals: bool = True) -> float:
    """What one slot of the embedded engine needs in a rollout service: a row of each policy's caches.

    0 for other engines, whose servers manage their own memory.
    """
    engine = recipe.rollout.engine
    if not isinstance(engine, TorchEngineConfig):
        return 0.0
    size = 4 if engine.dtype == "float32" else 2
    total = 0.0
    for policy in recipe.policies.values():
        # Evaluations of a policy whose weights change run from a second weight slot with its own cache.
        num_caches = 2 if with_evals and recipe.eval.sets and policy.role != "frozen" else 1
        total += num_caches * cached_values(model_config(policy.model_dir)) * size * engine.context
    return total


def choose_slots(recipe: Recipe, num_bytes: float | None = None) -> int:
    """The number of slots for a recipe with a known `max_context`, by the available memory."""
    each = slot_bytes(recipe) * recipe.max_services
    room = _SHARE * (available_bytes() if num_bytes is None else num_bytes)
    return next((num for num in SLOT_STEPS if num * each <= room), SLOT_STEPS[-1])


def model_config(folder: Path) -> Mapping[str, Any]:
    """The model's config.json; empty if there is none yet, or if it is broken, which the model's own check
    reports."""
    try:
        content: object = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("Mapping[str, Any]", content) if isinstance(content, dict) else {}
