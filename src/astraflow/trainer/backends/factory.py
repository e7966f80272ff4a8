"""Builds the trainer backend that a recipe names."""

from pathlib import Path
from typing import cast

from astraflow.config import Use, check_args, load_attr
from astraflow.protocols import TrainerBackend
from astraflow.trainer.config import PacedBackendConfig, TrainConfig
from astraflow.trainer.offline import MixedBackend

__all__ = ["make_backend"]


def make_backend(config: TrainConfig, *, model_dir: str | Path, seed: int = 0) -> TrainerBackend:
    """A backend with the model loaded; one of the user's own gets `config`, `model_dir`, `seed` and its args.

    With `auxiliary.offline` its batches are mixed. Raises: ConfigError or DataError if it cannot be built.
    """
    backend, offline = _make(config, model_dir=model_dir, seed=seed), config.auxiliary.offline
    return backend if offline is None else MixedBackend(backend, offline, seed=seed)


def _make(config: TrainConfig, *, model_dir: str | Path, seed: int) -> TrainerBackend:
    if isinstance(config.backend, Use):
        where = "train.backend"
        target = load_attr(config.backend.use, where=f"{where}.use")
        check_args(target, config.backend.args, where=f"{where}.args")
        return cast("TrainerBackend", target(config, model_dir=model_dir, seed=seed, **config.backend.args))
    if isinstance(config.backend, PacedBackendConfig):
        from astraflow.trainer.backends.paced_backend import PacedBackend

        return PacedBackend(config, seed=seed)
    from astraflow.trainer.backends.torch_backend import TorchBackend

    return TorchBackend(config, model_dir=model_dir, seed=seed)
