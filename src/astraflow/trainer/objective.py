"""Objectives that a pass minimizes: the recipe's loss over a minibatch, or the critic's.

A backend calls an objective once per microbatch. Nothing here waits for the device until `finish`, which
transfers all per-token numbers to the host at once and checks them before an optimizer step uses the
gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from astraflow.errors import ConfigError, TrainingError
from astraflow.losses.auxiliary import value_loss
from astraflow.losses.factory import Loss
from astraflow.protocols import EntropyUse
from astraflow.trainer.columns import sample_name
from astraflow.trainer.config import Denominator
from astraflow.trainer.ranks import ALONE
from astraflow.trainer.step_run import StepRun, statistics_inputs, with_bounded_ratios
from astraflow.types.token_columns import Columns

__all__ = [
    "PolicyObjective",
    "TokenParts",
    "ValueObjective",
    "check_finite",
    "sample_names",
]

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

_MAX_NAMED = 5
"""Largest number of samples that an error message names."""


@dataclass(slots=True)
class TokenParts:
    """Per-token numbers of several microbatches, kept on the device until they are read."""

    trained: list[Ints] = field(default_factory=list[Ints])
    rows: list[Tensor] = field(default_factory=list[Tensor])

    def add(self, trained: Ints, *columns: Tensor) -> None:
        """Adds the columns [T] of one microbatch."""
        self.trained.append(trained)
        self.rows.append(torch.stack([column.detach().float() for column in columns]))

    def read(self) -> tuple[Ints, Floats]:
        """The positions [T] of all microbatches, and their columns [C, T], in one transfer."""
        rows = torch.cat(self.rows, dim=1).cpu().numpy()
        return np.concatenate(self.trained), rows


@dataclass(slots=True)
class PolicyObjective:
    """The recipe's loss over one minibatch.

    Example: `objective = PolicyObjective(run, loss, denominator="tokens", divisor=812.0, is_first=True)`,
    then `backend.forward_backward(columns, parts, objective)` and `objective.finish()`.
    """

    run: StepRun
    loss: Loss
    denominator: Denominator
    divisor: float
    is_first: bool
    """Whether the weights are still those of the step's start."""
    statistics: Mapping[str, Tensor] | None = None
    """Statistics over the whole minibatch; None if they are computed from its only microbatch."""
    needs_advantage: bool = False
    """Whether the gradient of a token with advantage 0 is known to be 0."""
    _parts: TokenParts = field(default_factory=TokenParts)

    @property
    def entropy(self) -> EntropyUse:
        """The metrics always show the entropies."""
        return "gradient" if self.loss.needs_entropies else "value"

    @property
    def alternatives(self) -> str:
        """The stream that the loss names."""
        return self.loss.alternatives

    def __call__(self, trained: Ints, predicted: Tensor, entropies: Tensor | None) -> Tensor:
        """The loss summed over a microbatch, divided by the whole minibatch's divisor."""
        others: Tensor | None = None
        if self.alternatives:
            if predicted.ndim == 1:
                raise ConfigError(
                    "train.loss compares several tokens in each place, but train.backend computes only the "
                    "sampled one; use train.backend.name: torch"
                )
            others = predicted[:, 1:]
            predicted = predicted[:, 0]
        inputs = self.run.inputs(trained, predicted, is_first=self.is_first)
        inputs, is_beyond = with_bounded_ratios(inputs)
        statistics = self.statistics
        if statistics is None:
            with torch.no_grad():
                assert self.loss.statistics is not None
                statistics = self.loss.statistics(statistics_inputs(inputs, ALONE))
            self.run.statistics.append(statistics)
        on_device = {
            name: value.to(predicted.device, non_blocking=True) for name, value in statistics.items()
        }
        # Entropies without a gradient would turn a bonus on them into a constant.
        given = entropies if self.loss.needs_entropies else None
        inputs = replace(inputs, entropies=given, statistics=on_device, alternative_logprobs=others)
        output = self.loss.function(inputs)
        loss = self.run.total(trained, output.per_token, self.denominator) / self.divisor
        self._parts.add(trained, predicted, output.per_token)
        self.run.add(replace(inputs, entropies=entropies), output, loss, is_beyond)
        # A minibatch without any advantage is computed nevertheless; its tokens have no gradient.
        if not self.run.is_idle and (not self.needs_advantage or self.run.advantages[trained].any()):
            self.run.num_gradient_tokens += len(trained)
        return loss

    def finish(self) -> None:
        """Records the logprobs. Raises: TrainingError, naming the samples whose numbers are unusable."""
        if not self._parts.rows:
            return  # other ranks have all samples of this minibatch
        trained, (logprobs, per_token) = self._parts.read()
        if self.is_first:
            self.run.note_start(trained, logprobs)
        check_finite(self.run.columns, trained, per_token)


@dataclass(slots=True)
class ValueObjective:
    """The critic's loss: the mean over the minibatch's trained tokens, independent of the microbatches."""

    stale: Floats
    """[P] values at the step's start."""
    returns: Floats
    """[P] the returns that the critic learns."""
    clip: float
    num_tokens: int
    """Number of trained tokens of the minibatch."""
    entropy: EntropyUse = "none"
    alternatives: str = ""
    _total: list[Tensor] = field(default_factory=list[Tensor])

    def __call__(self, trained: Ints, predicted: Tensor, entropies: Tensor | None) -> Tensor:
        """The share of one microbatch."""
        del entropies
        near, goal = (
            torch.from_numpy(column[trained]).to(predicted.device, non_blocking=True)
            for column in (self.stale, self.returns)
        )
        loss = value_loss(predicted, near, goal, clip=self.clip).sum() / self.num_tokens
        self._total.append(loss.detach())
        return loss

    def finish(self) -> float:
        """The loss of this rank's samples."""
        return float(torch.stack(self._total).sum()) if self._total else 0.0


def check_finite(columns: Columns, trained: Ints, per_token: Floats) -> None:
    """Raises: TrainingError, naming the samples whose loss is not finite."""
    bad = trained[~np.isfinite(per_token)]
    if not bad.size:
        return
    named = sample_names(columns, np.unique(columns.sample_of(bad)))
    raise TrainingError(
        f"the loss of {len(bad)} tokens is not finite, in {named}; are their logprobs or the weights corrupt?"
    )


def sample_names(columns: Columns, samples: Sequence[int] | Ints) -> str:
    """The names of several samples in messages."""
    named = [sample_name(columns, int(sample)) for sample in samples[:_MAX_NAMED]]
    rest = len(samples) - len(named)
    return ", ".join(named) + (f" and {rest} more" if rest > 0 else "")
