"""What a complete group is worth to one policy: filters, then shaping, then credit.

A function of the user's own that raises, or returns something else than it should, causes a `ComponentError`.
The run ends with its message, since training on a guess would be worse.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from astraflow.algorithms.credit import GdpoCredit, make_credit
from astraflow.algorithms.filters import make_filter
from astraflow.algorithms.own import called
from astraflow.algorithms.shaping import make_shaping
from astraflow.config import Use
from astraflow.dataflow.config import TableConfig
from astraflow.dataflow.core.commands import SampleView, TrajectoryMeta
from astraflow.dataflow.core.finite import finite_sum
from astraflow.dataflow.core.state import GroupState, ReadyGroup
from astraflow.dataflow.core.table_parts import component_name
from astraflow.errors import ComponentError
from astraflow.protocols import Stateful
from astraflow.types.bounds import MAX_ADVANTAGE
from astraflow.types.facts import GroupFacts, Outcome, TrajectoryFacts, episode_weights

__all__ = ["Discarded", "Valuation", "outcome_of"]

_Advantage = float | tuple[float, ...]
"""The advantage of all trained tokens of a trajectory, or of each of its turns."""
_NOT_FINITE = "not_finite"
"""Groups whose rewards the built-in functions cannot compare are counted under this name."""


class _NotFiniteError(ComponentError):
    """A function gave a number that is not finite, or too large."""


class Discarded(NamedTuple):
    """The fate of a group that gives nothing to train on, and the filter that decided it."""

    fate: Literal["unused", "filtered"]
    by: str = ""


class Valuation:
    """Filters, shaping and credit of one policy's table.

    Example: `Valuation(table).value("actor", group)` is a `ReadyGroup`, or the fate of a group that has none.
    """

    def __init__(self, table: TableConfig) -> None:
        self._masks_truncated = table.masks_truncated
        self._shaping = tuple((config.name, make_shaping(config)) for config in table.shaping)
        self._filters = tuple((config.name, make_filter(config)) for config in table.filters)
        self._credit = make_credit(table.credit)
        self._has_own = any(
            isinstance(config, Use) for config in (*table.shaping, *table.filters, table.credit)
        )
        self._reads_metrics = self._has_own or isinstance(table.credit, GdpoCredit)
        self.credit_name = component_name("credit", table.credit)
        """For messages that already name the policy."""

    @property
    def memory(self) -> Stateful | None:
        """The credit, if it remembers something that a snapshot has to keep."""
        return self._credit if isinstance(self._credit, Stateful) else None

    def value(self, policy: str, group: GroupState) -> ReadyGroup | Discarded:
        """The group as the policy trains on it; `unused` if the policy sampled no token, or `filtered`.

        Finite rewards may be so large that their sums or squares are not finite. If only built-in functions
        are at work, such a group is filtered and counted as `not_finite`, so that no reward ends a run.
        Raises: ComponentError.
        """
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                return self._valued(policy, group)
        except ComponentError as err:
            is_too_large = isinstance(err, _NotFiniteError) or isinstance(err.__cause__, OverflowError)
            if self._has_own or not is_too_large:
                raise
            return Discarded("filtered", _NOT_FINITE)

    def _valued(self, policy: str, group: GroupState) -> ReadyGroup | Discarded:
        metas = _metas(policy, group)
        if not metas:
            return Discarded("unused")
        facts = _group_facts(policy, group, metas)
        if self._reads_metrics:
            facts = dataclasses.replace(facts, metrics=_metrics(group))
        at = f"policy {policy!r}, group {group.id}"
        for name, keep in self._filters:
            kept = called(f"{at}: filter {name!r}", keep, facts)
            if kept is not True:  # False, or a text that says why the group is dropped
                return Discarded("filtered", name)
        for name, shape in self._shaping:
            what = f"{at}: shaping {name!r}"
            given: Any = called(what, shape, facts)
            rewards = called(f"the answer {given!r} of {what}", _numbers, given)
            facts = _with_rewards(facts, rewards, at)
        return _credited(group, metas, self._advantages(facts, f"{at}: credit"), f"{at}: credit")

    def _advantages(self, facts: GroupFacts, what: str) -> list[_Advantage]:
        """One advantage per trajectory. Those that are masked get 0, and the others are compared without
        them."""
        trajectories = facts.trajectories
        counted = [i for i, t in enumerate(trajectories) if not (self._masks_truncated and t.is_truncated)]
        facts = dataclasses.replace(facts, trajectories=tuple(trajectories[i] for i in counted))
        answer = called(what, self._credit, facts)
        given = called(f"the answer {answer!r} of {what}", _as_advantages, answer)
        if len(given) != len(counted):
            raise ComponentError(f"{what} gave {len(given)} advantages for {len(counted)} trajectories")
        advantages: list[_Advantage] = [0.0] * len(trajectories)
        for i, advantage in zip(counted, given, strict=True):
            advantages[i] = advantage
        return advantages


def _numbers(answer: Iterable[Any]) -> tuple[float, ...]:
    """The numbers of an answer. Raises: TypeError, ValueError if it holds anything else."""
    return tuple(_number(value) for value in answer)


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"{value!r} is a text, not a number")
    return float(value)


def _as_advantages(answer: Iterable[Any]) -> list[_Advantage]:
    """For each trajectory, a number or the numbers of its turns; arrays of numpy count as lists."""
    found: list[_Advantage] = []
    for entry in answer:
        is_list = isinstance(entry, list | tuple | np.ndarray)
        found.append(_numbers(cast("Any", entry)) if is_list else _number(entry))
    return found


def _with_rewards(facts: GroupFacts, rewards: Sequence[float], at: str) -> GroupFacts:
    if len(rewards) != len(facts.trajectories):
        raise ComponentError(f"{at}: shaping gave {rewards!r} for {len(facts.trajectories)} trajectories")
    if not all(abs(r) <= MAX_ADVANTAGE for r in rewards):
        raise _NotFiniteError(
            f"{at}: shaping gave rewards that are not within +-{MAX_ADVANTAGE:g}: {rewards!r}"
        )
    changed = zip(facts.trajectories, rewards, strict=True)
    shaped = tuple(dataclasses.replace(t, reward=r) for t, r in changed)
    return dataclasses.replace(facts, trajectories=shaped)


def outcome_of(group: GroupState, versions: Mapping[str, int]) -> Outcome:
    """The completed group as curators see it; `versions`: each policy's newest."""
    groups: dict[str, GroupFacts] = {}
    for policy in versions:
        if metas := _metas(policy, group):
            groups[policy] = _group_facts(policy, group, metas)
    # A curator that follows no policy reads the scores of the episodes, under an empty name.
    scored = [(idx, episode.score) for idx, episode in enumerate(group.episodes) if episode.status == "good"]
    groups[""] = GroupFacts("", group.id, tuple(_scored(idx, score) for idx, score in scored))
    return Outcome(task_idx=group.task_idx, groups=groups, versions={**versions, "": sum(versions.values())})


