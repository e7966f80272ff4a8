"""The objective of `forward_backward`: a loss summed over the trained tokens of the data."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from astraflow.errors import TrainingError
from astraflow.losses.factory import LossFunction
from astraflow.losses.policy import LossInputs
from astraflow.protocols import EntropyUse
from astraflow.trainer.columns import sample_name
from astraflow.trainer.objective import Floats, Ints, TokenParts, check_finite
from astraflow.types.token_columns import Columns

__all__ = ["SummedLoss"]

_MAX_LOG_RATIO = 88.0
"""Nats; above 88.7, the ratio overflows float32."""


@dataclass(slots=True)
class SummedLoss:
    """A loss summed over all trained tokens, with the logprobs and weights of the columns."""

    columns: Columns
    function: LossFunction
    entropy: EntropyUse = "none"
    _parts: TokenParts = field(default_factory=TokenParts)

    def __call__(self, trained: Ints, predicted: Tensor, entropies: Tensor | None) -> Tensor:
        """Returns the sum over one microbatch."""
        del entropies
        behavior, advantages = (
            torch.from_numpy(column[trained]).to(predicted.device)
            for column in (self.columns.behavior_logprobs, self.columns.advantages)
        )
        output = self.function(LossInputs(predicted, behavior, behavior, advantages))
        self._parts.add(trained, predicted, output.per_token)
        return output.per_token.sum()

    def finish(self) -> tuple[float, Floats]:
        """Returns the sum over all microbatches, and the logprobs [P].

        Raises: TrainingError that names the data whose numbers are unusable.
        """
        trained, (logprobs, per_token) = self._parts.read()
        _check_ratios(self.columns, trained, logprobs - self.columns.behavior_logprobs[trained])
        check_finite(self.columns, trained, per_token)
        found = np.zeros(len(self.columns.trained_idx), dtype=np.float32)
        found[trained] = logprobs
        return float(per_token.sum(dtype=np.float64)), found


def _check_ratios(columns: Columns, trained: Ints, log_ratios: Floats) -> None:
    """Raises: TrainingError, naming the sample, if a ratio of current to recorded probability overflows."""
    worst = int(log_ratios.argmax())
    if np.isnan(log_ratios[worst]) or log_ratios[worst] <= _MAX_LOG_RATIO:
        return  # `check_finite` reports NaNs
    sample = columns.sample_of(trained[[worst]])[0]
    raise TrainingError(
        f"{sample_name(columns, int(sample))}: the log ratio of a token is {float(log_ratios[worst]):.1f}; "
        f"above {_MAX_LOG_RATIO:.0f}, the ratio overflows float32. Are the recorded logprobs those of this "
        "model, in nats?"
    )
