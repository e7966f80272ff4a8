"""megatron-core, an optional library that is imported at its first use.

pyright can't check a library that may be missing, so its names have the type `Any` here, and only here.
"""

import warnings
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from astraflow.errors import ConfigError

__all__ = ["Megatron", "megatron"]


@dataclass(frozen=True, slots=True)
class Megatron:
    """The names of megatron-core that the backend uses."""

    parallel_state: Any
    tensor_parallel: Any
    TransformerConfig: Any
    GPTModel: Any
    get_gpt_layer_local_spec: Any
    Float16Module: Any
    DistributedDataParallel: Any
    DistributedDataParallelConfig: Any
    OptimizerConfig: Any
    get_megatron_optimizer: Any
    finalize_model_grads: Any
    get_forward_backward_func: Any


@cache
def megatron() -> Megatron:
    """Imports megatron-core. Raises: ConfigError that says how to install it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # that Transformer Engine and Apex are missing, which it can do without
            return Megatron(
                parallel_state=import_module("megatron.core.parallel_state"),
                tensor_parallel=import_module("megatron.core.tensor_parallel"),
                TransformerConfig=_load("transformer.transformer_config", "TransformerConfig"),
                GPTModel=_load("models.gpt.gpt_model", "GPTModel"),
                get_gpt_layer_local_spec=_load("models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec"),
                Float16Module=_load("transformer.module", "Float16Module"),
                DistributedDataParallel=_load("distributed", "DistributedDataParallel"),
                DistributedDataParallelConfig=_load("distributed", "DistributedDataParallelConfig"),
                OptimizerConfig=_load("optimizer", "OptimizerConfig"),
                get_megatron_optimizer=_load("optimizer", "get_megatron_optimizer"),
                finalize_model_grads=_load("distributed.finalize_model_grads", "finalize_model_grads"),
                get_forward_backward_func=_load("pipeline_parallel", "get_forward_backward_func"),
            )
    except (ImportError, AttributeError) as err:
        raise ConfigError(
            f'train.backend.name: megatron needs megatron-core; run pip install "astraflow[megatron]" ({err})'
        ) from err


def _load(module: str, name: str) -> Any:
    return getattr(import_module(f"megatron.core.{module}"), name)
