"""Recipes that compute on GPUs, with a tiny model."""

from pathlib import Path
from typing import Any

from astraflow.recipe.recipe import Recipe, load_recipe
from drivers.engine_models import make_model_folder, make_random_model

__all__ = ["gpu_recipe"]


def gpu_recipe(
    folder: Path, ranks: int = 1, *, rollout: dict[str, Any] | None = None, **backend: Any
) -> Recipe:
    """A recipe whose trainer is on GPUs from the first one on; `rollout` adds to that section."""
    make_random_model().save_pretrained(make_model_folder(folder / "model"))
    path = folder / "recipe.yaml"
    path.write_text(
        "name: demo\n"
        "tasks: {sources: {sums: {name: jsonl, path: tasks.jsonl}}}\n"
        f"model: {folder / 'model'}\n"
    )
    fields = {"name": "torch", "device": "cuda:0", **backend}
    changes = {f"rollout.{key}": value for key, value in (rollout or {}).items()}
    return load_recipe(path, {"train.backend": fields, "train.ranks": ranks, **changes})
