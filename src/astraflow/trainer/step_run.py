"""Accumulates per-token columns, sums and times over one training step, and computes its metrics.

Legend: P trained tokens of the batch.
"""

import logging
import math
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from astraflow.losses.auxiliary import KL_ESTIMATORS
from astraflow.losses.config import KlConfig, ValueModelConfig
from astraflow.losses.policy import LossInputs, LossOutput
from astraflow.losses.ratio import MAX_LOG_RATIO
from astraflow.trainer.config import Denominator
from astraflow.trainer.ranks import ALONE, Ranks
from astraflow.trainer.step import (
    TokenSums,
    advantages_and_returns,
    combine_sums,
    effective_frac,
    explained_frac,
    rewards_at_ends,
    sums_to_end,
    whiten,
)
from astraflow.types import MetricItem, Reduction
from astraflow.types.bounds import MAX_METRIC
from astraflow.types.token_columns import EXPERTS_STREAM, Columns

__all__ = [
    "Minibatch",
    "StepRun",
    "metric_items",
    "statistics_inputs",
    "statistics_metrics",
    "with_bounded_ratios",
]

_log = logging.getLogger(__name__)

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Minibatch:
    """This rank's samples of one optimizer step, and the microbatches that it computes for them."""

    samples: NDArray[np.int64]
    parts: Sequence[NDArray[np.int64]]
    counts: Sequence[float]
    """Numbers of microbatches, trained tokens, samples and episodes, summed over all ranks."""

    @property
    def num_parts(self) -> int:
        """Number of microbatches of all ranks."""
        return round(self.counts[0])

    @property
    def num_tokens(self) -> int:
        """Number of trained tokens of all ranks."""
        return round(self.counts[1])

    @property
    def num_samples(self) -> int:
        """Number of samples of all ranks."""
        return round(self.counts[2])

    @property
    def num_episodes(self) -> float:
        """Number of episodes of all ranks, counted once per role."""
        return self.counts[3]


