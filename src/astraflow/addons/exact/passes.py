"""The passes that the add-on publishes. Their modules import torch when the first model is loaded."""

from typing import TYPE_CHECKING

from astraflow.models.exact import ExactPasses

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from astraflow.addons.exact.engine_pass import InvariantForward
    from astraflow.addons.exact.trainer_pass import InvariantLogprobs

__all__ = ["PASSES"]


def _engine_pass(model: "PreTrainedModel") -> "InvariantForward":
    from astraflow.addons.exact.engine_pass import InvariantForward

    return InvariantForward(model)


def _trainer_pass(model: "PreTrainedModel") -> "InvariantLogprobs":
    from astraflow.addons.exact.trainer_pass import InvariantLogprobs

    return InvariantLogprobs(model)


PASSES = ExactPasses(engine=_engine_pass, trainer=_trainer_pass)
"""The entry point `exact` of the group `astraflow.models`."""
