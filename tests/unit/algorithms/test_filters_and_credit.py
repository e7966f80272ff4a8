"""The choice of filters, shaping and credit functions, and each filter."""

import dataclasses
from typing import Any, get_args

import pytest

from astraflow.algorithms.credit import CreditConfig, GroupRelativeCredit, make_credit
from astraflow.algorithms.filters import (
    FilterConfig,
    LengthFilter,
    RepetitionFilter,
    RewardRangeFilter,
    TruncatedFilter,
    ZeroVarianceFilter,
    make_filter,
)
from astraflow.algorithms.shaping import ShapingConfig
from astraflow.config import Use
from astraflow.errors import ConfigError
from astraflow.types.facts import GroupFacts, TrajectoryFacts


def make_group(*rewards: float, role: str = "actor") -> GroupFacts:
    """One trajectory a reward."""
    return GroupFacts(policy="actor", group_id=0, trajectories=tuple(_facts(r, role) for r in rewards))


def _facts(reward: float, role: str) -> TrajectoryFacts:
    return TrajectoryFacts(
        episode_idx=0,
        role=role,
        reward=reward,
        turn_rewards=(),
        turn_spans=(),
        num_tokens=1,
        num_trained_tokens=1,
        is_truncated=False,
    )


def enough(facts: GroupFacts, *, least: float) -> bool | str:
    """A filter of a user's own."""
    best = max(t.reward for t in facts.trajectories)
    return best >= least or f"best reward {best}"


def shifted(facts: GroupFacts, *, by: float = 0.0) -> tuple[float, ...]:
    """A credit function of a user's own."""
    return tuple(t.reward + by for t in facts.trajectories)


def test_equal_rewards_are_dropped_and_different_ones_kept():
    assert not ZeroVarianceFilter()(make_group(1.0, 1.0))
    assert ZeroVarianceFilter()(make_group(1.0, 0.0))


def test_epsilon_is_the_largest_difference_that_counts_as_equal():
    assert not ZeroVarianceFilter(epsilon=0.5)(make_group(0.0, 0.5))
    assert ZeroVarianceFilter(epsilon=0.49)(make_group(0.0, 0.5))


def test_rewards_that_differ_between_roles_only_carry_no_gradient():
    solver, judge = make_group(1.0, 1.0, role="solver"), make_group(0.0, 0.0, role="judge")
    both = GroupFacts(policy="actor", group_id=0, trajectories=solver.trajectories + judge.trajectories)
    assert not ZeroVarianceFilter()(both)


def test_one_role_that_differs_keeps_the_group():
    solver, judge = make_group(1.0, 1.0, role="solver"), make_group(0.0, 1.0, role="judge")
    both = GroupFacts(policy="actor", group_id=0, trajectories=solver.trajectories + judge.trajectories)
    assert ZeroVarianceFilter()(both)


def test_a_configs_fields_reach_its_function():
    assert make_filter(ZeroVarianceFilter(epsilon=2.0))(make_group(0.0, 1.0)) is False
    assert make_credit(GroupRelativeCredit(scale="none"))(make_group(0.0, 1.0)) == (-0.5, 0.5)


def names_in(union: Any) -> set[str]:
    """The names that a recipe may choose."""
    return {c.model_fields["name"].default for c in get_args(get_args(union)[0]) if c is not Use}


def test_every_built_in_has_a_name_that_a_recipe_may_choose():
    assert names_in(FilterConfig) == {"length", "repetition", "reward_range", "truncated", "zero_variance"}
    assert names_in(CreditConfig) == {
        "gae",
        "gdpo",
        "gigpo",
        "group_relative",
        "hierarchical",
        "max_rl",
        "opo",
        "pass_at_k",
        "rae",
        "reinforce_plus_plus",
        "rloo",
        "role_balanced",
        "turn_discount",
    }
    assert names_in(ShapingConfig) == {"length", "overlong"}


def test_length_drops_groups_with_many_lengths_outside():
    group = make_lengths(1, 5, 9, 20)
    assert LengthFilter(min_tokens=5, max_tokens=10)(group)
    assert not LengthFilter(min_tokens=6, max_tokens=10)(group)
    assert not LengthFilter(min_tokens=5, max_tokens=10, max_frac=0.25)(group)


def test_truncated_drops_or_masks():
    group = make_lengths(1, 1, 1, truncated=2)
    assert not TruncatedFilter()(group)
    assert TruncatedFilter(max_frac=0.7)(group)
    assert TruncatedFilter(action="mask")(group)
    assert not TruncatedFilter(action="mask")(make_lengths(1, 1, truncated=2))


def test_repetition_looks_at_each_trajectory():
    group = make_lengths(1, 1, 1)
    first, *rest = group.trajectories
    loops = dataclasses.replace(first, repeated_frac=0.9)
    group = dataclasses.replace(group, trajectories=(loops, *rest))
    assert RepetitionFilter()(group)
    assert not RepetitionFilter(max_frac=0.3)(group)
    assert RepetitionFilter(max_repeated=0.9, max_frac=0.3)(group)


def test_reward_range_keeps_the_middle():
    assert RewardRangeFilter()(make_group(1.0, 0.0, 0.0, 0.0))
    assert not RewardRangeFilter()(make_group(1.0, 1.0))
    assert not RewardRangeFilter(low=0.3)(make_group(1.0, 0.0, 0.0, 0.0))


def make_lengths(*lengths: int, truncated: int = 0) -> GroupFacts:
    """One trajectory a length; the first ones are truncated."""
    group = make_group(*(0.0 for _ in lengths))
    changed = [
        dataclasses.replace(t, num_trained_tokens=n, is_truncated=i < truncated)
        for i, (t, n) in enumerate(zip(group.trajectories, lengths, strict=True))
    ]
    return dataclasses.replace(group, trajectories=tuple(changed))


def test_a_users_own_functions_are_loaded_with_their_args():
    keep = make_filter(Use(use=f"{__name__}:enough", args={"least": 1.0}))
    credit = make_credit(Use(use=f"{__name__}:shifted", args={"by": 1.0}))
    assert keep(make_group(1.0)) is True
    assert keep(make_group(0.5)) == "best reward 0.5"
    assert credit(make_group(1.0)) == (2.0,)


@pytest.mark.parametrize("make", [make_filter, make_credit])
def test_a_users_own_function_that_is_missing_is_named(make: object):
    with pytest.raises(ConfigError, match="no 'nothing'"):
        make(Use(use=f"{__name__}:nothing"))  # type: ignore[operator]


def test_a_wrong_argument_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match='did you mean "least"'):
        make_filter(Use(use=f"{__name__}:enough", args={"leest": 1.0}))
