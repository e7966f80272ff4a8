"""Checks a recipe with the backend `megatron` before a run, without loading anything."""

from importlib.util import find_spec
from pathlib import Path

from astraflow.addons.megatron.config import MegatronBackendConfig
from astraflow.addons.megatron.shape import ModelShape, read_shape
from astraflow.errors import ConfigError
from astraflow.losses.config import ValueModelConfig
from astraflow.models.hub import model_path
from astraflow.recipe.recipe import PolicyConfig, Recipe
from astraflow.trainer.config import TrainConfig

__all__ = ["check_megatron", "open_shape"]


def check_megatron(recipe: Recipe) -> None:
    """Checks all policies that Megatron trains. Models that are not there yet are checked when they are
    loaded.

    Raises: ConfigError if one can't be trained by it as the recipe says.
    """
    for name, policy in recipe.trained.items():
        if not isinstance(policy.train.backend, MegatronBackendConfig):
            continue
        try:
            _check_policy(policy)
        except ConfigError as err:
            raise ConfigError(f"policies.{name}.{err}") from err


def _check_policy(policy: PolicyConfig) -> None:
    auxiliary = policy.train.auxiliary
    others = [model_path(other) for other in (auxiliary.reference, auxiliary.teacher) if other]
    for folder in (policy.model_dir, *others):
        if (folder / "config.json").is_file():
            open_shape(policy.train, folder)
    if find_spec("megatron") is None:
        raise ConfigError(
            'train.backend.name: megatron needs megatron-core; run pip install "astraflow[megatron]"'
        )


def open_shape(train: TrainConfig, folder: Path) -> ModelShape:
    """Reads the shape of a model that Megatron is to train or score with.

    Raises: ConfigError if it can't; DataError if the folder has no model.
    """
    backend = train.backend
    assert isinstance(backend, MegatronBackendConfig)
    if isinstance(train.auxiliary.critic, ValueModelConfig):
        raise ConfigError(
            "train.auxiliary.critic: the backend `megatron` trains no critic; use a credit without one, or "
            "train.backend.name: torch"
        )
    shape = read_shape(folder)
    shape.check_cut(tensor=backend.tensor, pipeline=backend.pipeline)
    return shape
