"""Replaces the `forward` of a model's layers, so that they recompute their activations, or are compiled.

Activation checkpointing: a layer keeps only its input, and is computed again in the backward pass. The switch
in transformers works only in train mode, but models here stay in eval mode, so that dropout is off as in the
engine. This takes a third more computation. Each layer then keeps one hidden state per token, where it would
otherwise keep at least 15 times as much.

`torch.compile` fuses the small operations between matrix products. All layers of a model share the compiled
code, which does not depend on lengths, so it is compiled only in the first passes. Attention is excluded: it
has its own kernels, and its branches depend on the batch.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils import checkpoint as checkpoints

from astraflow.errors import ConfigError

__all__ = ["compile_layers", "exclude_from_compile", "layers_of", "recompute_layers"]

_log = logging.getLogger(__name__)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformers model, from first to last, without layers nested in layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    def outermost(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if isinstance(child, GradientCheckpointingLayer):
                yield child
            else:
                yield from outermost(child)

    return list(outermost(model))


def recompute_layers(model: nn.Module) -> int:
    """Makes every layer of a model recompute its activations. Returns the number of layers.

    Raises: ConfigError if the model's family has no such layers.
    """
    layers = layers_of(model)
    if not layers:
        raise ConfigError(
            f'train.backend.activations = "recompute": {type(model).__name__} has no layers that '
            'transformers can recompute one by one; set it to "keep"'
        )
    for layer in layers:
        layer.forward = partial(_forward, layer.forward)
    _log.info("%s: %d layers recompute their activations", type(model).__name__, len(layers))
    return len(layers)


def _forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return original(*args, **kwargs)
    # In eval mode nothing draws random numbers, so their state need not be kept.
    checkpoint = cast("Callable[..., Any]", checkpoints.checkpoint)  # its types are incomplete
    return checkpoint(original, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


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