def _metas(policy: str, group: GroupState) -> list[tuple[int, TrajectoryMeta]]:
    """(episode, trajectory) of those that the policy may train on."""
    return [
        (episode_idx, meta)
        for episode_idx, episode in enumerate(group.episodes)
        if episode.facts is not None
        for meta in episode.facts.trajectories
        if meta.policy == policy and meta.num_trained_tokens > 0
    ]


def _group_facts(policy: str, group: GroupState, metas: Sequence[tuple[int, TrajectoryMeta]]) -> GroupFacts:
    trajectories = tuple(_facts(idx, meta) for idx, meta in metas)
    return GroupFacts(policy, group.id, trajectories, source=group.source)


def _metrics(group: GroupState) -> dict[int, dict[str, float]]:
    """The metrics of each good episode."""
    return {
        idx: {item.name: item.value for item in episode.facts.metrics}
        for idx, episode in enumerate(group.episodes)
        if episode.facts is not None
    }


def _scored(episode_idx: int, score: float) -> TrajectoryFacts:
    return TrajectoryFacts(
        episode_idx=episode_idx,
        role="score",
        reward=score,
        turn_rewards=(),
        turn_spans=(),
        num_tokens=0,
        num_trained_tokens=0,
        is_truncated=False,
    )


def _facts(episode_idx: int, meta: TrajectoryMeta) -> TrajectoryFacts:
    return TrajectoryFacts(
        episode_idx=episode_idx,
        role=meta.role,
        reward=meta.reward,
        turn_rewards=meta.turn_rewards,
        turn_spans=meta.turn_spans,
        num_tokens=meta.num_tokens,
        num_trained_tokens=meta.num_trained_tokens,
        is_truncated=meta.finish_reason == "length",
        state_keys=meta.state_keys,
        repeated_frac=meta.repeated_frac,
    )


def _credited(
    group: GroupState,
    metas: Sequence[tuple[int, TrajectoryMeta]],
    advantages: Sequence[_Advantage],
    what: str,
) -> ReadyGroup:
    samples: list[SampleView] = []
    total = 0.0
    square_total = 0.0
    episodes = [(episode_idx, meta.role) for episode_idx, meta in metas]
    shares = episode_weights(episodes, [meta.num_trained_tokens for _, meta in metas])
    for (episode_idx, meta), advantage in zip(metas, advantages, strict=True):
        spans, weights = _spans(meta, advantage, what)
        total += sum(w * value for w, (_, _, value) in zip(weights, spans, strict=True))
        square_total += sum(w * value * value for w, (_, _, value) in zip(weights, spans, strict=True))
        samples.append(
            SampleView(
                group_id=group.id,
                episode_idx=episode_idx,
                task_id=group.task_id,
                payload=meta.payload,
                advantages=spans,
                num_tokens=meta.num_tokens,
            )
        )
    return ReadyGroup(
        group_id=group.id,
        samples=tuple(samples),
        oldest_version=min(meta.oldest_version for _, meta in metas),
        num_tokens=sum(meta.num_tokens for _, meta in metas),
        num_trained_tokens=sum(meta.num_trained_tokens for _, meta in metas),
        advantage_sum=total,
        advantage_square_sum=square_total,
        reward_sum=finite_sum(meta.reward for _, meta in metas),
        episode_reward_sum=finite_sum(w * meta.reward for w, (_, meta) in zip(shares, metas, strict=True)),
        num_episodes=len(set(episodes)),
    )


def _spans(
    meta: TrajectoryMeta, advantage: _Advantage, what: str
) -> tuple[tuple[tuple[int, int, float], ...], tuple[int, ...]]:
    """(start, end, advantage) of each span, and the number of trained tokens in it."""
    if not isinstance(advantage, tuple):
        spans = ((0, meta.num_tokens, advantage),)
        weights = (meta.num_trained_tokens,)
    elif len(advantage) == len(meta.turn_spans):
        pairs = zip(meta.turn_spans, advantage, strict=True)
        spans = tuple((s, e, a) for (s, e), a in pairs)
        weights = meta.num_trained_by_turn
    else:
        raise ComponentError(f"{what} gave {len(advantage)} advantages for {len(meta.turn_spans)} turns")
    if not all(abs(value) <= MAX_ADVANTAGE for _, _, value in spans):
        raise _NotFiniteError(
            f"{what} gave an advantage that is not finite, or not within +-{MAX_ADVANTAGE:g}: {advantage!r}"
        )
    return spans, weights
