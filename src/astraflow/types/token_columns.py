"""The samples of a batch as flat numpy columns, the input of a trainer's computation.

`trainer.columns` builds them from samples, and checks them.

Legend: B samples, N tokens of all samples, P trained tokens of all samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from astraflow.types import Media

__all__ = ["EXPERTS_STREAM", "Columns"]

EXPERTS_STREAM = "experts"
"""Name of the stream with the experts that a mixture of experts chose when it predicted a token: for each
layer in turn, the chosen experts in the engine's order."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Columns:
    """All samples, concatenated."""

    token_ids: NDArray[np.int32]
    """[N] tokens of all samples, prompts included."""
    starts: Ints
    """[B] first token of each sample."""
    lengths: Ints
    """[B] number of tokens of each sample."""
    group_ids: Ints
    """[B] group of each sample."""
    episode_idx: Ints
    """[B] position of the sample's episode in its group."""
    episode_tokens: Ints
    """[B] number of trained tokens in all samples of the sample's episode and role."""
    temperatures: Floats
    """[B], above 0."""
    trained_idx: Ints
    """[P] position in `token_ids` of each trained token; never a sample's first token."""
    trained_starts: Ints
    """[B + 1] first trained token of each sample, as a position in the trained columns."""
    behavior_logprobs: Floats
    """[P], nats."""
    advantages: Floats
    """[P]."""
    is_turn_end: NDArray[np.bool_]
    """[P] whether the token is the last trained one that its advantage covers."""
    versions: Ints
    """[P] version of the policy that sampled the token."""
    streams: Mapping[str, NDArray[Any]]
    """Name -> [P], or [P, W] with W values per token, in the dtype of the trajectories. Every trajectory has
    all of them."""
    is_zeroed: NDArray[np.bool_]
    """[B] whether a rule set the sample's advantages to 0, where they stay."""
    num_left_out: int = 0
    """Number of streams left out because some trajectories lack them or have them in another type."""
    media: Sequence[Media] = ()
    """[B] the images of each sample; empty if no sample has any."""

    def sample_of(self, trained: Ints) -> Ints:
        """The sample of each trained token."""
        return np.searchsorted(self.trained_starts, trained, side="right") - 1

    def trained_of(self, samples: Ints) -> Ints:
        """Positions in the trained columns of all trained tokens of `samples`, ascending."""
        is_chosen = np.zeros(len(self.lengths), dtype=np.bool_)
        is_chosen[samples] = True
        return np.flatnonzero(np.repeat(is_chosen, np.diff(self.trained_starts)))

    def num_trained(self, samples: Ints) -> int:
        """Number of trained tokens in some samples."""
        return int((self.trained_starts[samples + 1] - self.trained_starts[samples]).sum())

    def num_episodes(self, samples: Ints) -> float:
        """Number of episodes in some samples, counted once per role. A part of an episode counts by its share
        of the trained tokens."""
        own = self.trained_starts[samples + 1] - self.trained_starts[samples]
        return float((own / np.maximum(1, self.episode_tokens[samples])).sum())
