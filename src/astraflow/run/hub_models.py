"""Fetches the models of a recipe that are on the Hugging Face Hub, and pins their commits for a run.

The recipe in a run folder has `OWNER/NAME@COMMIT` instead of `OWNER/NAME`. `models.json` in that folder maps
names to commits, so that a resumed run uses the same commits, even if the models on the hub have changed.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from astraflow.errors import DataError
from astraflow.losses.config import ValueModelConfig
from astraflow.models.hub import cache_folder, fetch_model, is_cached, is_hub_name, model_path, split_revision
from astraflow.recipe.model_checks import models_of
from astraflow.recipe.recipe import PolicyConfig, Recipe
from astraflow.recipe.run_folder import write_atomic
from astraflow.run.preflight import check_recipe

__all__ = ["cache_notes", "pin_models", "with_fetched_models"]

_PINS = "models.json"


def with_fetched_models(recipe: Recipe, run_dir: Path | None, tell: Callable[[str], None]) -> Recipe:
    """Fetches the recipe's hub models into the cache, and returns the recipe with their commits. Blocks.

    The commits are pinned for the run in `run_dir`. `tell` receives progress messages. Nothing is downloaded
    for a recipe with mistakes.

    Raises: ConfigError or DataError for a recipe with mistakes; DataError for a model that cannot be fetched.
    """
    recipe = pin_models(recipe, run_dir)
    names = dict.fromkeys(_hub_names(recipe))
    if not all(map(is_cached, names)):
        check_recipe(recipe, run_dir)
    commits = {name: fetch_model(name, tell) for name in names}
    new = {name: commit for name, commit in commits.items() if name != commit}
    if new and run_dir is not None:
        content = json.dumps({**_pins(run_dir), **new}, indent=2) + "\n"
        write_atomic(run_dir / _PINS, content.encode())
    return _with_model_names(recipe, commits)


def pin_models(recipe: Recipe, run_dir: Path | None) -> Recipe:
    """Returns the recipe with the commits that the run folder pins, if the run has begun. Fetches nothing."""
    return _with_model_names(recipe, _pins(run_dir)) if run_dir is not None else recipe


def cache_notes(recipe: Recipe) -> Iterator[str]:
    """Yields a message for each hub model of the recipe that says whether the model is in the cache."""
    for name in dict.fromkeys(_hub_names(recipe)):
        if is_cached(name):
            commit = model_path(name).name
            yield f"{name} is in the cache {cache_folder()} (commit {commit})"
        else:
            yield f"{name} is not in the cache {cache_folder()}; the run downloads it before it starts"


def _hub_names(recipe: Recipe) -> Iterator[str]:
    for name, policy in recipe.policies.items():
        yield from (model for model in models_of(name, policy).values() if is_hub_name(model))


def _pins(run_dir: Path) -> Mapping[str, str]:
    """Reads the pins: original name -> name with the commit. Raises: DataError if the file is invalid."""
    path = run_dir / _PINS
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # a later check of the folder reports the latter
        return {}
    except (OSError, ValueError) as err:
        raise DataError(
            f"{path} cannot be read: {err}; it must be a JSON object of names and commits"
        ) from err
    pins: dict[str, str] = {}
    for name, commit in content.items() if isinstance(content, dict) else ():  # pyright: ignore[reportUnknownVariableType] - any JSON
        if not (isinstance(name, str) and isinstance(commit, str) and split_revision(commit)[1]):
            raise DataError(f"{path}: {name!r}: {commit!r} must have the form OWNER/NAME@COMMIT")
        pins[name] = commit
    return pins


def _with_model_names(recipe: Recipe, names: Mapping[str, str]) -> Recipe:
    policies = {name: _with_names(policy, names) for name, policy in recipe.policies.items()}
    return recipe.model_copy(update={"policies": policies}) if policies != recipe.policies else recipe


def _with_names(policy: PolicyConfig, names: Mapping[str, str]) -> PolicyConfig:
    def rename(model: str) -> str:
        return names.get(model, model)

    auxiliary = policy.train.auxiliary
    changes: dict[str, object] = {
        "reference": rename(auxiliary.reference), "teacher": rename(auxiliary.teacher)
    }  # fmt: skip
    if isinstance(auxiliary.critic, ValueModelConfig):
        changes["critic"] = auxiliary.critic.model_copy(update={"model": rename(auxiliary.critic.model)})
    train = policy.train.model_copy(update={"auxiliary": auxiliary.model_copy(update=changes)})
    return policy.model_copy(update={"model": rename(policy.model), "train": train})
