"""The arithmetic of a training step: learning rate, denominators, logprobs, advantages from a critic's values
(generalized advantage estimation), and sums for the metrics. Pure.

Legend: P trained tokens of the batch, B sequences, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from astraflow.errors import ConfigError
from astraflow.trainer.config import OptimizerConfig, TrainConfig

__all__ = [
    "TokenSums",
    "advantages_and_returns",
    "combine_sums",
    "denominator",
    "effective_frac",
    "entropies",
    "explained_frac",
    "learning_rate",
    "rewards_at_ends",
    "shuffle_seed",
    "sums_to_end",
    "token_logprobs",
    "whiten",
]

Floats = NDArray[np.float32]

_COSINE_FLOOR = 0.1
"""Share of the peak learning rate at which the cosine schedule ends."""


def learning_rate(config: OptimizerConfig, lr: float, *, update: int, num_updates: int) -> float:
    """Learning rate of optimizer step `update` (from 0) of `num_updates`.

    Warm-up: lr * (update + 1) / warmup_steps; then the schedule over the rest of the run.
    """
    if update < config.warmup_steps:
        return lr * (update + 1) / config.warmup_steps
    progress = min(1.0, (update - config.warmup_steps) / max(1, num_updates - config.warmup_steps))
    if config.schedule == "linear":
        return lr * (1 - progress)
    if config.schedule == "cosine":
        return lr * (_COSINE_FLOOR + (1 - _COSINE_FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))
    return lr


def denominator(
    config: TrainConfig, *, num_tokens: int, num_samples: int, num_episodes: float | None = None
) -> float:
    """The divisor of the loss summed over a minibatch: its trained tokens, samples or episodes, or a
    constant.

    With `sequence_means` and `episode_means`, the caller also divides each token's loss by the trained tokens
    of its sequence or episode. `num_episodes`: by default, each sample is an episode.
    """
    if config.denominator == "tokens":
        return float(num_tokens)
    if config.denominator == "fixed":
        return config.fixed_denominator
    if config.denominator in {"episodes", "episode_means"} and num_episodes is not None:
        return num_episodes
    return float(num_samples)


def sums_to_end(values: NDArray[np.float32], starts: NDArray[np.int64]) -> NDArray[np.float32]:
    """[P]: sum of `values` [P] from each entry to the end of its sequence. `starts` [B + 1]: first entry of
    each sequence, then P."""
    until = np.concatenate([np.zeros(1), np.cumsum(values, dtype=np.float64)])
    ends = np.repeat(starts[1:], np.diff(starts))
    return (until[ends] - until[:-1]).astype(np.float32)


def effective_frac(log_weights: NDArray[np.float32]) -> float:
    """Effective sample size of importance weights, as a share of their number: (sum w)^2 / (n * sum w^2).

    Source: Kong 1992, "A note on importance sampling using standardized weights".
    """
    weights = np.exp(log_weights.astype(np.float64) - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))


def shuffle_seed(seed: int, step: int) -> int:
    """Seed of a step's minibatches: the same if a step is repeated, and different for each step."""
    return (seed * 1_000_003 + step) % 2**63


def token_logprobs(logits: Tensor, target_ids: Tensor) -> Tensor:
    """Logprobs in nats of `target_ids` [P] or [P, K] under `logits` [P, V], in their shape, float32."""
    if target_ids.ndim > 1:
        return torch.log_softmax(logits.float(), dim=-1).gather(1, target_ids)
    return -cross_entropy(logits.float(), target_ids, reduction="none")


