"""Equal rewards have an advantage of exactly 0: losses count tokens by the sign of their advantage."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.algorithms.credit import make_credit
from astraflow.config import parse_config
from astraflow.dataflow.config import TableConfig
from astraflow.dataflow.core.tables import normalize_advantages
from astraflow.trainer.step import whiten
from astraflow.types.facts import GroupFacts, TrajectoryFacts
from drivers.zeroed_samples import Drawn, take

RELATIVE: tuple[dict[str, Any], ...] = (
    {"name": "group_relative"},
    {"name": "group_relative", "scale": "population_std"},
    {"name": "group_relative", "scale": "none"},
    {"name": "rloo"},
    {"name": "opo"},
    {"name": "max_rl"},
    {"name": "pass_at_k"},
    {"name": "role_balanced", "roles": ["a", "b"]},
    {"name": "reinforce_plus_plus", "baseline": "group"},
    {"name": "gdpo"},
    {"name": "turn_discount"},
    {"name": "gigpo"},
    {"name": "hierarchical", "heads": ["a"], "team_weight": 1.0},
)
REWARDS = (0.1, 0.3, 0.7, 0.2, 1 / 3, -1.7, 1e-3, 123456.7)


def make_trajectory(idx: int, reward: float, num_tokens: int) -> TrajectoryFacts:
    return TrajectoryFacts(
        episode_idx=idx,
        role="ab"[idx % 2],
        reward=reward,
        turn_rewards=(0.0,),
        turn_spans=((0, num_tokens),),
        num_tokens=num_tokens,
        num_trained_tokens=num_tokens,
        is_truncated=False,
        state_keys=(0,),
    )


def advantages(credit: dict[str, Any], group: GroupFacts) -> list[float]:
    table = parse_config({"credit": credit, "group_size": 64}, TableConfig)
    found = make_credit(table.credit)(group)
    return [float(value) for value in np.concatenate([np.atleast_1d(np.asarray(one)) for one in found])]


@pytest.mark.parametrize("credit", RELATIVE, ids=str)
def test_equal_rewards_teach_nothing_in_groups_of_any_size(credit: dict[str, Any]) -> None:
    for reward in REWARDS:
        for size in (2, 3, 5, 6, 7, 12, 13, 24, 48):
            group = GroupFacts("p", 0, tuple(make_trajectory(i, reward, 3 + i) for i in range(size)))
            assert advantages(credit, group) == [0.0] * size


@pytest.mark.parametrize("credit", RELATIVE, ids=str)
def test_rewards_that_differ_by_rounding_teach_nothing(credit: dict[str, Any]) -> None:
    as_float32 = float(np.float32(0.3))
    for own in (
        [0.3, 0.1 + 0.2, 0.6 / 2],
        [0.3, as_float32],
        [0.1 + 0.2 - 0.3, 0.0],
        [7e4, 7e4 * (1 + 1e-15)],
    ):
        group = GroupFacts("p", 0, tuple(make_trajectory(i, own[i % len(own)], 3 + i) for i in range(12)))
        assert advantages(credit, group) == [0.0] * 12


@settings(deadline=None, max_examples=60)
@given(st.floats(-1e4, 1e4), st.integers(2, 32), st.sampled_from(RELATIVE))
def test_forks_of_episodes_with_equal_rewards_teach_nothing(
    reward: float, size: int, credit: dict[str, Any]
) -> None:
    single = [make_trajectory(i, reward, 3 + i) for i in range(size)]
    forks = [replace(one, num_trained_tokens=7 * one.num_trained_tokens) for one in single]
    ordered = tuple(fork for pair in zip(single, forks, strict=True) for fork in pair)
    assert advantages(credit, GroupFacts("p", 0, ordered)) == [0.0] * (2 * size)


def test_small_but_real_differences_still_teach() -> None:
    group = GroupFacts("p", 0, tuple(make_trajectory(i, 0.5 + 1e-5 * (i // 2), 3) for i in range(4)))
    assert advantages({"name": "group_relative"}, group) == pytest.approx(
        [-0.620, -0.620, 0.620, 0.620], abs=0.05
    )


@pytest.mark.parametrize("size", [3, 7, 11])
def test_whitening_equal_advantages_leaves_exactly_0(size: int) -> None:
    table = parse_config({"group_size": 16, "credit": {"name": "reinforce_plus_plus"}}, TableConfig)
    groups = [[Drawn(i % 4, "solver", 0.7, (3 + i,), is_truncated=False) for i in range(size)]] * 2
    for group, _ in take(table, groups):
        assert [value for sample in group.samples for _, _, value in sample.advantages] == [0.0] * size
        assert group.advantage_sum == 0
    same = np.full(size, 0.7, dtype=np.float32)
    assert not whiten(same, among=same).any()


def test_normalizing_nothing_gives_nothing() -> None:
    assert normalize_advantages([], "whiten") == []
