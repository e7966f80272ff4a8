"""Facts about a group for curators, filters, shaping and credit: plain values, without tokens.

The dataflow builds these facts when a group completes, and passes them to the functions of `algorithms` and
of the user. They are not sent over the network.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["GroupFacts", "Outcome", "TrajectoryFacts", "episode_weights", "is_right"]

_RIGHT_SCORE = 1.0 - 1e-6
"""The full score of a reward, which a weighted sum may miss by a rounding error."""


def is_right(score: float) -> bool:
    """Whether a score counts as a right answer, for `pass@k` and in workflows. Partial credit doesn't."""
    return score >= _RIGHT_SCORE


def episode_weights(episodes: Sequence[Hashable], num_tokens: Sequence[int]) -> tuple[float, ...]:
    """The weight of each trajectory within its episode: its share of the episode's trained tokens.

    The weights of one episode sum to 1, so splitting a trajectory in two does not change the weight of its
    episode. Trajectories of an episode without trained tokens get equal shares.

    Example: `episode_weights(["a", "b", "b"], [9, 1, 3])` is `(1.0, 0.25, 0.75)`.
    """
    if len(set(episodes)) == len(episodes):
        return (1.0,) * len(episodes)
    tokens: dict[Hashable, int] = {}
    counts: dict[Hashable, int] = {}
    for episode, num in zip(episodes, num_tokens, strict=True):
        tokens[episode] = tokens.get(episode, 0) + num
        counts[episode] = counts.get(episode, 0) + 1
    return tuple(
        num / tokens[episode] if tokens[episode] else 1 / counts[episode]
        for episode, num in zip(episodes, num_tokens, strict=True)
    )


@dataclass(frozen=True, slots=True)
class TrajectoryFacts:
    """One trajectory of a group, without its tokens."""

    episode_idx: int
    """Position of the trajectory's episode in the group."""
    role: str
    reward: float
    turn_rewards: tuple[float, ...]
    """One reward per turn."""
    turn_spans: tuple[tuple[int, int], ...]
    """The sampled tokens `[start, end)` of each turn."""
    num_tokens: int
    num_trained_tokens: int
    is_truncated: bool
    state_keys: tuple[int, ...] = ()
    """One key per turn. Two keys are equal if the policy was shown the same state."""
    repeated_frac: float = 0.0
    """Share of 8-grams of sampled tokens that occurred before. Computed if the filter `repetition` or a part
    of your own may read it, and 0 otherwise."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One policy's trajectories of one group, ordered by (episode_idx, position in the episode).

    An episode has several trajectories of one role where its history forked, or where its workflow holds
    several conversations. A statistic that counts trajectories would count such an episode more than once;
    `weights` prevents that.

    Example: `sum(w * t.reward for w, t in zip(facts.weights, facts.trajectories)) / sum(facts.weights)`.
    """

    policy: str
    group_id: int
    trajectories: tuple[TrajectoryFacts, ...]
    source: str = ""
    """The task's source; empty for a pushed task."""
    metrics: Mapping[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])
    """The metrics of each episode by its `episode_idx`. Empty if nothing but built-in parts that don't read
    them gets the group."""

    @property
    def weights(self) -> tuple[float, ...]:
        """One number per trajectory; the weights of one role in one episode sum to 1."""
        return episode_weights(
            [(t.episode_idx, t.role) for t in self.trajectories],
            [t.num_trained_tokens for t in self.trajectories],
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Facts for curators about a completed group of a task, before any filter."""

    task_idx: int
    groups: Mapping[str, GroupFacts]
    """The trajectories of each policy that has any. The key "" holds one trajectory per successful episode,
    whose reward is the episode's `score`."""
    versions: Mapping[str, int]
    """The newest version of each policy. The key "" holds their sum."""
