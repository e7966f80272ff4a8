"""Finds the passes for `exact: true`, with which engine and trainer give a token the same logprob."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from astraflow.user_input.installed import load_added

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ExactPasses", "exact_passes"]


@dataclass(frozen=True, slots=True)
class ExactPasses:
    """Makes the two passes over a model. Both raise DataError for a model or machine without a guarantee."""

    engine: "Callable[[PreTrainedModel], Any]"
    """Makes a `rollout.engines.forward.Forward`."""
    trainer: "Callable[[PreTrainedModel], Any]"
    """Makes a `trainer.torch.forward.ExactLogprobs`."""


def exact_passes() -> ExactPasses:
    """The passes that an installed package has. Raises: ConfigError if none has any."""
    return load_added("astraflow.models", "exact", "exact: true")
