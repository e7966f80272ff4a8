"""Compiles the layers of a model (`torch.compile`), which fuses the small operations between matrix products.

All layers of a model share the compiled code, which does not depend on lengths, so it is compiled only in the
first passes. Attention is excluded: it has its own kernels, and its branches depend on the batch.
"""

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from astraflow.errors import ConfigError
from astraflow.trainer.torch.parallel.recompute import layers_of

__all__ = ["compile_layers", "exclude_from_compile"]

_log = logging.getLogger(__name__)


def compile_layers(model: nn.Module, *, device: str) -> int:
    """Makes every layer of a model compile at its first call. Returns the number of layers.

    Raises: ConfigError if the model's family has no layers, or if this machine cannot compile.
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


def exclude_from_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Excludes a function from compilation."""
    return cast("Callable[..., Any]", torch.compiler.disable(function))


def _check_compiler(device: str) -> None:
    """Compiles a small function, so a missing compiler is found before the first step."""

    def double(values: torch.Tensor) -> torch.Tensor:
        return values + values

    try:
        torch.compile(double)(torch.ones(2, device=device))
    except (RuntimeError, OSError, ImportError) as err:  # the errors of compilers derive from these
        raise ConfigError(
            f"train.backend.compile_layers = true: this machine cannot compile for {device}: "
            f"{str(err).strip().splitlines()[0]}; install a C++ compiler (and Triton, for a GPU), or set it "
            "to false"
        ) from err
