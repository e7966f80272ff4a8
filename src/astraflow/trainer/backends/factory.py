"""Builds the trainer backend that a recipe names."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

from astraflow.config import Use, Variant, check_args, load_attr
from astraflow.host_tensors import WeightSnapshot
from astraflow.protocols import Engine, TrainerBackend
from astraflow.trainer.config import OwnLoopBackendConfig, TrainConfig
from astraflow.trainer.offline import MixedBackend

__all__ = ["make_backend"]


def make_backend(
    config: TrainConfig,
    *,
    model_dir: str | Path,
    seed: int = 0,
    states: Path | None = None,
    make_engine: Callable[[WeightSnapshot], Engine] | None = None,
) -> TrainerBackend:
    """A backend with the model loaded; one of the user's own gets `config`, `model_dir`, `seed` and its args.

    `states`, `make_engine`: what a loop of the user's own saves in and samples with.
    With `auxiliary.offline` its batches are mixed. Raises: ConfigError or DataError if it cannot be built.
    """
    if isinstance(config.backend, OwnLoopBackendConfig):
        from astraflow.trainer.backends.own_loop import OwnLoopBackend

        backend = OwnLoopBackend(
            config, model_dir=model_dir, seed=seed, states=states, make_engine=make_engine
        )
    else:
        backend = _make(config, model_dir=model_dir, seed=seed)
    offline = config.auxiliary.offline
    return backend if offline is None else MixedBackend(backend, offline, seed=seed)


def _make(config: TrainConfig, *, model_dir: str | Path, seed: int) -> TrainerBackend:
    if isinstance(config.backend, Use):
        where = "train.backend"
        target = load_attr(config.backend.use, where=f"{where}.use")
        check_args(target, config.backend.args, where=f"{where}.args")
        return cast("TrainerBackend", target(config, model_dir=model_dir, seed=seed, **config.backend.args))
    if isinstance(config.backend, Variant):
        return cast("TrainerBackend", config.backend.make(config, model_dir=model_dir, seed=seed))
    from astraflow.trainer.backends.torch_backend import TorchBackend

    return TorchBackend(config, model_dir=model_dir, seed=seed)
