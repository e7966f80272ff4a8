"""Compiles the layers of a model (`torch.compile`): one kernel for many small operations beside the products.

All layers of a model share the compiled code, and lengths are not part of it, so it is made in the first
passes and then stays. Attention is left out: it has kernels of its own, and its branches depend on the batch.
"""

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from astraflow.errors import ConfigError
from astraflow.trainer.torch.parallel.recompute import layers_of

__all__ = ["compile_layers", "left_out"]

_log = logging.getLogger(__name__)


def compile_layers(model: nn.Module, *, device: str) -> int:
    """Lets every layer of a model be compiled when it is first called. Returns the number of layers.

    Raises: ConfigError if the model's family has no layers, or if nothing can be compiled on this machine.
    """
    layers = layers_of(model)
    if not layers:
        raise ConfigError(
            f"train.backend.compile_layers = true: {type(model).__name__} has no layers that can be compiled "
            "one by one; set it to false"
        )
    _check_compiler(device)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
    _log.info("%s: %d layers are compiled", type(model).__name__, len(layers))
    return len(layers)


def left_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that compiled code calls as it is."""
    return cast("Callable[..., Any]", torch.compiler.disable(function))


def _check_compiler(device: str) -> None:
    """Compiles something small, so that a missing compiler is found before the first step."""

    def doubled(values: torch.Tensor) -> torch.Tensor:
        return values + values

    try:
        torch.compile(doubled)(torch.ones(2, device=device))
    except (RuntimeError, OSError, ImportError) as err:  # what compilers raise derives from these
        raise ConfigError(
            f"train.backend.compile_layers = true: nothing can be compiled for {device} here: "
            f"{str(err).strip().splitlines()[0]}; install a C++ compiler (and Triton, for a GPU), or set it "
            "to false"
        ) from err
