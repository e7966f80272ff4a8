"""Builds the engine that a recipe names. Nothing heavy is imported before it is needed."""

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
"""What the torch engine needs."""
_TOKENIZER_LIBRARY = "transformers.models.auto.tokenization_auto"
"""What a renderer needs, whichever engine generates."""


def engine_maker(config: EngineConfig, *, exact: bool = False) -> Callable[[WeightSnapshot], Engine]:
    """The function that makes the engines of one service, one per policy.

    `exact`: their logprobs are the trainer's, to the last bit. Only the torch engine promises this.
    Raises: ConfigError, DataError or WeightsError if the engine cannot serve; so does the function.
    """
    if isinstance(config, Use):
        return partial(_users_engine, config)
    if isinstance(config, TorchEngineConfig):
        return partial(_torch_engine, config, exact=exact)
    return config.make()


def make_engine(config: EngineConfig, snapshot: WeightSnapshot) -> Engine:
    """Makes an engine that serves `snapshot`, alone on its device.

    A component of the user's own is called as `attr(snapshot, **args)`.
    Raises: ConfigError, DataError or WeightsError if it cannot serve.
    """
    return engine_maker(config)(snapshot)


def preload(config: EngineConfig) -> None:
    """Imports what `make_engine` will need, which takes seconds.

    A service calls it while it waits for its first version. It may run in a thread.
    """
    libraries = () if isinstance(config, Use) else (_TOKENIZER_LIBRARY,)
    for name in _TORCH_LIBRARIES if isinstance(config, TorchEngineConfig) else libraries:
        importlib.import_module(name)


def _users_engine(config: Use, snapshot: WeightSnapshot) -> Engine:
    target = load_attr(config.use, where="rollout.engine.use")
    check_args(target, config.args, where="rollout.engine.args")
    return target(snapshot, **config.args)


def _torch_engine(config: TorchEngineConfig, snapshot: WeightSnapshot, *, exact: bool) -> Engine:
    # Imported here, since it loads torch, which services with other engines do not need.
    from astraflow.rollout.engines.torch_engine import TorchEngine

    return TorchEngine(config, snapshot, exact=exact)