@dataclass(slots=True)
class StepRun:
    """One step. Example: `run = StepRun(columns=columns, trainer_version=3)`, then `add` and `metrics`."""

    columns: Columns
    trainer_version: int
    ranks: Ranks = ALONE
    """The ranks that have the rest of the batch."""
    untrained_frac: float = 0.0
    """Share of the batch's samples that aren't trained because a rule set them to zero."""
    needs_proximal: bool = True
    """Whether the loss reads the proximal logprobs."""
    proximal: Floats = field(init=False)
    """[P] logprobs at the step's start, where `is_at_start`; the engine's newest version should agree."""
    is_at_start: NDArray[np.bool_] = field(init=False)
    """[P] whether the token's `proximal` logprob is known."""
    staleness: Floats = field(init=False)
    advantages: Floats = field(init=False)
    reference: Floats | None = None
    teacher: Floats | None = None
    values: Floats | None = None
    """[P] the critic's values at the step's start."""
    returns: Floats | None = None
    """[P] the returns that the critic learns."""
    critic_losses: list[float] = field(default_factory=list[float])
    critic_norms: list[float] = field(default_factory=list[float])
    sums: TokenSums = field(default_factory=TokenSums)
    losses: Tensor | float = 0.0
    """Sum over the minibatches; stays on the device until the step's end."""
    grad_norms: list[float] = field(default_factory=list[float])
    lr: float = 0.0
    num_computed: int = 0
    num_gradient_tokens: int = 0
    """Trained tokens of the passes whose gradient is not known to be 0."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    statistics: list[Mapping[str, Tensor]] = field(default_factory=list[Mapping[str, Tensor]])
    """What the loss's statistics function returned for each minibatch."""

    def __post_init__(self) -> None:
        self.proximal = np.zeros_like(self.columns.behavior_logprobs)
        self.is_at_start = np.zeros(len(self.proximal), dtype=np.bool_)
        self.staleness = (self.trainer_version - self.columns.versions).astype(np.float32)
        self.advantages = self.columns.advantages

    @property
    def is_idle(self) -> bool:
        """Whether nothing of the batch is trained: all gradients are 0."""
        return self.untrained_frac == 1

    @contextmanager
    def time_phase(self, name: str) -> Generator[None, None, None]:
        """Adds the time that the block takes to a phase."""
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def penalty(self, kl: KlConfig) -> Floats:
        """[P]: what the distance to the reference costs each token, as a reward (Ouyang et al. 2022,
        arXiv:2203.02155, eq. 2)."""
        assert self.reference is not None
        behavior = np.maximum(self.columns.behavior_logprobs, self.reference - np.float32(MAX_LOG_RATIO))
        estimate = KL_ESTIMATORS[kl.estimator](torch.from_numpy(behavior), torch.from_numpy(self.reference))
        return (kl.coef * estimate).numpy()

    def apply_penalty(self, kl: KlConfig) -> None:
        """Subtracts from each advantage the penalties from its token to the sequence's end: their
        undiscounted return."""
        starts = self.columns.trained_starts
        rest = sums_to_end(self.penalty(kl), starts)
        rest[np.repeat(self.columns.is_zeroed, np.diff(starts))] = 0
        self.advantages = (self.advantages - rest).astype(np.float32)

    def estimate(self, values: Floats, critic: ValueModelConfig, kl: KlConfig) -> None:
        """Computes advantages and returns from a critic's values; the batch's advantages are then rewards of
        turns."""
        rewards = rewards_at_ends(self.columns.advantages, self.columns.is_turn_end)
        if self.reference is not None and kl.place == "reward":
            rewards = rewards - self.penalty(kl)
        starts = self.columns.trained_starts
        self.values = values
        self.advantages, self.returns = advantages_and_returns(
            rewards, values, starts, discount=critic.discount, decay=critic.decay
        )
        if critic.whiten:
            self.advantages = whiten(self.advantages, among=self.ranks.gather_column(self.advantages))

    def note_start(self, trained: NDArray[np.int64], logprobs: Floats) -> None:
        """Stores logprobs of the weights at the step's start."""
        self.proximal[trained] = logprobs
        self.is_at_start[trained] = True

    def inputs(self, trained: NDArray[np.int64], logprobs: Tensor, *, is_first: bool = True) -> LossInputs:
        """The loss's columns of one microbatch. The caller adds entropies and statistics. `is_first`: the
        weights are those of the step's start, so these logprobs are also the proximal ones."""

        def column(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(values).to(logprobs.device, non_blocking=True)

        proximal = None
        if self.needs_proximal and is_first:
            proximal = logprobs.detach()
        elif self.needs_proximal:
            assert self.is_at_start[trained].all()
            proximal = column(self.proximal[trained])
        samples = self.columns.sample_of(trained)
        return LossInputs(
            logprobs=logprobs,
            proximal_logprobs=proximal,
            behavior_logprobs=column(self.columns.behavior_logprobs[trained]),
            advantages=column(self.advantages[trained]),
            sequence_idx=column(np.cumsum(np.diff(samples, prepend=samples[:1]) != 0)),
            staleness=column(self.staleness[trained]),
            reference_logprobs=None if self.reference is None else column(self.reference[trained]),
            teacher_logprobs=None if self.teacher is None else column(self.teacher[trained]),
            streams={
                name: column(entries[trained])
                for name, entries in self.columns.streams.items()
                if name != EXPERTS_STREAM  # large, and only for the backend
            },
        )

    def total(self, trained: NDArray[np.int64], per_token: Tensor, denominator: Denominator) -> Tensor:
        """The loss summed over a microbatch. With `sequence_means` or `episode_means`, each token's loss is
        divided by the trained tokens of its sequence or episode."""
        if denominator == "sequence_means":
            counts = np.diff(self.columns.trained_starts)
        elif denominator == "episode_means":
            counts = self.columns.episode_tokens
        else:
            return per_token.sum()
        divisors = torch.from_numpy(counts[self.columns.sample_of(trained)])
        return (per_token / divisors.to(per_token.device, non_blocking=True)).sum()

    def add(self, inputs: LossInputs, output: LossOutput, loss: Tensor, is_beyond: Tensor) -> None:
        """Adds one microbatch to the metrics. `is_beyond`: see `with_bounded_ratios`."""
        with torch.no_grad():
            metrics = {"ratio_bounded_frac": is_beyond, **output.metrics}
            if inputs.entropies is not None:
                metrics = {"entropy": inputs.entropies, **metrics}
            if inputs.proximal_logprobs is not None:
                ratio = torch.exp(inputs.logprobs - inputs.proximal_logprobs)
                metrics = {"ratio_mean": ratio, **metrics}
                self.sums.add_max("ratio_max", ratio)
            self.sums.add(metrics)
        self.losses = self.losses + loss.detach()

    # size: one line per number
    def metrics(self, num_minibatches: int, further: Mapping[str, float]) -> tuple[MetricItem, ...]:
        """All metrics of the step, over the batches of all ranks. Names of durations end in `_s`.

        `further`: the backend's own metrics.
        """
        columns = self.columns
        whole = self.ranks.gather_column
        is_at_start = whole(self.is_at_start)
        proximal = whole(self.proximal)
        gap = (proximal - whole(columns.behavior_logprobs))[is_at_start]
        staleness = whole(self.staleness)
        is_fresh = staleness == 0
        counts = self.ranks.gather_values(
            [len(columns.token_ids), self.num_gradient_tokens, self.num_computed, float(self.losses)]
        )
        num_tokens, num_gradient_tokens, num_computed, losses = (
            sum(own) for own in zip(*counts, strict=True)
        )
        values = {
            "loss": losses / num_minibatches,
            "grad_norm": float(np.mean(self.grad_norms)),
            **combine_sums(self.ranks.gather_values(self.sums.plain())),
            "behavior_gap": float(np.abs(gap).mean()),
            "behavior_gap_max": float(np.abs(gap).max()),
            "behavior_kl": _mean_k3(gap),
            "effective_frac": effective_frac(gap),
            "fresh_frac": float(is_fresh.mean()),
            "token_staleness": float(staleness.mean()),
            "lr": self.lr,
            "num_tokens": float(num_tokens),
            "num_gradient_tokens": float(num_gradient_tokens),
            "computed_frac": num_computed / num_tokens,
            **self.seconds,
            **further,
        }
        values |= statistics_metrics(self.statistics)
        if self.untrained_frac:
            values["untrained_frac"] = self.untrained_frac
        if left_out := max(self.ranks.gather_values(columns.num_left_out)):
            values["streams_left_out"] = float(left_out)
        if self.values is not None and self.returns is not None:
            critic_values = whole(self.values)
            values["value_loss"] = float(np.mean(self.critic_losses))
            values["critic_grad_norm"] = float(np.mean(self.critic_norms))
            values["value_mean"] = float(critic_values.mean())
            values["value_explained_frac"] = explained_frac(critic_values, whole(self.returns))
        if self.reference is not None:
            away = (whole(self.reference) - proximal)[is_at_start]
            values["reference_kl"] = _mean_k3(away)
        if (fresh := is_fresh[is_at_start]).any():
            values["logprob_mismatch"] = float(np.abs(gap[fresh]).mean())
            values["logprob_mismatch_max"] = float(np.abs(gap[fresh]).max())
        return metric_items(values)


def with_bounded_ratios(inputs: LossInputs) -> tuple[LossInputs, Tensor]:
    """The inputs with no ratio above `exp(MAX_LOG_RATIO)`, and bool [T]: which tokens had to be changed.

    A changed token gets no gradient. The lower of its two logprobs is raised, so that everything that a loss
    computes from it is finite. All other tokens stay identical to the bit.
    """
    now = inputs.logprobs.detach()
    lowest = now - MAX_LOG_RATIO
    is_beyond = torch.zeros_like(now, dtype=torch.bool)
    proximal = inputs.proximal_logprobs
    if proximal is not None:
        proximal = torch.maximum(proximal, lowest)
        is_beyond = proximal != inputs.proximal_logprobs
        lowest = torch.maximum(lowest, proximal - MAX_LOG_RATIO)
    behavior = torch.maximum(inputs.behavior_logprobs, lowest)
    is_beyond = is_beyond | (behavior != inputs.behavior_logprobs)
    reference = inputs.reference_logprobs
    if reference is not None:
        reference = torch.minimum(reference, now + MAX_LOG_RATIO)
    bounded = replace(
        inputs,
        logprobs=torch.where(is_beyond, now, inputs.logprobs),
        proximal_logprobs=proximal,
        behavior_logprobs=behavior,
        reference_logprobs=reference,
    )
    return bounded, is_beyond


def metric_items(values: Mapping[str, float]) -> tuple[MetricItem, ...]:
    """Metrics as committed: clamped to the bounds of metrics, and without NaNs, which are only counted."""
    finite = {
        name: max(-MAX_METRIC, min(MAX_METRIC, value))
        for name, value in values.items()
        if not math.isnan(value)
    }
    if lost := sorted(values.keys() - finite.keys()):
        _log.warning("metrics that are NaN are not reported: %s", ", ".join(lost))
        finite["nan_metrics"] = float(len(lost))
    return tuple(MetricItem(name, value, _reduction(name)) for name, value in finite.items())


def statistics_metrics(minibatches: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """`statistics/NAME`: the mean of a statistic over the minibatches in which it is finite; and
    `unbounded_frac`: the share of minibatches in which one is not, so that it bounds nothing."""
    metrics: dict[str, float] = {}
    for name in (name for name, value in minibatches[0].items() if value.numel() == 1) if minibatches else ():
        values = [float(statistics[name]) for statistics in minibatches]
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            metrics[f"statistics/{name}"] = sum(finite) / len(finite)
        unbounded_frac = 1 - len(finite) / len(values)
        metrics["unbounded_frac"] = max(unbounded_frac, metrics.get("unbounded_frac", 0.0))
    return metrics


def statistics_inputs(inputs: LossInputs, ranks: Ranks) -> LossInputs:
    """The columns of a minibatch from all ranks, without sequences and entropies."""

    def whole(column: Tensor) -> Tensor:
        column = column.detach()
        return column if ranks.world == 1 else torch.from_numpy(ranks.gather_column(column.cpu().numpy()))

    optional = ("proximal_logprobs", "staleness", "reference_logprobs", "teacher_logprobs")
    columns = {name: getattr(inputs, name) for name in optional}
    given: dict[str, Any] = {name: None if c is None else whole(c) for name, c in columns.items()}
    return LossInputs(
        logprobs=whole(inputs.logprobs),
        behavior_logprobs=whole(inputs.behavior_logprobs),
        advantages=whole(inputs.advantages),
        **given,
        streams={name: whole(column) for name, column in sorted(inputs.streams.items())},
    )


def _mean_k3(log_ratios: Floats) -> float:
    """Mean of r - 1 - log r, an estimator of a KL divergence, with r bounded as in the losses."""
    return float((np.expm1(np.minimum(log_ratios, MAX_LOG_RATIO)) - log_ratios).mean(dtype=np.float64))


def _reduction(name: str) -> Reduction:
    """How values of several trainers are combined."""
    if name in {"num_tokens", "num_gradient_tokens"}:
        return "sum"
    return "max" if name.endswith("_max") else "mean"