def entropies(logits: Tensor) -> Tensor:
    """Entropy [P] in nats of each distribution in `logits` [P, V]."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def rewards_at_ends(turn_rewards: Floats, is_turn_end: NDArray[np.bool_]) -> Floats:
    """[P]: each turn's reward at its last trained token, 0 elsewhere. `turn_rewards` [P] has it at each token
    of the turn."""
    return np.where(is_turn_end, turn_rewards, np.float32(0))


def advantages_and_returns(
    rewards: Floats, values: Floats, starts: NDArray[np.int64], *, discount: float, decay: float
) -> tuple[Floats, Floats]:
    """Advantages [P], and the returns [P] that a critic learns, over trained tokens.

    delta_t = r_t + discount * V_(t+1) - V_t
    A_t = delta_t + discount * decay * A_(t+1);  return_t = A_t + V_t

    V_t is the value before token t. Only tokens that the policy sampled are steps, and nothing follows a
    sequence's last token, truncated or not. `starts` [B + 1]: first trained token of each sequence, then P.
    Source: Schulman et al. 2015 (arXiv:1506.02438), eq. 11, 12 and 16.
    """
    follows = np.ones(len(values), dtype=np.float64)
    lasts = starts[1:][np.diff(starts) > 0] - 1
    follows[lasts] = 0.0
    next_values = np.append(values[1:], 0.0) * follows
    deltas = rewards.astype(np.float64) + discount * next_values - values
    advantages = np.empty(len(values), dtype=np.float64)
    running = 0.0
    for t in range(len(values) - 1, -1, -1):
        running = deltas[t] + discount * decay * follows[t] * running
        advantages[t] = running
    return advantages.astype(np.float32), (advantages + values).astype(np.float32)


def whiten(advantages: Floats, *, among: Floats) -> Floats:
    """(A - mean) / (standard deviation + 1e-6), both taken `among` all trained tokens of the batch."""
    first = np.float64(among[0]) if among.size else 0.0  # so that equal advantages have an exact mean
    every = among.astype(np.float64) - first
    wide = advantages.astype(np.float64) - first
    return ((wide - every.mean()) / (every.std() + 1e-6)).astype(np.float32)


def explained_frac(values: Floats, returns: Floats) -> float:
    """1 - var(returns - values) / var(returns); 0 if the returns do not vary."""
    spread = float(returns.astype(np.float64).var())
    if spread == 0:
        return 0.0
    return 1.0 - float((returns - values).astype(np.float64).var()) / spread


@dataclass(slots=True)
class TokenSums:
    """Sums of per-token numbers over a step, for the means that its metrics report."""

    num_tokens: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """float64 scalars on the device that computed them, so that adding never waits for the device."""
    largest: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def add(self, columns: Mapping[str, Tensor]) -> None:
        """Adds columns [P]. All tokens of the step must be added exactly once.

        Raises: ConfigError if a loss reports a metric of another shape.
        """
        sizes = {name: column.shape for name, column in columns.items()}
        if any(len(shape) != 1 for shape in sizes.values()) or len(set(sizes.values())) != 1:
            raise ConfigError(
                f"metrics of a loss must be columns [T] with one entry per token, whose means are reported; "
                f"got {dict(sizes)}"
            )
        self.num_tokens += next(iter(sizes.values()))[0]
        for name, column in columns.items():
            added = column.detach().sum(dtype=torch.float64)
            self.sums[name] = self.sums[name] + added if name in self.sums else added

    def add_max(self, name: str, column: Tensor) -> None:
        """Keeps the largest entry so far."""
        largest = column.detach().max()
        self.largest[name] = torch.maximum(self.largest[name], largest) if name in self.largest else largest

    def plain(self) -> dict[str, Any]:
        """The sums as plain numbers, for `combine_sums`."""
        return {
            "num_tokens": self.num_tokens,
            "sums": {name: float(value) for name, value in self.sums.items()},
            "largest": {name: float(value) for name, value in self.largest.items()},
        }


def combine_sums(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means and largest entries over all tokens of several `TokenSums`."""
    num_tokens = max(1, sum(part["num_tokens"] for part in parts))
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part["sums"].items():
            sums[name] = sums.get(name, 0.0) + value / num_tokens
    for part in parts:
        for name, value in part["largest"].items():
            sums[name] = max(sums.get(name, value), value)
    return sums
