"""Builds the engine that a recipe names. Imports heavy libraries only when they are needed."""

import importlib
from collections.abc import Callable
from functools import partial

from astraflow.config import Use, check_args, load_attr
from astraflow.protocols import Engine
from astraflow.rollout.config import EngineConfig
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.types.host_tensors import WeightSnapshot

__all__ = ["engine_maker", "make_engine", "preload"]

_TORCH_LIBRARIES = (
    "astraflow.rollout.engines.torch_engine",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
)
"""Modules that the torch engine needs."""
_TOKENIZER_LIBRARY = "transformers.models.auto.tokenization_auto"
"""Module that a renderer needs with any engine."""


def engine_maker(config: EngineConfig, *, exact: bool = False) -> Callable[[WeightSnapshot], Engine]:
    """Returns the function that makes the engines of one service, one per policy.

    `exact`: their logprobs are bitwise equal to the trainer's. Only the torch engine guarantees this.
    Raises: ConfigError, DataError, or WeightsError if the engine cannot be used; so does the function.
    """
    if isinstance(config, Use):
        return partial(_make_users_engine, config)
    if isinstance(config, TorchEngineConfig):
        return partial(_make_torch_engine, config, exact=exact)
    return config.make()


def make_engine(config: EngineConfig, snapshot: WeightSnapshot) -> Engine:
    """Makes an engine that serves `snapshot`, alone on its device.

    A user's component is called as `attr(snapshot, **args)`.
    Raises: ConfigError, DataError, or WeightsError if it cannot be used.
    """
    return engine_maker(config)(snapshot)


def preload(config: EngineConfig) -> None:
    """Imports the libraries that `make_engine` needs, which takes seconds.

    A service calls it while it waits for its first version. It may run in a thread.
    """
    libraries = () if isinstance(config, Use) else (_TOKENIZER_LIBRARY,)
    for name in _TORCH_LIBRARIES if isinstance(config, TorchEngineConfig) else libraries:
        importlib.import_module(name)


def _make_users_engine(config: Use, snapshot: WeightSnapshot) -> Engine:
    target = load_attr(config.use, where="rollout.engine.use")
    check_args(target, config.args, where="rollout.engine.args")
    return target(snapshot, **config.args)


def _make_torch_engine(config: TorchEngineConfig, snapshot: WeightSnapshot, *, exact: bool) -> Engine:
    # Imported here because it loads torch, which services with other engines don't need.
    from astraflow.rollout.engines.torch_engine import TorchEngine

    return TorchEngine(config, snapshot, exact=exact)
