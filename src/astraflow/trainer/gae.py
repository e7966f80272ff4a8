"""From rewards and a critic's values to advantages: generalised advantage estimation. Pure.

Legend: P trained tokens of the batch, B sequences.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["advantages_and_returns", "explained_frac", "rewards_at_ends", "whitened"]

Floats = NDArray[np.float32]


def rewards_at_ends(turn_rewards: Floats, is_turn_end: NDArray[np.bool_]) -> Floats:
    """[P]: each turn's reward at its last trained token, 0 elsewhere; `turn_rewards` [P] is the same over a
    turn."""
    return np.where(is_turn_end, turn_rewards, np.float32(0))


def advantages_and_returns(
    rewards: Floats, values: Floats, starts: NDArray[np.int64], *, discount: float, decay: float
) -> tuple[Floats, Floats]:
    """Advantages [P] and the returns [P] that a critic learns, over trained tokens.

    delta_t = r_t + discount * V_(t+1) - V_t
    A_t = delta_t + discount * decay * A_(t+1);  return_t = A_t + V_t

    V_t is the value before token t; tokens that the policy did not sample are no steps, and nothing follows a
    sequence's last token, truncated or not. `starts` [B + 1]: first trained token of each sequence.
    Source: Schulman et al. 2015 (arXiv:1506.02438), eq. 11, 12 and 16.
    """
    follows = np.ones(len(values), dtype=np.float64)
    lasts = starts[1:][np.diff(starts) > 0] - 1
    follows[lasts] = 0.0
    next_values = np.append(values[1:], 0.0) * follows
    deltas = rewards.astype(np.float64) + discount * next_values - values
    found = np.empty(len(values), dtype=np.float64)
    running = 0.0
    for t in range(len(values) - 1, -1, -1):
        running = deltas[t] + discount * decay * follows[t] * running
        found[t] = running
    return found.astype(np.float32), (found + values).astype(np.float32)


def whitened(advantages: Floats) -> Floats:
    """(A - mean) / (deviation + 1e-6), over all trained tokens of the batch."""
    wide = advantages.astype(np.float64)
    return ((wide - wide.mean()) / (wide.std() + 1e-6)).astype(np.float32)


def explained_frac(values: Floats, returns: Floats) -> float:
    """1 - variance of what the values miss, over the variance of the returns; 0 if these do not vary."""
    spread = float(returns.astype(np.float64).var())
    return 1.0 - float((returns - values).astype(np.float64).var()) / spread if spread > 0 else 0.0
