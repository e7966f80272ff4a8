"""Values a complete group for one policy: applies filters, then shaping, then credit.

If a user's own function raises an error or returns something unexpected, that is a `ComponentError`, and the
run ends with its message. Training on a guess would be worse.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from astraflow.algorithms.credit import GdpoCredit, make_credit
from astraflow.algorithms.filters import TruncatedFilter, make_filter
from astraflow.algorithms.group_statistics import UNCOMPARED
from astraflow.algorithms.own import call_component
from astraflow.algorithms.shaping import make_shaping
from astraflow.config import Use
from astraflow.dataflow.config import TableConfig
from astraflow.dataflow.core.commands import SampleView, TrajectoryMeta
from astraflow.dataflow.core.finite import finite_sum
from astraflow.dataflow.core.state import GroupState, ReadyGroup
from astraflow.dataflow.core.table_parts import component_name
from astraflow.errors import ComponentError
from astraflow.protocols import Stateful
from astraflow.types import ZeroedBy
from astraflow.types.bounds import MAX_ADVANTAGE, as_label, as_number
from astraflow.types.facts import GroupFacts, Outcome, TrajectoryFacts, episode_weights

__all__ = ["Discard", "Valuation", "outcome_of"]

_Advantage = float | tuple[float, ...]
"""The advantage of all trained tokens of a trajectory, or of each of its turns."""
_MAX_REASON = 100
"""Characters of a filter's name and reason in reports."""
_NOT_FINITE = "not_finite"
"""Name under which groups are counted whose rewards are too large for the built-in functions."""


class _NotFiniteError(ComponentError):
    """A function returned a number that is not finite, or too large."""


class Discard(NamedTuple):
    """The fate of a group that has nothing to train on, and the filter that dropped it, if any."""

    fate: Literal["unused", "filtered"]
    by: str = ""


class Valuation:
    """Filters, shaping and credit of one policy's table.

    Example: `Valuation(table).value("actor", group)` is a `ReadyGroup`, or a `Discard`.
    """

    def __init__(self, table: TableConfig) -> None:
        self._shaping = tuple((_name_of(config), make_shaping(config)) for config in table.shaping)
        self._filters = tuple((config, make_filter(config)) for config in table.filters)
        self._credit = make_credit(table.credit)
        self.has_own = any(
            isinstance(config, Use) for config in (*table.shaping, *table.filters, table.credit)
        )
        """Whether any of them is the user's own."""
        self._reads_metrics = self.has_own or isinstance(table.credit, GdpoCredit)
        self.credit_name = component_name("credit", table.credit)
        """For messages that already name the policy."""

    @property
    def memory(self) -> Stateful | None:
        """The credit function, if it has state that snapshots must keep."""
        return self._credit if isinstance(self._credit, Stateful) else None

    def value(self, policy: str, group: GroupState) -> ReadyGroup | Discard:
        """Returns the group as the policy trains on it, or why not: `unused` (it sampled no token) or
        `filtered`.

        Finite rewards may be so large that their sums or squares are not finite. With built-in functions
        alone, such a group is filtered and counted as `not_finite`, so that no reward ends a run.

        Raises: ComponentError if a user's own function fails.
        """
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                return self._value_group(policy, group)
        except ComponentError as err:
            is_too_large = isinstance(err, _NotFiniteError) or isinstance(err.__cause__, OverflowError)
            if self.has_own or not is_too_large:
                raise
            return Discard("filtered", _NOT_FINITE)

    def _value_group(self, policy: str, group: GroupState) -> ReadyGroup | Discard:
        metas = _trainable_metas(policy, group)
        if not metas:
            return Discard("unused")
        facts = _make_group_facts(policy, group, metas)
        if self._reads_metrics:
            facts = dataclasses.replace(facts, metrics=_metrics(group))
        at = f"policy {policy!r}, group {group.id}"
        counted = tuple(range(len(metas)))
        for config, keep in self._filters:
            name = _name_of(config)
            kept = call_component(f"{at}: filter {name!r}", keep, facts)
            if as_number(kept) != 1:  # False, or a text that says why the group is dropped
                return Discard("filtered", _with_reason(name, kept))
            if isinstance(config, TruncatedFilter) and config.action == "mask":
                # What it masks takes part in nothing that follows.
                left = [
                    (i, t) for i, t in zip(counted, facts.trajectories, strict=True) if not t.is_truncated
                ]
                counted = tuple(i for i, _ in left)
                facts = dataclasses.replace(facts, trajectories=tuple(t for _, t in left))
        for name, shape in self._shaping:
            what = f"{at}: shaping {name!r}"
            answer: Any = call_component(what, shape, facts)
            rewards = call_component(f"the answer {answer!r} of {what}", _to_floats, answer)
            facts = _replace_rewards(facts, rewards, at)
        advantages = self._compute_advantages(facts, f"{at}: credit")
        worth: list[tuple[_Advantage, ZeroedBy]] = [(0.0, "filter")] * len(metas)
        for i, advantage in zip(counted, advantages, strict=True):
            worth[i] = (advantage, "" if _is_compared(advantage) else "credit")
        return _make_ready_group(group, metas, worth, f"{at}: credit")

    def _compute_advantages(self, facts: GroupFacts, what: str) -> list[_Advantage]:
        """One advantage per trajectory that no filter has masked."""
        answer = call_component(what, self._credit, facts)
        values = call_component(f"the answer {answer!r} of {what}", _to_advantages, answer)
        if len(values) != len(facts.trajectories):
            raise ComponentError(
                f"{what} gave {len(values)} advantages for {len(facts.trajectories)} trajectories"
            )
        return values


