"""The advantages of a group, recomputed from the rewards in the journal.

The journal does not store advantages. The dataflow computes them from the recipe when a group completes, and
this module calls the same functions again. Advantages are unknown in three cases: the recipe names the user's
own code (which a viewer must not run), the credit depends on earlier groups, or the trainer's critic computes
them. They are also unknown if the computation fails.
"""

from collections.abc import Sequence

from astraflow.algorithms.turn_credit import GaeCredit
from astraflow.config import Use
from astraflow.dataflow.config import TableConfig
from astraflow.dataflow.core.commands import EpisodeFacts
from astraflow.dataflow.core.state import EpisodeState, GroupState
from astraflow.dataflow.core.valuation import Discard, Valuation
from astraflow.errors import Error

__all__ = ["Advantages", "Spans"]

Spans = tuple[tuple[int, int, float], ...]
"""(start, end, advantage) for each span of tokens of one trajectory."""

_BY_REWARD = {"zero_variance", "truncated", "reward_range"}
"""Filters that use only rewards and finish reasons."""
_MAX_KNOWN = 100_000
"""Maximum number of reward patterns whose advantages are cached."""


class Advantages:
    """Computes the advantages of one policy's trajectories.

    Example: `Advantages("actor", table).of(7, {0: facts})`.
    """

    def __init__(self, policy: str, table: TableConfig) -> None:
        self._policy = policy
        has_own = any(isinstance(part, Use) for part in (*table.filters, *table.shaping, table.credit))
        self._valuation: Valuation | None = None
        # Checked before `Valuation` is made, because making it loads the user's code.
        if not has_own and not isinstance(table.credit, GaeCredit):
            valuation = Valuation(table)
            # A valuation with a memory depends on all earlier groups, some of which may be gone.
            self._valuation = valuation if valuation.memory is None else None
        # With this credit and without shaping, the advantages depend only on the key that `means` uses.
        self._is_plain = (
            table.credit.name == "group_relative"
            and not table.shaping
            and all(config.name in _BY_REWARD for config in table.filters)
        )
        self._known: dict[object, dict[tuple[int, int], float]] = {}

    def of(self, group_id: int, episodes: dict[int, EpisodeFacts]) -> dict[tuple[int, int], Spans]:
        """Maps (episode, position of the trajectory in it) to spans.

        The result is empty if the advantages are unknown, or if the group has nothing to train on.
        """
        if self._valuation is None or not episodes:
            return {}
        states = [
            EpisodeState(status="good", facts=episodes[idx]) if idx in episodes else EpisodeState()
            for idx in range(max(episodes) + 1)
        ]
        group = GroupState(
            id=group_id,
            task_id="",
            task_idx=0,
            source="",
            source_idx=0,
            undecided=[],
            preferred_worker="",
            episodes=states,
            num_open=0,
        )
        try:
            worth = self._valuation.value(self._policy, group)
        except (Error, ArithmeticError, ValueError):
            return {}
        if isinstance(worth, Discard):
            return {}
        return dict(zip(self._places(episodes), (s.advantages for s in worth.samples), strict=True))

    def means(self, group_id: int, episodes: dict[int, EpisodeFacts]) -> dict[tuple[int, int], float]:
        """Maps (episode, position of the trajectory in it) to the advantage of the trajectory.

        If turns have their own advantages, this is the mean over the spans, weighted by length.
        """
        key = self._key(episodes) if self._is_plain else None
        if key is not None and (known := self._known.get(key)) is not None:
            return known
        means = {place: _mean(spans) for place, spans in self.of(group_id, episodes).items()}
        if key is not None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = means
        return means

    def _places(self, episodes: dict[int, EpisodeFacts]) -> list[tuple[int, int]]:
        """Returns the trajectories that the policy trains on, in the order of the samples."""
        return [
            (idx, part)
            for idx in sorted(episodes)
            for part, meta in enumerate(episodes[idx].trajectories)
            if meta.policy == self._policy and meta.num_trained_tokens > 0
        ]

    def _key(self, episodes: dict[int, EpisodeFacts]) -> object:
        """Returns everything that plain credit depends on.

        Returns None if lengths count too, as they do among several trajectories of one role in an episode.
        """
        key: list[object] = []
        for idx, facts in sorted(episodes.items()):
            if len(facts.trajectories) > 1:
                return None
            for meta in facts.trajectories:
                is_trained = meta.num_trained_tokens > 0
                key.append((idx, meta.policy, meta.role, meta.reward, meta.finish_reason, is_trained))
        return tuple(key)


def _mean(spans: Sequence[tuple[int, int, float]]) -> float:
    total = sum(end - start for start, end, _ in spans)
    if not total:
        return 0.0
    return sum((end - start) * value for start, end, value in spans) / total
