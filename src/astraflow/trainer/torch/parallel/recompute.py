"""Activation checkpointing: a layer keeps only its input, and is computed again in the backward pass.

The switch in transformers works only in train mode, but models here stay in eval mode, so that dropout is off
as in the engine. So the layers' `forward` is replaced instead. This takes a third more computation. Each
layer then keeps one hidden state per token, where it would otherwise keep at least 15 times as much.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils import checkpoint as checkpoints

from astraflow.errors import ConfigError

__all__ = ["layers_of", "recompute_layers"]

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