def _name_of(config: Any) -> str:
    """The name of a component in reports: for the user's own, where it is from."""
    return config.use if isinstance(config, Use) else config.name


def _with_reason(name: str, kept: object) -> str:
    """The filter that dropped a group, and the reason if it gave one. Example: `my_filters:easy (solved)`."""
    reason = " ".join(kept.split())[:_MAX_REASON] if isinstance(kept, str) else ""
    return as_label(f"{name[:_MAX_REASON]} ({reason})") if reason else name


def _to_floats(answer: Iterable[Any]) -> tuple[float, ...]:
    """Converts an answer to floats. Raises: TypeError, ValueError if it contains anything but numbers."""
    return tuple(_to_float(value) for value in answer)


def _to_float(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{value!r} is a text, not a number")
    return UNCOMPARED if value is UNCOMPARED else float(value)


def _to_advantages(answer: Iterable[Any]) -> list[_Advantage]:
    """Converts an answer to one number per trajectory, or one per turn. Arrays and tensors count as lists."""
    return [
        _to_floats(cast("Any", e)) if isinstance(e, list | tuple) or getattr(e, "ndim", 0) else _to_float(e)
        for e in answer
    ]


def _is_compared(advantage: _Advantage) -> bool:
    values = advantage if isinstance(advantage, tuple) else (advantage,)
    return not values or any(value is not UNCOMPARED for value in values)


def _replace_rewards(facts: GroupFacts, rewards: Sequence[float], at: str) -> GroupFacts:
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
    """The facts of a complete group for curators. `versions`: each policy's newest version."""
    groups: dict[str, GroupFacts] = {}
    metrics = _metrics(group)
    for policy in versions:
        if metas := _trainable_metas(policy, group):
            facts = _make_group_facts(policy, group, metas)
            groups[policy] = dataclasses.replace(facts, metrics=metrics)
    # The empty name stands for no policy in particular: curators that follow none read the episodes' scores.
    scored = [(idx, episode.score) for idx, episode in enumerate(group.episodes) if episode.status == "good"]
    score_facts = tuple(_make_score_facts(idx, score) for idx, score in scored)
    groups[""] = GroupFacts("", group.id, score_facts, source=group.source, metrics=metrics)
    return Outcome(task_idx=group.task_idx, groups=groups, versions={**versions, "": sum(versions.values())})


def _trainable_metas(policy: str, group: GroupState) -> list[tuple[int, TrajectoryMeta]]:
    """(episode_idx, trajectory) of each trajectory that the policy can train on."""
    return [
        (episode_idx, meta)
        for episode_idx, episode in enumerate(group.episodes)
        if episode.facts is not None
        for meta in episode.facts.trajectories
        if meta.policy == policy and meta.num_trained_tokens > 0
    ]


def _make_group_facts(
    policy: str, group: GroupState, metas: Sequence[tuple[int, TrajectoryMeta]]
) -> GroupFacts:
    trajectories = tuple(_make_facts(idx, meta) for idx, meta in metas)
    return GroupFacts(policy, group.id, trajectories, source=group.source)


def _metrics(group: GroupState) -> dict[int, dict[str, float]]:
    """Metric -> value for each good episode."""
    return {
        idx: {item.name: item.value for item in episode.facts.metrics}
        for idx, episode in enumerate(group.episodes)
        if episode.facts is not None
    }


def _make_score_facts(episode_idx: int, score: float) -> TrajectoryFacts:
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


def _make_facts(episode_idx: int, meta: TrajectoryMeta) -> TrajectoryFacts:
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


def _make_ready_group(
    group: GroupState,
    metas: Sequence[tuple[int, TrajectoryMeta]],
    worth: Sequence[tuple[_Advantage, ZeroedBy]],
    what: str,
) -> ReadyGroup:
    samples: list[SampleView] = []
    total = 0.0
    square_total = 0.0
    num_tokens = 0
    num_sampled_tokens = num_zeroed_tokens = 0
    episodes = [(episode_idx, meta.role) for episode_idx, meta in metas]
    shares = episode_weights(episodes, [meta.num_trained_tokens for _, meta in metas])
    for (episode_idx, meta), (advantage, zeroed_by) in zip(metas, worth, strict=True):
        spans, weights = _advantage_spans(meta, advantage, what)
        part = square_part = 0.0
        for weight, (_, _, value) in zip(weights, spans, strict=True):
            part += weight * value
            square_part += weight * value * value
        total += part
        square_total += square_part
        num_tokens += meta.num_tokens
        num_sampled_tokens += meta.num_trained_tokens
        num_zeroed_tokens += meta.num_trained_tokens * (zeroed_by != "")
        samples.append(
            SampleView(
                group_id=group.id,
                episode_idx=episode_idx,
                task_id=group.task_id,
                payload=meta.payload,
                advantages=spans,
                num_tokens=meta.num_tokens,
                zeroed_by=zeroed_by,
            )
        )
    return ReadyGroup(
        group_id=group.id,
        samples=tuple(samples),
        oldest_version=min(meta.oldest_version for _, meta in metas),
        num_tokens=num_tokens,
        num_trained_tokens=num_sampled_tokens - num_zeroed_tokens,
        advantage_sum=total,
        advantage_square_sum=square_total,
        reward_sum=finite_sum(meta.reward for _, meta in metas),
        episode_reward_sum=finite_sum(w * meta.reward for w, (_, meta) in zip(shares, metas, strict=True)),
        num_episodes=len(set(episodes)),
        num_zeroed_tokens=num_zeroed_tokens,
    )


def _advantage_spans(
    meta: TrajectoryMeta, advantage: _Advantage, what: str
) -> tuple[tuple[tuple[int, int, float], ...], tuple[int, ...]]:
    """(start, end, advantage) of each span, and the number of trained tokens in it."""
    if not isinstance(advantage, tuple):
        spans = ((0, meta.num_tokens, float(advantage)),)  # a plain float, also for `UNCOMPARED`
        weights = (meta.num_trained_tokens,)
    elif len(advantage) == len(meta.turn_spans):
        pairs = zip(meta.turn_spans, advantage, strict=True)
        spans = tuple((s, e, float(a)) for (s, e), a in pairs)
        weights = meta.num_trained_by_turn
    else:
        raise ComponentError(f"{what} gave {len(advantage)} advantages for {len(meta.turn_spans)} turns")
    for _, _, value in spans:
        if not abs(value) <= MAX_ADVANTAGE:
            raise _NotFiniteError(
                f"{what} gave an advantage that is not finite, or not within +-{MAX_ADVANTAGE:g}: "
                f"{advantage!r}"
            )
    return spans, weights
